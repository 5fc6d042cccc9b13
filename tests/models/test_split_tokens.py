"""Sequence parallelism as the memory plan counts it, against torch's styles on the layer itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hybridrl.config import Attention
from hybridrl.models.activations import Halves, backward_in_halves, count_halves
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.counted_modules import ATTENTION, CountedRow
from hybridrl.models.tensor_parallel import apply_tensor_parallel

TOKENS, TP = 512, 4


def _config() -> PretrainedConfig:
    return AutoConfig.for_model(
        "qwen3", vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    )  # fmt: skip


def _of_the_layer() -> Halves:
    """A tensor-parallel layer of a group whose other ranks do nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            _config(), dtype=torch.bfloat16, attn_implementation=ATTENTION
        )
    apply_tensor_parallel(model, init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",)), True)
    layer: Any = decoder_layers(model.train())[0]
    passed: dict[str, Any] = {}

    def note(module: Any, args: Any, keywords: dict[str, Any]) -> None:
        passed.update(keywords)

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    share = torch.empty(1, TOKENS // TP, 128, dtype=torch.bfloat16, device="meta")
    positions = torch.empty(1, TOKENS, dtype=torch.long, device="meta")
    row = CountedRow(Attention.flash)
    with torch.no_grad():
        model.base_model(inputs_embeds=share, position_ids=positions, use_cache=False, packing=row)
    hook.remove()
    present = [x for x in tree_leaves(passed) if isinstance(x, torch.Tensor)]
    return count_halves(lambda x: layer(x, **passed), share, layer, *present)


@pytest.mark.long
def test_halves_are_those_of_the_layer(fresh_ranks: Callable[..., list[Any]]) -> None:
    planned = {
        split: backward_in_halves(
            _config(), TOKENS, dtype=torch.bfloat16, attention=Attention.flash, tp=TP,
            sequence_parallel=split,
        )
        for split in (False, True)
    }  # fmt: skip
    (of_layer,) = fresh_ranks(1, _of_the_layer)
    assert planned[True] == of_layer
    assert all(a > b for a, b in zip(planned[False], of_layer, strict=True))
