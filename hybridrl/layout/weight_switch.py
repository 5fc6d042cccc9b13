"""The weight switch (HybridFlow: resharding): a plan executed in buckets."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.plan import Plan
from hybridrl.layout.process_groups import shared_group
from hybridrl.layout.transfer_rounds import Exchange, Gather, Piece, gather_ranks, transfer_rounds

logger = logging.getLogger(__name__)

# torch 2.13 renamed it and warns under the old name, which older versions alone know.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

BUCKET_BYTES = 16 * 2**20
"""Default size of a bucket; two are in flight."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class SwitchStats:
    """Cost of one switch on this rank."""

    path: str
    """Kinds of rounds: gather, exchange, both (gather+exchange), or local."""
    bytes_theory: int
    """Lower bound on the bytes that the rank receives: `Plan.least`."""
    bytes_received: int = 0
    """Bytes in the buffers that came from other ranks."""
    scratch_bytes: int = 0
    """Most extra memory at a time: buckets."""
    bytes_held: int = 0
    """Largest size of temporary tensors that an engine repacks (see `LayerwiseSwitch`)."""
    seconds: float = 0.0
    """The whole switch."""
    seconds_pack: float = 0.0
    """Copies and casts into buckets and within the rank. On GPUs, their launch."""
    seconds_wait: float = 0.0
    """Waiting for the wire. On GPUs, until the wait is queued."""
    seconds_copy: float = 0.0
    """Copies out of buckets. On GPUs, their launch."""


def gather_groups(plan: Plan, rank: int) -> list[dist.ProcessGroup]:
    """The process groups of the rank's all-gathers, for `warm_up`; all ranks of the plan call it.

    The plan's ranks are those of the world. A `WeightSwitch` of the plan uses the same groups.
    """
    return [shared_group(ranks) for ranks in gather_ranks(plan, rank)]


