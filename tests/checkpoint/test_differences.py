"""How far two tensors are apart."""

import math

import torch

from hybridrl.checkpoint.differences import difference


def test_equal_bits_are_no_difference() -> None:
    one = torch.tensor([1.0, float("nan"), -2.0])
    assert difference("x", one, one.clone()) is None


def test_the_first_and_the_largest() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    other[0, 2], other[1, 1] = 0.25, -1.5
    apart = difference("x", one, other)
    assert apart is not None
    assert apart.position == (0, 2)
    assert apart.values == (0.0, 0.25)
    assert (apart.differing, apart.size) == (2, 6)
    assert apart.most == 1.5
    assert "the first, [0, 2], is 0 and 0.25" in str(apart)


def test_tokens_of_other_lengths() -> None:
    """The longer one goes on where the other has ended."""
    longer = difference("x", torch.tensor([5, 6, 7]), torch.tensor([5, 6]))
    assert longer is not None
    assert longer.position == (2,)
    assert math.isinf(longer.most)
    other = difference("x", torch.tensor([5, 9, 7]), torch.tensor([5, 6]))
    assert other is not None
    assert (other.position, other.values) == ((1,), (9.0, 6.0))
