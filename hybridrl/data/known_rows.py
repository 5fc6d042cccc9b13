"""The rows of a run by digest: a run that resumes keeps its split where its files have grown."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl.data.prompts import Item

FILE = "rows.json"
"""In the run directory: the rows of each source and evaluation set."""


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Digests of a source's rows, in the run's order: those held out, and those of training."""

    held_out: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()

    def arranged(self, items: Sequence[Item]) -> tuple[list[Item], list[Item], list[Item]]:
        """Part `items` into the held-out ones, the ones that were trained on, and new ones.

        The known ones are in the run's order, new ones in that of `items`.
        """
        left: defaultdict[str, list[Item]] = defaultdict(list)
        for item in reversed(items):
            left[row_digest(item)].append(item)

        def taken(digests: Iterable[str]) -> list[Item]:
            return [left[digest].pop() for digest in digests if left.get(digest)]

        held_out, trained = taken(self.held_out), taken(self.trained)
        new = {id(item) for same in left.values() for item in same}
        return held_out, trained, [item for item in items if id(item) in new]

    def gone(self, now: "KnownRows", num_trained: int) -> int:
        """How many of its rows are not there `now`; of training's the first `num_trained`."""
        lost = Counter(self.held_out) - Counter(now.held_out)
        lost += Counter(self.trained[:num_trained]) - Counter(now.trained)
        return lost.total()


def row_json(item: Item) -> str:
    """A row's text; an object that JSON does not know counts by its type: its text may vary."""
    return json.dumps(item.item, skipkeys=True, default=lambda value: type(value).__name__)


def row_digest(item: Item) -> str:
    """The digest of a row as its file has it, whatever template it is put into."""
    text = row_json(item).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def rows_of(
    train: Iterable[Item], held_out: Iterable[Item], sets: Mapping[str, Iterable[Item]]
) -> dict[str, KnownRows]:
    """The rows of a run by source, and those of evaluation sets with a source by `eval.sets.NAME`.

    `sets` are all evaluation sets by name.
    """
    parts: defaultdict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for item in held_out:
        parts[item.source][0].append(row_digest(item))
    for item in train:
        parts[item.source][1].append(row_digest(item))
    for name, items in sets.items():
        of_set = [item for item in items if item.source == f"eval.sets.{name}"]
        if of_set:
            parts[f"eval.sets.{name}"][0].extend(map(row_digest, of_set))
    return {name: KnownRows(tuple(out), tuple(own)) for name, (out, own) in parts.items()}


def write_rows(run_dir: Path, rows: Mapping[str, KnownRows]) -> None:
    """Write the file of a run directory."""
    record: dict[str, Any] = {name: asdict(known) for name, known in rows.items()}
    new = run_dir / f".{FILE}.new"
    new.write_text(json.dumps(record))
    new.replace(run_dir / FILE)


def read_rows(run_dir: Path) -> dict[str, KnownRows]:
    """The rows of the run in a directory; none of a run of an earlier version."""
    file = run_dir / FILE
    if not file.is_file():
        return {}
    return {
        name: KnownRows(tuple(known["held_out"]), tuple(known["trained"]))
        for name, known in json.loads(file.read_text()).items()
    }
