"""Imports without collections of garbage."""

import gc
import subprocess
import sys

import pytest

from hybridrl.system.imports import imports_uncollected

PROGRAM = """
from hybridrl.system.imports import imports_uncollected

with imports_uncollected():
    import triton.language
"""


def test_garbage_is_collected_again_after_them() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), imports_uncollected():
        _ = gc.isenabled() or 1 / 0
    assert gc.isenabled()


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_nothing_is_reported_as_a_leak() -> None:
    """By nanobind, at the end of a process whose imports were frozen."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
