"""Replayed experts in training: under every layout as in one float64 process."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate
from transformers import AutoModelForCausalLM

from hybridrl.config import (
    ActivationMode,
    Attention,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    RouterReplay,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import pack

pytestmark = pytest.mark.layouts

TEMPERATURE = 0.7
EXPERTS, K = 8, 3
SETTINGS = {
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": K,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def forced_router(module, chosen):
    """The router of Qwen3-MoE, by its formula, with experts `chosen` [tokens, k]; -1 is its own."""

    def forward(hidden):
        logits = hidden.reshape(-1, module.hidden_dim) @ module.weight.T
        probs = logits.softmax(-1)
        own = probs.topk(K, -1).indices
        indices = torch.where(chosen < 0, own, chosen)
        weights = probs.gather(-1, indices)
        return logits, weights / weights.sum(-1, keepdim=True), indices

    return forward


def oracle(path, sequences):
    """Loss, gradients and log-probabilities in float64, one sequence at a time."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **eager).double()
    routers = [x.mlp.gate for x in model.model.layers if hasattr(x.mlp, "gate")]
    masks = [torch.ones(s.response_tokens) if s.mask is None else s.mask for s in sequences]
    tokens = sum(mask.sum() for mask in masks)
    total, scores = torch.zeros((), dtype=torch.float64), []
    for s, mask in zip(sequences, masks, strict=True):
        last = torch.full((1, len(routers), K), -1)
        experts = torch.cat([s.routed_experts.long(), last])
        for place, router in enumerate(routers):
            router.forward = forced_router(router, experts[:, place])
        logits = model(s.ids[None]).logits[0] / TEMPERATURE
        log_p = logits[-s.response_tokens - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(-1, s.ids[-s.response_tokens :, None])[:, 0]
        fields = {
            "advantages": torch.tensor(s.fields["advantages"]),
            "old_log_probs": s.fields["old_log_probs"],
        }
        total = total + (mask / tokens * Surrogate(entropy_bonus=0)(chosen, None, fields)[0]).sum()
        scores.append(chosen.detach())
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, scores


def make_engine(path, layout=(1, 1, 1, 1, 1), schedule="one_f_one_b", **settings):
    pp, replicas, fsdp, tp, ep = layout
    axes = {"pp": pp, "replicas": replicas, "fsdp": fsdp, "tp": tp, "ep": ep}
    sequence_parallel, cp = settings.pop("sequence_parallel", False), settings.pop("cp", 1)
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=settings.pop("most_tokens", 30),
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(
                **axes,
                cp=cp,
                schedule=PipelineSchedule[schedule],
                sequence_parallel=sequence_parallel,
            ),
            router_replay=settings.pop("replay", RouterReplay.rollout),
            **settings,
        ),
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
    )


