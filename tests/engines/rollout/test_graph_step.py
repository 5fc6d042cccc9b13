"""The step of a fixed sequence of kernels against the engine's own, token for token."""

import importlib
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from triton_interpreter import interpret, needs_triton

from hybridrl.engines.rollout import memory
from hybridrl.engines.rollout.graph_step import GraphStep
from hybridrl.engines.rollout.interface import Output, Request
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.stage import RolloutStage
from hybridrl.kernels.decode_state import RUNNING, STOPPED, DecodeState
from hybridrl.models.shard import GenParallel

pytestmark = pytest.mark.long

FAMILIES = ("qwen3", "llama", "llama_biased", "mistral", "qwen2", "mixtral", "qwen3_moe")
LONGEST = 96
LONGEST_OF_MODEL = 4096


def state_of(engine: NativeEngine) -> DecodeState:
    """The engine's admitted sequences by slot, with blocks for all that they may become."""
    admission = engine._admission
    entries = [entry for lane in admission.lanes for entry in lane.entries]
    pages = admission.tables.shape[1]
    state = DecodeState.vacant(len(admission.tables), pages, 2, torch.device("cpu"))
    for entry in entries:
        request, slot = entry.request, entry.slot
        admission.extend(entry, request.sampling.max_new_tokens)
        tokens = entry.tokens()
        state.tokens[slot], state.lengths[slot] = tokens[-1], len(tokens) - 1
        state.counts[slot] = len(request.response_ids)
        state.limits[slot] = request.sampling.max_new_tokens
        for number, stop in enumerate(request.sampling.stop_token_ids):
            state.stops[slot, number] = stop
        state.streams[slot] = int(np.uint64(request.stream).view(np.int64))
        state.temperatures[slot] = request.sampling.temperature
        state.ended[slot] = RUNNING
    state.tables[:-1] = torch.from_numpy(admission.tables)
    return state


def graph_outputs(
    engine: NativeEngine, requests: list[Request], name: str
) -> dict[object, tuple[list[int], list[float], bool]]:
    """Tokens, log-probabilities and whether a stop token ended it, by the kernels of a module."""
    engine.submit(requests)
    cache = engine.take_cache()
    (lane,) = engine._admission.lanes
    with torch.inference_mode():
        engine._admit(lane)
        state = state_of(engine)
        kernels = importlib.import_module(f"hybridrl.kernels.{name}")
        step = GraphStep(engine._stage, cache, state, LONGEST, kernels)
        # Rows in an order of their own, and one of the spare slot.
        entries = lane.entries[::-1]
        slots = torch.tensor([entry.slot for entry in entries] + [len(state.ended) - 1]).int()
        drawn, padding = [], cache.blocks[:, 0].clone()
        while (state.ended == RUNNING).any():
            drawn.append(step(slots))
    outputs = {}
    for row, entry in enumerate(entries):
        taken = [(int(t[row]), float(p[row])) for t, p in drawn if t[row] >= 0]
        tokens, log_probs = ([x[i] for x in taken] for i in (0, 1))
        outputs[entry.request.id] = tokens, log_probs, bool(state.ended[entry.slot] == STOPPED)
    assert all(t[-1] == -1 for t, _ in drawn)
    assert torch.equal(cache.blocks[:, 0], padding), "what does not run writes nothing"
    return outputs


def interpreted(model: PreTrainedModel, requests: list[Request]) -> object:
    """`graph_outputs` in Triton's interpreter."""
    interpret()
    options = {"max_running": 8, "block_size": 4, "kv_cache_tokens": 0, "max_sequence": LONGEST}
    engine = NativeEngine(model.config, dtype=torch.float32, device=torch.device("cpu"), **options)
    engine.load_weights(model.state_dict().items())
    return graph_outputs(engine, requests, "decode_triton")


