"""Every sample of a run as Parquet: RUN/samples/step-000012-rank-0003.parquet and the like.

Invariants, also when a writer is killed between any two instructions:
1. a file whose name ends in `.parquet` is whole;
2. a step's files hold each of its samples once.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.surrogates import without_surrogates
from hybridrl.telemetry.records import named

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "samples"
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_ROW_GROUP = 64  # samples, of which a reader of one sample decodes all
_ORDER = ("prompt_position", "branch", "k")
UNREADABLE = (OSError, ValueError, KeyError)
"""What reading raises of a file that is gone, is damaged, or lacks a column."""


def schema() -> "pa.Schema":
    """The columns, the same in every file of every run. docs/watch.md says what they mean."""
    import pyarrow as pa

    text, whole, number, many = pa.string(), pa.int64(), pa.float64(), pa.list_
    span = {"start": pa.int32(), "stop": pa.int32(), "version": whole, "trained": pa.bool_()}
    scalar = {"name": text, "value": number, "text": text}
    tensor = {"name": text, "values": many(pa.float32())}
    return pa.schema(
        {
            **{"step": whole, "phase": text, "id": text},
            **{"prompt_position": whole, "branch": text, "k": pa.int32()},
            **{"source": text, "task": text, "prompt": text, "response": text},
            **{"prompt_tokens": pa.int32(), "response_tokens": pa.int32()},
            **{"prompt_ids": many(pa.int32()), "response_ids": many(pa.int32())},
            **{"token_texts": many(text), "log_probs": many(pa.float32())},
            **{"reward": number, "advantage": number, "advantages": many(pa.float32())},
            **{"finish": text, "status": text, "drop_reason": text, "drop_text": text},
            **{"spans": many(pa.struct(span)), "scalars": many(pa.struct(scalar))},
            **{"fields": many(pa.struct(tensor))},
        }
    )


def write(run_dir: Path, step: int, rank: int, columns: dict[str, Any]) -> Path:
    """Write the samples of one rank and step, in one piece, and return the file's path.

    A file of the same step and rank is replaced. A lone surrogate becomes a question mark: it has
    no UTF-8 form. Raises OSError with the path when the disk is full.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = path_of(run_dir, step, rank)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    table = pa.table(without_surrogates(columns)[0], schema=schema())
    try:
        with named(path), partial.open("wb") as file:
            pq.write_table(table, file, compression="zstd", row_group_size=_ROW_GROUP)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def path_of(run_dir: Path, step: int, rank: int) -> Path:
    """The file of a step's samples on one rank."""
    return run_dir / FOLDER / f"step-{step:06d}-rank-{rank:04d}.parquet"


def files_by_step(run_dir: Path) -> dict[int, list[Path]]:
    """The files of each step, ascending."""
    steps: dict[int, list[Path]] = {}
    for path in sorted((run_dir / FOLDER).glob("*.parquet")):
        if match := _NAME.fullmatch(path.name):
            steps.setdefault(int(match[1]), []).append(path)
    return dict(sorted(steps.items()))


def forget_after(run_dir: Path, step: int) -> None:
    """Delete the samples of later steps, which will be made again, and what a kill has left."""
    for later, paths in files_by_step(run_dir).items():
        for path in paths if later > step else []:
            path.unlink()
    for partial in (run_dir / FOLDER).glob(".step-*"):
        partial.unlink()


def read(paths: Sequence[Path], columns: Sequence[str]) -> "pa.Table":
    """Columns of the samples in `paths`, in the order of prompts, as a table."""
    return in_order([read_file(path, columns) for path in paths])


def read_file(path: Path, columns: Sequence[str]) -> "pa.Table":
    """Columns of the samples in one file, and those that `in_order` needs.

    Raises one of `UNREADABLE` for a file that is gone, is damaged, or lacks a column.
    """
    import pyarrow.parquet as pq

    wanted = list(dict.fromkeys((*_ORDER, *columns)))
    # Not read_table, which takes the folders of a path for columns: `a=b/` is one.
    with pq.ParquetFile(path) as file:
        return file.read(columns=wanted).select(wanted)


def in_order(tables: Sequence["pa.Table"]) -> "pa.Table":
    """Tables of `read_file` as one, in the order of prompts."""
    import pyarrow as pa

    return pa.concat_tables(tables).sort_by([(name, "ascending") for name in _ORDER])


def read_sample(path: Path, id: str) -> dict[str, Any] | None:
    """One sample with all of its columns; None if the file has not got it. Raises as `read_file`.

    No more of the file is read than ids, and the row group of that sample.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            ids = file.read_row_group(group, columns=["id"])["id"].to_pylist()
            if id in ids:
                row = file.read_row_group(group).slice(ids.index(id), 1)
                (sample,) = row.select(schema().names).to_pylist()
                return dict(sample)
    return None
