"""Costs are found again from noisy calls, and say when a move pays."""

import json
import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridrl.costs.instance import LONGEST_DRAFT, UNLIMITED, Costs, Drafting
from hybridrl.costs.meter import CostMeter
from hybridrl.flow.executor import Computed
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.events import learn
from hybridrl.workers.emulation import scaled

TRUE = Costs(
    step_s=4e-3,
    row_s=2e-4,
    cached_token_s=1e-6,
    prefill_token_s=5e-5,
    admit_s=5e-4,
    call_s=3e-3,
    token_s={"reference": 2e-5, "reward": 4e-5},
    stage_call_s={"reference": 2e-3, "reward": 0.0},
    kv_token_s=1e-5,
    kv_call_s=1e-3,
    train_token_s=6e-5,
    switch_s=0.2,
    train_switch_s=0.1,
    round_trip_s=2e-3,
)


HALF = scaled(TRUE, 0.5)


def calls(
    draw: np.random.Generator, num: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, rows summed, prompt tokens, cached tokens summed of `num` calls of an instance."""
    steps = draw.integers(1, 33, num)
    rows = steps * draw.integers(1, 65, num)
    return steps, rows, draw.integers(0, 2, num) * draw.integers(0, 400, num), rows * 60


def watched(
    noise: float = 0.03, outliers: float = 0.0, num: int = 300, meter: CostMeter | None = None
) -> CostMeter:
    """A meter of half of `TRUE` that has seen calls which cost `TRUE`, more or less."""
    draw = np.random.default_rng(0)
    meter = meter or CostMeter(counted=HALF)

    def seen(seconds: float) -> float:
        slow = draw.uniform(3, 20) if draw.random() < outliers else 1.0
        return seconds * slow * draw.normal(1, noise)

    for s, r, p, c in zip(*(x.tolist() for x in calls(draw, num)), strict=True):
        c = round(c * draw.uniform(0.2, 3))
        seconds = TRUE.call_s + TRUE.decode(r / s, s, c / s) + TRUE.prefill_token_s * p
        admitted = int(draw.integers(0, 65))
        meter.saw_advance(seen(seconds + TRUE.admit_s * admitted), s, r, p, c, admitted)
        tokens = int(draw.integers(10, 5000))
        for stage in TRUE.token_s:
            meter.saw_compute(stage, seen(TRUE.compute(stage, tokens)), tokens)
        meter.saw_kv(seen(TRUE.kv_call_s + TRUE.kv_token_s * tokens), tokens)
        meter.saw_train(seen(TRUE.train_token_s * tokens), tokens)
        meter.saw_switch(seen(TRUE.switch_s))
        meter.saw_train_switch(seen(TRUE.train_switch_s))
        meter.saw_round_trip(seen(TRUE.round_trip_s))
    return meter


@pytest.mark.parametrize("outliers", [0.0, 0.2])
def test_each_kind_has_the_scale_of_its_calls(outliers: float) -> None:
    """Twice what was counted; a fifth of calls that take 3 to 20 times as long hardly count."""
    meter = watched(outliers=outliers)
    learned = meter.costs()
    assert learned is not None
    for name, wanted in TRUE.to_json().items():
        if name not in ("drafting", "prefill_token_s"):
            assert getattr(learned, name) == pytest.approx(wanted, rel=0.03), name
    assert learned.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.15)
    for kind, scale in meter.scales().to_json().items():
        assert scale == pytest.approx(2.0, rel=0.15), kind
    assert {kind for kind, *_ in meter.table()} >= {"decode", "train", "kv", "forward:reward"}


def test_kinds_have_scales_of_their_own() -> None:
    """A call is of the kind that takes more of it; the other one is taken off at its own scale."""
    meter = CostMeter(counted=Costs(step_s=1e-3, row_s=1e-4, prefill_token_s=1e-3))
    for _ in range(8):
        meter.saw_advance(3 * 10 * 1.4e-3, 10, 40)
    meter.saw_advance(3 * 1.4e-3 + 5 * 1.0, 1, 4, 1000)
    meter.saw_advance(3 * 10 * 1.4e-3 + 5 * 2e-3, 10, 40, 2)
    learned = meter.costs()
    assert learned is not None
    assert learned.step_s == pytest.approx(3e-3)
    assert learned.prefill_token_s == pytest.approx(5e-3)
    assert meter.scales().to_json() == pytest.approx(
        {"decode": 3.0, "prefill": 5.0, "forward": 1.0, "train": 1.0, "switch": 1.0, "kv": 1.0}
    )


def test_what_is_not_counted_has_its_seconds_a_token() -> None:
    """A verifier, say: it has a rate, and no scale."""
    meter = CostMeter(counted=Costs(step_s=1.0))
    for tokens in (100, 200, 400):
        meter.saw_compute("verifier", 0.01 * tokens, tokens)
    for _ in range(8):
        meter.saw_advance(1.0, 1, 1)
    learned = meter.costs()
    assert learned is not None
    assert learned.compute("verifier", 50) == pytest.approx(0.5)
    assert meter.scales().forward == 1.0
    assert [kind for kind, *_ in meter.table()] == ["decode"]


def test_scales_of_nothing_counted_say_nothing() -> None:
    assert not CostMeter().counts
    assert CostMeter(counted=HALF).counts


def test_measurements_of_earlier_versions_are_left() -> None:
    """They were seconds and amounts of work, by kinds of another naming."""
    meter, earlier = CostMeter(), {"advance": [[1.0, 2.0, 3.0]], "train": [[1.0, 2.0]]}
    meter.load_state_dict(cast(Any, earlier))
    assert meter.state_dict() == {"kinds": {}}


@given(
    accept=st.floats(0, 1),
    share=st.floats(0, 10),
    pass_tokens=st.sampled_from([1, 64, 10**6]),
    rows=st.integers(1, 100),
)
def test_a_draft_is_as_long_as_pays(
    accept: float, share: float, pass_tokens: int, rows: int
) -> None:
    """No other length gives more tokens a second; a pass has no more than its bound."""
    drafting = Drafting(tokens=None, accept=accept, pass_tokens=pass_tokens)
    rates = [
        sum(accept**i for i in range(length + 1)) / (1 + share * (1 + length))
        for length in range(LONGEST_DRAFT + 1)
    ]
    length = int(drafting.best_length(share))
    assert rates[length] == pytest.approx(max(rates), rel=1e-9)
    drafted, right = drafting.of_row(rows, share)
    assert rows * (1 + drafted) <= max(rows, pass_tokens) * (1 + 1e-9)
    assert 0 <= right <= drafted


def test_how_many_guesses_are_right_is_learned() -> None:
    """Three drafts of 4: all right, 2 right, none. Six were right, and two drafts had one wrong."""
    meter = watched(noise=0.0, meter=CostMeter(4, 64, HALF))
    assert (costs := meter.costs()) is not None
    assert costs.drafting is None
    meter.saw_drafts(6, 2)
    again = CostMeter(4, 64, HALF)
    again.load_state_dict(meter.state_dict())
    assert (costs := again.costs()) is not None
    assert costs.drafting == Drafting(tokens=4, accept=0.75, pass_tokens=64)
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    "wrong", [3, {"tokens": -1, "accept": 0.5}, {"tokens": 2, "accept": 2}, {}]
)
def test_wrong_drafting_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"costs\.drafting: got"):
        Costs.from_json({"step_s": 1.0, "drafting": wrong})


def test_nothing_is_said_of_what_was_not_seen() -> None:
    meter = CostMeter()
    assert meter.costs() is None
    for _ in range(7):
        meter.saw_advance(0.01, 1, 1)
    assert meter.costs() is None
    meter.saw_advance(0.01, 1, 1)
    learned = meter.costs()
    assert learned is not None
    assert (learned.token_s, learned.switch_s, learned.compute("reward", 10)) == ({}, 0.0, 0.0)
    assert learned.row_s > 0, "it is counted"


def test_old_calls_are_forgotten() -> None:
    meter = CostMeter()
    for seconds in [9.0] * 1000 + [1.0] * 512:
        meter.saw_advance(seconds, 10, 10)
        meter.saw_switch(seconds)
    learned = meter.costs()
    assert learned is not None
    assert learned.switch_s == pytest.approx(1.0, rel=1e-6)
    assert len(meter.state_dict()["kinds"]["decode"]) == 512


def test_a_meter_goes_on_from_json() -> None:
    meter, other = watched(num=40), CostMeter(counted=HALF)
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert other.costs() == meter.costs()
    costs = meter.costs()
    assert costs is not None
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "wanted step_s"),
        ({"step_s": 1, "rows": 2}, "rows"),
        ({"step_s": -1}, "step_s: got -1"),
        ({"step_s": "1"}, "step_s: got '1'"),
        ({"step_s": math.nan}, "step_s: got nan"),
        ({"step_s": 1, "token_s": 3}, "token_s: got 3"),
        ({"step_s": 1, "token_s": {"reward": None}}, "token_s: got None"),
    ],
)
def test_wrong_costs_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs.from_json(wrong)


@given(
    step=st.floats(1e-4, 1.0),
    row=st.floats(1e-6, 1.0),
    cached=st.floats(0, 1e-4),
    held=st.floats(0, 1e4),
    slack=st.floats(0, 4),
)
def test_flat_rows_are_the_most_within_the_slack(
    step: float, row: float, cached: float, held: float, slack: float
) -> None:
    costs = Costs(step_s=step, row_s=row, cached_token_s=cached)
    rows = costs.flat_rows(slack, held)
    bound = (1 + slack) * costs.decode(1, 1, held)
    assert rows >= 1
    assert costs.decode(rows, 1, rows * held) <= bound * (1 + 1e-6) or rows == 1
    assert costs.decode(rows + 1, 1, (rows + 1) * held) > bound * (1 - 1e-6)


def test_rows_that_cost_nothing_are_unlimited() -> None:
    assert Costs(step_s=1.0).flat_rows() == UNLIMITED


def test_what_is_sent_and_what_is_computed_again() -> None:
    costs = Costs(step_s=1.0, prefill_token_s=2.0, kv_token_s=1.0, kv_call_s=10.0)
    assert [costs.cheaper_by_kv(n) for n in (0, 10, 11)] == [False, False, True]
    assert [costs.move(n) for n in (0, 10, 11)] == [0, 20, 21]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e3),
            st.integers(0, 100),
            st.integers(0, 10_000),
            st.integers(0, 10_000),
            st.integers(0, 10**6),
        ),
        min_size=8,
        max_size=20,
    )
)
@example([(5e-324, 1, 1, 0, 0)] * 8)  # so short that what is best is 0 exactly
def test_any_calls_give_costs_that_are_finite(
    seen: list[tuple[float, int, int, int, int]],
) -> None:
    meter = CostMeter()
    for call in seen:
        meter.saw_advance(*call)
    learned = meter.costs()
    assert learned is not None
    assert Costs.from_json(learned.to_json()) == learned


def test_work_that_waited_for_its_turn_teaches_nothing() -> None:
    meter, id = CostMeter(), SampleId(0)
    learn(meter, Computed("judge", (id,), {}, ()), [Sample(id=id)])
    assert meter.state_dict() == {"kinds": {}}
    learn(meter, Computed("judge", (id,), {}, (), seconds=2.0), [Sample(id=id)])
    assert meter.state_dict() == {"kinds": {"forward:judge": [[2.0, 0.0]]}}
