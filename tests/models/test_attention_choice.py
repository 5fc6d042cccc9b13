"""Which attention `model.attention` comes to, by what is installed, the GPU and the model."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from hybridrl.config import Attention, ConfigError
from hybridrl.models.attention_choice import OBSTACLES, choose_attention
from hybridrl.models.attention_shape import AttentionShape

CPU, GPU, OLD_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
HEADS = {size: AttentionShape(2, size, size, sinks=False) for size in (36, 64, 256, 288)}
LATENT = AttentionShape(4, 192, 128, sinks=False)
SINKS = AttentionShape(2, 64, 64, sinks=True)
CAPPED = AttentionShape(2, 64, 64, sinks=False, capped=True)
PACKAGES = {
    "whole": "def flash_attn_varlen_func(): ...",
    "other torch": "raise ImportError('undefined symbol: _ZN3c10')",
    "flash-attn-4": "",
}
OLD = "capability 8.0 and above, not 7.5"


@pytest.mark.parametrize(
    ("package", "device", "dtype", "shape", "of_flash", "of_varlen"),
    [
        ("whole", GPU, torch.bfloat16, HEADS[64], None, None),
        ("whole", GPU, torch.float16, HEADS[256], None, None),
        ("whole", GPU, torch.bfloat16, LATENT, None, None),
        ("whole", CPU, torch.bfloat16, HEADS[64], "there is no GPU", "there is no GPU"),
        ("whole", OLD_GPU, torch.float16, HEADS[64], OLD, OLD),
        ("whole", GPU, torch.float32, HEADS[64], "not float32", "not float32"),
        ("whole", GPU, torch.bfloat16, HEADS[288], "steps of 8, not 288", "steps of 8, not 288"),
        ("whole", GPU, torch.bfloat16, HEADS[36], "steps of 8, not 36", "steps of 8, not 36"),
        ("whole", GPU, torch.bfloat16, SINKS, "no attention sinks", "no attention sinks"),
        ("whole", GPU, torch.bfloat16, CAPPED, None, "no capped scores"),
        ("none", GPU, torch.bfloat16, HEADS[64], "cannot be imported: import of flash", None),
        ("none", GPU, torch.bfloat16, CAPPED, "cannot be imported", "no capped scores"),
        ("other torch", GPU, torch.bfloat16, HEADS[64], "undefined symbol: _ZN3c10", None),
        ("flash-attn-4", GPU, torch.float16, LATENT, "imported: cannot import name", None),
    ],
)
def test_what_runs_where_its_kernels_can(
    package: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    of_flash: str | None,
    of_varlen: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`auto` takes the first that can, and logs why it is not an earlier one; names are refused."""
    install(package, tmp_path, monkeypatch)
    capabilities = {GPU: (9, 0), OLD_GPU: (7, 5)}
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.get)
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    caplog.set_level("INFO", logger="hybridrl")
    choose = partial(choose_attention, device=device, dtype=dtype, shape=shape)
    expected = {Attention.flash: of_flash, Attention.varlen: of_varlen}
    first = next((kind for kind in expected if expected[kind] is None), Attention.torch)

    assert choose(Attention.auto) is first
    before = [obstacle for kind, obstacle in expected.items() if obstacle and kind is not first]
    if first is Attention.flash:
        before = []
    said = caplog.messages[-1]
    assert [obstacle in said for obstacle in before] == [device is not CPU] * len(before)
    assert said.endswith(f": {first.value}") == (device is CPU or not before)

    assert choose(Attention.torch) is Attention.torch
    for kind, obstacle in expected.items():
        if obstacle is None:
            assert choose(kind) is kind
            continue
        wanted = f"^model.attention={kind.value}: wanted torch or auto here: .*{obstacle}"
        with pytest.raises(ConfigError, match=wanted):
            choose(kind)


def test_torch_may_be_built_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's CPU build is; flash-attn brings its own kernel."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert OBSTACLES[Attention.varlen](torch.bfloat16, HEADS[64], None) is None
    reason = OBSTACLES[Attention.varlen](torch.bfloat16, HEADS[64], GPU)
    assert reason == "varlen_attn needs FlashAttention, which this torch is built without"


def test_a_reason_of_both_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hybridrl")
    choose_attention(Attention.auto, GPU, torch.float32, HEADS[64])
    reason = "FlashAttention computes in bfloat16 and float16, not float32"
    assert caplog.messages == [f"packed attention on cuda:0: torch ({reason})"]


def install(package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import flash_attn` find this package of `PACKAGES`, or none."""
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    if package == "none":
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        return
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(PACKAGES[package])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # restored when the test ends
    del sys.modules["flash_attn"]
