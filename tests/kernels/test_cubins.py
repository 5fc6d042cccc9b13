"""The Triton kernels for NVIDIA's GPUs, compiled without one: what they take is in a table."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cubins
import decode_cubins
import pytest
import torch
import train_cubins

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is not installed (its wheels are for Linux)",
)

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("cubins.json")
WRITE = "CUBINS_WRITE"
"""Set this variable to rewrite the table."""
REWRITE = f"`{WRITE}=1 make test-cubins` rewrites {TABLE.name}"

INSTRUCTIONS = {90: "wgmma", 100: "tcgen05.mma", 103: "tcgen05.mma"}  # elsewhere mma.sync
SPILLED = {"divisible": 32, "odd vocabulary": 32, "odd features": 352}
"""Bytes of a thread's stack, at most. Widths that 16 does not divide are loaded by the element."""
SPILLED_IN_LAYERS = 16
"""Four registers: the assembler spills two of some kernels to have 128 left."""
HALVES = (("sm_80", "sm_86", "sm_89", "sm_90"), ("sm_100", "sm_103", "sm_120"))
"""GPUs, in two processes of about equal time."""


def _origin() -> dict[str, str]:
    """What the figures depend on: Triton's version, whose own ptxas makes them, and our sources."""
    tests = (Path(module.__file__) for module in (cubins, decode_cubins, train_cubins))
    files = *sorted(ROOT.glob("kernels/*_triton.py")), *tests
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return {"triton": importlib.metadata.version("triton"), "sources": sources.hexdigest()}


def _table() -> dict[str, Any]:
    """Figures by case, of these sources."""
    table = json.loads(TABLE.read_text())
    figures: dict[str, Any] = table.pop("cubins")
    assert table == _origin(), REWRITE
    return figures


def _assert_equal(figures: dict[str, Any]) -> None:
    """A change is a decision: fewer, or more for a reason that the commit names."""
    table = _table()
    changes = [
        f"{name}: {table.get(name)} -> {taken}"
        for name, taken in figures.items()
        if taken != table.get(name)
    ]
    assert not changes, "\n".join([*changes, REWRITE])


def _write(figures: dict[str, Any]) -> None:
    origin = json.dumps(_origin(), indent=1).removesuffix("\n}")
    rows = ",\n".join(
        f"  {json.dumps(case.name)}: {json.dumps(figures[case.name])}"
        for case in cubins.all_cases()
    )
    TABLE.write_text(f'{origin},\n "cubins": {{\n{rows}\n }}\n}}\n')


@pytest.mark.cubins
@pytest.mark.timeout(1800)
def test_every_cubin_takes_what_the_table_says(tmp_path: Path) -> None:
    started = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number, prefixes in enumerate(HALVES):
        out = tmp_path / f"{number}.json"
        with out.open("w") as file:
            command = [sys.executable, cubins.__file__, *prefixes]
            started.append((subprocess.Popen(command, stdout=file, env=environment), out))
    figures: dict[str, Any] = {}
    for process, out in started:
        assert process.wait() == 0, "a kernel does not compile: its error is above"
        figures |= json.loads(out.read_text())
    assert figures.keys() == {case.name for case in cubins.all_cases()}
    if WRITE in os.environ:
        _write(figures)
    _assert_equal(figures)


def test_the_table_is_whole() -> None:
    assert list(_table()) == [case.name for case in cubins.all_cases()]


@pytest.mark.parametrize("case", cubins.all_cases(), ids=lambda case: case.name)
def test_a_cubin_fits_its_gpu(
    case: cubins.Case | decode_cubins.DecodeCase | train_cubins.TrainCase,
) -> None:
    """Its shared memory, registers of a whole block, few spilled ones, and the tensor cores."""
    taken = _table()[case.name]
    assert taken["shared"] <= cubins.SHARED_LIMITS[case.capability] * cubins.KIB
    per_thread = -(-taken["registers"] // 8) * 8  # GPUs hand them out by eight
    assert per_thread * taken["threads"] <= 65536
    assert taken["stack"] <= SPILLED.get(case.shape, SPILLED_IN_LAYERS)
    tensor_cores = INSTRUCTIONS.get(case.capability, "mma.sync")
    if isinstance(case, decode_cubins.DecodeCase):
        tensor_cores = "mma.sync"  # 16 rows: too few for the newer ones
    if case.multiplies:
        assert taken["instruction"] == ("fma.rn.f32" if case.dtype == "float32" else tensor_cores)


def test_float16_takes_what_bfloat16_takes() -> None:
    """So odd shapes are compiled in one of the two."""
    table = _table()
    for name, taken in table.items():
        if " float16 " in name:
            assert taken == table[name.replace("float16", "bfloat16")], name


@pytest.mark.parametrize("kernel", decode_cubins.LAYER | decode_cubins.STEP)
def test_a_decode_kernel_is_compiled_once(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows, and for any length of sequences above a split."""
    dtype, shape = ("float32", "step") if kernel in decode_cubins.STEP else ("bfloat16", "narrow")
    case = decode_cubins.DecodeCase(80, dtype, shape, kernel)
    with cubins.empty_cache(), cubins.launches(80) as compiled:
        for rows, length in ((4, 1024), (20, 5000), (64, 32768)):
            monkeypatch.setattr(decode_cubins, "TOKENS", rows)
            monkeypatch.setattr(decode_cubins, "MAX_LENGTH", length)
            case.launch()
    hashes = {one.hash for one in compiled if one.metadata.name == case.function}
    assert len(hashes) == 1


@pytest.mark.parametrize("kernel", train_cubins.KERNELS)
def test_a_kernel_of_a_layer_is_compiled_once(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of tokens: those of micro-batches differ."""
    case = train_cubins.TrainCase(80, "bfloat16", "1.7b", kernel)
    with cubins.empty_cache(), cubins.launches(80) as compiled:
        for tokens in (1, 17, 128, 8192):
            monkeypatch.setattr(train_cubins, "TOKENS", tokens)
            case.launch()
    hashes = {one.hash for one in compiled if one.metadata.name == case.function}
    assert len(hashes) == 1


@pytest.mark.parametrize("kernel", cubins.KERNELS)
def test_one_compilation_serves_any_number_of_tokens(kernel: str) -> None:
    """Each takes a second or more on every rank, and micro-batches differ in length."""
    with cubins.empty_cache(), cubins.launches(80) as compiled:
        for tokens in (1, 17, 128, 8192):
            cubins.launch(kernel, tokens, "divisible", torch.bfloat16, True)
    assert len(compiled) == 4
    assert len({launched.hash for launched in compiled}) == 1
