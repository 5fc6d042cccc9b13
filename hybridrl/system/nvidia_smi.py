"""GPUs of this node by NVIDIA's own program, `nvidia-smi`: without torch, and without using one.

It lists every GPU of the node. A process may see fewer, by CUDA_VISIBLE_DEVICES:

| value | the process sees |
|---|---|
| not set | all |
| `3`, `0,2` | those of these numbers, up to the first that is none |
| `GPU-8a6f...`, or a beginning of it | those of these UUIDs, up to the first that is none |
| `MIG-9b3d...` | one slice of a GPU, the first that is named |
| empty, `-1` | none |
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version,compute_cap"
_MIB = 2**20
_TIMEOUT_S = 60.0  # without its daemon the driver starts for each call: seconds a GPU
_GPU_LINE = re.compile(r"GPU (\d+): ")
_MIG_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as `nvidia-smi` shows it; sizes are 0 where it does not know them."""

    name: str
    memory_bytes: int
    used_bytes: int
    driver: str
    capability: str
    """Compute capability: `9.0`."""


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    uuid: str
    gpu: Gpu


def read_gpus(visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """GPUs that a process with CUDA_VISIBLE_DEVICES=`visible` sees, and how `nvidia-smi` fails.

    CUDA counts GPUs by their speed, `nvidia-smi` by their slots: alike where the GPUs are. The
    second is a line, empty where it does not fail or is not installed.
    """
    lines, fault = _output(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    rows = []
    for line in lines:
        if row := _row(line):
            rows.append(row)
        else:
            fault = fault or line
    return tuple(_visible(rows, visible)), fault


def _output(*arguments: str) -> tuple[list[str], str]:
    """Lines that are not blank. Where the program fails only rows, and the first other line."""
    command, pipe = ["nvidia-smi", *arguments], subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    except OSError:  # it is not installed
        return [], ""
    try:
        stdout, stderr = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting: inside of a dead driver it does not end
        return [], f"nvidia-smi does not answer within {_TIMEOUT_S:g} s"
    lines = [line for line in stdout.splitlines() if line.strip()]
    if not process.returncode:
        return lines, ""
    said = [line.strip() for line in [*lines, *stderr.splitlines()] if not _row(line)]
    reason = next(filter(None, said), f"nvidia-smi ends with exit code {process.returncode}")
    return [line for line in lines if _row(line)], reason


def _row(line: str) -> _Row | None:
    columns = [column.strip() for column in line.split(",")]
    if len(columns) != len(_FIELDS.split(",")) or not columns[0].isdigit():
        return None
    index, uuid, name, total, used, driver, capability = columns
    return _Row(int(index), uuid, Gpu(name, _mib(total), _mib(used), driver, capability))


def _mib(text: str) -> int:
    """Bytes; 0 if `nvidia-smi` does not know them ([N/A])."""
    return int(float(text) * _MIB) if text.replace(".", "").isdigit() else 0


def _visible(rows: Sequence[_Row], visible: str | None) -> Iterator[Gpu]:
    if visible is None:
        yield from (row.gpu for row in rows)
        return
    for name in visible.split(","):
        name = name.strip()
        if name.startswith("MIG-"):
            yield from _slice(rows, name)
            return
        named = [row for row in rows if _is_named(row, name)]
        if len(named) != 1:
            return
        yield named[0].gpu


def _is_named(row: _Row, name: str) -> bool:
    if name.startswith("GPU-"):
        return row.uuid.startswith(name)
    return name.isdigit() and row.index == int(name)


def _slice(rows: Sequence[_Row], name: str) -> Iterator[Gpu]:
    """The MIG device `name`, of unknown size, as `nvidia-smi -L` lists it below its GPU."""
    index = -1
    for line in _output("-L")[0]:
        if owner := _GPU_LINE.match(line):
            index = int(owner[1])
        elif (mig := _MIG_LINE.match(line)) and mig[2] == name:
            for row in rows:
                if row.index == index:
                    full_name = f"{row.gpu.name} MIG {mig[1]}"
                    yield replace(row.gpu, name=full_name, memory_bytes=0, used_bytes=0)
