"""How far two tensors are apart."""

import math
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_saver

from hybridrl.checkpoint.differences import difference, weight_difference


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


def test_weights_of_two_models(tmp_path: Path) -> None:
    """Parameters of both are compared; other sizes and missing ones are said, not compared."""
    one = {"a": torch.zeros(2, 3), "b": torch.ones(4), "c": torch.zeros(2, 2), "d": torch.ones(3)}
    other = {"a": torch.zeros(2, 3), "b": torch.ones(5), "c": torch.ones(2, 2), "e": torch.ones(3)}
    for name, weights in (("one", one), ("other", other)):
        state = {f"model/{key}": value for key, value in weights.items()} | {"optim/step": 3}
        state_dict_saver.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no lines between those of `hybridrl blame`
        apart = {x.name: x for x in weight_difference(tmp_path / "one", tmp_path / "other")}
    assert apart.keys() == {"b", "c", "d", "e"}
    assert str(apart["b"]) == "b: [4] in the first run, [5] in the second"
    assert str(apart["d"]) == "d: [3] in the first run, missing in the second"
    assert str(apart["e"]) == "e: missing in the first run, [3] in the second"
    assert (apart["c"].differing, apart["c"].most) == (4, 1.0)
    assert math.isinf(apart["b"].most)


def test_matrices_of_other_sizes() -> None:
    apart = difference("x", torch.zeros(2, 3), torch.zeros(2, 4))
    assert apart is not None
    assert apart.shapes == ((2, 3), (2, 4))
