"""Whole runs of conversations: what the ranks train on is what the environment has answered."""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from resumed_runs import check_same, ended, state

from hybridrl.driver.episodes import EnvironmentFailed
from hybridrl.environments import EpisodePool
from hybridrl.schedule import loop as schedule_loop
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.trace import read_timeline

HERE = Path(__file__).parents[1] / "talking.py"
TALKING = [
    "environment=function", f"environment.path={HERE}:talk", "environment.max_turn_tokens=3",
    "environment.max_failed_share=1", "rollout.max_new_tokens=16", "trainer.steps=2",
    "warm_start.steps=0", "telemetry.samples_per_step=64",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tiny_run: list[str]) -> list[str]:
    """Overrides of a run of seconds, whose reward is what the turns earn."""
    kept = [x for x in tiny_run if not x.startswith(("reward", "rollout.max_new", "warm_start"))]
    return [*kept, "reward=environment", *TALKING]


@pytest.mark.layouts
@pytest.mark.parametrize("schedule", ["fused", pytest.param("packed", marks=pytest.mark.slow)])
def test_every_schedule_trains_on_the_conversations_of_serial(
    train_here: Callable[..., Any],
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
) -> None:
    """Two ranks, three steps, replies in any order, some episodes that fail. Packed may order them
    otherwise, so that only its first step has the weights of serial.

    The other run's environments sleep, and their processes are killed at random. Its instances park
    what waits whenever they have passes to run.
    """
    monkeypatch.setattr(schedule_loop, "worth_parking", lambda *_: True)
    settings = [
        *settings,
        "trainer.steps=3",
        "recipe.kl_coef=0.1",
        "recipe.skip_equal_groups=false",
        "~eval.sets.main",  # so that processes are killed in the steps that are compared
    ]
    serial = train_here(tmp_path / "serial", *settings, "schedule=serial")
    sleeping = [f"schedule={schedule}", "+environment.params.sleep=0.05"]
    if schedule == "packed":  # puts conversations off that wait for their replies
        sleeping.append("schedule.limit_tokens=8")
    with processes_killed() as kills:
        other = train_here(tmp_path / schedule, *settings, *sleeping)
    assert kills
    replays = [sum(x["environment/replays"] for x in run.metrics) for run in (serial, other)]
    assert replays[1] > replays[0] > 0
    assert schedule == "fused" or sum(line["samples/put_off"] for line in other.metrics)
    reasons = {drop.text for drop in serial.steps[0].dropped.values()}
    assert reasons == {"its episode has failed (error)"}
    for step in (1, 2, 3) if schedule == "fused" else (1,):
        texts = [
            {record["id"]: (record["turns"], record["reward"]) for record in step_of(run.dir, step)}
            for run in (serial, other)
        ]
        assert len(texts[0]) > 8
        common = texts[0].keys() & texts[1].keys()
        assert common == texts[0].keys() or schedule == "packed"
        assert {id: texts[0][id] for id in common} == {id: texts[1][id] for id in common}
    if schedule == "fused":
        check_same_steps(serial, other)
    for record in step_of(serial.dir, 1):
        turns = record["turns"]
        assert "".join(turn["text"] + turn["reply"] for turn in turns) == record["response"]
        earned = sum(turn["reward"] for turn in turns)
        assert record["finish"] == "abort" or record["reward"] == pytest.approx(earned)
    metrics = serial.metrics[0]
    assert metrics["environment/failed"] == metrics["samples/aborted"] > 0
    assert metrics["environment/turns"] > metrics["environment/episodes"] >= len(texts[0])
    assert metrics["environment/reply_tokens"] > 0
    mine = [len(turn["text"]) for record in step_of(serial.dir, 1) for turn in record["turns"]]
    assert metrics["response_tokens_mean"] < 9.01  # three turns of three tokens at most
    assert metrics["response_tokens_mean"] >= sum(mine) / len(step_of(serial.dir, 1))
    spans, _ = read_timeline(serial.dir / "trace.json")
    answers = [span for span in spans if span.lane == "environment 0"]
    assert sum(span.args["answers"] for span in answers) > metrics["environment/turns"]


def check_same_steps(one: Any, other: Any) -> None:
    """Equal samples and counts of episodes, losses and gradients within rounding, in every step."""
    assert len(one.steps) == len(other.steps) == 3
    for a, b in zip(one.steps, other.steps, strict=True):
        samples = [[(s.id, s.spans, s.scalars["reward"]) for s in x.samples] for x in (a, b)]
        assert samples[0] == samples[1]
        assert {id: drop.text for id, drop in a.dropped.items()} == {
            id: drop.text for id, drop in b.dropped.items()
        }
    for line, its in zip(one.metrics, other.metrics, strict=True):
        for name in ("episodes", "turns", "failed", "failed/error", "reply_tokens"):
            assert line[f"environment/{name}"] == its[f"environment/{name}"], name
        for name in ("loss", "kl", "grad_norm", "entropy", "reward_mean"):
            assert its[name] == pytest.approx(line[name], rel=1e-6, abs=1e-6), name


