"""The directory of a run, its determinism, its records and its log."""

from dataclasses import dataclass, field
from enum import Enum

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError
from hybridrl.config.versions import is_installed


class Deterministic(Enum):
    """How far two runs with the same seed agree."""

    off = "off"  # up to the order of float operations
    strict = "strict"  # bit for bit, under every schedule: each sample is computed alone


class LoggerName(Enum):
    """Programs and services that show a run; each is the name of its package."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"
    trackio = "trackio"


class KeptSamples(Enum):
    """The samples of a step that a run keeps."""

    first = "first"  # the texts of the first `samples_per_step`, in samples.jsonl
    all = "all"  # and every sample with its tokens, as Parquet, in samples/


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Steps in which ranks record torch's operations into the trace, and memory on a GPU."""

    steps: list[int] = field(default_factory=list)
    """The steps, counted over the run from 1, a warm start's too."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """The ranks that record."""

    def check(self) -> None:
        """Raise ConfigError for a step or a rank that no run has."""
        if any(step < 1 for step in self.steps):
            raise ConfigError("telemetry.profile.steps", self.steps, "steps from 1")
        if any(rank < 0 for rank in self.ranks):
            raise ConfigError("telemetry.profile.ranks", self.ranks, "ranks from 0")

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError for a rank that a run of so many `ranks` lacks."""
        if any(rank >= ranks for rank in self.ranks):
            allowed = f"0 to {ranks - 1}, with cluster.ranks={ranks}"
            raise ConfigError("telemetry.profile.ranks", self.ranks, allowed)


@dataclass(kw_only=True, slots=True)
class TelemetryConfig:
    """Records of a run, apart from its checkpoints."""

    progress: bool = True
    """Show progress; plain lines where the output is no terminal. Without, notes alone."""
    loggers: list[LoggerName] = field(default_factory=lambda: [LoggerName.tensorboard])
    """Where metrics and samples go besides the run's own files. All but `tensorboard` need the
    extra of their name."""
    project: str = "hybridrl"
    """The project of wandb and trackio, the experiment of mlflow."""
    samples_per_step: int = 8
    """Responses per step that are written to samples.jsonl, and sent to loggers."""
    samples: KeptSamples = KeptSamples.first
    """The samples that the run keeps: `all` writes each with its tokens to samples/*.parquet."""
    report: bool = True
    """Render report.html at the end."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """torch's operations in the trace."""
    digests: bool | None = None
    """Record digests of every sample and of the weights after each step, for `hybridrl replay` and
    `hybridrl blame`. Null: under `deterministic=strict`."""

    def check(self) -> None:
        """Raise ConfigError for a logger named twice, an empty project, or a wrong profile."""
        self.profile.check()
        if len(set(self.loggers)) < len(self.loggers):
            raise ConfigError("telemetry.loggers", self._shown_loggers, "each logger once")
        if not self.project:
            raise ConfigError("telemetry.project", "", "a name")

    def check_installed(self) -> None:
        """Raise ConfigError for a logger whose package is missing."""
        for logger in self.loggers:
            name = logger.value
            if not is_installed(name):
                package = name if logger is LoggerName.tensorboard else f"'hybridrl[{name}]'"
                allowed = f"loggers that are installed; {name} needs: pip install {package}"
                raise ConfigError("telemetry.loggers", self._shown_loggers, allowed)

    @property
    def _shown_loggers(self) -> str:
        """As on a command line."""
        return f"[{','.join(logger.value for logger in self.loggers)}]"


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
