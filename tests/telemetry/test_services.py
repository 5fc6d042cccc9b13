"""Runs that are killed and go on, as the stores of wandb, mlflow and trackio have them.

Each library writes in its offline or local mode, and reads back what it stored.
"""

import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.loggers, pytest.mark.timeout(120)]

_BLOCK = 2**15
SERVICES = ("wandb", "mlflow", "trackio")
NOTED = {"wandb": 6, "mlflow": 7, "trackio": 7}  # wandb stores a step with the next one
RUN = """
    import json, sys, time
    from pathlib import Path
    from hybridrl.config.run import LoggerName, TelemetryConfig
    from hybridrl.telemetry.run import Telemetry
    run_dir, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    file = run_dir.with_name("sizes.json")
    sizes = json.loads(file.read_text()) if first > 1 else None
    loggers = [LoggerName.wandb, LoggerName.mlflow, LoggerName.trackio]
    config = TelemetryConfig(progress=False, loggers=loggers, project="spelling")
    settings = {"trainer.optim.lr": 0.5, "telemetry.loggers": ["wandb"], "model.path": None}
    with Telemetry(run_dir, config, 9, sizes, settings) as telemetry:
        telemetry.phase("rl", 9)
        for step in range(first, last + 1):
            texts = {"prompt": f"p {step}", "response": "a|b\\nc"}
            samples = [{"id": f"{step}.0", "reward": None}, {"id": f"{step}.1", "reward": 0.5}]
            telemetry.samples(step, [{**texts, **sample} for sample in samples])
            metrics = {"loss": step + first / 10, "mismatch/mean": float("nan"), "avg@8": 1.0}
            telemetry.log(step, metrics)
            if step == 6:  # an evaluation under which training has gone on
                telemetry.log(4, {"late": 4.5})
            if step == 5:
                file.write_text(json.dumps(telemetry.sizes()))
        if last == 7:
            time.sleep(600)
"""


def environment(folder: Path) -> dict[str, str]:
    """Every library writes below `folder`, and asks nobody."""
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(folder / "home"),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }


