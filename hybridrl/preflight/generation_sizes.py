"""Sizes of a rollout engine, and of roles that only score, on the rank that has most."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

from transformers import PretrainedConfig

from hybridrl.config import Config, Device
from hybridrl.costs.generation_memory import GenerationSizes, NativeSizes, VLLMSizes
from hybridrl.costs.memory import KeptIdSizes, ScoringSizes
from hybridrl.engines.rollout.memory import (
    graph_step_bytes,
    kv_bytes_per_token,
    layer_token_bytes,
    native_step_bytes,
    sampling_bytes,
    states_bytes,
    vllm_step_bytes,
)
from hybridrl.flow import Graph
from hybridrl.layout.layerwise import by_layer
from hybridrl.layout.layout import Layout
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import Parameter, gen_layout
from hybridrl.models.activations import scoring_activations, scoring_head_activations
from hybridrl.models.context import context_tokens
from hybridrl.models.load import TORCH_DTYPES, load_config
from hybridrl.models.parallel import model_parameters, num_experts
from hybridrl.preflight.memory_inputs import (
    LongestInputs,
    PackedRow,
    attention_of,
    has_triton,
    kept_ids_of,
    samples_of_rank,
)
from hybridrl.preflight.models import judges_of

KEPT_SAMPLE_ID, KEPT_ROW_ID = 4, 8
"""Bytes of a kept id in the store, and in the rows of an update (`engines.train.truncated`)."""
MALLOC_KEEPS = 64 * 2**20
"""Freed memory that glibc does not give back, at most: M_TRIM_THRESHOLD, which it raises to twice
the largest M_MMAP_THRESHOLD. Blocks of 32 MiB and more it gives back at once."""


def generation_sizes(
    config: Config,
    graph: Graph,
    shape: PretrainedConfig,
    inputs: LongestInputs,
    stage: int | None,
    capacity: int,
) -> GenerationSizes:
    """The rollout engine's sizes on a pipeline stage; None: each of the stage that has most.

    `capacity` are the bytes of a rank's device.
    """
    rollout, dtype = config.rollout, TORCH_DTYPES[config.rollout.dtype]
    pp, tp = rollout.layout.pp, rollout.layout.tp
    stages = range(pp) if stage is None else [stage]
    mesh = Mesh((("instance", 1), ("pp", pp), ("tp", tp)))
    longest = min(config.longest_generated, context_tokens(shape))
    vocab_multiple = rollout.features.vocab_multiple
    prefill, logits = native_step_bytes(
        shape,
        rollout.pass_tokens,
        min(inputs.prompt, longest),
        dtype,
        tp,
        strict=config.strict,
        sent=_sent(pp, stages),
    )
    if rollout.features.takes_share and config.cluster.device is Device.cuda:
        prefill, logits = vllm_step_bytes(shape, rollout, dtype, tp, capacity)
    graphs = 0
    if config.cluster.device is Device.cuda and not rollout.features.takes_share:
        graphs = graph_step_bytes(shape, rollout, longest, dtype, config.strict)
    merged = 0
    if config.actor.lora.rank:  # a product is added to a weight, in float32
        merged = 2 * 4 * _widest(shape) // tp
    token = max(kv_bytes_per_token(shape, mesh, index, dtype) for index in stages)
    weights = _generation_elements(config, shape, stages, vocab_multiple=vocab_multiple)
    common = {
        "weights": dtype.itemsize * weights,
        "passing": dtype.itemsize * _passing(config, shape, stages) if merged else 0,
        "token": token,
        "prefill": prefill,
        "logits": logits + graphs,
        "buckets": 2 * rollout.layout.bucket_bytes(config.cluster.device.value),
        "longest": longest,
        "most": rollout.max_running * longest,
        "wanted": rollout.kv_cache_tokens,
    }
    if rollout.features.takes_share:
        return VLLMSizes(**common, joined=merged)
    keeps = config.cluster.device is Device.cpu and not config.strict
    return NativeSizes(
        **common,
        joined=max(merged, 2 * _widest(shape) // tp * dtype.itemsize),
        # On CPUs those of all layers are kept from step to step.
        gathered=token if keeps else layer_token_bytes(shape, tp, dtype),
        copied=inputs.copied,
        sampling=sampling_bytes(rollout, shape.vocab_size) + graphs,
        conversations=longest * conversations_held(config, graph),
        host_tokens=rollout.kv_host_tokens,
        states=max(states_bytes(shape, mesh, i, dtype, rollout.max_running) for i in stages),
    )


def conversations_held(config: Config, graph: Graph) -> int:
    """Conversations that an instance may have at a time: those that wait need no row.

    Its share of a step's samples, or of those of an evaluation set; 0 without an environment.
    """
    if not config.environment.is_on:
        return 0
    prompts = config.trainer.prompts_per_step * config.schedule.in_progress
    sets = config.eval.sets.values()
    held_out = [(own.num_prompts or config.data.eval_size) * own.num_samples for own in sets]
    most = max([ceil(prompts) * graph.group_size, *held_out])
    return -(-most // (config.ranks_of(config.cluster.home) // config.rollout.layout.ranks))


def _sent(pp: int, stages: Sequence[int]) -> int:
    """Rows of hidden states that a stage keeps until they have reached the next one."""
    return pp if min(stages) < pp - 1 else 0


def _widest(shape: PretrainedConfig) -> int:
    """Elements of the largest weight of a layer."""
    width: int = getattr(shape, "intermediate_size", 4 * shape.hidden_size)  # GPT-2 has none
    return width * int(shape.hidden_size)


def scoring_sizes(
    config: Config,
    graph: Graph,
    shape: PretrainedConfig,
    pool: str,
    inputs: LongestInputs,
    stage: int | None,
) -> dict[str, ScoringSizes]:
    """Each role of the pool that only scores; it has the layout of generation.

    On a pipeline stage, or on that which has most.
    """
    layout = config.rollout.layout
    stages = range(layout.pp) if stage is None else [stage]
    sizes: dict[str, ScoringSizes] = {}
    for role, own, classifier in _scorers(config, graph, pool):
        row = inputs.row(layout, config.ranks_of(pool))
        sizes[role] = scorer_sizes(config, own or shape, classifier, row, stages)
    if graph.from_clients and config.rollout.features.shares_weights:
        alone = PackedRow(config.longest_sample, config.longest_sample)  # prompts, one by one
        own = scorer_sizes(config, shape, classifier=False, row=alone, stages=stages)
        sizes["actor"] = replace(own, weights=0)  # those that generate
    return sizes


def kept_id_sizes(config: Config, graph: Graph, shape: PretrainedConfig, ranks: int) -> KeptIdSizes:
    """The sizes of a step's kept ids on one of a pool's `ranks`.

    Of the samples there are as many as are in progress at a time, and of each token a number, too.
    """
    kept, new = kept_ids_of(config, shape), config.rollout.max_new_tokens
    if not kept:
        return KeptIdSizes()
    trainer = config.trainer
    prompts = ceil(trainer.prompts_per_step * config.schedule.in_progress)
    samples = -(-prompts * graph.group_size // ranks)
    of_update = samples_of_rank(config, graph, trainer.layout, ranks, trainer.mini_batches)
    trained = KEPT_ROW_ID * of_update * new * kept
    return KeptIdSizes(KEPT_SAMPLE_ID * samples * new * (1 + kept), trained)


def scorer_sizes(
    config: Config,
    shape: PretrainedConfig,
    classifier: bool,
    row: PackedRow,
    stages: Sequence[int],
) -> ScoringSizes:
    """A model that only scores such rows, on that one of the pipeline stages that has most."""
    dtype, layout = TORCH_DTYPES[config.model.compute_dtype], config.rollout.layout
    attention = attention_of(config, shape)
    layer = scoring_activations(
        shape, row.tokens, dtype=dtype, attention=attention, tp=layout.tp, keys=row.keys
    )
    most, kept = layer, 0
    if not classifier:
        triton = has_triton(config)
        kept = kept_ids_of(config, shape)
        head = scoring_head_activations(
            shape, row.scored, dtype=dtype, triton=triton, tp=layout.tp, kept=kept
        )
        on_cpu = config.cluster.device is Device.cpu
        # Freed bytes of the layers are still resident when the head computes, on a CPU.
        most = max(layer, head + (min(layer, MALLOC_KEEPS) if on_cpu else 0))
    hidden = row.tokens * shape.hidden_size * dtype.itemsize
    weights = dtype.itemsize * _generation_elements(config, shape, stages, classifier)
    activations = most + (2 + _sent(layout.pp, stages)) * hidden
    return ScoringSizes(weights, activations, KEPT_ROW_ID * row.scored * kept)


def model_shape_at(path: str | None) -> PretrainedConfig | None:
    """The config of a role's own model; None without one."""
    return load_config(path) if path is not None else None


