"""One step under pp x replicas x fsdp x tp against a plain single-process padded step."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dtensor_layouts import layout_of
from surrogate_loss import Surrogate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoModelForCausalLM

from hybridrl.config import (
    ActivationMode,
    FuseLayers,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.layout import Grouping
from hybridrl.engines.train import fsdp_versions
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fsdp_versions import parameter_groups
from hybridrl.layout import fsdp_groups
from hybridrl.models.flops import ForwardFlops

pytestmark = pytest.mark.long

TEMPERATURE = 0.7
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
LAYOUTS = [(1, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
SIZES = {"num_hidden_layers": 5, "num_attention_heads": 12, "num_key_value_heads": 4}


# Layers of both kinds, and a window that is shorter than most sequences.
EXTRAS = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
        + ["full_attention"] * 2,
    },
    "mistral": {"sliding_window": 7},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# The plans of these have every style that training computes, and other names of modules.
OTHERS = {
    "olmo2": {},
    "glm4": {"intermediate_size": 32, "pad_token_id": None},
    "phi3": {"pad_token_id": None},
    "gpt_neox": {"hidden_size": 48, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
}


def oracle(path, sequences):
    """Loss, gradients and log-probabilities of one padded batch in float64."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **eager).double()
    longest = max(len(s.ids) for s in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, s in enumerate(sequences):
        ids[row, : len(s.ids)] = s.ids  # causal: what stands after a sequence changes nothing
    logits = model(ids).logits / TEMPERATURE
    masks = [torch.ones(s.response_tokens) if s.mask is None else s.mask for s in sequences]
    tokens = sum(mask.sum() for mask in masks)
    total, scores = torch.zeros((), dtype=torch.float64), []
    for row, s in enumerate(sequences):
        log_p = logits[row, len(s.ids) - s.response_tokens - 1 : len(s.ids) - 1].log_softmax(-1)
        chosen = log_p.gather(-1, s.ids[-s.response_tokens :, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        fields = {
            "advantages": torch.tensor(s.fields["advantages"]),
            "old_log_probs": s.fields["old_log_probs"],
        }
        total = total + (masks[row] / tokens * Surrogate()(chosen, entropy, fields)[0]).sum()
        scores.append(chosen.detach())
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return total.item(), gradients, scores


def forward_flops(engine, sequences):
    """Operations of one forward pass over all sequences, whichever rank has them."""
    trained = [s.response_tokens if s.mask is None else int(s.mask.sum()) for s in sequences]
    return sum(map(ForwardFlops.of(engine.model.config), (len(s.ids) for s in sequences), trained))


def step(
    path,
    sequences,
    layout,
    schedule,
    gen_tp,
    max_tokens,
    sequence_parallel=False,
    recompute=False,
    cp=1,
    chunk=0,
    ep_grouping="auto",
    chunk_layers=(),
    fuse="auto",
):
    """Log-probabilities, metrics and whole gradients of one update, shares dealt over all ranks."""
    pp, replicas, fsdp, tp, *ep = layout
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=max_tokens,
            chunk_tokens=chunk,
            activations=ActivationMode.recompute if recompute else ActivationMode.keep,
            fuse_layers=FuseLayers[fuse],
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(
                pp=pp,
                replicas=replicas,
                fsdp=fsdp,
                tp=tp,
                ep=ep[0] if ep else 1,
                cp=cp,
                schedule=PipelineSchedule[schedule],
                sequence_parallel=sequence_parallel,
                ep_grouping=Grouping[ep_grouping],
                chunk_layers=list(chunk_layers),
            ),
        ),
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
        gen_tp=gen_tp,
    )
    mine, rows = sequences[dist.get_rank() :: dist.get_world_size()], []
    for root in engine.roots:
        root.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    scores = engine.log_probs(mine)
    check_layout(engine)
    if pp > 1:
        assert not list(engine.model.parameters()), "a stage keeps other stages' weights"
    local, gradients = {}, {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                local[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(mine, Surrogate())
    # Each rank rounds its part to thousands.
    rounding = 3 * 1000 * dist.get_world_size()
    assert metrics["flops"] == pytest.approx(3 * forward_flops(engine, sequences), abs=rounding)
    if cp > 1 or chunk:
        assert max(rows) < max(len(s.ids) for s in sequences), "a rank has all of the longest row"
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    for rank_gradients in gathered:
        for name, gradient in rank_gradients.items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), name
    after = {name: tensor.clone() for name, tensor in engine.weights()}
    return scores, metrics, gradients, after


def check_layout(engine):
    """The engine's layout, made from the config, is what its DTensors say."""
    shards, rank = engine.named_shards(), dist.get_rank()
    from_dtensors = layout_of(shards)
    for name, shard in shards.items():
        boxes = engine.layout.local(name, rank)
        assert boxes == from_dtensors.local(name, rank), name
        assert [tuple(shard.to_local().shape)] == [box.shape for box in boxes] or not boxes, name
    held = {name for name in engine.layout.rules if engine.layout.local(name, rank)}
    assert held <= shards.keys()


def check(results, want, path):
    loss, want_gradients, want_scores = want
    size, shapes = len(results), AutoModelForCausalLM.from_pretrained(path).state_dict()
    for rank, (scores, metrics, gradients, after) in enumerate(results):
        for got, expected in zip(scores, want_scores[rank::size], strict=True):
            assert torch.allclose(got.double(), expected, rtol=0, atol=2e-5)
        assert metrics == results[0][1], "all ranks report the same"
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert gradients.keys() == want_gradients.keys()
        for name, gradient in want_gradients.items():
            got = gradients[name][: len(gradient)].double()
            assert not gradients[name][len(gradient) :].any(), f"{name}: padding has a gradient"
            rounding = 1e-5 * (1 + gradient.abs().max())  # CPUs add float32 in their own orders
            assert (got - gradient).abs().max() < rounding, name
        norm = torch.stack([g.norm() for g in want_gradients.values()]).norm().item()
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert all(tensor.shape == shapes[name].shape for name, tensor in after.items())


@pytest.fixture(scope="module")
def wanted(tiny: Callable[..., str], sequences_of: Callable[[], list]) -> Callable[..., tuple]:
    """The model, its sequences and what one process computes, once a family."""
    cases: dict = {}

    def make(family: str, tied: bool) -> tuple:
        if (family, tied) not in cases:
            settings = EXTRAS.get(family) or OTHERS.get(family, {})
            path = tiny(family, tied, **(SIZES | settings))
            cases[family, tied] = (path, sequences_of(), oracle(path, sequences_of()))
        return cases[family, tied]

    return make


def steps(paths, *args):
    """One update of each model in turn: what DTensor has learned of shapes serves the next one."""
    return [step(path, *args) for path in paths]


def check_all(ranks, models, layout, schedule="one_f_one_b", gen_tp=1, sequence_parallel=False):
    """One update of each of `models`, in the same processes."""
    paths = [path for path, _, _ in models]
    args = (models[0][1], layout, schedule, gen_tp, 30, sequence_parallel)
    results = ranks(math.prod(layout[:4]), steps, paths, *args)
    for (path, _, want), of_model in zip(models, zip(*results, strict=True), strict=True):
        check(of_model, want, path)


@pytest.mark.parametrize(
    ("layout", "families"),
    [
        ((1, 1, 1, 1), ["qwen3"]),
        pytest.param((1, 1, 4, 1), ["qwen3"], marks=[pytest.mark.layouts, pytest.mark.wide]),
        pytest.param((1, 1, 2, 2), ["llama", "mistral"], marks=pytest.mark.layouts),
        pytest.param((2, 1, 1, 2), ["gemma3_text"], marks=pytest.mark.layouts),
        # A family decides by which rule a parameter is cut, and a layout how often: pairs add
        # nothing. Tests below have qwen2, tp 4 and pp 2 alone.
        *(pytest.param((pp, 1, *cut), FAMILIES, marks=pytest.mark.slow) for pp, *cut in LAYOUTS),
    ],
    ids=str,
)
def test_a_step_equals_one_process(ranks, wanted, layout, families):
    check_all(ranks, [wanted(family, True) for family in families], layout)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "families"),
    [
        ((1, 1, 1, 2), ["olmo2", "glm4", "phi3"]),
        ((2, 1, 1, 1), ["gpt_neox", "qwen3_moe"]),
        pytest.param((1, 1, 2, 2), ["olmo2", "glm4", "phi3", "gpt_neox"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_families_by_their_own_plans(ranks, wanted, layout, families):
    check_all(ranks, [wanted(family, False) for family in families], layout)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ((2, 1, 1, 1), "zero_bubble"),
        ((2, 1, 2, 1), "interleaved"),
        ((1, 2, 2, 1), "one_f_one_b"),
        # Each schedule and axis is above, or in the tests below.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ((2, 1, 1, 1), "interleaved"),
                ((2, 1, 2, 1), "zero_bubble"),
                ((2, 1, 1, 2), "zero_bubble"),
                ((2, 2, 1, 1), "one_f_one_b"),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_schedules_and_replicas(ranks, wanted, layout, schedule, tied):
    check_all(ranks, [wanted("qwen3", tied)], layout, schedule)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "schedule", "chunk_layers"),
    [
        ((2, 1, 1, 1), "one_f_one_b", (4, 1)),
        ((2, 1, 2, 1), "interleaved", (1, 2, 1, 1)),
        ((2, 1, 1, 1), "zero_bubble", (2, 1, 1, 1)),
    ],
    ids=str,
)
def test_chunks_of_any_layers(ranks, wanted, layout, schedule, chunk_layers):
    """The gradients of one process, wherever the borders of chunks are."""
    path, sequences, want = wanted("qwen3", True)
    args = (path, sequences, layout, schedule, 1, 30, False, False, 1, 0, "auto", chunk_layers)
    check(ranks(math.prod(layout), step, *args), want, path)


def large_steps(paths, *args):
    """`steps` with the settings of large models: FSDP groups per layer, resharded in between.

    A pipeline gathers them in the first forward pass, and keeps them.
    """
    fsdp_groups.ONE_GROUP_PARAMETERS = fsdp_groups.KEPT_PARAMETERS = 0
    return steps(paths, *args)


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [(2, 1, 1, 1), (2, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_schedules_of_a_large_model(fresh_ranks, wanted, schedule, layout):
    """With fsdp 2 weights are gathered layer by layer within the lists of passes."""
    path, sequences, want = wanted("qwen3", False)
    args = ([path], sequences, layout, schedule, 1, 30)
    results = fresh_ranks(math.prod(layout), large_steps, *args)
    check([result for (result,) in results], want, path)


def gathers(path, sequences, schedule):
    """Times that each FSDP group of a large model gathers: for scores, and for an update."""
    whole = AutoModelForCausalLM.from_pretrained(path).num_parameters()
    fsdp_groups.ONE_GROUP_PARAMETERS = whole - 1  # more than a chunk has
    fsdp_groups.KEPT_PARAMETERS = 0
    layout = TrainLayoutConfig(pp=2, fsdp=2, schedule=PipelineSchedule[schedule])
    trainer = TrainerConfig(max_tokens_per_micro_batch=30, layout=layout)
    engine = TrainEngine(path, model=ModelConfig(), trainer=trainer, device=torch.device("cpu"))
    modules = [m for root in engine.roots for m in root.modules() if isinstance(m, FSDPModule)]
    groups = [g for m in modules for g in parameter_groups(fully_shard.state(m))]
    counts = dict.fromkeys(groups, 0)

    def counted(group, *args, **kwargs):
        if not (group.is_unsharded or group._all_gather_result is not None):
            counts[group] += 1
        return unshard(group, *args, **kwargs)

    unshard, FSDPParamGroup.unshard = FSDPParamGroup.unshard, counted
    mine, results = sequences[dist.get_rank() :: 4], []
    for call in (engine.log_probs, lambda own: engine.update(own, Surrogate())):
        call(mine)
        results.append(list(counts.values()))
        counts.update(dict.fromkeys(groups, 0))
        assert all(group.is_sharded for group in groups)
    return results


@pytest.mark.layouts
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_a_pipeline_gathers_once(fresh_ranks, wanted, schedule):
    """Not for each micro-batch, and it shards its weights after each call.

    Groups are of layers, since the whole model's size decides.
    """
    path, sequences, _ = wanted("qwen3", False)
    for of_scores, of_update in fresh_ranks(4, gathers, path, sequences, schedule):
        assert len(of_update) > 1
        assert {*of_scores, *of_update} == {1}


@pytest.mark.layouts
def test_shards_that_nest_in_a_wider_generation(ranks, wanted):
    """FSDP cuts row-parallel weights along dimension 1 where generation has more tp."""
    check_all(ranks, [wanted("qwen3", True)], (1, 1, 2, 2), gen_tp=4)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("families", "layout", "schedule"),
    [
        pytest.param(["gemma3_text"], (1, 1, 1, 4), "one_f_one_b", marks=pytest.mark.wide),
        (["qwen2"], (2, 1, 1, 2), "zero_bubble"),
        pytest.param(["qwen3"], (1, 1, 1, 4), "one_f_one_b", marks=pytest.mark.slow),
        pytest.param(["gemma3_text"], (1, 1, 2, 2), "one_f_one_b", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sequence_parallel(ranks, wanted, families, layout, schedule):
    models = [wanted(family, True) for family in families]
    check_all(ranks, models, layout, schedule, sequence_parallel=True)


SLOW_EXPERTS = [
    ((1, 1, 2, 1, 2), "one_f_one_b", False),
    ((1, 1, 4, 1, 2), "one_f_one_b", False),
    ((1, 2, 2, 1, 2), "one_f_one_b", False),
    ((1, 1, 2, 2, 2), "one_f_one_b", False),  # the experts' axes are fsdp and tp
    ((1, 1, 1, 4, 2), "one_f_one_b", True),
    ((2, 1, 1, 2, 2), "interleaved", False),
    ((2, 1, 2, 1, 2), "one_f_one_b", False),
    ((2, 1, 2, 2, 2), "one_f_one_b", False),
]


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "schedule", "sequence_parallel"),
    [
        ((1, 1, 2, 2, 1), "one_f_one_b", False),  # efsdp over both axes
        ((1, 1, 2, 2, 4), "one_f_one_b", True),  # ep over both axes
        ((1, 2, 1, 2, 1), "one_f_one_b", False),
        ((2, 1, 2, 1, 2), "zero_bubble", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_EXPERTS),
    ],
    ids=str,
)
def test_experts(ranks, wanted, layout, schedule, sequence_parallel):
    check_all(ranks, [wanted("qwen3_moe", True)], layout, schedule, 1, sequence_parallel)


@pytest.mark.layouts
def test_experts_on_consecutive_ranks(ranks, wanted):
    path, sequences, want = wanted("qwen3_moe", True)
    args = ((1, 1, 4, 1, 2), "one_f_one_b", 1, 30, False, False, 1, 0, "vanilla")
    check(ranks(4, step, path, sequences, *args), want, path)


def one_mesh_a_module(path, sequences, layout, large):
    """One update as on torch 2.11: experts with a mesh of their own are modules of FSDP."""
    if large:
        fsdp_groups.ONE_GROUP_PARAMETERS = fsdp_groups.KEPT_PARAMETERS = 0
    fsdp_versions.ShardPlacementResult = None
    shard, sharded = fsdp_versions.fully_shard, []

    def recorded(module, **settings):
        sharded.append((type(module).__name__, settings["mesh"].mesh_dim_names[-1]))
        return shard(module, **settings)

    fsdp_versions.fully_shard = recorded
    result = step(path, sequences, layout, "one_f_one_b", 1, 30)
    meshes = {mesh for name, mesh in sharded if name.endswith("Experts")}
    assert meshes == {"efsdp"}
    return result


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "large"),
    [
        pytest.param((1, 1, 2, 2, 1), False, marks=pytest.mark.wide),
        ((1, 2, 2, 1, 2), True),
        pytest.param((2, 1, 2, 1, 2), False, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_experts_as_modules_of_their_own(fresh_ranks, wanted, layout, large):
    path, sequences, want = wanted("qwen3_moe", True)
    check(fresh_ranks(4, one_mesh_a_module, path, sequences, layout, large), want, path)


def loads(path, sequences, layout):
    """The metrics of one update, of whole sequences alone."""
    return step(path, sequences, layout, "one_f_one_b", 1, 30)[1]


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [(1, 1, 2, 2, 4), (2, 1, 2, 1, 2)], ids=str)
def test_the_load_of_experts(ranks, wanted, layout):
    """Counted by the choices of one process, whose tokens are the same."""
    path, sequences, _ = wanted("qwen3_moe", True)
    sequences = [s for s in sequences if len(s.ids) == 9][:2] * 2  # equal rows: no padding
    model = AutoModelForCausalLM.from_pretrained(path)
    counts = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(
                lambda _, x, i=index: counts.update({i: x[1].flatten().bincount(minlength=8)})
            )
    model(torch.stack([s.ids for s in sequences]))
    of_layers = torch.stack(list(counts.values())).double()
    assert len(of_layers) == SIZES["num_hidden_layers"] - 1
    for metrics in ranks(4, loads, path, sequences, layout):
        load = (of_layers.amax(1) / of_layers.mean(1)).mean().item()
        assert metrics["expert_load"] == pytest.approx(load)
        assert metrics["dead_experts"] == (of_layers == 0).double().mean().item()


@pytest.mark.layouts
def test_fewer_experts_than_ranks_in_a_large_model(fresh_ranks, tiny, sequences):
    """Two ranks share an expert, each with half of its rows; layers are gathered and recomputed."""
    few = {**EXTRAS["qwen3_moe"], "num_experts": 2, "num_experts_per_tok": 1}
    path = tiny("qwen3_moe", False, **SIZES, **few)
    args = ([path], sequences, (1, 1, 4, 1, 2), "one_f_one_b", 1, 30, False, True)
    results = [result for (result,) in fresh_ranks(4, large_steps, *args)]
    check(results, oracle(path, sequences), path)


SHARED = 8  # tokens of a rank: three of the nine sequences fit it, six are shared


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "layout", "schedule", "cp", "sequence_parallel", "recompute"),
    [
        ("qwen3", (1, 1, 2, 1), "one_f_one_b", 2, False, False),
        ("mistral", (1, 1, 4, 1), "one_f_one_b", 4, False, True),
        ("gemma3_text", (1, 1, 4, 1), "one_f_one_b", 2, False, False),
        pytest.param("qwen3", (1, 1, 2, 2), "one_f_one_b", 2, True, False, marks=pytest.mark.slow),
        ("qwen3", (2, 1, 2, 1), "zero_bubble", 2, False, False),
        ("qwen3_moe", (1, 1, 4, 1, 2), "one_f_one_b", 2, False, False),
    ],
    ids=str,
)
def test_shared_rows(ranks, wanted, family, layout, schedule, cp, sequence_parallel, recompute):
    path, sequences, want = wanted(family, True)
    args = (layout, schedule, 1, SHARED, sequence_parallel, recompute, cp)
    check(ranks(math.prod(layout[:4]), step, path, sequences, *args), want, path)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "layout", "schedule", "recompute", "most", "chunk"),
    [
        ("mistral", (1, 1, 2, 1), "one_f_one_b", False, SHARED, 0),
        ("mistral", (1, 1, 2, 1), "one_f_one_b", False, 5, 3),
        ("gpt_oss", (1, 1, 2, 1), "one_f_one_b", True, SHARED, 0),
        ("gpt_oss", (1, 1, 2, 1), "one_f_one_b", True, 5, 3),
        ("gpt_oss", (2, 1, 2, 1), "zero_bubble", False, SHARED, 0),
        ("gpt_oss", (2, 1, 2, 1), "interleaved", True, 4, 4),
        ("mistral", (2, 1, 2, 1), "one_f_one_b", False, 5, 3),
    ],
    ids=str,
)
def test_shared_rows_of_fewer_heads_than_ranks(
    ranks, tiny, sequences, family, layout, schedule, recompute, most, chunk
):
    """Two ranks with three heads gather keys and values, whole rows' and those of chunks."""
    few = {"num_hidden_layers": 5, "num_attention_heads": 3, "num_key_value_heads": 1}
    path = tiny(family, True, **few, **EXTRAS[family])
    args = (layout, schedule, 1, most, False, recompute, 2, chunk)
    size = math.prod(layout)
    check(ranks(size, step, path, sequences, *args), oracle(path, sequences), path)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "layout", "cp", "sequence_parallel", "recompute"),
    [
        ("qwen3", (1, 1, 1, 1), 1, False, False),
        ("gemma3_text", (1, 1, 2, 1), 1, False, True),
        ("mistral", (1, 1, 2, 1), 2, False, False),
        pytest.param("qwen3", (1, 1, 2, 2), 2, True, False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", (1, 1, 4, 1, 4), 1, False, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_in_chunks(ranks, wanted, family, layout, cp, sequence_parallel, recompute):
    """Chunks of 3 tokens on a rank, where a row of 5 is too long: up to 6 chunks a sequence."""
    path, sequences, want = wanted(family, True)
    args = (layout, "one_f_one_b", 1, 5, sequence_parallel, recompute, cp, 3)
    check(ranks(math.prod(layout[:4]), step, path, sequences, *args), want, path)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "layout", "schedule", "cp", "sequence_parallel", "recompute"),
    [
        ("qwen3", (2, 1, 1, 1), "one_f_one_b", 1, False, False),
        pytest.param(
            "gemma3_text", (2, 1, 2, 1), "interleaved", 1, False, True, marks=pytest.mark.slow
        ),
        ("qwen3", (2, 1, 2, 1), "one_f_one_b", 2, False, False),
        pytest.param(
            "qwen3_moe", (2, 1, 1, 2, 2), "one_f_one_b", 1, True, False, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_chunks_in_pipelines(
    ranks, wanted, family, layout, schedule, cp, sequence_parallel, recompute
):
    """Chunks of 4 tokens on a rank; other rows fill the rounds up."""
    path, sequences, want = wanted(family, True)
    args = (layout, schedule, 1, 4, sequence_parallel, recompute, cp, 4)
    check(ranks(math.prod(layout[:4]), step, path, sequences, *args), want, path)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "most", "chunk"),
    [
        pytest.param((1, 1, 2, 1), 5, 3, marks=pytest.mark.wide),
        pytest.param((2, 1, 1, 1), 4, 4, marks=pytest.mark.wide),
        ((2, 1, 2, 1), 4, 4),
    ],
    ids=str,
)
def test_chunks_of_a_large_model(fresh_ranks, wanted, layout, most, chunk):
    """Ranks with fewer chunks make empty passes, since all of them gather each layer's weights."""
    path, sequences, want = wanted("qwen3", True)
    args = ([path], sequences, layout, "one_f_one_b", 1, most, False, False, 1, chunk)
    results = fresh_ranks(math.prod(layout), large_steps, *args)
    check([result for (result,) in results], want, path)
