"""Timed passes: every micro-batch of this rank's chunks once, with its sizes and seconds."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_engines import SIZES, make_engine
from surrogate_loss import Surrogate

from hybridrl.engines.train.interface import TrainSequence
from hybridrl.pipelines.problem import PassKind

LENGTHS = (7, 12, 18)


def timed(path, layout, schedule, enabled=True):
    """The passes of a forward-only call and of an update, and the seconds of both calls."""
    engine = make_engine(path, layout, schedule=schedule)
    engine.clock.enabled = enabled
    fields = {"advantages": 1.0, "old_log_probs": -torch.ones(3)}
    sequences = [TrainSequence(torch.arange(n) % 41, 3, fields, None) for n in LENGTHS]
    mine = sequences if dist.get_rank() == 0 else []
    engine.log_probs(mine)
    scored = engine.clock.take()
    engine.update(mine, Surrogate())
    return scored, engine.clock.take()


@pytest.fixture(scope="module")
def path(tiny: Callable[..., str]) -> str:
    """A tied Qwen3 of four layers."""
    return tiny("qwen3", **SIZES)


def sizes(passes):
    """Tokens, scored tokens and pairs of all rows together, by chunk."""
    return {
        (kind, chunk): tuple(
            sum(each[place] for each in passes if (each.kind, each.chunk) == (kind, chunk))
            for place in (2, 3, 4)
        )
        for kind, chunk in {(each.kind, each.chunk) for each in passes}
    }


# 3 scored tokens of each; a sequence of n has n (n + 1) / 2 pairs: 28 + 78 + 171.
ALL = (37, 9, 277)


def test_a_model_on_one_rank(ranks, path):
    ((scored, updated),) = ranks(1, timed, path, (1, 1, 1, 1), "one_f_one_b")
    assert sizes(scored) == {(PassKind.forward, 0): ALL}
    assert sizes(updated) == {(PassKind.forward, 0): ALL, (PassKind.backward, 0): ALL}
    assert len(updated) == 2 * len(scored) >= 4
    assert all(0 < each.seconds < 60 for each in (*scored, *updated))


def test_none_is_timed_unless_asked(ranks, path):
    assert ranks(1, timed, path, (1, 1, 1, 1), "one_f_one_b", False) == [((), ())]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_pipelines(ranks, path, schedule):
    """Each rank its chunks. The first chunk has a whole backward pass, others may have halves."""
    results = ranks(2, timed, path, (2, 1, 1, 1), schedule)
    halves = schedule == "zero_bubble"
    chunks = [(0, 3), (1, 2)] if halves else [(0,), (1,)]
    for (scored, updated), own in zip(results, chunks, strict=True):
        assert {each.chunk for each in scored} == set(own)
        assert all(each.kind is PassKind.forward for each in scored)
        for chunk in own:
            number = Counter(each.kind for each in updated if each.chunk == chunk)
            kinds = {PassKind.forward, PassKind.backward}
            if halves and chunk:
                kinds = {PassKind.forward, PassKind.backward_input, PassKind.backward_weights}
            assert set(number) == kinds
            assert len(set(number.values())) == 1
            for kind in kinds:
                tokens, scored_tokens, pairs = sizes(updated)[kind, chunk]
                assert (scored_tokens, pairs) >= ALL[1:]
                assert tokens >= ALL[0]
        assert all(0 < each.seconds < 60 for each in (*scored, *updated))
