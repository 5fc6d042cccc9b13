"""Ranks tell each other their nodes, and generate in groups within nodes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parked_samples import TINY, generating_worker, shared

from hybridrl.config import RolloutConfig, RolloutLayoutConfig
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers import base_worker

SEQUENCES = [TrainSequence(torch.arange(3, 3 + length), length - 3) for length in (8, 6, 9, 7)]


def described(model: str, folder: Path, nodes: str) -> tuple[str, list[int], float]:
    """The order of ranks, those of this one's instance, and how far its engines' scores differ."""
    rollout = RolloutConfig(layout=RolloutLayoutConfig(tp=2), max_new_tokens=8)
    name = nodes[dist.get_rank()]
    with mock.patch.object(base_worker, "node_name", return_value=name):
        worker = generating_worker(model, folder, rollout)
    grouping = worker.actor.switch_plan.grouping.value
    actor = worker.generator.describe(grouping)
    scorer: Any = worker.scorers["actor"]
    generated = scorer.engine.log_probs(SEQUENCES)
    trained = worker.actor.trainer.train_engine.log_probs(SEQUENCES)
    gap = max((a - b).abs().max().item() for a, b in zip(generated, trained, strict=True))
    assert shared(actor.gen_grouping) == [actor.gen_grouping] * len(nodes), "ranks disagree"
    return actor.gen_grouping, actor.peers, gap


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("nodes", "order", "peers"),
    [
        ("aaaa", "strided", ([0, 2], [1, 3])),
        ("aabb", "node_strided", ([0, 1], [2, 3])),
        ("abba", "node_strided", ([0, 3], [1, 2])),
    ],
)
def test_ranks_of_a_node_generate_together(
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    nodes: str,
    order: str,
    peers: tuple[list[int], list[int]],
) -> None:
    """Under fsdp 4 and tp 2. The weights that generate are those that are trained.

    Measured: log-probabilities of order 3 differ by 5e-7.
    """
    make_tiny_model(tmp_path / "model", TINY, seed=0)
    results = ranks(4, described, str(tmp_path / "model"), tmp_path, nodes)
    for rank, (grouping, own, gap) in enumerate(results):
        assert grouping == order
        assert sorted(own) == next(group for group in peers if rank in group)
        assert gap < 2e-6
