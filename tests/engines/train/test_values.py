"""A model with a value head against a plain single-process padded model of transformers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.algorithms import Loss
from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import (
    ConfigError,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.models.load import empty_value_model

pytestmark = pytest.mark.layouts

LAYOUTS = {
    "one rank": ("qwen3", {}),
    "fsdp 2": ("qwen3", {"fsdp": 2}),
    "tp 2": ("qwen3", {"tp": 2}),
    "pp 2": ("qwen3", {"pp": 2}),
    "tp 2, by tokens": ("gemma3_text", {"tp": 2, "sequence_parallel": True}),
    "pp 2 x fsdp 2": ("llama", {"pp": 2, "fsdp": 2}),
    "cp 2": ("qwen3", {"cp": 2}),
    "chunks": ("qwen3", {"chunk_tokens": 5}),
    "chunks, pp 2": ("qwen3", {"chunk_tokens": 8, "pp": 2}),
}


class SquaredError(Loss):
    """Half the square of value less return."""

    normalize = "token"
    fields = ("returns",)
    needs_entropy = False

    def __call__(self, values, entropy, fields):
        assert entropy is None
        return 0.5 * (values - fields["returns"]).square(), {"value": values.detach()}


@pytest.fixture
def value_dir(tiny, tmp_path):
    """`value_dir(family)`: a classifier with one label and random weights, and its directory."""

    def make(family: str) -> str:
        config = AutoConfig.from_pretrained(tiny(family))
        config.num_labels, config.architectures = 1, None
        torch.manual_seed(11)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return make


@pytest.fixture
def with_returns(sequences):
    """The nine sequences, with a return for every token of the response."""
    random = torch.Generator().manual_seed(5)
    for sequence in sequences:
        sequence.fields = {"returns": torch.randn(sequence.response_tokens, generator=random)}
    return sequences


def make_engine(path, layout=None, gives_values=True, **optim):
    settings = {"lr": 1e-2, "clip_grad_norm": 0.0, **optim}
    layout = dict(layout or {})
    chunk_tokens = layout.pop("chunk_tokens", 0)
    some_longer = chunk_tokens or "cp" in layout
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=8 if some_longer else 30,
            chunk_tokens=chunk_tokens,
            optim=OptimConfig(**settings),
            layout=TrainLayoutConfig(**layout),
        ),
        device=torch.device("cpu"),
        gives_values=gives_values,
    )


def oracle(path, sequences):
    """Loss, gradients and values of one padded batch in float64."""
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    model = model.double()
    longest = max(len(s.ids) for s in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, s in enumerate(sequences):
        ids[row, : len(s.ids)] = s.ids  # causal: what stands after a sequence changes nothing
    everywhere = model.score(model.base_model(ids).last_hidden_state)[..., 0]
    masks = [torch.ones(s.response_tokens) if s.mask is None else s.mask for s in sequences]
    tokens = sum(mask.sum() for mask in masks)
    total, row_values = torch.zeros((), dtype=torch.float64), []
    for row, s in enumerate(sequences):
        # The state before token t is what the model has seen up to t - 1.
        values = everywhere[row, len(s.ids) - s.response_tokens - 1 : len(s.ids) - 1]
        loss, _ = SquaredError()(values, None, s.fields)
        total = total + (masks[row] / tokens * loss).sum()
        row_values.append(values.detach())
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, row_values


def step(path, sequences, layout):
    engine = make_engine(path, layout)
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    values, local = engine.values(mine), {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                local[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    return values, engine.update(mine, SquaredError()), local


@pytest.mark.parametrize(
    "name",
    # Tests of PPO's critic have tp 2, too.
    [pytest.param(x, marks=pytest.mark.slow) if x == "tp 2" else x for x in LAYOUTS],
)
def test_values_and_gradients_equal_one_process(ranks, value_dir, with_returns, name):
    family, layout = LAYOUTS[name]
    path = value_dir(family)
    loss, want, want_values = oracle(path, with_returns)
    size = torch.tensor([value for value in layout.values() if value > 1]).prod().int().item()
    results = ranks(size, step, path, with_returns, layout)
    gradients = {}
    for rank, (values, metrics, local) in enumerate(results):
        for got, expected in zip(values, want_values[rank::size], strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
        assert "entropy" not in metrics
        assert metrics == results[0][1], "all ranks report the same"
        gradients |= local
    assert gradients.keys() == want.keys()
    assert "score.weight" in want
    for key, gradient in want.items():
        got = gradients[key][: len(gradient)].double()  # a vocabulary may be padded
        assert (got - gradient).abs().max() < 1e-5, key
        assert gradient.any(), key
    norm = torch.stack([g.norm() for g in want.values()]).norm().item()
    assert results[0][1]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def begin_and_save(path, sequences, folder):
    engine = make_engine(path)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    values = engine.values(sequences[dist.get_rank() :: 2])
    for _ in range(2):
        engine.update(sequences[dist.get_rank() :: 2], SquaredError())
        if engine.version == 1:
            first = {name: tensor.clone() for name, tensor in engine.weights()}
    moved = [name for name, tensor in first.items() if not torch.equal(tensor, before[name])]
    save_hf(engine, Path(folder) / "saved")
    return values, before, moved, engine.values(sequences)


def test_a_language_model_becomes_a_value_model(ranks, tiny, with_returns, tmp_path):
    """The head begins at zero, the first step moves it alone; what is saved is loaded again."""
    path = tiny("qwen3", False)
    (values, before, moved, after), _ = ranks(2, begin_and_save, path, with_returns, str(tmp_path))
    assert all(not value.any() for value in values)
    assert moved == ["score.weight"]
    actor = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert before.keys() == {*actor, "score.weight"} - {"lm_head.weight"}
    assert all(torch.equal(before[name], actor[name]) for name in before if name != "score.weight")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert model.score.weight.any()
    saved = oracle(str(tmp_path / "saved"), with_returns)[2]
    for value, expected in zip(after, saved, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-5)


def take(actor_path, sequences, layout, other_layout):
    actor = make_engine(actor_path, layout, gives_values=False)
    actor.update(sequences, Likelihood())
    critic = make_engine(actor_path, other_layout)
    critic.take_weights(actor.weights())
    wanted = {name: tensor.clone() for name, tensor in actor.weights()}
    return wanted, {name: tensor.clone() for name, tensor in critic.weights()}


class Likelihood(Loss):
    """So that the weights are no longer those of the file."""

    normalize, fields, needs_entropy = "token", (), False

    def __call__(self, log_probs, entropy, fields):
        return -log_probs, {}


@pytest.mark.parametrize(
    ("layout", "other"),
    [({"pp": 2}, {"tp": 2}), pytest.param({"tp": 2}, {"pp": 2}, marks=pytest.mark.wide)],
)
def test_weights_of_another_layout(ranks, tiny, with_returns, layout, other):
    path = tiny("qwen3")
    stored = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for wanted, got in ranks(2, take, path, with_returns, layout, other):
        assert got.keys() == {*wanted, "score.weight"}
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name
            assert not torch.equal(tensor, stored[name]), name


def test_a_classifier_of_several_labels_is_refused(tiny, tmp_path):
    config = AutoConfig.from_pretrained(tiny("qwen3"))
    config.num_labels, config.architectures = 3, None
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="wanted a classifier with one label") as raised:
        empty_value_model(str(tmp_path), "sdpa", key="roles.critic.path")
    assert raised.value.key == "roles.critic.path"