def start(folder: Path, first: int, last: int, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(folder / "run"), str(first)]
    return subprocess.Popen(
        [*command, str(last)], cwd=folder, env=environment(folder) | more, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def sent(folder: Path, service: str) -> dict[str, Any]:
    file = folder / "run" / "loggers" / f"{service}.json"
    return json.loads(file.read_text()) if file.is_file() else {"sent": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed at step 7, and went on to 9 from the checkpoint of step 5."""
    folder = tmp_path_factory.mktemp("services")
    (folder / "home").mkdir()
    killed = start(folder, 1, 7)
    until = time.monotonic() + 60
    while {s: sent(folder, s)["sent"].get("rl/loss") for s in SERVICES} != NOTED:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < until, [sent(folder, s) for s in SERVICES]
        time.sleep(0.05)
    time.sleep(2)  # wandb writes once a second, trackio twice
    killed.kill()
    killed.communicate()
    ids = {service: sent(folder, service)["id"] for service in SERVICES}
    out, err = (rest := start(folder, 6, 9)).communicate(timeout=90)
    assert rest.returncode == 0, err
    assert out == ""
    assert "left out" not in err
    assert {service: sent(folder, service)["id"] for service in SERVICES} == ids
    return folder


WANTED = [*((step, step + 0.1) for step in range(1, 8)), (8, 8.6), (9, 9.6)]
"""Steps 6 and 7 are those of the first process: the second must not send them."""


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after a header of seven bytes.

    A chunk is CRC (4 bytes), length (2), type (1: whole, 2: first, 3: middle, 4: last), content;
    none crosses the end of a block of 32 KiB.
    """
    assert data.startswith(b":W&B")
    position, record = 7, b""
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb(folder: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, Any]] = []
    ids, configs, axes = set(), [], set()
    files = sorted((folder / "run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # one a process
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
                configs.append({u.key: json.loads(u.value_json) for u in record.run.config.update})
            if record.HasField("metric"):
                axes.add((record.metric.glob_name, record.metric.step_metric))
            if record.HasField("history"):
                items = record.history.item
                rows.append(
                    {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                )
    assert ids == {(sent(folder, "wandb")["id"], "spelling", "run")}
    assert configs[0]["trainer.optim.lr"] == 0.5
    wanted = [(step, 7.6 if step == 7 else loss) for step, loss in WANTED]
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    (late,) = (row for row in rows if "rl/late" in row)
    assert (late["step"], late["rl/late"]) == (4, 4.5)
    rows.remove(late)
    assert [(row["step"], row["rl/loss"]) for row in rows] == wanted
    assert all(math.isnan(float(row["rl/mismatch/mean"])) for row in rows)
    assert ("*", "step") in axes
    tables = sorted((folder / "run/wandb").glob("offline-run-*/files/media/table/**/*.json"))
    contents = [json.loads(table.read_text()) for table in tables]
    steps = sorted(int(content["data"][0][0].split()[1]) for content in contents)
    assert steps == [1, 2, 3, 4, 5, 6, 7, 7, 8, 9]  # no row has the first of step 7
    assert contents[0]["columns"] == ["prompt", "response", "id", "reward"]


def test_mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(environment(folder)["MLFLOW_TRACKING_URI"])
    (experiment,) = [e for e in client.search_experiments() if e.name == "spelling"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name) == (sent(folder, "mlflow")["id"], "run")
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.optim.lr"] == "0.5"
    history = client.get_metric_history(run.info.run_id, "rl/loss")
    assert sorted((point.step, point.value) for point in history) == WANTED
    (late,) = client.get_metric_history(run.info.run_id, "rl/late")
    assert (late.step, late.value) == (4, 4.5)
    nans = client.get_metric_history(run.info.run_id, "rl/mismatch/mean")
    assert [math.isnan(point.value) for point in nans] == [True] * 9
    tables = client.list_artifacts(run.info.run_id, "samples/rl")
    assert [t.path for t in tables] == [f"samples/rl/step_00000{s}.json" for s in range(1, 10)]
    table = json.loads(
        Path(client.download_artifacts(run.info.run_id, tables[6].path, str(folder))).read_text()
    )
    assert table["columns"] == ["prompt", "response", "id", "reward"]
    assert table["data"] == [["p 7", "a|b\nc", "7.0", None], ["p 7", "a|b\nc", "7.1", 0.5]]


def test_trackio(folder: Path) -> None:
    code = """
        import json, sys
        from trackio.sqlite_storage import SQLiteStorage
        runs = SQLiteStorage.get_runs("spelling")
        print(json.dumps({run: SQLiteStorage.get_logs("spelling", run) for run in runs}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, check=True
    )
    ((name, rows),) = json.loads(done.stdout).items()
    assert name == sent(folder, "trackio")["id"]
    steps: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        assert not {k for k in row if "/" in k} & steps[row["step"]].keys()
        steps[row["step"]].update(row)
    assert [(step, row["rl/loss"]) for step, row in sorted(steps.items())] == WANTED
    assert steps[4]["rl/late"] == 4.5
    assert [row["id"] for row in steps[7]["samples/rl"]["_value"]] == ["7.0", "7.1"]


def test_services_that_cannot_be_reached_are_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    away = {
        "WANDB_MODE": "online",  # without a key
        "MLFLOW_TRACKING_URI": "http://me:hidden@127.0.0.1:9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    run = start(tmp_path, 1, 3, **away)
    out, err = run.communicate(timeout=90)
    assert (run.returncode, out) == (0, "")
    left_out = "telemetry.loggers: {} is left out from here on: {}"
    lines = [line for line in err.splitlines() if line.startswith("telemetry.loggers: ")]
    assert len(lines) == 2
    assert lines[0].startswith(left_out.format("wandb", "RuntimeError: no API key"))
    assert lines[1].startswith(left_out.format("mlflow", "MlflowException: API request to http://"))
    assert "hidden" not in err
    assert sent(tmp_path, "trackio")["sent"]["rl/loss"] == 3
