"""Prompts that training shards score, as with vLLM: on ranks that compute nothing."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_ranks import SERVED, FakeRanks, answered, taken, turns_of, work_all

from hybridrl.serving import prompt_scores
from hybridrl.serving.loop import Turns
from hybridrl.serving.payloads import read_sampling
from hybridrl.serving.requests import (
    CreateModel,
    Datum,
    DropSamples,
    ForwardBackward,
    OptimStep,
    Refused,
    SampleRequest,
    Samples,
    SampleSettings,
    Save,
)

PROMPT = np.array([4, 5, 6], np.int32)
PATHS = [f"tinker://a/sampler_weights/{name}" for name in "xy"]


@pytest.fixture
def loop(tmp_path: Path) -> Turns:
    """A loop with a model and two snapshots of it, of the versions 1 and 2."""
    turns = turns_of(FakeRanks(), tmp_path, replace(SERVED, sampler_scores=False))
    answered(turns, CreateModel("a"))
    for name in "xy":
        answered(turns, Save("a", name, "sampler_weights", files=False))
    _ranks(turns).asked.clear()
    return turns


def _ranks(turns: Turns) -> FakeRanks:
    ranks: Any = turns.ranks
    return ranks  # type: ignore[no-any-return]


def scored(path: str | None, session: str = "s", **more: Any) -> SampleRequest:
    """A request for a sample, and for the log-probabilities of its prompt."""
    settings = SampleSettings(max_tokens=4)
    return SampleRequest(path, PROMPT, 1, settings, (0, 0), session, prompt_logprobs=True, **more)


def test_next_and_named_tokens_are_the_targets_of_a_forward_pass(loop: Turns) -> None:
    """The fake ranks' log-probability of a target is the token's number plus 1."""
    named = np.array([[7, -1], [0, 9]], np.int32)
    both, plain = (taken(loop, scored(PATHS[0], **more)) for more in ({"named": named}, {}))
    work_all(loop)
    for future in (both, plain):
        samples = future.result(0)
        assert isinstance(samples, Samples)
        np.testing.assert_array_equal(samples.prompt_logprobs, np.float32([np.nan, 6, 7]))
        assert samples.named is None or samples.named.tolist() == [[8, 0], [1, 10]]


def test_prompts_of_a_snapshot_are_scored_together_before_it_generates(loop: Turns) -> None:
    """In turn with training, and where their snapshot has to be read first."""
    waiting = [taken(loop, scored(path)) for path in (PATHS[0], PATHS[1], PATHS[0], None)]
    step = taken(loop, OptimStep("a", 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))
    bare = taken(loop, replace(scored(PATHS[0]), prompt_logprobs=False))
    work_all(loop)
    assert all(future.result(0) for future in (*waiting, bare))
    with pytest.raises(Refused, match="no gradient"):
        step.result(0)
    assert [call for call in _ranks(loop).asked if call[0] in CALLS] == [
        ("add_gradient", 1, 2),
        ("add_gradient", 2, 1),
        ("read_snapshot", 3, None),
        ("add_gradient", 3, 1),
        ("generate_with", 1),
        ("generate_with", 2),
        ("generate_with", 3),
    ]
    assert not loop._since


CALLS = "add_gradient", "generate_with", "read_snapshot"


def test_a_call_has_prompts_of_one_width_and_few_enough_targets(
    loop: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 18 targets a rank: six tokens beside two named ones, or 18 tokens of plain prompts.

    One wide prompt is scored alone, and a step that waits has its turn before the rest.
    """
    monkeypatch.setattr(prompt_scores, "TARGETS_A_CALL", 18)
    _ranks(loop).answers["step_model"] = {"bad_step": 0.0, "grad_norm": 2.0, "lr": 0.1}
    datum = Datum(PROMPT, PROMPT, {"weights": np.ones(3, np.float32)})
    answered(loop, ForwardBackward("a", (datum,), "cross_entropy", {}, True))
    _ranks(loop).asked.clear()
    widths = [0, 2, 0, 0, 9, 1, 2, 0, 0, 0, 0]
    waiting = [taken(loop, scored(PATHS[0], named=_named(width))) for width in widths]
    step = taken(loop, OptimStep("a", 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0))
    late = taken(loop, scored(PATHS[0], named=_named(1)))
    work_all(loop)
    assert all(future.result(0) for future in (*waiting, step, late))
    asked = [call for call in _ranks(loop).asked if call[0] in ("add_gradient", "step_model")]
    numbers = [call[2] if call[0] == "add_gradient" else "step" for call in asked]
    assert numbers == [6, 1, 1, 2, 1, "step", 1]


def _named(width: int) -> np.ndarray | None:
    """Named tokens for `PROMPT`; None for a width of 0."""
    return np.zeros((len(PROMPT) - 1, width), np.int32) if width else None


def test_a_snapshot_whose_prompts_wait_does_not_generate(loop: Turns) -> None:
    """Another request has nothing left to draw: the ranks go to TRAIN without patience."""
    drawn = taken(loop, replace(scored(PATHS[0]), prompt_logprobs=False))
    loop.work()
    waiting = taken(loop, scored(PATHS[0]))
    assert drawn.result(0)
    loop.work()
    assert _ranks(loop).called("train")
    assert not waiting.done()
    loop.work()
    assert waiting.result(0)


def test_a_snapshot_that_cannot_be_read_refuses_its_prompts_and_no_others(loop: Turns) -> None:
    _ranks(loop).answers["read_snapshot"] = "no such file"
    refused, other = taken(loop, scored(None)), taken(loop, scored(PATHS[0]))
    work_all(loop)
    with pytest.raises(Refused, match=r"^the base model cannot be read: no such file$"):
        refused.result(0)
    assert other.result(0)


def test_prompts_go_with_their_session(loop: Turns) -> None:
    left = taken(loop, scored(PATHS[0]))
    other = taken(loop, scored(PATHS[0], session="other"))
    dropped: Future[Any] = taken(loop, DropSamples("s", "finished"))
    assert {*loop.open()} == {left, other, dropped}
    work_all(loop)
    with pytest.raises(Refused, match=r"^session s: finished$"):
        left.result(0)
    assert other.result(0)
    assert _ranks(loop).called("add_gradient") == [[1, 1]]


def test_a_rank_that_dies_leaves_no_prompt_without_an_answer(
    loop: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any) -> None:
        raise OSError("a rank has died")

    monkeypatch.setattr(_ranks(loop), "add_gradient", die)
    waiting = taken(loop, scored(PATHS[0]))
    with pytest.raises(OSError, match="died"):
        loop.work()
    assert [*loop.open()] == [waiting]


@pytest.mark.parametrize("name", ["topk_prompt_logprobs", "topk_sample_logprobs"])
def test_likeliest_tokens_are_refused(name: str) -> None:
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}}
    unable = replace(SERVED, sampler_scores=False)
    read_sampling({**body, name: 0}, None, (0, 0), "s", unable)
    read_sampling({**body, name: 1}, None, (0, 0), "s", SERVED)
    with pytest.raises(Refused, match=f"^{name}=1: wanted 0; a server with rollout=native gives"):
        read_sampling({**body, name: 1}, None, (0, 0), "s", unable)
