"""A mapping as overrides of `hybridrl train`, and the mapping of a config."""

from collections.abc import Iterator, Sequence

from hybridrl.config import (
    VALUE_MODELS,
    Config,
    Placement,
    TrainLayoutConfig,
)
from hybridrl.planner.mapping import ACTOR, DeviceMapping, GenLayout, PlannedRole, TrainLayout

SET = (
    *("cluster.ranks", "cluster.placement", "cluster.pools", "schedule"),
    *("rollout.layout.pp", "rollout.layout.tp", "trainer.activations"),
    *("trainer.max_tokens_per_micro_batch", "trainer.layout"),
    *(f"{key}.layout" for key in VALUE_MODELS.values()),
)
"""Keys, and whole groups of keys, that the planner sets."""


def layout_key(role: str) -> str:
    """The place of a trained role's layout: `trainer.layout`, `critic.layout`, ..."""
    return "trainer.layout" if role == ACTOR else f"{VALUE_MODELS[role]}.layout"


def overrides(mapping: DeviceMapping) -> list[str]:
    """What `hybridrl train` takes to run the mapping, besides the recipe's own settings."""
    layouts = mapping.train.values()
    settings = {
        "cluster.ranks": sum(mapping.ranks.values()),
        **_placement(mapping),
        "rollout.layout.pp": mapping.gen.pp,
        "rollout.layout.tp": mapping.gen.tp,
        "schedule": mapping.schedule.kind.value,
        "trainer.activations": next(iter(layouts)).activations.value,
        "trainer.max_tokens_per_micro_batch": max(x.micro_batch_tokens for x in layouts),
    }
    for role, layout in mapping.train.items():
        key = layout_key(role)
        for axis in ("pp", "replicas", "fsdp", "tp"):
            settings[f"{key}.{axis}"] = getattr(layout, axis)
        settings[f"{key}.sequence_parallel"] = str(layout.sequence_parallel).lower()
        settings[f"{key}.schedule"] = layout.schedule.value
    return [f"{key}={value}" for key, value in settings.items()]


def _placement(mapping: DeviceMapping) -> dict[str, str | int]:
    if len(mapping.pools) == 1:
        return {"cluster.placement": Placement.colocate.value}
    pools = {f"cluster.pools.{pool}": ranks for pool, ranks in mapping.ranks.items()}
    return {"cluster.placement": Placement.split.value, **pools}


def pools_of(
    config: Config, roles: Sequence[PlannedRole], partition: Sequence[Sequence[str]]
) -> dict[str, tuple[str, ...]] | None:
    """The pools of a partition, the actor's first; None for one that `train` does not run."""
    critics = {r.name for r in roles if r.name in VALUE_MODELS or _judges(config, r.name)}
    sets = sorted((set(names) for names in partition), key=lambda names: ACTOR not in names)
    if len(sets) == 1:
        return {"actor": tuple(role.name for role in roles)}
    if len(sets) == 2 and sets[1] == critics:
        return {
            "actor": tuple(role.name for role in roles if role.name not in critics),
            "critic": tuple(role.name for role in roles if role.name in critics),
        }
    return None


def _judges(config: Config, role: str) -> bool:
    """Whether a role is a judge of the config that is a model."""
    whole = role.partition(".parts.")[0]
    return whole in ("reward", "cost") and config.is_neural(role)


def mapping_of(config: Config, roles: Sequence[PlannedRole]) -> DeviceMapping:
    """That which a config asks for."""
    every = [[role.name for role in roles]]
    if config.split:
        critics = {r.name for r in roles if r.name in VALUE_MODELS or _judges(config, r.name)}
        every = [[n for n in every[0] if n not in critics], [n for n in every[0] if n in critics]]
    pools = pools_of(config, roles, every)
    assert pools is not None, "a placement that train refuses"
    trainer, train = config.trainer, {}
    for role in roles:
        if role.trained:
            own = trainer.layout if role.name == ACTOR else config.value_model_of(role.name).layout
            train[role.name] = TrainLayout(
                **_axes(own),
                schedule=own.schedule,
                activations=trainer.activations,
                sequence_parallel=own.sequence_parallel,
                micro_batch_tokens=trainer.max_tokens_per_micro_batch,
            )
    return DeviceMapping(
        pools=pools,
        ranks={pool: config.ranks_of(pool) for pool in pools},
        train=train,
        gen=GenLayout(pp=config.rollout.layout.pp, tp=config.rollout.layout.tp),
        schedule=config.schedule,
    )


def _axes(layout: TrainLayoutConfig) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in ("pp", "replicas", "fsdp", "tp")}


def train_config(layout: TrainLayout) -> TrainLayoutConfig:
    """The same layout as the config has it."""
    return TrainLayoutConfig(
        pp=layout.pp,
        replicas=layout.replicas,
        fsdp=layout.fsdp,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule,
    )


def keys_set(args: Sequence[str]) -> Iterator[str]:
    """Overrides among `args` of keys that the planner sets."""
    for arg in args:
        key = arg.partition("=")[0].lstrip("+~")
        if any(key == name or key.startswith(f"{name}.") for name in SET):
            yield arg
