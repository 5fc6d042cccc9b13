"""What runs leave behind besides checkpoints: the metrics that docs/telemetry.md lists, the log."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from stubs import StubJudge

from hybridrl.config.run import TelemetryConfig
from hybridrl.driver.run_records import (
    RunRecords,
    ThenTexts,
    metrics_by_kind,
    rewards_by_prompt,
    sample_facts,
    step_metrics,
)
from hybridrl.flow.ledger import Drop, DropReason
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule import StepResult
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.trace import read_timeline, read_trace
from hybridrl.workers.turns import SampleTexts

KINDS = {
    "fused": "cluster.ranks=2 schedule=fused recipe=grpo recipe.kl_coef=0.05"
    " recipe.correction.step_scale=sqrt trainer.layout.tp=2 trainer.layout.sequence_parallel=true"
    " warm_start.steps=1 trainer.steps=3 rollout.decode_steps=1 eval.sets.main.num_samples=2"
    " log.level=debug",
    "partial": "cluster.ranks=1 schedule=partial recipe=grpo trainer.steps=3"
    " model.tiny.num_experts=4 trainer.router_replay=rollout"
    " trainer.router_aux_loss_coef=0.001 rollout.speculate=2",
    "packed": "cluster.ranks=1 schedule=packed recipe=grpo trainer.steps=2 warm_start.steps=0",
    "safe_rlhf": "cluster.ranks=2 trainer.layout.replicas=2 recipe=safe_rlhf trainer.steps=1"
    " trainer.share_prompts=always"
    " +data.sources={other:{name:spell_backward,task_column:metadata.word_len}}"
    " data.curriculum.easy_rest=1",
    "dpo": "cluster.ranks=1 recipe=dpo trainer.steps=1",
    "distill": "cluster.ranks=1 recipe=distill trainer.steps=1",
    "distill_topk": "cluster.ranks=1 recipe=distill_topk trainer.steps=1 recipe.top_k=4",
    "chat": "cluster.ranks=1 recipe=grpo trainer.steps=1 warm_start.steps=0 reward=chat"
    " reward.endpoint.url={url} reward.endpoint.model=stub",
    "rm": "cluster.ranks=1 recipe=rm trainer.steps=1",
    "apart": "cluster.ranks=2 cluster.pools.rollout=1 recipe=grpo schedule=one_step"
    " trainer.steps=1 warm_start.steps=0",
    "conversations": "cluster.ranks=1 recipe=grpo trainer.steps=1 warm_start.steps=0"
    " environment=function environment.path={talking}:talk environment.max_turn_tokens=3"
    " environment.max_failed_share=1",
    **{
        name: f"cluster.ranks=1 recipe={name} trainer.steps=1 warm_start.steps=0"
        for name in ("sapo", "clip_cov", "kl_cov", "orpo")
    },
}
"""Runs of models that write, together with the next one, every metric that there is."""

EMULATED = (
    "cluster=emulated cluster.ranks=8 cluster.time_scale=0.001 rollout.layout.tp=4"
    " schedule=fused schedule.early_backward=auto trainer.layout.replicas=2 rollout.tail_tp=8"
    " trainer.steps=1 trainer.prompts_per_step=6 rollout.max_new_tokens=2000"
    " telemetry.progress=false telemetry.loggers=[] telemetry.report=false"
)

DOCS = Path(__file__).parents[2] / "docs" / "telemetry.md"


@pytest.fixture(scope="module")
def settings(tiny_run: list[str]) -> list[str]:
    """Overrides of a run of seconds, with a recipe's own defaults."""
    return [setting for setting in tiny_run if not setting.startswith("recipe")]


@pytest.fixture(scope="module")
def runs(
    train_here: Callable[..., Any], settings: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The directories of one run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    with StubJudge() as judge:
        places = {"url": judge.url, "talking": Path(__file__).parents[1] / "talking.py"}
        kinds = {
            name: kind.format(**places)
            for name, kind in KINDS.items()
            if any(f"{{{place}}}" in kind for place in places)
        }
        with_models = {
            name: train_here(folder / name, *settings, *kind.split()).dir
            for name, kind in (KINDS | kinds).items()
        }
    return with_models | {"emulated": train_here(folder / "emulated", *EMULATED.split()).dir}


# Metrics


def listed() -> list[str]:
    """The keys that docs/telemetry.md lists."""
    section = DOCS.read_text().partition("## Keys of metrics.jsonl")[2].partition("\n## ")[0]
    rows = [line.split(": ")[0] for line in section.splitlines() if line.startswith("- `")]
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row)]


