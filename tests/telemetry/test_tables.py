"""What the report's tables hold."""

from hybridrl.telemetry.rundata import RunData
from hybridrl.telemetry.tables import samples


def test_held_out_samples_follow_those_of_the_step_before_them() -> None:
    rows = [(0, "evaluation"), (1, "rl"), (2, "rl"), (2, "evaluation")]
    run = RunData(
        name="run",
        directory="run",
        samples=[{"step": step, "phase": phase, "id": "0"} for step, phase in reversed(rows)],
    )
    labels = [step["label"] for step in samples(run)[0]]
    assert labels == [f"{phase} step {step}" for step, phase in rows]
