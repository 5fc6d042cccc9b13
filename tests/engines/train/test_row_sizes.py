"""Rows under tensor parallelism have few sizes, and what fills them up trains nothing."""

import pytest
import torch
import torch.distributed as dist
from small_engines import SIZES, make_engine
from surrogate_loss import Surrogate

from hybridrl.engines.train.interface import TrainSequence

LENGTHS = (117, 90, 50, 41, 33, 7)
BUDGET = 128


def sequences_of():
    random = torch.Generator().manual_seed(5)
    sequences = []
    for length in LENGTHS:
        response = length // 2
        fields = {
            "advantages": torch.randn(1, generator=random).item(),
            "old_log_probs": -3 * torch.rand(response, generator=random),
        }
        ids = torch.randint(0, 41, (length,), generator=random)
        sequences.append(TrainSequence(ids, response, fields, None))
    return sequences


def train(path, layout):
    """Tokens of the rows, whole gradients by name, metrics."""
    engine = make_engine(path, layout, max_tokens_per_micro_batch=BUDGET)
    sequences = [] if dist.get_rank() else sequences_of()
    prepared = engine.prepare_update(sequences, Surrogate())
    with engine.training(prepared):
        engine._train_rows(prepared.batches, prepared.finish)
    named = [pair for chunk in engine.chunks for pair in chunk.named_parameters()]
    gradients = {name: p.grad.full_tensor() for name, p in named if p.grad is not None}
    sizes = [batch.ids.shape[1] for batch in prepared.batches]
    return sizes, gradients, engine.finish_update(prepared)


def filled(size):
    """The least multiple of 4 from 64 tokens on, of 2 from 32 on."""
    step = 4 if size >= 64 else 2 if size >= 32 else 1
    return -(-size // step) * step


@pytest.mark.long
def test_rows_of_few_sizes(ranks, tiny):
    path = tiny("qwen3", **SIZES)
    ((rows, wanted, _),) = ranks(1, train, path, (1, 1, 1, 1))
    assert sum(rows) == sum(LENGTHS)
    assert any(filled(size) > size for size in rows)
    for sizes, gradients, metrics in ranks(2, train, path, (1, 1, 1, 2)):
        assert sizes == [filled(size) for size in rows]
        assert metrics["padding_share"] == pytest.approx(1 - sum(LENGTHS) / sum(sizes))
        assert 0 < metrics["padding_share"] < 1 / 16
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            # The vocabulary is filled up to a multiple of tp.
            difference = gradients[name][: len(gradient)] - gradient
            assert difference.norm() <= 1e-5 * gradient.norm(), name
