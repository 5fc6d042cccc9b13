"""The kernels of fused layers in training, as cases that `cubins` compiles."""

from dataclasses import dataclass

import torch

TOKENS = 8192
WIDTHS = {"1.7b": (2048, 6144, 16, 8), "8b": (4096, 12288, 32, 8), "70b": (8192, 28672, 64, 8)}
"""Features of a token and of a feed-forward layer, query heads and key-value heads of 128."""
KERNELS = {
    "norm": "_norm_kernel",
    "norm of heads": "_norm_kernel",
    "gradients of a norm": "_norm_grad_kernel",
    "gradients of a frozen norm": "_norm_grad_kernel",
    "gradients of a norm of heads": "_norm_grad_kernel",
    "sum of a gradient": "_sum_kernel",
    "rotation": "_rotate_kernel",
    "rotation back": "_rotate_kernel",
    "silu": "_act_mul_kernel",
    "gelu_tanh": "_act_mul_kernel",
    "gradients of silu": "_act_mul_grad_kernel",
    "gradients of gelu": "_act_mul_grad_kernel",
    "gradients of gelu_tanh": "_act_mul_grad_kernel",
}
"""What is compiled, and its function."""
OF_WIDTHS = "norm", "gradients of a norm", "rotation"
"""Kernels whose tiles follow the widths of a model."""


@dataclass(frozen=True, slots=True)
class TrainCase:
    """One compilation: a key of KERNELS with a key of WIDTHS."""

    capability: int
    dtype: str
    shape: str
    kernel: str

    @property
    def name(self) -> str:
        """Its key in tests/kernels/cubins.json."""
        return f"sm_{self.capability} {self.dtype} {self.shape} train {self.kernel}"

    @property
    def function(self) -> str:
        """The name of the function that is compiled."""
        return KERNELS[self.kernel]

    @property
    def multiplies(self) -> bool:
        """There are no products of matrices."""
        return False

    def launch(self) -> None:
        """Launch it as the package does, on tensors without values."""
        launch(self.kernel, getattr(torch, self.dtype), *WIDTHS[self.shape])


def train_cases(capability: int) -> list[TrainCase]:
    """Every kernel for an 8B in bfloat16, and those that follow the widths for other models."""
    cases = [("bfloat16", "8b", kernel) for kernel in KERNELS]
    cases += [("bfloat16", shape, kernel) for shape in ("1.7b", "70b") for kernel in OF_WIDTHS]
    cases += [("float32", "70b", kernel) for kernel in OF_WIDTHS]
    return [TrainCase(capability, *case) for case in cases]


def launch(
    kernel: str, dtype: torch.dtype, features: int, wide: int, heads: int, kv_heads: int
) -> None:
    """Launch what `kernel` says for rows of `TOKENS` tokens."""
    from hybridrl.kernels import train_layer_triton as parts

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if "norm" in kernel or kernel == "sum of a gradient":
        rows, width = (TOKENS * heads, 128) if "heads" in kernel else (TOKENS, features)
        x, weight, scales = tensor(rows, width), tensor(width), tensor(rows, dtype=torch.float32)
        if kernel.startswith("norm"):
            parts.norm(x, weight, 1e-6, 0.0, x, scales)
        else:
            of_weight = None if "frozen" in kernel else weight
            parts.norm_grad(x, x, weight, scales, 0.0, x, of_weight)
    elif "rotation" in kernel:
        both = tensor(TOKENS, heads, 128), tensor(TOKENS, kv_heads, 128)
        angles = tensor(TOKENS, 128), tensor(TOKENS, 128)
        parts.rotate(both, *angles, both, back=kernel == "rotation back")
    else:
        x, name = tensor(TOKENS, wide), kernel.removeprefix("gradients of ")
        if name == kernel:
            parts.act_mul(x, x, name, x)
        else:
            parts.act_mul_grad(x, x, x, name, x, x)
