"""Recurrent layers over packed rows: batches of like lengths, and no state leaves a sequence."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from hybridrl.config import Attention, ConfigError, LoraConfig
from hybridrl.engines.probe import probe
from hybridrl.engines.rollout import batch
from hybridrl.engines.rollout.entries import Entry, StateSlots
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedModel, pack
from hybridrl.models import recurrent
from hybridrl.models.adapters import add_adapters, check_lora
from hybridrl.models.chunk_keys import ChunkKeys, SequenceKeys
from hybridrl.models.mixers import has_keys, precise_names, recurrent_modules
from hybridrl.models.packed_attention import NAME, make_packing, make_shared_packing
from hybridrl.models.parallel import meta_model
from hybridrl.models.recurrent import Mixer, batches, use_batches
from hybridrl.models.shrink import shrink
from hybridrl.models.stages import prepare_training, whole
from hybridrl.models.states import StateBatch, StateCache

SMALL = Qwen3_5TextConfig(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=16,
)  # fmt: skip
CPU = torch.device("cpu")


def test_like_lengths_are_one_batch() -> None:
    assert batches([(4, 10), (2, 12), (1, 100)]) == [(10,) * 4 + (12,) * 2, (100,)]
    assert batches([(1, 2), (1, 3), (1, 4), (1, 5)]) == [(2, 3, 4, 5)]
    assert batches([(64, 12)]) == [(12,) * 64]
    for lengths in batches([(3, 1), (5, 2), (1, 3), (9, 30), (1, 700)]):
        assert len(lengths) * lengths[-1] <= 1.5 * sum(lengths)


@pytest.mark.parametrize("lengths", [[3, 11, 11, 23], [1, 2, 3, 70, 75], [9]])
def test_a_row_is_each_sequence_alone(lengths: list[int]) -> None:
    """Outputs and gradients of a mixer over the row, and over its sequences one by one."""
    torch.manual_seed(0)
    model = type(meta_model(SMALL))(SMALL)
    mixer = use_batches(model)[0]
    x = torch.randn(sum(lengths), 32, requires_grad=True)
    weights = torch.randn(sum(lengths), 32)
    mixer.take({"packing": make_packing(lengths, Attention.torch, CPU)})
    got = mixer(x[None])[0]
    wanted = torch.cat([mixer.compute(own[None], None)[0] for own in x.split(lengths)])
    # Measured: 2e-7.
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    (own,) = torch.autograd.grad((got * weights).sum(), x)
    (each,) = torch.autograd.grad((wanted * weights).sum(), x)
    torch.testing.assert_close(own, each, atol=1e-5, rtol=1e-4)
    assert own.abs().amax(1).all()


@pytest.mark.parametrize("what", ["chunk", "shared"])
def test_a_row_without_whole_sequences_is_refused(what: str) -> None:
    model = type(meta_model(SMALL))(SMALL)
    mixer = use_batches(model)[0]
    packing = make_packing([4], Attention.torch, CPU)
    if what == "chunk":
        packing = replace(packing, chunk=ChunkKeys(SequenceKeys(8, False), 4, 8))
    else:
        packing = make_shared_packing([1, 3], [3, 0], [1, 0], Attention.torch, CPU)
    mixer.take({"packing": packing})
    with pytest.raises(ValueError, match="recurrent layers need whole sequences in a row"):
        mixer(torch.zeros(1, 4, 32))


def test_which_layers_have_keys() -> None:
    layers = meta_model(SMALL).base_model.layers
    assert [has_keys(layer) for layer in layers] == [False, False, False, True]
    dense = meta_model(Qwen3Config(num_hidden_layers=2)).base_model.layers
    assert all(map(has_keys, dense))


def one_row(self: Mixer, x: torch.Tensor, packing: object) -> torch.Tensor:
    """The mixer's own forward over the whole row."""
    return self.compute(x[None], None)[0]


def used(make: Callable[..., None]) -> Callable[..., None]:
    """Slots in which another sequence was."""

    def init(self: StateCache, *arguments: object) -> None:
        make(self, *arguments)
        for tensors in self.layers:
            for tensor in tensors:
                tensor.fill_(1.0)

    return init


def stale(make: Callable[..., StateBatch]) -> Callable[..., StateBatch]:
    """Passes whose first tokens go on from what their slot has."""

    def wrapped(*arguments: object) -> StateBatch:
        states = make(*arguments)
        states.runs = [replace(run, fresh=False) for run in states.runs]
        return states

    return wrapped


def first_slot(self: StateSlots, owner: Entry) -> int:
    owner.state = 1
    return 1


