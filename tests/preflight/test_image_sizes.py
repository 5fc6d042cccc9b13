"""What the memory plan says of prompts with images, and of kept ids."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch

from hybridrl.config import ActivationMode, Config, Device, FuseUpdates, compose
from hybridrl.costs.memory import MemoryPhase, MemoryPlan
from hybridrl.data import Item
from hybridrl.engines.rollout.kept_ids import KeptIds
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.truncated import kept_rows
from hybridrl.models.image_text import meta_tower
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.shape import model_shape
from hybridrl.models.tower_sizes import tower_activations, tower_sizes
from hybridrl.preflight import fused_updates
from hybridrl.preflight.activation_choice import choose_activations
from hybridrl.preflight.fused_updates import decide_fused_updates
from hybridrl.preflight.image_sizes import image_sizes
from hybridrl.preflight.images import most_pads
from hybridrl.preflight.memory_advice import advice
from hybridrl.preflight.memory_inputs import LongestInputs
from hybridrl.preflight.memory_plan import Room, plan_run
from hybridrl.preflight.prepare import build_recipe

IMAGES = "image tower", "kept features of images", "images being read"
UNBOUNDED = Room(2**40, 0)
SHARDS = {"float32 weights": 2, "moments": 2}
"""The ranks that share a weight, where it is not whole on each."""


def config_of(*settings: str) -> Config:
    compose.register()
    config = compose.check(["cluster.device=cpu", "cluster.ranks=2", *settings])
    config.resolve_device(2, "this test")
    return config


def plan(config: Config, pads: int | None = None) -> MemoryPlan:
    graph, shape = build_recipe(config.recipe), model_shape(config.model)
    inputs = LongestInputs.of(config, graph, pads)
    (pool,) = plan_run(config, graph, shape, UNBOUNDED, inputs).pools.values()
    return pool


def owners(plan: MemoryPlan) -> set[str]:
    return {owner for phase in plan.phases for owner in phase.sizes}


def test_a_tower_and_its_features_are_in_the_plan() -> None:
    """Pictures may take the whole prompt of 32 tokens; a pad has features of two layers."""
    config = config_of("experiment=shapes_tiny")
    shape, sizes = model_shape(config.model), {p.name: p.sizes for p in plan(config).phases}
    tower = 4 * sum(x.numel() for x in meta_tower(shape).parameters())
    of_prompt = 32 * 2 * 192 * 4
    trainer, group = config.trainer, build_recipe(config.recipe).group_size
    prompts = trainer.steps * trainer.prompts_per_step + config.data.eval_size
    for phase in ("switch", "prefill", "decode", "train actor", "save actor"):
        assert sizes[phase]["image tower"] == tower
        assert sizes[phase]["kept features of images"] == prompts * of_prompt
    assert not set(IMAGES) & set(sizes["load actor"])
    samples = trainer.prompts_per_step * group // 2 + 1
    if trainer.shares_prompts:
        samples = -(-samples // group) + 1
    assert sizes["train actor"]["images being read"] == samples * of_prompt
    dtype = torch.float32
    assert (
        tower_activations(shape, 4 * 32, dtype=dtype, on_cpu=True) < sizes["prefill"]["activations"]
    )
    assert sizes["prefill"]["images being read"] == 4096 * (2 + 1) * 192 * 4


def test_a_tower_that_trains_is_among_the_weights_of_the_models() -> None:
    """With gradients and moments; what is kept are generation's features, and pixels."""
    frozen, trained = (
        {p.name: p.sizes for p in plan(config_of("experiment=shapes_tiny", *more)).phases}
        for more in ((), ("model.vision=train",))
    )
    shape = model_shape(config_of("experiment=shapes_tiny").model)
    tower = sum(x.numel() for x in meta_tower(shape).parameters())
    for owner, bytes_each in (("generation weights", 4), ("float32 weights", 4), ("moments", 8)):
        more = trained["train actor"][owner] - frozen["train actor"][owner]
        # A rank may have one row more of each weight than another.
        assert more == pytest.approx(bytes_each * tower / SHARDS.get(owner, 1), rel=0.02), owner
    assert "image tower" not in trained["train actor"]
    assert frozen["train actor"]["image tower"] == 4 * tower
    least = tower_activations(shape, 4 * 32, dtype=torch.float32, on_cpu=True)
    assert trained["train actor"]["images being read"] > 2 * least
    sizes = tower_sizes(shape)
    kept = trained["decode"]["kept features of images"]
    of_prompt = frozen["decode"]["kept features of images"] / (32 * sizes.features)
    assert kept == of_prompt * 32 * (sizes.features + 4 * sizes.pixels)


