"""SIGINT and SIGTERM end a run in the same way: as a `KeyboardInterrupt` in the driver."""

import signal
import time
from types import FrameType

_GRACE_S = 20.0  # ending a run takes a few seconds; a second signal must not cut that short
_last: dict[str, float] = {"signal": signal.SIGINT, "time": float("-inf")}
_installed = False


def install() -> None:
    """Take over both signals of this process; the command line does."""
    global _installed
    _installed = True
    reinstall()


def reinstall() -> None:
    """Take them back from a library (Ray, at its start); without `install` it does nothing."""
    if not _installed:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(number, _interrupt)


def exit_code() -> int:
    """128 + the signal that ended the run, as shells write it: 130 or 143."""
    return 128 + int(_last["signal"])


def _interrupt(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if now - _last["time"] > _GRACE_S:
        _last.update(signal=number, time=now)
        raise KeyboardInterrupt
