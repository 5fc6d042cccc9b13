"""A push: weights go from training ranks to a generation instance on ranks of its own.

No collective spans both sides. Each training rank packs one flat array for each place (pp, tp) of
an instance, once, however many instances there are, and a generation rank takes the arrays of its
place when it has time. So training sends one model in all. The plan is computed once (Perplexity,
"Weight transfer for RL post-training in under 2 seconds").
"""

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from hybridrl.layout.box_copies import PackedBox, copy_all, joined, packed_boxes
from hybridrl.layout.layerwise import Held, Load
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import Parameter, gen_layout
from hybridrl.layout.plan import Plan, plan
from hybridrl.layout.portions import Piece
from hybridrl.layout.proof import SHARES, WeightsDiffer, same_bits, shares
from hybridrl.layout.weight_switch import SwitchStats, Tensors, plain_tensors


class WeightsDamaged(RuntimeError):
    """An array of weights is not the one that was sent."""


@dataclass(frozen=True)
class PushPlan:
    """The boxes that each training rank sends to each place of an instance.

    `plan` numbers the instance's ranks behind those of training, place by place (`pp` x `tp`).

    Example: FSDP over two ranks, tp 2. Each training rank has half of the rows of a matrix, and
    sends half of the columns of these to either place.
    """

    plan: Plan

    @classmethod
    def make(
        cls,
        src: Layout,
        parameters: Sequence[Parameter],
        pp: int,
        tp: int,
        num_layers: int,
        vocab_multiple: int = 1,
        ep: int = 1,
    ) -> "PushPlan":
        """From the training layout `src`; see `gen_layout` for the instance's."""
        ranks = range(src.mesh.size, src.mesh.size + pp * tp)
        mesh = Mesh((("instance", 1), ("pp", pp), ("tp", tp)), tuple(ranks))
        return cls(plan(src, gen_layout(parameters, mesh, num_layers, vocab_multiple, ep)))

    @property
    def num_places(self) -> int:
        """Ranks of an instance."""
        return self.plan.dst.mesh.size

    @property
    def elements(self) -> int:
        """Elements that the places of an instance have in all: what a push moves at least."""
        return int(self.plan.least.sum())

    def pieces(self, sender: int) -> list[list[Piece]]:
        """What a training rank sends to each place, in the order of its array."""
        first = self.plan.src.mesh.size
        pieces: list[list[Piece]] = [[] for _ in range(self.num_places)]
        for move in self.plan.moves(sender):
            pieces[move.dst - first].append(Piece(move.name, move.box))
        return pieces

    def senders(self, place: int) -> dict[int, list[Piece]]:
        """The training ranks that send something to a place, and what."""
        of_sender: dict[int, list[Piece]] = {}
        for move in self.plan.moves(self.plan.src.mesh.size + place):
            of_sender.setdefault(move.src, []).append(Piece(move.name, move.box))
        return dict(sorted(of_sender.items()))


@dataclass(frozen=True, slots=True)
class WeightArray:
    """Weights of a version that one training rank sends to one place; `data` is one row of bytes.

    `checksum` is the CRC-32 of the bytes.
    """

    version: int
    sender: int
    data: np.ndarray
    checksum: int

    def check(self, version: int, num_bytes: int) -> None:
        """Raise WeightsDamaged for another version, size, or contents."""
        where = f"weights of version {version} from training rank {self.sender}"
        if self.version != version:
            raise WeightsDamaged(f"{where}: the array is of version {self.version}")
        if self.data.size != num_bytes:
            raise WeightsDamaged(f"{where}: {self.data.size} bytes, wanted {num_bytes}")
        if checksum(self.data) != self.checksum:
            raise WeightsDamaged(f"{where}: the bytes are not those that were sent")


Again = Callable[[int, str], WeightArray]
"""Gets the array of a training rank once more, and is told why."""


