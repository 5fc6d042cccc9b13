"""Loggers beside the run's own files: what they get, and that they never end or hold up a run."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.run import LoggerName, TelemetryConfig
from hybridrl.telemetry.environment import without_secrets
from hybridrl.telemetry.loggers import delivery, run_loggers
from hybridrl.telemetry.loggers.interface import LoggedRun
from hybridrl.telemetry.records import JsonLines, read_lines
from hybridrl.telemetry.run import Telemetry

BOTH = TelemetryConfig(progress=False, loggers=[LoggerName.tensorboard, LoggerName.wandb])


class FileLogger:
    """A service whose store is a file of the run: what it was sent, in order."""

    keeps_last_step = False
    last_step: int | None = None

    def start(self, run: LoggedRun, run_id: str | None) -> str:
        self.store = JsonLines(run.run_dir / "store.jsonl")
        self.id = run_id or f"id-{len(read_lines(self.store.path))}"
        self.store.append({"start": self.id, "settings": dict(run.settings)})
        return self.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.store.append({"step": step, **metrics})

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.store.append({"step": step, name: list(rows)})

    def close(self, state: str) -> None:
        self.store.append({"close": state})


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], None]:
    """`service(Logger)`: wandb is that class."""

    def replace(logger: type) -> None:
        monkeypatch.setitem(run_loggers.LOGGERS, LoggerName.wandb, logger)

    replace(FileLogger)
    return replace


def run(run_dir: Path, steps: Sequence[int], sizes: Mapping[str, int] | None, **more: Any) -> Any:
    """Record these steps; answers with the sizes after step 5."""
    noted = None
    with Telemetry(run_dir, BOTH, 8, sizes, **more) as telemetry:
        telemetry.phase("rl", 8)
        for step in steps:
            telemetry.log(step, {"loss": step + steps[0] / 10})
            telemetry.samples(step, [{"id": f"{step}.{steps[0]}", "reward": 1.0}])
            if step == 5:
                noted = telemetry.sizes()
    return noted


def losses(run_dir: Path) -> list[tuple[int, float]]:
    rows = read_lines(run_dir / "store.jsonl")
    return [(row["step"], row["rl/loss"]) for row in rows if "rl/loss" in row]


def test_a_service_gets_every_step_once(tmp_path: Path, service: object) -> None:
    """The run ended at step 7, and goes on from the checkpoint of step 5."""
    sizes = run(tmp_path, range(1, 8), None, settings={"trainer.steps": 8})
    run(tmp_path, range(6, 9), sizes)
    assert losses(tmp_path) == [*((step, step + 0.1) for step in range(1, 8)), (8, 8.6)]
    rows = read_lines(tmp_path / "store.jsonl")
    assert [row["start"] for row in rows if "start" in row] == ["id-0", "id-0"]
    assert rows[0]["settings"] == {"trainer.steps": 8}
    assert [row["close"] for row in rows if "close" in row] == ["finished", "finished"]
    samples = [row["samples/rl"][0]["id"] for row in rows if "samples/rl" in row]
    assert samples == [*(f"{step}.1" for step in range(1, 8)), "8.6"]
    record = json.loads((tmp_path / "loggers/wandb.json").read_text())
    assert record == {"id": "id-0", "sent": {"rl/loss": 8, "samples/rl": 8}}


def test_each_evaluation_set_of_a_step_is_a_table(tmp_path: Path, service: object) -> None:
    with Telemetry(tmp_path, BOTH, 8) as telemetry:
        for name in ("main", "own"):
            telemetry.samples(3, [{"set": name, "id": "0"}], phase="evaluation")
    sent = [name for row in read_lines(tmp_path / "store.jsonl") for name in row if "/" in name]
    assert sent == ["samples/evaluation/main", "samples/evaluation/own"]


def test_a_step_that_a_library_keeps_open_is_sent_again(
    tmp_path: Path, service: Callable[[type], None]
) -> None:
    """wandb stores a step with the next one: of a process that is killed the last one is lost."""

    def killed(self: object, state: str) -> None:
        raise ConnectionError

    service(type("Killed", (FileLogger,), {"keeps_last_step": True, "close": killed}))
    sizes = run(tmp_path, range(1, 8), None)
    record = json.loads((tmp_path / "loggers/wandb.json").read_text())
    assert record["sent"] == {"rl/loss": 6, "samples/rl": 6}
    service(type("Ended", (FileLogger,), {"keeps_last_step": True}))
    run(tmp_path, range(6, 9), sizes)
    assert losses(tmp_path)[6:] == [(7, 7.1), (7, 7.6), (8, 8.6)]
    record = json.loads((tmp_path / "loggers/wandb.json").read_text())
    assert record["sent"] == {"rl/loss": 8, "samples/rl": 8}


@pytest.mark.parametrize("method", ["start", "log"])
def test_what_a_failed_logger_has_missed_is_sent_by_the_next_process(
    tmp_path: Path, service: Callable[[type], None], method: str
) -> None:
    """The first process ends at step 7; what counts of it is up to the checkpoint of step 5."""

    def refuse(self: object, *_: object) -> None:
        raise ConnectionError

    service(type("Refusing", (FileLogger,), {method: refuse}))
    sizes = run(tmp_path, range(1, 8), None)
    assert losses(tmp_path) == []
    service(FileLogger)
    run(tmp_path, range(6, 9), sizes)
    assert losses(tmp_path) == [
        *((step, step + 0.1) for step in range(1, 6)),
        *((step, step + 0.6) for step in range(6, 9)),
    ]


def test_a_service_that_has_less_than_was_sent_gets_the_rest(
    tmp_path: Path, service: Callable[[type], None]
) -> None:
    """As wandb's server after a kill, when a batch was on its way."""
    sizes = run(tmp_path, range(1, 8), None)
    service(type("Behind", (FileLogger,), {"last_step": 4}))
    run(tmp_path, range(6, 9), sizes)
    assert losses(tmp_path)[7:] == [(5, 5.1), (6, 6.6), (7, 7.6), (8, 8.6)]


