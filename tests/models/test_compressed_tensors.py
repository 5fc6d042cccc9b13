"""Checkpoints in the formats of compressed-tensors: every box is what the package decompresses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import ConfigError
from hybridrl.engines.probe import random_model
from hybridrl.layout.box import Box
from hybridrl.layout.local import LocalTensor
from hybridrl.models.config_json import check_config_json
from hybridrl.models.load import load_config
from hybridrl.models.shrink import shrink
from hybridrl.models.stored_weights import StoredWeights, check_stored

GROUP = 8
SCHEMES = {
    "fp8 a channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 in all": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [GROUP, GROUP]},
    ),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 with zeros": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
    ),
    "int4 with zeros": (
        "pack-quantized",
        {
            "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP,
            "symmetric": False,
        },
    ),
    "int2": (
        "pack-quantized",
        {"num_bits": 2, "type": "int", "strategy": "group", "group_size": GROUP},
    ),
    "int8 packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
}  # fmt: skip


def blocks_of(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest element that have one scale, in the scales' shape."""
    rows, columns = weight.shape
    height, width = {
        "channel": (1, columns), "tensor": (rows, columns), "group": (1, GROUP),
        "block": (GROUP, GROUP),
    }[args.strategy]  # fmt: skip
    parts = weight.view(rows // height, height, columns // width, width)
    least, most = parts.amin((1, 3)), parts.amax((1, 3))
    return (least.view(1), most.view(1)) if args.strategy == "tensor" else (least, most)


def write(family: str, folder: Path, scheme: str) -> Path:
    """A random model with quantized layers; answers with a folder of the same, decompressed."""
    torch.manual_seed(0)
    random_model(shrink(AutoConfig.for_model(family))).save_pretrained(folder)
    format, settings = SCHEMES[scheme]
    args = QuantizationArgs(**settings)
    own = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.load_from_registry(format)
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        weight = tensor.bfloat16()
        scale, zero = calculate_qparams(*blocks_of(weight, args), args)
        layer = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(layer, own)
        start = name.removesuffix("weight")
        stored |= {start + key: value for key, value in packed.items()}
        plain[name] = compressor.decompress(packed, own)["weight"]
    decompressed = folder / "decompressed"
    decompressed.mkdir()
    for place, tensors in ((folder, stored), (decompressed, plain)):
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    text = (folder / "config.json").read_text()
    (decompressed / "config.json").write_text(text)
    quantization = {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": own.model_dump(mode="json")},
    }  # fmt: skip
    change(folder, quantization_config=quantization)
    return decompressed


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("family", "scheme"), [*(("qwen3", scheme) for scheme in SCHEMES), ("qwen3_moe", "int4")]
)
def test_every_box_is_what_the_package_decompresses(
    family: str, scheme: str, tmp_path: Path
) -> None:
    decompressed = write(family, tmp_path, scheme)
    model = AutoModelForCausalLM.from_pretrained(decompressed, dtype=torch.float32)
    config, draw, quantized = load_config(str(tmp_path)), random.Random(0), 0
    assert not hasattr(config, "quantization_config")
    check_config_json(str(tmp_path), "model.path")
    with StoredWeights(str(tmp_path), config) as weights:
        for name, tensor in model.named_parameters():
            quantized += "_proj" in name
            whole = torch.full(tensor.shape, torch.nan)
            weights.fill(whole, name, LocalTensor((Box.whole(tensor.shape),)))
            assert torch.equal(whole, tensor), name
            for _ in range(8):
                ends = [sorted(draw.sample(range(size + 1), 2)) for size in tensor.shape]
                box = Box(*(tuple(side) for side in zip(*ends, strict=True)))
                read = torch.full(box.shape, torch.nan)
                weights.fill(read, name, LocalTensor((box,)))
                assert torch.equal(read, tensor[box.slices()]), name
        weights.check_left_out()
    assert quantized > 4


OTHERS = [
    {"format": "nvfp4-pack-quantized"},
    {"quantization_status": "frozen"},
    {"sparsity_config": {"format": "sparse-24-bitmask"}},
    {"transform_config": {"config_groups": {"R1": {}}}},
    {"config_groups": {}},
]


@pytest.mark.parametrize("scheme", ["fp8 a channel", "int8"])
def test_a_weight_that_has_lost_its_scale_is_not_read_as_it_is(scheme: str, tmp_path: Path) -> None:
    write("qwen3", tmp_path, scheme)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    del stored[f"{name}_scale"]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"{name} has no {name}_scale"):
        check_stored(str(tmp_path), load_config(str(tmp_path)))


def test_scales_of_activations_and_caches_are_passed_over(tmp_path: Path) -> None:
    write("qwen3", tmp_path, "fp8 a channel")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    start = "model.layers.0.self_attn."
    for name in ("q_proj.input_scale", "k_scale", "v_scale", "q_proj.output_scale"):
        stored[start + name] = torch.ones(1)
    save_file(stored, file, metadata={"format": "pt"})
    check_stored(str(tmp_path), load_config(str(tmp_path)))


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    write("qwen3", tmp_path, "int4")
    own = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    change(tmp_path, quantization_config=own | changes)
    format = changes.get("format", "pack-quantized")
    with pytest.raises(ConfigError, match=rf"quantized by compressed-tensors \({format}\)"):
        check_config_json(str(tmp_path), "model.path")


def test_weights_without_their_parts(tmp_path: Path) -> None:
    write("qwen3", tmp_path, "int4 with zeros")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    broken = [
        ({f"{name}_scale": None}, f"{name}_packed has no {name}_scale"),
        ({f"{name}_packed": None}, f"{name}_scale has no {name}_packed"),
        ({f"{name}_zero_point": None}, f"{name}_scale has no {name}_zero_point"),
        ({f"{name}_scale": torch.ones(1, 1)}, "scales have the shape"),
        ({f"{name}_packed": torch.ones(1, 1, dtype=torch.int32)}, "packed weights have the shape"),
    ]
    for changes, said in broken:
        changed = {n: x for n, x in (stored | changes).items() if x is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=said):
            check_stored(str(tmp_path), load_config(str(tmp_path)))
