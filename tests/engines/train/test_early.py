"""Gradients that replicas accumulate before the update, and the update that continues them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.algorithms.losses import ClippedLoss, ReinforceLoss
from hybridrl.algorithms.sequence_losses import GMPOLoss, GSPOLoss
from hybridrl.config import LoraConfig, ModelConfig, OptimConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.config.loss import Loss
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.layout import fsdp_groups

pytestmark = pytest.mark.long

LOSSES: dict[str, Loss] = {
    "grpo": ClippedLoss(),
    "grpo, means of sequences": ClippedLoss(normalize="sequence", entropy_coef=0.01),
    "rloo": ReinforceLoss(normalize="constant"),
    "gspo": GSPOLoss(clip_low=0.2, clip_high=0.2),
    "gmpo": GMPOLoss(),
    "ppo": ClippedLoss(entropy_coef=0.01),
    "dapo": ClippedLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
}
COMPARE = {"old_log_probs": "mismatch"}


def make_engine(path: str, layout: Sequence[int], rank: int = 0, chunk: int = 0) -> TrainEngine:
    """`layout` are replicas, fsdp and tp, and pp if it is not 1."""
    replicas, fsdp, tp, pp = (*layout, 1)[:4]
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=20,
            chunk_tokens=chunk,
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.05, eps=1e-3),
            layout=TrainLayoutConfig(pp=pp, replicas=replicas, fsdp=fsdp, tp=tp),
        ),
        device=torch.device("cpu"),
        lora=LoraConfig(rank=rank, alpha=8.0) if rank else None,
    )


def dealt(engine: TrainEngine, sequences: Sequence[TrainSequence], early: Sequence[Sequence[int]]):
    """This rank's early sequences, by call of its replica, and the others; of all, if none is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axes = engine.dims.axes
    of_replica, width = size // axes.replicas, axes.fsdp * axes.tp  # pipeline stages are apart
    replica = rank // width % axes.replicas
    place = rank // (width * axes.replicas) * width + rank % width
    calls = [[sequences[i] for i in call[place::of_replica]] for call in early]
    taken = {i for call in early for i in call}
    left = [s for i, s in enumerate(sequences) if i not in taken]
    return (calls if replica == 1 else []), left[rank::size]


def gradient_steps(
    path: str,
    layout: Sequence[int],
    names: Sequence[str],
    sequences: Sequence[TrainSequence],
    early: Sequence[Sequence[int]],
    rank: int = 0,
    steps: int = 1,
    chunk: int = 0,
) -> dict[str, Any]:
    """By loss: the gradients before each step, the metrics, and the weights in the end.

    Replica 1 accumulates the gradients of `early`, a call each, while replica 0 is not called.
    """
    torch.manual_seed(0)
    results = {}
    for name in names:
        engine = make_engine(path, layout, rank, chunk)
        gradients: list[dict[str, torch.Tensor]] = []

        def before_step(*_: Any, engine=engine, gradients=gradients) -> None:
            parameters = [pair for c in engine.chunks for pair in c.named_parameters()]
            gradients.append(
                {n: p.grad.full_tensor().clone() for n, p in parameters if p.grad is not None}
            )

        engine.optimizer.register_step_pre_hook(before_step)
        history = []
        for _ in range(steps):
            calls, left = dealt(engine, sequences, early)
            for call in calls:
                engine.accumulate(call, LOSSES[name], compare=COMPARE)
            assert engine.has_early_gradient == bool(calls)
            history.append(
                engine.update(left, LOSSES[name], compare=COMPARE, continues=bool(early))
            )
            assert not engine.has_early_gradient
        after = {n: t.clone() for n, t in engine.weights()}
        results[name] = gradients, history, after
    return results


def both(
    path: str,
    layout: Sequence[int],
    names: Sequence[str],
    sequences: Sequence[TrainSequence],
    early: Sequence[Sequence[int]],
    *options: int,
) -> list[dict[str, Any]]:
    """`gradient_steps` without early calls and with them: DTensor learns the shapes once."""
    return [gradient_steps(path, layout, names, sequences, e, *options) for e in ([], early)]


def large(*args: Any) -> list[dict[str, Any]]:
    """`both` with the settings of large models: FSDP groups per layer."""
    fsdp_groups.ONE_GROUP_PARAMETERS = fsdp_groups.KEPT_PARAMETERS = 0
    return both(*args)


