"""Predicted lengths, and the dealing of samples to instances."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.flow.lengths import (
    Forecast,
    LengthRanker,
    PromptKey,
    dispatch,
    leveled,
)


def test_a_prompt_that_was_seen_is_expected_to_take_what_it_took() -> None:
    ranker = LengthRanker()
    keys = [PromptKey(i, "all alike", [1, 2, 3]) for i in range(64)]
    for key in keys:
        ranker.observe(key, [200 if key.item == 7 else 10] * 16)
    predicted = ranker.predict(keys)
    assert max(range(64), key=predicted.__getitem__) == 7
    assert predicted[7] > 150
    assert predicted[8] < 25


def test_what_is_not_known_is_what_is_known_of_more() -> None:
    ranker = LengthRanker()
    new = PromptKey("new", "a", [0] * 20)
    assert ranker.predict([new]) == [20]
    for i in range(100):
        ranker.observe(PromptKey(i, "b", [0]), [1000] * 10)
    assert ranker.predict([new])[0] == pytest.approx(1000, rel=0.01)
    for i in range(100):
        ranker.observe(PromptKey(i, "a", [0]), [100] * 10)
    assert ranker.predict([new])[0] == pytest.approx(100, rel=0.01)
    ranker.observe(new, [10] * 8)
    assert ranker.predict([new])[0] == pytest.approx(28, rel=0.05)


def test_means_follow_a_policy_that_changes() -> None:
    ranker = LengthRanker()
    key = PromptKey("x", "a", [0])
    for length in [10] * 200 + [500] * 100:
        ranker.observe(key, [length])
    assert ranker.predict([key])[0] > 400


def test_prompts_seen_longest_ago_are_forgotten() -> None:
    ranker = LengthRanker(max_items=2)
    for item in ("a", "b", "a", "c"):
        ranker.observe(PromptKey(item, "t", [0]), [10])
    assert [name for name, *_ in ranker.state_dict()["items"]] == ["'a'", "'c'"]


keys_of = st.builds(
    PromptKey,
    item=st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.text())),
    task=st.sampled_from(["a", "b", ""]),
    prompt_ids=st.lists(st.integers(0, 10**6), max_size=12),
)
observed = st.lists(st.tuples(keys_of, st.lists(st.integers(0, 10**6), max_size=4)), max_size=60)


@settings(max_examples=40)
@given(seen=observed, more=observed, asked=st.lists(keys_of, max_size=5))
def test_predictions_are_positive_and_the_same_after_a_resume(
    seen: list[tuple[PromptKey, list[int]]],
    more: list[tuple[PromptKey, list[int]]],
    asked: list[PromptKey],
) -> None:
    ranker, resumed = LengthRanker(), LengthRanker()
    for key, lengths in seen:
        ranker.observe(key, lengths)
    ranker.predict(asked)
    resumed.load_state_dict(json.loads(json.dumps(ranker.state_dict())))
    for key, lengths in more:
        ranker.observe(key, lengths)
        resumed.observe(key, lengths)
    predicted = ranker.predict(asked)
    assert len(predicted) == len(asked)
    assert all(0 < x <= 2e6 for x in predicted)
    assert predicted == resumed.predict(asked)
    of_earlier = {"running": ranker.state_dict(), "seen": [], "num_new": 0, "weights": None}
    resumed = LengthRanker()
    resumed.load_state_dict(of_earlier)  # with a regression, which such means had a part in
    assert predicted == resumed.predict(asked)


def test_a_forecast_keeps_the_tail_and_forgets_old_steps() -> None:
    forecast = Forecast(num_steps=2)
    assert forecast.sample(5) == []
    forecast.add([10**6])
    forecast.add([4, 1, 3, 2, 100])
    forecast.add([8, 5, 7, 6, 200])
    assert forecast.sample(5) == [3, 4, 5, 6, 150]
    assert forecast.sample(1) == [150]
    assert forecast.sample(10) == [3, 3, 4, 4, 5, 5, 6, 6, 150, 150]
    assert forecast.sample(0) == []
    resumed = Forecast(num_steps=2)
    resumed.load_state_dict(json.loads(json.dumps(forecast.state_dict())))
    assert resumed.sample(100) == forecast.sample(100)
    resumed.load_state_dict({"steps": [[1, 2, 3]]})  # an older one
    assert resumed.waits(2) == [[0.0, 0.0]]


def test_a_forecast_keeps_samples_in_the_order_of_their_ends():
    """The last one is not the longest, but waits."""
    forecast = Forecast()
    forecast.add([30, 5, 20, 10], [0.0, 1.0, 2.0, 9.0])
    assert forecast.steps(2) == [[5, 10]]
    assert forecast.waits(2) == [[1.0, 9.0]]
    assert forecast.last == ([30, 5, 20, 10], [0.0, 1.0, 2.0, 9.0])
    again = Forecast()
    again.load_state_dict(json.loads(json.dumps(forecast.state_dict())))
    assert (again.steps(4), again.waits(4)) == (forecast.steps(4), forecast.waits(4))


@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=50), num=st.integers(1, 200))
def test_a_forecast_is_sorted_and_of_lengths_that_were_seen(lengths: list[int], num: int) -> None:
    forecast = Forecast()
    forecast.add(lengths)
    drawn = forecast.sample(num)
    assert drawn == sorted(drawn)
    assert len(drawn) == num
    assert set(drawn) <= set(lengths)
    assert drawn[-1] == max(lengths)
    assert forecast.sample(len(lengths)) == sorted(lengths)


# -- dispatch --------------------------------------------------------------------------------


@given(
    predicted=st.lists(st.floats(0, 1e6), max_size=40),
    rooms=st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_every_sample_is_dealt_or_queued_once(predicted: list[float], rooms: list[int]) -> None:
    dealt, queued = dispatch(predicted, len(rooms), rooms)
    assert sorted([i for each in dealt for i in each] + queued) == list(range(len(predicted)))
    assert all(len(each) <= room for each, room in zip(dealt, rooms, strict=True))
    assert len(queued) == max(0, len(predicted) - sum(rooms))
    for order in (*dealt, queued):
        assert order == sorted(order, key=lambda i: (-predicted[i], i)), "longest first"
    if queued:
        shortest = min((predicted[i] for each in dealt for i in each), default=1e6)
        assert all(predicted[i] <= shortest for i in queued)


@settings(max_examples=40)
@given(
    tokens=st.lists(st.integers(1, 100), min_size=1, max_size=8), num_instances=st.integers(1, 3)
)
def test_the_fullest_instance_is_within_graham_s_bound(
    tokens: list[int], num_instances: int
) -> None:
    dealt, _ = dispatch(tokens, num_instances, room=len(tokens))
    fullest = max(sum(tokens[i] for i in each) for each in dealt)
    least = min(
        max(
            sum(t for t, to in zip(tokens, where, strict=True) if to == instance)
            for instance in range(num_instances)
        )
        for where in product(range(num_instances), repeat=len(tokens))
    )
    assert fullest <= (4 / 3 - 1 / (3 * num_instances)) * least + 1e-9


def test_small_differences_between_predictions_are_none() -> None:
    """Dealt by them, samples would be shuffled: where nothing is known, it is as `serial` deals."""
    assert leveled([102.0, 98.0, 100.0]) == [100.0, 100.0, 100.0]
    assert leveled([102.0, 98.0, 130.0]) == [102.0, 98.0, 130.0]
    assert leveled([]) == []
    assert dispatch(leveled([101.0, 103.0, 102.0, 104.0]), 2, 4) == ([[0, 2], [1, 3]], [])


def test_ties_go_by_index_and_loads_count() -> None:
    assert dispatch([5, 9, 4, 4], 2, 4) == ([[1, 3], [0, 2]], [])
    assert dispatch([1, 1, 1], 2, 1) == ([[0], [1]], [2])
    assert dispatch([1, 1, 1], 2, 4, loads=[10, 0]) == ([[], [0, 1, 2]], [])
