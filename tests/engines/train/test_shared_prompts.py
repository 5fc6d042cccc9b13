"""Rows that hold a prompt once for its responses: gradients and scores of float64, each alone."""

from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import (
    ActivationMode,
    Attention,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    RouterReplay,
    SharePrompts,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import pack
from hybridrl.models.activations import PeakMemory, layer_activations
from hybridrl.models.packed_attention import NAME

TEMPERATURE = 0.7
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 4}
EXPERTS, K = 8, 3
EXTRAS = {
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": K,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}
GROUPS = [(7, [4, 2, 4, 9, 1]), (3, [5, 3]), (10, [6])]
"""Tokens of each prompt, and of its responses."""
TOKENS = sum(prompt + sum(responses) for prompt, responses in GROUPS)
REPEATED = sum(len(responses) * prompt + sum(responses) for prompt, responses in GROUPS)


def groups() -> list[TrainSequence]:
    """Groups of responses, some masked; the prompts begin alike and are of different length."""
    random, common = torch.Generator().manual_seed(5), torch.arange(2, 12)
    sequences = []
    for prompt, responses in GROUPS:
        for number, response in enumerate(responses):
            answer = torch.randint(0, 41, (response,), generator=random)
            mask = torch.rand(response, generator=random) > 0.4 if number in (1, 3) else None
            if number == 3:
                mask[0] = False
            fields = {
                "advantages": torch.randn(1, generator=random).item(),
                "old_log_probs": -3 * torch.rand(response, generator=random),
            }
            ids = torch.cat([common[:prompt], answer])
            sequences.append(TrainSequence(ids, response, fields, mask))
    return [sequences[i] for i in (3, 5, 0, 7, 1, 6, 2, 4)]


def with_experts(sequences, layers):
    """Recorded experts, the same for a prompt in all sequences of its group."""
    random = torch.Generator().manual_seed(11)
    by_prompt = {}
    for s in sequences:
        experts = torch.rand(len(s.ids) - 1, layers, EXPERTS, generator=random).argsort(-1)[..., :K]
        prompt = len(s.ids) - s.response_tokens
        experts[:prompt] = by_prompt.setdefault(prompt, experts[:prompt].clone())
        s.routed_experts = experts.to(torch.uint8)
    return sequences


def oracle(path, sequences):
    """Loss, gradients and log-probabilities in float64, one sequence at a time."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **eager).double()
    masks = [torch.ones(s.response_tokens) if s.mask is None else s.mask for s in sequences]
    tokens = sum(mask.sum() for mask in masks)
    total, scores = torch.zeros((), dtype=torch.float64), []
    for s, mask in zip(sequences, masks, strict=True):
        logits = model(s.ids[None]).logits[0] / TEMPERATURE
        log_p = logits[-s.response_tokens - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(-1, s.ids[-s.response_tokens :, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        fields = {
            "advantages": torch.tensor(s.fields["advantages"]),
            "old_log_probs": s.fields["old_log_probs"],
        }
        total = total + (mask / tokens * Surrogate()(chosen, entropy, fields)[0]).sum()
        scores.append(chosen.detach())
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, scores


def make_engine(path, share, layout=(1, 1, 1, 1), **settings):
    pp, replicas, fsdp, tp = layout
    schedule = settings.pop("schedule", "one_f_one_b")
    axes = {"pp": pp, "replicas": replicas, "fsdp": fsdp, "tp": tp, "cp": settings.pop("cp", 1)}
    axes |= {"sequence_parallel": settings.pop("sequence_parallel", False)}
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=settings.pop("most_tokens", 200),
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(schedule=PipelineSchedule[schedule], **axes),
            share_prompts=SharePrompts.always if share else SharePrompts.never,
            **settings,
        ),
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
    )


def step(path, sequences, share, layout=(1, 1, 1, 1), settings=MappingProxyType({})):
    """Scores, metrics, whole gradients and computed tokens of one update."""
    engine = make_engine(path, share, layout, **settings)
    mine, rows = sequences[dist.get_rank() :: dist.get_world_size()], []
    for root in engine.roots:
        if root.first:
            root.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    scores = engine.log_probs(mine)
    local = {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                local[name] = p.grad.full_tensor().clone()

    rows.clear()
    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(mine, Surrogate())
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return scores, metrics, {k: v for x in gathered for k, v in x.items()}, sum(rows)


def check(results, want):
    loss, want_gradients, want_scores = want
    for rank, (scores, metrics, gradients, _) in enumerate(results):
        for got, expected in zip(scores, want_scores[rank :: len(results)], strict=True):
            assert torch.allclose(got.double(), expected, rtol=0, atol=2e-5)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert gradients.keys() == want_gradients.keys()
        for name, gradient in want_gradients.items():
            got = gradients[name][: len(gradient)].double()
            rounding = 1e-5 * (1 + gradient.abs().max())  # CPUs add float32 in their own orders
            assert (got - gradient).abs().max() < rounding, name


def test_a_row_has_each_prompt_once():
    sequences = groups()
    row = pack(sequences, Attention.torch, torch.device("cpu"), True, shares_prompts=True)
    whole = pack(sequences, Attention.torch, torch.device("cpu"), True)
    assert (row.ids.shape[1], whole.ids.shape[1]) == (TOKENS, REPEATED)
    pieces = row.places.split(row.lengths)
    for index, place in zip(row.order, pieces, strict=True):
        assert torch.equal(row.ids[0, place], sequences[index].ids)
        assert torch.equal(row.position_ids[0, place], torch.arange(len(place)))
    # A token's successor is its target: of a prompt's last token that of each response.
    scored = dict(zip(row.order, row.targets.split(row.counts), strict=True))
    of_whole = dict(zip(whole.order, whole.targets.split(whole.counts), strict=True))
    assert all(torch.equal(scored[i], of_whole[i]) for i in range(len(sequences)))
    first = [
        i
        for i in range(len(sequences))
        if len(sequences[i].ids) - sequences[i].response_tokens == 7
    ]
    predicting = dict(zip(row.order, row.predicting.split(row.counts), strict=True))
    unmasked = [i for i in first if sequences[i].mask is None or sequences[i].mask[0]]
    assert len({int(predicting[i][0]) for i in unmasked}) == 1 < len(unmasked)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "gpt2"])
def test_a_step_equals_float64(ranks, tiny, family):
    """Full attention, windows, sinks, and learned positions."""
    path, sequences = tiny(family, True, **(SIZES | EXTRAS.get(family, {}))), groups()
    results = ranks(1, step, path, sequences, True)
    check(results, oracle(path, sequences))
    assert results[0][3] == TOKENS
    share = results[0][1]["shared_prompt_share"]
    assert share == pytest.approx(1 - TOKENS / REPEATED)
    assert ranks(1, step, path, sequences, False)[0][3] == REPEATED


LAYOUTS = [
    ((1, 1, 2, 1), {}),
    ((1, 1, 1, 2), {"sequence_parallel": True}),
    ((2, 1, 1, 1), {}),
    ((2, 1, 1, 1), {"schedule": "zero_bubble", "most_tokens": 30}),
    ((1, 1, 2, 1), {"cp": 2, "most_tokens": 15}),
    ((1, 1, 1, 1), {"activations": ActivationMode.selective}),
]


@pytest.mark.layouts
@pytest.mark.parametrize(("layout", "settings"), LAYOUTS, ids=str)
def test_layouts_equal_float64(ranks, tiny, layout, settings):
    """Under cp the longest sequences are shared by ranks, and the others share prompts."""
    path, sequences = tiny("qwen3", True, **SIZES), groups()
    size = layout[0] * layout[2] * layout[3]
    results = ranks(size, step, path, sequences, True, layout, settings)
    check(results, oracle(path, sequences))
    whole = ranks(size, step, path, sequences, False, layout, settings)
    assert sum(x[3] for x in results) < sum(x[3] for x in whole)


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((1, 1, 1, 1), marks=pytest.mark.wide),
        (1, 1, 2, 1),
        pytest.param((2, 1, 1, 1), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_experts_are_those_of_repeated_prompts(ranks, tiny, layout):
    """Replayed experts, their load and the balance loss: a prompt counts for each response."""
    path = tiny("qwen3_moe", True, **(SIZES | EXTRAS["qwen3_moe"]))
    sequences, size = with_experts(groups(), 3), layout[0] * layout[2]
    settings = {"router_replay": RouterReplay.rollout, "router_aux_loss_coef": 0.3}
    shared = ranks(size, step, path, sequences, True, layout, settings)
    whole = ranks(size, step, path, sequences, False, layout, settings)
    assert sum(x[3] for x in shared) < sum(x[3] for x in whole)
    for (scores, metrics, gradients, _), wanted in zip(shared, whole, strict=True):
        assert 0 < metrics.pop("shared_prompt_share") < 1
        for of_step in (metrics, wanted[1]):
            of_step.pop("padding_share", None)
        assert metrics == pytest.approx(wanted[1], rel=1e-5, abs=1e-6)
        for got, expected in zip(scores, wanted[0], strict=True):
            assert torch.allclose(got, expected, rtol=0, atol=2e-5)
        for name, gradient in wanted[2].items():
            rounding = 1e-5 * (1 + gradient.abs().max())
            assert (gradients[name] - gradient).abs().max() < rounding, name


def recorded(path, sequences, share):
    """The experts that the old policy's pass records."""
    engine = make_engine(path, share, router_replay=RouterReplay.trainer)
    engine.log_probs(sequences, records_experts=True)
    return [sequence.routed_experts for sequence in sequences]


def test_recorded_experts_are_those_of_repeated_prompts(ranks, tiny):
    path = tiny("qwen3_moe", True, **(SIZES | EXTRAS["qwen3_moe"]))
    (shared,), (whole,) = (ranks(1, recorded, path, groups(), share) for share in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(shared, whole, strict=True))


def test_other_experts_for_a_prompt_are_not_shared():
    sequences = with_experts(groups(), 3)
    first = sequences[1].routed_experts
    first[0, 0] = (first[0, 0] + 1) % EXPERTS
    row = pack(sequences, Attention.torch, torch.device("cpu"), shares_prompts=True)
    assert row.ids.shape[1] == TOKENS + GROUPS[1][0]


def kept_bytes(config, layers, row):
    """What a forward pass over a row keeps for backward."""
    config.num_hidden_layers = layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).train()
    hidden = torch.randn(*row.ids.shape, config.hidden_size, requires_grad=True)
    memory = PeakMemory()
    memory.track_external(model, hidden)
    before = memory.allocated("cpu")
    with memory:
        keywords = {"position_ids": row.position_ids, "packing": row.packing, "use_cache": False}
        out = model.model(inputs_embeds=hidden, **keywords).last_hidden_state
        kept = memory.allocated("cpu") - before
    assert out.requires_grad
    return kept


def test_the_memory_plan_counts_gathered_keys(tiny):
    """A layer keeps what the plan counts within 5 %, and fewer bytes without the gathered keys."""
    config = AutoConfig.from_pretrained(tiny("qwen3", True, num_key_value_heads=4))
    prompt, answers = torch.arange(30), [torch.arange(n, n + 20) % 41 for n in range(8)]
    sequences = [TrainSequence(torch.cat([prompt, answer]), 20) for answer in answers]
    row = pack(sequences, Attention.torch, torch.device("cpu"), shares_prompts=True)
    keys = 30 + 8 * 50
    assert len(row.packing.shared.keys) == keys
    real = kept_bytes(config, 3, row) - kept_bytes(config, 2, row)
    counted, without = (
        layer_activations(
            config, 190, dtype=torch.float32, attention=Attention.torch, keys=number
        ).kept
        for number in (keys, 0)
    )
    assert counted == pytest.approx(real, rel=0.05)
    assert without < 0.9 * real
