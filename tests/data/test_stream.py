"""The endless stream: epochs, mixtures, resuming."""

import itertools
import json
from collections import Counter

import pytest

from hybridrl.data import Item, PromptStream


def items(**sizes: int) -> list[Item]:
    return [
        Item(f"{name}{n}", (n,), "", (), name, {})
        for name, size in sizes.items()
        for n in range(size)
    ]


def take(stream: PromptStream, count: int) -> list[str]:
    return [item.prompt for _, item in itertools.islice(stream, count)]


def test_every_epoch_is_a_shuffle_of_its_own() -> None:
    stream = PromptStream(items(a=20), seed=0)
    epochs = [take(stream, 20) for _ in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert take(PromptStream(items(a=20), seed=0), 20) == epochs[0]
    assert take(PromptStream(items(a=20), seed=1), 20) != epochs[0]


def test_positions_count_from_zero() -> None:
    stream = PromptStream(items(a=3), seed=0)
    assert [position for position, _ in itertools.islice(stream, 7)] == list(range(7))
    assert stream.position == 7


@pytest.mark.parametrize("sizes", [{"a": 7}, {"a": 7, "b": 3, "c": 11}])
def test_seek_resumes_exactly(sizes: dict[str, int]) -> None:
    weights = dict(zip(sizes, (3.0, 1.0, 2.5), strict=False))
    expected = take(PromptStream(items(**sizes), 5, weights), 60)
    for position in (0, 1, 13, 59):
        stream = PromptStream(items(**sizes), 5, weights)
        take(stream, 21)
        stream.seek(position)
        assert stream.position == position
        assert take(stream, 60 - position) == expected[position:]
    with pytest.raises(ValueError, match="position -1"):
        stream.seek(-1)


def test_weights_hold_over_every_stretch() -> None:
    weights = {"a": 5.0, "b": 1.0, "c": 2.0}
    prompts = take(PromptStream(items(a=9, b=2, c=40), 0, weights), 800)
    for count in range(1, 801):
        counts = Counter(prompt[0] for prompt in prompts[:count])
        for name, weight in weights.items():
            assert abs(counts[name] - count * weight / 8) < len(weights)
    assert Counter(prompt[0] for prompt in prompts) == {"a": 500, "b": 100, "c": 200}
    spread = Counter(prompts)
    assert max(spread[f"b{n}"] for n in range(2)) == 50  # a small source goes round more often


def test_without_weights_the_sizes_decide() -> None:
    prompts = take(PromptStream(items(a=30, b=10), 0), 40)
    assert sorted(prompts) == sorted(item.prompt for item in items(a=30, b=10))


def test_no_items() -> None:
    with pytest.raises(ValueError, match="at least one item"):
        PromptStream([], 0)


def test_a_source_that_has_grown_keeps_what_it_drew_and_begins_an_epoch_of_all() -> None:
    small, large = items(a=7, b=3), items(a=7, b=3) + items(a=12)[7:]
    weights = {"a": 2.0, "b": 1.0}
    before = PromptStream(small, 5, weights)
    drawn = take(before, 15)  # ten of a: three of its second epoch
    after = PromptStream(large, 5, weights)
    after.resume(15, json.loads(json.dumps(before.sizes)))
    assert [after.at(position).prompt for position in range(15)] == drawn
    rest = [prompt for prompt in take(after, 36) if prompt.startswith("a")]
    assert sorted(rest[:12]) == sorted(rest[12:]) == sorted(f"a{n}" for n in range(12))
    # a checkpoint from then
    again = PromptStream(large, 5, weights)
    again.resume(40, json.loads(json.dumps(after.sizes)))
    assert [again.at(position).prompt for position in range(60)] == [
        after.at(position).prompt for position in range(60)
    ]
    # as one of an earlier version, which has no sizes
    same = PromptStream(small, 5, weights)
    same.resume(15, {})
    assert take(same, 9) == take(before, 9)
