"""Log-probabilities from hidden states, forward and backward: seconds and peak memory.

On a GPU against Liger's fused linear cross entropy, in bf16 at the sizes of real heads; on a CPU
against materialized logits, in float32. Both sides give the gradients of the hidden states and of
the head. Prints one JSON object a line, as `run.py`. docs/kernels.md describes the kernels.
"""

import argparse
import ctypes
import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from lines import line, show, take_turns

from hybridrl.kernels.linear_log_probs import linear_log_probs

MIB = 2**20
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean negative log-probability, a number; the others likewise."""
    return -linear_log_probs(hidden, weight, targets)[0].mean()


def logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """By materialized logits, in float32 as trainers take them."""
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), targets)


def liger() -> Loss:
    """Liger's fused linear cross entropy; it makes the gradients in its forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, targets: loss(weight, hidden, targets)


class Case:
    """One size: tensors on a device, and what a side takes for them."""

    def __init__(self, size: Sequence[int], dtype: torch.dtype, device: str) -> None:
        tokens, features, vocab = size
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, features, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocab, features, device=device, dtype=dtype) / features**0.5
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(vocab, (tokens,), device=device)
        self.on_gpu = device == "cuda"

    def step(self, loss: Loss) -> float:
        """Forward and backward; the loss."""
        self.hidden.grad = self.weight.grad = None
        value = loss(self.hidden, self.weight, self.targets)
        value.backward()
        return value.item()  # waits for a GPU

    def seconds(self, loss: Loss) -> float:
        """Measurements of one step."""
        start = time.perf_counter()
        self.step(loss)
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def peak_mib(self, loss: Loss) -> float:
        """The most that a step held beyond its inputs, the two gradients included."""
        self.hidden.grad = self.weight.grad = None
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
            self.step(loss)
            return (torch.cuda.max_memory_allocated() - allocated) / MIB
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is resident until then
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
        before = resident_mib("VmRSS")
        self.step(loss)
        return resident_mib("VmHWM") - before


def resident_mib(field: str) -> float:
    """A field of /proc/self/status: VmRSS, what is resident; VmHWM, the peak of it."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match, field
    return int(match[1]) / 1024


def compare(case: Case, name: str, other: Loss, rounds: int) -> None:
    """Print the lines of ours against another side, taking turns."""
    sides = {"ours": ours, name: other}
    measures = {"seconds": ("s", case.seconds), "peak": ("MiB", case.peak_mib)}
    losses = [case.step(loss) for loss in sides.values()]
    sizes = dict(zip(("tokens", "features"), case.hidden.shape, strict=True))
    for measure, (unit, of) in measures.items():
        measured = take_turns({side: partial(of, loss) for side, loss in sides.items()}, rounds)
        show(
            line(
                f"linear_log_probs_{measure}_vs_{name}",
                unit,
                "lower",
                measured["ours"],
                measured[name],
                **sizes,
                vocab=len(case.weight),
                dtype=str(case.hidden.dtype).removeprefix("torch."),
                loss_difference=float(f"{abs(losses[0] / losses[1] - 1):.1e}"),
            )
        )


def why_not_liger() -> str | None:
    """The missing requirement of Liger's side; None if there is none."""
    if not torch.cuda.is_available():
        return "no CUDA device here, and Liger's kernels run on nothing else"
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed; it is in the extra `bench`"
    return None


def cases(sizes: Iterable[Sequence[int]] | None, on_gpu: bool) -> Iterator[Case]:
    """The cases of `sizes`; by default two large models' heads on a GPU, a small one's elsewhere.

    One case at a time is made: a case's tensors are gone before those of the next are made.
    """
    usual = [(8192, 2048, 151_936), (8192, 4096, 151_936)] if on_gpu else [(2048, 128, 32_000)]
    for size in sizes or usual:
        yield Case(size, *((torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")))


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", nargs=3, type=int, action="append", metavar=("TOKENS", "FEATURES", "VOCAB")
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    missing = why_not_liger()
    if missing:
        show({"name": "linear_log_probs_vs_liger", "skipped": missing})
    on_gpu = torch.cuda.is_available()
    for case in cases(args.size, on_gpu):
        compare(case, "logits", logits, args.rounds)
        if not missing:
            compare(case, "liger", liger(), args.rounds)


if __name__ == "__main__":
    main()
