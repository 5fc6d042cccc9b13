"""What families compute besides a Llama: training, scoring and decoding against eager attention.

Logits are scaled or capped, a head has a bias, scores are capped or have sinks. Values are narrower
than keys, projections fused, routers random in training, and some have buffers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PhiModel, PreTrainedModel

from hybridrl.config import (
    ActivationMode,
    Attention,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.loss import Loss
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.score.engine import ScoreEngine
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.layout.mesh import Mesh
from hybridrl.models import parallel
from hybridrl.models.local_weights import load_buffers, load_local
from hybridrl.models.shard import GenParallel

pytestmark = pytest.mark.long

VOCAB, TEMPERATURE, CPU = 43, 0.7, torch.device("cpu")
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
ALL_HEADS = {"num_key_value_heads": 4}  # the family has no heads that share keys
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, **ROUTED},
    "gemma2": {
        **WINDOWS, "head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {**WINDOWS, **EXPERTS, "head_dim": 8},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3},
    "phi": {"partial_rotary_factor": 0.5},
    "apertus": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**WINDOWS, "logit_scale": 0.25},
    "glm4_moe": {**ROUTED, "head_dim": 8, "use_qk_norm": True},
    "gpt2": ALL_HEADS,
    "gpt_neox": ALL_HEADS,
    "granitemoe": {**EXPERTS, "logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 0.5},
    "mixtral": {**EXPERTS, "router_jitter_noise": 0.4},
    "opt": {**ALL_HEADS, "word_embed_proj_dim": 32, "ffn_dim": 48, "layerdrop": 0.5},
    "phi3": {},
    "phimoe": {**EXPERTS, "router_jitter_noise": 0.1, "input_jitter_noise": 0.2},
    "vaultgemma": {
        **WINDOWS, "head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
    },
}  # fmt: skip
FAST = ("deepseek_v3", "gemma2", "gpt_oss", "granite", "phi")
CLOSE = {"rtol": 0, "atol": 2e-5}  # float32 sums in another order: up to 7.6e-6 over 48 families


class SumOfSquares(Loss):
    """Every log-probability has another gradient."""

    normalize = "token"
    fields = ()

    def __call__(self, log_probs: torch.Tensor, entropy: Any, fields: Any) -> Any:
        return log_probs**2, {}


@pytest.fixture(autouse=True)
def _any_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines as they are for a family that was admitted."""
    monkeypatch.setattr("hybridrl.models.parallel.check_family", lambda *_: None, raising=False)


