"""A run's record is whole at any moment, however the run ends."""

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hybridrl.config.run import TelemetryConfig
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.rundata import load
from hybridrl.telemetry.trace import read_timeline

QUIET = TelemetryConfig(progress=False, loggers=[])
WRITER = """
    import sys, time
    from pathlib import Path
    from hybridrl.config.run import TelemetryConfig
    from hybridrl.telemetry.run import Telemetry
    config = TelemetryConfig(loggers=[], progress=sys.argv[2] == "shown")
    with Telemetry(Path(sys.argv[1]), config, 100_000) as telemetry:
        telemetry.phase("rl", 100_000)
        for step in range(1, 100_000):
            telemetry.stage("generate")
            now = time.time()
            telemetry.span("rank 0", "generate", now - 1e-4, now, step)
            telemetry.samples(step, [{"id": str(step), "response": "x" * 300}])
            telemetry.lengths(step, [1, 2, 3])
            telemetry.event("switch", step=step, bytes=4, seconds=1e-3)
            telemetry.log(step, {"loss": 0.5, "reward_mean": 0.25, "tokens_per_s": 1e3})
            if step == 20:
                print("under way", flush=True)
            time.sleep(float(sys.argv[3]))
"""


def start_writer(
    run_dir: Path, show: str, pause: float, **streams: object
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(run_dir), show, str(pause)]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    # FORCE_COLOR must not bring control characters into a log either.
    env = {**os.environ, "PYTHONPATH": path, "FORCE_COLOR": "1", "TERM": "xterm"}
    process: subprocess.Popen[str] = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        **streams,  # type: ignore[call-overload]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    return process


def check_files(run_dir: Path) -> None:
    """Every file is strict JSON, to its last byte."""
    json.loads((run_dir / "run.json").read_text())
    json.loads((run_dir / "trace.json").read_text())
    for path in run_dir.glob("*.jsonl"):
        text = path.read_text()
        assert text.endswith("\n")
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())


def test_every_call_leaves_whole_files(tmp_path: Path) -> None:
    with Telemetry(tmp_path, QUIET, 2) as telemetry:
        calls = [
            lambda: telemetry.phase("rl", 2),
            lambda: telemetry.span("rank 0", "update", 1.0, 2.0, 1, tokens=5),
            lambda: telemetry.span("rank 1", "update", 1.0, 1.5, 1),
            lambda: telemetry.lengths(1, [3, 1, 2]),
            lambda: telemetry.samples(1, [{"id": str(k), "response": "x"} for k in range(20)]),
            lambda: telemetry.event("bad_step", step=1, loss=float("nan")),
            lambda: telemetry.log(1, {"loss": float("inf"), "tokens_per_s": 5.0}),
            lambda: telemetry.log(1, {"eval_accuracy": 0.5}),
        ]
        for call in calls:
            call()
            check_files(tmp_path)
        assert json.loads((tmp_path / "run.json").read_text())["state"] == "running"
    first, second = read_lines(tmp_path / "metrics.jsonl")
    assert first.keys() == {"step", "time", "phase", "loss", "tokens_per_s", "bubble_share"}
    assert (first["step"], first["phase"], first["loss"]) == (1, "rl", "Infinity")
    assert first["bubble_share"] == pytest.approx(0.25)  # the mean of 0 and 0.5
    assert "bubble_share" not in second
    assert len(read_lines(tmp_path / "samples.jsonl")) == QUIET.samples_per_step
    assert read_lines(tmp_path / "lengths.jsonl")[0]["lengths"] == [3, 1, 2]
    assert [row["kind"] for row in read_lines(tmp_path / "events.jsonl")] == ["phase", "bad_step"]


def test_late_spans_of_a_step_are_not_counted_in_the_next_one(tmp_path: Path) -> None:
    """A call that nobody waited for has ended in the next step."""
    with Telemetry(tmp_path, QUIET, 2) as telemetry:
        telemetry.span("rank 0", "update", 1.0, 2.0, 1)
        telemetry.log(1, {"loss": 1.0})
        telemetry.span("rank 0", "generate", 4.0, 8.0, 2)
        telemetry.span("rank 0", "record", 3.0, 3.5, 1)
        telemetry.span("rank 1", "generate", 4.0, 6.0, 2)
        telemetry.log(2, {"loss": 1.0})
    shares = [line["bubble_share"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert shares == [0.0, pytest.approx(0.25)]  # the mean of 0 and 0.5
    steps = {span.name: span.step for span in read_timeline(tmp_path / "trace.json")[0]}
    assert steps == {"update": 1, "generate": 2, "record": 1}


def test_a_run_that_cannot_begin_its_records_has_failed(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(IsADirectoryError), Telemetry(tmp_path, QUIET, 1):
        raise AssertionError("it began")
    status = json.loads((tmp_path / "run.json").read_text())
    assert (status["state"], status["ended"] > 0) == ("failed", True)
    assert status["reason"].startswith("IsADirectoryError: ")


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "finished", ""),
        (KeyboardInterrupt(), "interrupted", ""),
        (RuntimeError("3 bad steps\nin a row"), "failed", "RuntimeError: 3 bad steps in a row"),
    ],
)
def test_how_a_run_ended_is_written(
    tmp_path: Path, error: BaseException | None, state: str, reason: str
) -> None:
    def run() -> None:
        with Telemetry(tmp_path, QUIET, 1):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    status = json.loads((tmp_path / "run.json").read_text())
    assert (status["state"], status["reason"]) == (state, reason)
    assert status["started"] <= status["ended"]


