"""The groups of decoding rows whose gathered keys and values stay while rows come and go."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.models.paged_attention import KVCache, PagedGroup, Workspace

Ints = npt.NDArray[np.int64]

# What one more group costs: keys whose gather and attention take as long, by type of device. On a
# CPU measured. On a GPU a group is six more launches in each layer, some 1.2 ms for 28 layers,
# in which an H100 reads the keys and values of some 40,000 tokens of a 1.5B model.
_GROUP_KEYS = {"cpu": 512, "cuda": 40_000}
_SPARE_PAGES = 4  # blocks by which a workspace is wider than its longest row
_LEAST_SPARE = 2  # of them for a row that joins
_WASTE = 1.2  # of the keys that groups attend to, over those of the best groups
_GONE = -1  # in place of the slot of a row that has left


def split(sizes: Sequence[int], overhead: int) -> list[tuple[int, int]]:
    """Cut descending `sizes` into ranges [start, stop), each padded to its first size.

    The cut of least cost, where a range costs `size * count + overhead`: exact dynamic programming
    over at most 16 distinct sizes (finer differences are rounded up).
    """
    if not sizes:
        return []
    unit = -(-sizes[0] // 16)
    rounded = [-(-size // unit) * unit for size in sizes]
    edges = [i for i in range(len(sizes)) if i == 0 or rounded[i] != rounded[i - 1]]
    edges.append(len(sizes))
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(edges)):
        best.append(
            min(
                (
                    best[start][0]
                    + rounded[edges[start]] * (edges[stop] - edges[start])
                    + overhead,
                    start,
                )
                for start in range(stop)
            )
        )
    cuts, stop = [], len(edges) - 1
    while stop:
        start = best[stop][1]
        cuts.append((edges[start], edges[stop]))
        stop = start
    return cuts[::-1]


def group_pages(device: torch.device, block_size: int) -> int:
    """What one more group costs, in blocks of keys."""
    return -(-_GROUP_KEYS[device.type] // block_size)


class KeptGroups:
    """The rows of one lane in groups of like length, each with a `Workspace`.

    Who leaves is flushed to the cache, who joins is gathered from it, in the place of one that has
    left. All rows are grouped anew where one finds no room, or where the groups attend to far more
    keys than the best ones would. So rows that come and go at every step cost little.

    Invariant: a slot of the engine's block tables is in one group at most. A group's slots are
    those of its workspace's rows, in their order. Once it is arranged none of them is gone.

    *Example.* Rows of 100, 90 and 20 tokens are two groups of capacities 6 and 5. The second row
    leaves, one of 95 tokens joins: it is gathered, and 19 of 20 rows are not touched.
    """

    def __init__(self, cache: KVCache, lane: int, overhead: int, most_pages: int) -> None:
        self.cache = cache
        self._lane, self._overhead, self._most_pages = lane, overhead, most_pages
        self._groups: list[tuple[Workspace, list[int]]] = []
        self.steps_left = 0  # until the groups must be arranged: a row has no room, or has left

    @property
    def slots(self) -> list[int]:
        """All rows' slots, group by group."""
        return [slot for _, slots in self._groups for slot in slots if slot != _GONE]

    def arrange(self, rows: Sequence[tuple[int, int]], tables: Ints) -> None:
        """Have the `rows` (slot, position of the pending token), some of which are here already.

        All their earlier tokens are in the cache or here; no other row is left.
        """
        known = set(self.slots)
        joining = [row for row in rows if row[0] not in known]
        full = self._least_room() < 1
        if full or not self._join(joining, tables) or self._wasteful([at for _, at in rows]):
            self._regroup(rows, tables)
        self.steps_left = self._least_room()

    def _least_room(self) -> int:
        """The tokens for which every row has room."""
        rooms = [workspace.width - workspace.longest for workspace, _ in self._groups]
        return min(rooms, default=0)

    def _join(self, rows: Sequence[tuple[int, int]], tables: Ints) -> bool:
        """Add rows to groups that have room; whether all found some. Narrow groups come first."""
        size, added = self.cache.block_size, dict[int, list[tuple[int, int]]]()
        widths = [workspace.width for workspace, _ in self._groups]
        for slot, position in rows:
            for index in sorted(range(len(widths)), key=widths.__getitem__):
                workspace, slots = self._groups[index]
                rows_after = len(slots) - slots.count(_GONE) + len(added.get(index, ()))
                pages = position // size + 1 + _LEAST_SPARE
                room = rows_after < workspace.capacity
                if room and min(pages, self._most_pages) * size <= workspace.width:
                    added.setdefault(index, []).append((slot, position))
                    break
            else:
                return False
        for index, new in added.items():
            self._add(index, new, tables)
        self._close()
        return True

    def _add(self, index: int, rows: Sequence[tuple[int, int]], tables: Ints) -> None:
        workspace, slots = self._groups[index]
        own = [slot for slot, _ in rows]
        gone = [row for row, slot in enumerate(slots) if slot == _GONE][: len(own)]
        slots += [_GONE] * (len(own) - len(gone))
        places = [*gone, *range(len(slots) - len(own) + len(gone), len(slots))]
        for place, slot in zip(places, own, strict=True):
            slots[place] = slot
        pages = max(position for _, position in rows) // self.cache.block_size + 1
        table = torch.from_numpy(np.ascontiguousarray(tables[own, :pages]))
        workspace.add(places, table, torch.tensor([position for _, position in rows]))

    def _close(self) -> None:
        """Move the last rows to the places of those that have left."""
        for workspace, slots in self._groups:
            rows = len(slots) - slots.count(_GONE)
            if rows == len(slots):
                continue
            targets = [row for row in range(rows) if slots[row] == _GONE]
            sources = [row for row in range(rows, len(slots)) if slots[row] != _GONE]
            for target, source in zip(targets, sources, strict=True):
                slots[target] = slots[source]
            del slots[rows:]
            workspace.close(sources, targets, rows)

    def _wasteful(self, positions: Sequence[int]) -> bool:
        size = self.cache.block_size
        pages = sorted((position // size + 1 for position in positions), reverse=True)
        cuts = split(pages, self._overhead)
        best = sum(pages[start] * (stop - start) + self._overhead for start, stop in cuts)
        longest = [(workspace.longest // size + 1, len(slots)) for workspace, slots in self._groups]
        return sum(num * rows + self._overhead for num, rows in longest if rows) > _WASTE * best

    def _regroup(self, rows: Sequence[tuple[int, int]], tables: Ints) -> None:
        """Flush all rows and gather them anew, in the best groups with some room to spare."""
        self.flush(tables, set(self.slots))
        # The groups, with room for rows that join and for tokens to come.
        rows = sorted(rows, key=lambda row: -row[1])
        size, cache = self.cache.block_size, self.cache
        pages = [position // size + 1 for _, position in rows]
        cuts = split(pages, self._overhead)
        counts = [stop - start for start, stop in cuts]
        widths = [min(pages[start] + _SPARE_PAGES, self._most_pages) for start, _ in cuts]
        shapes = [(num + 1 + num // 8, wide) for num, wide in zip(counts, widths, strict=True)]
        # A slice of the lane's memory for each.
        unit = 2 * cache.kv_heads * cache.head_dim
        sizes = [capacity * num * size for capacity, num in shapes]
        memory = cache.arena(sum(sizes), self._lane).split([num * unit for num in sizes], 1)
        self._groups = [
            (Workspace(cache, *shape, own), []) for shape, own in zip(shapes, memory, strict=True)
        ]
        for index, (start, stop) in enumerate(cuts):
            self._add(index, rows[start:stop], tables)

    def remove(self, leaving: Collection[int], tables: Ints, keep: bool) -> None:
        """Take the rows of these slots out, if they are here; with `keep` the cache has them then.

        The others stay where they are until `arrange`.
        """
        self.steps_left = 0
        if keep:
            self.flush(tables, leaving)
        for workspace, slots in self._groups:
            rows = [row for row, slot in enumerate(slots) if slot in leaving]
            if rows:
                for row in rows:
                    slots[row] = _GONE
                workspace.vacate(rows)

    def flush(self, tables: Ints, which: Collection[int]) -> None:
        """Copy the tokens of the rows of these slots to the cache; the rows stay."""
        for workspace, slots in self._groups:
            rows = [row for row, slot in enumerate(slots) if slot in which]
            if rows:
                own = tables[[slots[row] for row in rows]]
                workspace.flush(torch.tensor(rows), torch.from_numpy(own))

    def paged_groups(self) -> list[PagedGroup]:
        """The groups of the next pass, whose rows are those of `slots`."""
        groups, start = [], 0
        for workspace, slots in self._groups:
            if slots:
                keys, positions = workspace.longest + 1, workspace.positions[:, None]
                groups.append(
                    PagedGroup(start, len(slots), 1, keys, positions, workspace=workspace)
                )
                start += len(slots)
        return groups

    def advance(self) -> None:
        """The step is done: every row has one more token."""
        self.steps_left -= 1
        for workspace, slots in self._groups:
            if slots:
                workspace.advance()
