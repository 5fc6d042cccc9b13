"""Seconds of work on a device."""

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the work that the device has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    synchronize(device)
    begun = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begun


def median_seconds(
    run: Callable[[], object], device: torch.device, rounds: int = 5, calls: int = 1
) -> float:
    """Median seconds of a call over `rounds` rounds of `calls` calls, after a first one.

    With several calls in a round the launch of one hides behind the work of the one before.
    """

    def repeat() -> None:
        for _ in range(calls):
            run()

    seconds(run, device)
    return statistics.median(seconds(repeat, device) for _ in range(rounds)) / calls
