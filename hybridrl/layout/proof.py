"""The proof of a weight switch: what arrived is what was sent, by checksums of both sides.

The first proof is of all elements, each later one of a share of every link, which rotates. A link
has a slot in a matrix of ranks. Its sender adds the checksum of its boxes, its receiver subtracts
that of what it holds now, and after one all-reduce every slot must be 0. So a proof moves 8 bytes
a pair of ranks, and all ranks know of a difference. Only then do they tell each other which
parameter it is in.
"""

import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.layout.plan import Plan
from hybridrl.layout.portions import Piece, portions
from hybridrl.layout.weight_switch import Tensors, local_tensors, plain_tensors

BLOCK_ELEMENTS = 2**24
"""Elements that a checksum reads at a time."""

SHARES = 256
"""Proofs after which all elements have been proven once more."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x1E3779B97F4A7C15  # odd: it spreads the weights over 61 bits
_SLOT_BITS = 2**62 - 1  # so that no sum of a slot overflows


class WeightsDiffer(RuntimeError):
    """A rank holds other weights than it should; the message names it and the parameter."""


def checksum(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A number of a tensor's bits in `dtype` and of where they are, [] in int64, on its device.

    It says nothing of strides. In host memory it is a CRC-32, elsewhere `sums_of_bits`: only
    checksums of one kind of device can be compared.
    """
    if tensor.device.type != "cpu":
        return sums_of_bits(tensor, dtype)
    crc = 0
    for _, rows in _row_blocks(tensor, dtype):
        crc = zlib.crc32(rows.contiguous().view(-1).view(torch.uint8).numpy().data, crc)
    return torch.tensor(crc)


