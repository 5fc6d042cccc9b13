"""Recurrent states in the native engine: what moves, what is computed again, and when it is right.

Tokens are drawn from each sample's own stream, so that equal tokens show equal states. The oracle
is transformers' prefill and its single steps.
"""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import transformers
from transformers import AutoConfig, DynamicCache, PretrainedConfig, PreTrainedModel

from hybridrl.config.versions import release_of
from hybridrl.engines.probe import random_model
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.memory import kv_bytes_per_token, num_states, states_bytes
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.speculation import make_speculation
from hybridrl.layout.mesh import Mesh
from hybridrl.models.recurrent import continues
from hybridrl.models.shard import GenParallel
from hybridrl.models.states import StateCache

pytestmark = pytest.mark.long

SHAPE = {
    "vocab_size": 67, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3}
FAMILIES = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
    "granitemoehybrid": {
        **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "lfm2": {**CONVOLUTION, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1},
    "jamba": {
        "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
if release_of(transformers.__version__) >= (5, 20):
    FAMILIES |= {
        "bailing_hybrid": {**LATENT, "head_dim": 8, "n_group": 2, "topk_group": 1},
        "falcon_h1": {
            **MAMBA, "head_dim": 16, "mamba_d_ssm": 128, "embedding_multiplier": 3.0,
            "ssm_multipliers": [0.5, 0.25, 2.0, 3.0, 4.0],
        },
        "kimi_linear": {**LATENT, "linear_head_dim": 8, "linear_num_heads": 2},
        "olmo_hybrid": {name: size for name, size in DELTA.items() if name != "head_dim"},
    }  # fmt: skip
PROMPTS = [[*range(3, 3 + length)] for length in (9, 1, 17, 30)]
SAMPLES, NEW = 3, 24
ALL = SAMPLES * len(PROMPTS)
SAMPLING = SamplingParams(NEW)

Models = Callable[[str], PreTrainedModel]


def config_of(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})


@pytest.fixture(scope="module")
def models() -> Models:
    by_family: dict[str, PreTrainedModel] = {}

    def model_of(family: str) -> PreTrainedModel:
        if family not in by_family:
            torch.manual_seed(0)
            model = random_model(config_of(family))
            with torch.no_grad():  # less peaked, so that every token is drawn
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(0.7)
            by_family[family] = model
        return by_family[family]

    return model_of


def engine_of(model: PreTrainedModel, **settings) -> NativeEngine:
    engine = NativeEngine(
        model.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        **{"max_running": ALL, "block_size": 4, "kv_cache_tokens": 0, **settings},
        max_sequence=128,
    )
    engine.load_weights(model.state_dict().items())
    return engine


def requests(sampling: SamplingParams = SAMPLING, shared: bool = True) -> list[Request]:
    return [
        Request((p, k), prompt, sampling, stream_key(p, k), prefix=p if shared else None)
        for p, prompt in enumerate(PROMPTS)
        for k in range(SAMPLES)
    ]


def finish(engine: NativeEngine, num: int = ALL) -> dict[object, Output]:
    outputs: dict[object, Output] = {}
    while len(outputs) < num:
        outputs |= {output.id: output for output in engine.step()}
    return outputs


def begin(engine: NativeEngine, steps: int = 7) -> dict[object, Output]:
    engine.submit(requests())
    return {output.id: output for _ in range(steps) for output in engine.step()}


def unfinished(outputs: dict[object, Output]) -> list[object]:
    return [request.id for request in requests() if request.id not in outputs]


def same(got: dict[object, Output], wanted: dict[object, Output], within: float) -> None:
    assert {id: o.token_ids for id, o in got.items()} == {
        id: o.token_ids for id, o in wanted.items()
    }
    for id, output in wanted.items():
        assert output.log_probs == pytest.approx(got[id].log_probs, abs=within)


@torch.no_grad()
def stepped(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probabilities of a response by transformers' cache: a prefill, then a token each."""
    cache, rows, ids, start = DynamicCache(config=model.config), [], [*prompt, *response], 0
    for stop in range(len(prompt), len(ids)):
        positions = torch.arange(start, stop)[None]
        inputs = torch.tensor([ids[start:stop]])
        rows.append(model(inputs, position_ids=positions, past_key_values=cache).logits[0, -1])
        start = stop
    log_probs = torch.stack(rows).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_shared_prompt_are_transformers_own(family: str, models: Models) -> None:
    """Each prompt's states are computed once and copied to its samples."""
    model = models(family)
    engine = engine_of(model)
    engine.submit(requests())
    outputs = finish(engine)
    within = 1e-3 if "linear_num_value_heads" in FAMILIES[family] else 5e-4
    for id, output in outputs.items():
        wanted = stepped(model, PROMPTS[id[0]], output.token_ids)
        assert output.log_probs == pytest.approx(wanted.tolist(), abs=within)
    once = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert engine.stats().prefill_tokens == once
    assert engine.stats().shared_prompt_tokens == (SAMPLES - 1) * once
    apart = engine_of(model)
    apart.submit(requests(shared=False))
    same(finish(apart), outputs, within)
    assert apart.stats().prefill_tokens == SAMPLES * once


def test_only_layers_with_keys_are_in_the_cache(models: Models) -> None:
    model = models("qwen3_5_text")
    engine = engine_of(model)
    assert engine.stats().kv_bytes_per_token == 2 * 2 * 16 * 4  # one layer of four
    begin(engine)
    (request,) = engine.park([(2, 0)], with_kv=True)
    convolution, recurrent = (2 * 8 * 2 + 4 * 16) * 4, 4 * 8 * 16
    assert request.kv.states.nbytes == 3 * 4 * (convolution + recurrent)
    assert request.kv.nbytes == request.kv.blocks.nbytes + request.kv.states.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_plan_has_the_bytes_that_a_cache_takes(family: str, dtype: torch.dtype) -> None:
    """The plan counts keys and values, and states; a pipeline's stages have them all together."""
    config = config_of(family)
    engine = NativeEngine(
        config, dtype=dtype, device=torch.device("cpu"), max_running=3, block_size=4,
        kv_cache_tokens=64, max_sequence=64,
    )  # fmt: skip
    cache = engine.take_cache()
    assert cache.states is not None
    allocated = sum(tensor.nbytes for layer in cache.states.layers for tensor in layer)
    whole, halves = (Mesh((("instance", 1), ("pp", pp), ("tp", 1))) for pp in (1, 2))
    assert states_bytes(config, whole, 0, dtype, 3) == allocated
    assert sum(states_bytes(config, halves, stage, dtype, 3) for stage in (0, 1)) == allocated
    assert engine.stats().state_bytes * (num_states(3) + 1) == allocated
    token = kv_bytes_per_token(config, whole, 0, dtype)
    assert cache.blocks.nbytes == token * 4 * (16 + 1)
    assert engine.stats().kv_bytes_per_token == token
    assert sum(kv_bytes_per_token(config, halves, stage, dtype) for stage in (0, 1)) == token


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "lfm2", "jamba"])
@pytest.mark.parametrize("with_kv", [True, False])
def test_parked_samples_go_on_in_another_engine(family: str, with_kv: bool, models: Models) -> None:
    model = models(family)
    wanted = engine_of(model)
    wanted.submit(requests())
    source, target = engine_of(model), engine_of(model)
    outputs = begin(source)
    parked = pickle.loads(pickle.dumps(source.park(unfinished(outputs), with_kv=with_kv)))
    assert all((request.kv is not None) == with_kv for request in parked)
    target.submit(parked)
    outputs |= finish(target, len(parked))
    same(outputs, finish(wanted), 1e-3)
    cached = sum(request.num_tokens - 1 for request in parked)
    stats = target.stats()
    if with_kv:
        assert (stats.restored_tokens, stats.prefill_tokens) == (cached, 0)
    else:
        assert stats.restored_tokens == 0
        assert stats.prefill_tokens + stats.shared_prompt_tokens == cached


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_preempted_samples_are_computed_again(family: str, models: Models) -> None:
    model = models(family)
    wanted, engine = engine_of(model), engine_of(model, kv_cache_tokens=4 * 40)
    for each in (wanted, engine):
        each.submit(requests())
    same(finish(engine), finish(wanted), 1e-3)
    assert engine.stats().num_preempted > 0


