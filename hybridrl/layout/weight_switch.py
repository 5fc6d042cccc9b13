"""The weight switch (HybridFlow: resharding): a plan executed in buckets."""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hybridrl.layout.box_copies import PackedBox, copy_all, joined, packed_boxes
from hybridrl.layout.exchange_rounds import Exchange, first_contacts
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.plan import Plan, subplan
from hybridrl.layout.portions import Piece
from hybridrl.layout.process_groups import shared_group
from hybridrl.layout.transfer_rounds import BUCKET_BYTES as BUCKET_BYTES
from hybridrl.layout.transfer_rounds import (
    Gather,
    exchanged_links,
    gather_ranks,
    transfer_rounds,
)

logger = logging.getLogger(__name__)

# torch 2.13 renamed it and warns under the old name, which older versions alone know.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

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
    proof_seconds: float = 0.0
    """Comparing checksums of both sides (`layout.proof`), which `seconds` has not."""
    proof_bytes: int = 0
    """Bytes that were read for it on this rank, sent and received ones."""

    def followed_by(self, other: "SwitchStats") -> "SwitchStats":
        """The cost of this switch and another one after it."""
        kinds = {*self.path.split("+"), *other.path.split("+")}
        path = "+".join(kind for kind in ("gather", "exchange") if kind in kinds) or "local"
        most = ("scratch_bytes", "bytes_held")
        values = {
            field.name: (max if field.name in most else add)(
                getattr(self, field.name), getattr(other, field.name)
            )
            for field in fields(self)
            if field.name != "path"
        }
        return SwitchStats(path, **values)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Python's collector of cycles stands still, which millions of new boxes would set off.

    It looks at all of them each time, and none is in a cycle: at 512 ranks that is half of the
    seconds of planning.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def gather_groups(plan: Plan, rank: int) -> list[dist.ProcessGroup]:
    """The process groups of the rank's all-gathers, for `warm_up`; all ranks of the plan call it.

    The plan's ranks are those of the world. A `WeightSwitch` of the plan uses the same groups.
    """
    return [shared_group(ranks) for ranks in gather_ranks(plan, rank)]


