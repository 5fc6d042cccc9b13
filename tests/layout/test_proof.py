"""The proof of a weight switch: what it reads, and what it finds, on real processes."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numbered_layouts import numbered, own, parameters

from hybridrl.layout import proof, weight_switch
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import Fill, LayerwiseSwitch
from hybridrl.layout.plan import Plan
from hybridrl.layout.proof import WeightsDiffer, checksum, sums_of_bits
from hybridrl.layout.switching import plan_switch

CPU = torch.device("cpu")
Ranks = Callable[..., list[Any]]
CASES = {
    2: [(TrainAxes(fsdp=2), 1, 2), (TrainAxes(replicas=2), 2, 1), (TrainAxes(tp=2), 1, 1)],
    4: [
        (TrainAxes(fsdp=4), 1, 2),
        (TrainAxes(replicas=2, fsdp=2), 1, 4),
        (TrainAxes(pp=2, tp=2), 2, 1),
    ],
}


def plan_of(axes: TrainAxes, pp: int, tp: int) -> Plan:
    return plan_switch(parameters(), axes, pp, tp, vocab_multiple=4).plan


# What a checksum says


Checksum = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("checksum", [checksum, sums_of_bits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 6), (3, 4, 5)])
def test_a_checksum_changes_with_every_bit(
    checksum: Checksum, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = tensor.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    before = checksum(tensor)
    for index in range(tensor.numel()):
        for bit in range(8 * dtype.itemsize - 1):
            flat = bits.clone().reshape(-1)
            flat[index] ^= 1 << bit
            assert checksum(flat.view(dtype).view(shape)) != before, (index, bit)
    assert checksum(tensor) == before


@pytest.mark.parametrize("checksum", [checksum, sums_of_bits])
def test_a_checksum_knows_places_and_no_strides(checksum: Checksum) -> None:
    tensor = torch.arange(30.0).view(5, 6)
    swapped = tensor[:, [0, 2, 1, 3, 4, 5]]
    assert checksum(swapped) != checksum(tensor)
    assert checksum(tensor[[1, 0, 2, 3, 4]]) != checksum(tensor)
    wide = torch.zeros(5, 9)
    wide[:, 2:8] = tensor
    assert checksum(wide[:, 2:8]) == checksum(tensor)


@pytest.mark.parametrize("checksum", [checksum, sums_of_bits])
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (3, 4, 5)])
def test_a_checksum_is_the_same_in_blocks_of_rows(
    checksum: Callable[..., torch.Tensor], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any number of blocks, each of which is cast alone."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = checksum(tensor.bfloat16())
    for elements in (1, 2, 13, 40):
        monkeypatch.setattr(proof, "BLOCK_ELEMENTS", elements)
        sizes = [rows.numel() for _, rows in proof._row_blocks(tensor, None)]
        assert max(sizes) <= max(elements, tensor[:1].numel() if shape else 1)
        assert sum(sizes) == tensor.numel()
        assert checksum(tensor, torch.bfloat16) == whole


# What is proven


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_shares_cover_every_element_once(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first proof, of all of a link, and both ends read the same pieces."""
    monkeypatch.setattr(proof, "SHARES", 5)
    there = plan_of(*case)
    ends = [[proof._Links(there, rank, side) for rank in range(there.num_ranks)] for side in (0, 1)]
    for number in range(8):
        for sender, sent in enumerate(ends[0]):
            for receiver, pieces in sent.share(number).items():
                assert tuple(pieces) == tuple(ends[1][receiver].share(number)[sender])
    for links in ends[0]:
        shares = [_elements(links.share(number)) for number in range(1, 6)]
        assert sum(shares, Counter()) == _elements(links.share(0))


def _elements(pieces_of_peers: dict[int, Any]) -> Counter[tuple[Any, ...]]:
    """How often each element of a parameter is among the pieces, by peer."""
    return Counter(
        (peer, piece.name, *index)
        for peer, pieces in pieces_of_peers.items()
        for piece in pieces
        for index in product(*map(range, piece.box.start, piece.box.stop))
    )


class Holding:
    """An engine with its weights in place, which loads them only where it `obeys`."""

    def __init__(self, there: Plan, dtype: torch.dtype) -> None:
        shards = own(there.dst, numbered(there.dst), dist.get_rank())
        self.weights = {n: torch.zeros_like(shard, dtype=dtype) for n, shard in shards.items()}
        self.obeys = True

    def load(self, fill: Fill) -> None:
        """See `RolloutEngine`."""
        fill(self.weights if self.obeys else {n: x.clone() for n, x in self.weights.items()})

    def held(self) -> dict[str, torch.Tensor]:
        """What it generates with."""
        return self.weights