@contextlib.contextmanager
def processes_killed() -> Iterator[list[int]]:
    """Kill processes that have episodes, each after some turns more; gives the list of those."""
    pools, kills, draw, ended = list[EpisodePool](), list[int](), Random(0), threading.Event()
    start = EpisodePool.__init__

    def noted(self: EpisodePool, *args: Any, **settings: Any) -> None:
        start(self, *args, **settings)
        pools.append(self)

    def kill() -> None:
        num_turns = 5
        while not ended.wait(draw.uniform(0.0, 0.1)):
            for pool in pools[-1:]:
                for process in pool._processes if pool.counts["turns"] >= num_turns else ():
                    if process.tasks:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process.popen.pid, signal.SIGKILL)
                            kills.append(process.popen.pid)
                            num_turns = pool.counts["turns"] + draw.randint(15, 30)

    killer = threading.Thread(target=kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpisodePool, "__init__", noted)
        killer.start()
        yield kills
        ended.set()
        killer.join()


def step_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The records of a step's samples."""
    lines = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] == step and line["phase"] == "rl"]


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("on_host", [True, False])
def test_what_conversations_did_is_measured(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path, on_host: bool
) -> None:
    """Waits, failures, and the caches of samples that gave theirs up while they waited."""
    short = ["rollout.kv_cache_tokens=64", *([] if on_host else ["rollout.kv_host_tokens=0"])]
    run = train_here(
        tmp_path / "run", *settings, *short, "cluster.ranks=1", "schedule=serial",
        "trainer.steps=1", "~eval.sets.main", "+environment.params.sleep=0.1",
    )  # fmt: skip
    metrics = {name.removeprefix("environment/"): x for name, x in run.metrics[0].items()}
    assert (metrics["moved_kv_tokens"] > 0) == on_host
    assert on_host or metrics["recomputed_kv_tokens"] > 0
    assert 0.01 < metrics["wait_p50_s"] < metrics["wait_p99_s"]
    failed = [drop.text for drop in run.steps[0].dropped.values()]
    assert failed.count("its episode has failed (error)") == metrics["failed/error"] > 0
    assert metrics["failed"] == metrics["failed/error"]
    assert [metrics[f"failed/{kind}"] for kind in ("timeout", "crash", "replay", "rewritten")] == (
        [0.0] * 4
    )


@pytest.mark.wide
@pytest.mark.layouts
def test_a_run_over_the_endpoint_trains_on_the_same(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    """Samples, turns and rewards are those of the program that asks its model directly."""
    kept = [x for x in settings if not x.startswith("environment.path")]
    kept += ["trainer.steps=1", "recipe.skip_equal_groups=false"]
    kept.append("deterministic=strict")  # else waits decide which rows decode together
    direct, served = (
        train_here(tmp_path / name, *kept, f"environment.path={HERE}:{name}")
        for name in ("talk", "served")
    )
    texts = [
        {record["id"]: (record["turns"], record["reward"]) for record in step_of(run.dir, 1)}
        for run in (direct, served)
    ]
    assert len(texts[0]) > 8
    assert max(len(turns) for turns, _ in texts[0].values()) == 3
    assert texts[0] == texts[1]
    assert direct.metrics[0]["loss"] == served.metrics[0]["loss"]
    steps = [[(s.id, s.scalars, s.spans) for s in run.steps[0].samples] for run in (direct, served)]
    assert steps[0] == steps[1]


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("of", "overrides"),
    [
        ("the evaluation of main", []),
        ("the step", ["recipe=dapo", "~eval.sets.main", "schedule=serial"]),
    ],
    ids=["evaluation", "step"],
)
def test_a_run_whose_episodes_fail_ends_and_says_why(
    train_here: Callable[..., Any],
    settings: list[str],
    tmp_path: Path,
    of: str,
    overrides: list[str],
) -> None:
    """In a step that takes as many groups as it wants, where it has none to take."""
    kept = [x for x in settings if not x.startswith(("environment.path", "environment.max_failed"))]
    with pytest.raises(EnvironmentFailed) as caught:
        train_here(tmp_path / "run", *kept, f"environment.path={HERE}:mute", *overrides)
    message = str(caught.value)
    assert "talking.py:mute" in message
    assert "nothing to say" in message
    assert f"episodes of {of} have failed" in message
    assert "environment.max_failed_share=0.5" in message
    assert not any("loss" in line for line in read_lines(tmp_path / "run" / "metrics.jsonl"))


PARTIAL = [
    "schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2",
    "rollout.decode_steps=2", "deterministic=strict", "trainer.save_every=2", "cluster.ranks=2",
]  # fmt: skip


@pytest.mark.layouts
def test_a_partial_run_that_ends_in_mid_conversation_goes_on_as_if_it_had_not(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    """Episodes of pending samples are replayed; those that wait are answered once more."""
    changed = ("trainer.steps", "recipe", "environment.max_turn_tokens", "rollout.max_new")
    kept = [x for x in settings if not x.startswith(changed)]
    longer = [
        "environment.max_turn_tokens=4", "rollout.max_new_tokens=64", "trainer.steps=4",
        "+environment.params.turns=8", "+environment.params.ends=0.3", "eval.sets.main.every=3",
    ]  # fmt: skip
    partial = [*kept, *longer, "recipe.group_size=4", *PARTIAL]
    train_here(tmp_path / "run", *partial)
    copy = ended(tmp_path / "run", tmp_path / "copy", 2)
    episodes = state(copy / "checkpoints" / "step_000002")["episodes"]
    assert any(len(episode["turns"]) > 1 and episode["ended"] for episode in episodes)
    rest = train_here(copy, *partial, "trainer.resume=auto")
    assert len(rest.steps) == 2
    check_same(tmp_path / "run", copy, tmp_path)
