"""The peak of a device is measured in the format that is asked for, and disturbs nothing."""

import pytest
import torch

from hybridrl.system import peak_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_this_machine(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_flops, "_CPU_WIDTH", 64)
    multiply, formats = torch.mm, []
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out: (formats.append(a.dtype), multiply(a, b, out=out))
    )
    state = torch.random.get_rng_state()
    assert 1e6 < peak_flops.measure_peak(torch.device("cpu"), dtype) < 1e15
    assert set(formats) == {dtype}
    assert torch.equal(torch.random.get_rng_state(), state)