@pytest.mark.long
def test_kill_9_leaves_whole_files_that_can_be_continued(tmp_path: Path) -> None:
    for attempt in range(3):
        process = start_writer(tmp_path / str(attempt), "hidden", 0.0)
        time.sleep(0.05 * attempt)
        process.kill()
        process.wait()
        check_files(tmp_path / str(attempt))
        assert load(tmp_path / str(attempt)).state == "killed"
    run_dir = tmp_path / "0"
    known = len(read_lines(run_dir / "metrics.jsonl"))
    started = json.loads((run_dir / "run.json").read_text())["started"]
    with Telemetry(run_dir, QUIET, 5) as telemetry:
        telemetry.phase("rl", 5)
        telemetry.log(3, {"loss": -1.0})
    check_files(run_dir)
    assert len(read_lines(run_dir / "metrics.jsonl")) == known + 1
    assert json.loads((run_dir / "run.json").read_text())["started"] == started
    again = {key.step: row for key, row in load(run_dir).metrics.items()}
    assert again[3]["loss"] == -1.0  # the later record of a step counts
    assert len(again) == known


@pytest.mark.long
def test_a_full_disk_is_reported_and_what_was_written_can_be_read(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from hybridrl.config.run import TelemetryConfig
        from hybridrl.telemetry.run import Telemetry
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        config = TelemetryConfig(loggers=[], progress=False)
        try:
            with Telemetry(Path(sys.argv[1]), config, 10) as telemetry:
                for step in range(10_000):
                    telemetry.span("rank 0", "update", step, step + 1, step)
                    telemetry.log(step, {"loss": 0.5})
        except OSError as error:
            print("OSError", error.errno)
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.startswith("OSError")
    status = json.loads((tmp_path / "run.json").read_text())
    assert status["state"] == "failed"
    assert "File too large" in status["reason"]
    run = load(tmp_path)
    assert len(run.metrics) > 50
    assert len(run.spans) > 50
    with Telemetry(tmp_path, QUIET, 10) as telemetry:  # there is room again
        telemetry.log(10_000, {"loss": 0.5})
    check_files(tmp_path)


def test_tensorboard_has_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TelemetryConfig(progress=False)
    with Telemetry(tmp_path, config, 3) as telemetry:
        telemetry.phase("rl", 3)
        for step in range(3):
            telemetry.log(step, {"loss": step / 4})
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    read = [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors("rl/loss")]
    assert read == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_piped_progress_is_plain_lines_and_leaves_stdout_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = start_writer(tmp_path / "run", "shown", 0.0, stderr=stderr)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    shown = log.read_text()
    lines = shown.split("Traceback")[0].splitlines()
    assert lines[0].startswith("rl 1/100000  1,000 tokens/s  reward 0.250")
    assert lines[0].endswith(" left")
    assert all(char == "\n" or char.isprintable() for char in shown.split("Traceback")[0])
    assert len(lines) < 5  # a line per few seconds, not per step
    assert out == ""
    assert json.loads((tmp_path / "run/run.json").read_text())["state"] == "interrupted"


def test_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start_writer(tmp_path / "run", "shown", 0.01, stderr=theirs)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    text = shown.decode()
    assert "generate" in text  # the stage
    assert "1,000 tokens/s" in text
    assert "reward 0.250" in text
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")  # hidden, then shown again
    assert "\x1b[?25l" not in text[text.rindex("\x1b[?25h") :]
    assert text.index("\x1b[?25h") < text.index("Traceback")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # Linux: the other end is closed and everything is read
        return b""


def test_telemetry_imports_nothing_heavy() -> None:
    code = (
        "import sys, hybridrl.telemetry.run, hybridrl.telemetry.report;"
        "print(sorted({'torch', 'ray', 'tensorboard', 'numpy'} & sys.modules.keys()))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("within", [False, True])
def test_a_run_that_goes_on_has_every_step_once(tmp_path: Path, within: bool) -> None:
    """What came after the checkpoint is cut off: lines, slices of the trace, TensorBoard's.

    So it is in another process, and within the one that was there before.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TelemetryConfig(progress=False)
    sizes = dict[str, int]()

    def write(telemetry: Telemetry, first: int) -> None:
        telemetry.phase("rl", 6)
        for step in range(first, 7):
            telemetry.span("rank 0", "generate", step + first / 10, step + 0.5, step)
            telemetry.samples(step, [{"id": str(first)}])
            telemetry.lengths(step, [first])
            telemetry.log(step, {"loss": float(first)})
            if step == 3:
                sizes.update(telemetry.sizes())

    with Telemetry(tmp_path, config, 6) as telemetry:
        write(telemetry, 1)
        if within:
            telemetry.rewind(sizes)
            write(telemetry, 4)
    if not within:
        with Telemetry(tmp_path, config, 6, sizes) as telemetry:
            write(telemetry, 4)
    run = load(tmp_path)
    wanted = [(step, 1 if step < 4 else 4) for step in range(1, 7)]
    assert [(row["step"], row["loss"]) for row in read_lines(tmp_path / "metrics.jsonl")] == wanted
    assert [(row["step"], int(row["id"])) for row in run.samples] == wanted
    assert [(row["step"], *row["lengths"]) for row in run.lengths] == wanted
    assert [(span.step, round(10 * (span.start % 1))) for span in run.spans] == wanted
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()
    values = [(x.step, x.tensor_proto.float_val[0]) for x in board.Tensors("rl/loss")]
    assert values == wanted
