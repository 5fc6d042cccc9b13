"""The compilers of this machine: Triton needs one for kernels on a GPU, torch on a CPU."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def compiler_fault() -> str:
    """Return why Triton cannot build a kernel's launcher here; "" if it can, or is not installed.

    As `triton.runtime.build`: the program of CC, else gcc or clang, with the headers of Python.
    """
    if importlib.util.find_spec("triton") is None:  # torch computes what the kernels would
        return ""
    if fault := _missing("CC", "gcc", "clang"):
        return fault
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton
    headers = Path(sysconfig.get_paths(scheme=scheme)["include"])
    return "" if (headers / "Python.h").is_file() else f"{headers} has no Python.h"


def cpp_compiler_fault() -> str:
    """Return why `torch.compile` cannot build a kernel for this machine's CPU; "" if it can."""
    return _missing("CXX", "g++")


def _missing(variable: str, *programs: str) -> str:
    """Why none of the compilers can be called; the variable, where it is set, names another one."""
    own = os.environ.get(variable)
    if own is not None:
        return "" if shutil.which(own) else f"{variable}={own} is no program here"
    if any(map(shutil.which, programs)):
        return ""
    return f"no {' or '.join(programs)} is on PATH, and {variable} is not set"