def test_other_metrics_of_a_step_that_was_sent_are_sent(tmp_path: Path, service: object) -> None:
    """A signal may end a run after the last step's metrics, and before its evaluation."""
    sizes = run(tmp_path, range(1, 6), None)
    with Telemetry(tmp_path, BOTH, 8, sizes) as telemetry:
        telemetry.phase("rl", 8)
        telemetry.log(5, {"eval_accuracy": 0.5, "loss": 0.0})
    rows = read_lines(tmp_path / "store.jsonl")
    assert [row for row in rows if "rl/eval_accuracy" in row] == [
        {"step": 5, "rl/eval_accuracy": 0.5}
    ]


def test_a_run_that_goes_back_within_its_process_sends_no_step_twice(
    tmp_path: Path, service: Callable[[type], None]
) -> None:
    """Nor the newest one, which has not been stored yet."""
    service(type("Buffered", (FileLogger,), {"keeps_last_step": True}))
    with Telemetry(tmp_path, BOTH, 8) as telemetry:
        telemetry.phase("rl", 8)
        for step in (1, 2, 3):
            telemetry.log(step, {"loss": step + 0.1})
        telemetry.rewind({})
        telemetry.phase("rl", 8)
        for step in (1, 2, 3, 4):
            telemetry.log(step, {"loss": step + 0.6})
    assert losses(tmp_path) == [(1, 1.1), (2, 2.1), (3, 3.1), (4, 4.6)]


def test_local_loggers_go_on_where_a_record_cannot_be_cut(tmp_path: Path) -> None:
    config = TelemetryConfig(progress=False, loggers=[LoggerName.tensorboard])
    with Telemetry(tmp_path, config, 8) as telemetry:
        (local,) = telemetry._loggers._deliveries.values()
        with pytest.raises(OSError, match="full"), telemetry._loggers.files_closed():
            raise OSError("the disk is full")
        telemetry.log(1, {"loss": 0.1})
        assert not local.failure


def test_a_run_that_goes_back_is_another_run_to_a_service(tmp_path: Path, service: object) -> None:
    sizes = run(tmp_path, range(1, 8), None)
    run_loggers.forget_runs(tmp_path)
    run(tmp_path, range(6, 9), sizes)
    assert losses(tmp_path)[-3:] == [(6, 6.6), (7, 7.6), (8, 8.6)]
    starts = [row["start"] for row in read_lines(tmp_path / "store.jsonl") if "start" in row]
    assert len(set(starts)) == 2


