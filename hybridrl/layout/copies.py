"""The copies of parameters on several ranks: whether they are still equal, by checksums.

Replicas hold copies, and so do tp and ep ranks of what these axes do not split, and the ends of a
pipeline of a tied embedding. The ranks of a layout fall into groups that hold the same boxes, once
for each kind of parameter. A check takes one all-gather of 8 bytes a kind; only where a checksum
differs do ranks say which parameter it is in.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.layout.box import Box
from hybridrl.layout.layout import Layout
from hybridrl.layout.portions import Piece
from hybridrl.layout.proof import SHARES, WeightsDiffer, checksum, joint_checksum, shares
from hybridrl.layout.weight_switch import Tensors, local_tensors, plain_tensors

logger = logging.getLogger(__name__)

CopyGroups = tuple[tuple[int, ...], ...]
"""The ranks that hold the same boxes, of each group of several."""


class CopiesCheck:
    """Compares the copies of a layout; all its ranks, those of the world, make the same calls.

    The first check is of all elements, each later one of one in `SHARES` parts, in turn.

    Example: on 2 replicas of 2 tp ranks a matrix has the groups (0, 2) and (1, 3), and a norm,
    which tp does not split, the group (0, 1, 2, 3).
    """

    def __init__(self, layout: Layout, rank: int, strict: bool) -> None:
        """With `strict` (`deterministic=strict`) no copy may differ."""
        self.rank, self._strict = rank, strict
        self.seconds = 0.0
        """What the last check has taken on this rank."""
        self._local = local_tensors(layout, rank)
        self._number = 0
        self._mesh, self._warned = layout.mesh, False
        pieces: dict[CopyGroups, list[Piece]] = defaultdict(list)
        for names in layout.alike:
            groups = copies_of(layout, names[0])
            if groups:
                boxes = layout.boxes(names[0], rank) if _group(groups, rank) else ()
                pieces[groups] += [Piece(name, box) for name in names for box in boxes]
        self.kinds: dict[CopyGroups, Sequence[Piece]] = dict(pieces)
        """This rank's boxes of what has copies, by the groups of ranks that hold them."""
        self._shares: dict[CopyGroups, list[tuple[Piece, ...]]] = {}

    @torch.no_grad()
    def check(self, shards: Tensors) -> None:
        """Compare a share of this rank's `shards` with all of their copies. Collective.

        Raises WeightsDiffer, on all ranks, with a rank and a parameter. Unless `strict` that is for
        the copies of replicas, which get one reduced gradient. Ranks of tp and ep compute theirs
        each for itself, and the log warns where kernels that add in any order have let them drift.
        """
        if not self.kinds:
            return
        begun = time.perf_counter()
        shards = plain_tensors(shards)
        sums = {kind: self._sums(pieces, shards) for kind, pieces in self._due().items()}
        device = next(iter(shards.values())).device
        own = torch.stack([joint_checksum(one).to(device) for one in sums.values()])
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        by_rank = torch.stack(gathered).tolist()
        for place, kind in enumerate(sums):
            for ranks in kind:
                if len({by_rank[rank][place] for rank in ranks}) == 1:
                    continue
                ends = self._strict or self._mesh.along(ranks[0], "replica") == [*ranks]
                if ends or not self._warned:
                    message = self._difference(ranks, kind, sums[kind])
                    if ends:
                        raise WeightsDiffer(message)
                    self._warned = True
                    if self.rank == 0:
                        logger.warning("%s; kernels that add in any order may do that", message)
        self._number += 1
        self.seconds = time.perf_counter() - begun

    def _due(self) -> dict[CopyGroups, Sequence[Piece]]:
        """The pieces of this check, by kind."""
        if self._number == 0:
            return self.kinds
        if not self._shares:
            self._shares = {kind: shares(pieces) for kind, pieces in self.kinds.items()}
        turn = (self._number - 1) % SHARES
        return {kind: of_kind[turn] for kind, of_kind in self._shares.items()}

    def _sums(self, pieces: Sequence[Piece], shards: Tensors) -> list[torch.Tensor]:
        return [checksum(shards[p.name][self._local[p.name].slices(p.box)]) for p in pieces]

    def _difference(
        self, ranks: Sequence[int], kind: CopyGroups, sums: Sequence[torch.Tensor]
    ) -> str:
        """The message about a group whose copies differ. Collective."""
        own = dict[str, list[int]]()
        for piece, one in zip(self._due()[kind], sums, strict=True):
            own.setdefault(piece.name, []).append(int(one))
        gathered: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        return _message({rank: gathered[rank] for rank in ranks})


def copies_of(layout: Layout, name: str) -> CopyGroups:
    """The groups of several ranks that hold the same boxes of a parameter."""
    ranks: dict[tuple[Box, ...], set[int]] = defaultdict(set)
    for cell, boxes in layout.cells(name).items():
        if boxes:
            ranks[boxes] |= {*layout.ranks(name, cell).tolist()}
    return tuple(sorted(tuple(sorted(group)) for group in ranks.values() if len(group) > 1))


def _group(groups: CopyGroups, rank: int) -> tuple[int, ...]:
    return next((group for group in groups if rank in group), ())


def _message(sums: dict[int, dict[str, list[int]]]) -> str:
    """One line: the ranks that are not as most others, of the first parameter that differs."""
    first = next(iter(sums.values()))
    names = [name for name in first if any(own[name] != first[name] for own in sums.values())]
    by_value = defaultdict(list)
    for rank, own in sums.items():
        by_value[tuple(own[names[0]])].append(rank)
    most = max(by_value.values(), key=len)
    apart = [rank for rank in sums if rank not in most]
    more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    return (
        f"copies that should be equal are not: rank {_listed(apart)} has other values of"
        f" {names[0]}{more} than rank {_listed(most)}"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
