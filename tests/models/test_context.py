"""How long a sequence may be: a model may rotate a whole row by its longest sequence."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3TextConfig, Phi3Config, Qwen3Config

from hybridrl import cli
from hybridrl.config import Attention, TinyModelConfig
from hybridrl.engines import probe
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedModel, pack
from hybridrl.models.context import context_tokens
from hybridrl.models.packed_attention import NAME
from hybridrl.models.stages import whole
from hybridrl.models.tiny import make_char_tokenizer

CONTEXT = 40  # above what the probe tries


def long_rope(vocabulary: int = 67) -> Phi3Config:
    """Other frequencies beyond the context, of 128 tokens in all."""
    return Phi3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        original_max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    )  # fmt: skip


def test_the_context_of_a_config() -> None:
    assert context_tokens(long_rope()) == CONTEXT
    assert context_tokens(Phi3Config()) == Phi3Config().max_position_embeddings
    assert context_tokens(Gemma3TextConfig()) == Gemma3TextConfig().max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yarn_config = Qwen3Config(max_position_embeddings=128, rope_parameters=yarn)
    assert context_tokens(yarn_config) == 128


def farthest(lengths: tuple[int, ...], total: int = 0) -> float:
    """How far a packed row is from transformers, sequence by sequence."""
    torch.manual_seed(0)
    model = probe.random_model(long_rope())
    ids = [torch.randint(1, 67, (length,)) for length in lengths]
    sequences = [TrainSequence(row, len(row) - 1) for row in ids]
    batch = pack(sequences, Attention.torch, torch.device("cpu"), total_tokens=total)
    with torch.no_grad():
        got, _ = PackedModel(whole(probe._copy(model, NAME)))(batch.ids, batch)
        wanted = torch.cat([probe.eager_log_probs(model, row) for row in ids])
    return float((got - wanted).abs().max())


def test_a_row_within_the_context_is_transformers_even_if_it_is_filled_up() -> None:
    assert farthest((5, 12, CONTEXT)) < probe.TOLERANCE
    assert farthest((5, 12), total=100) < probe.TOLERANCE
    assert farthest((5, 12, CONTEXT + 1)) > 100 * probe.TOLERANCE, "the limit is not needed"


@pytest.mark.long
def test_longer_samples_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_char_tokenizer(TinyModelConfig().alphabet, 128)
    path = tmp_path / "model"
    probe.random_model(long_rope(len(tokenizer))).save_pretrained(path)
    tokenizer.save_pretrained(path)
    capfd.readouterr()  # transformers' progress
    run = [f"run.dir={tmp_path / 'run'}", f"rollout.max_new_tokens={CONTEXT}"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "experiment=spell_tiny", f"model.path={path}", *run])
    assert ended.value.code == 2
    err = capfd.readouterr().err
    line = f"rollout.max_new_tokens={CONTEXT}: wanted less than the context, {CONTEXT} tokens"
    assert err == f"hybridrl: {line}\n"
