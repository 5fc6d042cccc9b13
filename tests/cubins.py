"""The Triton kernels compiled for NVIDIA GPUs that are not here, and what they take of one.

A launch by the package's own functions stops before it runs, so types, constants and
specializations are those of a run. As a program it prints figures of cases by name, or by the
beginning of their names:

    python tests/cubins.py "sm_90 bfloat16" "sm_120"
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode_cubins import DecodeCase, decode_cases
from train_cubins import TrainCase, train_cases

KIB = 2**10
SHARED_LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KiB of shared memory that a block may have, by compute capability (CUDA's programming guide)."""
INSTRUCTIONS = ("tcgen05.mma", "wgmma", "mma.sync", "fma.rn.f32")
"""The first of them in a kernel's code names its cores: tensor cores, by generation, or others.

A kernel that multiplies no matrices has none that counts.
"""
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = {
    "divisible": (151936, 4096),
    "odd vocabulary": (50257, 4096),
    "odd features": (151936, 1000),
}
"""Vocabulary and features. Triton compiles anew for numbers that 16 does not divide."""
TOKENS = 8192
KERNELS = ("partial", "grad_logits")
HEADS = ("", " capped", " biased")
"""What the head does besides its product: by the beginning of a name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One compilation. `shape` is a key of SHAPES, `kernel` one of KERNELS, `head` of HEADS."""

    capability: int
    dtype: str
    shape: str
    kernel: str
    with_entropy: bool
    head: str = ""

    @property
    def name(self) -> str:
        """Its key in tests/kernels/cubins.json."""
        entropy = " with entropy" if self.with_entropy else ""
        return f"sm_{self.capability} {self.dtype} {self.shape} {self.kernel}{entropy}{self.head}"

    @property
    def function(self) -> str:
        """The name of the function that is compiled."""
        return f"_{self.kernel}_kernel"

    @property
    def multiplies(self) -> bool:
        """Whether tensor cores have something to do."""
        return True

    def launch(self) -> None:
        """Launch it as the package does."""
        dtype = getattr(torch, self.dtype)
        launch(self.kernel, TOKENS, self.shape, dtype, self.with_entropy, self.head)


def all_cases() -> list[Case | DecodeCase | TrainCase]:
    """The cases of log-probabilities, those of a decode step, and those of layers in training."""
    decode = [case for capability in SHARED_LIMITS for case in decode_cases(capability)]
    train = [case for capability in SHARED_LIMITS for case in train_cases(capability)]
    return [*log_probs_cases(), *decode, *train]


def log_probs_cases() -> list[Case]:
    """Every GPU, dtype and kernel; odd shapes in bfloat16, from which float16 does not differ.

    Heads that cap or add a bias in bfloat16 and divisible shapes.
    """
    return [
        Case(capability, dtype, shape, kernel, with_entropy, head)
        for capability in SHARED_LIMITS
        for dtype in DTYPES
        for shape in SHAPES
        if shape == "divisible" or dtype == "bfloat16"
        for kernel in KERNELS
        for with_entropy in (False, True)
        for head in HEADS
        if not head or (dtype, shape) == ("bfloat16", "divisible")
    ]


class _Driver:
    """Triton's view of a GPU of this compute capability; it can compile and nothing else."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def launches(capability: int) -> Iterator[list[Any]]:
    """Meanwhile a launch compiles for GPUs of this `capability` only; yields what was compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    driver.set_active(_Driver(capability))
    try:
        yield compiled
    finally:
        JITFunction.run, driver._active = run, active


def launch(
    kernel: str,
    tokens: int,
    shape: str,
    dtype: torch.dtype,
    with_entropy: bool,
    head: str = "",
) -> None:
    """Launch a kernel as the package does, on tensors without values."""
    from hybridrl.kernels import linear_log_probs_triton as ours

    vocab, features = SHAPES[shape]
    per_token = torch.empty(tokens, device="meta")
    inputs = (
        torch.empty(tokens, features, dtype=dtype, device="meta"),
        torch.empty(vocab, features, dtype=dtype, device="meta"),
        torch.empty(tokens, dtype=torch.int64, device="meta"),
    )
    bias = torch.empty(vocab, dtype=dtype, device="meta") if head == " biased" else None
    cap = 30.0 if head == " capped" else None
    if kernel == "partial":
        ours.partial(*inputs, 1.0, with_entropy, 0, bias, cap)
    else:
        entropy = per_token if with_entropy else None
        ours.grad_logits(*inputs, per_token, entropy, per_token, per_token, 1.0, bias, cap)


def figures(case: Case | DecodeCase | TrainCase) -> dict[str, Any]:
    """What one compilation takes: `stack` and `shared` in bytes a thread and a block."""
    with launches(case.capability) as compiled:
        case.launch()
    (kernel,) = (one for one in compiled if one.metadata.name == case.function)
    registers, stack = resources(kernel.asm["cubin"])
    taken: dict[str, Any] = {}
    if case.multiplies:
        taken["instruction"] = next(name for name in INSTRUCTIONS if name in kernel.asm["ptx"])
    return taken | {
        "threads": 32 * kernel.metadata.num_warps,
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, where spilled registers lie, of a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Meanwhile Triton finds no earlier compilation."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def compile_all(is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Figures of every case whose name is wanted."""
    with empty_cache():
        return {case.name: figures(case) for case in all_cases() if is_wanted(case.name)}


if __name__ == "__main__":
    print(json.dumps(compile_all(lambda name: name.startswith(tuple(sys.argv[1:])))))
