"""What evens the load of experts: under every layout as in one process."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GraniteMoeConfig,
)
from transformers.models.granitemoe import modeling_granitemoe

from hybridrl.algorithms import Loss
from hybridrl.config import (
    ActivationMode,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    RouterReplay,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.expert_load import ExpertLoad
from hybridrl.models.buffers import routing_biases

pytestmark = pytest.mark.long

EXPERTS, K, COEF = 8, 3, 0.3
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
LAYERS = 4
POLICY = Surrogate(entropy_bonus=0)
LORA = LoraConfig(rank=3, alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
RATE = 0.03
BIASED = {
    "num_hidden_layers": 5,
    "head_dim": 8,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": K,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "pad_token_id": None,
}


class SquaredError(Loss):
    """A loss of a critic, whose returns are any numbers."""

    normalize, fields, needs_entropy = "token", ("old_log_probs",), False

    def __call__(self, values, entropy, fields):
        return (values - fields["old_log_probs"]).square(), {}


def balance(scores, chosen):
    """DeepSeek-V3's loss (arXiv 2412.19437, equations 17 to 20) of a sequence in a layer.

    From scores [tokens, experts] and experts [tokens, k].
    """
    tokens, experts = scores.shape
    share = (scores / scores.sum(-1, keepdim=True)).mean(0)
    total = 0.0
    for expert in range(experts):
        load = experts / (chosen.shape[1] * tokens) * (chosen == expert).any(-1).sum()
        total = total + load * share[expert]
    return total


def losses(model, s):
    """Losses of the response's tokens."""
    fields = {**s.fields, "advantages": torch.tensor(s.fields["advantages"])}
    if hasattr(model, "score"):
        values = model.score(model.model(s.ids[None]).last_hidden_state)[0, :, 0]
        return SquaredError()(values[-s.response_tokens - 1 : -1], None, fields)[0]
    log_p = model(s.ids[None]).logits[0, -s.response_tokens - 1 : -1].log_softmax(-1)
    chosen = log_p.gather(-1, s.ids[-s.response_tokens :, None])[:, 0]
    return POLICY(chosen, None, fields)[0]


