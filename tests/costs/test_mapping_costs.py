"""Seconds under a mapping: by hand of one model, in proportion between layouts and sizes."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config import ActivationMode, PipelineSchedule, SerialScheduleConfig
from hybridrl.config.rollout import ENGINES, Engine
from hybridrl.costs.devices import ACCELERATORS, MODELS
from hybridrl.costs.layers import LayerCosts, LayerWork
from hybridrl.costs.links import LinkSpeed
from hybridrl.costs.mapping import (
    ClusterShape,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    SampleLength,
    SampleTotals,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel, even_rows
from hybridrl.costs.model_shape import ModelShape, RecurrentShape, matrices
from hybridrl.costs.scales import CostScales
from hybridrl.flow.mapped_work import MappedWork
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.switching import plan_switch
from hybridrl.pipelines.problem import PassCosts

H100 = ACCELERATORS["h100"]
LLAMA = MODELS["8b"]
ACTOR = PlannedRole(name="actor", shape=LLAMA, trained=True)
COSTS = CostModel(LayerCosts.of(H100), cluster_of(H100, nodes=2, per_node=8))
SAMPLES = [SampleLength(512, 1536)] * 64


def test_the_sizes_of_llama_3_8b() -> None:
    # Its model card: 8.03 B parameters. Norms are left out: 65 vectors of 4,096.
    assert LLAMA.parameters + 65 * 4096 == 8_030_261_248
    assert LLAMA.kv_bytes == 2 * 32 * 8 * 128 * 2
    config = {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    }  # fmt: skip
    assert ModelShape.of_config(config) == LLAMA
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    experts = ModelShape.of_config(config | routed)
    each = 3 * 4096 * 1024
    assert experts.layer_parameters - experts.active_layer_parameters == 6 * each
    assert sum(math.prod(p.shape) for p in matrices(experts)) == experts.parameters
    with pytest.raises(ValueError, match="without vocab_size"):
        ModelShape.of_config({k: v for k, v in config.items() if k != "vocab_size"})


def test_layers_that_attend_beside_a_mixer_have_the_weights_of_both() -> None:
    mixers = 32 * 5 * 4096 * 4096
    states = RecurrentShape(32, mixers, state_bytes=2**20, state_flops=10**8, attending=32)
    shape = replace(LLAMA, recurrent=states)
    assert shape.kv_bytes == LLAMA.kv_bytes
    assert shape.parameters == LLAMA.parameters + mixers
    assert sum(math.prod(p.shape) for p in matrices(shape)) == shape.parameters


def passes_of(
    costs: CostModel,
    role: PlannedRole,
    layout: TrainLayout,
    ranks: range,
    row: Sequence[SampleLength],
) -> tuple[PassCosts, ...]:
    """The costs of a micro-batch of these samples."""
    sums = SampleTotals.of(row)
    return costs.row_passes(role, layout, ranks, sums.tokens, sums.scored, sums.pairs)


def test_recurrent_layers_by_hand() -> None:
    """Three of four layers keep a state: they have no keys, no pairs, and weights of their own."""
    mixers = 24 * 5 * 4096 * 4096
    states = RecurrentShape(24, mixers, state_bytes=48 * 2**20, state_flops=10**8)
    shape = replace(LLAMA, recurrent=states)
    assert shape.kv_bytes == LLAMA.kv_bytes // 4
    attention = 4096 * 2 * 128 * (32 + 8)
    assert shape.parameters == LLAMA.parameters - 24 * attention + mixers
    assert sum(math.prod(p.shape) for p in matrices(shape)) == shape.parameters
    dense, hybrid = (LayerWork.of(own) for own in (LLAMA, shape))
    assert hybrid.pair_flops == dense.pair_flops / 4
    assert 32 * hybrid.flops == 2 * 32 * shape.layer_parameters + 10**8
    assert hybrid.trained_flops == 2 * shape.layer_parameters
    layouts = GenLayout(tp=2), range(2)
    before, after = (
        COSTS.generation(replace(ACTOR, shape=own), *layouts) for own in (LLAMA, shape)
    )
    work = 2 * (shape.layers * (shape.layer_parameters - LLAMA.layer_parameters)) + 10**8
    moved = 2 * 48 * 2**20 / (0.7 * H100.memory_bytes_per_s)
    more = work / (0.5 * H100.flops) + moved
    assert after.row_s - before.row_s == pytest.approx(more / 2, rel=1e-6)
    assert after.cached_token_s == pytest.approx(before.cached_token_s / 4)
    assert after.kv_token_s == pytest.approx(before.kv_token_s / 4)
    # A sample that moves takes its states, however short it is.
    sent = 48 * 2**20 / 2 / COSTS.cluster.between.bytes_per_s
    assert after.kv_call_s - before.kv_call_s == pytest.approx(sent)


def test_a_roofline_by_hand() -> None:
    """One rank, one micro-batch of four samples of 2,048 tokens, 1,536 of them scored."""
    row = SAMPLES[:4]
    (passes,) = passes_of(COSTS, ACTOR, TrainLayout(), range(1), row)
    matrices = 2 * 32 * 218_103_808 * 8192  # q and o, k and v, gate, up, down
    head = 2 * 128_256 * 4096 * 4 * 1536
    attention = 32 * 4 * 32 * 128 * 4 * (2048 * 2049 // 2)
    flops = matrices + head + attention
    assert passes.forward_s == pytest.approx(1e-3 + flops / (0.5 * 989e12), rel=1e-9)
    both = passes.forward_s + passes.backward_s - 2e-3
    assert both == pytest.approx(3 * flops / (0.4 * 989e12), rel=1e-9)


def test_decoding_by_hand() -> None:
    """Two ranks of an instance read half of the weights each, and reduce twice a layer.

    The host launches a graph, and two copies.
    """
    costs = COSTS.generation(ACTOR, GenLayout(tp=2), range(16))
    read = 8_030_261_248 - 65 * 4096 - 128_256 * 4096  # a row of the embedding is looked up
    weights = 2 * read / 2 / (0.7 * 3.35e12)
    host = 6.5e-6 * 3
    assert costs.step_s == pytest.approx(host + weights + 64 * 5e-6, rel=1e-6)
    assert costs.cached_token_s == pytest.approx(131_072 / 2 / (0.7 * 3.35e12), rel=1e-9)
    four = COSTS.generation(ACTOR, GenLayout(tp=4), range(16))
    assert four.step_s == pytest.approx(host + weights / 2 + 64 * 2 * 5e-6, rel=1e-6)


def test_traffic_by_hand() -> None:
    """Gradients of the whole model, in float32, over two nodes of eight ranks."""
    small = PlannedRole(name="actor", shape=ModelShape(4, 1024, 4096, 8, 8), trained=True)
    copies = COSTS.gradient_s(small, TrainLayout(replicas=16), range(16))
    alone = COSTS.gradient_s(small, TrainLayout(), range(1))
    nbytes = 4 * small.shape.parameters
    # Eight ranks of a node share eight links of 400 Gb/s, which NVLink does not exceed here.
    rate = 0.7 * min(450e9, 8 * 50e9)
    wanted = 4 * 5e-6 + 15 / 16 * 2 * nbytes / rate
    assert copies - alone == pytest.approx(wanted, rel=1e-9)
    # A pipeline gathers a stage once for scores: half of the layers, and embedding or head.
    once = COSTS.pass_s(ACTOR, TrainLayout(pp=2, fsdp=8), range(16))
    stage = 16 * 218_103_808 + 128_256 * 4096
    assert once == pytest.approx(3 * 5e-6 + 7 / 8 * 2 * stage / (0.7 * 450e9), rel=1e-9)
    assert COSTS.pass_s(ACTOR, TrainLayout(fsdp=16), range(16)) == 0
    # Every other rank of a node is a member: four links.
    group = [*range(0, 16, 2)]
    assert COSTS.cluster.link(group).bytes_per_s == pytest.approx(0.7 * 4 * 50e9)


def test_a_pipeline_by_hand() -> None:
    """Two stages, four equal micro-batches, links that take no time: 1F1B is five passes long."""
    still = LinkSpeed(math.inf)
    costs = CostModel(LayerCosts.of(H100), ClusterShape(1, 2, H100, still, still, still))
    layout = TrainLayout(pp=2, micro_batch_tokens=8192)
    shape = ModelShape(32, 4096, 14_336, 32, 8, vocabulary=1)  # a head that takes nothing
    role = PlannedRole(name="actor", shape=shape, trained=True)
    rows = even_rows(layout, SampleTotals.of(SAMPLES[:16]))
    _, plan = costs.pipeline(role, layout, range(2), rows)
    first, last = passes_of(costs, role, layout, range(2), SAMPLES[:4])
    assert first.forward_s == pytest.approx(last.forward_s, rel=1e-6)
    rest = costs.gradient_s(role, layout, range(2)) + costs.optimizer_s(role, layout, range(2))
    seconds = costs.update_s(role, layout, range(2), SAMPLES[:16]) - rest - 2e-3
    stage = first.forward_s + first.backward_s
    assert seconds == pytest.approx(5 * stage, rel=1e-6)
    assert [len(actions) for actions in plan] == [8, 8]


def test_halves_and_recomputation() -> None:
    row = SAMPLES[:4]
    whole = passes_of(COSTS, ACTOR, TrainLayout(pp=2), range(2), row)
    halves = passes_of(
        COSTS, ACTOR, TrainLayout(pp=2, schedule=PipelineSchedule.zero_bubble), range(2), row
    )
    assert sum(x.backward_s + x.weights_s for x in halves) == pytest.approx(
        sum(x.backward_s for x in whole) + 2e-3  # four chunks in place of two
    )
    kept, again = (
        passes_of(COSTS, ACTOR, TrainLayout(activations=mode), range(1), row)[0]
        for mode in (ActivationMode.keep, ActivationMode.recompute)
    )
    head = 2 * 128_256 * 4096 * 4 * 1536 / (0.5 * 989e12)
    assert again.backward_s - kept.backward_s == pytest.approx(kept.forward_s - 1e-3 - head)


LAYOUTS = [
    TrainLayout(pp=pp, replicas=replicas, fsdp=16 // pp // replicas // tp, tp=tp, schedule=schedule)
    for pp in (1, 2, 4)
    for replicas in (1, 2)
    for tp in (1, 4)
    for schedule in PipelineSchedule
    if 16 // pp // replicas // tp and (pp > 1 or schedule is PipelineSchedule.one_f_one_b)
]


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_below(seed: int) -> None:
    """The bound is below the seconds of every layout of 16 ranks, on samples of random lengths."""
    draw = random.Random(seed)
    samples = [SampleLength(draw.randint(1, 900), draw.randint(1, 4000)) for _ in range(96)]
    for layout in LAYOUTS:
        assert layout.ranks == 16
        bound = COSTS.bound_of(ACTOR, layout, range(16), SampleTotals.of(samples))
        seconds = COSTS.update_s(ACTOR, layout, range(16), samples)
        assert bound <= seconds * (1 + 1e-9), layout
        assert seconds < 3 * bound, layout


NOTHING = LayerCosts(
    forward_flop_s=0.0,
    backward_flop_s=0.0,
    byte_s=0.0,
    launch_s=0.0,
    host=ENGINES[Engine.vllm].host,
)


def test_the_switch_by_hand() -> None:
    """Two ranks with a half each make two instances: each receives the other half."""
    still = LinkSpeed(1e9)
    cluster = ClusterShape(1, 2, H100, still, still, still)
    costs = CostModel(NOTHING, cluster)
    switch = costs.switch_s(ACTOR, TrainLayout(fsdp=2), GenLayout(), range(2))
    assert switch == pytest.approx(LLAMA.parameters * 2 / 2 / 1e9, rel=1e-3)
    assert costs.switch_s(ACTOR, TrainLayout(tp=2), GenLayout(tp=2), range(2)) == 0
    shards = costs.activate_s(ACTOR, TrainLayout(fsdp=2))
    assert shards == pytest.approx(12 * LLAMA.parameters / 2 / 1e9)


def test_the_layouts_of_forward_passes() -> None:
    """Value models on their training shards; the reference on an instance, or in its own pool."""
    critic = PlannedRole(name="critic", shape=LLAMA, trained=True, passes=("values",))
    reference = PlannedRole(name="reference", shape=LLAMA, passes=("reference",))
    train = {"actor": TrainLayout(fsdp=8), "critic": TrainLayout(fsdp=8)}
    together = DeviceMapping(
        pools={"actor": ("actor", "reference", "critic")},
        ranks={"actor": 8},
        train=train,
        gen=GenLayout(tp=2),
        schedule=SerialScheduleConfig(),
    )
    apart = DeviceMapping(
        pools={"actor": ("actor",), "critic": ("critic",), "judges": ("reference",)},
        ranks={"actor": 8, "critic": 8, "judges": 4},
        train=train,
        gen=GenLayout(tp=2),
        schedule=SerialScheduleConfig(),
    )
    assert COSTS.stage_layout(critic, together) == (train["critic"], True)
    assert COSTS.stage_layout(reference, together) == (GenLayout(tp=2), True)
    assert COSTS.stage_layout(critic, apart) == (train["critic"], False)
    assert COSTS.stage_layout(reference, apart) == (GenLayout(tp=2), False)
    assert apart.ranks_of("reference") == range(16, 20)
    assert together.instances == 4
    # Two copies of the reference share what one instance would compute alone.
    alone = COSTS.stage_s(reference, together, SAMPLES)
    assert COSTS.stage_s(reference, apart, SAMPLES) == pytest.approx(alone / 2)
    work = MappedWork(costs=COSTS, mapping=together, roles=[ACTOR, critic, reference])
    costs = work.flow_costs([sample for sample in SAMPLES for _ in range(together.instances)])
    assert set(costs.token_s) == {"values", "reference"}
    tokens = sum(sample.tokens for sample in SAMPLES)
    whole = costs.compute("reference", tokens) - COSTS.activate_s(reference, GenLayout(tp=2))
    assert whole == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("order", [(), (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)])
def test_decoding_is_priced_on_the_groups_of_the_switch(order: tuple[int, ...]) -> None:
    """Whose all-reduces cross nodes where the order of ranks that is chosen has them do so."""
    cluster = COSTS.cluster.ordered(order)
    costs, nodes = COSTS.on(cluster), [cluster.node(rank) for rank in range(16)]
    parameters = matrices(ModelShape(4, 1024, 4096, 16, 16))
    for axes, tp in itertools.product((TrainAxes(fsdp=16), TrainAxes(fsdp=4, tp=4)), (2, 4, 8, 16)):
        switch = plan_switch(parameters, axes, 1, tp, nodes=nodes)
        groups = switch.plan.dst.mesh.lines("tp")
        crosses = any(len({nodes[rank] for rank in group}) > 1 for group in groups)
        assert crosses is (tp == 16)
        link = cluster.slowest(groups) if crosses else cluster.within
        call_s = costs._tp_reduce(LLAMA, GenLayout(tp=tp), range(16)).call_s
        assert call_s == pytest.approx(link.all_reduce_s(0, tp))
    train, gen = TrainLayout(fsdp=16), GenLayout(tp=4)
    assert costs.switch_s(ACTOR, train, gen, range(16)) > 0


def test_sizes_by_layer_are_not_a_decoder_of_one_size() -> None:
    config = {
        "num_attention_heads": 8, "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
        "intermediate_size": [256, 512],
    }  # fmt: skip
    with pytest.raises(ValueError, match="a config whose layers have sizes of their own"):
        ModelShape.of_config(config)


def test_heads_that_tp_cannot_share_are_cut_with_the_rest() -> None:
    """A model whose attention is not cut by heads may have a tp that its heads do not divide."""
    role = replace(ACTOR, shape=ModelShape(4, 192, 384, 6, 2))
    assert COSTS.switch_s(role, TrainLayout(fsdp=5, tp=3), GenLayout(tp=3), range(15)) > 0


def test_the_host_launches_the_kernels_that_were_counted() -> None:
    """A decode step on fake GPUs that draws from few tokens, so by no graph, gave the counts.

    By layers and in all; vLLM replays graphs.
    """
    text = (Path(__file__).parents[1] / "gpu_dry" / "counts.json").read_text()
    case = json.loads(text)["8b on 8, zero bubble"]
    decode = case["phases"]["decode of top-k and top-p"]
    native = ENGINES[Engine.native].host
    assert native.layer_kernels == decode["kernels_per_layer"]
    assert native.seconds(case["layers"], 1.0) == decode["kernels"]
    assert ENGINES[Engine.vllm].host.seconds(36, 6.5e-6) < native.seconds(36, 6.5e-6)


def test_the_host_replays_the_graphs_that_were_counted() -> None:
    """A rank on a CPU and stages of a pipeline have none."""
    text = (Path(__file__).parents[1] / "gpu_dry" / "counts.json").read_text()
    case = json.loads(text)["1.7b on 1"]
    decode, features = case["phases"]["decode"], ENGINES[Engine.native]
    assert features.replay is not None
    assert decode["replayed"] == decode["kernels"]
    launches = decode["replays"] + sum(decode["copies"].values())
    assert features.replay.seconds(case["layers"], 1.0) == launches
    gpu, cpu = (LayerCosts.of(ACCELERATORS[name]) for name in ("h100", "cpu"))
    assert (gpu.replay, cpu.replay) == (features.replay, None)
    layers = ACTOR.shape.layers
    slower = replace(gpu, launch_s=2 * gpu.launch_s)
    dense, experts = (
        ACTOR,
        replace(ACTOR, shape=replace(ACTOR.shape, experts=8, experts_per_token=2)),
    )
    for role, gen, launched in (
        (dense, GenLayout(), features.replay),
        (dense, GenLayout(tp=2), features.replay),
        (experts, GenLayout(), features.replay),
        (dense, GenLayout(pp=2), features.host),
    ):
        one, other = (
            CostModel(costs, COSTS.cluster).generation(role, gen, range(gen.ranks)).step_s
            for costs in (gpu, slower)
        )
        launches = gen.pp * launched.seconds(layers, gpu.launch_s)
        assert other - one == pytest.approx(launches)


def test_scales_are_factors_of_their_kind_alone() -> None:
    """A run's scales leave proportions within a kind as they are."""
    scales = CostScales(decode=2.0, train=3.0, forward=4.0, switch=5.0, prefill=6.0)
    own = CostModel(COSTS.layer_costs, COSTS.cluster, scales=scales)
    layout, gen, ranks = TrainLayout(fsdp=4, pp=2), GenLayout(tp=2), range(8)
    args = ACTOR, layout, ranks, SAMPLES
    assert own.update_s(*args) == pytest.approx(3 * COSTS.update_s(*args))
    assert own.score_s(*args) == pytest.approx(4 * COSTS.score_s(*args))
    assert own.switch_s(ACTOR, layout, gen, ranks) == pytest.approx(
        5 * COSTS.switch_s(ACTOR, layout, gen, ranks)
    )
    mine, other = (costs.generation(ACTOR, gen, ranks) for costs in (own, COSTS))
    assert mine.pass_s(8, 100) == pytest.approx(2 * other.pass_s(8, 100))
    assert mine.prefill_token_s == pytest.approx(6 * other.prefill_token_s)
    assert CostScales.from_json(scales.to_json()) == scales


