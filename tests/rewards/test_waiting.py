"""Functions that wait, with real processes: many at a time, and who is guilty is marked."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, RewardCall, RewardConfig, RewardKind
from hybridrl.driver.node_pools import NodePools
from hybridrl.rewards import JudgePool, RewardInput, RewardResult, validate_reward
from hybridrl.rewards.worker import waits
from hybridrl.sandbox import pool as sandboxes

pytestmark = pytest.mark.long

FUNCTIONS = """
import asyncio, os, threading, time

running = most = 0


async def score(prompt, response, answer, item):
    global running, most
    running += 1
    most = max(most, running)
    try:
        if response == "die":
            os._exit(3)
        if response == "block":
            time.sleep(100)  # the loop itself
        if response == "slow":
            await asyncio.sleep(100)
        if response == "raise":
            raise ValueError("no such word")
        if response == "late":
            raise TimeoutError("of its own")
        if response == "cancel":
            raise asyncio.CancelledError
        await asyncio.sleep(0.05)
        return most if response == "most" else len(response)
    finally:
        running -= 1


def blocking(prompt, response, answer, item):
    time.sleep(100 if response == "slow" else 0.1)
    return len(response)


def ranks(prompts, responses, answers, items):
    if "raise" in responses:
        raise ValueError("no such word")
    if "die" in responses:
        os._exit(3)
    if "slow" in responses:
        time.sleep(100)
    while "spin" in responses:
        pass
    if "threads" in responses:
        return [threading.active_count()] * len(responses)
    if "few" in responses:
        return [1.0]
    if "nan" in responses:
        return [float("nan")] + [1.0] * (len(responses) - 1)
    return [sorted(responses).index(response) for response in responses]


async def gathered(prompts, responses, answers, items):
    await asyncio.sleep(0.01)
    return [len(responses)] * len(responses)
