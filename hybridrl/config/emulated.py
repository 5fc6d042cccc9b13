"""What a run on an emulated device leaves out, since its ranks hold no model."""

from collections.abc import Mapping

from hybridrl.config.cluster import ClusterConfig, Device
from hybridrl.config.errors import ConfigError
from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.reward import JudgeConfig, RewardConfig
from hybridrl.config.rollout import Engine, RolloutConfig
from hybridrl.config.run import KeptSamples, TelemetryConfig
from hybridrl.config.trainer import TrainerConfig, WarmStartConfig

WITHOUT_MODEL = "with cluster=emulated, whose ranks hold no model"
_RANKS_PER_PROCESS = 32  # where the config does not say it, if whole instances make up as many


def settle_cluster(cluster: ClusterConfig, rollout: RolloutConfig) -> None:
    """Fill in the device; raise ConfigError for another engine than the native one."""
    if cluster.device is Device.cuda:
        raise ConfigError("cluster.device", "cuda", f"auto or cpu {WITHOUT_MODEL}")
    cluster.device = Device.cpu
    if rollout.engine is not Engine.native:
        raise ConfigError("rollout.engine", rollout.engine.value, f"native {WITHOUT_MODEL}")


def settle_processes(cluster: ClusterConfig, rollout: RolloutConfig) -> None:
    """Fill in the ranks of a process; raise ConfigError for a number that cuts an instance.

    Layout and width of the tail fit the ranks: the line then names the key that is wrong.
    """
    layout, unit = rollout.layout, rollout.layout.ranks
    whole = f"rollout.layout's {layout.pp} x {layout.tp}"
    if rollout.wide_tp:
        unit = rollout.wide_tp * layout.pp
        whole = f"rollout.tail_tp={rollout.wide_tp} x {layout.pp}"
    if cluster.ranks_per_process is None:
        instances = max(1, _RANKS_PER_PROCESS // unit)
        if rollout.wide_tp is None:  # whose widths are doublings
            instances = 2 ** (instances.bit_length() - 1)
        cluster.ranks_per_process = instances * unit
    if cluster.ranks_per_process % unit:
        allowed = f"null, 0, or a multiple of {whole}"
        raise ConfigError("cluster.ranks_per_process", cluster.ranks_per_process, allowed)


def leave_out(
    evaluation: EvalConfig,
    warm_start: WarmStartConfig,
    trainer: TrainerConfig,
    telemetry: TelemetryConfig,
) -> None:
    """Leave out evaluation and warm start; raise ConfigError for what asks for a model."""
    if evaluation == EvalConfig():
        evaluation.sets.clear()
    if warm_start.steps is None:
        warm_start.steps = 0
    samples = KeptSamples.first.value
    for key, value, allowed in (
        ("eval.sets", ",".join(evaluation.sets), ""),
        ("warm_start.steps", warm_start.steps, 0),
        ("trainer.resume", trainer.resume, "never"),
        ("trainer.save_every", trainer.save_every, 0),
        ("telemetry.profile.steps", telemetry.profile.steps, []),
        ("telemetry.samples", telemetry.samples.value, samples),
        ("telemetry.digests", bool(telemetry.digests), False),
    ):
        if value != allowed:
            shown = "none" if allowed in ("", []) else str(allowed).lower()
            raise ConfigError(key, str(value).lower(), f"{shown} {WITHOUT_MODEL}")


def check_judges(judges: Mapping[str, RewardConfig]) -> None:
    """Raise ConfigError for judges that would be asked about texts, by their keys."""
    for key, judge in judges.items():
        _check_judge(key, judge)
        for name, scorer in judge.parts.items():
            _check_judge(f"{key}.parts.{name}", scorer)


def _check_judge(key: str, judge: JudgeConfig) -> None:
    if judge.is_central:
        allowed = f"a verifier or a model {WITHOUT_MODEL}"
        raise ConfigError(f"{key}.kind", judge.kind.value, allowed)
