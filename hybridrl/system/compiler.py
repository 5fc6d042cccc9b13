"""The C compiler of this machine, which Triton needs at the first use of a kernel on a GPU."""

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
    own = os.environ.get("CC")
    if own is not None and shutil.which(own) is None:
        return f"CC={own} is no program here"
    if own is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "no gcc or clang is on PATH, and CC is not set"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton
    headers = Path(sysconfig.get_paths(scheme=scheme)["include"])
    return "" if (headers / "Python.h").is_file() else f"{headers} has no Python.h"
