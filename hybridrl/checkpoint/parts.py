"""Parts of a checkpoint that a rank writes while the run goes on, and what all ranks share of it.

Training waits for the copies alone. Each part ends in `finish`, which all ranks call together once
theirs are written. A checkpoint exists when its folder is renamed after that (`checkpoint.folder`).
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from hybridrl.checkpoint.folder import mark_written, write_error


class Part(Protocol):
    """What one rank writes of a checkpoint, from copies that nothing changes."""

    def write(self) -> None:
        """Write the files; not collective, on any thread. An error is kept for `finish`."""
        ...

    def finish(self) -> list[str]:
        """End a part that all ranks have written; gives a line for each file that is left out.

        Collective. Raises OSError, on all ranks, for an error of one of them.
        """
        ...


class BackgroundWriter:
    """Writes parts on a thread, one after the other.

    States: idle -> `begin`, once or more -> `finish` -> idle.
    """

    def __init__(self, device: torch.device) -> None:
        """The thread uses the rank's `device`: torch's writer makes a stream on the present GPU."""
        gpu = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "checkpoint", *gpu)
        self._parts: list[Part] = []
        self._written: list[Future[None]] = []

    def begin(self, new: Part) -> None:
        """Write a part, after those that have begun before."""
        self._parts.append(new)
        self._written.append(self._thread.submit(new.write))

    def mark(self, folder: Path) -> None:
        """Leave a file in `folder` once all parts are written: `folder.num_written` counts them.

        So whoever waits needs no answer of a rank, which may be at work.
        """
        self._written.append(self._thread.submit(mark_written, folder))

    def finish(self) -> list[str]:
        """Wait until all parts are written, and end them; see `Part.finish`. Collective."""
        parts, written = self._parts, self._written
        self._parts, self._written = [], []
        for future in written:
            future.result()
        return [line for each in parts for line in each.finish()]


@contextmanager
def on_all_ranks(path: Path) -> Iterator[None]:
    """Wait until the body has ended on all ranks; raise an error of one of them on all."""
    error: OSError | None = None
    try:
        yield
    except (OSError, SafetensorError) as caught:
        error = write_error(caught, path)
    raise_on_all(error)


def raise_on_all(error: OSError | None) -> None:
    """Raise the error of the first rank that has one, on all ranks. Collective."""
    errors: list[OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for other in errors:
        if other is not None:
            raise other
