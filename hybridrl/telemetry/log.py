"""The log of a run: the work that each process begins and ends, for runs that hang or fail.

A line has time, process, level, room (the logger's name) and message:

    2026-05-01 12:00:00,123 rank 1 DEBUG hybridrl.compat.verl: call update started

The driver writes `RUN/logs/driver.log`. A rank writes to its standard error, which is its log file
under Ray. With `cluster=processes` it writes to `RUN/logs/rank-N.log`; there rank 0 is the driver's
own process, and its lines are in the driver's log. Commands without a run (`hybridrl doctor`,
`submit`, `plan layout`) write to standard error. A module logs by `logging.getLogger(__name__)`.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path

from hybridrl.config.run import LogLevel

DRIVER = "driver"
_FORMAT = "%(asctime)s %(process_name)s %(levelname)s %(name)s: %(message)s"
_PACKAGE = "hybridrl"
_process = ContextVar("process", default=DRIVER)


@contextmanager
def driver_log(level: LogLevel, file: Path) -> Iterator[None]:
    """Within, the driver's lines from `level` on are appended to `file`.

    Warnings are shown on standard error too, as they are without a log.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handler, shown = _formatted(logging.FileHandler(file, encoding="utf-8")), logging.lastResort
    assert shown is not None
    with closing(handler), _handled(level, handler, shown):
        yield


@contextmanager
def command_log(level: LogLevel) -> Iterator[None]:
    """Within, at debug level, a command without a run shows its lines on standard error."""
    if level is not LogLevel.debug:
        yield
        return
    with _handled(level, _formatted(logging.StreamHandler())):
        yield


def rank_log(rank: int, level: LogLevel, file: Path | None) -> None:
    """Have this process, a rank's own, log from `level` on to `file`, or to standard error.

    A rank in the driver's process stays with the driver's log: see `as_rank`.
    """
    logger = logging.getLogger(_PACKAGE)
    if logger.handlers:
        return
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    _attach(level, _formatted(handler, f"rank {rank}"))


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Within, what this thread of the driver's process logs is the rank's."""
    token = _process.set(f"rank {rank}")
    try:
        yield
    finally:
        _process.reset(token)


@contextmanager
def logged(logger: logging.Logger, what: str) -> Iterator[None]:
    """Log at debug level that `what` has started, and that it has ended or failed, with seconds."""
    logger.debug("%s started", what)
    start = time.monotonic()
    outcome = "failed"
    try:
        yield
        outcome = "ended"
    finally:
        logger.debug("%s %s after %.3f s", what, outcome, time.monotonic() - start)


@contextmanager
def _handled(level: LogLevel, *handlers: logging.Handler) -> Iterator[None]:
    """Within, the package's lines from `level` on go to the `handlers`."""
    logger = logging.getLogger(_PACKAGE)
    before, propagates = logger.level, logger.propagate
    _attach(level, *handlers)
    try:
        yield
    finally:
        logger.propagate = propagates
        for handler in handlers:
            logger.removeHandler(handler)
        logger.setLevel(before)


def _attach(level: LogLevel, *handlers: logging.Handler) -> None:
    logger = logging.getLogger(_PACKAGE)
    logger.setLevel(level.value.upper())
    for handler in handlers:
        logger.addHandler(handler)
    logger.propagate = False  # verl's import gives root a handler, which would repeat the lines


class _ProcessName(logging.Filter):
    """Gives every record `process_name`: that of the process, or of the rank that it acts as."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self._name = name

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_name = self._name or _process.get()
        return True


def _formatted(handler: logging.Handler, process: str | None = None) -> logging.Handler:
    handler.setFormatter(logging.Formatter(_FORMAT))
    handler.addFilter(_ProcessName(process))
    return handler
