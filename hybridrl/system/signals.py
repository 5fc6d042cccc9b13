"""SIGINT, SIGTERM and SIGUSR1 end a run alike: as a `KeyboardInterrupt` in the driver.

Within `graceful_stop()` the first one requests a stop at a point that the run can resume from;
another interrupts it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_GRACE_S = 20.0  # ending a run takes a few seconds; a second signal must not cut that short
_AGAIN_S = 0.05  # until an interrupt that was lost is sent again
_ONCE_S = 1.0  # Slurm sends the same signal to a job's steps and to its script
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_last: dict[str, float] = {"signal": signal.SIGINT, "time": float("-inf")}
_installed = False
_graceful = False
_requested_at: float | None = None


def install() -> None:
    """Handle the signals of this process; the command line calls this."""
    global _installed
    if not _installed:
        others = sys.unraisablehook
        sys.unraisablehook = lambda lost: _send_again() if _is_interrupt(lost) else others(lost)
    _installed = True
    reinstall()


def reinstall() -> None:
    """Restore the handlers after a library has replaced them; call `install` first."""
    assert _installed
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, _interrupt)


def installed() -> bool:
    """Whether our handlers are installed: then no library may replace them."""
    return _installed


@contextmanager
def graceful_stop() -> Iterator[None]:
    """Within, the first signal makes `stop_requested` true; the next one interrupts.

    A request that was not read remains: the next call of `stop_requested` reports it.
    """
    global _graceful
    _graceful = True
    try:
        yield
    finally:
        _graceful = False


def stop_requested() -> bool:
    """Whether a signal has requested the end of the run."""
    return _requested_at is not None


def begin_stop() -> None:
    """Note that the requested stop begins: another signal must not interrupt it."""
    _last["time"] = time.monotonic()


def time_is_up() -> bool:
    """Whether the last signal was SIGUSR1, which Slurm sends before it takes the nodes away."""
    return _last["signal"] == signal.SIGUSR1


def exit_code() -> int:
    """128 + the signal that ended the run, as shells write it: 130 or 143."""
    return 128 + int(_last["signal"])


def _is_interrupt(lost: Any) -> bool:
    return lost.exc_type is not None and issubclass(lost.exc_type, KeyboardInterrupt)


def _send_again() -> None:
    """An interrupt that came within a callback of Python's own, as imports have, has no effect."""
    _last["time"] = float("-inf")
    timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), int(_last["signal"])))
    timer.daemon = True
    timer.start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _requested_at
    now = time.monotonic()
    if _graceful and _requested_at is None:
        _last["signal"], _requested_at = number, now
    elif _requested_at is not None and now - _requested_at < _ONCE_S:
        return
    elif now - _last["time"] > _GRACE_S:
        _last.update(signal=number, time=now)
        raise KeyboardInterrupt
