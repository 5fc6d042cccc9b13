"""An engine that decodes by graph steps against one that does not, token for token."""

import cProfile
import logging
import pstats
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from answered_turns import converse, converse_in_lockstep, converse_on_the_move
from transformers import PreTrainedModel
from triton_interpreter import interpret, needs_triton

from hybridrl.config import RolloutConfig
from hybridrl.engines.rollout import graph_decode
from hybridrl.engines.rollout.graph_capture import CapturedSteps, Step
from hybridrl.engines.rollout.graph_decode import GraphSettings, graph_settings
from hybridrl.engines.rollout.graph_step import GraphStep
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.stage import Drawn
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.kernels import decode_torch

FAMILIES = ("qwen3", "llama", "llama_biased", "mistral", "qwen2", "mixtral", "qwen3_moe")
BUCKETS = 1, 2, 5, 16
MOST = 4.0
"""Python calls of a generated token at 64 rows; a step by torch on a CPU may have 5."""
VOCAB = 52
Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]
Same = Callable[[dict[object, Output], dict[object, Output]], None]


@pytest.fixture
def make_graph_engine(make_engine: Make) -> Make:
    """An engine whose steps are those of a fixed sequence, by torch."""
    settings = GraphSettings(decode_torch, BUCKETS, captures=False)
    return lambda model, **changes: make_engine(model, graphs=settings, **changes)


def all_by_graph_steps(engine: NativeEngine) -> bool:
    """Whether the engine has made no other decode steps; a few may have had nobody in the end."""
    stats = engine.stats()
    return stats.graph_steps >= stats.decode_steps > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_running", [64, 7])