def test_shared_prompts_of_interleaved_samples_give_no_slot_away_that_is_named(
    models: Models,
) -> None:
    """More prompts than slots: an admission may not drop what it is about to fill or to copy."""
    model = models("qwen3_5_text")
    lengths = [[4, 4, 3, 3, 1, 4], [1, 6, 4, 4, 1, 3]]
    interleaved = [
        Request((p, k), [*range(3 + p, 9 + p)], SamplingParams(new), stream_key(p, k), prefix=p)
        for k, own in enumerate(lengths)
        for p, new in enumerate(own)
    ]
    few, roomy = engine_of(model, max_running=2), engine_of(model, max_running=12)
    for engine in (few, roomy):
        engine.submit(copy.deepcopy(interleaved))
    same(finish(few, 12), finish(roomy, 12), 1e-3)


def test_slots_are_given_back(models: Models) -> None:
    engine = engine_of(models("qwen3_5_text"), max_running=4)
    for _ in range(2):  # more samples than slots
        engine.submit(requests())
        finish(engine)
    states = engine._admission.states
    assert states is not None
    assert states.num_free == 2 * 4 + 1
    assert len({*states._free}) == 2 * 4 + 1


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba"])
def test_states_behind_refused_drafts_are_undone(family: str, models: Models) -> None:
    model = models(family)
    wanted = engine_of(model)
    engine = engine_of(model, speculation=make_speculation(4, GenParallel()))
    for each in (wanted, engine):
        each.submit(requests())
    same(finish(engine), finish(wanted), 1e-3)
    stats = engine.stats()
    assert stats.drafted_tokens > 0
    assert stats.refused_drafts > 0


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_strict_samples_are_equal_bit_for_bit(family: str, models: Models) -> None:
    """Whether they ran to their end, or were parked and replayed beside fewer others."""
    model = models(family)
    wanted = engine_of(model, deterministic=True)
    wanted.submit(requests())
    source = engine_of(model, deterministic=True)
    target = engine_of(model, deterministic=True, max_running=2)
    outputs = begin(source, 9)
    parked = source.park(unfinished(outputs))
    target.submit(parked[::-1])
    outputs |= finish(target, len(parked))
    assert target.stats().replayed_tokens > 0
    for id, output in finish(wanted).items():
        assert outputs[id].token_ids == output.token_ids
        assert outputs[id].log_probs == output.log_probs


