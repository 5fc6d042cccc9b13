"""A local Ray that does not start at once: once more, and nothing of the first start stays."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from hybridrl.config import ClusterConfig
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.ray_cluster import ray_runtime

Starts = Callable[[int], list[psutil.Popen]]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """`starts(late)`: the first `late` starts of Ray fail; a process of each start."""

    def make(late: int) -> list[psutil.Popen]:
        started: list[psutil.Popen] = []

        def init(**_: Any) -> None:
            assert not any(process.is_running() for process in started)
            started.append(psutil.Popen(["sleep", "100"]))
            if len(started) <= late:
                raise Exception("The current node\ntimed out during startup.")

        monkeypatch.setattr(ray, "init", init)
        return started

    return make


def test_a_late_start_is_tried_again(
    starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = starts(1)
    with ray_runtime(ClusterConfig(ranks=1), {}, tmp_path):
        assert [process.is_running() for process in started] == [False, True]
    assert not started[1].is_running()
    said = "Ray did not start, which is tried again: The current node timed out during startup."
    assert [r.message for r in caplog.records if r.name.startswith("hybridrl")] == [said]


def test_what_never_starts_is_an_error(starts: Starts, tmp_path: Path) -> None:
    started = starts(9)
    wanted = r"^Ray did not start on this machine: The current node timed out during startup\.$"
    with (
        pytest.raises(RayStartError, match=wanted),
        ray_runtime(ClusterConfig(ranks=1), {}, tmp_path),
    ):
        raise AssertionError("it has started")
    assert [process.is_running() for process in started] == [False, False]


def test_a_process_that_is_being_loaded_is_ended_too(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux shows no environment between the start of exec and its end."""
    started, asked, environ = starts(0), Counter[int](), psutil.Process.environ

    def late(self: psutil.Process) -> dict[str, str]:
        asked[self.pid] += 1
        return environ(self) if asked[self.pid] > 1 else {}

    with ray_runtime(ClusterConfig(ranks=1), {}, tmp_path):
        monkeypatch.setattr(psutil.Process, "environ", late)
    assert not started[0].is_running()