def test_a_pipeline_has_features_of_the_rows_that_it_has_begun() -> None:
    """Two replicas each, so that a rank has as many samples."""
    sizes = []
    for pp in (1, 2):
        small = ["trainer.max_tokens_per_micro_batch=256", f"trainer.layout.pp={pp}"]
        config = config_of("experiment=shapes_tiny", "model.vision=train", *small)
        graph, shape = build_recipe(config.recipe), model_shape(config.model)
        inputs = LongestInputs.of(config, graph, 32)
        sizes.append(image_sizes(config, graph, shape, 2 * pp, inputs, True, True))
    one, two = (own.trained for own in sizes if own is not None)
    assert two == 2 * one


def test_a_critic_has_rows_of_its_own_layout() -> None:
    """On four ranks: one of two replicas has about twice the samples of one of four."""
    settings = "experiment=shapes_tiny", "recipe=ppo", "trainer.share_prompts=never"
    trained = []
    for pp in (1, 2):
        config = config_of(*settings, "trainer.prompts_per_step=16", f"roles.critic.layout.pp={pp}")
        graph, shape = build_recipe(config.recipe), model_shape(config.model)
        inputs = LongestInputs.of(config, graph, 32)
        sizes = image_sizes(config, graph, shape, 4, inputs, True, True)
        assert sizes is not None
        trained.append(sizes.trained)
    of_sample = 32 * 2 * 192 * 4
    samples = 16 * graph.group_size // config.trainer.mini_batches
    assert trained[1] - trained[0] == (samples // 2 - samples // 4) * of_sample


def test_vllm_has_features_of_its_own() -> None:
    """Its cache, of a step's tokens or a sample, and DeepStack's of a step, on a GPU."""
    config = config_of("experiment=shapes_tiny", "rollout=vllm")
    config.cluster.device = Device.cuda
    graph, shape = build_recipe(config.recipe), model_shape(config.model)
    inputs = LongestInputs.of(config, graph, 32)
    for capacity, step in ((80 * 2**30, 16384), (24 * 2**30, 8192)):
        sizes = image_sizes(config, graph, shape, 2, inputs, True, True, capacity)
        assert sizes is not None
        itemsize = TORCH_DTYPES[config.rollout.dtype].itemsize
        assert sizes.engine == step * (2 * 192 + 192) * itemsize
        assert sizes.prefill == step * (2 * 192 + 192) * itemsize
    alone = image_sizes(config, graph, shape, 2, inputs, False, True, 80 * 2**30)
    assert alone is not None
    assert alone.engine == 0


def test_features_that_are_kept_have_a_limit() -> None:
    config = config_of("experiment=shapes_tiny", "trainer.steps=1000000")
    sizes = plan(config).phases[-1].sizes
    assert sizes["kept features of images"] == 2**28


def test_a_run_without_images_has_no_tower() -> None:
    assert not set(IMAGES) & owners(plan(config_of("model=tiny")))


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_a_run_whose_prompts_are_texts_has_no_tower(engine: str) -> None:
    config = config_of("experiment=shapes_tiny", f"rollout={engine}")
    assert set(IMAGES) <= owners(plan(config))
    assert not set(IMAGES) & owners(plan(config, pads=0))


def test_features_are_those_of_the_most_pads_of_a_prompt() -> None:
    config = config_of("experiment=shapes_tiny")
    longest, nine = (plan(config, pads).phases[-1].sizes for pads in (None, 9))
    assert nine[IMAGES[0]] == longest[IMAGES[0]]
    assert nine[IMAGES[1]] * 32 == longest[IMAGES[1]] * 9


def test_a_role_that_scores_reads_images_of_one_row() -> None:
    """As many pads as the row has tokens, or as a step's prompts have."""
    settings = "trainer.max_tokens_per_micro_batch=64", "trainer.prompts_per_step=4"
    config = config_of("experiment=shapes_tiny", *settings)
    graph, shape = build_recipe(config.recipe), model_shape(config.model)
    assert not config.trainer.shares_prompts
    samples = 4 * graph.group_size // 2 + 1
    for pads, of_row in ((32, 64), (1, samples)):
        inputs = LongestInputs.of(config, graph, pads)
        sizes = image_sizes(config, graph, shape, 2, inputs, True, True)
        assert sizes is not None
        assert sizes.scored == of_row * 2 * 192 * 4


def test_the_most_pads_are_counted_in_prompts_with_images() -> None:
    shape, text = model_shape(config_of("experiment=shapes_tiny").model), [5, 6]
    pad = shape.image_pads[0]
    items = [
        Item("", (*text, *[pad] * pads), "", (), "main", {}, images=images)
        for pads, images in ((4, (b"one",)), (6, (b"one", b"two")), (9, ()))
    ]
    assert most_pads(shape, items) == 6
    assert most_pads(shape, items[2:]) == 0


@pytest.mark.long
def test_choices_for_texts_are_those_of_a_model_without_a_tower() -> None:
    """Activations and fused updates, on GPUs that have room for all but the tower."""
    config = config_of("experiment=shapes_tiny", "recipe=ppo", "trainer.layout.pp=2")
    config.cluster.device = Device.cuda
    config.trainer.activations = ActivationMode.keep
    graph, shape = build_recipe(config.recipe), model_shape(config.model)
    bare = copy.deepcopy(shape)
    del bare.tower_config
    phases = plan_run(config, graph, bare, UNBOUNDED, staying=()).pools["actor"].phases
    kept = Room(max(x.total for x in phases if x.name.startswith("train ")), 0)
    config.trainer.fuse_updates = FuseUpdates.always
    fused = Room(plan_run(config, graph, bare, UNBOUNDED).pools["actor"].peak.total, 0)
    for own, pads, fits in ((bare, None, True), (shape, 0, True), (shape, None, False)):
        config.trainer.fuse_updates = FuseUpdates.never
        mode, _ = choose_activations(config, graph, own, kept, pads)
        assert (mode is ActivationMode.keep) is fits
        config.trainer.fuse_updates = FuseUpdates.auto
        with mock.patch.object(fused_updates, "gpu_room", return_value=fused):
            decide_fused_updates(config, graph, own, 1, pads)
        assert (config.trainer.fuse_updates is FuseUpdates.always) is fits


def test_kept_ids_have_the_bytes_of_their_tensors() -> None:
    """Twenty of a token, with the samples of a step and in the rows of an update."""
    config = config_of("model=tiny", "rollout.top_k=20", "rollout.top_p=0.9")
    new, trainer = config.rollout.max_new_tokens, config.trainer
    of_rank = trainer.prompts_per_step * build_recipe(config.recipe).group_size // 2
    record = KeptIds()
    for _ in range(new):
        record.append(np.arange(20, dtype=np.int32))
    ids = torch.arange(new + 3) % 20
    sample = TrainSequence(ids, new, kept_ids=torch.from_numpy(record.flat()))
    rows = kept_rows([sample], [torch.arange(3, new + 3)])
    assert rows is not None
    sizes = {phase.name: phase.sizes for phase in plan(config).phases}
    assert sizes["decode"]["kept ids of samples"] == of_rank * record.flat().nbytes
    assert sizes["train actor"]["kept ids of rows"] == (of_rank + 1) * rows.nbytes
    without = config_of("model=tiny", "rollout.top_k=20", "rollout.sampling_replay=off")
    assert not {"kept ids of samples", "kept ids of rows"} & owners(plan(without))


@pytest.mark.parametrize("phase", ["train actor", "score reference", "prefill"])
def test_advice_names_what_images_and_kept_ids_depend_on(phase: str) -> None:
    config = config_of("experiment=shapes_tiny")
    images = MemoryPhase(phase, {"images being read": 9, "kept ids of rows": 5})
    wanted = "a smaller data.max_prompt_tokens or trainer.prompts_per_step; a smaller rollout.top_k"
    assert advice(config, images, "actor") == wanted
