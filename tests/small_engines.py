"""Train engines of four layers for tests of several models on the same ranks."""

import torch

from hybridrl.config import (
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine

SIZES = {"num_hidden_layers": 4}
MAX_TOKENS = 20


def set_head(engine):
    """A head of zeros would leave all other weights without gradient."""
    for chunk in engine.chunks:
        for name, p in chunk.named_parameters():
            if name.endswith("score.weight"):
                p.data.to_local().fill_(0.3)


def make_engine(
    path, layout, *, values=False, reverse=False, schedule="one_f_one_b", lora=0, **trainer
):
    pp, replicas, fsdp, tp = layout
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            **{"max_tokens_per_micro_batch": MAX_TOKENS, **trainer},
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(
                pp=pp, replicas=replicas, fsdp=fsdp, tp=tp, schedule=PipelineSchedule[schedule]
            ),
        ),
        device=torch.device("cpu"),
        gives_values=values,
        reverse=reverse,
        lora=LoraConfig(rank=lora),
    )
