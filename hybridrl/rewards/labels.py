"""A reward function for rows that say whether their response is wanted."""

from collections.abc import Mapping
from typing import Any


def label(response: str, item: Mapping[str, Any]) -> float:
    """1 where the row's column `label` is true, -1 where it is false: unpaired preferences."""
    value = item["label"]
    if value not in (True, False):  # also 1 and 0
        raise ValueError(f"the label is {value!r}, wanted true or false")
    return 1.0 if value else -1.0
