"""The replies of an endpoint, and the number of its requests, in a file."""

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any


class ReplyFile:
    """Replies by key, and the number of requests, in a file of the run directory.

    Lines: `{"key": ..., "reply": ...}` for each reply that is kept, `{"requests": 1}` for each
    request. Memory holds only where a reply stands: a long run has gigabytes of them. With `path`
    None nothing outlives the object.
    """

    def __init__(self, path: Path | None) -> None:
        self.spent = 0
        """Requests so far, of earlier runs on this file, too."""
        self._places: dict[str, int] = {}
        if path is None:
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (see close)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        place, line = 0, b""
        for line in self._file:
            with contextlib.suppress(ValueError):  # cut off when its run was killed
                entry = json.loads(line)
                self.spent += entry.get("requests", 0)
                if "key" in entry:
                    self._places[entry["key"]] = place
            place += len(line)
        if line and not line.endswith(b"\n"):
            self._file.write(b"\n")

    def count(self) -> None:
        """Note a request, before it is sent."""
        self.spent += 1
        self._write({"requests": 1})

    def keep(self, key: str, reply: str) -> None:
        """Note a reply."""
        self._places[key] = self._write({"key": key, "reply": reply})

    def reply(self, key: str) -> str | None:
        """The last reply that was kept under a key."""
        if key not in self._places:
            return None
        self._file.seek(self._places[key])
        return str(json.loads(self._file.readline())["reply"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> int:
        """Append a line, and give its place."""
        place = self._file.seek(0, 2)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        return place
