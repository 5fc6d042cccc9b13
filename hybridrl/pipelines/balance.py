"""Balances sequences over ranks and micro-batches by length. Pure and deterministic.

Invariants, asserted by the tests: every index is in exactly one part; indices ascend within a part;
the same lengths give the same parts. No micro-batch exceeds the bound unless it is one row.
Among micro-batches within the bound those of more equal cost are taken, so that ranks that meet at
each of them wait less (ChunkFlow, arXiv 2503.02356; Zeppelin, arXiv 2509.21841).
`samples_per_row` consecutive sequences, a row, are in one part.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """A sequence of n tokens costs `per_token` n + `per_pair` n^2, in whole numbers.

    So sums are exact. Example: (1, 0) counts tokens.
    """

    per_token: int = 1
    per_pair: int = 0

    def __call__(self, tokens: int) -> int:
        """The cost of a sequence of so many tokens."""
        return self.of_all([tokens])[0]

    def of_all(self, lengths: Iterable[int]) -> list[int]:
        """The cost of a sequence of each of these lengths."""
        token, pair = self.per_token, self.per_pair
        return [token * length + pair * length**2 for length in lengths]


BY_TOKENS = SequenceCost()


def balance(
    lengths: Sequence[int],
    num_parts: int,
    samples_per_row: int = 1,
    loads: Sequence[int] = (),
) -> list[list[int]]:
    """Split indices into `num_parts` parts of nearly equal total length, without splitting rows.

    Longest first, each to the part that is lightest so far (LPT, Graham 1969: at most 4/3 of the
    best heaviest part; far closer with many sequences a part). Parts may be empty if there are
    fewer sequences than parts. `loads` are what the parts have already, by default nothing. Lengths
    may be costs. Raises ValueError for less than one part, and for an incomplete row.
    """
    if samples_per_row > 1:
        rows = balance(_fold(lengths, samples_per_row), num_parts, loads=loads)
        return _unfold(rows, samples_per_row)
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: wanted 1 or more")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # Ties go to the part with fewer sequences, then to the first.
    heap = [(load, 0, i) for i, load in enumerate(loads or [0] * num_parts)]
    heapq.heapify(heap)
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total, count, lightest = heapq.heappop(heap)
        parts[lightest].append(index)
        heapq.heappush(heap, (total + lengths[index], count + 1, lightest))
    return [sorted(indices) for indices in parts]


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    samples_per_row: int = 1,
    cost: SequenceCost = BY_TOKENS,
) -> list[list[int]]:
    """Split indices into as few micro-batches, balanced by cost, as hold `max_tokens` each.

    A row longer than the bound is a micro-batch by itself. No sequences give none. Raises
    ValueError for a bound below 1, and for an incomplete row.
    """
    rows, costs = _fold(lengths, samples_per_row), _costs(lengths, samples_per_row, cost)
    return _unfold(cut(rows, costs, max_tokens), samples_per_row)


def cut(lengths: Sequence[int], costs: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`micro_batches` of rows with these `costs`; raises ValueError for a bound below 1."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: wanted 1 or more")
    long = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    fitting = [index for index, length in enumerate(lengths) if length <= max_tokens]
    kept, kept_costs = [lengths[i] for i in fitting], [costs[i] for i in fitting]
    num_parts = -(-sum(kept) // max_tokens)
    parts: list[list[int]] = []
    while fitting:
        parts = balance(kept, num_parts)
        if max([sum([kept[i] for i in indices]) for indices in parts]) <= max_tokens:
            break
        num_parts += 1
    parts = evened(kept, kept_costs, parts, max_tokens)
    return long + [[fitting[i] for i in indices] for indices in parts if indices]


def equal_number(
    lengths: Sequence[int],
    num_parts: int,
    max_tokens: int,
    samples_per_row: int = 1,
    cost: SequenceCost = BY_TOKENS,
) -> list[list[int]]:
    """`num_parts` parts, balanced by cost where that leaves each within `max_tokens`, else by them.

    Raises as `balance`.
    """
    rows, costs = _fold(lengths, samples_per_row), _costs(lengths, samples_per_row, cost)
    return _unfold(evened(rows, costs, balance(rows, num_parts), max_tokens), samples_per_row)


def evened(
    lengths: Sequence[int], costs: Sequence[int], parts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """As many parts whose heaviest costs less, none of them above the bound; else `parts`.

    Costliest first, each to the part that has cost least so far and has room.
    """
    heap = [(0, 0, number, max_tokens) for number in range(len(parts))]
    even: list[list[int]] = [[] for _ in parts]
    for index in sorted(range(len(lengths)), key=costs.__getitem__, reverse=True):
        full = []
        while heap and heap[0][3] < lengths[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return parts
        total, count, number, room = heapq.heappop(heap)
        even[number].append(index)
        full.append((total + costs[index], count + 1, number, room - lengths[index]))
        for entry in full:
            heapq.heappush(heap, entry)

    def heaviest(candidate: list[list[int]]) -> int:
        return max([sum([costs[i] for i in indices]) for indices in candidate], default=0)

    return [sorted(indices) for indices in even] if heaviest(even) < heaviest(parts) else parts


def _costs(lengths: Sequence[int], samples_per_row: int, cost: SequenceCost) -> list[int]:
    """The cost of every row: each of its sequences attends to itself alone."""
    return _fold(cost.of_all(lengths), samples_per_row)


def _fold(lengths: Sequence[int], samples_per_row: int) -> list[int]:
    """The total length of every row."""
    if samples_per_row == 1:
        return list(lengths)
    if len(lengths) % samples_per_row:
        raise ValueError(f"{len(lengths)} sequences: wanted a multiple of {samples_per_row=}")
    return [sum(lengths[i : i + samples_per_row]) for i in range(0, len(lengths), samples_per_row)]


def _unfold(parts: list[list[int]], samples_per_row: int) -> list[list[int]]:
    """Parts of rows as parts of sequences."""
    return [
        [row * samples_per_row + i for row in rows for i in range(samples_per_row)]
        for rows in parts
    ]
