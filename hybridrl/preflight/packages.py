"""Packages that a run's settings need: a bare machine has torch and transformers alone."""

from collections.abc import Iterator

from hybridrl.config import (
    VALUE_MODELS,
    Config,
    ConfigError,
    Device,
    FuseLayers,
    KeptSamples,
    ProcessesClusterConfig,
    RewardKind,
    SourceKind,
)
from hybridrl.config.versions import is_installed

_DISTRIBUTIONS = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}
_OF_SOURCE = {
    SourceKind.reasoning_gym: "reasoning_gym",
    SourceKind.parquet: "pyarrow",
    SourceKind.huggingface: "datasets",
}
Need = tuple[str, object, tuple[str, ...], str]
"""A key, its value, the modules that it needs, and what needs none of them."""


def check_ray(config: Config) -> None:
    """Raise ConfigError for ranks on Ray where its packages are missing."""
    cluster = config.cluster
    if cluster.uses_ray:
        needed = "ray", "verl", "tensordict", "psutil"
        _check("cluster", cluster.kind.value, needed, "processes")


def check_packages(config: Config) -> None:
    """Raise ConfigError for another setting whose package is missing, once ranks are known."""
    for need in _needs(config):
        _check(*need)


def _check(key: str, value: object, modules: tuple[str, ...], instead: str) -> None:
    missing = [_DISTRIBUTIONS.get(name, name) for name in modules if not is_installed(name)]
    if missing:
        raise ConfigError(key, value, f"{instead}, or first: pip install {' '.join(missing)}")


def _needs(config: Config) -> Iterator[Need]:
    cluster = config.cluster
    if isinstance(cluster, ProcessesClusterConfig):
        for_children = "psutil", "ray"  # which pickles what they run
        if cluster.ranks > 1:
            yield "cluster.ranks", cluster.ranks, for_children, "1"
        elif not cluster.driver_is_rank:
            yield "cluster.rank_in_driver", "false", for_children, "true"
    if config.trainer.compile and cluster.device is Device.cuda:
        yield "trainer.compile", "true", ("triton",), "false"
    if config.trainer.fuse_layers is FuseLayers.always and cluster.device is Device.cuda:
        yield "trainer.fuse_layers", "always", ("triton",), "auto or never"
    loras = {"actor": config.actor.lora}
    loras |= {place: config.value_model_of(role).lora for role, place in VALUE_MODELS.items()}
    for place, lora in loras.items():
        if lora.rank:
            yield f"{place}.lora.rank", lora.rank, ("peft",), "0"
    sources = {f"data.sources.{name}": source for name, source in config.data.sources.items()}
    for name, of_set in config.eval.sets.items():
        if of_set.source:
            sources[f"eval.sets.{name}.source"] = of_set.source
    for place, source in sources.items():
        if source.kind in _OF_SOURCE:
            others = "jsonl, csv or function"
            yield f"{place}.kind", source.kind.value, (_OF_SOURCE[source.kind],), others
    for whole in config.whole_judges:
        for role in config.judges_of(whole):
            kind = config.judge_of(role).kind
            if kind is RewardKind.math or kind.asks:
                needed = "math_verify" if kind is RewardKind.math else "aiohttp"
                yield f"{role}.kind", kind.value, (needed,), "another"
    if config.telemetry.samples is KeptSamples.all:
        yield "telemetry.samples", "all", ("pyarrow",), "first"
