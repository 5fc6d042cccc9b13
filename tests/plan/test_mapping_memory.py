"""The memory of a mapping in a search against the memory plan of a run."""

import math
import random
from dataclasses import replace

import pytest

from hybridrl.config import ActivationMode, Config, OptimName, PipelineSchedule, compose
from hybridrl.costs.mapping_overrides import mapping_of
from hybridrl.models.parallel import model_parameters
from hybridrl.models.shape import model_shape
from hybridrl.preflight import memory_plan
from hybridrl.preflight.mapping_memory import MappingMemory
from hybridrl.preflight.mapping_roles import planned_roles, role_shapes
from hybridrl.preflight.prepare import build_recipe

pytestmark = pytest.mark.long

GIB = 2**30
MODELS = ("llama3_8b", "qwen3_8b", "qwen3_1.7b")


def _config(model: str, ranks: int, settings: list[str]) -> Config:
    compose.register()
    args = [
        f"model={model}",
        "recipe=ppo",
        "cluster.device=cuda",
        f"cluster.ranks={ranks}",
        "model.attention=flash",
        "rollout.max_new_tokens=1536",
        "data.max_prompt_tokens=512",
    ]
    config = compose.check([*args, *settings])
    config.resolve_device(ranks, "the planned cluster")
    return config


def _layouts(seed: int, number: int) -> list[tuple[str, int, list[str]]]:
    """Random models and layouts."""
    draw = random.Random(seed)
    layouts = []
    for _ in range(number):
        model = draw.choice(MODELS)
        pp, tp = draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4))
        replicas, fsdp = draw.choice((1, 2)), draw.choice((4, 8))
        schedule = draw.choice((PipelineSchedule.one_f_one_b, PipelineSchedule.interleaved))
        activations = draw.choice((ActivationMode.keep, ActivationMode.recompute))
        settings = [f"trainer.activations={activations.value}"]
        settings += [f"trainer.max_tokens_per_micro_batch={draw.choice((4096, 16384))}"]
        settings += [f"rollout.layout.tp={draw.choice((1, 2, 4))}"]
        for key in ("trainer", "roles.critic"):
            axes = {"pp": pp, "tp": tp, "replicas": replicas, "schedule": schedule.value}
            axes["sequence_parallel"] = str(tp > 1 and draw.random() < 0.5).lower()
            settings += [f"{key}.layout.{axis}={value}" for axis, value in axes.items()]
        layouts.append((model, pp * tp * replicas * fsdp, settings))
    return layouts


@pytest.mark.parametrize(
    ("seed", "optim"),
    [(0, OptimName.adamw), (1, OptimName.adamw), (2, OptimName.adamw8bit), (3, OptimName.muon)],
)
def test_phases_are_those_of_the_memory_plan(seed: int, optim: OptimName) -> None:
    """Each phase of a random layout is what `hybridrl plan memory` says, within a percent.

    A search counts training apart from generation, whose tp decides which dimension FSDP cuts.
    """
    for model, ranks, settings in _layouts(seed, 6):
        config = _config(model, ranks, settings)
        for trained in (config.trainer, config.roles.critic):
            trained.optim = replace(trained.optim, name=optim)
        _check_phases(config)


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.layout.ep=4", "roles.critic.layout.ep=4"),
        ("trainer.layout.tp=2", "rollout.layout.tp=2", "rollout.layout.ep=2"),
        ("actor.lora.rank=8", "roles.critic.lora.rank=4"),
        ("trainer.layout.cp=2", "trainer.max_tokens_per_micro_batch=1024"),
        ("actor.lora.rank=8", "trainer.layout.pp=2", "trainer.layout.ep=2"),
    ],
)
def test_experts_adapters_and_shared_rows_too(settings: tuple[str, ...]) -> None:
    _check_phases(_config("tiny_moe", 4, [*settings]))


@pytest.mark.parametrize("settings", [(), ("cluster.device=cpu",), ("trainer.layout.tp=2",)])
def test_images_and_kept_ids_too(settings: tuple[str, ...]) -> None:
    """A reference has them as well, for a row, which is shorter than a step's samples."""
    recipe = "recipe=grpo", "recipe.kl_coef=0.1", "rollout.top_k=20", "rollout.top_p=0.9"
    _check_phases(_config("tiny_vision", 4, [*recipe, *settings]))


@pytest.mark.parametrize("settings", [("rollout=vllm",), ("roles.critic.layout.pp=2",)])
def test_images_of_vllm_and_of_critics_too(settings: tuple[str, ...]) -> None:
    """A critic's rows are those of its own layout."""
    _check_phases(_config("tiny_vision", 4, ["recipe=ppo", *settings]))


def _check_phases(config: Config) -> None:
    graph, room = build_recipe(config.recipe), memory_plan.gpu_room(80 * GIB)
    shape = model_shape(config.model)
    exact = memory_plan.plan_run(config, graph, shape, room).pools["actor"]
    shapes = role_shapes(config, graph, shape)
    roles = planned_roles(config, graph, shapes)
    memory = MappingMemory(config, graph, shapes, room)
    planned = memory.plans(roles, mapping_of(config, roles))["actor"]
    wanted = {phase.name: phase.total for phase in exact.phases}
    assert wanted == pytest.approx({p.name: p.total for p in planned.phases}, rel=0.01)


def test_a_recipe_says_how_a_role_is_trained() -> None:
    """`kl_cov` takes four optimizer steps a batch."""
    compose.register()
    config = compose.check(["recipe=kl_cov", "cluster.device=cpu"])
    graph = build_recipe(config.recipe)
    shapes = {"actor": model_shape(_config("qwen3_1.7b", 8, []).model)}
    (actor,) = planned_roles(config, graph, shapes)
    assert (actor.mini_batches, actor.epochs) == (4, None)


def test_a_hybrid_has_the_weights_and_states_of_its_mixers() -> None:
    config = _config("tiny_hybrid", 2, [])
    graph, shape = build_recipe(config.recipe), model_shape(config.model)
    (actor,) = planned_roles(config, graph, {"actor": shape})
    recurrent = actor.shape.recurrent
    assert recurrent is not None
    assert (recurrent.layers, actor.shape.attending) == (3, 1)
    weights = sum(math.prod(p.shape) for p in model_parameters(shape))
    # Norms are left out, and the gates of the layer that attends.
    assert actor.shape.parameters == pytest.approx(weights, rel=0.05)
    keys, values = shape.linear_num_key_heads, shape.linear_num_value_heads
    sizes = shape.linear_key_head_dim, shape.linear_value_head_dim
    matrix = values * sizes[0] * sizes[1]
    inputs = 4 * (2 * keys * sizes[0] + values * sizes[1])
    assert recurrent.state_bytes == 3 * (4 * matrix + 2 * inputs)
    assert recurrent.state_flops == 3 * 6 * matrix