def oracle(path, sequences, coef, replayed=False, auto=AutoModelForCausalLM):
    """Loss, balance loss and gradients in float64, one sequence at a time."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = auto.from_pretrained(path, **eager).double()
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    forced, seen = {}, []

    def route(gate, _, outputs):
        logits, weights, chosen = outputs
        scores = logits.softmax(-1)
        if gate in forced:
            chosen = torch.where(forced[gate] < 0, chosen, forced[gate])
            weights = scores.gather(-1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
        seen.append(balance(scores, chosen))
        return logits, weights, chosen

    for gate in gates:
        gate.register_forward_hook(route)
    masks = [torch.ones(s.response_tokens) if s.mask is None else s.mask for s in sequences]
    tokens, total = sum(mask.sum() for mask in masks), torch.zeros((), dtype=torch.float64)
    for s, mask in zip(sequences, masks, strict=True):
        if replayed:
            experts = torch.cat([s.routed_experts.long(), torch.full((1, LAYERS, K), -1)])
            forced |= dict(zip(gates, experts.unbind(1), strict=True))
        total = total + (mask / tokens * losses(model, s)).sum()
    assert len(seen) == LAYERS * len(sequences)
    even = torch.stack(seen).mean()
    (total + coef * even).backward()
    return total.item(), even.item(), {name: p.grad for name, p in model.named_parameters()}


def make_engine(path, layout, schedule, settings, **options):
    pp, replicas, fsdp, tp, ep = layout
    axes = {"pp": pp, "replicas": replicas, "fsdp": fsdp, "tp": tp, "ep": ep}
    axes |= {key: settings.pop(key) for key in ("cp", "sequence_parallel") if key in settings}
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=settings.pop("most_tokens", 30),
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(**axes, schedule=PipelineSchedule[schedule]),
            **settings,
        ),
        device=torch.device("cpu"),
        **options,
    )


def step(path, sequences, layout, schedule, settings, loss):
    """Metrics and gradients of this rank's share of an update."""
    settings = {"router_aux_loss_coef": COEF, **settings}
    gives_values = isinstance(loss, SquaredError)
    engine = make_engine(path, layout, schedule, settings, gives_values=gives_values)
    gradients = {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(sequences[dist.get_rank() :: dist.get_world_size()], loss)
    return metrics, gradients


def check(ranks, path, sequences, wanted, layout, schedule, settings, of=POLICY):
    loss, even, want_gradients = wanted
    args = (path, sequences, layout, schedule, settings, of)
    results = ranks(math.prod(layout[:4]), step, *args)
    gradients = {name: g for _, of_rank in results for name, g in of_rank.items()}
    for metrics, _ in results:
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert metrics["router_aux_loss"] == pytest.approx(even, abs=1e-6)
    for name, gradient in want_gradients.items():
        got = gradients[name][: len(gradient)].double()
        assert (got - gradient).abs().max() < 1e-5, name


@pytest.fixture(scope="module")
def case(tiny, sequences_of):
    """A model and its sequences, and what one process computes."""
    path, sequences = tiny("qwen3_moe", True, **SETTINGS), sequences_of()
    return path, sequences, oracle(path, sequences, COEF)


@pytest.mark.skipif(
    hasattr(modeling_granitemoe, "GraniteMoeExperts"), reason="this transformers names them alike"
)
def test_a_family_whose_experts_are_not_found_has_no_load():
    """GraniteMoE names them otherwise; a mean over no layers would be NaN."""
    cpu = torch.device("cpu")
    assert ExpertLoad([], GraniteMoeConfig(), TrainerConfig(), 1, cpu).metrics() == {}


def test_the_loss_reaches_the_routers(case):
    path, sequences, (_, even, gradients) = case
    _, _, without = oracle(path, sequences, 0.0)
    routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    assert even > 1.2, "the load is even already"
    assert all((gradients[x] - without[x]).abs().max() > 1e-3 for x in routers)


def test_two_ranks_equal_one_process(ranks, case):
    settings = {"activations": ActivationMode.recompute}
    check(ranks, *case, (1, 1, 2, 1, 2), "one_f_one_b", settings)


def test_a_critic_of_experts_gets_the_loss_too(ranks, case, tmp_path):
    """The loss is that of its own routers, here in chunks."""
    path, sequences, _ = case
    config = AutoConfig.from_pretrained(path)
    config.num_labels, config.architectures, config.tie_word_embeddings = 1, None, False
    torch.manual_seed(11)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    wanted = oracle(tmp_path, sequences, COEF, auto=AutoModelForSequenceClassification)
    settings = {"chunk_tokens": 5, "most_tokens": 8}
    args = (str(tmp_path), sequences, wanted, (1, 1, 2, 1, 2), "one_f_one_b", settings)
    check(ranks, *args, SquaredError())


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "schedule", "settings"),
    [
        ((1, 1, 1, 1, 1), "one_f_one_b", {}),
        ((1, 1, 2, 1, 1), "one_f_one_b", {"activations": ActivationMode.offload}),
        ((1, 2, 1, 2, 1), "one_f_one_b", {}),
        ((1, 1, 2, 2, 4), "one_f_one_b", {"sequence_parallel": True}),
        ((2, 1, 1, 1, 1), "interleaved", {"activations": ActivationMode.recompute}),
        ((2, 1, 2, 1, 2), "zero_bubble", {}),
        ((2, 1, 2, 1, 2), "one_f_one_b", {"cp": 2, "most_tokens": 8}),
        ((2, 1, 1, 1, 1), "one_f_one_b", {"chunk_tokens": 4, "most_tokens": 4}),
        pytest.param(
            (1, 1, 2, 2, 2), "one_f_one_b",
            {"cp": 2, "chunk_tokens": 3, "most_tokens": 5, "activations": ActivationMode.recompute},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_layout_equals_one_process(ranks, case, layout, schedule, settings):
    check(ranks, *case, layout, schedule, settings)


def step_of_adapters(path, sequences, settings):
    """Metrics of an update; the gradients of B, and A."""
    settings = {"router_aux_loss_coef": COEF, **settings}
    layout = (1, 1, dist.get_world_size(), 1, 1)
    engine = make_engine(path, layout, "one_f_one_b", settings, lora=LORA)
    shards, gradients = engine.named_shards(), {}
    start = {name: shards[name].full_tensor().clone() for name in engine.adapter_names()}

    def before_step(*_):
        for name, p in engine.chunks[0].named_parameters():
            if "lora_B" in name:
                gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(sequences[dist.get_rank() :: dist.get_world_size()], POLICY)
    return metrics, gradients, start


def test_adapters_in_front_of_routers_get_the_loss(ranks, case):
    """In chunks. B begins at zero, so its gradient is that of the weight, times A."""
    path, sequences, (_, even, want) = case
    settings = {"chunk_tokens": 5, "most_tokens": 8}
    for metrics, gradients, start in ranks(1, step_of_adapters, path, sequences, settings):
        assert metrics["router_aux_loss"] == pytest.approx(even, abs=1e-6)
        assert len(gradients) == 4 * SETTINGS["num_hidden_layers"]
        for name, gradient in gradients.items():
            of_weight = want[name.replace("lora_B.", "")]
            a = start[name.replace("lora_B", "lora_A")].double()
            assert (gradient - LORA.scaling * of_weight @ a.T).abs().max() < 1e-5, name


@pytest.mark.layouts
def test_replayed_experts_are_counted_and_live_scores_weigh(ranks, case):
    path, sequences, own = copy.deepcopy(case)
    random = torch.Generator().manual_seed(5)
    for s in sequences:
        shape = len(s.ids) - 1, LAYERS, EXPERTS
        s.routed_experts = torch.rand(shape, generator=random).argsort(-1)[..., :K].byte()
    wanted = oracle(path, sequences, COEF, replayed=True)
    assert abs(wanted[1] - own[1]) > 0.05
    settings = {"router_replay": RouterReplay.rollout, "activations": ActivationMode.recompute}
    check(ranks, path, sequences, wanted, (1, 1, 2, 1, 2), "one_f_one_b", settings)


def moved(path, sequences, layout, schedule, settings):
    """The routing biases of the whole model after each of two updates; the load of the first."""
    engine = make_engine(path, layout, schedule, {"router_bias_update_rate": RATE, **settings})
    biases, loads = [], []
    for _ in range(2):
        mine = sequences[dist.get_rank() :: dist.get_world_size()]
        loads.append(engine.update(mine, POLICY)["expert_load"])
        biases.append({k: x.clone() for k, x in routing_biases(engine.buffers()).items()})
    return *biases, loads[0]


@pytest.fixture(scope="module")
def biased(tiny, sequences_of):
    """A model with routing biases, its sequences, and an update's load and biases."""
    path, sequences = tiny("glm4_moe", True, **BIASED), sequences_of()
    model = AutoModelForCausalLM.from_pretrained(path)
    wanted = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            counts = torch.zeros(EXPERTS)

            def count(_, inputs, counts=counts):
                counts += inputs[1].flatten().bincount(minlength=EXPERTS)

            layer.mlp.experts.register_forward_pre_hook(count)
            wanted[f"model.layers.{index}.mlp.gate.e_score_correction_bias"] = counts
    for s in sequences:
        model(s.ids[None])
    load = torch.stack([n.max() / n.mean() for n in wanted.values()]).mean().item()
    return path, sequences, load, {k: RATE * (n.mean() - n).sign() for k, n in wanted.items()}


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "schedule", "settings"),
    [
        ((1, 1, 1, 1, 1), "one_f_one_b", {"activations": ActivationMode.recompute}),
        ((2, 1, 2, 1, 2), "zero_bubble", {}),  # rows are filled up: that is no load
        pytest.param((1, 1, 2, 2, 4), "one_f_one_b", {}, marks=pytest.mark.slow),
        (
            (1, 1, 2, 1, 2), "one_f_one_b",
            {"cp": 2, "chunk_tokens": 3, "most_tokens": 5, "router_aux_loss_coef": COEF},
        ),
        ((2, 1, 1, 1, 1), "one_f_one_b", {"chunk_tokens": 4, "most_tokens": 4}),
        pytest.param(
            (2, 1, 2, 1, 2), "interleaved",
            {"chunk_tokens": 4, "most_tokens": 4, "activations": ActivationMode.recompute},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_biases_move_by_the_load_of_all_ranks(ranks, biased, layout, schedule, settings):
    path, sequences, load, wanted = biased
    results = ranks(math.prod(layout[:4]), moved, path, sequences, layout, schedule, settings)
    for first, second, own_load in results:
        assert own_load == pytest.approx(load), "a token counts as often as any other"
        assert first.keys() == wanted.keys()
        for name, bias in wanted.items():
            assert torch.allclose(first[name], bias, rtol=0, atol=1e-7), name
            assert torch.equal(second[name], results[0][1][name]), name
            assert not torch.equal(second[name], bias), name
