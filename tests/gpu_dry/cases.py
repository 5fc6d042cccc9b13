"""The table of models and rank counts that are run without a GPU."""

from dataclasses import replace

from gpu_dry.dry_run import Case
from hybridrl.config import PipelineSchedule

SMALL = "qwen3_1.7b"

CASES: dict[str, Case] = {
    # Whole, and at two depths: the others' figures by layer come from such a difference.
    "1.7b on 1": Case(model=SMALL),
    "1.7b on 1, 2 layers": Case(model=SMALL, layers=2, critic=True, traced=True),
    "1.7b on 1, 3 layers": Case(model=SMALL, layers=3),
    "1.7b on 8": Case(model=SMALL, ranks=8, rank=3),
    "1.7b on 8, adapters": Case(model=SMALL, layers=2, ranks=8, lora=16, critic=True, traced=True),
    "8b on 1, torch attention": Case(
        model="qwen3_8b", layers=2, flash=False, checkpointing=True, traced=True
    ),
    "8b on 8": Case(
        model="qwen3_8b", layers=2, ranks=8, rank=3, train={"tp": 2}, gen={"tp": 2}, critic=True
    ),
    "32b on 64, adapters": Case(
        model="qwen3_32b", layers=2, ranks=64, rank=37, train={"tp": 8}, gen={"tp": 8}, lora=16
    ),
    # The second of two pipeline stages in generation, the third of four in training.
    "70b on 64": Case(
        model="llama3_70b",
        layers=8,
        ranks=64,
        rank=37,
        train={"pp": 4, "tp": 4, "sequence_parallel": True},
        gen={"pp": 2, "tp": 4},
        checkpointing=True,
    ),
    "70b on 64, last stage": Case(
        model="llama3_70b",
        layers=8,
        ranks=64,
        rank=48,
        train={"pp": 4, "tp": 4, "schedule": PipelineSchedule.interleaved},
        gen={"tp": 8},
        checkpointing=True,
    ),
}
"""Run by `make gpu-dry`."""

FULL = {
    f"{name}, whole": replace(case, layers=None, traced=False)
    for name, case in CASES.items()
    if case.layers is not None and case.model != SMALL
}
"""Run by `make gpu-dry-full`: every model at its whole depth."""
