"""The directory of a run, its determinism, its records and its log."""

from dataclasses import dataclass
from enum import Enum

from hybridrl.config.bounds import bounded


class Deterministic(Enum):
    """How far two runs with the same seed agree."""

    off = "off"  # up to the order of float operations
    strict = "strict"  # bit for bit, under every schedule: each sample is computed alone


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """Records of a run, apart from its checkpoints."""

    progress: bool = True
    """Show progress; plain lines where the output is no terminal. Without, notes alone."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    samples_per_step: int = 8
    """Responses per step that are written to samples.jsonl."""
    report: bool = True
    """Render report.html at the end."""


class LogLevel(Enum):
    """The least urgent lines that are logged."""

    debug = "debug"  # every call of a rank, every stage
    info = "info"  # phases, steps, evaluations, checkpoints
    warning = "warning"
    error = "error"


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """The log of the driver and of the ranks, in the run's directory."""

    level: LogLevel = LogLevel.info
    """The least urgent lines that are logged; `debug` shows the call that a run waits for."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The run's directory and its seed."""

    dir: str = "runs/latest"
    """Run directory: config, metrics, samples, trace, checkpoints, report."""
    seed: int = bounded(0, least=0)
    """Seed of initial weights, sampling and data order."""
