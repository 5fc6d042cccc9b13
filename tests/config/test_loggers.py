"""The loggers of a run: those that are installed, each once."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import Config, ConfigError, LoggerName, TelemetryConfig


def test_loggers_are_read_from_overrides(make_config: Callable[..., Config]) -> None:
    def loggers(*overrides: str) -> list[LoggerName]:
        return make_config("run.dir=out", *overrides).telemetry.loggers

    assert loggers() == [LoggerName.tensorboard]
    assert loggers("telemetry.loggers=[]") == []
    both = loggers("telemetry.loggers=[wandb,tensorboard]")
    assert both == [LoggerName.wandb, LoggerName.tensorboard]


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "'hybridrl[wandb]'"),
        ("mlflow", "'hybridrl[mlflow]'"),
        ("trackio", "'hybridrl[trackio]'"),
    ],
)
def test_a_logger_that_is_not_installed_is_refused(
    name: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    config = TelemetryConfig(loggers=[LoggerName[name]])
    config.check()
    with pytest.raises(ConfigError) as raised:
        config.check_installed()
    assert str(raised.value) == (
        f"telemetry.loggers=[{name}]: wanted loggers that are installed;"
        f" {name} needs: pip install {install}"
    )


def test_a_folder_of_its_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's own files may be in the working directory, from which Python imports, too."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(ConfigError, match="trackio needs: pip install"):
        TelemetryConfig(loggers=[LoggerName.trackio]).check_installed()