@pytest.mark.parametrize("wrong", [{"decoding": 1.0}, {"decode": 0}, {"decode": True}, [1.0]])
def test_scales_that_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="scales: "):
        CostScales.from_json(wrong)


def test_adapters_by_hand() -> None:
    """Frozen matrices have no gradients; adapters alone are reduced, stepped and switched."""
    own = replace(ACTOR, adapters=1_000_000)
    row, layout = SAMPLES[:4], TrainLayout()
    (plain,), (lora,) = (passes_of(COSTS, role, layout, range(1), row) for role in (ACTOR, own))
    tokens = sum(sample.tokens for sample in row)
    added = 2 * 32 * 1_000_000 * tokens
    assert lora.forward_s - plain.forward_s == pytest.approx(added / (0.5 * 989e12))
    scored = sum(sample.response for sample in row)
    frozen = 2 * 32 * 218_103_808 * tokens + 2 * 128_256 * 4096 * scored
    backward_flop_s = 3 / (0.4 * 989e12) - 1 / (0.5 * 989e12)
    saved = (frozen / 2 - added) * backward_flop_s
    assert plain.backward_s - lora.backward_s == pytest.approx(saved)
    share = 32 * 1_000_000 / ACTOR.shape.parameters
    steps = [COSTS.optimizer_s(role, layout, range(1)) for role in (ACTOR, own)]
    assert steps[1] / steps[0] == pytest.approx(share)
    fsdp, gen = TrainLayout(fsdp=16), GenLayout(tp=2)
    moved = [COSTS.switch_s(role, fsdp, gen, range(16)) for role in (ACTOR, own)]
    copied = 2 * ACTOR.shape.parameters / 2 / (0.7 * 64e9)  # from the host
    assert moved[1] < moved[0]
    assert copied < moved[1] < 1.2 * copied