class _RowProof:
    """Compares what an array has with the tensors that it is of: at first all, then shares.

    A proof of each array reads one of `SHARES` parts of it, which follow each other.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        local: Mapping[str, LocalTensor],
        whole: list[PackedBox],
    ) -> None:
        """`whole` are the boxes of all `pieces`."""
        self._pieces, self._local, self._whole = pieces, local, whole
        self._shares: list[list[PackedBox]] = []

    def differing(self, number: int, tensors: Tensors, row: torch.Tensor) -> str | None:
        """The first parameter of `tensors`, all of them or a layer's, that is not as in `row`."""
        for box in self._boxes(number):
            if box.name in tensors:
                held = box.in_tensor(tensors)
                if not same_bits(held.to(row.dtype), box.in_row(row).to(held.device)):
                    return box.name
        return None

    def num_bytes(self, number: int, itemsize: int) -> int:
        """Bytes that a proof reads on either side."""
        return sum(box.count * prod(box.shape) for box in self._boxes(number)) * itemsize

    def _boxes(self, number: int) -> list[PackedBox]:
        if number == 0:
            return self._whole
        if not self._shares:
            start = 0
            for share in shares(self._pieces):
                self._shares.append(packed_boxes(share, self._local, start))
                start += sum(piece.box.size for piece in share)
        return self._shares[(number - 1) % SHARES]


class PushSource:
    """Packs the arrays of one training rank, and proves that they have what its shards have."""

    def __init__(self, push: PushPlan, rank: int, dtype: torch.dtype) -> None:
        self.rank, self.dtype = rank, dtype
        layout = push.plan.src
        local = {name: LocalTensor(layout.local(name, rank)) for name in layout.rules}
        self.names = tuple(layout.rules)
        """The parameters that are sent."""
        pieces = push.pieces(rank)
        self._boxes = [joined(packed_boxes(of_place, local)) for of_place in pieces]
        own = zip(pieces, self._boxes, strict=True)
        self._proofs = [_RowProof(of_place, local, boxes) for of_place, boxes in own]
        self._number = 0  # of pushes before this one
        self.proof_seconds = 0.0
        """What the proof of the last push has taken."""
        self.sizes = [sum(piece.box.size for piece in of_place) for of_place in pieces]
        """Elements by place."""
        self.bytes_theory = push.elements * dtype.itemsize

    @torch.no_grad()
    def pack(self, source: Tensors, version: int) -> list[WeightArray | None]:
        """The arrays by place, on the host; None where the rank sends nothing.

        `source` has the rank's shards by name, as in `WeightSwitch.switch`. Raises WeightsDiffer
        where an array has other values.
        """
        source = plain_tensors(source)
        arrays: list[WeightArray | None] = []
        self.proof_seconds = 0.0
        for boxes, proof, size in zip(self._boxes, self._proofs, self.sizes, strict=True):
            if not size:
                arrays.append(None)
                continue
            device = source[boxes[0].name].device
            row = torch.empty(size, dtype=self.dtype, device=device)
            copy_all((box.in_row(row), box.in_tensor(source)) for box in boxes)  # casts
            on_host = row.cpu()
            begun = time.perf_counter()
            if name := proof.differing(self._number, source, on_host):
                raise WeightsDiffer(
                    f"the push of version {version} went wrong: training rank {self.rank} packed"
                    f" other values of {name} than it trained"
                )
            self.proof_seconds += time.perf_counter() - begun
            data = on_host.view(torch.uint8).numpy()
            arrays.append(WeightArray(version, self.rank, data, checksum(data)))
        self._number += 1
        return arrays


