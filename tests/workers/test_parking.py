"""Ranks hand unfinished samples to another instance, each its own part, with KV or without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parked_samples import PROMPT, TINY, generating_worker, shared, stored

from hybridrl.config import RolloutConfig, RolloutLayoutConfig
from hybridrl.flow.executor import Advanced, Command, Park, Parked, Resume, Sampling, Submit
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.turns import grown

pytestmark = pytest.mark.long

IDS = tuple(SampleId(0, k=k) for k in range(8))


def advance(worker: ActorWorker, commands: list[Command], steps: int) -> Advanced:
    return worker.advance(worker.generator.instance, commands, steps).value.event


def parked_state(events: tuple[Parked, ...]) -> tuple[Parked, int]:
    """The event of instance 0 with every place's references, as the driver merges it."""
    exported = [share[0] for share in shared(events) if share]
    state = {place: state for event in exported for place, state in event.state.items()}
    (ids,) = {event.ids for event in exported}
    return Parked(ids, exported[0].tokens, exported[0].version, state), len(exported)


def hand_over(model: str, folder: Path, tp: int, pp: int, with_kv: bool) -> dict[str, Any]:
    """All on instance 0; then again, parked after five steps, going on on instance 1."""
    layout = RolloutLayoutConfig(tp=tp, pp=pp)
    worker = generating_worker(model, folder, RolloutConfig(max_new_tokens=24, layout=layout))
    first = worker.generator.instance == 0
    submit: list[Command] = [Submit(IDS, PROMPT, Sampling(24))]
    if first:
        advance(worker, submit, 1000)
    wanted = stored(worker)
    worker.release(IDS)
    events: tuple[Parked, ...] = ()
    if first:
        assert advance(worker, submit, 5).running > 0
        # Under pp the call hands out what had its last token already.
        event = advance(worker, [Park(IDS, with_kv)], 1)
        assert event.running == 0
        events = event.parked
    parked, parts = parked_state(events)
    before = stored(worker)
    if first:
        worker.residency.release_idle_cache()
        assert not worker.generator.rollout.stats().has_cache
    else:
        done = advance(worker, [Resume(parked.ids, parked)], 1000)
        assert done.running == 0
        assert all(f.spans == (TokenSpan(0, f.response_tokens, 0),) for f in done.finished)
    stats = worker.generator.rollout.stats()
    again = stored(worker)
    worker.release(IDS)
    if first:  # and takes work again
        advance(worker, submit, 1000)
    return {
        "wanted": wanted, "before": before, "again": again, "third": stored(worker),
        "parts": parts, "parked": parked.ids, "restored": (first, stats.restored_tokens),
    }  # fmt: skip


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_another_instance_goes_on(
    tp: int, pp: int, with_kv: bool, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Tokens are equal; finished samples stay, unfinished ones are on the other instance."""
    model, folder = tmp_path / "model", tmp_path / "plane"
    make_tiny_model(model, TINY, seed=0)
    folder.mkdir()
    for result in ranks(2 * tp * pp, hand_over, str(model), folder, tp, pp, with_kv):
        assert result["parts"] == tp * pp
        assert result["wanted"].keys() == set(IDS)
        assert set(result["parked"]) == set(IDS) - result["before"].keys() != set()
        for run in ("again", "third"):
            assert result[run].keys() == set(IDS)
            for id, (tokens, log_probs) in result[run].items():
                assert tokens == result["wanted"][id][0]
                # Measured: 1e-6, between a prefill and decode steps.
                assert log_probs == pytest.approx(result["wanted"][id][1], abs=1e-5)
        first, restored = result["restored"]
        assert (restored > 0) == (with_kv and not first)


def test_spans_grow_by_version() -> None:
    first = grown((), 3, version=1)
    assert first == (TokenSpan(0, 3, 1),)
    assert grown(first, 3, version=2) == first  # nothing made since
    assert grown(first, 5, version=1) == (TokenSpan(0, 5, 1),)
    assert grown(first, 5, version=2) == (TokenSpan(0, 3, 1), TokenSpan(3, 5, 2))
