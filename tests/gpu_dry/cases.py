"""The table of models and rank counts that are run without a GPU."""

from dataclasses import replace

from gpu_dry.case import Case
from hybridrl.config import ActivationMode, Attention, OptimName, PipelineSchedule

SMALL = "qwen3_1.7b"
ABOVE_LIMIT = 5, 6
"""Layers of the small model whose gradients are sharded as the whole model's are: it has more than
`KEPT_PARAMETERS`."""
SMALL_BUCKET = 16.0
"""MB of a bucket that the few layers of a cut model fill on 64 ranks, as a whole one fills the
default. Else memory does not follow from that of two depths."""

CASES: dict[str, Case] = {
    "1.7b on 1": Case(model=SMALL, layers=ABOVE_LIMIT, critic=True),
    "1.7b on 8": Case(model=SMALL, layers=ABOVE_LIMIT, ranks=8, rank=3, staying=("actor",)),
    "8b on 1, strict": Case(model="qwen3_8b", layers=(2, 3), strict=True),
    "8b on 1, varlen attention": Case(
        model="qwen3_8b",
        layers=(2, 3),
        flash=False,
        mixed=True,
        activations=ActivationMode.recompute,
    ),
    "8b on 1, torch attention": Case(
        model="qwen3_8b",
        layers=(2, 3),
        attention=Attention.torch,
        mixed=True,
        activations=ActivationMode.recompute,
    ),
    "8b on 8": Case(
        model="qwen3_8b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"tp": 2},
        gen={"tp": 2},
        critic=True,
    ),
    # Eight ranks own as many matrices each of eight more layers. All 36 are 4 and 4 times eight.
    "8b on 8, offload and muon": Case(
        model="qwen3_8b",
        layers=(4, 12),
        ranks=8,
        train={"tp": 2},
        gen={"tp": 2},
        activations=ActivationMode.offload,
        optim=OptimName.muon,
    ),
    # Two micro-batches an update.
    "8b on 8, replicas": Case(
        model="qwen3_8b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"replicas": 2},
        gen={"tp": 2},
        sample_tokens=4096,
    ),
    "8b on 8, adapters": Case(model="qwen3_8b", layers=(2, 3), ranks=8, lora=16, critic=True),
    "8b on 8, zero bubble": Case(
        model="qwen3_8b",
        layers=(4, 8),
        ranks=8,
        train={"pp": 2, "tp": 2, "schedule": PipelineSchedule.zero_bubble},
        gen={"tp": 4},
    ),
    "32b on 64, adapters": Case(
        model="qwen3_32b",
        layers=(2, 3),
        ranks=64,
        rank=37,
        train={"tp": 8},
        gen={"tp": 8, "bucket_mb": SMALL_BUCKET},
        lora=16,
        critic=True,
    ),
    "32b on 64, zero bubble": Case(
        model="qwen3_32b",
        layers=(8, 16),
        ranks=64,
        rank=9,
        train={"pp": 4, "tp": 4, "schedule": PipelineSchedule.zero_bubble},
        gen={"tp": 8, "bucket_mb": SMALL_BUCKET},
    ),
    # The second of two pipeline stages in generation, the third of four in training.
    "70b on 64": Case(
        model="llama3_70b",
        layers=(8, 12),
        ranks=64,
        rank=37,
        train={"pp": 4, "tp": 4, "sequence_parallel": True},
        gen={"pp": 2, "tp": 4},
        activations=ActivationMode.recompute,
    ),
    "70b on 64, last stage": Case(
        model="llama3_70b",
        layers=(8, 16),
        ranks=64,
        rank=48,
        train={"pp": 4, "tp": 4, "schedule": PipelineSchedule.interleaved},
        gen={"tp": 8},
        activations=ActivationMode.recompute,
    ),
    # Each rank of generation has whole experts.
    "30b-a3b on 8": Case(
        model="qwen3_30b_a3b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"ep": 4},
        gen={"tp": 4, "ep": 4},
        sample_tokens=2048,
    ),
    # Rows as the plan of a run chooses them: shared, in chunks, and of a whole micro-batch.
    "8b on 8, cp": Case(
        model="qwen3_8b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"cp": 4},
        sample_tokens=16384,
        only_trains=True,
    ),
    "8b on 8, chunks": Case(
        model="qwen3_8b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"cp": 2},
        sample_tokens=32768,
        chunk_tokens=4096,
        only_trains=True,
    ),
    "30b-a3b on 8, ep": Case(
        model="qwen3_30b_a3b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"ep": 4},
        sample_tokens=2048,
        only_trains=True,
    ),
    # Activations that are recomputed in part: alone, with torch's attention and under tp.
    "8b on 8, selective": Case(
        model="qwen3_8b",
        layers=(6, 7),
        ranks=8,
        rank=3,
        activations=ActivationMode.selective,
        sample_tokens=4096,
        flash=False,
        only_trains=True,
    ),
    "8b on 8, selective and tp": Case(
        model="qwen3_8b",
        layers=(6, 7),
        ranks=8,
        rank=3,
        train={"tp": 2, "sequence_parallel": True},
        activations=ActivationMode.selective,
        sample_tokens=4096,
        only_trains=True,
    ),
    "30b-a3b on 8, selective": Case(
        model="qwen3_30b_a3b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"ep": 4},
        activations=ActivationMode.selective,
        sample_tokens=2048,
        only_trains=True,
    ),
}
"""Run by `make gpu-dry`."""

WIDE = (
    "30b-a3b on 8, ep",
    "8b on 8, selective and tp",
    "30b-a3b on 8, selective",
    "32b on 64, adapters",
    "32b on 64, zero bubble",
)
"""Left out by `--narrow`. Others have experts, partial recomputation, adapters and a zero-bubble
pipeline, each with fewer axes beside it."""

FULL = {
    name: replace(case, layers=None)
    for name, case in CASES.items()
    if case.layers is not None and not case.only_trains
}
"""Run by `make gpu-dry-full`: what is cut above, at its whole depth."""

OTHER_RANKS: dict[str, Case] = {
    "1.7b on 64": Case(model=SMALL, layers=ABOVE_LIMIT, ranks=64, rank=21),
    "8b on 64": Case(
        model="qwen3_8b",
        layers=(2, 3),
        ranks=64,
        rank=40,
        train={"tp": 4},
        gen={"tp": 2},
    ),
    # Whole, neither fits one GPU, as the plan says; two layers do.
    "32b on 1": Case(model="qwen3_32b", layers=(2, 3), activations=ActivationMode.recompute),
    "70b on 1": Case(model="llama3_70b", layers=(2, 3), activations=ActivationMode.recompute),
    "32b on 8": Case(
        model="qwen3_32b",
        layers=(2, 3),
        ranks=8,
        rank=3,
        train={"tp": 4},
        gen={"tp": 4},
        activations=ActivationMode.offload,
        critic=True,
    ),
    "70b on 8": Case(
        model="llama3_70b",
        layers=(2, 3),
        ranks=8,
        rank=5,
        train={"tp": 8, "sequence_parallel": True},
        gen={"tp": 8},
        activations=ActivationMode.recompute,
    ),
}
"""Run by `make gpu-dry-full`, at these depths: models at the numbers of ranks left out above."""
