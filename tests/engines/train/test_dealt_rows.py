"""The planner's micro-batches are the engine's, also where attention costs more than others."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_engines import SIZES, make_engine
from surrogate_loss import Surrogate
from transformers import AutoConfig

from hybridrl.engines.train.interface import TrainSequence
from hybridrl.planner.dealt_rows import rows_of_ranks
from hybridrl.planner.mapping import SampleLength, TrainLayout
from hybridrl.planner.model_shape import ModelShape

TOKENS = 640
LENGTHS = [5, 7, 11, 13, 17, 19, 23, 143, 148, 150, 400]


@pytest.fixture(scope="module")
def path(tiny: Callable[..., str]) -> str:
    """A tied Qwen3 of four layers."""
    return tiny("qwen3", **SIZES)


def rows(path, layout, attention_cost):
    """The lengths in each row of this rank's replica, and the gradients' norm."""
    engine = make_engine(
        path, layout, max_tokens_per_micro_batch=TOKENS, attention_cost=attention_cost
    )
    sequences = [
        TrainSequence(
            torch.arange(n) % 41, 3, {"advantages": 1.0, "old_log_probs": -torch.ones(3)}, None
        )
        for n in LENGTHS
    ]
    mine = sequences if dist.get_rank() == 0 else []
    prepared = engine.prepare_update(mine, Surrogate())
    lengths = [list(batch.packing.lengths) for batch in prepared.batches]
    return lengths, engine.update(mine, Surrogate())["grad_norm"]


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 1, 1)], ids=["alone", "pp"])
def test_rows_are_the_planner_s(ranks, path, layout):
    shape, by_cost = ModelShape.of_config(AutoConfig.from_pretrained(path).to_dict()), {}
    for attention_cost in (0.0, 1.0):
        lengths, norm = ranks(layout[0], rows, path, layout, attention_cost)[0]
        planned = TrainLayout(
            pp=layout[0], micro_batch_tokens=TOKENS, attention_cost=attention_cost
        )
        samples = tuple(SampleLength(n - 3, 3) for n in LENGTHS)
        (wanted,) = rows_of_ranks(shape, planned, samples, even=True)
        as_planned = sorted(sorted(sample.tokens for sample in row) for row in wanted)
        assert sorted(map(sorted, lengths)) == as_planned
        by_cost[attention_cost] = as_planned, norm
    # With attention the longest sequence is a row by itself.
    assert by_cost[0.0][0] != by_cost[1.0][0]
    assert by_cost[1.0][1] == pytest.approx(by_cost[0.0][1], rel=1e-5)