def test_tokens_are_those_of_other_steps(
    family: str, max_running: int, make_model: Callable[..., PreTrainedModel], make_engine: Make,
    make_graph_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """Rows join and leave, at several temperatures; seven rows at a time are many joins."""
    model = make_model(family)
    requests = requests_of(32, group=4, prefix=True, temperature=0.8, stop_token_ids=(3, 17))
    for request in requests[::5]:
        request.sampling = replace(request.sampling, temperature=0.0, stop_token_ids=())
    wanted = finish(make_engine(model), deepcopy(requests))
    assert {output.finish for output in wanted.values()} == {"stop", "length"}
    engine = make_graph_engine(model, max_running=max_running)
    same(finish(engine, requests), wanted)
    assert all_by_graph_steps(engine)
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert stats.decode_tokens == sum(len(output.token_ids) for output in wanted.values())


def interpreted(model: PreTrainedModel, requests: list[Request]) -> dict[object, Output]:
    """Outputs by the Triton kernels, in the interpreter."""
    interpret()
    from hybridrl.kernels import decode_triton

    engine = NativeEngine(
        model.config, dtype=torch.float32, device=torch.device("cpu"), max_running=3,
        block_size=4, kv_cache_tokens=0, max_sequence=96,
        graphs=GraphSettings(decode_triton, (1, 2, 4), captures=False),
    )  # fmt: skip
    engine.load_weights(model.state_dict().items())
    engine.submit(requests)
    outputs: dict[object, Output] = {}
    while engine.unfinished:
        outputs |= {output.id: output for output in engine.step()}
    assert all_by_graph_steps(engine)
    return outputs


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_interpreted_kernels_draw_them_too(
    family: str, make_model: Callable[..., PreTrainedModel], make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same, fresh_ranks: Callable[..., list[dict[object, Output]]],
) -> None:  # fmt: skip
    model = make_model(family)
    requests = requests_of(5, longest=12, temperature=0.8, stop_token_ids=(3, 17))
    (outputs,) = fresh_ranks(1, interpreted, model, deepcopy(requests))
    same(outputs, finish(make_engine(model), requests))


@pytest.mark.long
@pytest.mark.parametrize("prefix", [False, True])
def test_preemption(
    prefix: bool, model: PreTrainedModel, make_engine: Make, make_graph_engine: Make,
    finish: Finish, requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    requests = requests_of(24, group=4, prefix=prefix)
    wanted = finish(make_engine(model), deepcopy(requests))
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    engine = make_graph_engine(model, kv_cache_tokens=longest + 8)
    same(finish(engine, requests), wanted)
    stats = engine.stats()
    assert stats.num_preempted > 0
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert all_by_graph_steps(engine)


@pytest.mark.parametrize("seed", range(12))
def test_parked_at_any_time(
    seed: int, model: PreTrainedModel, make_engine: Make, make_graph_engine: Make,
    finish: Finish, requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """With or without keys and values, resumed in an engine of either kind, in any cache."""
    draw = random.Random(seed)
    requests = requests_of(12, group=3, prefix=True)
    wanted = finish(make_engine(model), deepcopy(requests))
    tokens = draw.choice([0, 64, 100])
    options = {"kv_cache_tokens": tokens, "max_running": 5}
    engines = [make_graph_engine(model, **options), make_engine(model, **options)]
    outputs: dict[object, Output] = {}
    engines[0].submit(requests)
    for _ in range(6):
        for engine in engines:
            for _ in range(draw.randint(0, 12)):
                outputs |= {output.id: output for output in engine.step()}
        ids = draw.sample(range(12), draw.randint(0, 12))
        with_kv = draw.random() < 0.5
        parked = [request for engine in engines for request in engine.park(ids, with_kv)]
        assert {request.id for request in parked} <= set(ids) - outputs.keys()
        engines[draw.randint(0, 1)].submit(parked)
    for engine in engines:
        outputs |= finish(engine)
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    same(outputs, wanted)


def test_parking_collects_what_is_underway(
    model: PreTrainedModel, make_graph_engine: Make, requests_of: RequestsOf
) -> None:
    """Two steps have drawn two tokens, of which a third step would have brought the second."""
    engine = make_graph_engine(model)
    engine.submit([replace(r, sampling=SamplingParams(9)) for r in requests_of(3)])
    for _ in range(2):
        engine.step()
    assert engine.stats().decode_tokens == 3
    assert [len(request.response_ids) for request in engine.park(range(3))] == [2, 2, 2]


def test_steps_are_launched_before_the_last_tokens_are_read(
    model: PreTrainedModel, make_graph_engine: Make, requests_of: RequestsOf, monkeypatch
) -> None:
    """No step is launched where the host knows that its rows have ended."""
    done = []
    wait, step = Drawn.wait, GraphStep.__call__
    monkeypatch.setattr(Drawn, "wait", lambda self: done.append("read") or wait(self))
    monkeypatch.setattr(
        GraphStep, "__call__", lambda self, x: done.append("launch") or step(self, x)
    )
    engine = make_graph_engine(model)
    engine.submit([replace(requests_of(1)[0], sampling=SamplingParams(3))])
    outputs = [engine.step() for _ in range(4)]
    assert done == ["launch", "launch", "read", "launch", "read", "read"]
    assert [len(finished) for finished in outputs] == [0, 0, 0, 1]


def test_stop_texts_end_rows_that_the_device_goes_on_with(
    model: PreTrainedModel, make_engine: Make, make_graph_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """The device does not know a ninth stop token, either."""
    stops = StopStrings(lambda ids: "".join(chr(97 + i % 26) for i in ids), ["ab", "q"])
    requests = requests_of(24, group=4, prefix=True, stop_token_ids=(51,) * 8 + (7, 8))
    wanted = finish(make_engine(model, stops=stops), deepcopy(requests))
    last = {output.token_ids[-1] for output in wanted.values() if output.finish == "stop"}
    assert last & {7, 8}
    assert last - {7, 8, 51}
    engine = make_graph_engine(model, stops=stops, max_running=5)
    same(finish(engine, requests), wanted)
    assert all_by_graph_steps(engine)


def test_batches_that_must_draw_otherwise_take_other_steps(
    model: PreTrainedModel, make_engine: Make, make_graph_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """While one row has top-k or penalties, the others wait for no graph; the log says it once."""
    requests = requests_of(30)
    requests[7].sampling = replace(requests[7].sampling, top_k=5)
    requests[20].sampling = replace(requests[20].sampling, repetition_penalty=1.2)
    wanted = finish(make_engine(model), deepcopy(requests))
    engine = make_graph_engine(model, max_running=4)
    with caplog.at_level(logging.INFO):
        same(finish(engine, requests), wanted)
    stats = engine.stats()
    assert 0 < stats.graph_steps < stats.decode_steps
    said = [record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()]
    assert said == [
        "a batch decodes without a CUDA graph: it has top_k, top_p or min_p",
        "a batch decodes without a CUDA graph: it has penalties, min_new_tokens, logit_bias or "
        "bad_words",
    ]


@pytest.mark.long
def test_other_weights_and_another_cache(
    make_model: Callable[..., PreTrainedModel], make_engine: Make, make_graph_engine: Make,
    finish: Finish, requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """What depends on their addresses is made anew after each sleep."""
    old, new = make_model("qwen3"), make_model("qwen3")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    engine = make_graph_engine(old)
    for weights in (old, new, old):
        engine.load_weights(weights.state_dict().items())
        same(finish(engine, requests_of(9)), finish(make_engine(weights), requests_of(9)))
        engine.sleep(keep_weights=True)
        same(finish(engine, requests_of(5)), finish(make_engine(weights), requests_of(5)))
        engine.sleep()
    assert all_by_graph_steps(engine)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3", {}, "model type gemma3_text has no step of a fixed sequence"),
        ("qwen2_moe", {}, "model type qwen2_moe has no step of a fixed sequence"),
        ("qwen3", {"deterministic": True}, "deterministic: a sample decodes alone"),
    ],
)
def test_engines_without_graph_steps_say_why(
    family: str, changes: dict[str, bool], reason: str,
    make_model: Callable[..., PreTrainedModel], make_graph_engine: Make, finish: Finish,
    requests_of: RequestsOf, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO):
        engine = make_graph_engine(make_model(family), **changes)
    assert f"decode steps are no CUDA graphs: {reason}" in caplog.text
    assert len(finish(engine, requests_of(3))) == 3
    assert engine.stats().graph_steps == 0


def conversations(num: int) -> list[Request]:
    """Conversations of 60 tokens in turns of at most 9, three of a prompt."""
    sampling = SamplingParams(60, max_turn_tokens=9, stop_token_ids=(3, 7, 20, 41))
    return [
        Request(i, [5, 8 + i // 3, 11], sampling, stream_key(1, i // 3, k=i % 3), i // 3)
        for i in range(num)
    ]


@pytest.mark.parametrize("tokens", [0, 84, 120])
@pytest.mark.parametrize("lockstep", [False, True])
def test_turns(
    tokens: int, lockstep: bool, model: PreTrainedModel, make_engine: Make, make_graph_engine: Make
) -> None:
    """Replies come later or at once; held ones lose their blocks, or the cache goes meanwhile."""
    wanted = converse(make_engine(model), conversations(8), VOCAB)
    engine = make_graph_engine(model, max_running=3, kv_cache_tokens=tokens)
    if lockstep:
        outputs = converse_in_lockstep(engine, conversations(8), VOCAB)
    else:
        outputs = converse(engine, conversations(8), VOCAB, lambda turn: sum(turn.token_ids) % 7)
    assert {id: output.turns for id, output in outputs.items()} == {
        id: output.turns for id, output in wanted.items()
    }
    assert {turn.finish for o in outputs.values() for turn in o.turns} == {"stop", "length"}
    for id, output in outputs.items():
        assert output.token_ids == wanted[id].token_ids
        assert output.log_probs == pytest.approx(wanted[id].log_probs, abs=1e-5)
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert all_by_graph_steps(engine)


@pytest.mark.parametrize("with_kv", [False, True])
def test_turns_on_the_move(
    with_kv: bool, model: PreTrainedModel, make_engine: Make, make_graph_engine: Make
) -> None:
    """Parked while it runs, while it is held, and between the reply and its first pass."""
    wanted = converse(make_engine(model), conversations(6), VOCAB)
    engines = make_graph_engine(model), make_graph_engine(model)
    outputs, moved = converse_on_the_move(engines, conversations(6), VOCAB, with_kv)
    assert min(moved.values()) > 0
    assert {i: o.token_ids for i, o in outputs.items()} == {
        i: o.token_ids for i, o in wanted.items()
    }
    for engine in engines:
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


def test_blocks_are_given_ahead(
    model: PreTrainedModel, make_graph_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of all lengths make the host give blocks once in a block's steps, not at each step."""
    engine = make_graph_engine(model, block_size=8)
    grown = []
    grow = engine._admission.grow
    monkeypatch.setattr(engine._admission, "grow", lambda *a, **k: grown.append(1) or grow(*a, **k))
    prompts = [[5] * (1 + number) for number in range(16)]
    engine.submit([Request(i, p, SamplingParams(64), i) for i, p in enumerate(prompts)])
    while engine.unfinished:
        engine.step()
    assert len(grown) <= 64 // 8 + 1


@needs_triton
@pytest.mark.parametrize(
    ("device", "buckets", "capability", "has_graphs"),
    [
        ("cuda", [8, 1, 2], (9, 0), True),
        ("cuda", [8], (7, 5), False),
        ("cuda", [], (9, 0), False),
        ("cpu", [8], (9, 0), False),
    ],
)
def test_which_devices_have_graph_steps(
    device: str, buckets: list[int], capability: tuple[int, int], has_graphs: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    rollout = RolloutConfig(graph_buckets=buckets)
    with caplog.at_level(logging.INFO):
        settings = graph_settings(SimpleNamespace(rollout=rollout, device=torch.device(device)))  # type: ignore[arg-type]
    assert ("want Triton and an Ampere GPU" in caplog.text) == (capability == (7, 5))
    assert (settings is not None) == has_graphs
    if settings is not None:
        assert (settings.buckets, settings.captures) == ((1, 2, 8), True)


class Replayed:
    """In place of a CUDA graph: a replay computes the step over its slots into its results."""

    captured: list[int]

    def __init__(self, step: GraphStep, slots: torch.Tensor) -> None:
        self._step, self._slots = step, slots
        self.drawn = step(slots)
        self.captured.append(len(slots))

    def replay(self) -> None:
        for result, drawn in zip(self.drawn, self._step(self._slots), strict=True):
            result.copy_(drawn)


def test_graphs_are_captured_once_and_read_their_own_slots(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each bucket once, until the engine sleeps; more rows than the largest have no graph."""

    def captured(steps: CapturedSteps, rows: int) -> tuple[Replayed, Step]:
        steps._slots.fill_(steps._spare)
        graph = Replayed(steps._step, steps._slots[:rows])
        return graph, graph.drawn

    class Copied(Drawn):
        """Copies what was drawn, as a device does: the next replay overwrites it."""

        def __init__(self, tokens: torch.Tensor, values: list[torch.Tensor]) -> None:
            super().__init__(tokens, [value.clone() for value in values])

    monkeypatch.setattr(Replayed, "captured", [], raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", tuple)
    monkeypatch.setattr(CapturedSteps, "_captured", captured)
    monkeypatch.setattr(graph_decode, "Drawn", Copied)
    settings = GraphSettings(decode_torch, (1, 2, 5), captures=True)
    requests = requests_of(24, group=4, prefix=True, stop_token_ids=(3, 17))
    wanted = finish(make_engine(model), deepcopy(requests))
    engine = make_engine(model, graphs=settings, max_running=7)
    for number in (1, 2):
        same(finish(engine, deepcopy(requests)), wanted)
        assert sorted(Replayed.captured) == sorted([1, 2, 5] * number)
        assert engine.stats().graph_captures == 3 * number
        engine.sleep()
        engine.load_weights(model.state_dict().items())
    assert all_by_graph_steps(engine)


def test_a_token_costs_few_calls(
    make_model: Callable[..., PreTrainedModel], make_graph_engine: Make
) -> None:
    """The engine's own Python, without the step's, which a graph replays; see `MOST`."""
    engine = make_graph_engine(make_model("qwen3"), block_size=16)
    prompts = [[number] * (12 + number) for number in range(8)]
    requests = [
        Request(row, prompts[row // 8], SamplingParams(64), row, prefix=row // 8)
        for row in range(64)
    ]
    with cProfile.Profile() as profile:
        engine.submit(requests)
        while engine.unfinished:
            engine.step()
    room = f"{Path(graph_decode.__file__).parent}/"
    replayed = ("graph_step.py", "decode.py", "sampling.py")
    calls = sum(
        row[1]
        for (file, _, _), row in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        if file.startswith(room) and not file.endswith(replayed)
    )
    assert 64 < calls <= MOST * 64 * 64
