"""Emulated ranks that generate alone: the schedules of separate ranks end, by the table."""

from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import compose
from hybridrl.config.loss import Loss
from hybridrl.driver import train as runs
from hybridrl.flow.executor import TRAINING_POOL
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.trace import read_timeline
from hybridrl.workers.data_plane import LocalDataPlane
from hybridrl.workers.emulated import StoredLengths
from hybridrl.workers.emulated_ranks import EmulatedRanks
from hybridrl.workers.emulation import emulated_push, emulated_train_token_s, scaled_costs
from hybridrl.workers.training import UpdateShare

STEPS = 4
HERE = (
    "cluster=emulated", "cluster.ranks=6", "cluster.pools.rollout=4", "rollout.layout.tp=2",
    "cluster.time_scale=0.001", f"trainer.steps={STEPS}", "trainer.prompts_per_step=4",
    "rollout.max_new_tokens=500", "rollout.max_running=8", "data.size=200", "data.eval_size=8",
    "telemetry.progress=false", "telemetry.loggers=[]", "telemetry.report=false",
)  # fmt: skip


class NoLoss(Loss[Any]):
    def __call__(self, *args: object) -> Any:
        raise AssertionError("an emulated update computes nothing")


def configured(*settings: str) -> Any:
    compose.register()
    return compose.check([*HERE, *settings])


def trained(folder: Path, schedule: str) -> list[dict[str, Any]]:
    """Prompts and lengths of each step, and how stale its tokens were."""
    runs.train(configured(f"schedule={schedule}", f"run.dir={folder}"))
    metrics = read_lines(folder / "metrics.jsonl")
    lengths = read_lines(folder / "lengths.jsonl")
    stale = [line.get("samples/staleness", 0.0) for line in metrics]
    pairs = [sorted(zip(x["prompts"], x["lengths"], strict=True)) for x in lengths]
    return [{"samples": one, "stale": s} for one, s in zip(pairs, stale, strict=True)]


@pytest.mark.long
def test_schedules_of_separate_ranks_train_the_batches_of_serial(tmp_path):
    """Lengths follow from identity, so `one_step` has them too; its staleness is the table's."""
    steps = {name: trained(tmp_path / name, name) for name in ("serial", "periodic", "one_step")}
    samples = {name: [step["samples"] for step in run] for name, run in steps.items()}
    assert samples["serial"] == samples["periodic"] == samples["one_step"]
    assert len(samples["serial"]) == STEPS
    assert [step["stale"] for step in steps["periodic"]] == [0.0] * STEPS
    assert [step["stale"] for step in steps["one_step"]] == [0.0, *[1.0] * (STEPS - 1)]
    names = {span.name for span in read_timeline(tmp_path / "one_step" / "trace.json")[0]}
    assert "push" in names
    assert "switch" not in names


def test_groups_are_trained_as_they_come(tmp_path):
    small = "trainer.max_tokens_per_micro_batch=256"
    runs.train(configured("schedule=periodic", small, f"run.dir={tmp_path / 'small'}"))
    lines = read_lines(tmp_path / "small" / "metrics.jsonl")
    assert any(line.get("samples/trained_early", 0) > 0 for line in lines)


def test_training_ranks_have_their_share_of_the_seconds():
    """Two of six ranks train: three times the seconds of all; a push scales with time."""
    config = configured("schedule=one_step")
    assert emulated_train_token_s(config) == pytest.approx(3 * scaled_costs(config).train_token_s)
    assert 0 < emulated_push(config).push_s < emulated_push(config).load_s
    longer = emulated_push(configured("schedule=one_step", "cluster.time_scale=0.002"))
    assert longer.load_s == pytest.approx(2 * emulated_push(config).load_s)


@pytest.mark.parametrize("here", [1, 2], ids=["half of the pool", "all of it"])
def test_ranks_in_other_processes_train_their_share_of_early_groups(here):
    """The pool has two ranks: a process that has one of them counts the tokens of both."""
    config = configured("schedule=periodic")
    ranks = EmulatedRanks(range(here), config, LocalDataPlane())
    stage = UpdateStage(
        name="update", upstream=(), role="actor", inputs=(), loss=NoLoss(), fields={}
    )
    replies: list[Any] = []
    for rank in range(here):
        id = SampleId(rank)
        share = UpdateShare(((id,),), {}, {}, ({id: StoredLengths(20, 80)},))
        call = stage, TRAINING_POOL, share, (id,)
        ranks.call(rank, "train_early", call, {}, 0.0, lambda reply, error: replies.append(reply))
    ranks.end_due(1e9)
    assert len(replies) == here
    wanted = pytest.approx(200 * emulated_train_token_s(config))
    assert [reply.value.seconds for reply in replies] == [wanted] * here
