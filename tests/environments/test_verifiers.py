"""An environment of the package verifiers, over the endpoint."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from environment_pools import Pool, played, settled

from hybridrl.config import ConfigError, EnvironmentConfig, EnvironmentKind
from hybridrl.environments import EpisodeTask
from hybridrl.environments.load import load_environment

pytestmark = pytest.mark.verifiers

TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(3):
            yield SumTask(SumData(prompt=f"{a}+1?", answer=str(a + 1)), self.config.task)


__all__ = ["SumTaskset"]
"""


TALK = TASKSET.replace(
    "__all__",
    """
class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        data = task.data.model_copy(update={"prompt": None})  # the user opens
        async with agents.agent.interaction(type(task)(data, task.config)) as talk:
            answer = await talk.turn("first")
            while not answer.terminated:
                answer = await talk.turn("more")


__all__""",
).replace('"SumTaskset"]', '"SumTaskset", "TalkEnv"]')
"""`TASKSET` with an environment whose user asks without end."""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentConfig:
    (tmp_path / "sums_taskset.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    return settled(EnvironmentConfig(kind=EnvironmentKind.verifiers, path="sums-taskset"))


def test_a_taskset_is_played_over_the_endpoint(pool: Pool, sums: EnvironmentConfig) -> None:
    from hybridrl.environments.verifiers import tasks

    rows = list(islice(tasks(0, "sums-taskset"), 9))
    assert [row["question"] for row in rows] == ["0+1?", "1+1?", "2+1?"]
    episodes = pool(sums)
    earned = {}
    for number, answer in enumerate(["1", "2", "4"]):
        row = rows[number]
        task = EpisodeTask(({"role": "user", "content": row["question"]},), row)
        start, steps = played(episodes, task, [answer], (number,))
        assert (start.failure, start.error) == (None, "")
        assert start.messages[-1]["content"] == row["question"]
        assert (steps[0].messages, steps[0].failure) == (None, None)
        earned[number] = steps[0].rewards
    assert earned == {0: (1.0,), 1: (1.0,), 2: (0.0,)}


def test_what_was_earned_until_max_turns_counts(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talk_taskset.py").write_text(TALK)
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(kind=EnvironmentKind.verifiers, path="talk-taskset", max_turns=2)
    task = EpisodeTask(({"role": "user", "content": "?"},), {"index": 0})
    start, steps = played(pool(settled(config)), task, ["5", "1", "7"])
    assert (start.error, [step.error for step in steps]) == ("", ["", ""])
    assert (steps[-1].finish, steps[-1].rewards) == ("length", (0.0, 1.0))


def test_what_is_not_there_is_refused(sums: EnvironmentConfig) -> None:
    missing: Any = EnvironmentConfig(kind=EnvironmentKind.verifiers, path="no-taskset")
    with pytest.raises(ConfigError, match=r"environment\.path=no-taskset: wanted an installed"):
        load_environment(settled(missing))
    sums.params = {"env": {"max_concurrent_agents": 0}}
    with pytest.raises(ConfigError, match=r"environment\.params\.env=.*max_concurrent_agents"):
        load_environment(sums)
