"""One scale a kind of work: the seconds that a run has measured over those that were counted."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CostScales:
    """The scale of each kind, 1 where nothing was measured.

    Example: `CostScales(decode=1.5)`, decode steps take half as long again as the datasheet says.
    """

    decode: float = 1.0
    prefill: float = 1.0
    forward: float = 1.0
    """Forward-only stages."""
    train: float = 1.0
    """Updates: forward, backward, optimizer."""
    switch: float = 1.0
    """Weights from training to generation."""
    kv: float = 1.0
    """Keys and values to another instance."""

    def to_json(self) -> dict[str, float]:
        """Plain numbers, which `from_json` takes back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "CostScales":
        """Raises ValueError for an unknown kind, and for a scale that is not above 0."""
        known = [kind.name for kind in fields(cls)]
        if not isinstance(values, Mapping) or not set(values) <= set(known):
            raise ValueError(f"scales: got {values!r}, wanted some of {', '.join(known)}")
        for kind, scale in values.items():
            is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
            if not is_number or not 0 < scale < float("inf"):
                raise ValueError(f"scales: {kind}: got {scale!r}, wanted a number above 0")
        return cls(**values)
