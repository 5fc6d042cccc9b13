"""Which sequences go together: over ranks, and into micro-batches. Pure and deterministic.

Invariants, asserted by the tests: every index is in exactly one part; indices ascend within a part;
the same lengths give the same parts; no micro-batch exceeds the bound unless it is one sequence.
"""

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split indices into `num_parts` parts of nearly equal total length.

    Longest first, each to the part that is lightest so far (LPT, Graham 1969: at most 4/3 of the
    best heaviest part; far closer with many sequences a part). Parts may be empty where there are
    fewer sequences than parts. Raises ValueError for less than one part.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: wanted 1 or more")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    # Ties go to the part with fewer sequences, then to the first.
    heap = [(0, 0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, count, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (total + lengths[index], count + 1, part))
    return [sorted(part) for part in parts]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split indices into as few balanced micro-batches as hold at most `max_tokens` each.

    A sequence longer than the bound is a micro-batch of its own. No sequences give none. Raises
    ValueError for a bound below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: wanted 1 or more")
    long = [[index] for index, length in enumerate(lengths) if length > max_tokens]
    rest = [index for index, length in enumerate(lengths) if length <= max_tokens]
    if not rest:
        return long
    kept = [lengths[index] for index in rest]
    num_parts = -(-sum(kept) // max_tokens)
    while True:
        parts = balance(kept, num_parts)
        if max(sum(kept[i] for i in part) for part in parts) <= max_tokens:
            return long + [[rest[i] for i in part] for part in parts if part]
        num_parts += 1
