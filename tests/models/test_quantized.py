"""Checkpoints with FP8 or MXFP4 weights in blocks: every box is what transformers dequantizes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

from hybridrl.config import ConfigError
from hybridrl.engines.probe import random_model
from hybridrl.layout.box import Box
from hybridrl.layout.local import LocalTensor
from hybridrl.models.config_json import check_config_json
from hybridrl.models.load import check_supported, empty_causal_lm, load_config
from hybridrl.models.scaled_slice import ScaledSlice
from hybridrl.models.shrink import shrink
from hybridrl.models.stored_weights import StoredWeights, check_stored
from hybridrl.preflight.models import check_quantized

BLOCK = 8
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in float8, and the scale of each block, as DeepSeek's `act_quant` makes them."""
    sizes = [-(-size // BLOCK) for size in weight.shape]
    padded = torch.zeros([size * BLOCK for size in sizes])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(sizes[0], BLOCK, sizes[1], BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    scaled = (blocks / scales[:, None, :, None]).view(padded.shape)
    return scaled[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scales


def write(family: str, folder: Path, **settings: Any) -> None:
    """A random model whose linear layers are stored in float8."""
    torch.manual_seed(0)
    config = shrink(AutoConfig.for_model(family, **settings))
    random_model(config).save_pretrained(folder)
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        linear = name.endswith("_proj.weight")
        if linear:
            stored[name], stored[f"{name}_scale_inv"] = quantize(tensor)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config=FP8)


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def dequantized(folder: Path) -> PreTrainedModel:
    """By transformers, which without a GPU dequantizes FP8."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_every_box_is_what_transformers_dequantizes(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    model, draw, scaled = dequantized(tmp_path), random.Random(0), 0
    config = load_config(str(tmp_path))
    assert not hasattr(config, "quantization_config")
    check_supported(config)
    check_config_json(str(tmp_path), "model.path")
    with StoredWeights(str(tmp_path), config) as weights:
        for name, tensor in model.named_parameters():
            whole = torch.full(tensor.shape, torch.nan)
            weights.fill(whole, name, LocalTensor((Box.whole(tensor.shape),)))
            assert torch.equal(whole, tensor), name
            scaled += tensor.ndim > 1
            for _ in range(8):
                ends = [sorted(draw.sample(range(size + 1), 2)) for size in tensor.shape]
                box = Box(*(tuple(side) for side in zip(*ends, strict=True)))
                read = torch.full(box.shape, torch.nan)
                weights.fill(read, name, LocalTensor((box,)))
                assert torch.equal(read, tensor[box.slices()]), name
        weights.check_left_out()
    assert scaled > 8
    # A model that trains is as without quantization: nothing of it is saved with what it becomes.
    assert not hasattr(empty_causal_lm(str(tmp_path), "eager").config, "quantization_config")


def write_mxfp4(folder: Path) -> None:
    """A small gpt-oss whose experts are random numbers of MXFP4, as the hub has them."""
    torch.manual_seed(0)
    config = shrink(AutoConfig.for_model("gpt_oss"))
    config.hidden_size, config.intermediate_size = 64, 32
    random_model(config).save_pretrained(folder)
    stored, random_bytes = {}, torch.Generator().manual_seed(1)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            shape = experts, rows, columns // 32
            blocks = torch.randint(256, (*shape, 16), generator=random_bytes)
            stored[f"{name}_blocks"] = blocks.byte()
            stored[f"{name}_scales"] = torch.randint(110, 128, shape, generator=random_bytes).byte()
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config={"quant_method": "mxfp4"})


def test_every_box_of_mxfp4_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    whole = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=whole
    )
    config, draw, packed = load_config(str(tmp_path)), random.Random(0), 0
    check_config_json(str(tmp_path), "model.path")
    with StoredWeights(str(tmp_path), config) as weights:
        for name, tensor in model.named_parameters():
            packed += tensor.ndim == 3
            for _ in range(20):
                ends = [sorted(draw.sample(range(size + 1), 2)) for size in tensor.shape]
                box = Box(*(tuple(side) for side in zip(*ends, strict=True)))
                read = torch.full(box.shape, torch.nan)
                weights.fill(read, name, LocalTensor((box,)))
                # transformers has them in bfloat16, which loses nothing of four bits.
                assert torch.equal(read, tensor[box.slices()].float()), name
        weights.check_left_out()
    assert packed > 2


def test_blocks_that_do_not_divide_a_weight() -> None:
    """The last ones are smaller, as in DeepSeek's; transformers reads no such weight."""

    class Slice:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def get_shape(self) -> list[int]:
            return list(self.tensor.shape)

        def __getitem__(self, index: Any) -> torch.Tensor:
            return self.tensor[index]

    weight = torch.randn(21, 35, generator=torch.Generator().manual_seed(1))
    values, scales = quantize(weight)
    by_element = scales.repeat_interleave(BLOCK, 0)[:21].repeat_interleave(BLOCK, 1)[:, :35]
    wanted, draw = values.float() * by_element, random.Random(0)
    one = ScaledSlice(Slice(values), Slice(scales), (BLOCK, BLOCK))
    assert torch.equal(one[...], wanted)
    # Of float8 with three bits of mantissa: half of an eighth.
    assert ((wanted - weight).abs() <= weight.abs() / 16 + by_element / 256).all()
    for _ in range(50):
        rows, columns = (slice(*sorted(draw.sample(range(n + 1), 2))) for n in (21, 35))
        assert torch.equal(one[rows, columns], wanted[rows, columns])


def test_an_engine_that_would_keep_the_weights_quantized(make_config: Any, tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    check_quantized(make_config(), str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^rollout.engine=vllm: wanted native with the quantized"
    ):
        check_quantized(make_config("rollout=vllm"), str(tmp_path))


UNKNOWN = [
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "fp8", "weight_block_size": None}, "fp8"),
]


@pytest.mark.parametrize(("quantization", "name"), UNKNOWN, ids=str)
def test_other_quantizations_are_refused_by_name(
    quantization: dict[str, Any], name: str, tmp_path: Path
) -> None:
    write("qwen3", tmp_path)
    change(tmp_path, quantization_config=quantization)
    with pytest.raises(ConfigError, match=f"weights quantized by {name}"):
        check_config_json(str(tmp_path), "model.path")


def test_a_config_that_says_nothing_of_its_float8(tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    change(tmp_path, quantization_config=None)
    with pytest.raises(ConfigError, match=r"in float8, of which config\.json"):
        check_stored(str(tmp_path), load_config(str(tmp_path)))


def test_weights_without_their_scales(tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    broken = [
        ({f"{name}_scale_inv": None}, f"{name} is in float8 and has no _scale_inv"),
        ({name: None}, f"{name}_scale_inv has no weight"),
        ({f"{name}_scale_inv": torch.ones(1, 1)}, "scales have the shape"),
    ]
    for changes, said in broken:
        changed = {n: x for n, x in (stored | changes).items() if x is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=said):
            check_stored(str(tmp_path), load_config(str(tmp_path)))