class PushTarget:
    """Takes the arrays of one place into the tensors of a rollout engine, and proves it.

    The bytes of an array are those that were sent, by their CRC-32. Then what the engine holds is
    compared with them: all of it at the first load, later a share that rotates.
    """

    def __init__(self, push: PushPlan, place: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        layout = push.plan.dst
        rank = push.plan.src.mesh.size + place
        self._local = {name: LocalTensor(layout.local(name, rank)) for name in layout.rules}
        self._boxes: dict[int, list[PackedBox]] = {}
        self._sizes: dict[int, int] = {}
        self._proofs: dict[int, _RowProof] = {}
        self._place, self._number = place, 0  # of loads before this one
        for sender, pieces in push.senders(place).items():
            self._boxes[sender] = joined(packed_boxes(pieces, self._local))
            self._proofs[sender] = _RowProof(pieces, self._local, self._boxes[sender])
            self._sizes[sender] = sum(piece.box.size for piece in pieces)
        self.bytes_theory = int(push.plan.least[rank]) * dtype.itemsize

    @property
    def senders(self) -> tuple[int, ...]:
        """The training ranks whose arrays are wanted."""
        return tuple(self._boxes)

    @torch.no_grad()
    def load(
        self,
        arrays: Iterable[WeightArray],
        version: int,
        load: Load,
        again: Again | None = None,
        held: Held | None = None,
    ) -> SwitchStats:
        """Let `load` fill an engine's tensors from the arrays of all senders.

        An array that is missing or damaged comes once more from `again`. What an engine has `held`
        after `load`, or without that what its tensors were filled with, is proven. Raises
        WeightsDamaged before anything is loaded, ValueError where `load` leaves a parameter out,
        and WeightsDiffer where the engine has other values.
        """
        begun = time.perf_counter()
        rows = {
            sender: from_dlpack(array.data).view(self.dtype)  # takes read-only arrays
            for sender, array in self._checked(arrays, version, again).items()
        }
        left = {name for name, local in self._local.items() if local.shape is not None}
        seconds = time.perf_counter() - begun
        stats = SwitchStats("push", self.bytes_theory, seconds_wait=seconds)
        stats.bytes_received = sum(self._sizes.values()) * self.dtype.itemsize

        def prove(tensors: Tensors) -> None:
            start = time.perf_counter()
            self._prove(tensors, rows, version)
            stats.proof_seconds += time.perf_counter() - start

        def fill(tensors: Tensors, names: Sequence[str] | None = None) -> None:
            wanted = None if names is None else set(names)
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            for sender, boxes in self._boxes.items():
                for box in boxes:
                    if wanted is None or box.name in wanted:
                        copies.append((box.in_tensor(tensors), box.in_row(rows[sender])))
            copy_all(copies)
            left.difference_update(left if wanted is None else wanted)
            if names is not None:
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                stats.bytes_held = max(stats.bytes_held, num_bytes)
            if held is None:
                prove(tensors)

        load(fill)
        if left:
            raise ValueError(f"{len(left)} parameters of the push were left out")
        if held is not None:
            prove(held())
        itemsize = self.dtype.itemsize
        stats.proof_bytes = 2 * sum(
            p.num_bytes(self._number, itemsize) for p in self._proofs.values()
        )
        self._number += 1
        total = time.perf_counter() - begun - stats.proof_seconds
        return replace(stats, seconds=total, seconds_copy=total - seconds)

    def _prove(self, tensors: Tensors, rows: Mapping[int, torch.Tensor], version: int) -> None:
        """Compare a share of `tensors`, all of them or a layer's, with the rows by sender."""
        for sender, proof in self._proofs.items():
            if name := proof.differing(self._number, tensors, rows[sender]):
                what = f"the load of version {version} went wrong"
                raise WeightsDiffer(
                    f"{what}: place {self._place} of an instance generates with other values of"
                    f" {name} than training rank {sender} pushed"
                )

    def _checked(
        self, arrays: Iterable[WeightArray], version: int, again: Again | None
    ) -> dict[int, WeightArray]:
        """The arrays by sender, all of which are those that were sent."""
        of_sender = {array.sender: array for array in arrays}
        for sender, size in self._sizes.items():
            num_bytes = size * self.dtype.itemsize
            try:
                if sender not in of_sender:
                    where = f"weights of version {version} from training rank {sender}"
                    raise WeightsDamaged(f"{where}: none have come")
                of_sender[sender].check(version, num_bytes)
            except WeightsDamaged as error:
                if again is None:
                    raise
                of_sender[sender] = again(sender, str(error))
                of_sender[sender].check(version, num_bytes)
        return {sender: of_sender[sender] for sender in self._sizes}


def checksum(data: np.ndarray) -> int:
    """The CRC-32 of a row of bytes."""
    return zlib.crc32(data.data)


def bytes_by_sender(push: PushPlan, itemsize: int) -> Mapping[int, int]:
    """Bytes that each training rank sends in a push: one model in all."""
    ranks = push.plan.src.mesh.ranks
    return {
        rank: sum(p.box.size for of_place in push.pieces(rank) for p in of_place) * itemsize
        for rank in ranks
    }
