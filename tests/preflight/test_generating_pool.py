"""Ranks that generate alone: what is refused before a process starts, and what `auto` becomes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import AsyncScheduleConfig, Config, ConfigError, SerialScheduleConfig
from hybridrl.preflight.prepare import prepare

KEEP = "schedule.new_weights=in_flight schedule.parked_kv=keep"
POOL = "cluster.ranks=2 cluster.pools.rollout=1"
TOOLS = "environment=tools environment.path=hybridrl.environments.calculator:TOOLS"
REFUSED = {
    "schedule=one_step": (
        r"cluster\.pools\.rollout=0: wanted 1 or more ranks that generate with schedule=async"
    ),
    f"schedule=fused {POOL}": (
        r"schedule=fused: wanted serial, periodic, one_step or async with cluster\.pools\.rollout=1"
    ),
    f"schedule=partial {POOL}": r"schedule=partial: wanted serial, periodic",
    f"schedule=packed {POOL}": r"schedule=packed: wanted serial, periodic",
    f"recipe=sft schedule=serial {POOL}": (
        r"cluster\.pools\.rollout=1: wanted 0: the recipe generates nothing"
    ),
    "schedule=one_step cluster.ranks=2 cluster.pools.rollout=2": (
        r"cluster\.pools=\? \+ 2: wanted actor \+ rollout = cluster\.ranks=2, each 1 or more"
    ),
    "schedule=one_step cluster.ranks=4 cluster.pools.rollout=3 rollout.layout.tp=2": (
        r"rollout\.layout=1 x 2: wanted pp x tp that divides cluster\.pools\.rollout=3"
    ),
    "schedule=one_step cluster.ranks=4 cluster.pools.rollout=1 trainer.layout.tp=2": (
        r"trainer\.layout=.*cluster\.pools\.actor=3"
    ),
    f"recipe=rm {POOL}": r"cluster\.pools\.rollout=1: wanted 0: the recipe generates nothing",
    f"recipe=rloo schedule=one_step {POOL}": (
        r"schedule=async: wanted serial or periodic: .*has no ratio"
    ),
    f"recipe=dapo schedule=one_step {POOL}": (
        r"schedule=async: wanted serial, periodic, or schedule\.batches=as_complete: a take may ask"
    ),
    f"schedule=periodic schedule.batches=as_complete {POOL}": (
        r"schedule\.batches=as_complete: wanted in_order with schedule\.max_staleness=0"
    ),
    "schedule=partial schedule.batches=as_complete": r"batches",
    f"recipe=xrpo schedule=one_step {POOL}": r"schedule=async: wanted .*generates once a step",
    "recipe=grpo recipe.kl_coef=0.1 recipe.reference_ema_decay=0.9 schedule=periodic "
    "cluster.ranks=3 cluster.pools.rollout=1 cluster.pool_of.reference=reference": (
        r"cluster\.pool_of\.reference=reference: wanted actor: .* averages the actor's weights"
    ),
    f"recipe=grpo recipe.correction.old_log_probs=trainer schedule=one_step {POOL}": (
        r"schedule=async: wanted a recipe that takes old_log_probs as the rollout made them"
    ),
    f"schedule=async schedule.max_staleness=-1 {POOL}": (
        r"schedule\.max_staleness=-1: wanted 0 or more"
    ),
    f"schedule=periodic schedule.new_weights=in_flight {POOL}": (
        r"schedule\.new_weights=in_flight: wanted when_free with schedule\.max_staleness=0"
    ),
    f"schedule=one_step schedule.parked_kv=keep {POOL}": (
        r"schedule\.parked_kv=keep: wanted recompute with schedule\.new_weights=when_free"
    ),
    f"schedule=one_step rollout=vllm {KEEP} schedule.follow=first {POOL}": (
        r"schedule\.follow=first: wanted null or schedule\.parked_kv=recompute with rollout\.engine"
    ),
    f"schedule=one_step rollout.push=sparse rollout.dtype=float32 {POOL}": (
        r"rollout\.push=sparse: wanted full with rollout\.dtype=float32: in more than 16 bits"
    ),
    f"schedule=one_step rollout.push=sparse {POOL}": (
        r"rollout\.push=sparse: wanted full with rollout\.dtype=float32"  # of a CPU
    ),
    f"schedule=one_step rollout.push=sparse rollout.dtype=bfloat16 actor.lora.rank=4 {POOL}": (
        r"rollout\.push=sparse: wanted full with actor\.lora\.rank=4: adapters"
    ),
    "rollout.push=sparse rollout.dtype=bfloat16": (
        r"rollout\.push=sparse: wanted full with cluster\.pools\.rollout=0: no weights"
    ),
    f"schedule=one_step {TOOLS} environment.replay=false {POOL}": (
        r"environment\.replay=False: wanted true with schedule=async"
    ),
    f"schedule=one_step rollout.tail_tp=2 {POOL}": r"rollout\.tail_tp=2: wanted off",
    f"schedule=one_step rollout.layout.grouping=vanilla {POOL}": (
        r"rollout\.layout\.grouping=vanilla: wanted auto with cluster\.pools\.rollout=1: .* pushed"
    ),
    f"schedule=periodic rollout.layout.bucket_mb=16 {POOL}": (
        r"rollout\.layout\.bucket_mb=16\.0: wanted null with cluster\.pools\.rollout=1: .* pushed"
    ),
    f"cluster.pool_of.reference=rollout {POOL}": (
        r"cluster\.pool_of\.reference=rollout: wanted another pool"
    ),
}


def prepared(make_config: Callable[..., Config], tiny_run: list[str], *settings: str) -> Config:
    named = any(setting.startswith("recipe=") for setting in settings)
    kept = [setting for setting in tiny_run if not (named and setting.startswith("recipe"))]
    config = make_config(*kept, *settings)
    prepare(config)
    return config


@pytest.mark.parametrize("settings", REFUSED)
def test_what_cannot_be_is_one_line(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path, settings: str
) -> None:
    with pytest.raises(ConfigError, match=REFUSED[settings]) as caught:
        prepared(make_config, tiny_run, f"run.dir={tmp_path / 'run'}", *settings.split())
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ([], AsyncScheduleConfig),
        (["recipe=dapo"], AsyncScheduleConfig),
        (["recipe=xrpo"], SerialScheduleConfig),
    ],
    ids=["grpo", "dapo", "xrpo"],
)
def test_auto_is_the_batch_of_serial(
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
    settings: list[str],
    kind: type,
) -> None:
    run = [f"run.dir={tmp_path / 'run'}", "schedule=auto", *POOL.split(), *settings]
    config = prepared(make_config, tiny_run, *run)
    assert isinstance(config.schedule, kind)
    assert not config.schedule.may_be_stale


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "images"), [("tp=2", []), ("pp=2", ["experiment=shapes_tiny"])], ids=["tp", "pp"]
)
def test_fewer_ranks_may_train_than_an_instance_has(
    make_config: Callable[..., Config], tmp_path: Path, layout: str, images: list[str]
) -> None:
    """Nothing is scored there, which would need the layout of generation."""
    ranks = ["cluster=processes", "cluster.ranks=3", "cluster.pools.rollout=2"]
    own = ["schedule=one_step", "recipe=grpo", "recipe.kl_coef=0", f"rollout.layout.{layout}"]
    prepare(make_config(*images, *ranks, *own, f"run.dir={tmp_path / 'run'}"))
