"""Selects the checkpoints to keep on disk."""

from collections.abc import Mapping


def to_keep(scores: Mapping[int, float | None], keep_last: int) -> set[int]:
    """Steps whose checkpoints stay: the best and the last `keep_last`.

    `scores` maps the step of every checkpoint to its held-out score (higher is better), or None if
    it was not evaluated. Of equal scores the earliest is the best. Raises ValueError for a negative
    `keep_last`.
    """
    if keep_last < 0:
        raise ValueError(f"trainer.keep_last={keep_last}: wanted 0 or more")
    steps = sorted(scores)
    kept = set(steps[max(0, len(steps) - keep_last) :])
    evaluated = [step for step in steps if scores[step] is not None]
    if evaluated:
        kept.add(max(evaluated, key=lambda step: (scores[step], -step)))
    return kept
