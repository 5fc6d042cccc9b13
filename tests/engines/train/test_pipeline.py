"""The pipeline of one model by our lists, bit for bit against torch's own schedules."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_engines import MAX_TOKENS, SIZES, make_engine
from surrogate_loss import Surrogate
from torch_pipeline import train_by_torch

from hybridrl.engines.train.interface import TrainSequence

pytestmark = pytest.mark.long


def equal_sequences(number):
    """Sequences that fill a micro-batch each, so that torch's schedules can train them."""
    random = torch.Generator().manual_seed(5)
    sequences = []
    for _ in range(number):
        response = int(torch.randint(4, MAX_TOKENS - 1, (), generator=random))
        fields = {
            "advantages": torch.randn(1, generator=random).item(),
            "old_log_probs": -3 * torch.rand(response, generator=random),
        }
        ids = torch.randint(0, 41, (MAX_TOKENS,), generator=random)
        sequences.append(TrainSequence(ids, response, fields, None))
    return sequences


def update(engine, sequences, by_torch):
    """Gradients of this rank's shards by name, and the metrics of the step."""
    prepared = engine.prepare_update(sequences, Surrogate())
    with engine.training(prepared):
        if by_torch:
            train_by_torch(engine.pipeline, prepared.batches, prepared.finish)
        else:
            engine._train_rows(prepared.batches, prepared.finish)
    gradients = {
        name: parameter.grad.to_local().clone()
        for chunk in engine.chunks
        for name, parameter in chunk.named_parameters()
    }
    return gradients, engine.finish_update(prepared)


def train(path, layout, schedule, reverse, rows):
    """By our lists and by torch, each on an engine of its own; gloo's ranks count alike."""
    world = dist.get_world_size()
    sequences = equal_sequences(rows * world // layout[0])[dist.get_rank() :: world]
    results = []
    for by_torch in (False, True):
        engine = make_engine(path, layout, schedule=schedule, reverse=reverse)
        results.append(update(engine, sequences, by_torch))
    return results


def compare(results):
    for (gradients, metrics), (wanted, wanted_metrics) in results:
        assert gradients.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert gradient.any(), name
            assert torch.equal(gradients[name], gradient), name
        assert metrics == wanted_metrics
        assert metrics["padding_share"] == 0


@pytest.fixture(scope="module")
def path(tiny: Callable[..., str]) -> str:
    """A tied Qwen3 of four layers."""
    return tiny("qwen3", **SIZES)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_two_ranks(ranks, path, schedule):
    compare(ranks(2, train, path, (2, 1, 1, 1), schedule, False, 4))


@pytest.mark.each
@pytest.mark.layouts
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_both_directions(ranks, path, schedule):
    compare(ranks(2, train, path, (2, 1, 1, 1), schedule, True, 6))


@pytest.mark.each
@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ((4, 1, 1, 1), "one_f_one_b"),
        ((2, 1, 2, 1), "interleaved"),
        ((2, 2, 1, 1), "zero_bubble"),
        pytest.param((2, 1, 1, 2), "one_f_one_b", marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_four_ranks(ranks, path, layout, schedule):
    compare(ranks(4, train, path, layout, schedule, False, 4))


def rows_of(path, schedule, number):
    """The tokens of a rank's rows."""
    engine = make_engine(path, (2, 1, 1, 1), schedule=schedule)
    sequences = equal_sequences(number)[dist.get_rank() :: 2]
    for place, sequence in enumerate(sequences):
        sequence.ids = sequence.ids[: MAX_TOKENS - place]
        sequence.fields["old_log_probs"] = sequence.fields["old_log_probs"][:3]
        sequence.response_tokens = 3
    prepared = engine.prepare_update(sequences, Surrogate())
    metrics = engine.update(sequences, Surrogate())
    return [batch.ids.shape[1] for batch in prepared.batches], metrics["padding_share"]


def test_rows_keep_their_length(ranks, path):
    """Three rows of a sequence each; those of an interleaved schedule are a multiple of ranks."""
    for tokens, padding in ranks(2, rows_of, path, "one_f_one_b", 3):
        assert sorted(tokens) == [19, 20, 20]
        assert padding == 0
    for tokens, _ in ranks(2, rows_of, path, "interleaved", 3):
        assert sorted(tokens) == [1, 19, 20, 20]


def fewer(path, layout, schedule):
    """The gradients of one row on two stages or more."""
    engine = make_engine(path, layout, schedule=schedule)
    mine = equal_sequences(1) if dist.get_rank() == 0 else []
    gradients, _ = update(engine, mine, False)
    return gradients


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble"])
def test_fewer_rows_than_stages(ranks, path, schedule):
    results = ranks(2, fewer, path, (2, 1, 1, 1), schedule)
    gradients = {name: grad for of_rank in results for name, grad in of_rank.items()}
    (wanted,) = ranks(1, fewer, path, (1, 1, 1, 1), "one_f_one_b")
    tied = [name for name in wanted if "embed" in name or "lm_head" in name]
    assert gradients.keys() >= wanted.keys() - set(tied)
    for name in wanted.keys() - set(tied):
        torch.testing.assert_close(gradients[name], wanted[name], rtol=1e-5, atol=1e-7)
