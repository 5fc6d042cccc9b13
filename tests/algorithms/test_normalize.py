"""Token weights: verl's aggregation, and the same however the batch is cut."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.algorithms.normalize import factor_of_totals, token_weights

MODES = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


@pytest.mark.parametrize("normalize", sorted(MODES))
@pytest.mark.parametrize("lengths", [(1,), (5, 5), (3, 9, 1, 12), (4, 0, 2)])
def test_agrees_with_verl(core_algos: ModuleType, normalize: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    width = 16
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    losses = torch.randn(len(lengths), width, dtype=torch.float64)
    expected = core_algos.agg_loss(losses, mask.double(), MODES[normalize])
    used = [n for n in lengths if n]
    weights = token_weights(lengths, normalize, sum(used), len(used), width)
    assert weights.shape == (sum(lengths),)
    ours = (weights.double() * losses[mask]).sum()
    torch.testing.assert_close(ours, expected, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("normalize", sorted(MODES))
def test_micro_batches_add_up(normalize: str) -> None:
    lengths = torch.tensor([3, 9, 1, 12, 4])
    totals = (int(lengths.sum()), len(lengths), 12)
    whole = token_weights(lengths, normalize, *totals)
    parts = [
        token_weights(micro_batch, normalize, *totals) for micro_batch in (lengths[:2], lengths[2:])
    ]
    assert torch.equal(torch.cat(parts), whole)
    if normalize != "constant":
        assert whole.sum().item() == pytest.approx(1.0, rel=1e-6)


def test_nothing_to_train() -> None:
    assert token_weights((), "sequence", 0, 0, 0).shape == (0,)
    assert token_weights((0, 0), "token", 0, 0, 0).shape == (0,)


@pytest.mark.parametrize("normalize", sorted(MODES))
def test_totals_are_a_factor(normalize: str) -> None:
    """They may be applied last, to a sum of gradients with the weights of totals 1."""
    lengths, totals = torch.tensor([3, 9, 1, 12, 4]), (29, 5, 12)
    factor = factor_of_totals(normalize, *totals)
    assert factor == {"token": 1 / 29, "sequence": 1 / 5, "constant": 1 / 60}[normalize]
    known = token_weights(lengths, normalize, *totals)
    torch.testing.assert_close(factor * token_weights(lengths, normalize, 1, 1, 1), known)
    assert ClippedLoss(normalize=normalize).totals_are_factor


def test_of_a_user_s_own_normalization_that_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def weights(*args):\n    raise AssertionError\n")
    normalize = f"{file}:weights"
    assert not ClippedLoss(normalize=normalize).totals_are_factor
    with pytest.raises(AssertionError, match="may be more than a factor"):
        factor_of_totals(normalize, 29, 5, 12)