def sums_of_bits(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A checksum [] in int64 of reductions alone, for a GPU.

    Each element counts with the sum of a weight for its index in every dimension. That sum is odd,
    so no change of a single element leaves the checksum as it was. The reductions copy what they
    add to int64, of `BLOCK_ELEMENTS` at a time, so they take 8 bytes for each of these.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, rows in _row_blocks(tensor, dtype):
        bits = rows.view(_INTEGERS[rows.element_size()])
        for dim in range(bits.dim()):
            others = [other for other in range(bits.dim()) if other != dim]
            sums = bits.sum(others, dtype=torch.int64) if others else bits.long()
            start = first + 1 if dim == 0 else 1
            weights = torch.arange(start, start + len(sums), device=bits.device)
            weights = weights * (_FACTOR + 2 * dim)
            weights = weights | 1 if dim == 0 else weights & ~1
            total += (sums * weights).sum()
    return total


def _row_blocks(
    tensor: torch.Tensor, dtype: torch.dtype | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of a tensor in `dtype`, at most `BLOCK_ELEMENTS` or one row at a time.

    Each comes with the index of its first row; a scalar is one row. So no copy, to another format
    or to integers, is of the whole tensor.
    """
    tensor = torch.atleast_1d(tensor)
    num_rows = max(1, BLOCK_ELEMENTS // max(1, tensor[:1].numel()))
    for first in range(0, len(tensor), num_rows):
        yield first, tensor[first : first + num_rows].to(dtype or tensor.dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one format have the same bits; NaN is itself, and 0 is not -0."""
    kind = _INTEGERS[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


class SwitchProof:
    """Proves the switches of a plan on one rank; all ranks of the plan make the same calls.

    States: created -> (`begin` -> `received`, once a destination -> `compare`), any number of
    times. Ranks of the plan are those of the world. Weights have `dtype` where they are held, the
    layout's precise ones float32.

    Example: rank 0 sends rank 1 rows 0 to 511 of a matrix. The first proof reads all of them on
    both ranks, the second one rows 0 and 1, the third rows 2 and 3.
    """

    def __init__(self, plan: Plan, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.dtype = rank, dtype
        self._plan = plan
        self._source = local_tensors(plan.src, rank)
        self._destination = local_tensors(plan.dst, rank)
        self._sent = _Links(plan, rank, side=0)
        self._came = _Links(plan, rank, side=1)
        self._number = 0  # of the present proof
        self._sums: dict[int, dict[int, torch.Tensor]] = {}  # of what came, by sender and piece
        self.seconds = 0.0
        """What the present proof has taken on this rank, waits for others included."""
        self.num_bytes = 0
        """What it has read, on both sides."""

    def begin(self, device: torch.device) -> None:
        """Begin a proof, which all ranks compute on this kind of `device`, with its checksums.

        The first one is of everything.
        """
        self._device = device
        self.seconds, self.num_bytes, self._sums = 0.0, 0, defaultdict(dict)

    @torch.no_grad()
    def received(self, tensors: Tensors) -> None:
        """Read this rank's share of destination tensors, of one layer or of all."""
        begun = time.perf_counter()
        for peer, pieces in self._came.share(self._number).items():
            for place, piece in enumerate(pieces):
                if piece.name in tensors:
                    box = tensors[piece.name][self._destination[piece.name].slices(piece.box)]
                    self._sums[peer][place] = checksum(box.to(self._device))
                    self.num_bytes += box.nbytes
        self.seconds += time.perf_counter() - begun

    @torch.no_grad()
    def compare(self, source: Tensors) -> None:
        """Read the share of `source`, and compare it with what every rank has received.

        Raises WeightsDiffer on all ranks, with the first rank that differs and its parameter.
        """
        begun = time.perf_counter()
        due = self._sent.share(self._number)
        names = {piece.name for pieces in due.values() for piece in pieces}
        source = plain_tensors({name: source[name] for name in names})
        sent = {
            peer: [self._of_source(piece, source) for piece in pieces]
            for peer, pieces in due.items()
        }
        came = {
            peer: [self._sums[peer][place] for place in range(len(pieces))]
            for peer, pieces in self._came.share(self._number).items()
        }
        slots = torch.zeros(2 * [self._plan.num_ranks], dtype=torch.int64, device=self._device)
        for peer, sums in sent.items():
            slots[self.rank, peer] += joint_checksum(sums)
        for peer, sums in came.items():
            slots[peer, self.rank] -= joint_checksum(sums)
        if self._plan.num_ranks > 1:
            dist.all_reduce(slots)
        wrong = [
            (sender, receiver)
            for sender, row in enumerate(slots.tolist())
            for receiver, difference in enumerate(row)
            if difference
        ]
        if wrong:
            self._explain(wrong, sent, came)
        self._number += 1
        self.seconds += time.perf_counter() - begun

    def _of_source(self, piece: Piece, source: Tensors) -> torch.Tensor:
        box = source[piece.name][self._source[piece.name].slices(piece.box)]
        dtype = torch.float32 if piece.name in self._plan.dst.precise else self.dtype
        self.num_bytes += box.numel() * dtype.itemsize
        return checksum(box.to(self._device), dtype)

    def _explain(
        self,
        wrong: Sequence[tuple[int, int]],
        sent: Mapping[int, Sequence[torch.Tensor]],
        came: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Raise the error about the `wrong` links, senders and receivers. Collective."""
        sender, receiver = wrong[0]
        own = [int(one) for one in came[sender]] if self.rank == receiver else []
        theirs, names = self._told(own, receiver), list[str]()
        if self.rank == sender:
            pieces = self._sent.share(self._number)[receiver]
            pairs = zip(pieces, sent[receiver], theirs, strict=True)
            names = list(dict.fromkeys(p.name for p, one, other in pairs if int(one) != other))
        names = self._told(names, sender)
        assert names, "a link differs, and none of its pieces"
        raise WeightsDiffer(_message(sender, receiver, names, len(wrong)))

    def _told(self, value: list[Any], rank: int) -> list[Any]:
        """The value of one rank, on all."""
        values = [value]
        if self._plan.num_ranks > 1:
            dist.broadcast_object_list(values, src=rank)
        return values[0]


class _Links:
    """What a rank sends (`side` 0) or receives (1), by peer, and its shares.

    Both ends have the pieces of a link in one order, and cut them alike.
    """

    def __init__(self, plan: Plan, rank: int, side: int) -> None:
        self._pieces: dict[int, list[Piece]] = defaultdict(list)
        for cls in plan.classes:
            for transfer in cls.transfers:
                ends = transfer.senders, transfer.receivers
                for peer in ends[1 - side][ends[side] == rank].tolist():
                    self._pieces[peer] += [Piece(name, transfer.box) for name in cls.names]
        self._shares: dict[int, list[tuple[Piece, ...]]] = {}

    def share(self, number: int) -> dict[int, Sequence[Piece]]:
        """The pieces that the proof of this number reads: at 0 all of them."""
        if number == 0:
            return dict(self._pieces)
        if not self._shares:
            self._shares = {peer: shares(pieces) for peer, pieces in self._pieces.items()}
        return {peer: shares[(number - 1) % SHARES] for peer, shares in self._shares.items()}


def shares(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """The pieces in `SHARES` parts of about equal size, in their order."""
    grain = -(-sum(piece.box.size for piece in pieces) // SHARES)  # whole rows, where they fit
    return portions(pieces, SHARES, grain)


def joint_checksum(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number [] of the checksums of several pieces, in their order; 0 without any."""
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    stacked = torch.stack(list(sums))
    weights = torch.arange(1, len(sums) + 1, device=stacked.device) * 2 + 1
    return (stacked * weights).sum() & _SLOT_BITS


def _message(sender: int, receiver: int, names: Sequence[str], num_links: int) -> str:
    more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    links = f"; so it is between {num_links} pairs of ranks" if num_links > 1 else ""
    return (
        f"the weight switch went wrong: rank {receiver} generates with other values of"
        f" {names[0]}{more} than rank {sender} trained{links}"
    )