class WeightSwitch:
    """Moves the weights of one rank from the source layout of a plan to its destination layout.

    All ranks of the plan make one and call `switch` together, any number of times; the rounds are
    computed once. Ranks of the plan are those of `group` (by default, of all processes). It must be
    warm (`process_groups.warm_up`): under NCCL its first operation cannot be an exchange. Weights
    are sent in `dtype`, the generation weights'. Scratch is allocated during a switch: two rounds
    are in flight, each of at most `bucket_bytes`.

    Example: `source["w"]` is rows 2 and 3 of a [4, 8] matrix, `destination["w"]` is all of it. Rank
    1 copies two rows, sends them to rank 0, and receives rows 0 and 1.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
        least_gather: int = 3,
    ) -> None:
        self.dtype = dtype
        self.source = _locals(plan.src, rank)
        self.destination = _locals(plan.dst, rank)
        rounds = transfer_rounds(plan, rank, max(1, bucket_bytes // dtype.itemsize), least_gather)
        self._copies = list(
            zip(
                _row(rounds.copies, self.source), _row(rounds.copies, self.destination), strict=True
            )
        )
        sides = self.source, self.destination
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks in {g.ranks: 0 for g in rounds.gathers}:
            members = [dist.get_global_rank(group, r) if group else r for r in ranks]
            groups[ranks] = shared_group(members)
        self._rounds: list[_Round] = [
            *(
                _GatherRound(gather, rank, *sides, groups[gather.ranks])
                for gather in rounds.gathers
            ),
            *(_ExchangeRound(exchange, *sides, group) for exchange in rounds.exchanges),
        ]
        used = (["gather"] if rounds.gathers else []) + (["exchange"] if rounds.exchanges else [])
        self.path = "+".join(used) or "local"
        self.bytes_theory = int(plan.least[rank]) * dtype.itemsize
        logger.debug(
            "switch of %d parameters: %d gathers in %d groups, %d exchanges, at least %d bytes",
            len(plan.dst.rules),
            len(rounds.gathers),
            len({gather.ranks for gather in rounds.gathers}),
            len(rounds.exchanges),
            self.bytes_theory,
        )

    def switch(self, source: Tensors, destination: Tensors, *, waits: bool = True) -> SwitchStats:
        """Fill `destination` from `source`; every rank of the plan calls it.

        Without `waits` the host does not wait for a GPU, and `seconds` count launches alone.

        Both hold the rank's shard of each parameter under its name, as `layout.local(name, rank)`
        says, padding included: its boxes are concatenated (`LocalTensor`). A parameter of which
        the rank holds nothing may be missing. `source` may hold DTensors; `destination` is written
        in place and may hold views of fused tensors. A second, tied name must share the storage.

        Afterwards each destination equals its boxes of the parameter, cast to `dtype`, bit for bit;
        padding in it is unchanged. Raises ValueError, before anything is sent, if a name is
        missing or a shape or dtype is not the layout's.
        """
        begun = time.perf_counter()
        source = {name: _plain(tensor) for name, tensor in source.items()}
        destination = {name: _plain(tensor) for name, tensor in destination.items()}
        self._check(source, destination)
        stats = SwitchStats(self.path, self.bytes_theory)
        logger.debug("weights move in %d rounds (%s)", len(self._rounds), self.path)
        device = next(iter((*destination.values(), *source.values())), torch.empty(0)).device
        # Scratch: two slots, so that one round is packed while the other is in flight.
        slots = [
            torch.empty(
                max((r.scratch for r in rounds), default=0), dtype=self.dtype, device=device
            )
            for rounds in (self._rounds[0::2], self._rounds[1::2])
        ]
        work: list[list[dist.Work]] = []
        stats.scratch_bytes = sum(slot.numel() for slot in slots) * self.dtype.itemsize
        # Pipeline: pack and start a round, then copy the previous one out.
        for i, round in enumerate(self._rounds):
            begun_round = time.perf_counter()
            round.pack(slots[i % 2], source)
            stats.seconds_pack += time.perf_counter() - begun_round
            work.append(round.start(slots[i % 2]))
            if i:  # the last round is copied out while this one is sent
                self._finish(i - 1, work, slots, destination, stats)
            else:
                self._copy_kept(source, destination, stats)
        if self._rounds:
            self._finish(len(self._rounds) - 1, work, slots, destination, stats)
        else:
            self._copy_kept(source, destination, stats)
        if waits and device.type == "cuda":
            # So that `seconds` counts work, not launches: its own, and not what leaves meanwhile.
            torch.cuda.current_stream(device).synchronize()
        stats.seconds = time.perf_counter() - begun
        logger.debug(
            "weights have moved: %d bytes received, %.3f s", stats.bytes_received, stats.seconds
        )
        return stats

    def _finish(
        self,
        number: int,
        work: list[list[dist.Work]],
        slots: Sequence[torch.Tensor],
        destination: Tensors,
        stats: SwitchStats,
    ) -> None:
        begun = time.perf_counter()
        for request in work[number]:
            request.wait()
        waited = time.perf_counter()
        self._rounds[number].unpack(slots[number % 2], destination)
        stats.bytes_received += self._rounds[number].received * self.dtype.itemsize
        stats.seconds_wait += waited - begun
        stats.seconds_copy += time.perf_counter() - waited

    def _copy_kept(self, source: Tensors, destination: Tensors, stats: SwitchStats) -> None:
        begun = time.perf_counter()
        for source_box, destination_box in self._copies:
            destination_box.of(destination).copy_(source_box.of(source))
        stats.seconds_pack += time.perf_counter() - begun

    def _check(self, source: Tensors, destination: Tensors) -> None:
        for tensors, local, side in (
            (source, self.source, "trained"),
            (destination, self.destination, "generated"),
        ):
            for name, expected in local.items():
                wanted, got = expected.shape, tensors.get(name)
                if wanted is None and (got is None or not got.numel()):
                    continue
                if got is None:
                    raise ValueError(f"{name}: no {side} tensor of that name; wanted {wanted}")
                if tuple(got.shape) != wanted:
                    raise ValueError(f"{name}: {side} {tuple(got.shape)}, the layout says {wanted}")
        filled = set()
        for name in self.destination.keys() & destination.keys():
            tensor = destination[name]
            if tensor.dtype != self.dtype:
                raise ValueError(f"{name}: generated in {tensor.dtype}, the wire has {self.dtype}")
            filled.add(tensor.data_ptr())
        for name in destination.keys() - self.destination.keys():
            if destination[name].data_ptr() not in filled:
                raise ValueError(f"{name} is generated with, but no trained parameter fills it")
        for name in source.keys() - self.source.keys():
            raise ValueError(f"{name} is trained, but generation has no parameter of that name")


@dataclass(frozen=True, slots=True)
class _PackedBox:
    """A box: `index` in a rank's tensor of the parameter, [start, stop) in a row of a bucket."""

    name: str
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    start: int
    stop: int

    def of(self, tensors: Tensors) -> torch.Tensor:
        """The box in the rank's tensor."""
        return tensors[self.name][self.index]

    def pack(self, row: torch.Tensor, source: Tensors) -> None:
        row[self.start : self.stop].view(self.shape).copy_(self.of(source))  # casts

    def unpack(self, row: torch.Tensor, destination: Tensors) -> None:
        self.of(destination).copy_(row[self.start : self.stop].view(self.shape))


