"""The safetensors files of a model: which has which tensor, and whether all are there and whole."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from hybridrl.config import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_NAMES = 8  # in a line


def weight_files(path: str) -> dict[str, Path]:
    """The file of each tensor of the model at `path`, a directory or a hub name.

    As in transformers, these are all tensors of the index's files, named there or not. Raises
    OSError if none can be read, or not what the index file says, or one is in two files.
    """
    single = _optional(path, SINGLE)
    if single is not None:  # transformers reads it first
        with open_file(single) as opened:
            return dict.fromkeys(opened.keys(), single)
    index = _optional(path, INDEX)
    if index is None:
        raise OSError(f"{SINGLE} is missing")
    names = _weight_map(index)
    files = {file: _optional(path, file) for file in sorted(set(names.values()))}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise OSError(f"{INDEX} names {first_few(missing)}, not there")
    file_of: dict[str, Path] = {}
    for file in filter(None, files.values()):
        with open_file(file) as opened:
            stored = set(opened.keys())
        if lacks := sorted({name for name, own in names.items() if files[own] == file} - stored):
            raise OSError(f"{INDEX} names {first_few(lacks)} in {file.name}, which lacks it")
        if twice := sorted(stored & file_of.keys()):
            there = file_of[twice[0]].name
            raise OSError(f"{file.name} has {first_few(twice)}, which {there} has, too")
        file_of |= dict.fromkeys(stored, file)
    return file_of


def open_file(file: Path) -> Any:
    """A safetensors file, opened; raises OSError for one that is cut off or damaged."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from error


def check_files(path: Path, key: str) -> None:
    """Raise ConfigError, which names `key`, for a model's directory without whole weights.

    Only headers are read: they tell the length of a file.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(key, path, "a Hugging Face directory (no config.json in it)")
    files = sorted(path.glob("*.safetensors"))
    if not files and not (path / INDEX).is_file():
        raise ConfigError(key, path, "weights in safetensors (none in it)")
    try:
        for file in files:
            open_file(file)
        weight_files(str(path))
    except OSError as error:
        raise ConfigError(key, path, f"whole files ({error})") from error


def first_few(names: list[str]) -> str:
    """Return the names in a line, or the first few of them and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _optional(path: str, name: str) -> Path | None:
    """A file of a directory or of a hub's model, which is fetched once; None if it is missing."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{index.name} has no weight_map ({type(error).__name__})") from error
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise OSError(f"{index.name} has no weight_map of names")
    return names
