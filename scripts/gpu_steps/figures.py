"""The figures of a step, kept in a file from the first one on."""

import json
import os
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A step cannot run here; the message says why."""


class Figures:
    """The figures of one step, each marked with the device that it was taken on.

    The file is replaced after each, so that a step which fails keeps what it had.
    """

    def __init__(self, file: Path, device: str) -> None:
        self._file, self._device = file, device
        self._content: dict[str, Any] = {"figures": [], "details": {}}

    def add(self, name: str, value: float | str, unit: str = "", **about: object) -> None:
        """Note a figure; `about` says what it was taken with."""
        rounded = float(f"{value:.4g}") if isinstance(value, float) else value
        self._note({"name": name, "value": rounded, "unit": unit, "about": about})

    def skip(self, name: str, reason: str) -> None:
        """Note that a figure cannot be taken here, and why."""
        self._note({"name": name, "skipped": reason})

    def skip_step(self, reason: str) -> None:
        """Note that the whole step cannot run here."""
        self._content["skipped"] = reason
        self._write()

    def detail(self, name: str, value: object) -> None:
        """Note what the table does not show."""
        self._content["details"][name] = value
        self._write()

    def _note(self, figure: dict[str, Any]) -> None:
        self._content["figures"].append(figure | {"device": self._device})
        self._write()

    def _write(self) -> None:
        replace_file(self._file, json.dumps(self._content))


def replace_file(file: Path, text: str) -> None:
    """Write a file so that a reader sees either the old or the new one, whole."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)
