"""Responses that grow as arrays, against tokens that are appended to each request."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.kept_groups import Ints
from hybridrl.engines.rollout.kept_ids import KeptIds
from hybridrl.engines.rollout.requests import append_token, tokens_left
from hybridrl.engines.rollout.responses import _MOST, GrowingResponses
from hybridrl.engines.rollout.stage import DrawnTokens
from hybridrl.engines.rollout.stops import StopStrings

VOCAB = 5


def text_of(ids: object) -> str:
    return "".join("abcde"[id] for id in ids)  # type: ignore[attr-defined]


STOPS = StopStrings(text_of, ["ba", "cdc"])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """One that has made some tokens already, perhaps in an earlier turn."""
    num_before = draw(st.integers(0, 3))
    sampling = SamplingParams(
        num_before + draw(st.integers(1, 9)),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, VOCAB - 1), max_size=2))),
        min_new_tokens=draw(st.sampled_from([0, 0, 2])),
        max_turn_tokens=draw(st.sampled_from([0, 0, 3])),
        keeps_ids=draw(st.booleans()),
    )
    request = Request(
        0, [1], sampling, 0, response_ids=[0] * num_before, log_probs=[0.0] * num_before
    )
    request.turn_start = num_before
    request.rests_at = draw(st.sampled_from([0, 0, num_before + 2]))
    request.stops = draw(st.sampled_from([None, None, STOPS]))
    request.kept_ids = KeptIds([0] * num_before) if sampling.keeps_ids else None
    return request


def limits_of(batch: Sequence[Request]) -> Ints:
    return np.array([len(request.response_ids) + tokens_left(request) for request in batch])


@given(
    batch=st.lists(requests(), min_size=1, max_size=4),
    stops=st.sampled_from([None, None, STOPS]),
    data=st.data(),
)
def test_each_row_ends_with_the_token_that_ends_it(
    batch: list[Request], stops: StopStrings | None, data: st.DataObject
) -> None:
    """Rows that end leave the batch; requests may be asked for, and change places."""
    wanted = [request.copy() for request in batch]
    responses = GrowingResponses(batch, limits_of(batch), stops, data.draw(st.booleans()))
    for step in range(12):
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4))
        tokens = tokens[: len(batch)]
        log_probs, kept = np.float32([-0.1 * step - token for token in tokens]), None
        if any(request.kept_ids is not None for request in batch):
            kept = np.array([[token, -1] for token in tokens], np.int32)
        ids = [None] * len(batch) if kept is None else kept[:, :1]
        ends = [
            append_token(*row, stops)
            for row in zip(wanted, tokens, log_probs.tolist(), ids, strict=True)
        ]
        ended = responses.append(DrawnTokens(np.array(tokens), log_probs, kept))
        assert [(id(request), why) for request, why in ended] == [
            (id(request), why) for request, why in zip(batch, ends, strict=True) if why is not None
        ]
        if ended or data.draw(st.booleans()):
            responses.write()
            assert batch == wanted
        left = [row for row, why in enumerate(ends) if why is None]
        if not left:
            return
        if ended or data.draw(st.booleans()):
            left = data.draw(st.permutations(left))
            responses.take(left)
            batch, wanted = ([rows[row] for row in left] for rows in (batch, wanted))
    responses.write()
    assert batch == wanted


def test_a_long_response_is_written_now_and_then() -> None:
    length = 2 * _MOST + 3
    request = Request(0, [1], SamplingParams(length), 0)
    responses, finish = GrowingResponses([request], limits_of([request]), None), []
    written = []
    for token in range(length):
        drawn = DrawnTokens(np.array([token]), np.float32([-token]))
        finish += [why for _, why in responses.append(drawn)]
        written.append(len(request.response_ids))
    assert sorted(set(written)) == [0, _MOST, 2 * _MOST, length]
    assert request.response_ids == [*range(length)]
    assert request.log_probs == [-float(token) for token in range(length)]
    assert finish == ["length"]


def test_a_row_that_leaves_does_not_leave_short_arrays() -> None:
    """The rows that stay are written as seldom as if it had never been there."""
    batch = [Request(i, [1], SamplingParams(n), i) for i, n in enumerate((1, 9, 9))]
    growing = GrowingResponses(batch, limits_of(batch), None)
    drawn = DrawnTokens(np.zeros(3, np.int64), np.zeros(3, np.float32), None)
    assert [request.id for request, _ in growing.append(drawn)] == [0]
    growing.take([1, 2])
    drawn = DrawnTokens(np.zeros(2, np.int64), np.zeros(2, np.float32), None)
    for _ in range(2):
        assert growing.append(drawn) == []
    assert [len(request.response_ids) for request in batch] == [1, 1, 1]


def test_rows_change_places_between_steps() -> None:
    """Their tokens move with them, though the requests lack these."""
    batch = [Request(row, [1], SamplingParams(9), row) for row in range(3)]
    responses = GrowingResponses(batch, limits_of(batch), None)
    responses.append(DrawnTokens(np.array([0, 1, 2]), np.float32([0, -1, -2])))
    responses.take([2, 0])
    responses.append(DrawnTokens(np.array([4, 3]), np.float32([-4, -3])))
    responses.write()
    assert [request.response_ids for request in batch] == [[0, 3], [], [2, 4]]
    assert [request.log_probs for request in batch] == [[0, -3], [], [-2, -4]]
