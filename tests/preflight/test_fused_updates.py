"""Whether updates are one plan, decided before a run; and runs whose updates are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config import Config, ConfigError, Device, FuseUpdates, SlurmClusterConfig
from hybridrl.config.compose import check, register
from hybridrl.costs import fused_plans
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import PlannedRole, SampleLength, TrainLayout, cluster_of
from hybridrl.costs.mapping_overrides import mapping_of
from hybridrl.costs.model import CostModel
from hybridrl.costs.model_shape import ModelShape
from hybridrl.flow import Graph
from hybridrl.models.load import load_config
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight import fused_updates
from hybridrl.preflight.fused_updates import decide_fused_updates, predicted_gain
from hybridrl.preflight.mapping_roles import planned_roles, role_shapes
from hybridrl.preflight.memory_plan import Room, gpu_room, plan_run
from hybridrl.preflight.prepare import build_recipe
from hybridrl.preflight.roles_together import roles_together

GIB = 2**30
PIPELINE = ["recipe=ppo", "cluster.ranks=2", "trainer.layout.pp=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_config: Callable[..., Config]) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(
        folder, make_config("model.tiny.num_layers=8", "run.dir=out").model.tiny, seed=0
    )
    return str(folder)


@pytest.fixture
def decide(make_config: Callable[..., Config], model: str) -> Callable[..., tuple[Config, Any]]:
    """The config of some overrides, decided, and its graph."""

    def decide(*overrides: str, gpu_memory: int | None = 80 * GIB) -> tuple[Config, Any]:
        config = make_config("run.dir=out", *overrides)
        config.cluster.device = Device.cuda
        graph = build_recipe(config.recipe)
        decide_fused_updates(config, graph, load_config(model), gpu_memory)
        return config, graph

    return decide


@pytest.mark.parametrize(
    ("settings", "fuses"),
    [
        (PIPELINE, True),
        ([*PIPELINE, "trainer.fuse_updates=never"], False),
        ([*PIPELINE, "trainer.layout.pp=1"], False),  # nothing is idle
        ([*PIPELINE, "trainer.layout.pp=1", "roles.critic.layout.pp=2"], True),
        ([*PIPELINE, "recipe=grpo"], False),  # one role
        ([*PIPELINE, "recipe=safe_rlhf"], True),
        (["recipe=ppo", "cluster.ranks=4", "trainer.layout.pp=2", "cluster.placement=split",
          "cluster.pools.critic=2"], False),  # one role a pool
        (["recipe=safe_rlhf", "cluster.ranks=4", "trainer.layout.pp=2", "cluster.placement=split",
          "cluster.pools.critic=2"], True),  # both critics
        ([*PIPELINE, "trainer.max_tokens_per_micro_batch=512",
          "trainer.prompts_per_step=1024"], False),  # so many rows that the pipeline is full
    ],
)  # fmt: skip
def test_auto(decide: Callable[..., Any], settings: list[str], fuses: bool) -> None:
    config, _ = decide(*settings)
    wanted = FuseUpdates.always if fuses else FuseUpdates.never
    assert config.trainer.fuse_updates is wanted


def test_the_gain_is_the_pipelines_idle_time(decide: Callable[..., Any], model: str) -> None:
    """Two models on two ranks with r rows take 6 r in place of 2 (3 r + 3), the head aside."""
    for rows in (2, 8):
        config, graph = decide(*PIPELINE)
        samples = config.trainer.prompts_per_step * config.recipe["num_samples"]
        config.trainer.max_tokens_per_micro_batch = -(-samples * config.longest_sample // rows)
        config.rollout.max_new_tokens, config.data.max_prompt_tokens = 1, config.longest_sample - 1
        gain = predicted_gain(config, graph, "actor", _trained(config, graph, model))
        assert gain == pytest.approx(1 / (rows + 1), rel=0.1)


def _trained(config: Config, graph: Graph, model: str) -> list[PlannedRole]:
    shapes = role_shapes(config, graph, load_config(model))
    return [role for role in planned_roles(config, graph, shapes) if role.trained]


@pytest.mark.parametrize(
    ("own", "mini_batches"),
    [
        (["roles.critic.layout.pp=1"], None),
        (["roles.critic.lora.rank=2"], None),
        ([], 2),
    ],
)
def test_the_gain_knows_each_role(
    decide: Callable[..., Any],
    model: str,
    own: list[str],
    mini_batches: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its layout, adapters and mini-batches count, as in the planner's seconds of whole updates."""
    monkeypatch.setattr(fused_plans, "OVER_BOUND", 1)
    monkeypatch.setattr(fused_updates, "_device_of_ranks", lambda config: "h100")
    device = ACCELERATORS["h100"]
    costs = CostModel(LayerCosts.of(device, 4), cluster_of(device, 1, 2))
    gains = []
    for more, number in (([], None), (own, mini_batches)):
        config, graph = decide(*PIPELINE, "trainer.prompts_per_step=4", *more)
        actor, critic = _trained(config, graph, model)
        roles = [actor, replace(critic, mini_batches=number)]
        layouts = mapping_of(config, roles).train
        longest = SampleLength(config.data.max_prompt_tokens, config.rollout.max_new_tokens)
        samples = [longest] * 4 * graph.group_size

        def seconds(*roles: PlannedRole) -> float:
            return fused_plans.updates_s(costs, roles, layouts, range(2), samples)  # noqa: B023

        once = sum(_once(costs, role, layouts[role.name]) for role in roles)
        separate = sum(map(seconds, roles))
        gains.append((separate - seconds(*roles)) / (separate - once))
        gain = predicted_gain(config, graph, "actor", roles)
        assert gain == pytest.approx(gains[-1], rel=1e-6)
    assert gains[0] != pytest.approx(gains[1], rel=1e-3)


