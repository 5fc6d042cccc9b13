"""Judges and environments on several nodes of a Ray cluster, and the death of one."""

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from hybridrl.driver.node_pools import LOST, NodePools
from hybridrl.runtime.launcher import CallFailed

FOREIGN = """
    import asyncio
    import os

    async def score(prompt, response, answer, item):
        await asyncio.sleep(1 if response == "fast" else 3)
        return float(os.environ["NODE"]) + float(os.environ["KEY"])

    async def talk(task, model, rng):
        with open(__file__ + ".log", "a") as log:
            log.write(os.environ["NODE"])
        reply = task.messages
        for number in range(2):
            turn = await model.turn(reply)
            model.reward(1.0)
            reply = f"{number}{turn.text}{rng.randint(0, 9999)}"
"""
PROGRAM = """
    import json, logging, os, sys
    from types import SimpleNamespace
    import ray
    from ray.cluster_utils import Cluster
    from hybridrl.config.compose import check, register
    from hybridrl.driver.episodes import Episodes
    from hybridrl.driver.judges import DriverJudges
    from hybridrl.environments.task import EpisodeTask
    from hybridrl.environments.tool_calls import CallForm
    from hybridrl.flow.executor import TurnEnded
    from hybridrl.flow.sample import SampleId
    from hybridrl.rewards import RewardInput
    from hybridrl.runtime.ray_launcher import RayLauncher

    class Words:
        call_form = CallForm()

        def reply(self, turn, messages, most):
            return tuple(map(ord, messages[0]["content"])), False

    class Work:
        def __init__(self, work):
            self.work, self.calls, self.value = work, [], None
            self.go_on(None)

        def go_on(self, answers):
            try:
                self.calls = self.work.send(answers)
            except StopIteration as ended:
                self.calls, self.value = [], ended.value

        def end(self):
            while self.calls:
                self.go_on([call.result(60) for call in self.calls])
            return self.value

    def judge(response):
        item = RewardInput("", response, "")
        begun = [Work(judges.judge("reward", [item])) for _ in range(8)]
        return lambda: [work.end()[0].reward for work in begun]

    def turns(response, tokens):
        those = [TurnEnded(id, (1, 2, 3), "a", "stop", tokens) for id in ids]
        begun = [Work(episodes.answer(one)) for one in those]
        events = [work.end()[0] for work in begun]
        return [event.replies[0].tokens is None for event in events]

    logging.basicConfig(level=logging.WARNING, filename=sys.argv[2])
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False, env_vars={"NODE": "0"})
    other = cluster.add_node(num_cpus=1, env_vars={"NODE": "1"})
    register()
    config = check(json.loads(sys.argv[1]))
    ray.init(address=cluster.address, logging_level="error")
    os.environ["KEY"] = "10"  # of the driver alone
    launcher = RayLauncher(ray, config.cluster)
    judges, episodes = DriverJudges(config, launcher), Episodes(config, Words(), launcher)
    try:
        judge("fast")()
        judges._pools["reward"].wait_ready()
        episodes.pool.wait_ready()
        rewards = [judge("fast")()]
        ids = [SampleId(number) for number in range(6)]
        task = EpisodeTask("q", ({"role": "user", "content": "q"},))
        episodes.start(ids, SimpleNamespace(prompt="q", prompt_ids=(1, 2), task=task), 64)
        ended = [turns("a", 3)]
        slow = judge("slow")
        cluster.remove_node(other, allow_graceful=False)
        rewards.append(slow())
        ended.append(turns("b", 30))
        metrics = episodes.metrics()
        print(json.dumps([rewards, ended, metrics]))
    finally:
        judges.close()
        episodes.close()
        ray.shutdown()
        cluster.shutdown()
"""


@pytest.mark.ray
def test_both_nodes_work_and_the_death_of_one_loses_no_sample(
    tiny_run: list[str], tmp_path: Path
) -> None:
    """A judge that waits, and an environment; episodes are replayed on the node that is left."""
    (tmp_path / "foreign.py").write_text(textwrap.dedent(FOREIGN))
    overrides = [
        *tiny_run, "environment=function", f"environment.path={tmp_path}/foreign.py:talk",
        "reward=function", f"reward.function={tmp_path}/foreign.py:score", "+reward.waits=true",
        f"run.dir={tmp_path}/run",
    ]  # fmt: skip
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(overrides), str(log)],
        capture_output=True, text=True, env={**os.environ, "NODE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (healthy, bereaved), ended, metrics = json.loads(done.stdout.splitlines()[-1])
    assert set(healthy) == {10.0, 11.0}
    assert bereaved == [10.0] * 8
    starts = (tmp_path / "foreign.py.log").read_text()
    lost = starts.count("1")
    assert 0 < lost < 6
    assert starts.count("0") == 6
    assert ended == [[False] * 6, [True] * 6]
    assert (metrics["environment/replays"], metrics["environment/failed"]) == (lost, 0)
    lines = log.read_text().splitlines()
    assert len([line for line in lines if "is lost, and others do its work" in line]) == 2


class Pool:
    """A pool whose calls are not answered."""

    name, counts = "words", Counter[str]()

    def close(self) -> None:
        """Nothing is left."""

    def submit(self) -> "Future[str]":
        return Future()


class Node:
    """Another node, whose pool is up and answers when the test says so."""

    def __init__(self, share: float) -> None:
        self.name, self.share = "other", share
        self.calls: list[Future[Any]] = []
        self.opening: Future[Any] = Future()
        self.killed = 0

    def start(self, *_: Any) -> "Node":
        return self

    def kill(self) -> None:
        self.killed += 1
        if not self.opening.done():
            self.opening.set_exception(CallFailed("killed", died=True))

    def call(self, number: int, name: str, *args: Any) -> "Future[Any]":
        if name == "open":
            return self.opening
        future: Future[Any] = Future()
        if name == "close":
            future.set_result((None, Counter(), []))
        else:
            assert number == len(self.calls) + 1
            self.calls.append(future)
        return future


def test_calls_go_to_the_freest_node_until_it_dies(caplog: pytest.LogCaptureFixture) -> None:
    """Each node has its share of what may be called at a time."""
    shares, node = list[int](), Node(0.67)

    def make(share: int) -> Any:
        shares.append(share)
        return Pool

    pools = NodePools(make, 3, [node, Node(0.1)])  # the latter has no share
    assert shares == [1, 2]
    node.opening.set_result((None, Counter(), []))
    full, futures = [], []
    for _ in range(4):
        full.append(pools.is_full)
        futures.append(pools.freest().call("submit"))
    assert (full, len(node.calls)) == ([False, False, False, True], 2)
    node.calls[0].set_result(("done", Counter(a=1), []))
    assert ([f.done() for f in futures].count(True), pools.is_full) == (1, False)
    assert pools.counts == {"a": 1}
    node.calls[1].set_exception(CallFailed("no such node", died=True))
    assert [f.result() for f in futures if f.done()] == ["done", LOST]
    assert "node other is lost, and others do its work: no such node" in caplog.text
    pools.freest().call("submit")
    assert len(node.calls) == 2


@pytest.mark.parametrize("is_up", [True, False])
def test_the_end_of_a_run_is_no_loss(is_up: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A node that still starts is ended, too, and closing twice is as closing once."""
    node = Node(0.5)

    def make(_: int) -> Any:
        return Pool

    pools = NodePools(make, 2, [node])
    if is_up:
        node.opening.set_result((None, Counter(), []))
    pools.close()
    pools.close()
    assert node.killed == 2
    assert not caplog.records
