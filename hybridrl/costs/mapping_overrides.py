"""A mapping as overrides of `hybridrl train`, and the mapping of a config."""

from collections.abc import Iterator, Sequence

from hybridrl.config import (
    VALUE_MODELS,
    AsyncScheduleConfig,
    Config,
    FuseUpdates,
    Grouping,
    Placement,
    PoolOfConfig,
    TrainLayoutConfig,
)
from hybridrl.costs.mapping import ACTOR, DeviceMapping, GenLayout, PlannedRole, TrainLayout

SET = (
    *("cluster.ranks", "cluster.placement", "cluster.pools", "cluster.pool_of", "schedule"),
    *("cluster.rank_order", "rollout.layout.pp", "rollout.layout.tp", "rollout.layout.ep"),
    "trainer.activations",
    *("trainer.max_tokens_per_micro_batch", "trainer.layout", "trainer.fuse_updates"),
    *(f"{key}.layout" for key in VALUE_MODELS.values()),
)
"""Keys, and whole groups of keys, that the planner sets."""


def layout_key(role: str) -> str:
    """The place of a trained role's layout: `trainer.layout`, `roles.critic.layout`, ..."""
    return "trainer.layout" if role == ACTOR else f"{VALUE_MODELS[role]}.layout"


def overrides(mapping: DeviceMapping) -> list[str]:
    """What `hybridrl train` takes to run the mapping, besides the recipe's own settings."""
    layouts = mapping.train.values()
    settings: dict[str, int | float | str] = {
        "cluster.ranks": sum(mapping.ranks.values()),
        **_placement(mapping),
        "rollout.layout.pp": mapping.gen.pp,
        "rollout.layout.tp": mapping.gen.tp,
        "rollout.layout.ep": mapping.gen.ep,
        "schedule": mapping.schedule.kind.value,
        "trainer.activations": next(iter(layouts)).activations.value,
        "trainer.max_tokens_per_micro_batch": max(x.micro_batch_tokens for x in layouts),
    }
    if isinstance(mapping.schedule, AsyncScheduleConfig):
        settings["schedule.max_staleness"] = mapping.schedule.max_staleness
        settings["schedule.new_weights"] = mapping.schedule.new_weights.value
    if mapping.rank_order:
        settings["cluster.rank_order"] = _listed(mapping.rank_order)
    if len(mapping.train) > 1:
        fuses = FuseUpdates.always if mapping.fuses else FuseUpdates.never
        settings["trainer.fuse_updates"] = fuses.value
    for role, layout in mapping.train.items():
        key = layout_key(role)
        for axis in ("pp", "replicas", "fsdp", "tp", "ep", "cp"):
            settings[f"{key}.{axis}"] = getattr(layout, axis)
        settings[f"{key}.sequence_parallel"] = str(layout.sequence_parallel).lower()
        settings[f"{key}.schedule"] = layout.schedule.value
        if layout.chunk_layers:
            settings[f"{key}.chunk_layers"] = _listed(layout.chunk_layers)
    return [f"{key}={value}" for key, value in settings.items()]


def _listed(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def _placement(mapping: DeviceMapping) -> dict[str, str | int]:
    """A pool has the name of one of its roles; roles without an entry are in that of the actor."""
    settings: dict[str, str | int] = {"cluster.placement": Placement.colocate.value}
    if len(mapping.pools) > 1:
        for pool, roles in mapping.pools.items():
            fields = {pool_field(role) for role in roles} - {ACTOR}
            if pool != ACTOR:
                settings |= {f"cluster.pool_of.{field}": pool for field in sorted(fields)}
            settings[f"cluster.pools.{pool}"] = mapping.ranks[pool]
    return settings


def pool_field(role: str) -> str:
    """The field of `cluster.pool_of` that a role follows: see `Config.pool_field`."""
    whole = role.partition(".parts.")[0]
    fields = PoolOfConfig.__dataclass_fields__
    return whole if whole in (ACTOR, *fields) else "reference"


def pools_of(
    roles: Sequence[PlannedRole], partition: Sequence[Sequence[str]]
) -> dict[str, tuple[str, ...]] | None:
    """The pools of a partition, the actor's first; None for one that `train` does not run.

    Roles that follow one field, as the judges of a sum do, are together. Names of pools are those
    of roles, the first in the order of `cluster.pools`.
    """
    order = [ACTOR, *PoolOfConfig.__dataclass_fields__]
    of_field: dict[str, int] = {}
    pools: dict[str, tuple[str, ...]] = {}
    for number, names in enumerate(partition):
        for name in names:
            if of_field.setdefault(pool_field(name), number) != number:
                return None
        fields = sorted({pool_field(name) for name in names}, key=order.index)
        own = tuple(role.name for role in roles if role.name in names)
        pools[ACTOR if ACTOR in names else fields[0]] = own
    return {name: pools[name] for name in order if name in pools}


def mapping_of(config: Config, roles: Sequence[PlannedRole]) -> DeviceMapping:
    """Return the mapping that a config asks for."""
    by_pool: dict[str, list[str]] = {}
    for role in roles:
        by_pool.setdefault(config.pool_of(role.name), []).append(role.name)
    pools = {pool: tuple(by_pool[pool]) for pool in config.cluster.pool_ranks if pool in by_pool}
    trainer, gen, train = config.trainer, config.rollout.layout, {}
    for role in roles:
        if role.trained:
            own = trainer.layout if role.name == ACTOR else config.value_model_of(role.name).layout
            train[role.name] = TrainLayout.of(own, trainer)
    return DeviceMapping(
        pools=pools,
        ranks={pool: config.ranks_of(pool) for pool in pools},
        train=train,
        gen=GenLayout(pp=gen.pp, tp=gen.tp, ep=gen.ep),
        schedule=config.schedule,
        rank_order=tuple(config.cluster.rank_order),
        fuses=config.trainer.fuses,
    )


def train_config(layout: TrainLayout) -> TrainLayoutConfig:
    """Return a training layout as the config has it."""
    return TrainLayoutConfig(
        pp=layout.pp,
        replicas=layout.replicas,
        fsdp=layout.fsdp,
        tp=layout.tp,
        ep=layout.ep,
        ep_grouping=Grouping.vanilla if layout.ep_near else Grouping.auto,
        cp=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule,
        chunk_layers=list(layout.chunk_layers),
    )


def keys_set(args: Sequence[str]) -> Iterator[str]:
    """Overrides among `args` of keys that the planner sets."""
    for arg in args:
        key = arg.partition("=")[0].lstrip("+~")
        if any(key == name or key.startswith(f"{name}.") for name in SET):
            yield arg