@pytest.mark.parametrize("blocks", [0, 40])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_conversations_go_on_from_their_states(family: str, blocks: int, models: Models) -> None:
    """Held ones that keep their states, or whose states went to the host where blocks are few."""
    model = models(family)
    engine = engine_of(model, kv_cache_tokens=4 * blocks, max_running=4)
    engine.submit(requests(SamplingParams(NEW, max_turn_tokens=5)))
    outputs: dict[object, Output] = {}
    while len(outputs) < ALL:
        outputs |= {output.id: output for output in engine.step()}
        # Where blocks are few, replies come once nothing else runs: others have taken some then.
        for turn in () if blocks and engine.unfinished else engine.take_turns():
            going_on = turn.response_tokens + 4 < NEW
            reply = [3 + turn.response_tokens, 7, 11, 5] if going_on else None
            if (output := engine.answer(turn.id, reply)) is not None:
                outputs[output.id] = output
    for id, output in outputs.items():
        wanted = stepped(model, PROMPTS[id[0]], output.token_ids)
        own = [log_prob != 0 for log_prob in output.log_probs]
        pairs = zip(output.log_probs, wanted.tolist(), own, strict=True)
        assert max(abs(got - want) for got, want, drawn in pairs if drawn) < 1e-3
        assert not all(own)
    stats = engine.stats()
    assert (stats.moved_tokens + stats.recomputed_tokens > 0) == bool(blocks)
    assert blocks or stats.kept_tokens > 0


MISTAKES = {
    "state not reset": ("reset", lambda *_: None),
    "wrong slot": ("copy", lambda self, pairs: None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_state_shows(mistake: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests compare depends on every state: each fault changes tokens."""
    model = models("qwen3_5_text")
    engine = engine_of(model, max_running=3)
    for _ in range(2):
        engine.submit(requests())
        wanted = finish(engine)
    monkeypatch.setattr(StateCache, *MISTAKES[mistake])
    engine = engine_of(model, max_running=3)
    for _ in range(2):
        engine.submit(requests())
        outputs = finish(engine)
    assert any(outputs[id].token_ids != wanted[id].token_ids for id in wanted)


def test_which_mixers_continue_on_a_state() -> None:
    """The delta rule does; others ignore the state of several tokens, Jamba in every version."""
    newer = release_of(transformers.__version__) >= (5, 16)
    right = {family: continues(config_of(family)) for family in FAMILIES}
    assert right == {f: f.startswith("qwen") or (newer and f != "jamba") for f in FAMILIES}
