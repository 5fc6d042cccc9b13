"""NCCL's last collectives: recorded from the start, and named where a rank fails."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import ClusterConfig, Config, Device, RunConfig
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.runtime.launcher import CallFailed
from hybridrl.workers import worker_factory
from hybridrl.workers.worker_factory import make_worker

VARIABLES = (
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)


def config_of(folder: Path, device: Device) -> Config:
    return Config(
        cluster=ClusterConfig(ranks=2, device=device),
        run=RunConfig(dir=str(folder)),
    )


@pytest.fixture
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_factory, "rank_log", lambda *_: None)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("device", [Device.cuda, Device.cpu])
def test_a_rank_on_a_gpu_records_into_the_logs_of_its_run(tmp_path: Path, device: Device) -> None:
    old = tmp_path / "logs" / "nccl-actor-1"
    old.parent.mkdir()
    old.touch()
    make_worker(1, 2, config_of(tmp_path, device), "", None)  # type: ignore[arg-type]
    values = [os.environ.get(name) for name in VARIABLES]
    if device is Device.cpu:
        assert values == [None, None, None]
        assert old.exists()
    else:
        assert values == ["2000", "1", str(tmp_path / "logs" / "nccl-actor-")]
        assert not old.exists(), "an earlier run's"


@pytest.mark.usefixtures("_environment")
def test_what_the_user_has_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES[0], "7")
    make_worker(0, 2, config_of(tmp_path, Device.cuda), "", None)  # type: ignore[arg-type]
    assert os.environ[VARIABLES[0]] == "7"


class FailingLauncher:
    """Its ranks fail at once."""

    data_plane = None

    def start(self, *_: Any) -> Any:
        return SimpleNamespace()

    def subgroup(self, group: Any, _: Any) -> Any:
        return group

    def get(self, _: Any) -> Any:
        raise CallFailed("a collective has timed out", RuntimeError("a collective has timed out"))

    def first_dead(self, _: Any) -> None:
        return None

    def kill(self, _: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ([], ""),
        (["nccl-actor-1"], "nccl-actor-1"),
        (["nccl-actor-0", "nccl-actor-1"], "nccl-*"),
    ],
    ids=str,
)
def test_the_error_names_the_files(tmp_path: Path, files: list[str], named: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for file in files:
        (logs / file).touch()
    config = config_of(tmp_path, Device.cpu)
    group = WorkerGroup(FailingLauncher(), config, "", lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(WorkerError) as raised:
        group.value_of(1, None)  # type: ignore[arg-type]
    end = f"; the last collectives are in {logs / named} (`torchfrtrace` reads them)"
    assert str(raised.value).endswith(end if files else f"its log is {logs}")
