"""Small random models and an engine for them."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key

VOCAB = 52
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
HEADS_BY_WIDTH = {k: v for k, v in SHAPE.items() if k != "head_dim"}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE),
    "llama_biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=11),
    "qwen2": Qwen2Config(
        **HEADS_BY_WIDTH,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "olmo2": Olmo2Config(**HEADS_BY_WIDTH),
    "starcoder2": Starcoder2Config(
        **HEADS_BY_WIDTH, bos_token_id=None, eos_token_id=None, sliding_window=None
    ),
    "glm4": Glm4Config(**SHAPE, pad_token_id=None),
    "phi3": Phi3Config(**HEADS_BY_WIDTH, pad_token_id=None),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(
        **HEADS_BY_WIDTH,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        use_qk_norm=True,
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """A model by the name of its config, with weights that make peaked distributions.

    Keywords change the config.
    """

    def make(name: str, **changes: int) -> PreTrainedModel:
        torch.manual_seed(0)
        config = copy.deepcopy(CONFIGS[name])
        for key, value in changes.items():
            setattr(config, key, value)
        if config.num_hidden_layers > len(getattr(config, "layer_types", None) or [0] * 99):
            config.layer_types = [*config.layer_types, "sliding_attention"]
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(5)
                else:
                    parameter.add_(torch.rand_like(parameter) * 0.5)
        return model

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """The tiny Qwen3."""
    return make_model("qwen3")


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[Request]]:
    """Makes requests of prompts of 1 to 20 tokens and 1 to `longest` new ones."""

    def make(
        num: int,
        group: int = 1,
        prefix: bool = False,
        vocab: int = VOCAB,
        longest: int = 40,
        **sampling: float,
    ) -> list[Request]:
        """`num` requests, `group` for each prompt."""
        draw = random.Random(0)
        requests = []
        for i in range(num):
            if i % group == 0:
                prompt = [draw.randrange(vocab) for _ in range(draw.randint(1, 20))]
            requests.append(
                Request(
                    id=i,
                    prompt_ids=prompt,
                    sampling=SamplingParams(draw.randint(1, longest), **sampling),  # type: ignore[arg-type]
                    stream=stream_key(7, i // group, k=i % group),
                    prefix=i // group if prefix else None,
                )
            )
        return requests

    return make


@pytest.fixture(scope="session")
def same() -> Callable[[dict[object, Output], dict[object, Output]], None]:
    """Asserts that outputs are the same up to the order of float sums."""

    def check(a: dict[object, Output], b: dict[object, Output]) -> None:
        assert a.keys() == b.keys()
        for id_, output in a.items():
            assert output.token_ids == b[id_].token_ids
            assert output.finish == b[id_].finish
            # Measured: 2e-6 between a prefill and decode steps of this model.
            assert output.log_probs == pytest.approx(b[id_].log_probs, abs=1e-5)

    return check


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., NativeEngine]:
    """An engine with the weights of a model; keywords override the constructor's."""

    def make(model: PreTrainedModel, **changes: object) -> NativeEngine:
        options: dict[str, object] = {
            "dtype": torch.float32, "device": torch.device("cpu"), "max_running": 64,
            "block_size": 4, "kv_cache_tokens": 0, "max_sequence": 96,
        }  # fmt: skip
        engine = NativeEngine(model.config, **{**options, **changes})  # type: ignore[arg-type]
        engine.load_weights(model.state_dict().items())
        return engine

    return make


@pytest.fixture(scope="session")
def finish() -> Callable[..., dict[object, Output]]:
    """Submit requests and step until nothing is left: outputs by id."""

    def run(engine: NativeEngine, requests: list[Request] | None = None) -> dict[object, Output]:
        engine.submit(requests or [])
        outputs: dict[object, Output] = {}
        for _ in range(10_000):
            stats = engine.stats()
            if not stats.running and not stats.waiting:
                return outputs
            outputs |= {output.id: output for output in engine.step()}
        raise AssertionError("the queue does not drain")

    return run
