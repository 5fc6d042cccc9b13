"""Datasets of papers whose rows are not a question and an answer yet: `kind: function` sources."""

import random
from collections.abc import Iterator
from typing import Any

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def gpqa(seed: int, dataset: str, split: str = "train", **params: Any) -> Iterator[dict[str, Any]]:
    """GPQA's questions with four choices, A to D, in an order that `seed` gives.

    Rein et al., arXiv 2311.12022. `dataset` is a directory or a hub name, `params` are further
    keywords of `datasets.load_dataset`.
    """
    import datasets  # a second, which other sources need not pay

    draw = random.Random(seed)
    for row in datasets.load_dataset(dataset, split=split, **params):
        choices = [row["Correct Answer"], *(row[column] for column in _WRONG)]
        order = draw.sample(range(4), 4)
        lines = [f"{letter}) {choices[i].strip()}" for letter, i in zip("ABCD", order, strict=True)]
        yield {
            **row,
            "question": "\n".join([row["Question"].strip(), "", *lines]),
            "answer": "ABCD"[order.index(0)],
        }
