"""The step of a fixed sequence of kernels against the engine's own, token for token."""

import importlib
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from triton_interpreter import interpret, needs_triton

from hybridrl.engines.rollout.graph_step import GraphStep
from hybridrl.engines.rollout.interface import Output, Request
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.kernels.decode_state import RUNNING, STOPPED, DecodeState

FAMILIES = ("qwen3", "llama", "llama_biased", "mistral", "qwen2")
LONGEST = 96


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
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_interpreted_steps_equal_the_engine(
    family, make_model, make_engine, finish, requests_of, fresh_ranks
) -> None:
    model = make_model(family)
    requests = requests_of(5, longest=12, temperature=0.8, stop_token_ids=(3, 17))
    wanted = finish(make_engine(model), deepcopy(requests))
    (outputs,) = fresh_ranks(1, interpreted, model, requests)
    check(outputs, wanted)


def test_experts_are_refused(make_model, make_engine) -> None:
    engine = make_engine(make_model("mixtral"))
    with pytest.raises(ValueError, match="mixtral has no step of a fixed sequence"):
        GraphStep(engine._stage, engine.take_cache(), None, LONGEST, None)
