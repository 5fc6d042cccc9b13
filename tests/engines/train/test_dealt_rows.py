"""The planner's micro-batches are the engine's."""

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


def rows(path, layout):
    """The lengths in each row of this rank's replica."""
    engine = make_engine(path, layout, max_tokens_per_micro_batch=TOKENS)
    sequences = [
        TrainSequence(
            torch.arange(n) % 41, 3, {"advantages": 1.0, "old_log_probs": -torch.ones(3)}, None
        )
        for n in LENGTHS
    ]
    mine = sequences if dist.get_rank() == 0 else []
    prepared = engine.prepare_update(mine, Surrogate())
    return [list(batch.packing.lengths) for batch in prepared.batches]


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 1, 1)], ids=["alone", "pp"])
def test_rows_are_the_planner_s(ranks, path, layout):
    shape = ModelShape.of_config(AutoConfig.from_pretrained(path).to_dict())
    lengths = ranks(layout[0], rows, path, layout)[0]
    planned = TrainLayout(pp=layout[0], micro_batch_tokens=TOKENS)
    samples = tuple(SampleLength(n - 3, 3) for n in LENGTHS)
    (wanted,) = rows_of_ranks(shape, planned, samples, even=True)
    as_planned = sorted(sorted(sample.tokens for sample in row) for row in wanted)
    assert sorted(map(sorted, lengths)) == as_planned
    assert [max(LENGTHS)] in as_planned  # attention makes the longest sequence a row by itself