def rig(
    case: tuple[Any, ...], dtype: torch.dtype
) -> tuple[LayerwiseSwitch, dict[str, torch.Tensor], Holding]:
    there, rank = plan_of(*case), dist.get_rank()
    source = own(there.src, numbered(there.src), rank)
    return LayerwiseSwitch(there, rank, dtype, CPU), source, Holding(there, dtype)


def healthy(cases: list[tuple[Any, ...]]) -> list[list[int]]:
    """Bytes that each of several proofs of every case has read; none of them differs."""
    read = []
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16):
            switch, source, engine = rig(case, dtype)
            scaled = [{n: t * factor for n, t in source.items()} for factor in range(1, 12)]
            read.append(
                [switch.switch(one, engine.load, engine.held).proof_bytes for one in scaled]
            )
    return read


@pytest.mark.layouts
@pytest.mark.parametrize("size", [2, 4])
def test_switches_that_are_right_are_proven(ranks: Ranks, size: int) -> None:
    """The first one whole; of the later ones all together read less than that once."""
    for of_rank in ranks(size, healthy, CASES[size]):
        for whole, *shares in of_rank:
            assert 0 < sum(shares) < whole


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except WeightsDiffer as error:
        return str(error)
    return ""


def flipped(case: tuple[Any, ...]) -> str:
    """The error of a switch in which one bit changes on its way to rank 1."""
    switch, source, engine = rig(case, torch.float32)
    kept = weight_switch._ExchangeRound.unpack

    def unpack(
        self: weight_switch._ExchangeRound, slot: torch.Tensor, destination: weight_switch.Tensors
    ) -> None:
        if dist.get_rank() == 1 and self.unpacked:
            slot.view(torch.int32)[self.unpacked[0].start] ^= 1 << 12
        kept(self, slot, destination)

    weight_switch._ExchangeRound.unpack = unpack  # type: ignore[method-assign]
    try:
        return error_of(lambda: switch.switch(source, engine.load, engine.held))
    finally:
        weight_switch._ExchangeRound.unpack = kept  # type: ignore[method-assign]


def kept_old(case: tuple[Any, ...]) -> list[str]:
    """The errors of two switches, where rank 1 does not take the weights of the second."""
    switch, source, engine = rig(case, torch.bfloat16)
    first = error_of(lambda: switch.switch(source, engine.load, engine.held))
    engine.obeys = dist.get_rank() != 1
    doubled = {name: tensor * 2 for name, tensor in source.items()}
    return [first, error_of(lambda: switch.switch(doubled, engine.load, engine.held))]


@pytest.mark.layouts
def test_a_flipped_bit_and_old_weights_are_named(ranks: Ranks) -> None:
    """By rank and parameter, and on all ranks alike, so that none waits for another."""
    case = CASES[2][0]
    (error, other) = ranks(2, flipped, case)
    assert error == other
    assert "rank 1 generates with other values of" in error
    assert "than rank 0 trained" in error
    first, second = ranks(2, kept_old, case)
    assert first == second
    assert first[0] == ""
    assert "rank 1 generates with other values of" in first[1]
    names = plan_of(*case).dst.rules
    assert any(f" {name} " in f"{error} " or f" {name}; " in error for name in names)


def repacked(case: tuple[Any, ...]) -> str:
    """The error where the tensors that an engine repacks differ as it is filled."""
    switch, source, engine = rig(case, torch.float32)
    name = next(iter(switch.plan.dst.rules))

    def load(fill: Fill) -> None:
        def spoilt(tensors: weight_switch.Tensors, names: Any = None) -> None:
            if dist.get_rank() == 0:
                source[name] = source[name] + 1
            fill(tensors, names)
            if dist.get_rank() == 0:
                source[name] = source[name] - 1

        spoilt(engine.weights)

    return error_of(lambda: switch.switch(source, load))


def test_one_rank_proves_what_it_copies(ranks: Ranks) -> None:
    case = (TrainAxes(), 1, 1)
    name = next(iter(plan_of(*case).dst.rules))
    (error,) = ranks(1, repacked, case)
    assert f"rank 0 generates with other values of {name} than rank 0 trained" in error
