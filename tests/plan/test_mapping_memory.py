"""The closed form of a mapping's memory against the memory plan of a run."""

import itertools
import random
from dataclasses import replace

import pytest
from script_modules import load_script
from transformers import AutoConfig, PretrainedConfig

from hybridrl.config import ActivationMode, Config, OptimName, PipelineSchedule, compose
from hybridrl.costs.mapping_memory import LayerBytes, MappingMemory, StepLimits
from hybridrl.costs.mapping_overrides import mapping_of
from hybridrl.flow import Graph
from hybridrl.preflight import memory_plan
from hybridrl.preflight.mapping_roles import CountedLayerBytes, planned_roles, role_shapes
from hybridrl.preflight.prepare import build_recipe

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


def _memory(config: Config, graph: Graph, layer_bytes: LayerBytes) -> MappingMemory:
    room = memory_plan.gpu_room(80 * GIB)
    samples = sum(getattr(s, "num_samples", 0) or 0 for s in graph.stages.values())
    return MappingMemory(
        limits=StepLimits(
            prompt_tokens=512,
            new_tokens=1536,
            samples=samples * config.trainer.prompts_per_step,
        ),
        capacity=room.capacity,
        reserved=room.reserved,
        layer_bytes=layer_bytes,
    )


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
def test_phases_agree_with_the_memory_plan(seed: int, optim: OptimName) -> None:
    """Each phase of a random layout is within 3 % of the plan, or 50 MiB."""
    for model, ranks, settings in _layouts(seed, 12):
        config = _config(model, ranks, settings)
        for trained in (config.trainer, config.roles.critic):
            trained.optim = replace(trained.optim, name=optim)
        graph = build_recipe(config.recipe)
        shape = AutoConfig.for_model(**config.model.shape)
        exact = memory_plan.plan_run(config, graph, shape, memory_plan.gpu_room(80 * GIB))
        shapes = role_shapes(config, graph, shape)
        roles = planned_roles(config, graph, shapes)
        memory = _memory(config, graph, CountedLayerBytes(config, shapes))
        planned = memory.plans(roles, mapping_of(config, roles))["actor"]
        wanted = {phase.name: phase.total for phase in exact.pools["actor"].phases}
        for phase in planned.phases:
            difference = abs(phase.total - wanted[phase.name])
            if difference > 50 * 2**20:
                assert difference <= 0.03 * wanted[phase.name], (model, settings, phase, wanted)
    assert len(wanted) == len(planned.phases)


def test_a_recipe_says_how_a_role_is_trained() -> None:
    """`kl_cov` takes four optimizer steps a batch."""
    compose.register()
    config = compose.check(["recipe=kl_cov", "trainer.optim.name=muon", "cluster.device=cpu"])
    graph = build_recipe(config.recipe)
    shapes = {"actor": _shape("qwen3_1.7b")}
    (actor,) = planned_roles(config, graph, shapes)
    assert (actor.mini_batches, actor.epochs, actor.optim) == (4, None, OptimName.muon)


def _shape(model: str) -> PretrainedConfig:
    return AutoConfig.for_model(**_config(model, 8, []).model.shape)


def test_layers_keep_what_the_formula_says() -> None:
    """The formula gives the bytes that torch keeps of Llama's layers, within a percent."""
    config = _config("llama3_8b", 8, [])
    graph = build_recipe(config.recipe)
    shapes = role_shapes(config, graph, _shape("llama3_8b"))
    (actor, *_) = planned_roles(config, graph, shapes)
    counted = CountedLayerBytes(config, shapes)
    formula = load_script("bench/dense_layers.py").DenseLayerBytes()
    modes = ActivationMode.keep, ActivationMode.selective, ActivationMode.recompute
    for tp, split, mode in itertools.product((1, 2, 4), (False, True), modes):
        if split and tp == 1:
            continue
        one = counted.layer(actor, 8192, tp, split, mode)
        two = formula.layer(actor, 8192, tp, split, mode)
        assert two.kept == pytest.approx(one.kept, rel=0.01), (tp, split, mode)
        # Least with tp 4, 13 % over with tp 2.
        assert 0.99 < two.backward / one.backward < 1.14, (tp, split, mode)
