"""Triton's interpreter, for kernels that are tested without a GPU."""

import importlib.util
import os
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="the package triton is not installed (its wheels are for Linux)",
)


def interpret() -> None:
    """Make this process, which ends after the test, run Triton's kernels in its interpreter.

    Triton decides when a kernel is defined, its own library's too; transformers has imported that.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