"""

Make = Callable[..., RewardConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)

    def make(name: str, **settings: object) -> RewardConfig:
        settings = {"timeout_s": 1.0, **settings}
        return RewardConfig(kind=RewardKind.function, function=f"{file}:{name}", **settings)  # type: ignore[arg-type]

    return make


def unit(*responses: str) -> list[RewardInput]:
    return [RewardInput("", response, "") for response in responses]


def judged(config: RewardConfig, *units: list[RewardInput]) -> list[list[RewardResult]]:
    with closing(JudgePool(config)) as judge:
        return [future.result(60) for future in [judge.submit(each) for each in units]]


def test_many_wait_at_a_time_and_never_more(make: Make) -> None:
    config = make("score", waits=True, max_in_flight=7)
    responses = [*("x" * (i % 5) for i in range(60)), "most"]
    results = judged(config, *(unit(response) for response in responses))
    assert [r.reward for (r,) in results[:-1]] == [float(i % 5) for i in range(60)]
    assert results[-1][0].reward == 7


def test_it_is_full_while_so_many_are_judged(make: Make) -> None:
    """So a further one would have to wait."""
    config = make("blocking", waits=True, max_in_flight=2)
    with closing(NodePools(lambda share: partial(JudgePool, config), 2, [])) as pools:
        full, futures = [], []
        for _ in range(3):
            full.append(pools.is_full)
            futures.append(pools.freest().call("submit", unit("a")))
        assert full == [False, False, True]
        assert [future.result(60)[0].reward for future in futures] == [1.0] * 3
        assert not pools.is_full


def test_who_is_guilty_is_marked_and_the_others_get_their_reward(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "GRACE_S", 0.5)
    bad = ["die", "late", "cancel", "slow", "raise", "block"]
    responses = ["a", *bad, *["ccc"] * 10, "die", "dddd"]
    results = judged(make("score", waits=True), *(unit(response) for response in responses))
    status = {**dict.fromkeys(bad, "error"), "slow": "timeout", "block": "timeout"}
    for response, (result,) in zip(responses, results, strict=True):
        assert result.status == status.get(response, "ok")
        assert result.reward == (0 if response in status else len(response))
    assert results[1][0].message == "the judge's process ended (exit code 3)"
    assert results[2][0].message == "TimeoutError: of its own"
    assert results[3][0].message.startswith("CancelledError")
    assert results[4][0].message == "no reward within 1.0 s"
    assert results[5][0].message == "ValueError: no such word"


def test_a_plain_function_waits_in_threads_and_hanging_ones_take_no_place(make: Make) -> None:
    config = make("blocking", waits=True, max_in_flight=4, timeout_s=1.5)
    results = judged(config, *[unit("slow")] * 4, *[unit("abc")] * 20)
    assert [r.status for (r,) in results] == ["timeout"] * 4 + ["ok"] * 20
    assert {r.reward for (r,) in results[4:]} == {3.0}


def test_a_group_is_judged_together(make: Make) -> None:
    config = make("ranks", call=RewardCall.group, num_processes=2)
    groups = [unit("b", "a", "c"), unit("z"), *[unit("y", "x")] * 9]
    results = judged(config, *groups)
    assert [[r.reward for r in group] for group in results] == [[1, 0, 2], [0], *[[1, 0]] * 9]


def test_a_group_that_fails_is_marked_as_a_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "GRACE_S", 0.5)
    config = make("ranks", call=RewardCall.group)
    names = ("raise", "die", "spin", "few", "nan")
    results = judged(config, *(unit("a", name) for name in names), unit("b", "a"))
    messages = [[r.message for r in group] for group in results]
    assert messages[:4] == [
        ["ValueError: no such word"] * 2,
        ["the judge's process ended (exit code 3)"] * 2,
        ["no reward within 1.0 s"] * 2,
        ["ValueError: the function returned 1 rewards for 2 responses"] * 2,
    ]
    assert messages[4] == ["ValueError: the reward is nan, wanted a finite number", ""]
    assert [r.reward for r in results[5]] == [1, 0]


def test_a_group_that_was_given_up_computes_no_more(make: Make) -> None:
    config = make("ranks", call=RewardCall.group)
    with closing(JudgePool(config)) as judge:
        before, late, after = (
            judge.submit(unit(response)).result(60)[0]
            for response in ("threads", "spin", "threads")
        )
    assert late.recorded_status == "timeout: no reward within 1.0 s"
    assert after == before


def test_a_response_without_a_match_scores_zero_in_its_group(make: Make) -> None:
    config = make("ranks", call=RewardCall.group, extract="#(.*)")
    (results,) = judged(config, unit("#b", "no marker", "#a"))
    assert [r.reward for r in results] == [2, 0, 1]
    assert [r.text for r in results] == ["b", "", "a"]


def test_an_async_function_of_a_batch(make: Make) -> None:
    results = judged(make("gathered", call=RewardCall.batch, waits=True), unit("a", "b", "c"))
    assert [r.reward for r in results[0]] == [3, 3, 3]


def test_a_batch_function_on_a_rank(make: Make) -> None:
    config = make("ranks", call=RewardCall.batch)
    with JudgePool(config) as pool:
        assert [r.reward for r in pool.score(unit("b", "a", "c"))] == [1, 0, 2]
        for name, status in (("raise", "error"), ("die", "error"), ("slow", "timeout")):
            assert [r.status for r in pool.score(unit("a", name))] == [status] * 2
        assert [r.status for r in pool.score(unit("nan", "a"))] == ["error", "ok"]
        assert [r.reward for r in pool.score(unit("b", "a"))] == [1, 0]


def test_which_functions_wait_is_found_out(make: Make) -> None:
    assert validate_reward(make("score")).waits
    assert waits(make("blocking", waits=True))
    assert not waits(make("blocking"))
    assert not validate_reward(make("ranks", call=RewardCall.group)).waits
    with pytest.raises(ConfigError, match=r"^cost\.waits=False: wanted true or null: .* is async"):
        validate_reward(make("score", waits=False), role="cost")


def test_a_closed_judge_resolves_what_it_has(make: Make) -> None:
    judge = JudgePool(make("score", waits=True, timeout_s=100.0))
    cancelled, future, other = (judge.submit(unit(response)) for response in ("a", "slow", "bb"))
    assert cancelled.cancel()
    assert other.result(60)[0].reward == 2
    judge.close()
    assert future.cancelled()
    with pytest.raises(ValueError, match="closed"):
        judge.submit(unit("a")).result()


def test_a_row_that_cannot_be_sent(make: Make) -> None:
    no_pickle = [RewardInput("", "a", "", {"call": lambda: 0})]
    (bad,), (good,) = judged(make("score", waits=True), no_pickle, unit("a"))
    assert (bad.status, good.reward) == ("error", 1)
    assert "pickle" in bad.message


def test_a_judge_that_cannot_start_says_why(make: Make) -> None:
    with closing(JudgePool(make("nothing", waits=True))) as judge:
        with pytest.raises(ConfigError, match=r"reward\.function"):
            judge.submit(unit("a")).result(60)
        with pytest.raises(ConfigError, match=r"reward\.function"):
            judge.submit(unit("a")).result(60)
