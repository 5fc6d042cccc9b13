"""Pools by solve rate: who rests, for how long, and what a resumed stream draws."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable

import pytest

from hybridrl.config import ConfigError, CurriculumConfig
from hybridrl.data import CurriculumStream, Item, PromptStream

PROMPTS_PER_STEP = 4
RESTS = CurriculumConfig(easy_rest=3, hard_rest=1)


def items(**sizes: int) -> list[Item]:
    return [
        Item(f"{name}{n}", (n,), "", (), name, {})
        for name, size in sizes.items()
        for n in range(size)
    ]


def solved(prompt: str) -> list[float]:
    """Two of four prompts are always solved, one never, and one in half of its samples."""
    return {0: [1.0, 1.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}.get(int(prompt[1:]) % 4, [0.0, 1.0])


def steps(
    stream: PromptStream, num: int, rewards: Callable[[str], list[float]] = solved
) -> list[list[str]]:
    """The prompts of so many steps, each observed at its end as a run does."""
    drawn = []
    for _ in range(num):
        step = list(itertools.islice(stream, PROMPTS_PER_STEP))
        stream.observe({position: rewards(item.prompt) for position, item in step})
        drawn.append([item.prompt for _, item in step])
    return drawn


def test_solved_prompts_rest_and_unsolved_ones_come_back() -> None:
    """16 items, of which 8 are easy, 4 hard, 4 normal; a step is a quarter of the first epoch."""
    stream = CurriculumStream(items(a=16), 0, settings=RESTS)
    drawn = [prompt for step in steps(stream, 4) for prompt in step]
    assert sorted(drawn) == sorted(item.prompt for item in items(a=16))  # first, all of them
    # Epoch 1 has the normal ones, 2 these and the hard ones, 3 the normal ones, 4 all again.
    epochs = [steps(stream, 1), steps(stream, 2), steps(stream, 1), steps(stream, 4)]
    kinds = [Counter(int(p[1:]) % 4 for step in epoch for p in step) for epoch in epochs]
    assert kinds == [{3: 4}, {2: 4, 3: 4}, {3: 4}, {0: 4, 1: 4, 2: 4, 3: 4}]
    metrics = stream.observe({})
    assert metrics == {
        "pool/easy": 0.5, "pool/normal": 0.25, "pool/hard": 0.25, "pool/unseen": 0.0,
        "pool/resting": 0.75,
    }  # fmt: skip


def test_a_prompt_leaves_its_pool_when_its_solve_rate_changes() -> None:
    stream = CurriculumStream(items(a=4), 0, settings=RESTS)
    steps(stream, 1, lambda prompt: [0.0, 0.0])
    assert stream.observe({})["pool/hard"] == 1
    steps(stream, 1, lambda prompt: [0.0, 1.0])  # two epochs later, the one between had none
    assert stream.observe({})["pool/normal"] == 1
    assert stream.observe({})["pool/resting"] == 0


def test_thresholds() -> None:
    settings = CurriculumConfig(
        easy_rest=1, easy_threshold=0.75, hard_threshold=0.25, success_threshold=0.5
    )
    rates = {0: [0.6, 0.6, 0.6, 0.0], 1: [0.6, 0.0, 0.0, 0.0], 2: [1.0, 1.0, 0.4, 0.4], 3: []}
    stream = CurriculumStream(items(a=4), 0, settings=settings)
    steps(stream, 1, lambda prompt: rates[int(prompt[1:])])
    metrics = stream.observe({})
    pools = {name: metrics[f"pool/{name}"] for name in ("easy", "hard", "normal", "unseen")}
    assert pools == dict.fromkeys(pools, 0.25)


def test_nothing_at_rest_is_the_plain_order() -> None:
    """Where all prompts are normal; with a mixture, too."""
    parts, weights = {"a": 7, "b": 3, "c": 11}, {"a": 3.0, "b": 1.0, "c": 2.5}
    plain = PromptStream(items(**parts), 5, weights)
    stream = CurriculumStream(items(**parts), 5, weights, settings=RESTS)
    mixed = lambda prompt: [0.0, 1.0]  # noqa: E731
    assert steps(stream, 30, mixed) == steps(plain, 30, mixed)


def test_where_all_rest_the_next_due_epoch_begins() -> None:
    """However long they rest, a stream gives prompts, and at once."""
    settings = CurriculumConfig(easy_rest=10**6, hard_rest=10**5)
    stream = CurriculumStream(items(a=8), 0, settings=settings)
    steps(stream, 2)
    assert {int(p[1:]) % 4 for step in steps(stream, 3) for p in step} == {3}
    all_solved = lambda prompt: [1.0]  # noqa: E731
    drawn = [p for step in steps(stream, 20, all_solved) for p in step]
    assert Counter(drawn).keys() == {item.prompt for item in items(a=8)}


def test_the_weights_of_a_mixture_hold() -> None:
    weights = {"a": 3.0, "b": 1.0}
    stream = CurriculumStream(items(a=9, b=40), 0, weights, settings=RESTS)
    prompts = [prompt for step in steps(stream, 100) for prompt in step]
    for count in range(1, 401):
        counts = Counter(prompt[0] for prompt in prompts[:count])
        assert abs(counts["a"] - count * 0.75) < 2
    metrics = stream.observe({})
    assert metrics["source/a/pool/easy"] == pytest.approx(5 / 9)
    assert metrics["source/b/pool/hard"] == 0.25
    easy = (9 * metrics["source/a/pool/easy"] + 40 * metrics["source/b/pool/easy"]) / 49
    assert metrics["pool/easy"] == pytest.approx(easy)


def test_it_resumes_from_every_step() -> None:
    """A stream resumes within a step, too, whose results have not come yet; the state is JSON."""
    weights = {"a": 3.0, "b": 1.0}

    def fresh() -> CurriculumStream:
        return CurriculumStream(items(a=9, b=10), 0, weights, settings=RESTS)

    expected = steps(fresh(), 25)
    for num in range(25):
        first = fresh()
        assert steps(first, num) == expected[:num]
        open_prompt = next(first)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = fresh()
        resumed.seek(first.position)
        resumed.load_state_dict(state)
        for stream in (first, resumed):
            position, item = open_prompt
            assert stream.at(position) == item
            rest = list(itertools.islice(stream, PROMPTS_PER_STEP - 1))
            assert [item.prompt for _, item in (open_prompt, *rest)] == expected[num]
            stream.observe({at: solved(item.prompt) for at, item in (open_prompt, *rest)})
        assert steps(resumed, 25 - num - 1) == expected[num + 1 :]


def test_without_a_state_it_seeks_as_if_nothing_had_been_observed() -> None:
    """A run that was begun before there were pools."""
    weights = {"a": 3.0, "b": 1.0}
    plain = PromptStream(items(a=9, b=10), 0, weights)
    stream = CurriculumStream(items(a=9, b=10), 0, weights, settings=RESTS)
    for each in (plain, stream):
        each.seek(13)
    assert steps(stream, 1) == steps(plain, 1)


def test_thresholds_that_leave_nothing_between() -> None:
    settings = CurriculumConfig(easy_threshold=0.5, hard_threshold=0.5)
    wanted = r"hard_threshold=0\.5: wanted below data\.curriculum\.easy_threshold=0\.5"
    with pytest.raises(ConfigError, match=wanted):
        settings.check()


def share_with_spread(easy_rest: int, hard_rest: int) -> float:
    """Return the share of prompts whose samples are not all alike, in 200 steps of 32 prompts.

    Each of 1,000 prompts is solved with a probability of its own, mostly near 0 or 1.
    """
    draw = random.Random(0)
    probability = {f"a{n}": draw.betavariate(0.3, 0.3) for n in range(1000)}
    settings = CurriculumConfig(easy_rest=easy_rest, hard_rest=hard_rest)
    stream = CurriculumStream(items(a=1000), 0, settings=settings)
    varied = []
    for _ in range(200):
        step = list(itertools.islice(stream, 32))
        rewards = {
            position: [float(draw.random() < probability[item.prompt]) for _ in range(8)]
            for position, item in step
        }
        varied += [len(set(group)) > 1 for group in rewards.values()]
        stream.observe(rewards)
    return sum(varied) / len(varied)


def test_more_prompts_teach_something() -> None:
    """Measured: 0.47, with rests of 2 and 1 epochs 0.59, of 6 and 2 epochs 0.66."""
    plain, short, long = (share_with_spread(*rests) for rests in [(0, 0), (2, 1), (6, 2)])
    assert 0.4 < plain < short - 0.08 < short < long - 0.04


def test_a_source_that_has_grown_begins_an_epoch_in_which_the_solved_still_rest() -> None:
    before = CurriculumStream(items(a=8), 0, settings=RESTS)
    steps(before, 2)
    state = json.loads(json.dumps([before.sizes, before.state_dict()]))
    after = CurriculumStream(items(a=12), 0, settings=RESTS)
    after.resume(before.position, state[0])
    after.load_state_dict(state[1])
    # of eight, four are solved and two never: the two others, and the four that are new
    drawn = [prompt for step in steps(after, 2) for prompt in step][:6]
    assert sorted(drawn) == ["a10", "a11", "a3", "a7", "a8", "a9"]
