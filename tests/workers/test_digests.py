"""Digests of tensors: their bytes, and their squares summed piece by piece."""

import pytest
import torch

from hybridrl.workers import digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_squares_are_summed_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor has any shape, and its last piece is shorter."""
    tensor = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = digests.digest(tensor)
    monkeypatch.setattr(digests, "_PIECE", 16)
    pieces = digests.digest(tensor.transpose(0, 1).contiguous().transpose(0, 1))
    assert pieces.hash == whole.hash
    assert pieces.square == pytest.approx(float(tensor.double().square().sum()), rel=1e-14)
    assert (pieces.size, digests.digest(tensor)) == (105, pieces)


def test_tensors_without_elements_and_without_fractions() -> None:
    assert digests.digest(torch.empty(0)).square == 0.0
    assert digests.digest(torch.tensor(3.0)).square == 9.0
    assert digests.digest(torch.arange(4)).square is None
