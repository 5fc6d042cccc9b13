"""The share of a device for vLLM, against sums by hand and against vLLM's own rules."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config import ConfigError
from hybridrl.engines.rollout.memory import GIB, plan_memory

MIB = 2**20
H200 = 150_110_011_392  # bytes: 139.8 GiB


def test_the_example_of_the_docstring() -> None:
    plan = plan_memory(80 * GIB, 3 * GIB // 2, {"buckets of the weight switch": 2 * GIB}, GIB)
    # 80 - 1.5 - 2 - 1.6 (2 percent) = 74.9, of 80: 0.93625
    assert plan.utilization == 0.9362
    assert plan.explanation == (
        "0.9362 of 80.0 GiB: 74.9 GiB are left after 1.5 GiB others, 2.0 GiB buckets of the "
        "weight switch, 1.6 GiB margin"
    )


def test_all_that_stays_is_named() -> None:
    """Training state of 1.5 B parameters in fp32 that stays, and a judge's weights."""
    resident = {"training state": 16 * 1_540_000_000, "buckets": 512 * MIB, "judge": 3 * GIB}
    plan = plan_memory(H200, 600 * MIB, resident, 4 * GIB)
    left = H200 * 0.98 - 600 * MIB - 16 * 1.54e9 - 512 * MIB - 3 * GIB
    assert plan.utilization == pytest.approx(left / H200, abs=1e-4)
    assert re.findall(r"[\d.]+ GiB [a-z ]+", plan.explanation.partition("after ")[2]) == [
        "0.6 GiB others", "22.9 GiB training state", "0.5 GiB buckets", "3.0 GiB judge",
        "2.8 GiB margin",
    ]  # fmt: skip


def test_a_small_device_keeps_half_a_gib() -> None:
    """2 percent of 8 GiB would be 0.16; nothing that is empty is named."""
    plan = plan_memory(8 * GIB, 0, {"training state": 0}, GIB)
    assert plan.utilization == 0.9375
    assert plan.explanation == "0.9375 of 8.0 GiB: 7.5 GiB are left after 0.5 GiB margin"


def test_too_little_is_one_clear_line() -> None:
    with pytest.raises(ConfigError) as error:
        plan_memory(24 * GIB, GIB, {"training state": 20 * GIB}, 4 * GIB)
    assert str(error.value) == (
        "rollout.engine=vllm: wanted 4.0 GiB of the device for it, and 2.5 GiB of 24.0 GiB are "
        "left after 1.0 GiB others, 20.0 GiB training state, 0.5 GiB margin; more ranks in "
        "rollout.layout.tp need less on each"
    )
    with pytest.raises(ConfigError, match=r"and 0\.0 GiB of 24\.0 GiB are left after"):
        plan_memory(24 * GIB, 24 * GIB, {"training state": GIB}, 0)


@given(
    total=st.integers(GIB, 300 * GIB),
    used=st.integers(0, 40 * GIB),
    resident=st.dictionaries(st.sampled_from("abc"), st.integers(0, 60 * GIB)),
    needed=st.integers(0, 20 * GIB),
)
def test_everything_fits_as_vllm_counts(
    total: int, used: int, resident: dict[str, int], needed: int
) -> None:
    """What vLLM requests, beside all else and half a GiB, is never more than the device."""
    used = min(used, total)
    try:
        plan = plan_memory(total, used, resident, needed)
    except ConfigError:
        left = total - used - sum(resident.values()) - max(GIB // 2, math.ceil(total * 0.02))
        assert left < max(needed, total * 1e-4)
        return
    requested = math.ceil(total * plan.utilization)  # vllm/v1/worker/utils.py, request_memory
    others = used + sum(resident.values())
    assert requested + others + max(GIB // 2, total * 0.02) <= total + 1
    assert requested >= needed - total * 1e-4
    assert 0 < plan.utilization <= 1
