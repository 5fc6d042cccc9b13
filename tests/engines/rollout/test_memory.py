"""Memory for a rollout engine, against sums by hand and against vLLM's own rules."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config import ConfigError
from hybridrl.engines.rollout.memory import GIB, memory_left, native_cache_tokens, vllm_share

MIB = 2**20
H200 = 150_110_011_392  # bytes: 139.8 GiB


def test_the_example_of_the_docstring() -> None:
    plan = vllm_share(
        memory_left(80 * GIB, 3 * GIB // 2, {"buckets of the weight switch": 2 * GIB}), GIB
    )
    # 80 - 1.5 - 2 - 3.2 (4 percent) = 73.3, of 80: 0.91625
    assert plan.utilization == 0.9162
    assert plan.explanation == (
        "0.9162: 73.3 GiB of 80.0 GiB are left after 1.5 GiB others, 2.0 GiB buckets of the "
        "weight switch, 3.2 GiB margin"
    )


def test_all_that_stays_is_named() -> None:
    """Training state of 1.5 B parameters in fp32 that stays, and a judge's weights."""
    resident = {"training state": 16 * 1_540_000_000, "buckets": 512 * MIB, "judge": 3 * GIB}
    plan = vllm_share(memory_left(H200, 600 * MIB, resident), 4 * GIB)
    left = H200 * 0.96 - 600 * MIB - 16 * 1.54e9 - 512 * MIB - 3 * GIB
    assert plan.utilization == pytest.approx(left / H200, abs=1e-4)
    assert re.findall(r"[\d.]+ GiB [a-z ]+", plan.explanation.partition("after ")[2]) == [
        "0.6 GiB others", "22.9 GiB training state", "0.5 GiB buckets", "3.0 GiB judge",
        "5.6 GiB margin",
    ]  # fmt: skip


def test_a_small_device_keeps_three_gigabytes() -> None:
    """4 percent of 8 GiB would be 0.32; nothing that is empty is named."""
    plan = vllm_share(memory_left(8 * GIB, 0, {"training state": 0}), GIB)
    assert plan.utilization == 0.6507
    assert plan.explanation == "0.6507: 5.2 GiB of 8.0 GiB are left after 2.8 GiB margin"


def test_too_little_is_one_clear_line() -> None:
    with pytest.raises(ConfigError) as error:
        vllm_share(memory_left(24 * GIB, GIB, {"training state": 20 * GIB}), 4 * GIB)
    assert str(error.value) == (
        "rollout.engine=vllm: wanted 4.0 GiB of the device for it, and 0.2 GiB of 24.0 GiB are "
        "left after 1.0 GiB others, 20.0 GiB training state, 2.8 GiB margin; more ranks in "
        "rollout.layout.tp need less on each"
    )
    with pytest.raises(ConfigError, match=r"and 0\.0 GiB of 24\.0 GiB are left after"):
        vllm_share(memory_left(24 * GIB, 24 * GIB, {"training state": GIB}), 0)


@given(
    total=st.integers(GIB, 300 * GIB),
    used=st.integers(0, 40 * GIB),
    resident=st.dictionaries(st.sampled_from("abc"), st.integers(0, 60 * GIB)),
    needed=st.integers(0, 20 * GIB),
)
def test_everything_fits_as_vllm_counts(
    total: int, used: int, resident: dict[str, int], needed: int
) -> None:
    """What vLLM requests, beside all else and the margin, is never more than the device."""
    used = min(used, total)
    try:
        plan = vllm_share(memory_left(total, used, resident), needed)
    except ConfigError:
        left = total - used - sum(resident.values()) - max(3e9, total * 0.04)
        assert left < max(needed, total * 1e-4)
        return
    requested = math.ceil(total * plan.utilization)  # vllm/v1/worker/utils.py, request_memory
    others = used + sum(resident.values())
    assert requested + others + max(3e9, total * 0.04) <= total + 1
    assert requested >= needed - total * 1e-4
    assert 0 < plan.utilization <= 1


LEFT = memory_left(80 * GIB, 0, {})  # 76.8 GiB
KV = 56 * 2**10  # bytes of a token's keys and values: Qwen2.5-7B in bfloat16
FITS = 1_129_091  # (76.8 GiB - 16.5 GiB) / 56 KiB


@pytest.mark.parametrize(
    ("wanted", "most", "tokens"),
    [(0, 256 * 4096, 256 * 4096), (0, 512 * 4096, FITS), (100_000, 256 * 4096, 100_000)],
)
def test_the_native_cache_takes_what_is_left(wanted: int, most: int, tokens: int) -> None:
    """As many samples as may run, or as many tokens as fit."""
    needed = 33 * GIB // 2
    sizes = {"wanted": wanted, "most": most, "longest": 4096}
    assert native_cache_tokens(LEFT, needed, KV, **sizes) == tokens
    assert needed + FITS * KV <= LEFT.left < needed + (FITS + 1) * KV


def test_a_native_cache_that_does_not_fit_is_one_clear_line() -> None:
    sizes = {"most": 256 * 4096, "longest": 4096}
    with pytest.raises(ConfigError) as error:
        native_cache_tokens(LEFT, 33 * GIB // 2, KV, wanted=2_000_000, **sizes)
    assert str(error.value) == (
        f"rollout.kv_cache_tokens=2000000: wanted at most {FITS}: 76.8 GiB of 80.0 GiB are left "
        "after 3.2 GiB margin (16.5 GiB for weights and arrays, 56.0 KiB a token)"
    )
    with pytest.raises(ConfigError, match=r"^rollout.kv_cache_tokens=0: wanted room for a sample"):
        native_cache_tokens(LEFT, 76 * GIB, 56 * KV, wanted=0, **sizes)
