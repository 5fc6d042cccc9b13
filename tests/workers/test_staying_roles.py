"""Ranks of a pool decide together what stays on their devices, by the memory plan's own rule."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridrl.costs.generation_memory import NativeSizes
from hybridrl.costs.memory import PoolSizes, plan_memory, reserved_bytes
from hybridrl.costs.train_memory import ActivationSizes, TrainSizes
from hybridrl.engines.rollout.interface import EngineParts
from hybridrl.engines.rollout.memory import device_margin, device_memory_left
from hybridrl.workers.staying_roles import ALL_LEAVE, StayingRoles, staying_roles

GIB = 2**30
TOTAL = 80 * GIB
CUDA = torch.device("cuda")


def train_sizes(trained: int) -> TrainSizes:
    """A model of one layer whose state is 12 bytes times `trained`, and its updates next to it."""
    nothing = ActivationSizes(0, 0)
    return TrainSizes(
        trained=trained, frozen=0, layer=0, layers=1, root=0, trained_layer=0, trained_root=0,
        largest=0, read=0, itemsize=2, fsdp=1, tp=1, keep_unsharded=False, head=0,
        several_rows=False, earlier_gradients=False, layer_activations=nothing, ends=nothing,
        saved=GIB, reduced_layer=0,
    )  # fmt: skip


def pool(critic: int = 0) -> PoolSizes:
    """An actor with a state of 24 GiB, of which a KV cache alone would take 70; and a critic."""
    generation = NativeSizes(
        weights=4 * GIB, token=2**16, gathered=0, prefill=0, logits=0, sampling=0, joined=0,
        buckets=0, longest=2**10, most=2**30, wanted=0,
    )  # fmt: skip
    trained = {"actor": train_sizes(2 * GIB)}
    trained |= {"critic": train_sizes(critic)} if critic else {}
    return PoolSizes(trained=trained, scoring={}, generation=generation)


def decide(sizes: PoolSizes | None, used: list[int], reserved: int = 0) -> StayingRoles:
    """What this rank of those with so much `used` by others decides."""
    free = TOTAL - used[dist.get_rank()] - reserved
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, TOTAL)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=reserved),
    ):
        return staying_roles(sizes, CUDA)


@pytest.mark.parametrize(
    ("used", "stay"),
    [([0, 0], True), ([0, 20 * GIB], True), ([0, 30 * GIB], False), ([30 * GIB, 0], False)],
)
def test_a_role_stays_where_all_ranks_have_room(
    ranks: Callable[..., list[Any]], used: list[int], stay: bool
) -> None:
    """It takes 25 GiB with a parameter that is saved: less than half of 52.8, and more of 42.8."""
    first, second = ranks(2, decide, pool(), used)
    assert first == second
    assert first.names == (("actor",) if stay else ())
    assert first.reserved_bytes == (25 * GIB if stay else 0)


def test_the_ranks_decide_as_the_plan_does(ranks: Callable[..., list[Any]]) -> None:
    """What this process has cached is not in use by others."""
    sizes = pool(critic=GIB)
    plan = plan_memory(sizes, "cuda", TOTAL, device_margin(TOTAL) + 5 * GIB)
    (decided,) = ranks(1, decide, sizes, [5 * GIB], 3 * GIB)
    assert decided.names == tuple(plan.staying) == ("actor",)  # a critic would take too much of it
    assert decided.reserved_bytes == reserved_bytes(sizes, plan.staying)


def test_all_leave_where_there_is_no_plan_and_no_gpu(caplog: pytest.LogCaptureFixture) -> None:
    assert staying_roles(None, CUDA) is ALL_LEAVE
    assert staying_roles(pool(), torch.device("cpu")) is ALL_LEAVE
    assert not caplog.records


def test_the_log_says_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch.object(dist, "all_reduce", return_value=None),
        mock.patch.object(dist, "get_rank", return_value=0),
        caplog.at_level(logging.INFO, logger="hybridrl.workers.staying_roles"),
    ):
        decide(pool(critic=GIB), [0])
    assert [record.getMessage() for record in caplog.records] == [
        "weights and moments of the actor stay on the device",
        "weights and moments of the critic are offloaded while others work",
    ]


def test_the_cache_has_what_the_roles_leave() -> None:
    """What they will take is not in use yet, but theirs."""
    parts = SimpleNamespace(device=CUDA, bucket_bytes=GIB, reserved_bytes=10 * GIB)
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(60 * GIB, TOTAL)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=8 * GIB),
    ):
        memory = device_memory_left(cast(EngineParts, parts))
    assert memory.left == 60 * GIB - 10 * GIB - 2 * GIB - device_margin(TOTAL)
    assert "10.0 GiB what training and images will take" in memory.explanation