def _scorers(
    config: Config, graph: Graph, pool: str
) -> Iterator[tuple[str, PretrainedConfig | None, bool]]:
    """Roles of the pool that only score: name, shape unless the actor's, whether a classifier."""
    for name in dict.fromkeys([*graph.copies, *graph.roles]):
        if pool != config.pool_of(name):
            continue
        if name == "reference" or name in graph.copies:
            yield name, None, False
        elif name == "teacher":
            yield name, model_shape_at(config.teacher.path), False
            for path in {*config.teacher.by_source.values()} - {config.teacher.path}:
                yield f"teacher {path}", model_shape_at(path), False
    for role in judges_of(config, graph):
        if config.is_neural(role) and pool == config.pool_of(role):
            yield role, model_shape_at(config.judge_of(role).model), True


def _passing(config: Config, shape: PretrainedConfig, stages: Sequence[int]) -> int:
    """Elements on a rank of two groups of weights that follow each other in a switch, at most."""
    placed, tp = _placed(config, shape, model_parameters(shape), 1), config.rollout.layout.tp
    most = 0
    for stage in stages:
        sizes = [
            sum(box.size for name in group for box in placed.local(name, stage * tp))
            for group in by_layer(placed.rules)
        ]
        most = max([most, *map(sum, pairwise(sizes))])
    return most


def _generation_elements(
    config: Config,
    shape: PretrainedConfig,
    stages: Sequence[int],
    classifier: bool = False,
    vocab_multiple: int = 1,
) -> int:
    """Elements of the weights on the rank of an instance that has most, of these stages."""
    placed = _placed(config, shape, model_parameters(shape, classifier), vocab_multiple)
    tp = config.rollout.layout.tp
    return max(
        sum(
            len(names) * box.size
            for names in placed.alike
            for box in placed.local(names[0], stage * tp)
        )
        for stage in stages
    )


def _placed(
    config: Config, shape: PretrainedConfig, parameters: Sequence[Parameter], vocab_multiple: int
) -> Layout:
    """Where an instance has them."""
    pp, tp = config.rollout.layout.pp, config.rollout.layout.tp
    mesh = Mesh((("instance", 1), ("pp", pp), ("tp", tp)))
    ep = config.rollout.layout.ep if num_experts(shape) else 1
    return gen_layout(parameters, mesh, shape.num_hidden_layers, vocab_multiple, ep)
