"""Muon on shards of any layout, against torch's on whole matrices in one process."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.optim import _muon as torch_muon
from transformers import AutoModelForCausalLM

from hybridrl.config import (
    DType,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OptimName,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.loss import Loss
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.muon import (
    COEFFICIENTS,
    MOMENTUM,
    STEPS,
    MatrixOwners,
    orthogonal,
)
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.parameters import Parameter, train_layout

pytestmark = pytest.mark.layouts

OPTIM = OptimConfig(
    name=OptimName.muon, lr=1e-2, weight_decay=0.1, warmup_steps=2, clip_grad_norm=0.5
)
UPDATES = 3


class Advantage(Loss):
    fields = ("advantages",)

    def __call__(self, log_probs, entropy, fields):
        return -log_probs * fields["advantages"], {}


def make(path, layout, dtype, lora=None):
    return TrainEngine(
        path,
        model=ModelConfig(compute_dtype=dtype),
        trainer=TrainerConfig(max_tokens_per_micro_batch=30, optim=OPTIM, layout=layout),
        device=torch.device("cpu"),
        lora=lora,
    )


def train(path, sequences, layout, dtype):
    """Whole clipped gradients and learning rate of each step, and the weights in the end."""
    engine, steps = make(path, layout, dtype), []

    def before_step(*_):
        own = {
            name: parameter.grad.full_tensor().clone()
            for chunk in engine.chunks
            for name, parameter in chunk.named_parameters()
        }
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        gradients = {name: x for of_rank in gathered for name, x in of_rank.items()}
        steps.append((gradients, engine.lr_scheduler.get_last_lr()[0]))

    engine.optimizer.register_step_pre_hook(before_step)
    for number in range(UPDATES):
        engine.update(sequences[(dist.get_rank() + number) % 4 :: 4], Advantage())
    return steps, {name: tensor.clone() for name, tensor in engine.weights()}


def reference(path, steps):
    """The weights after the same gradients, by torch's Muon and AdamW on whole tensors."""
    model = AutoModelForCausalLM.from_pretrained(path)
    named = dict(model.named_parameters())
    in_layers = {name for name in named if ".layers." in name or ".h." in name}
    matrices = [p for name, p in named.items() if name in in_layers and p.ndim == 2]
    others = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    settings = {"lr": OPTIM.lr, "weight_decay": OPTIM.weight_decay}
    muon = torch.optim.Muon(matrices, **settings, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, betas=OPTIM.betas, eps=OPTIM.eps, **settings)
    for gradients, lr in steps:
        for name, parameter in named.items():
            parameter.grad = gradients[name][: len(parameter)]
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def exact(gradient, coefficients, steps, eps):
    """Newton and Schulz's iteration in float64, where torch takes bfloat16."""
    a, b, c = coefficients
    x = gradient.double()
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


LAYOUTS = {
    "one": TrainLayoutConfig(fsdp=1),
    "fsdp 4": TrainLayoutConfig(fsdp=4),
    "fsdp 2, tp 2": TrainLayoutConfig(fsdp=2, tp=2),
    "pp 2, fsdp 2": TrainLayoutConfig(pp=2, fsdp=2),
    "replicas 2, fsdp 2": TrainLayoutConfig(replicas=2, fsdp=2),
}


@pytest.mark.parametrize(
    ("family", "layout"), [*(("qwen3", layout) for layout in LAYOUTS), ("gpt2", "fsdp 4")]
)
def test_updates_equal_those_of_one_process(ranks, tiny, sequences, family, layout) -> None:
    """Whatever the layout, also where FSDP's shards are not equal (18 rows over 4 ranks).

    GPT-2's layers are called `h`, and its matrices are [inputs, outputs].
    """
    path, sizes = tiny(family, intermediate_size=18), LAYOUTS[layout]
    num_ranks = sizes.pp * sizes.replicas * sizes.fsdp * sizes.tp
    results = ranks(num_ranks, train, path, sequences, sizes, DType.float32)
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for steps, after in results:
        assert len(steps) == UPDATES
        with patch.object(torch_muon, "_zeropower_via_newtonschulz", exact):
            want = reference(path, steps)
        for name, weights in want.items():
            got = after[name][: len(weights)]
            assert (got - weights).abs().max() < 1e-5, name
            assert (got - before[name]).abs().max() > 1e-3, f"{name} has moved"