@pytest.mark.parametrize("method", ["start", "log", "samples", "close"])
def test_a_logger_that_raises_is_one_line(
    tmp_path: Path,
    service: Callable[[type], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """The run's own records are whole, and the other logger has every step."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def refuse(self: object, *_: object) -> None:
        raise ConnectionError("no route to\nhttps://me:hidden@host with 0123456789abcdef")

    service(type("Refusing", (FileLogger,), {method: refuse}))
    run(tmp_path, range(1, 4), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "telemetry.loggers: wandb is left out from here on: ConnectionError: no route to"
        " https://***@host with ***"
    ]
    notes = [row["text"] for row in read_lines(tmp_path / "events.jsonl") if row["kind"] == "note"]
    assert notes == lines
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "finished"
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert scalars(tmp_path) == [(step, pytest.approx(step + 0.1)) for step in (1, 2, 3)]


def test_a_broken_tensorboard_is_one_line(
    tmp_path: Path, service: object, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    run(tmp_path, range(1, 4), None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("telemetry.loggers: tensorboard is left out from here on: ")
    assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]


def test_a_logger_that_hangs_holds_up_nothing(
    tmp_path: Path,
    service: Callable[[type], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_loggers, "CLOSE_S", 0.3)
    over = threading.Event()

    def hang(self: object, *_: object) -> None:
        over.wait(60)

    service(type("Hanging", (FileLogger,), {"log": hang}))
    start = time.monotonic()
    run(tmp_path, range(1, 6), None)
    assert time.monotonic() - start < 40  # the hang is a minute
    assert "wandb is left out from here on: it has not ended in time, " in capsys.readouterr().err
    over.set()


def test_a_logger_too_far_behind_is_left_out(
    tmp_path: Path,
    service: Callable[[type], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_MOST_WAITING", 4)
    over = threading.Event()

    def hang(self: object, *_: object) -> None:
        over.wait(60)

    service(type("Hanging", (FileLogger,), {"log": hang}))
    run(tmp_path, range(1, 9), None)
    assert "wandb is left out from here on: it is 4 calls behind" in capsys.readouterr().err
    over.set()


def events(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()
    return board


def scalars(run_dir: Path) -> list[tuple[int, float]]:
    return [(e.step, e.tensor_proto.float_val[0]) for e in events(run_dir).Tensors("rl/loss")]


def test_tensorboard_has_samples_as_text(tmp_path: Path, service: object) -> None:
    config = TelemetryConfig(progress=False, samples_per_step=2)
    with Telemetry(tmp_path, config, 1) as telemetry:
        telemetry.phase("rl", 1)
        texts = [None, "| a\n* b", ""]
        rows = [{"id": str(k), "response": text, "reward": k / 4} for k, text in enumerate(texts)]
        telemetry.samples(1, rows)
        telemetry.samples(1, [{"id": "9", "response": "x" * 5000, "reward": None}], "evaluation")
    board = events(tmp_path)
    (event,) = board.Tensors("samples/rl")
    shape = [dim.size for dim in event.tensor_proto.tensor_shape.dim]
    assert (event.step, shape) == (1, [3, 3])  # names, and two samples
    cells = [cell.decode() for cell in event.tensor_proto.string_val]
    assert cells[:3] == ["**id**", "**response**", "**reward**"]
    assert cells[3:6] == ["    0", "    (lost with its instance)", "0.0"]
    assert cells[6:] == ["    1", "    | a\n    * b", "0.25"]
    (event,) = board.Tensors("samples/evaluation")
    long = event.tensor_proto.string_val[4].decode()
    assert long == "    " + "x" * 4000 + " [1,000 more characters]"


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret-value")
    monkeypatch.setenv("HOME_KEY", "short")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-or-true")
    text = "short false-or-true s3cret-value postgresql://a:b@host/db user@host http://x/@y"
    hidden = "short false-or-true *** postgresql://***@host/db user@host http://x/@y"
    assert without_secrets(text) == hidden
