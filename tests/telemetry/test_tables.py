"""What the report's tables hold."""

from hybridrl.telemetry.rundata import RunData, StepKey
from hybridrl.telemetry.tables import last_timelines, samples, timelines
from hybridrl.telemetry.trace import TraceSpan


def test_held_out_samples_follow_those_of_the_step_before_them() -> None:
    rows = [(0, "evaluation"), (1, "rl"), (2, "rl"), (2, "evaluation")]
    run = RunData(
        name="run",
        directory="run",
        samples=[{"step": step, "phase": phase, "id": "0"} for step, phase in reversed(rows)],
    )
    labels = [step["label"] for step in samples(run)[0]]
    assert labels == [f"{phase} step {step}" for step, phase in rows]


def test_a_sample_says_how_its_episode_has_failed() -> None:
    row = {"step": 1, "phase": "rl", "id": "0", "finish": "stop", "failure": "crash"}
    ((step,), _) = samples(RunData(name="run", directory="run", samples=[row]))
    assert step["rows"][0]["facts"] == {"id": "0", "finish": "stop", "failure": "crash"}


def test_a_text_that_was_lost_is_no_empty_one() -> None:
    rows = [{"step": 1, "id": f"0.{k}", "response": text} for k, text in enumerate([None, ""])]
    ((step,), _) = samples(RunData(name="run", directory="run", samples=rows))
    assert [row["response"] for row in step["rows"]] == ["(lost with its instance)", ""]


def test_a_timeline_s_title_names_the_plan_that_the_step_took() -> None:
    """Where the schedule chooses one, and there is something to choose by."""
    spans = [
        TraceSpan("generate", step, step + 0.5, lane="rank 0", step=step, args={"phase": "rl"})
        for step in (1, 2, 3)
    ]
    metrics = {
        StepKey(1, "rl", 1): {"loss": 1.0},
        StepKey(2, "rl", 2): {"plan/stay_s": 1.0, "plan/stay_chosen": 1.0, "bad_step": 1.0},
        StepKey(3, "rl", 3): {"plan/stay_chosen": 0.0, "plan/migrate_train_early_chosen": 1.0},
    }
    run = RunData(name="run", directory="run", spans=spans, metrics=metrics)
    assert [line["label"] for line in timelines(run)] == [
        "first: step 1", "median: step 2, stay", "last: step 3, migrate train early",
    ]  # fmt: skip
    assert [line["label"] for line in last_timelines(run, 2)] == [
        "step 3, migrate train early", "step 2, stay",
    ]  # fmt: skip
    metrics[StepKey(2, "rl", 2)]["plan/stay_happened"] = 1.0  # runs of old have no record of it
    happened = {"plan/migrate_train_early_happened": 0.0, "plan/migrate_happened": 1.0}
    metrics[StepKey(3, "rl", 3)] |= happened
    assert [line["label"] for line in last_timelines(run, 2)] == [
        "step 3, migrate train early chosen, migrate happened", "step 2, stay",
    ]  # fmt: skip
