"""Activations in host memory: gradients of training bit for bit as without it."""

import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate

from hybridrl.config import (
    ActivationMode,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train import activation_offload
from hybridrl.engines.train.activation_offload import ActivationOffload
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout import fsdp_groups
from hybridrl.layout.fsdp_groups import KEPT_PARAMETERS, ONE_GROUP_PARAMETERS

pytestmark = pytest.mark.layouts

LORA = LoraConfig(rank=4)


def one_update(path, sequences, activations, layout, lora, most, chunk):
    """This rank's shards after a step, its metrics, and how many storages left the device."""
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=most,
            chunk_tokens=chunk,
            activations=activations,
            optim=OptimConfig(lr=1e-2),
            layout=layout,
        ),
        device=torch.device("cpu"),
        lora=lora,
    )
    sent = []
    plain = activation_offload._Block.copy_out

    def counting(block):
        sent.append(len(block.alive()))
        plain(block)

    with patch.object(activation_offload._Block, "copy_out", counting):
        metrics = engine.update(sequences[dist.get_rank() :: dist.get_world_size()], Surrogate())
    shards = {name: shard.to_local().clone() for name, shard in engine.named_shards().items()}
    return shards, metrics, sent


def both(path, sequences, layout, lora, large, most=30, chunk=0):
    """The update with activations kept and offloaded; `large` as large models are sharded."""
    with (
        patch.object(activation_offload, "LEAST_BYTES", 64),
        patch.object(fsdp_groups, "ONE_GROUP_PARAMETERS", 0 if large else ONE_GROUP_PARAMETERS),
        patch.object(fsdp_groups, "KEPT_PARAMETERS", 0 if large else KEPT_PARAMETERS),
    ):
        modes = ActivationMode.keep, ActivationMode.offload
        args = (layout, lora, most, chunk)
        return [one_update(path, sequences, mode, *args) for mode in modes]


@pytest.mark.parametrize(
    ("layout", "lora", "large"),
    [
        ({"fsdp": 2}, None, True),
        ({"fsdp": 2}, LORA, False),
        ({"tp": 2}, None, False),
        ({"tp": 2, "sequence_parallel": True}, LORA, True),
        *(({"pp": 2, "schedule": schedule}, None, False) for schedule in PipelineSchedule),
        ({"pp": 2, "schedule": PipelineSchedule.zero_bubble}, None, True),
    ],
    ids=str,
)
def test_an_update_is_the_same_bit_for_bit(ranks, tiny, sequences, layout, lora, large):
    path = tiny("qwen3", num_hidden_layers=4, num_attention_heads=4)
    sizes = TrainLayoutConfig(**layout)
    for kept, offloaded in ranks(2, both, path, sequences, sizes, lora, large):
        assert kept[1] == offloaded[1]
        assert not kept[2]
        assert min(offloaded[2]) > 5, "every layer of every row sends what it saves"
        for name, shard in kept[0].items():
            assert torch.equal(shard, offloaded[0][name]), name


@pytest.mark.parametrize(
    ("layout", "heads", "chunk"),
    [
        pytest.param({"fsdp": 2, "cp": 2}, 3, 0, marks=pytest.mark.wide),
        ({"fsdp": 2, "cp": 2}, 4, 3),
        pytest.param({"pp": 2}, 4, 8, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_long_rows_are_the_same_bit_for_bit(ranks, tiny, sequences, layout, heads, chunk):
    """Shared ones, with heads that cp does not divide, and chunks."""
    path = tiny("qwen3", num_attention_heads=heads, num_key_value_heads=1)
    args = (TrainLayoutConfig(**layout), None, False, 8, chunk)
    for kept, offloaded in ranks(2, both, path, sequences, *args):
        assert kept[1] == offloaded[1]
        assert offloaded[2]
        for name, shard in kept[0].items():
            assert torch.equal(shard, offloaded[0][name]), name


class Wide(torch.nn.Module):
    """A layer that saves tensors of 64 KiB: its input by two views, and three results."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(128, 128))

    def forward(self, x):
        return (x @ self.weight).sin().view(128, 128) * x.t().exp().t()


def test_the_device_holds_the_newest_layer_alone():
    """Before backward the last layer; in its backward pass a layer and the one before it."""
    layers = [Wide() for _ in range(5)]
    offload = ActivationOffload(torch.device("cpu"))
    blocks, on_device = [], []
    send, unpack = offload._send, offload._unpack

    def holding():
        return [any(s.flat is not None for s in block.alive()) for block in blocks]

    def noting(block):
        blocks.append(block)
        send(block)

    def counting(packed):
        tensor = unpack(packed)
        on_device.append(sum(holding()))
        return tensor

    with patch.object(offload, "_send", noting), patch.object(offload, "_unpack", counting):
        offload.apply(layers)
        x = torch.randn(128, 128, requires_grad=True)
        for layer in layers:
            x = layer(x)
    assert [len(block.alive()) for block in blocks] == [4] * 5, "views of a storage are one"
    assert holding() == [False] * 4 + [True]
    content = [weakref.ref(storage) for block in blocks for storage in block.alive()]
    x.sum().backward()
    assert max(on_device) == 2
    assert not any(ref() for ref in content), "nothing stays when backward is over"


def test_scoring_saves_nothing():
    layer = Wide()
    offload = ActivationOffload(torch.device("cpu"))
    offload.apply([layer])
    with torch.no_grad(), patch.object(offload, "_send") as send:
        layer(torch.randn(128, 128))
    send.assert_not_called()