def _once(costs: CostModel, role: PlannedRole, layout: TrainLayout) -> float:
    """Seconds of a role's steps, and of its way onto the device and off."""
    steps = (role.mini_batches or 1) * costs.step_s(role, layout, range(2))
    return steps + costs.activate_s(role, layout) + costs.deactivate_s(role, layout)


def test_the_gain_is_that_of_the_ranks_nodes_and_device(
    decide: Callable[..., Any], model: str
) -> None:
    """A pipeline across nodes has slower messages, and so has one of CPUs."""
    gains = []
    for nodes, device in ((1, Device.cuda), (2, Device.cuda), (1, Device.cpu)):
        config, graph = decide(*PIPELINE)
        config.cluster = SlurmClusterConfig(nodes=nodes, ranks=2, device=device)
        gains.append(predicted_gain(config, graph, "actor", _trained(config, graph, model)))
    assert len({round(gain, 6) for gain in gains}) == 3


def test_only_sizes_that_are_unknown_leave_the_gain_unknown(decide: Callable[..., Any]) -> None:
    """A bug in the prediction ends a run, and is no quiet `never`."""
    with mock.patch.object(ModelShape, "of_config", side_effect=ValueError("no hidden_size")):
        config, _ = decide(*PIPELINE)
    assert config.trainer.fuse_updates is FuseUpdates.never
    with (
        mock.patch.object(fused_updates, "shared_problem", side_effect=ValueError("a bug")),
        pytest.raises(ValueError, match="a bug"),
    ):
        decide(*PIPELINE)


