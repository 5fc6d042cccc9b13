"""Speed of training: tokens a second and model FLOPs utilization of an optimizer step."""

import torch

from gpu_steps.ceilings import matmul_rate
from gpu_steps.figures import Figures
from gpu_steps.ranks import one_rank, run_config
from gpu_steps.sizes import Sizes, sizes_of
from gpu_steps.steps import Settings
from gpu_steps.timing import median_seconds, seconds
from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.config import Config
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence

MICRO_BATCHES = 2
_ROUNDS = 3
_NOMINAL = {"H100": "h100", "H200": "h100", "A100": "a100"}
"""Part of a GPU's name, and the datasheet that says its FLOP/s."""


def measure(settings: Settings, figures: Figures) -> None:
    """An update of two packed rows, and scoring them."""
    sizes = sizes_of(settings)
    with one_rank(settings) as device:
        ceiling = matmul_rate(device, torch.bfloat16)
        engine = train_engine(run_config(settings), device)
        rows = sequences(sizes)
        first = seconds(lambda: engine.update(rows, ReinforceLoss()), device)
        took = median_seconds(lambda: engine.update(rows, ReinforceLoss()), device, _ROUNDS)
        scored = median_seconds(lambda: engine.log_probs(rows), device, _ROUNDS)
    tokens, work = sum(len(row.ids) for row in rows), step_flops(sizes, rows)
    figures.detail("flops_a_step", work)
    figures.add(
        "train", tokens / took, "tokens/s",
        step_s=round(took, 4), first_step_s=round(first, 2), row_tokens=sizes.row_tokens,
        attention=engine.attention.value,
    )  # fmt: skip
    figures.add("train_flops", work / took / 1e12, "TFLOP/s")
    figures.add("mfu_of_measured", work / took / ceiling, "", ceiling_tflops=ceiling / 1e12)
    _of_nominal(work / took, device, figures)
    figures.add("score", tokens / scored, "tokens/s", step_s=round(scored, 4))


def _of_nominal(rate: float, device: torch.device, figures: Figures) -> None:
    if device.type == "cpu":
        figures.skip("mfu_of_datasheet", "a CPU has no such figure")
        return
    name = torch.cuda.get_device_name(device)
    known = [sheet for model, sheet in _NOMINAL.items() if model in name]
    if not known:
        figures.skip("mfu_of_datasheet", f"no datasheet here of {name}")
        return
    nominal = ACCELERATORS[known[0]].flops
    figures.add("mfu_of_datasheet", rate / nominal, "", nominal_tflops=nominal / 1e12)


def train_engine(config: Config, device: torch.device) -> TrainEngine:
    """The train engine of a run on one rank."""
    assert config.model.path is not None
    return TrainEngine(config.model.path, model=config.model, trainer=config.trainer, device=device)


def sequences(sizes: Sizes, micro_batches: int = MICRO_BATCHES) -> list[TrainSequence]:
    """Random samples that fill packed rows; three quarters of each are the response."""
    generator = torch.Generator().manual_seed(0)
    number = micro_batches * sizes.row_tokens // sizes.sequence_tokens
    drawn = torch.randint(
        sizes.shape["vocab_size"], (number, sizes.sequence_tokens), generator=generator
    )
    response = sizes.sequence_tokens * 3 // 4
    return [TrainSequence(ids, response, {"advantages": 1.0}) for ids in drawn]


def step_flops(sizes: Sizes, rows: list[TrainSequence]) -> int:
    """Floating-point operations of the model, forward and backward, without recomputation.

    6 a weight and token, of the layers for all tokens and of the head for those scored. Causal
    attention has 6 x length^2 x width a layer and sequence.
    """
    shape = sizes.shape
    hidden, layers, head = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    queries, keys = (shape[f"num_{x}_heads"] * head for x in ("attention", "key_value"))
    layer = hidden * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
    tokens = sum(len(row.ids) for row in rows)
    scored = sum(row.response_tokens for row in rows)
    squares = sum(len(row.ids) ** 2 for row in rows)
    weights = tokens * layers * layer + scored * hidden * shape["vocab_size"]
    return int(6 * weights + 6 * layers * queries * squares)