def test_in_bfloat16_it_is_torchs_own(ranks, tiny, sequences) -> None:
    path = tiny("qwen3")
    (steps, after), _ = ranks(2, train, path, sequences, TrainLayoutConfig(fsdp=2), DType.bfloat16)
    for name, weights in reference(path, steps).items():
        assert (after[name] - weights).abs().max() < 1e-5, name


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_orthogonal(shape) -> None:
    random = torch.Generator().manual_seed(0)
    experts = torch.randn(3, *shape, generator=random)
    together = orthogonal(experts)
    singular = torch.linalg.svdvals(together)
    assert 0.6 < singular[:, : min(shape) - 2].min() < singular.max() < 1.3
    for matrix, one in zip(experts, together, strict=True):
        torch.testing.assert_close(orthogonal(matrix), one, rtol=0, atol=1e-5)
        torchs = torch_muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, STEPS, 1e-7)
        assert torch.equal(orthogonal(matrix.bfloat16()), torchs)


def of_experts(axes, number):
    """Whether this rank's shards of orthogonal experts are those of whole ones."""
    experts = number if axes.ep > 1 else 0  # on axes of their own
    parameters = [
        Parameter("0.experts.gate_up_proj", (number, 24, 8), 0, 1, blocks=2, experts=experts),
        Parameter("0.experts.down_proj", (number, 8, 12), 0, tp_dim=2, experts=experts),
        Parameter("1.experts.down_proj", (number, 8, 12), 1, experts=experts),
        Parameter("1.self_attn.q_proj", (16, 8), 1, tp_dim=0),
    ]
    layout = train_layout(parameters, axes, [0, axes.pp - 1])
    random, rank = torch.Generator().manual_seed(1), dist.get_rank()
    whole = {p.name: torch.randn(p.shape, generator=random) for p in parameters}

    def shards(tensors):
        boxes = {name: layout.local(name, rank) for name in tensors}
        return {
            name: torch.cat([tensors[name][box.slices()] for box in held], LocalTensor(held).dim)
            for name, held in boxes.items()
            if held
        }

    owners = MatrixOwners({}, layout, torch.float32, torch.device("cpu"))
    got = owners.orthogonal(shards(whole))
    want = shards({name: orthogonal(matrices) for name, matrices in whole.items()})
    assert got.keys() == want.keys()
    return max(((got[name] - want[name]).abs().max().item() for name in want), default=0.0)


@pytest.mark.parametrize(
    ("axes", "number"),
    [
        (TrainAxes(1, 1, 2, 2), 5),
        (TrainAxes(2, 1, 1, 2), 5),
        (TrainAxes(1, 2, 2, 1), 5),
        (TrainAxes(1, 1, 4, 1, 2), 6),
        (TrainAxes(1, 1, 2, 2, 4), 4),
    ],
    ids=str,
)
def test_experts_are_a_batch_of_matrices(ranks, axes, number) -> None:
    """Here tp may cut gate and up alike, so that a rank has two boxes; five over four ranks."""
    assert max(ranks(4, of_experts, axes, number)) < 1e-5


def owned(path, lora, sequences):
    """The names of the matrices that owners have, and of the shards that a step changes."""
    engine = make(path, TrainLayoutConfig(fsdp=2), DType.float32, lora)
    matrices, layout = engine.trained_matrices()
    assert engine.optimizer.owners.parameters.keys() == matrices.keys() == layout.rules.keys()
    before = {name: shard.to_local().clone() for name, shard in engine.named_shards().items()}
    for _ in range(2):  # B begins at zero, so A has no gradient in the first step
        engine.update(sequences[dist.get_rank() :: 2], Advantage())
    after = {name: shard.to_local() for name, shard in engine.named_shards().items()}
    changed = {name for name, shard in before.items() if not torch.equal(shard, after[name])}
    momenta = [s["momentum_buffer"] for s in engine.optimizer.state.values() if len(s) == 1]
    assert len(momenta) == len(matrices)
    return set(matrices), changed


def test_only_matrices_of_layers_and_with_adapters_only_theirs(ranks, tiny, sequences) -> None:
    path = tiny("qwen3", tied=False, num_hidden_layers=1)
    linear = {f"self_attn.{x}_proj" for x in "qkvo"}
    linear |= {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    matrices, changed = ranks(2, owned, path, None, sequences)[0]
    assert matrices == {f"model.layers.0.{name}.weight" for name in linear}
    assert matrices < changed, "AdamW changes the rest"
    matrices, changed = ranks(2, owned, path, LoraConfig(rank=2), sequences)[0]
    assert matrices == {f"model.layers.0.{x}.lora_{ab}.weight" for x in linear for ab in "AB"}
    assert matrices == changed