def test_both_roles_have_to_fit(
    decide: Callable[..., Any], model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` gives way where they do not, and says so; `always` is refused by the memory plan."""
    config, graph = decide(*PIPELINE)
    room = gpu_room(80 * GIB)
    (plan,) = plan_run(config, graph, load_config(model), room).pools.values()
    phases = {phase.name: phase.total for phase in plan.phases}
    config.trainer.fuse_updates = FuseUpdates.never
    (apart,) = plan_run(config, graph, load_config(model), room).pools.values()
    each = [phases[f"train {role}"] for role in ("actor", "critic")]
    assert max(each) < phases["train together"] <= sum(each)
    assert phases.keys() - {phase.name for phase in apart.phases} == {"train together"}
    reason = _reason_of(plan, apart, config, graph, model)
    assert "the largest phase, train together, needs" in reason
    assert "less with trainer.fuse_updates=never" in reason


def _reason_of(plan: Any, apart: Any, config: Any, graph: Any, model: str) -> str:
    """Why `auto` leaves updates apart, on a device that fits the rest alone."""
    between = Room((plan.peak.total + apart.peak.total) // 2, 0)
    assert plan.peak.name == "train together"
    with mock.patch.object(fused_updates, "gpu_room", return_value=between):
        roles = roles_together(config, graph, "actor")
        reason = fused_updates._reason_against(
            config, graph, [("actor", of_pool) for of_pool in roles], load_config(model), 1, None
        )
    return str(reason)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["roles.critic.layout={pp: 1, tp: 2}"], "one plan has one tp; wanted .*tp="),
        (["roles.critic.layout={pp: 1, fsdp: 2, cp: 2}"], "wanted roles.critic.layout.cp=1 .2."),
        (["trainer.max_tokens_per_micro_batch=64", "trainer.chunk_tokens=64",
          "roles.critic.layout.pp=2"], "wanted trainer.chunk_tokens=0"),
        (
            ["roles.critic.lora.rank=2", "roles.critic.lora.dropout=0.1"],
            "wanted roles.critic.lora.dropout=0 .0.1.",
        ),
        (["actor.lora.rank=2", "actor.lora.dropout=0.1"], "wanted actor.lora.dropout=0 .0.1."),
    ],
)  # fmt: skip
def test_always_names_what_is_in_the_way(
    decide: Callable[..., Any], settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.fuse_updates=always: wanted auto .*{message}"):
        decide(*PIPELINE, *settings, "trainer.fuse_updates=always")
    config, _ = decide(*PIPELINE, *settings)
    assert config.trainer.fuse_updates is FuseUpdates.never


def test_always_without_effect_says_so(
    decide: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = decide("recipe=grpo", "cluster.ranks=2", "trainer.fuse_updates=always")
    assert config.trainer.fuse_updates is FuseUpdates.never
    assert "trainer.fuse_updates=always has no effect" in caplog.text


def test_a_wrong_value_is_one_line() -> None:
    register()
    with pytest.raises(ConfigError, match=r"^trainer.fuse_updates=sometimes: wanted .*never"):
        check(["trainer.fuse_updates=sometimes"])


SMALL = [
    "model.tiny.num_layers=2", "cluster.ranks=2", "trainer.layout.pp=2", "recipe.num_samples=4",
    "recipe.kl_coef=0.1", "trainer.steps=2", "trainer.max_tokens_per_micro_batch=96",
    "trainer.optim.lr=30", "trainer.optim.eps=1000", "trainer.optim.clip_grad_norm=0.5",
    "roles.critic.optim.lr=30", "roles.critic.optim.eps=1000",
    "roles.critic.optim.clip_grad_norm=0",
    "eval.sets.main.num_prompts=2", "trainer.mini_batches=2", "rollout.dtype=bfloat16",
    "recipe.correction.old_log_probs=trainer",
]  # fmt: skip
SCORES = {
    "ppo": "old_log_probs and values",
    "safe_rlhf": "old_log_probs and values and cost_values",
}
"""Stages that need training shards, as generation's weights have another format."""
SAFE = ["cost=regex", "cost.pattern='(?s)[a-m].*'", "cost.extract=null"]


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("ppo", ["recipe.critic_warmup=1"]),
        pytest.param("safe_rlhf", SAFE, marks=pytest.mark.wide),
    ],
)
def test_a_fused_run_trains_as_one_that_is_not(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    recipe: str,
    more: list[str],
) -> None:
    """Two steps of two mini-batches each; the weights of all roles in the end."""
    check_runs(train_here, tiny_run, tmp_path, recipe, more)


@pytest.mark.wide
@pytest.mark.ray
@pytest.mark.parametrize(("recipe", "more"), [("ppo", []), ("safe_rlhf", SAFE)])
def test_so_does_one_on_ray(
    train: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    recipe: str,
    more: list[str],
) -> None:
    """The memory of a joined cluster's CPUs is not known, so `auto` would not fuse."""
    check_runs(train, tiny_run, tmp_path, recipe, more, "always")


def check_runs(
    train: Callable[..., Any],
    tiny_run: list[str],
    folder: Path,
    recipe: str,
    more: list[str],
    mode: str = "auto",
) -> None:
    kept = [x for x in tiny_run if not x.startswith(("recipe", "model.tiny.num_layers"))]
    settings = [*kept, f"recipe={recipe}", *SMALL, *more]
    modes = ("never", mode)
    runs = [train(folder / x, *settings, f"trainer.fuse_updates={x}") for x in modes]
    roles = ["critic", "cost_critic"] if recipe == "safe_rlhf" else ["critic"]
    for sub in ("", *roles):
        before = load_file(runs[0].dir / "start" / "model.safetensors")
        one, other = (load_file(run.dir / "final" / sub / "model.safetensors") for run in runs)
        assert one.keys() == other.keys()
        moved = torch.cat([(one[x] - before[x]).flatten() for x in one if x in before]).norm()
        gap = torch.cat([(one[x] - other[x]).flatten() for x in one]).norm()
        assert moved > 1e-3
        assert gap < 1e-5 * moved, (sub, gap, moved)  # measured: 0
    updates = [[s for s in run.spans if s.name == "update"] for run in runs]
    assert len(updates[1]) < len(updates[0]), "one call for several roles"
    joined = [{s.name for s in run.spans if " and " in s.name} for run in runs]
    assert joined == [set(), {SCORES[recipe]}]
    for one, other in zip(*(run.metrics for run in runs), strict=True):
        for key in ("loss", "grad_norm", *(f"{role}/loss" for role in roles)):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
