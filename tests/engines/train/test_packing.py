"""A row that is packed as a whole equals one that is put together sequence by sequence."""

import math

import pytest
import torch

from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import pack, scored_fields, scored_positions

CPU = torch.device("cpu")


def sequences(masked: bool) -> list[TrainSequence]:
    """Random ones, two of equal length, one without a response, every second one with a mask."""
    random = torch.Generator().manual_seed(3)
    members = []
    for number, (length, response) in enumerate([(7, 3), (4, 2), (9, 8), (4, 1), (5, 0)]):
        mask = torch.rand(response, generator=random) > 0.5 if masked and number % 2 else None
        fields = {"each": torch.randn(response, generator=random), "one": 0.1 * number}
        ids = torch.randint(0, 99, (length,), generator=random)
        members.append(TrainSequence(ids, response, fields, mask))
    return members


def one_by_one(
    members: list[TrainSequence], trained_only: bool
) -> tuple[list[int], dict[str, torch.Tensor], list[int]]:
    """Order, tensors and counts of a row, by a loop over its sequences."""
    order = sorted(range(len(members)), key=lambda i: (len(members[i].ids), i))
    predicting, targets, each, one, counts, start = [], [], [], [], [], 0
    for member in [members[i] for i in order]:
        first = len(member.ids) - member.response_tokens
        scored = [
            i
            for i in range(member.response_tokens)
            if not trained_only or member.mask is None or member.mask[i]
        ]
        predicting += [start + first + i - 1 for i in scored]
        targets += [member.ids[first + i] for i in scored]
        each += [member.fields["each"][i] for i in scored]
        one += [member.fields["one"]] * len(scored)
        counts.append(len(scored))
        start += len(member.ids)
    row = {
        "ids": torch.cat([members[i].ids for i in order]),
        "position_ids": torch.cat([torch.arange(len(members[i].ids)) for i in order]),
        "predicting": torch.tensor(predicting),
        "targets": torch.tensor(targets),
        "each": torch.tensor(each),
        "one": torch.tensor(one, dtype=torch.float32),
    }
    return order, row, counts


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("trained_only", [False, True])
def test_a_row_is_that_of_a_loop(masked: bool, trained_only: bool) -> None:
    members = sequences(masked)
    order, wanted, counts = one_by_one(members, trained_only)
    batch = pack(members, Attention.torch, CPU, trained_only)
    assert (batch.order, batch.counts) == (tuple(order), tuple(counts))
    assert batch.sequence.tolist() == [
        i for i, n in zip(order, counts, strict=True) for _ in range(n)
    ]
    fields = scored_fields(members, batch, ("each", "one"))
    got = {name: getattr(batch, name).flatten() for name in wanted if name not in fields} | fields
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_a_row_is_filled_up() -> None:
    members = sequences(masked=True)
    plain = pack(members, Attention.torch, CPU, True)
    filled = pack(members, Attention.torch, CPU, True, total_tokens=32)
    filler = filled.order.index(-1)
    assert filled.ids.shape == (1, 32)
    assert (filled.order[:filler] + filled.order[filler + 1 :]) == plain.order
    assert filled.counts[filler] == 0
    assert torch.equal(filled.targets, plain.targets)
    assert filled.position_ids.max() == 8  # as without it
    for name in ("each", "one"):
        of_both = [scored_fields(members, row, (name,))[name] for row in (plain, filled)]
        assert torch.equal(*of_both)


def test_no_sequences_make_a_row_of_one_token() -> None:
    batch = pack([], Attention.torch, CPU)
    assert batch.ids.tolist() == [[0]]
    assert (batch.order, batch.counts, len(batch.predicting)) == ((), (), 0)
    assert scored_fields([], batch, ("one",))["one"].shape == (0,)


def test_fields_that_some_lack_are_replaced() -> None:
    members = sequences(masked=False)
    del members[1].fields["each"]
    batch = pack(members, Attention.torch, CPU)
    values = scored_fields(members, batch, ("each",), missing=math.nan)["each"]
    assert values.isnan().sum() == members[1].response_tokens
    with pytest.raises(ValueError, match="the loss needs the field 'each' of every sequence"):
        scored_fields(members, batch, ("each",))


@pytest.mark.parametrize(("response", "mask"), [(4, None), (-1, None), (2, 3)])
def test_what_cannot_be_scored_is_refused(response: int, mask: int | None) -> None:
    ones = None if mask is None else torch.ones(mask, dtype=torch.bool)
    sequence = TrainSequence(torch.arange(4), response, mask=ones)
    for call in (
        lambda: pack([sequence], Attention.torch, CPU, True),
        lambda: scored_positions(sequence, True),
    ):
        with pytest.raises(ValueError, match="response_tokens"):
            call()