def write_model(family: str, directory: Path) -> PreTrainedModel:
    """A random model, saved; biases, sinks and the routing bias are not what init gives."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0, 2)
    model.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def make_sequences() -> list[TrainSequence]:
    random = torch.Generator().manual_seed(3)
    return [
        TrainSequence(torch.randint(3, VOCAB, (length,), generator=random), response)
        for length, response in [(9, 4), (3, 1), (17, 12), (9, 6), (12, 11)]
    ]


def eager_log_probs(
    model: PreTrainedModel, sequence: TrainSequence, temperature: float
) -> torch.Tensor:
    """Log-probabilities of the response [response_tokens], of one sequence alone."""
    length, response = len(sequence.ids), sequence.response_tokens
    logits = model(sequence.ids[None], use_cache=False).logits[0] / temperature
    log_p = logits[length - response - 1 : length - 1].log_softmax(-1)
    return log_p.gather(-1, sequence.ids[-response:, None])[:, 0]


def train(path: str, sequences: Sequence[TrainSequence], recomputes: bool, tp: int = 1) -> Any:
    """Log-probabilities, loss and gradients of one update."""
    engine = TrainEngine(
        path,
        model=ModelConfig(attention=Attention.torch),
        trainer=TrainerConfig(
            optim=OptimConfig(lr=1e-3, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(tp=tp),
            activations=ActivationMode.recompute if recomputes else ActivationMode.keep,
        ),
        device=CPU,
        temperature=TEMPERATURE,
    )
    gradients = {}

    def before_step(*_: Any) -> None:
        for name, parameter in engine.model.named_parameters():
            gradients[name] = parameter.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    log_probs = engine.log_probs(sequences)
    metrics = engine.update(sequences, SumOfSquares())
    return log_probs, metrics["loss"], gradients


def check_training(model: PreTrainedModel, log_probs: Any, loss: float, gradients: Any) -> None:
    sequences = make_sequences()
    wanted = [eager_log_probs(model, sequence, TEMPERATURE) for sequence in sequences]
    for got, want in zip(log_probs, wanted, strict=True):
        torch.testing.assert_close(got, want.detach(), **CLOSE)
    total = torch.cat(wanted).square().mean()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    # Relative to the largest: the bias of keys has no gradient but what rounding leaves.
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # A vocabulary in shards is padded: the padding has no gradient.
        assert gradients[name][len(want) :].eq(0).all(), name
        error = (gradients[name][: len(want)] - want).abs().max().item()
        assert error <= 2e-5 * largest, (name, error, largest)


@torch.no_grad()
def check_scoring(model: PreTrainedModel, path: Path) -> None:
    engine = ScoreEngine(
        model.config, GenParallel(), dtype=torch.float32, device=CPU, temperature=TEMPERATURE
    )
    engine.share({name: p.data for name, p in model.named_parameters()}, str(path))
    sequences = make_sequences()
    for sequence, got in zip(sequences, engine.log_probs(sequences), strict=True):
        torch.testing.assert_close(got, eager_log_probs(model, sequence, TEMPERATURE), **CLOSE)


@torch.no_grad()
def check_decoding(model: PreTrainedModel, path: Path) -> None:
    """Prefill and decode steps; greedy tokens have the log-probability of temperature 1."""
    engine = NativeEngine(
        model.config, dtype=torch.float32, device=CPU, max_running=4, block_size=4,
        kv_cache_tokens=0, max_sequence=48,
    )  # fmt: skip
    engine.load_weights(model.named_parameters())
    load_buffers(engine.model, str(path), model.config)
    prompts = {index: sequence.ids[:-1].tolist() for index, sequence in enumerate(make_sequences())}
    for index, prompt in prompts.items():
        sampling = SamplingParams(12 + index, temperature=0.0)
        engine.submit([Request(index, prompt, sampling, index)])
    outputs = []
    while len(outputs) < len(prompts):
        outputs += engine.step()
    for output in outputs:
        ids = torch.tensor([*prompts[output.id], *output.token_ids])  # type: ignore[index]
        want = eager_log_probs(model, TrainSequence(ids, len(output.token_ids)), 1.0)
        torch.testing.assert_close(torch.tensor(output.log_probs), want, **CLOSE)
        logits = model(ids[None], use_cache=False).logits[0, -len(output.token_ids) - 1 : -1]
        largest = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(want, largest, **CLOSE)  # the likeliest token, or one as likely


@pytest.mark.parametrize(
    "family",
    [*FAST, *(pytest.param(f, marks=pytest.mark.models) for f in FAMILIES if f not in FAST)],
)
def test_family_equals_eager_attention(
    family: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    model = write_model(family, tmp_path)
    check_scoring(model, tmp_path)
    check_decoding(model, tmp_path)
    recomputes = family in ("gemma2", "phimoe")
    (results,) = ranks(1, train, str(tmp_path), make_sequences(), recomputes)
    check_training(model, *results)


def in_two_shards(path: str, sequences: Sequence[TrainSequence], prompt: list[int]) -> Any:
    """Training, scoring and greedy tokens under tensor parallelism, as for an admitted family."""
    parallel.check_family = lambda *_: None
    parallel.FAMILIES = (*parallel.FAMILIES, "gemma2", "phi")
    PhiModel.norm = property(lambda body: body.final_layernorm)
    trained = train(path, sequences, False, tp=2)
    shard = GenParallel.make(Mesh((("instance", 1), ("pp", 1), ("tp", 2))), "cpu")
    config = AutoConfig.from_pretrained(path)
    scorer = ScoreEngine(config, shard, dtype=torch.float32, device=CPU, temperature=TEMPERATURE)
    scorer.load(path)
    engine = NativeEngine(
        config, dtype=torch.float32, device=CPU, max_running=1, block_size=4, kv_cache_tokens=0,
        max_sequence=48, parallel=shard,
    )  # fmt: skip
    load_local(engine.model, path, config, shard)
    engine.submit([Request(0, prompt, SamplingParams(12, temperature=0.0), 0)])
    outputs: list[Any] = []
    while not outputs:
        outputs = engine.step()
    return trained, scorer.log_probs(sequences), (outputs[0].token_ids, outputs[0].log_probs)


@pytest.mark.parametrize("family", ["gemma2", pytest.param("phi", marks=pytest.mark.models)])
def test_a_head_in_shards_equals_eager_attention(
    family: str, fresh_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """43 tokens over two ranks: a cap, and a bias that is cut as the weight is."""
    model, sequences, prompt = write_model(family, tmp_path), make_sequences(), [5, 6, 7]
    results = fresh_ranks(2, in_two_shards, str(tmp_path), sequences, prompt)
    for trained, scores, (token_ids, log_probs) in results:
        model.zero_grad()
        check_training(model, *trained)
        for sequence, got in zip(sequences, scores, strict=True):
            want = eager_log_probs(model, sequence, TEMPERATURE).detach()
            torch.testing.assert_close(got, want, **CLOSE)
        whole = TrainSequence(torch.tensor([*prompt, *token_ids]), len(token_ids))
        want = eager_log_probs(model, whole, 1.0).detach()
        torch.testing.assert_close(torch.tensor(log_probs), want, **CLOSE)