def test_experts_by_hand() -> None:
    """Each token goes to two ranks and back; FSDP gathers the experts over what ep leaves."""
    shape = ModelShape(4, 1024, 4096, 8, 8, experts=8, experts_per_token=2)
    role = PlannedRole(name="actor", shape=shape, trained=True)
    alone, apart = (TrainLayout(fsdp=8, ep=ep) for ep in (1, 8))
    sent = COSTS._layer_exchanges(shape, apart, range(8))
    assert sent.token_s == pytest.approx(2 * 7 / 8 * 2 * 2 * 1024 / (0.7 * 450e9))
    assert sent.call_s == pytest.approx(2 * 3 * 5e-6)
    gradients = [COSTS.gradient_s(role, layout, range(8)) for layout in (alone, apart)]
    experts = 4 * shape.expert_parameters
    gathered = 7 / 8 * (2 + 4) * experts / (0.7 * 450e9)
    cast = COSTS.layer_costs.gradient_element_s * 7 / 8 * experts
    messages = 2 * 3 * 5e-6
    assert gradients[0] - gradients[1] == pytest.approx(gathered + cast + messages)
    shards = [COSTS.activate_s(role, layout) for layout in (alone, apart)]
    assert shards[0] == shards[1]


def test_shared_rows_by_hand() -> None:
    """One sample is a rank's row, or half of one on each of two, which exchange their heads."""
    (sample,) = SAMPLES[:1]
    layouts = [TrainLayout(fsdp=2, cp=cp, micro_batch_tokens=1024) for cp in (1, 2)]
    whole, half = (even_rows(layout, SampleTotals.of([sample])) for layout in layouts)
    assert half.work == tuple(work / 2 for work in whole.work)
    assert (whole.filled, half.filled) == (1, 1)
    sent = COSTS._layer_exchanges(LLAMA, layouts[1], range(2))
    numbers = 32 + 2 * 8 + 32  # heads of queries, of keys and values, of the result
    assert sent.token_s == pytest.approx(1 / 2 * numbers * 128 * 2 / (0.7 * 450e9))
    short = replace(layouts[1], micro_batch_tokens=4096)
    assert COSTS.update_s(ACTOR, short, range(2), SAMPLES) == COSTS.update_s(
        ACTOR, replace(short, cp=1), range(2), SAMPLES
    )
