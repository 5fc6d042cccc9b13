"""The shape that a report's steps have, for a file that something else may have written."""

from typing import Any

from gpu_steps.steps import STEPS

MEASURED = "%Y-%m-%dT%H:%M:%SZ"
"""The form of a report's `measured`: the time at which its last step has ended."""

Kinds = dict[str, type | tuple[type, ...]]

_STEP: Kinds = {
    "status": str,
    "reason": str,
    "seconds": (int, float),
    "host": str,
    "device": str,
    "figures": list,
    "details": dict,
}
_FIGURE: Kinds = {"name": str, "value": (int, float, str), "unit": str, "about": dict}
_SKIPPED: Kinds = {"name": str, "skipped": str}
_STATES = ("done", "failed", "skipped")


def are_steps(steps: Any) -> bool:
    """Whether it is a report's `steps`, with all that the table and the next call read."""
    return isinstance(steps, dict) and all(
        name in STEPS and _is_step(step) for name, step in steps.items()
    )


def _is_step(step: Any) -> bool:
    return (
        _has(step, _STEP)
        and step["status"] in _STATES
        and all(_is_figure(figure) for figure in step["figures"])
    )


def _is_figure(figure: Any) -> bool:
    if not _has(figure, {"device": str}):
        return False
    return _has(figure, _SKIPPED if "skipped" in figure else _FIGURE)


def _has(mapping: Any, kinds: Kinds) -> bool:
    return isinstance(mapping, dict) and all(
        isinstance(mapping.get(name), kind) for name, kind in kinds.items()
    )
