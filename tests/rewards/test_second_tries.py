"""A judge that fails once is asked once more; a time limit is not waited for twice."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import RewardCall, RewardConfig, RewardKind
from hybridrl.rewards import JudgePool, RewardInput

FUNCTIONS = """
import os, time
from pathlib import Path


def attempt(response):
    file = Path(__file__).with_name(response)
    with file.open("a") as written:
        written.write("x")
    return file.stat().st_size


def score(prompt, response, answer, item):
    number = attempt(response)
    if response == "slow":
        time.sleep(100)
    if response == "never" or (response == "raises" and number == 1):
        raise ConnectionError(f"try {number}")
    if response == "dies" and number == 1:
        os._exit(3)
    return number


async def waits(prompt, response, answer, item):
    if response == "slow":
        attempt(response)
        import asyncio

        await asyncio.sleep(100)
    return score(prompt, response, answer, item)


def group(prompts, responses, answers, items):
    return [score("", response, "", {}) for response in responses]
"""

TRIES = {"fine": 1, "raises": 2, "dies": 2, "never": 2, "slow": 1}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pool", "waits", "group"])
def test_a_second_try(tmp_path: Path, kind: str) -> None:
    """`dies` ends its process, which is another one for the second try."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    name = {"pool": "score", "waits": "waits", "group": "group"}[kind]
    settings: dict[str, Any] = {"call": RewardCall.group} if kind == "group" else {}
    config = RewardConfig(
        kind=RewardKind.function, function=f"{file}:{name}", timeout_s=1.0, **settings
    )
    config.waits = kind == "waits" or None
    inputs = {response: RewardInput("", response, "") for response in TRIES}
    if kind == "pool":
        with JudgePool(config) as pool:
            results = dict(zip(TRIES, pool.score([*inputs.values()]), strict=True))
    else:
        with closing(JudgePool(config)) as judge:
            results = {name: judge.submit([one]).result(60)[0] for name, one in inputs.items()}
    told = {response: (result.status, result.reward) for response, result in results.items()}
    assert told == {
        "fine": ("ok", 1.0), "raises": ("ok", 2.0), "dies": ("ok", 2.0),
        "never": ("error", 0.0), "slow": ("timeout", 0.0),
    }  # fmt: skip
    assert results["never"].message == "ConnectionError: try 2"
    assert {name: (tmp_path / name).stat().st_size for name in TRIES} == TRIES
