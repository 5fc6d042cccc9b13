"""Whether Triton finds what it builds a kernel's launcher with: against Triton's own search."""

import sysconfig
from pathlib import Path

import pytest

from hybridrl.system.compiler import compiler_fault, cpp_compiler_fault


def program(folder: Path, name: str) -> Path:
    """A program that does nothing."""
    file = folder / name
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return file


def triton_finds_one(tmp_path: Path) -> bool:
    """Whether Triton gets as far as calling a compiler."""
    from triton.runtime import build

    try:
        build._build("x", str(tmp_path / "x.c"), str(tmp_path), [], [], [], [])
    except (RuntimeError, OSError):  # none was found, or CC is no program
        return False
    return True


@pytest.mark.parametrize(
    ("there", "own", "fault"),
    [
        ([], None, "no gcc or clang is on PATH, and CC is not set"),
        (["gcc"], None, ""),
        (["clang"], None, ""),
        (["cc"], None, "no gcc or clang is on PATH, and CC is not set"),
        (["gcc"], "icx", "CC=icx is no program here"),
        (["icx"], "icx", ""),
    ],
)
def test_as_triton_looks_for_it(
    there: list[str], own: str | None, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if own is not None:
        monkeypatch.setenv("CC", own)
    for name in there:
        program(tmp_path, name)
    assert compiler_fault() == fault
    pytest.importorskip("triton", reason="Triton is installed on Linux")
    assert triton_finds_one(tmp_path) == (not fault)


def test_headers_of_python_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(program(tmp_path, "cc")))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert compiler_fault() == f"{tmp_path} has no Python.h"


def test_without_triton_there_is_nothing_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compiler_fault() == ""


@pytest.mark.parametrize(
    ("there", "own", "fault"),
    [
        ([], None, "no g++ is on PATH, and CXX is not set"),
        (["g++"], None, ""),
        (["g++"], "icpx", "CXX=icpx is no program here"),
        (["icpx"], "icpx", ""),
    ],
)
def test_a_cpp_compiler_for_compiled_layers(
    there: list[str], own: str | None, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if own is not None:
        monkeypatch.setenv("CXX", own)
    for name in there:
        program(tmp_path, name)
    assert cpp_compiler_fault() == fault
