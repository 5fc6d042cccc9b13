"""On real ranks, the fused schedule trains on what the serial one does, though samples move."""

import functools
import itertools
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import Config, ConfigError, DataConfig, FusedScheduleConfig, RolloutConfig
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.trace import read_timeline

pytestmark = pytest.mark.long

FUSED = ["schedule=fused", "schedule.migration_threshold=12"]
PASSES = ("reward", "reference_log_probs")
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def run_of(
    train: Train,
    train_here: Train,
    long_tail: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    """Three steps on two ranks: `serial`, or fused with what travels with a sample.

    Under Ray, as users have it, keys and values travel through its object store.
    """

    @functools.cache
    def run(name: str) -> Any:
        migration, _, on_ray = name.partition(" on ")
        schedule = [] if name == "serial" else [*FUSED, f"schedule.migration={migration}"]
        run = train if on_ray else train_here
        settings = [*long_tail, "cluster.ranks=2", *schedule, "log.level=debug"]
        return run(tmp_path_factory.mktemp(name), *settings)

    return run


def fetched_for(run: Any, names: Sequence[str] = PASSES) -> list[str]:
    """The forward passes before which a rank took up samples that another one had made."""
    after_fetch = []
    for lane in {span.lane for span in run.spans if span.lane.startswith("rank")}:
        mine = [span for span in run.spans if span.lane == lane]
        pairs = itertools.pairwise(mine)
        after_fetch += [after.name for before, after in pairs if before.name == "fetch"]
    return [name for name in after_fetch if name in names]


@pytest.mark.parametrize(
    "migration",
    [
        "kv",
        pytest.param("recompute", marks=[pytest.mark.layouts, pytest.mark.wide]),
        pytest.param("kv on Ray", marks=pytest.mark.ray),
        pytest.param("auto", marks=pytest.mark.slow),
    ],
)
def test_fused_trains_on_what_serial_trains_on(
    run_of: Callable[[str], Any], check_same: Callable[..., None], migration: str
) -> None:
    """Samples move in the middle of their making, and to be scored; the steps stay the same."""
    serial, fused = run_of("serial"), run_of(migration)
    check_same(serial, fused)
    assert all("samples/migrated" not in line for line in serial.metrics)
    assert all(line["samples/migrated"] > 0 for line in fused.metrics)
    assert fetched_for(serial) == []
    assert {*fetched_for(fused)} == {*PASSES}
    assert all(0 < line["bubble_share"] < 1 for line in (*serial.metrics, *fused.metrics))


def test_forward_passes_run_while_others_generate(run_of: Callable[[str], Any]) -> None:
    """In every step a freed rank works before the last call of another's generation begins.

    Which of the passes come that early depends on time; over the steps both do.
    """
    serial, fused = run_of("serial"), run_of("kv")
    early = [overlapped(fused, step) for step in (1, 2, 3)]
    assert all(early)
    assert set.union(*early) == {*PASSES}
    assert [overlapped(serial, step) for step in (1, 2, 3)] == [set()] * 3


@pytest.mark.wide
@pytest.mark.ray
def test_under_ray_a_rank_logs_to_its_own_file(run_of: Callable[[str], Any]) -> None:
    """At debug level the calls that it serves, too."""
    events = read_lines(run_of("kv on Ray").dir / "events.jsonl")
    (ranks,) = [event for event in events if event["kind"] == "ranks"]
    text = Path(ranks["log"]).read_text()
    assert " rank 0 INFO hybridrl.models.attention_choice: " in text
    for what in ("call update started", "call update ended after"):
        assert f" rank 0 DEBUG hybridrl.compat.verl: {what}" in text


def overlapped(run: Any, step: int) -> set[str]:
    """Forward passes that began on a rank before the last generating call of another did."""
    spans = [s for s in run.spans if s.step == step and s.lane in ("rank 0", "rank 1")]
    updated = max(s.end for s in spans if s.name == "update")
    spans = [s for s in spans if s.start < updated]  # not the evaluation at the end
    last = {s.lane: s.start for s in spans if s.name == "generate"}
    others = {"rank 0": "rank 1", "rank 1": "rank 0"}
    passes = [s for s in spans if s.name in PASSES]
    assert {s.name for s in passes} == {*PASSES}
    return {s.name for s in passes if s.start < last[others[s.lane]]}


LAYOUTS = {
    "one instance": ["cluster.ranks=1"],
    "four instances": ["cluster.ranks=4"],
    "two instances of tp 2": ["cluster.ranks=4", "rollout.layout.tp=2"],
    "two instances of pp 2": ["cluster.ranks=4", "rollout.layout.pp=2"],
    "one instance of tp 2": ["cluster.ranks=2", "rollout.layout.tp=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("migration", ["kv", "recompute"])
def test_layouts(
    train: Train,
    long_tail: list[str],
    check_same: Callable[..., None],
    tmp_path: Path,
    layout: str,
    migration: str,
) -> None:
    """Other numbers of instances, and instances of several ranks, give what serial gives."""
    settings = [*long_tail, *LAYOUTS[layout]]
    serial = train(tmp_path / "serial", *settings)
    fused = train(tmp_path / "fused", *settings, *FUSED, f"schedule.migration={migration}")
    check_same(serial, fused)
    several = layout not in ("one instance", "one instance of tp 2")
    assert all((line["samples/migrated"] > 0) == several for line in fused.metrics)
    assert {*fetched_for(fused)} == ({*PASSES} if several else set())


@pytest.mark.slow
@pytest.mark.parametrize("migration", ["kv", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_old_policy(
    train: Train,
    long_tail: list[str],
    check_same: Callable[..., None],
    user_code: Path,
    tmp_path: Path,
    dtype: str,
    migration: str,
) -> None:
    """Old log-probabilities come from the generation weights, unless training computes otherwise.

    In bfloat16 rounding may choose another token, so there every sample is computed alone.
    """
    strict = ["deterministic=strict"] if dtype == "bfloat16" else []
    recipe = f"recipe={{target: '{user_code}:told_old'}}"
    settings = [*long_tail, *strict, "cluster.ranks=2", f"rollout.dtype={dtype}", recipe]
    serial = train(tmp_path / "serial", *settings)
    fused = train(tmp_path / "fused", *settings, *FUSED, f"schedule.migration={migration}")
    check_same(serial, fused)
    assert all(line["samples/migrated"] > 0 for line in fused.metrics)
    early = [s for s in fused.spans if s.name == "old_log_probs"]
    training = [s for s in fused.spans if s.name == "to_train"]
    for step in (1, 2, 3):
        begins = max(s.start for s in training if s.step == step and s.lane.startswith("rank"))
        inside = {s.start < begins for s in early if s.step == step}
        assert inside == {dtype == "float32"}
    assert ("old_log_probs" in fetched_for(fused, ["old_log_probs"])) == (dtype == "float32")


def test_memory_at_every_change_of_phase(run_of: Callable[[str], Any]) -> None:
    """Before and after: the switch, the way back, and each of the roles that score in turn."""
    spans, counters = read_timeline(run_of("serial").dir / "trace.json")
    lanes = {counter.lane for counter in counters if counter.name == "memory"}
    assert lanes == {"rank 0", "rank 1"}
    for lane in lanes:
        points = [c for c in counters if c.name == "memory" and c.lane == lane]
        assert all(10**8 < point.values["resident"] < 10**11 for point in points)
        changes = [s for s in spans if s.lane == lane and s.args["phase"] == "rl"]
        for name in ("switch", "to_train", *PASSES):
            named = [span for span in changes if span.name == name]
            assert len(named) >= 3
            for span in named:
                inside = [p for p in points if span.start <= p.when <= span.end]
                assert len(inside) >= 2, f"{name} of step {span.step}"


@pytest.mark.slow  # tests/schedule has it in virtual time
def test_a_reward_that_hangs_does_not_stop_its_rank(
    train: Train, long_tail: list[str], user_rewards: Path, tmp_path: Path
) -> None:
    """The first samples to end are those whose verifier sleeps; their rank decodes meanwhile."""
    settings = [setting for setting in long_tail if not setting.startswith("reward")]
    reward = ["reward=function", f"reward.function={user_rewards}:sleepy", "reward.extract=null"]
    steps = ["trainer.steps=1", "reward.timeout_s=1", "cluster.ranks=2"]
    steps += ["reward.max_failed_share=1"]
    schedule = ["schedule=fused", "schedule.migration_threshold=0"]  # ranks decode to the end
    run = train(tmp_path / "run", *settings, *reward, *schedule, *steps)
    (line,) = run.metrics
    hung = [s for s in run.steps[0].dispatched if s.scalars["reward_status"].startswith("timeout")]
    assert line["reward_timeout"] == len(hung) > 0
    assert all(sample.response_tokens <= 3 for sample in hung)
    slices = [s for s in run.spans if s.lane.endswith("/concurrent") and s.end - s.start >= 1]
    first = {slice_.lane: slice_ for slice_ in reversed(slices)}
    assert first
    for lane, slice_ in first.items():
        rank = lane.removesuffix("/concurrent")
        decoding = [s for s in run.spans if (s.lane, s.name) == (rank, "generate")]
        begun = [s for s in decoding if slice_.start < s.start and s.end < slice_.end]
        assert len(begun) > 5


@pytest.mark.slow
def test_a_rank_that_dies_while_samples_move_ends_the_run(
    command: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """One line, exit 1, no process left."""
    steps = ["trainer.steps=2000", "schedule.migration=kv", "run.dir=killed", "cluster.ranks=2"]
    settings = [s for s in long_tail if not s.startswith("trainer.steps")]
    run = command(*settings, *FUSED, *steps)
    metrics, trace = (tmp_path / "killed" / name for name in ("metrics.jsonl", "trace.json"))

    def moving() -> bool:
        """A sample has arrived in a step that has not ended."""
        done = len([line for line in read_lines(metrics) if "loss" in line])
        return done > 1 and any(
            s.name == "fetch" and s.step > done for s in read_timeline(trace)[0]
        )

    run.wait_for(moving)
    victim = next(p for p in run.alive() if p.name().startswith("ray::ClusterWorker"))
    victim.send_signal(signal.SIGKILL)
    code, out, err = run.end(timeout=20)
    assert (code, out, run.left) == (1, "", [])
    assert err.splitlines()[-1].startswith("hybridrl: rank ")
    assert f"(pid {victim.pid}) failed: its process ended" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert json.loads((tmp_path / "killed" / "run.json").read_text())["state"] == "failed"


def test_an_instance_holds_what_its_cache_and_its_batch_allow() -> None:
    data = DataConfig(max_prompt_tokens=20)
    sizes = {"max_new_tokens": 13, "block_size": 16, "max_running": 7}
    assert Config(data=data, rollout=RolloutConfig(**sizes)).samples_held == 7
    cached = RolloutConfig(**sizes, kv_cache_tokens=160)
    assert Config(data=data, rollout=cached).samples_held == 3  # 10 blocks; 33 tokens need three
    small = RolloutConfig(
        **sizes, kv_cache_tokens=32
    )  # holds one, if its prompt is not the longest
    assert Config(data=data, rollout=small).samples_held == 1


def test_a_threshold_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"migration_threshold=-1: wanted 0 or more, or null"):
        Config(schedule=FusedScheduleConfig(migration_threshold=-1))