def check(outputs: object, wanted: dict[object, Output]) -> None:
    """Tokens and ends are equal, log-probabilities up to the order of float32 sums."""
    assert outputs.keys() == wanted.keys()
    for id_, (tokens, log_probs, stopped) in outputs.items():
        output = wanted[id_]
        assert tokens == output.token_ids
        assert log_probs == pytest.approx(output.log_probs, abs=1e-5)
        assert stopped == (output.finish == "stop")


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_the_engine(family, make_model, make_engine, finish, requests_of) -> None:
    model = make_model(family)
    requests = requests_of(12, temperature=0.8, stop_token_ids=(3, 17))
    requests[5].sampling = requests_of(1, temperature=0.0)[0].sampling
    wanted = finish(make_engine(model), deepcopy(requests))
    assert {output.finish for output in wanted.values()} == {"stop", "length"}
    check(graph_outputs(make_engine(model), requests, "decode_torch"), wanted)


@needs_triton
@pytest.mark.parametrize("family", ["qwen3", "mistral", "mixtral"])
def test_interpreted_steps_equal_the_engine(
    family, make_model, make_engine, finish, requests_of, fresh_ranks
) -> None:
    model = make_model(family)
    requests = requests_of(5, longest=12, temperature=0.8, stop_token_ids=(3, 17))
    wanted = finish(make_engine(model), deepcopy(requests))
    (outputs,) = fresh_ranks(1, interpreted, model, requests)
    check(outputs, wanted)


def test_other_families_are_refused(make_model, make_engine) -> None:
    engine = make_engine(make_model("qwen2_moe"))
    with pytest.raises(ValueError, match="qwen2_moe has no step of a fixed sequence"):
        GraphStep(engine._stage, engine.take_cache(), None, LONGEST, None)


class Operators(TorchDispatchMode):
    """Counts what a device would launch: operators that are no views and no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if (
            not function.is_view
            and name != "zero_"
            and not name.startswith(("empty", "new_empty", "_unsafe_view"))
        ):
            self.launched.append(name)
        return function(*args, **(kwargs or {}))


@needs_triton
@pytest.mark.parametrize(
    ("experts", "longest", "per_layer"),
    [(0, 512, 9), (0, LONGEST_OF_MODEL, 10), (8, LONGEST_OF_MODEL, 14)],
)
def test_a_layer_is_few_kernels_and_nothing_is_read(
    monkeypatch, experts, longest, per_layer
) -> None:
    """The Triton kernels are not run; a read of a value is an operator of its own."""
    from triton.runtime.jit import JITFunction

    from hybridrl.kernels import decode_triton

    cpu, launched = torch.device("cpu"), []

    def launch(self, *args, **_):
        launched.append(self.__name__)
        if self.__name__ == "_begin_kernel":
            args[5].zero_()  # tokens, that the embedding has

    monkeypatch.setattr(JITFunction, "run", launch)
    by_depth = []
    for layers in (2, 3):
        shape = {
            "vocab_size": 52, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16,
        }  # fmt: skip
        config = Qwen3Config(**shape)
        if experts:
            config = Qwen3MoeConfig(**shape, num_experts=experts, moe_intermediate_size=16)
        stage = RolloutStage(
            config, GenParallel(), dtype=torch.float32, device=cpu, max_sequence=longest
        )
        state = DecodeState.vacant(8, longest // 16, 2, cpu)
        step = GraphStep(stage, stage.make_cache(64, 16), state, longest, decode_triton)
        slots = torch.arange(8, dtype=torch.int32)
        with torch.inference_mode():
            step(slots)  # makes the table of rotations
            launched.clear()
            with Operators() as operators:
                tokens, log_probs = step(slots)
        assert tokens.shape == log_probs.shape == (8,)
        by_depth.append(len(launched) + len(operators.launched))
    assert by_depth[1] - by_depth[0] == per_layer, (launched, operators.launched)
    assert by_depth[0] - 2 * per_layer <= 8, "embedding, norm, head, begin, draw and advance"
    assert not {"_local_scalar_dense", "nonzero"} & set(operators.launched), "the host reads"


@needs_triton
def test_the_memory_plan_counts_the_kernels_parts() -> None:
    from hybridrl.kernels import paged_attention_triton

    assert memory.SPLIT == paged_attention_triton.SPLIT