def _row(pieces: Iterable[Piece], local: Mapping[str, LocalTensor]) -> list[_PackedBox]:
    """The pieces, packed into a row one after another."""
    boxes, start = [], 0
    for piece in pieces:
        stop = start + piece.box.size
        index = local[piece.name].slices(piece.box)
        boxes.append(_PackedBox(piece.name, index, piece.box.shape, start, stop))
        start = stop
    return boxes


class _ExchangeRound:
    """A round of point-to-point messages; the slot holds sent, then received boxes, by peer."""

    def __init__(
        self,
        exchange: Exchange,
        source: Mapping[str, LocalTensor],
        destination: Mapping[str, LocalTensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.group = group
        self.sends = _row((p for m in exchange.sends for p in m.pieces), source)
        self.receives = _row((p for m in exchange.receives for p in m.pieces), destination)
        self.messages: list[tuple[Callable[..., Any], int, int]] = [
            *((dist.isend, m.peer, m.size) for m in exchange.sends),
            *((dist.irecv, m.peer, m.size) for m in exchange.receives),
        ]
        self.num_sent = sum(m.size for m in exchange.sends)
        self.received = sum(m.size for m in exchange.receives)
        self.scratch = self.num_sent + self.received

    def pack(self, slot: torch.Tensor, source: Tensors) -> None:
        for box in self.sends:
            box.pack(slot, source)

    def start(self, slot: torch.Tensor) -> list[dist.Work]:
        operations, offset = [], 0
        for operation, peer, size in self.messages:
            buffer = slot[offset : offset + size]
            operations.append(dist.P2POp(operation, buffer, group=self.group, group_peer=peer))
            offset += size
        return dist.batch_isend_irecv(operations)

    def unpack(self, slot: torch.Tensor, destination: Tensors) -> None:
        for box in self.receives:
            box.unpack(slot[self.num_sent :], destination)


class _GatherRound:
    """An all-gather; the slot holds the rank's contribution, then those of all members."""

    def __init__(
        self,
        gather: Gather,
        rank: int,
        source: Mapping[str, LocalTensor],
        destination: Mapping[str, LocalTensor],
        group: dist.ProcessGroup,
    ) -> None:
        self.group, self.size = group, gather.size
        self.shape = (len(gather.ranks), gather.size)
        self.contributed = _row(gather.pieces[gather.ranks.index(rank)], source)
        self.others = [
            (member, _row(pieces, destination))
            for member, pieces in enumerate(gather.pieces)
            if gather.ranks[member] != rank
        ]
        self.received = self.size * len(self.others)
        self.scratch = self.size * (1 + len(gather.ranks))

    def pack(self, slot: torch.Tensor, source: Tensors) -> None:
        for box in self.contributed:
            box.pack(slot, source)

    def start(self, slot: torch.Tensor) -> list[dist.Work]:
        contribution = slot[None, : self.size]
        work = _all_gather(self._gathered(slot), contribution, group=self.group, async_op=True)
        return [work]

    def unpack(self, slot: torch.Tensor, destination: Tensors) -> None:
        gathered = self._gathered(slot)
        for member, boxes in self.others:
            for box in boxes:
                box.unpack(gathered[member], destination)

    def _gathered(self, slot: torch.Tensor) -> torch.Tensor:
        return slot[self.size : self.scratch].view(self.shape)


_Round = _ExchangeRound | _GatherRound


def _locals(layout: Layout, rank: int) -> dict[str, LocalTensor]:
    inside = rank in layout.mesh.ranks
    return {name: LocalTensor(layout.local(name, rank) if inside else ()) for name in layout.rules}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