def connect_peers(plan: Plan, device: torch.device) -> None:
    """Send one element over each link of a plan's exchanges; all ranks of the plan call it.

    NCCL connects two ranks at their first message, which takes a good part of a second for each
    peer and memory for buffers. So they are connected at start, before free memory is measured. The
    plan's ranks are those of the world, whose group is warm (`warm_up`).
    """
    rank = dist.get_rank()
    for receivers, senders in first_contacts(exchanged_links(plan), plan.num_ranks, rank):
        operations = [
            dist.P2POp(operation, torch.zeros(1, device=device), group_peer=peer)
            for operation, peers in ((dist.isend, receivers), (dist.irecv, senders))
            for peer in peers
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class WeightSwitch:
    """Moves the weights of one rank from the source layout of a plan to its destination layout.

    All ranks of the plan make one and call `switch` together, any number of times; the rounds are
    computed once. Ranks of the plan are those of `group` (by default, of all processes). It must be
    warm (`process_groups.warm_up`): under NCCL its first operation cannot be an exchange. Weights
    are sent in `dtype`, the generation weights', the layout's precise ones in float32. Scratch is
    allocated during a switch: two rounds are in flight, each of at most `bucket_bytes`.

    Example: `source["w"]` is rows 2 and 3 of a [4, 8] matrix, `destination["w"]` is all of it. Rank
    1 copies two rows, sends them to rank 0, and receives rows 0 and 1.
    """

    @_without_collections()
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
        self._precise: WeightSwitch | None = None
        if plan.dst.precise and dtype != torch.float32:
            own = subplan(plan, plan.dst.precise)
            rest = bucket_bytes, group, least_gather
            self._precise = WeightSwitch(own, rank, torch.float32, *rest)
            plan = subplan(plan, plan.dst.rules.keys() - plan.dst.precise)
        self.source = local_tensors(plan.src, rank)
        self.destination = local_tensors(plan.dst, rank)
        rounds = transfer_rounds(plan, rank, max(1, bucket_bytes // dtype.itemsize), least_gather)
        self._copies = list(
            zip(
                packed_boxes(rounds.copies, self.source),
                packed_boxes(rounds.copies, self.destination),
                strict=True,
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

    @torch.no_grad()  # so that a shard of a DTensor is had without a node of a graph
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
        source, destination = plain_tensors(source), plain_tensors(destination)
        if self._precise is None:
            return self._switch(source, destination, waits)
        names = self._precise.destination.keys()
        (own, rest), (own_to, rest_to) = _split(source, names), _split(destination, names)
        first = self._precise.switch(own, own_to, waits=False)
        return first.followed_by(self._switch(rest, rest_to, waits))

    def _switch(self, source: Tensors, destination: Tensors, waits: bool) -> SwitchStats:
        begun = time.perf_counter()
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
        copy_all((to.in_tensor(destination), box.in_tensor(source)) for box, to in self._copies)
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


class _Round(ABC):
    """A round, whose slot has boxes to send (`packed`) and boxes that came (`unpacked`)."""

    packed: Sequence[PackedBox]
    unpacked: Sequence[PackedBox]
    received: int
    """Elements that come from others."""
    scratch: int
    """Elements of its slot."""

    @abstractmethod
    def start(self, slot: torch.Tensor) -> list[dist.Work]: ...

    def pack(self, slot: torch.Tensor, source: Tensors) -> None:
        copy_all((box.in_row(slot), box.in_tensor(source)) for box in self.packed)  # casts

    def unpack(self, slot: torch.Tensor, destination: Tensors) -> None:
        copy_all((box.in_tensor(destination), box.in_row(slot)) for box in self.unpacked)


class _ExchangeRound(_Round):
    """A round of point-to-point messages; the slot holds sent, then received boxes, by peer.

    Messages of the same pieces to several peers are sent from one place.
    """

    def __init__(
        self,
        exchange: Exchange,
        source: Mapping[str, LocalTensor],
        destination: Mapping[str, LocalTensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.group = group
        self.messages: list[tuple[Callable[..., Any], int, int, int]] = []
        places: dict[tuple[Piece, ...], tuple[int, int]] = {}
        filled = 0
        for message in exchange.sends:
            if message.pieces not in places:
                places[message.pieces] = filled, message.size
                filled += message.size
            self.messages.append((dist.isend, message.peer, *places[message.pieces]))
        self.packed = joined(packed_boxes((p for pieces in places for p in pieces), source))
        came = [p for message in exchange.receives for p in message.pieces]
        self.unpacked = joined(packed_boxes(came, destination, filled))
        sent = filled
        for message in exchange.receives:
            size = message.size
            self.messages.append((dist.irecv, message.peer, filled, size))
            filled += size
        self.received, self.scratch = filled - sent, filled

    def start(self, slot: torch.Tensor) -> list[dist.Work]:
        return dist.batch_isend_irecv(
            [
                dist.P2POp(operation, slot[place : place + size], group=self.group, group_peer=peer)
                for operation, peer, place, size in self.messages
            ]
        )


class _GatherRound(_Round):
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
        self.packed = joined(packed_boxes(gather.pieces[gather.ranks.index(rank)], source))
        self.unpacked = joined(
            box
            for member, pieces in enumerate(gather.pieces)
            if gather.ranks[member] != rank
            for box in packed_boxes(pieces, destination, self.size * (1 + member))
        )
        self.received = self.size * (len(gather.ranks) - 1)
        self.scratch = self.size * (1 + len(gather.ranks))

    def start(self, slot: torch.Tensor) -> list[dist.Work]:
        contribution = slot[None, : self.size]
        gathered = slot[self.size : self.scratch].view(self.shape)
        return [_all_gather(gathered, contribution, group=self.group, async_op=True)]


def local_tensors(layout: Layout, rank: int) -> dict[str, LocalTensor]:
    """The boxes in the tensors of a rank by parameter; none for a rank outside of the layout."""
    inside = rank in layout.mesh.ranks
    return {name: LocalTensor(layout.local(name, rank) if inside else ()) for name in layout.rules}


def _split(tensors: Tensors, names: Container[str]) -> tuple[Tensors, Tensors]:
    """The tensors `names`, and the others."""
    own = {name: tensor for name, tensor in tensors.items() if name in names}
    return own, {name: tensor for name, tensor in tensors.items() if name not in own}


def plain_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The rank's own shards, of DTensors too."""
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        for name, tensor in tensors.items()
    }