@pytest.mark.parametrize("mistake", ["packing", "reset", "slot"])
def test_the_probe_finds_a_wrong_state(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault alone, in a family that is right without it."""
    match mistake:
        case "packing":
            monkeypatch.setattr(Mixer, "_packed", one_row)
        case "reset":
            monkeypatch.setattr(batch, "state_batch", stale(batch.state_batch))
            monkeypatch.setattr(StateCache, "__init__", used(StateCache.__init__))
            monkeypatch.setattr(StateCache, "reset", lambda *_: None)
        case "slot":
            monkeypatch.setattr(StateSlots, "give", first_slot)
    verdict = probe(SMALL)
    wrong, right = (
        (verdict.train, verdict.native) if mistake == "packing" else (verdict.native, verdict.train)
    )
    assert right is None
    assert wrong is not None
    assert "log-probabilities differ by" in wrong or "less likely than" in wrong


@pytest.mark.long
def test_the_small_model_is_right() -> None:
    verdict = probe(SMALL)
    assert (verdict.train, verdict.native) == (None, None)
    assert recurrent.continues(SMALL)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
@torch.no_grad()
def test_adapters_in_mixers_are_those_of_merged_weights(family: str) -> None:
    """What training computes adapted a weight is what generation adds to it."""
    torch.manual_seed(0)
    convolutions = {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2}
    config = AutoConfig.for_model(family, **(convolutions if family == "lfm2" else {}))
    model = AutoModelForCausalLM.from_config(
        shrink(config), attn_implementation=NAME, dtype=torch.float32
    )
    use_batches(model)
    add_adapters(model, LoraConfig(rank=4), 0, torch.float32)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    inner = {id(layer) for mixer in recurrent_modules(model) for layer in mixer.modules()}
    assert any(id(layer) in inner for layer in layers)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.1)
    ids = [torch.randint(1, model.config.vocab_size, (length,)) for length in (3, 9, 20)]
    row = pack([TrainSequence(tokens, len(tokens) - 1) for tokens in ids], Attention.torch, CPU)
    packed = PackedModel(whole(prepare_training(model)))
    adapted, _ = packed(row.ids, row)
    for layer in layers:
        layer.merge()
    merged, _ = packed(row.ids, row)
    for layer in layers:
        layer.unmerge()
        layer.lora_B["default"].weight.zero_()
    without, _ = packed(row.ids, row)
    torch.testing.assert_close(adapted, merged, atol=1e-3, rtol=1e-3)
    assert (adapted - without).abs().max() > 1e-2


@pytest.mark.skipif(
    not hasattr(modeling_qwen3_5.Qwen3_5GatedDeltaNet(SMALL, 0), "chunk_gated_delta_rule"),
    reason="this transformers' mixers have no rule that can be replaced",
)
def test_short_sequences_are_short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those of chunks of 64 tokens, and no chunk is much longer than its sequence."""
    sizes = []
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def noted(*args, chunk_size=64, **kwargs):
        sizes.append(chunk_size)
        return rule(*args, chunk_size=chunk_size, **kwargs)

    noted.__module__ = rule.__module__
    module = modeling_qwen3_5.Qwen3_5GatedDeltaNet(SMALL, 0)
    monkeypatch.setattr(module, "chunk_gated_delta_rule", noted)
    inputs = [torch.randn(2, length, SMALL.hidden_size) for length in (5, 16, 17, 63, 200)]
    wanted = [module(x) for x in inputs]
    mixer = Mixer(module, 0)
    for x, want in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(mixer.compute(x, None), want, atol=1e-5, rtol=1e-5)
    assert sizes == [64] * 5 + [16, 16, 32, 64, 64]


def test_adapters_that_a_mixer_passes_by_are_refused() -> None:
    check_lora(SMALL, LoraConfig(rank=4), "actor.lora")
    with pytest.raises(ConfigError, match=r"^actor.lora.rank=4: wanted 0 \(jamba's mixers"):
        check_lora(AutoConfig.for_model("jamba"), LoraConfig(rank=4), "actor.lora")


@pytest.mark.parametrize(
    ("family", "rates"),
    [
        ("olmo_hybrid", "linear_attn"),
        ("kimi_linear", "self_attn.forget_gate"),
        ("bailing_hybrid", "self_attn.forget_gate"),
    ],
)
def test_rates_and_norms_stay_precise_wherever_a_family_has_them(family: str, rates: str) -> None:
    """In a bfloat16 model, whose mixers still hand on bfloat16; so does Bailing's convolution."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = shrink(AutoConfig.for_model(family))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = precise_names(model)
    layer = "model.layers.0"
    own = f"{layer}.{rates.partition('.')[0]}"
    assert {f"{layer}.{rates}.A_log", f"{layer}.{rates}.dt_bias", f"{own}.o_norm.weight"} <= names
    assert (f"{own}.conv1d.weight" in names) == (family == "bailing_hybrid")
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.data = parameter.data.float()
    mixer = use_batches(model)[0]
    x = torch.randn(2, 5, config.hidden_size, dtype=torch.bfloat16)
    assert mixer.compute(x, None).dtype == torch.bfloat16
