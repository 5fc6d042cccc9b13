"""What several ranks hold of the weights stays equal under updates, and a changed one is named."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ModelConfig, OptimConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout.copies import CopiesCheck, logger
from hybridrl.layout.proof import WeightsDiffer

NORM = "model.norm.weight"


def make_engine(path: str, layout: dict[str, Any]) -> TrainEngine:
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(optim=OptimConfig(lr=1e-2), layout=TrainLayoutConfig(**layout)),
        device=torch.device("cpu"),
    )


def updated(path: str, layout: dict[str, Any], sequences: list[Any]) -> set[int]:
    """Sizes of the groups that are compared after three updates; none differs."""
    engine, rank = make_engine(path, layout), dist.get_rank()
    copies = CopiesCheck(engine.layout, rank, strict=True)
    for _ in range(3):
        engine.update(sequences[rank :: dist.get_world_size()], ClippedLoss())
        copies._number = 0  # each time all of it
        copies.check(engine.named_shards())
    return {len(group) for groups in copies.kinds for group in groups}


@pytest.mark.each
@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "layout", "wanted"),
    [
        ("qwen3", {"replicas": 2, "fsdp": 1, "tp": 2}, {2, 4}),
        ("qwen3", {"pp": 2, "fsdp": 2}, {2}),
        ("qwen3_moe", {"replicas": 2, "fsdp": 2, "ep": 2}, {2}),
        pytest.param("qwen3", {"fsdp": 4}, set(), marks=pytest.mark.wide),
        pytest.param("qwen3", {"replicas": 4}, {4}, marks=pytest.mark.wide),
        pytest.param("qwen3", {"replicas": 2, "fsdp": 2}, {2}, marks=pytest.mark.wide),
        pytest.param(
            "qwen3", {"fsdp": 2, "tp": 2, "sequence_parallel": True}, {2}, marks=pytest.mark.wide
        ),
        pytest.param("qwen3_moe", {"fsdp": 2, "tp": 2, "ep": 4}, {2}, marks=pytest.mark.wide),
        pytest.param("qwen3_moe", {"fsdp": 4, "ep": 2}, set(), marks=pytest.mark.wide),
        pytest.param("qwen3", {"pp": 2, "fsdp": 1, "tp": 2}, {2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_updates_leave_copies_equal(
    ranks, tiny, sequences, family: str, layout: dict[str, Any], wanted: set[int]
) -> None:
    """Replicas; norms over tp, keys of fewer heads than ranks; both ends' tied embedding."""
    for sizes in ranks(4, updated, str(tiny(family)), layout, sequences):
        assert wanted <= sizes


def changed(path: str, layout: dict[str, Any], name: str, at: int, strict: bool = True) -> str:
    """The error after rank `at` changed one weight of a parameter; without one, the warnings."""
    engine = make_engine(path, layout)
    copies, records = CopiesCheck(engine.layout, dist.get_rank(), strict), list[str]()
    logger.addFilter(lambda record: records.append(record.getMessage()) or True)
    copies.check(engine.named_shards())
    copies._number = 0
    if dist.get_rank() == at:
        shard = engine.named_shards()[name].to_local()
        shard.view(torch.int32).view(-1)[0] ^= 1
    try:
        copies.check(engine.named_shards())
    except WeightsDiffer as error:
        return str(error)
    return "\n".join(records)


@pytest.mark.layouts
def test_a_changed_weight_is_named(ranks, tiny, sequences) -> None:
    """Where most copies agree the other rank alone, and on all ranks alike."""
    path = str(tiny("qwen3"))
    errors = ranks(4, changed, path, {"replicas": 2, "fsdp": 1, "tp": 2}, NORM, 2)
    wanted = f"rank 2 has other values of {NORM} than rank 0, 1, 3"
    assert errors == [f"copies that should be equal are not: {wanted}"] * 4


def test_one_of_two_replicas(ranks, tiny, sequences) -> None:
    path, name = str(tiny("qwen3")), "model.layers.0.mlp.up_proj.weight"
    (error, other) = ranks(2, changed, path, {"replicas": 2, "fsdp": 1}, name, 1)
    assert error == other
    assert error.endswith(f"rank 1 has other values of {name} than rank 0")


def test_ranks_of_tp_may_drift_unless_strict(ranks, tiny, sequences) -> None:
    """Kernels may add in any order, on CPUs too: one warning, by the first rank."""
    path, layout = str(tiny("qwen3")), {"fsdp": 1, "tp": 2}
    first, second = ranks(2, changed, path, layout, NORM, 1, False)
    assert first.endswith(
        f"rank 1 has other values of {NORM} than rank 0; kernels that add in any order may do that"
    )
    assert second == ""
    strict = ranks(2, changed, path, layout, NORM, 1)
    assert all(one.endswith(f"rank 1 has other values of {NORM} than rank 0") for one in strict)
