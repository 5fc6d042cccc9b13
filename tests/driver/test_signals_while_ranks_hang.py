"""A signal while ranks sit in a call that does not end, such as a switch whose group is not up."""

import os
import signal
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import Config
from hybridrl.driver.ray_executor import Abandoned, RayExecutor
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.system import signals


class HangingLauncher:
    """A launcher whose calls never end; the second look at them gets a SIGTERM."""

    data_plane = None

    def __init__(self) -> None:
        self.waits = 0

    def start(self, *_: Any) -> Any:
        return SimpleNamespace(enter=lambda phase: [object()])

    def subgroup(self, group: Any, ranks: Any) -> Any:
        return group

    def wait(self, references: Any, timeout: float) -> list[Any]:
        self.waits += 1
        if self.waits == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        assert self.waits < 5, "the signal was not heard"
        return []


@pytest.mark.usefixtures("command_line_signals")
@pytest.mark.parametrize(("can_resume", "raised"), [(True, Abandoned), (False, KeyboardInterrupt)])
def test_a_hanging_switch_is_abandoned(can_resume: bool, raised: type[BaseException]) -> None:
    config, launcher = Config(), HangingLauncher()
    config.cluster.ranks = 1
    group = WorkerGroup(launcher, config, "", lambda *_: None, lambda *_: None)  # type: ignore[arg-type]
    group.instances = [[0]]
    executor = RayExecutor(group, config, lambda _: None)
    executor.may_abandon = can_resume
    with ExitStack() as stack:
        if can_resume:
            stack.enter_context(signals.graceful_stop())
        executor.sync_weights()
        with pytest.raises(raised):
            executor.wait()
    assert launcher.waits == 2
