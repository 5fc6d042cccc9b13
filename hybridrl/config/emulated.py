"""What a run on an emulated device leaves out, since its ranks hold no model."""

from typing import TYPE_CHECKING

from hybridrl.config.cluster import Device
from hybridrl.config.errors import ConfigError
from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.rollout import Engine
from hybridrl.config.run import Deterministic, KeptSamples

if TYPE_CHECKING:
    from hybridrl.config import Config

WITHOUT_MODEL = "with cluster=emulated, whose ranks hold no model"


def settle_emulated(config: "Config") -> None:
    """Leave out evaluation and warm start; raise ConfigError for what asks for a model."""
    cluster, trainer = config.cluster, config.trainer
    if cluster.device is Device.cuda:
        raise ConfigError("cluster.device", "cuda", f"auto or cpu {WITHOUT_MODEL}")
    cluster.device = Device.cpu
    if config.eval == EvalConfig():
        config.eval.sets.clear()
    if config.warm_start.steps is None:
        config.warm_start.steps = 0
    for key, value, nothing in (
        ("eval.sets", list(config.eval.sets), []),
        ("warm_start.steps", config.warm_start.steps, 0),
        ("trainer.resume", trainer.resume, "never"),
        ("trainer.save_every", trainer.save_every, 0),
        ("telemetry.profile.steps", config.telemetry.profile.steps, []),
    ):
        if value != nothing:
            raise ConfigError(key, value, f"{nothing or 'none'} {WITHOUT_MODEL}")
    for key, is_wrong, shown, allowed in (
        ("deterministic", config.deterministic is not Deterministic.off, "strict", "off"),
        ("telemetry.samples", config.telemetry.samples is KeptSamples.all, "all", "first"),
        ("telemetry.digests", bool(config.telemetry.digests), "true", "false"),
        ("rollout.engine", config.rollout.engine is not Engine.native, "vllm", "native"),
    ):
        if is_wrong:
            raise ConfigError(key, shown, f"{allowed} {WITHOUT_MODEL}")
    for key, judge in (("reward", config.reward), ("cost", config.cost)):
        for name, part in {key: judge, **{f"{key}.parts.{n}": p for n, p in judge.parts.items()}}.items():
            if part.is_central:
                raise ConfigError(
                    f"{name}.kind", part.kind.value, f"a verifier or a model {WITHOUT_MODEL}"
                )
    size, per_process = config.rollout.layout.ranks, cluster.ranks_per_process
    if per_process % size:
        allowed = f"0, or a multiple of rollout.layout's {config.rollout.layout.pp} x {config.rollout.layout.tp}"
        raise ConfigError("cluster.ranks_per_process", per_process, allowed)
    if config.model.path is None:  # prompts and responses have modeled lengths
        tiny = config.model.tiny
        tiny.max_positions = max(tiny.max_positions, config.longest_generated)