def pattern(key: str) -> str:
    """What a key of the list matches: words in capitals stand for names."""
    return re.sub(r"[A-Z]+", "[a-z0-9_@]+", key)


@pytest.mark.layouts
def test_the_list_of_metrics_is_what_runs_write(runs: dict[str, Path]) -> None:
    written = {
        key for run in runs.values() for line in read_lines(run / "metrics.jsonl") for key in line
    }
    assert len(listed()) > 80
    unwritten = [k for k in listed() if not any(re.fullmatch(pattern(k), w) for w in written)]
    assert not unwritten, "the list has keys that no run writes"
    unlisted = [w for w in written if not any(re.fullmatch(pattern(k), w) for k in listed())]
    assert not unlisted, "runs write keys that the list lacks"


@pytest.mark.layouts
def test_dropped_is_the_sum_over_all_reasons(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """By a filter too: no response earns a reward here, so all of a prompt are alike."""
    kind = "cluster.ranks=1 recipe=grpo trainer.steps=1 eval.sets.main.every=null reward=exact"
    settings = [s for s in tiny_run if not s.startswith(("recipe", "reward"))]
    run = train_here(tmp_path / "run", *settings, *kind.split())
    (step,) = run.steps
    (line,) = [x for x in read_lines(run.dir / "metrics.jsonl") if "samples/dropped" in x]
    assert line["samples/dropped"] == len(step.dropped) > 0
    assert line["samples/filtered"] == len(step.dropped)
    assert line["samples/aborted"] == line["samples/join_dropped"] == 0
    assert line["samples/used"] + line["samples/dropped"] == len(step.dispatched)


def no_texts(by_rank: Mapping[int, list[SampleId]], then: ThenTexts) -> None:
    then({})


def test_lines_of_samples_say_where_they_come_from_and_whether_they_are_used(
    tmp_path: Path,
) -> None:
    samples = [Sample(id=SampleId(position), rank=0) for position in (4, 5, 6)]
    samples[1].scalars["environment_failure"] = "crash"
    dropped = {SampleId(5): Drop(DropReason.FILTER, "no spread")}

    def texts(by_rank: Mapping[int, list[SampleId]], then: ThenTexts) -> None:
        then(dict.fromkeys(by_rank[0], SampleTexts("2 + 2", "4")))

    with Telemetry(tmp_path, TelemetryConfig(progress=False, loggers=[]), 1) as telemetry:
        records = RunRecords(
            telemetry,
            2,
            current_step=lambda: 1,
            kinds_of=lambda position: (),
            origin_of=lambda position: ("sums", f"task {position}"),
        )
        records.record_samples(samples, texts, dropped)
        records.record_samples(samples, texts)
        records.record_evaluated("main", 1, samples, texts)
    failures = [line.get("failure") for line in read_lines(tmp_path / "samples.jsonl")]
    assert failures == [None, "crash"] * 3
    columns = ("id", "source", "task", "drop_reason")
    lines = [{x: r[x] for x in columns if x in r} for r in read_lines(tmp_path / "samples.jsonl")]
    assert lines == [
        {"id": "4.0", "source": "sums", "task": "task 4", "drop_reason": None},
        {"id": "5.0", "source": "sums", "task": "task 5", "drop_reason": "filter"},
        {"id": "4.0", "source": "sums", "task": "task 4"},
        {"id": "5.0", "source": "sums", "task": "task 5"},
        {"id": "4.0"},
        {"id": "5.0"},
    ]


def test_a_score_that_its_judge_did_not_give_is_in_no_record() -> None:
    scalars = {"reward": 0.0, "reward_status": "error: a", "cost": 2.0, "cost_status": "ok"}
    good = Sample(id=SampleId(4), rank=0, scalars={**scalars, "reward_status": "ok", "reward": 3.0})
    result = StepResult(1, (), (Sample(id=SampleId(3), rank=0, scalars=scalars), good), {}, {}, ())
    failed, other = sample_facts(result, lambda position: ("sums", ""))[0]
    assert "reward" not in failed.scalars
    assert (failed.scalars["reward_status"], failed.scalars["cost"]) == ("error: a", 2.0)
    assert other.scalars["reward"] == 3.0
    assert rewards_by_prompt(result.dispatched) == {3: [], 4: [3.0]}
    metrics = step_metrics(result, 1.0)
    assert (metrics["reward_mean"], metrics["cost_mean"], metrics["reward_error"]) == (3.0, 2.0, 1)
    by_kind = metrics_by_kind(result.dispatched, lambda position: ["all"])
    assert (by_kind["all/samples"], by_kind["all/reward_mean"]) == (1, 3.0)


def test_a_judge_that_fails_always_is_said_once(tmp_path: Path) -> None:
    def judged(*statuses: str) -> StepResult:
        samples = []
        for k, status in enumerate(statuses):
            samples.append(Sample(id=SampleId(4, k=k), rank=0))
            samples[-1].scalars.update(reward=0.0, reward_status=status)
        return StepResult(1, (), tuple(samples), {}, {"update/loss": 0.1}, ())

    with Telemetry(tmp_path, TelemetryConfig(progress=False, loggers=[]), 1) as telemetry:
        records = RunRecords(
            telemetry,
            0,
            current_step=lambda: 1,
            kinds_of=lambda position: (),
            origin_of=lambda position: ("sums", ""),
        )
        for statuses in (("ok", "error: a"), ("error: HTTP 404", "timeout: b"), ("error: c",)):
            records.record_step(judged(*statuses), 1.0, no_texts)
    (note,) = [line for line in read_lines(tmp_path / "events.jsonl") if line["kind"] == "note"]
    assert note["text"].endswith("no sample has a reward; the first: reward: error: HTTP 404")


ALIKE = "where the rewards of a prompt's samples are all alike, there is nothing to learn"


@pytest.mark.parametrize(
    ("failed", "filtered", "text"),
    [
        (6, 2, f"6 samples without a reward (error: no), 2 samples left out; {ALIKE}"),
        (8, 0, "8 samples without a reward (error: no)"),
        (0, 8, f"8 samples left out; {ALIKE}"),
    ],
)
def test_a_step_without_training_says_where_a_judge_failed(
    tmp_path: Path, failed: int, filtered: int, text: str
) -> None:
    samples = [Sample(id=SampleId(4, k=k), rank=0) for k in range(failed + filtered)]
    for k, sample in enumerate(samples):
        sample.scalars.update(reward=0.0, reward_status="error: no" if k < failed else "ok")
    reasons = [DropReason.JUDGE] * failed + [DropReason.FILTER] * filtered
    dropped = {s.id: Drop(reason, "why") for s, reason in zip(samples, reasons, strict=True)}
    with Telemetry(tmp_path, TelemetryConfig(progress=False, loggers=[]), 1) as telemetry:
        records = RunRecords(telemetry, 0, lambda: 1, lambda p: (), lambda p: ("sums", ""))
        records.record_step(StepResult(1, (), tuple(samples), dropped, {}, ()), 1.0, no_texts)
    note = next(x for x in read_lines(tmp_path / "events.jsonl") if x["kind"] == "note")
    assert note["text"] == f"step 1: nothing to train on, {text}"


def test_every_reason_to_drop_has_a_metric() -> None:
    """A run's end is an event and has no metric; a failed step has no metrics at all."""
    reasons = [r for r in DropReason if r not in (DropReason.RUN_ENDED, DropReason.STEP_FAILED)]
    dropped = {SampleId(i): Drop(reason, "why") for i, reason in enumerate(reasons)}
    metrics = step_metrics(StepResult(1, (), (), dropped, {}, ()), 1.0)
    kinds = ("filtered", "join_dropped", "judge_dropped", "aborted")
    counts = [metrics[f"samples/{kind}"] for kind in kinds]
    assert counts == [3, 1, 1, 1]
    assert sum(counts) == len(reasons)


# Profiles


@pytest.mark.layouts
def test_a_profile_is_on_the_time_axis_of_the_stages(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    """The profile has the step and the rank that are asked for, and no others."""
    kind = (
        "cluster.ranks=2 recipe=distill trainer.steps=2 warm_start.steps=0"
        " telemetry.profile.steps=[2,9] telemetry.profile.ranks=[1]"
    )
    run = train_here(tmp_path / "run", *settings, *kind.split()).dir
    events = read_trace(run / "trace.json")
    operations = [event for event in events if event.get("cat") == "torch"]
    assert {event["args"]["step"] for event in operations} == {2}
    (pid,) = {event["pid"] for event in operations}
    spans, _ = read_timeline(run / "trace.json")
    assert pid == 1 + 2  # rank 1
    assert not any(span.name.startswith("aten::") for span in spans)
    update = next(s for s in spans if (s.lane, s.name, s.step) == ("rank 1", "update", 2))
    backward = [e["ts"] / 1e6 for e in operations if e["name"].startswith("autograd::engine")]
    assert backward
    # Clocks of torch and of Python differ by microseconds.
    assert all(update.start - 1e-3 <= when <= update.end + 1e-3 for when in backward)
    notes = [e for e in read_lines(run / "events.jsonl") if e["kind"] == "note"]
    assert sum("no snapshot of memory" in note["text"] for note in notes) == 1
    assert "telemetry.profile.steps=[9]: the last step is 2" in [note["text"] for note in notes]


@pytest.mark.layouts
def test_updates_say_how_much_of_the_peak_they_reach(runs: dict[str, Path]) -> None:
    """A share of a measured peak, which a small model on a busy machine does not reach."""
    for name, run in runs.items():
        lines = [line for line in read_lines(run / "metrics.jsonl") if "mfu" in line]
        assert lines or name in ("rm", "emulated")
        assert all(0 < line["mfu"] < 2 and line["flops"] > 0 for line in lines)


# The log

QUIET = {"schedule", "layout", "engines", "rewards"}
"""Rooms that take part in every run and have lines at debug level alone."""


@pytest.mark.layouts
def test_at_debug_the_log_says_what_driver_and_ranks_do(runs: dict[str, Path]) -> None:
    """Rank 0 is the driver's own process here; rank 1 has a file."""
    logs = runs["fused"] / "logs"
    driver, rank = (logs / "driver.log").read_text(), (logs / "rank-1.log").read_text()
    room = "hybridrl.driver"
    for who, line in [
        ("driver INFO", f"{room}.run: phase rl begins, to step 4"),
        ("driver INFO", f"{room}.run: step 2 begins"),
        ("driver DEBUG", f"{room}.ray_executor: stage update_actor begins on"),
        ("driver DEBUG", f"{room}.worker_group: rank 1 answered: "),
        ("driver DEBUG", f"{room}.ray_executor: ended: UpdateDone stage=update_actor"),
        ("driver INFO", f"{room}.run: step 2 ended after"),
        ("driver INFO", f"{room}.checkpoints: wrote {runs['fused'] / 'final'} after step 4"),
        ("driver INFO", f"{room}.train: the run has finished"),
    ]:
        assert re.search(rf"^[\d-]{{10}} [\d:,]{{12}} {who} {re.escape(line)}", driver, re.M), line
    for calls in (driver.replace(" rank 0 ", " rank 1 "), rank):
        started = re.findall(r" rank 1 DEBUG \S+process_launcher: call (\w+) started\n", calls)
        ended = re.findall(r" rank 1 DEBUG \S+process_launcher: call (\w+) ended after ", calls)
        assert {"setup", "update"} <= set(started)
        assert started == ended  # one after the other: each ends before the next
        for event in (r"started\n", r"ended after \d"):
            export = rf"export to {runs['fused']}/\S+ {event}"
            assert re.search(rf" rank 1 DEBUG hybridrl\.checkpoint\.hf: {export}", calls)
    assert rooms("DEBUG", driver) >= QUIET
    assert {"engines", "layout", "rewards"} <= rooms("DEBUG", rank)
    for who, line in [
        ("driver", r"schedule\.base: step 3 begins with 0 pending samples\n"),
        ("driver", r"schedule\.base: to_generate ended\n"),
        ("driver", r"schedule\.loop: the round ended: \d+ samples migrated"),
        ("rank 0", r"layout\.weight_switch: weights have moved: \d+ bytes received"),
        ("rank 0", r"engines\.rollout\.native: asleep, without weights\n"),
        ("rank 0", r"engines\.train\.engine: update ended, version 4\n"),
    ]:
        assert re.search(rf" {who} DEBUG hybridrl\.{line}", driver), line


def rooms(level: str, log: str) -> set[str]:
    """The rooms of the package that have lines of a level in a log."""
    return set(re.findall(rf" {level} hybridrl\.(\w+)", log))


@pytest.mark.layouts
def test_at_info_the_log_has_no_call(runs: dict[str, Path]) -> None:
    text = (runs["partial"] / "logs" / "driver.log").read_text()
    assert "driver INFO hybridrl.driver.run: step 2 begins" in text
    assert "DEBUG" not in text
    assert " call " not in text
    assert not QUIET & rooms("INFO", text)


@pytest.mark.slow
def test_under_ray_a_rank_logs_no_call_at_info(
    train: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    """tests/driver/test_fused.py has a run at debug level."""
    kind = "cluster.ranks=1 recipe=dpo trainer.steps=1 eval.sets.main.every=null log.level=info"
    run = train(tmp_path / "run", *settings, *kind.split())
    (ranks,) = [e for e in read_lines(run.dir / "events.jsonl") if e["kind"] == "ranks"]
    text = Path(ranks["log"]).read_text()
    assert " rank 0 INFO hybridrl.models.attention_choice: " in text
    assert "DEBUG" not in text
