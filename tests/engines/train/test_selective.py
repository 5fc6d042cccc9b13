"""Selective recomputation: the update of `keep` bit for bit, and what is computed and kept."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engines.train.test_layouts import EXTRAS
from surrogate_loss import Surrogate
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import (
    ActivationMode,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout import fsdp_groups
from hybridrl.layout.fsdp_groups import KEPT_PARAMETERS, ONE_GROUP_PARAMETERS
from hybridrl.models.activations import PeakMemory
from hybridrl.models.recomputation import KEPT, recompute_layers

LORA = LoraConfig(rank=4)
MODES = ActivationMode.keep, ActivationMode.selective, ActivationMode.recompute


class Operations(TorchDispatchMode):
    """How often each operation runs within, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kept(self):
        """Operations whose results `selective` keeps."""
        return sum(count for name, count in self.counts.items() if name in KEPT)

    @property
    def norms(self):
        """Norms in layers, which it computes again."""
        return self.counts["aten::rsqrt"]


def one_update(path, sequences, mode, layout, lora, most, chunk):
    """This rank's shards after a step, its metrics, its operations that count, and its rows."""
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=most,
            chunk_tokens=chunk,
            activations=mode,
            optim=OptimConfig(lr=1e-2),
            layout=layout,
        ),
        device=torch.device("cpu"),
        lora=lora,
    )
    rows = []
    engine.roots[0].register_forward_pre_hook(lambda *_: rows.append(1))
    with Operations() as operations:
        metrics = engine.update(sequences[dist.get_rank() :: dist.get_world_size()], Surrogate())
    shards = {name: shard.to_local().clone() for name, shard in engine.named_shards().items()}
    return shards, metrics, operations.kept, operations.norms, len(rows)


def each_mode(path, sequences, layout, lora, large, most=30, chunk=0):
    """The update in each of `MODES`; `large` as large models are sharded."""
    with (
        patch.object(fsdp_groups, "ONE_GROUP_PARAMETERS", 0 if large else ONE_GROUP_PARAMETERS),
        patch.object(fsdp_groups, "KEPT_PARAMETERS", 0 if large else KEPT_PARAMETERS),
    ):
        args = (layout, lora, most, chunk)
        return [one_update(path, sequences, mode, *args) for mode in MODES]


def check_alike(results):
    """Alike bit for bit; no product twice, all norms twice."""
    for kept, selective, recomputed in results:
        for other in (selective, recomputed):
            assert kept[1] == other[1]
            for name, shard in kept[0].items():
                assert torch.equal(shard, other[0][name]), name
        assert kept[2] == selective[2] < recomputed[2]
        assert kept[3] < selective[3] == recomputed[3]


@pytest.mark.parametrize(
    ("layout", "lora", "large"),
    [
        ({}, None, False),
        *(
            pytest.param(*case, marks=pytest.mark.layouts)
            for case in [
                ({"fsdp": 2}, None, True),
                ({"fsdp": 2}, LORA, False),
                ({"tp": 2}, None, False),
                ({"tp": 2, "sequence_parallel": True}, LORA, True),
                ({"pp": 2}, None, True),
                ({"pp": 2, "schedule": PipelineSchedule.interleaved}, None, False),
            ]
        ),
    ],
    ids=str,
)
def test_an_update_is_the_same_bit_for_bit(ranks, tiny, sequences, layout, lora, large):
    path = tiny("qwen3", num_hidden_layers=4, num_attention_heads=4)
    sizes = TrainLayoutConfig(**({"fsdp": 1} | layout))
    size = sizes.pp * sizes.fsdp * sizes.tp
    check_alike(ranks(size, each_mode, path, sequences, sizes, lora, large))


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "large"),
    [
        ({"fsdp": 2, "ep": 2}, True),
        pytest.param({"tp": 2, "ep": 2}, False, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_experts(ranks, tiny, sequences, layout, large):
    path = tiny("qwen3_moe", num_attention_heads=4, **EXTRAS["qwen3_moe"])
    sizes = TrainLayoutConfig(**({"fsdp": 1} | layout))
    check_alike(ranks(2, each_mode, path, sequences, sizes, None, large))


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "heads", "chunk"),
    [
        pytest.param({"fsdp": 2, "cp": 2}, 4, 0, marks=pytest.mark.wide),
        ({"fsdp": 2, "cp": 2}, 4, 3),
        pytest.param({"pp": 2, "fsdp": 1}, 4, 8, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_long_rows(ranks, tiny, sequences, layout, heads, chunk):
    """Rows that ranks share, and chunks, whose keys and values stay."""
    path = tiny("qwen3", num_attention_heads=heads, num_key_value_heads=2)
    args = (TrainLayoutConfig(**layout), None, False, 8, chunk)
    check_alike(ranks(2, each_mode, path, sequences, *args))


def test_bytes_that_are_kept(tiny):
    """A forward pass keeps of its layers inputs, products and attention, and nothing besides."""
    config = AutoConfig.from_pretrained(tiny("qwen3", num_attention_heads=4))
    tokens, kept = 64, {}
    for mode in MODES:
        model = AutoModelForCausalLM.from_config(config).train()
        if mode.recomputes:
            recompute_layers(model, mode)
        hidden = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
        memory = PeakMemory()
        memory.track_external(model, hidden)
        before = memory.allocated("cpu")
        with memory:
            out = model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
            kept[mode] = memory.allocated("cpu") - before
        assert out.requires_grad
    heads = config.num_attention_heads * config.head_dim
    features = heads + 2 * config.num_key_value_heads * config.head_dim  # q, k, v
    features += heads + config.num_attention_heads  # attention, and its sums
    features += 2 * config.hidden_size + 2 * config.intermediate_size  # o, down; gate, up
    products = 4 * tokens * features * config.num_hidden_layers
    assert kept[ActivationMode.selective] - kept[ActivationMode.recompute] == products
    assert kept[ActivationMode.selective] < 0.7 * kept[ActivationMode.keep]


def test_the_operations_that_are_kept_are_torchs():
    """The names of flash-attn are held to its sources: tests/contracts/test_flash_attn.py."""
    import torch.nn.attention.varlen

    for name in KEPT:
        room, operation = name.split("::")
        assert room == "flash_attn" or hasattr(getattr(torch.ops, room), operation), name