def whole_gradients(engine, sequences):
    """The metrics of an update, and this rank's share of the gradients, whole."""
    local = {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                local[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    return engine.update(sequences, Surrogate(entropy_bonus=0)), local


def step(path, sequences, layout, schedule, settings):
    """Log-probabilities, recorded experts, metrics and gradients of this rank's share."""
    engine = make_engine(path, layout, schedule, **settings)
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    scores = engine.log_probs(mine)
    own = copy.deepcopy(mine)
    engine.log_probs(own, records_experts=True)
    metrics, local = whole_gradients(engine, mine)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    gradients = {name: g for of_rank in gathered for name, g in of_rank.items()}
    return scores, [s.routed_experts for s in own], metrics, gradients


@pytest.fixture(scope="module")
def case(tiny, sequences_of):
    """A model, sequences with random experts, and what one process computes with them."""
    path, sequences = tiny("qwen3_moe", True, **SETTINGS), sequences_of()
    random = torch.Generator().manual_seed(5)
    for s in sequences:
        shape = len(s.ids) - 1, SETTINGS["num_hidden_layers"] - 1, EXPERTS
        s.routed_experts = torch.rand(shape, generator=random).argsort(-1)[..., :K].byte()
    return path, sequences, oracle(path, sequences)


@pytest.fixture(scope="module")
def own_experts(case):
    """The experts of each sequence that the model itself chooses."""
    path, sequences, _ = case
    model = AutoModelForCausalLM.from_pretrained(path)
    chosen = []
    layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for layer in layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, x: chosen[-1].append(x[1]))
    for s in sequences:
        chosen.append([])
        model(s.ids[None])
    return [torch.stack(experts, 1)[:-1] for experts in chosen]


@pytest.mark.parametrize(
    ("layout", "schedule", "settings"),
    [
        ((1, 1, 1, 1, 1), "one_f_one_b", {"activations": ActivationMode.recompute}),
        ((1, 1, 2, 2, 4), "one_f_one_b", {"sequence_parallel": True}),
        ((2, 1, 2, 1, 2), "zero_bubble", {}),
        ((2, 1, 1, 1, 1), "one_f_one_b", {"activations": ActivationMode.recompute}),
        ((1, 1, 2, 1, 2), "one_f_one_b", {"cp": 2, "chunk_tokens": 6, "most_tokens": 8}),
        ((2, 1, 1, 1, 1), "one_f_one_b", {"chunk_tokens": 6, "most_tokens": 6}),
        pytest.param((1, 1, 1, 2, 1), "one_f_one_b", {}, marks=pytest.mark.slow),
        pytest.param(
            (1, 1, 2, 1, 2), "one_f_one_b", {"activations": ActivationMode.offload},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_equals_one_process_with_the_same_experts(
    ranks, case, own_experts, layout, schedule, settings
):
    path, sequences, (loss, want_gradients, want_scores) = case
    results = ranks(math.prod(layout[:4]), step, path, sequences, layout, schedule, settings)
    for rank, (scores, recorded, metrics, gradients) in enumerate(results):
        for got, expected in zip(scores, want_scores[rank :: len(results)], strict=True):
            assert torch.allclose(got.double(), expected, rtol=0, atol=2e-5)
        for got, expected in zip(recorded, own_experts[rank :: len(results)], strict=True):
            assert got.dtype == torch.uint8
            assert torch.equal(got.long().sort().values, expected.sort().values)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        for name, gradient in want_gradients.items():
            got = gradients[name][: len(gradient)].double()
            assert (got - gradient).abs().max() < 1e-5, name
    routers = [g for name, g in want_gradients.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 4
    assert all(gradient.abs().max() > 1e-4 for gradient in routers)


def replay_own(path, sequences):
    """A step by the routers, and one that replays what the first has recorded."""
    results = []
    for replay in (RouterReplay.off, RouterReplay.trainer):
        engine = make_engine(path, replay=replay)
        scores = engine.log_probs(sequences, records_experts=replay is RouterReplay.trainer)
        metrics, gradients = whole_gradients(engine, sequences)
        results.append((scores, metrics, gradients, dict(engine.weights())))
    return results


def test_replaying_the_own_choice_changes_no_bit(ranks, case):
    path, sequences, _ = case
    bare = copy.deepcopy(sequences)
    for s in bare:
        s.routed_experts = None
    ((own, replayed),) = ranks(1, replay_own, path, bare)
    assert all(map(torch.equal, own[0], replayed[0]))
    records = sum(len(s.ids) - 1 for s in bare) * (SETTINGS["num_hidden_layers"] - 1) * K
    assert own[1] | {"routed_experts_bytes": records} == replayed[1]
    for kind in (2, 3):
        assert own[kind].keys() == replayed[kind].keys()
        for name, tensor in own[kind].items():
            assert torch.equal(tensor, replayed[kind][name]), name


def test_more_experts_than_a_byte_holds():
    """Two bytes each in a sample become the numbers that a row takes, padding its own choice."""
    experts = torch.tensor([[[299, 7]], [[256, 0]]], dtype=torch.int16)
    batch = pack(
        [
            TrainSequence(torch.arange(3), 2, routed_experts=experts),
            TrainSequence(torch.arange(2), 1),
        ],
        Attention.torch,
        torch.device("cpu"),
        total_tokens=7,
    )
    first, second, third = [-1, -1], [299, 7], [256, 0]
    rows = [first] * 2 + [first] * 2 + [second, third, first]
    assert batch.routing.forced[:, 0].tolist() == rows
