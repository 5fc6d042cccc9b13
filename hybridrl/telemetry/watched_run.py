"""A run directory as `hybridrl watch` shows it: read again when its files have changed."""

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry import sample_files
from hybridrl.telemetry.report import gather, is_run
from hybridrl.telemetry.rundata import RECORD_FILES, load, state_of
from hybridrl.telemetry.sample_search import SampleSearch
from hybridrl.telemetry.tables import last_timelines

_TIMELINES = 5  # steps
_SHARE = 0.1  # of a core that reading a growing run may take


class WatchedRun:
    """A run directory, read again when its files have changed.

    Reading takes at most a tenth of the time, so a long run is read less often.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError for a directory that is no run, or one that leads elsewhere."""
        self.run_dir = run_dir
        if not is_run(run_dir):
            raise ConfigError("run", run_dir, "a run directory (one that holds run.json)")
        self._lock = threading.Lock()
        self._stamp: object = None
        self._checked: int | None = None  # when the folder of samples that was checked had changed
        self._not_before = 0.0
        self.read()

    def read(self) -> None:
        """Take up what has changed, unless that was done a moment ago."""
        with self._lock:
            begun = time.monotonic()
            if begun < self._not_before:
                return
            stamp = self._stamp_now()
            if stamp == self._stamp:
                self._wait_since(begun)
                return
            run = load(self.run_dir)
            search = SampleSearch(self.run_dir, run)
            counts = [name for name in run.metric_names if name.endswith("/samples")]
            kinds = [name for name in counts if name.startswith(("source/", "task/"))]
            live = {
                "version": hashlib.sha256(repr(stamp).encode()).hexdigest()[:16],
                "mixture": [kind.removesuffix("/samples") for kind in kinds],
                "every_sample": search.has_files,
            }
            shown = {"timelines": last_timelines(run, _TIMELINES), "samples": [], "live": live}
            # One after the other, each whole: requests read them meanwhile.
            self.search, self.page_data = search, gather(run) | shown
            self._stamp = stamp
            self._wait_since(begun)

    def _wait_since(self, begun: float) -> None:
        """Read nothing for a time in which this work is the share that it may take."""
        self._not_before = begun + (time.monotonic() - begun) / _SHARE

    def _stamp_now(self) -> object:
        """What changes with the files and with the run's process."""
        folder = self.run_dir / sample_files.FOLDER
        for path in (self.run_dir / ".hydra", folder):
            _check_inside(path, self.run_dir)
        stats = []
        for name in RECORD_FILES:
            _check_inside(self.run_dir / name, self.run_dir)
            with contextlib.suppress(OSError):
                stat = (self.run_dir / name).stat()
                stats.append((name, stat.st_size, stat.st_mtime_ns))
        with contextlib.suppress(FileNotFoundError):
            changed = folder.stat().st_mtime_ns
            stats.append((sample_files.FOLDER, 0, changed))
            if changed != self._checked:  # a new link changes the folder
                self._check_links(folder)
                self._checked = changed
        return state_of(self.run_dir), stats

    def _check_links(self, folder: Path) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():  # told by the folder, without a look at the file
                    _check_inside(Path(entry), self.run_dir)


def _check_inside(path: Path, run_dir: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError("run", path, "a run directory without links to files outside of it")
