"""Sizes of prompts' images on a rank."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from transformers import PretrainedConfig

from hybridrl.config import (
    VALUE_MODELS,
    Config,
    Device,
    RolloutLayoutConfig,
    TrainLayoutConfig,
    Vision,
)
from hybridrl.costs.image_memory import ImageSizes
from hybridrl.engines.rollout.batch import PREFILL_TOKENS
from hybridrl.engines.rollout.memory import vllm_batched_tokens
from hybridrl.flow import Graph
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.tower_sizes import (
    tower_activations,
    tower_sizes,
    trained_tower_activations,
)
from hybridrl.models.vision import KEPT_BYTES
from hybridrl.preflight.memory_inputs import LongestInputs, samples_of_rank

PIXEL = 4
"""Bytes of a pixel in one color, as it is read: float32."""


def image_sizes(
    config: Config,
    graph: Graph,
    shape: PretrainedConfig,
    ranks: int,
    inputs: LongestInputs,
    generates: bool,
    computes: bool,
    capacity: int = sys.maxsize,
    layouts: Sequence[TrainLayoutConfig] | None = None,
) -> ImageSizes | None:
    """The sizes on one of a pool's `ranks`; None for prompts, a model or an engine without images.

    `generates`: the pool has rollout instances; `computes`: some role of it trains or scores. A
    rank's device has `capacity` bytes. `layouts` are those of the roles that train; None: the
    config's.
    """
    has_tower = hasattr(shape, "whole_type") and hasattr(shape, "tower_config")
    reads = config.rollout.features.reads_images and has_tower
    pads = config.data.max_prompt_tokens if inputs.pads is None else inputs.pads
    if not (reads and pads):
        return None
    tower = tower_sizes(shape)
    compute, rollout = TORCH_DTYPES[config.model.compute_dtype], TORCH_DTYPES[config.rollout.dtype]
    formats = [rollout] * generates + [compute] * computes
    formats = list(dict.fromkeys(formats))
    on_cpu = config.cluster.device is Device.cpu
    patches, of_pad = pads * tower.patches_per_pad, tower.features * compute.itemsize

    def kept(of_prompt: int) -> int:
        """Return what is kept of all prompts of the run, or the limit where that is less."""
        return min(KEPT_BYTES, of_prompt * num_prompts(config))

    def of_batch(layout: TrainLayoutConfig | RolloutLayoutConfig, batches: int) -> int:
        """Pads in the rows of one of the `batches` of a step."""
        samples = samples_of_rank(config, graph, layout, ranks, batches)
        if config.trainer.shares_prompts:
            samples = -(-samples // graph.group_size) + 1
        return samples * pads

    scored = 0
    if ranks % config.rollout.layout.ranks == 0:  # else no role is scored here
        longest = inputs.row(config.rollout.layout, ranks).tokens
        scored = min(of_batch(config.rollout.layout, 1), longest)
    if layouts is None:
        models = [role for role in graph.learned if role in VALUE_MODELS]
        layouts = [config.value_model_of(role).layout for role in models]
        layouts += [config.trainer.layout] * (len(graph.learned) - len(models))
    prefill, engine = _pass_tokens(config, inputs, capacity), 0
    embedded = prefill * shape.hidden_size  # a second time, with features in place of pads
    if generates and config.rollout.features.takes_share:
        # Its cache of features, and what DeepStack adds in a step.
        cached = max(prefill, config.longest_generated) * tower.features
        engine = (cached + prefill * (tower.features - shape.hidden_size)) * rollout.itemsize
    sizes = ImageSizes(
        tower=tower.parameters * sum(dtype.itemsize for dtype in formats),
        kept=sum(kept(pads * tower.features * dtype.itemsize) for dtype in formats),
        computing=max(
            tower_activations(shape, patches, dtype=dtype, on_cpu=on_cpu) for dtype in formats
        ),
        prefill=(prefill * tower.features + embedded) * rollout.itemsize,
        scored=of_pad * scored,
        # A critic's rows have features, too.
        trained=of_pad * sum(of_batch(own, config.trainer.mini_batches) for own in layouts),
        engine=engine,
    )
    if config.model.vision is Vision.frozen:
        return sizes

    # The models have the tower. A row's features are made in its pass, and chosen for its pads.
    row, chunks = inputs.row(config.trainer.layout, ranks), config.trainer.layout.num_chunks
    in_flight = min(chunks, row.number or chunks)  # rows that a pipeline's first chunk has begun
    prompts = -(-config.trainer.prompts_per_step // config.trainer.mini_batches)
    num_images = min(prompts, max(1, row.tokens // pads))
    chosen = min(of_batch(config.trainer.layout, config.trainer.mini_batches), row.tokens)
    image = trained_tower_activations(shape, patches, dtype=compute, on_cpu=on_cpu)
    features = kept(pads * tower.features * rollout.itemsize) if generates else 0
    pixels = kept(patches * tower.pixels * PIXEL) if computes and on_cpu else 0
    gradients = of_pad * (num_images * pads + chosen)
    return replace(
        sizes,
        tower=0,
        kept=features + pixels,
        computing=max(sizes.computing, gradients + image.backward - image.kept),
        scored=2 * sizes.scored,
        trained=in_flight * (num_images * (image.kept + of_pad * pads) + of_pad * chosen),
    )


def _pass_tokens(config: Config, inputs: LongestInputs, capacity: int) -> int:
    """Tokens of a pass of the rollout engine that reads prompts."""
    if config.rollout.features.takes_share and config.cluster.device is Device.cuda:
        return vllm_batched_tokens(capacity, config.rollout.vllm)
    return inputs.prompt if config.strict else max(PREFILL_TOKENS, inputs.prompt)


def num_prompts(config: Config) -> int:
    """The prompts of a run, at most: of its steps, and of its evaluation sets."""
    sets = config.eval.sets.values()
    held_out = sum(own.num_prompts or config.data.eval_size for own in sets)
    trainer = config.trainer
    return trainer.steps * trainer.prompts_per_step + max(held_out, config.data.eval_size)