def check(results: Sequence[list[dict[str, Any]]]) -> None:
    """Measured: gradients 5e-7 relative, parameters after three steps 1.2e-7."""
    whole, split = zip(*results, strict=True)
    for own, of_rank in zip(whole, split, strict=True):
        for name, (gradients, history, after) in own.items():
            others, other_history, other_after = of_rank[name]
            assert gradients[0].keys() == others[0].keys()
            norm = torch.stack([g.norm() for g in gradients[0].values()]).norm()
            assert norm > 1e-3
            gaps = [(g - others[0][n]).norm() for n, g in gradients[0].items()]
            assert torch.stack(gaps).norm() < 1e-6 * norm, name
            for n, weights in after.items():
                torch.testing.assert_close(weights, other_after[n], atol=1e-5, rtol=0)
            for metrics, other in zip(history, other_history, strict=True):
                # Each call rounds its operations to thousands; rows differ, so their padding does.
                assert other["flops"] == pytest.approx(metrics["flops"], abs=8000)
                apart = ("flops", "padding_share")
                expected = metrics | {name: other[name] for name in apart if name in other}
                assert other == pytest.approx(expected, rel=2e-5, abs=1e-5)


EARLY = [[2, 5], [0, 7, 1]]


@pytest.mark.parametrize(
    "names",
    [
        ["grpo", "gspo"],
        pytest.param([x for x in LOSSES if x not in ("grpo", "gspo")], marks=pytest.mark.layouts),
    ],
    ids=["common", "others"],
)
def test_two_replicas(ranks, model_dir, sequences, names):
    """One accumulates twice while the other is not called; the step is that of one update."""
    common = str(model_dir), (2, 1, 1), names, sequences
    check(ranks(2, both, *common, EARLY, 0, 3))


def test_all_of_an_update_may_be_early(ranks, model_dir, sequences):
    common = str(model_dir), (2, 1, 1), ["grpo"], sequences
    early = [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    check(ranks(2, both, *common, early))


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout", [pytest.param((2, 2, 1), marks=pytest.mark.slow), (2, 1, 2), (2, 1, 1, 2)], ids=str
)
def test_replicas_of_several_ranks(ranks, model_dir, sequences, layout):
    """PPO's and DAPO's losses are among them: their recipes train late, another may train early."""
    common = str(model_dir), layout, ["grpo", "gspo", "rloo", "ppo", "dapo"], sequences
    check(ranks(4, both, *common, EARLY, 0, 3))


@pytest.mark.layouts
def test_adapters(ranks, model_dir, sequences):
    common = str(model_dir), (2, 1, 1), ["grpo"], sequences
    check(ranks(2, both, *common, EARLY, 4, 3))


@pytest.mark.layouts
def test_rows_in_chunks(ranks, model_dir, sequences):
    """The ranks of a replica agree on the number of passes, without the other replica."""
    common = str(model_dir), (2, 2, 1), ["gspo"], sequences
    check(ranks(4, both, *common, EARLY, 0, 1, 8))


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 1, 1, 2)], ids=str)
def test_a_large_model(fresh_ranks, model_dir, sequences, layout):
    """Weights are gathered layer by layer, and each row's gradients are summed at once.

    In a pipeline they are those of all rows.
    """
    common = str(model_dir), layout, ["grpo"], sequences
    check(fresh_ranks(4, large, *common, EARLY))


class NotFinite(ClippedLoss):
    def __call__(self, log_probs, entropy, fields):
        values, metrics = super().__call__(log_probs, entropy, fields)
        return values * float("nan"), metrics


def failing(path: str, sequences: Sequence[TrainSequence]) -> tuple[float, list[torch.Tensor]]:
    """A bad step with early gradients, then discarded ones, then a good step."""
    engine = make_engine(path, (2, 1, 1))
    calls, left = dealt(engine, sequences, EARLY)
    for call in calls:
        engine.accumulate(call, NotFinite())
    bad = engine.update(left, ClippedLoss(), continues=True)["bad_step"]
    for call in calls:
        engine.accumulate(call, NotFinite())
    engine.discard()
    engine.update(sequences[dist.get_rank() :: 2], ClippedLoss())
    return bad, [tensor.clone() for _, tensor in engine.weights()]


def plain(path: str, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
    engine = make_engine(path, (2, 1, 1))
    engine.update(sequences[dist.get_rank() :: 2], ClippedLoss())
    return [tensor.clone() for _, tensor in engine.weights()]


def test_gradients_of_a_step_that_fails_are_thrown_away(ranks, model_dir, sequences):
    """The next step is the one that it would be, bit for bit."""
    wanted = ranks(2, plain, str(model_dir), sequences)
    for (bad, weights), expected in zip(
        ranks(2, failing, str(model_dir), sequences), wanted, strict=True
    ):
        assert bad == 1.0
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
