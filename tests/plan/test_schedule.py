"""The simulated executor by hand and by property, and what `hybridrl plan schedule` reads."""

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config import (
    ConfigError,
    EarlyBackward,
    FusedScheduleConfig,
    PackedScheduleConfig,
    PartialScheduleConfig,
    ScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.costs.devices import MODELS
from hybridrl.costs.instance import Costs, Drafting
from hybridrl.costs.roofline import Roofline
from hybridrl.flow.executor import (
    Advanced,
    Computed,
    EarlyTrained,
    Park,
    Phase,
    Prepared,
    Resume,
    SamplesRead,
    Sampling,
    Scope,
    Submit,
    UpdateDone,
    WeightsReady,
)
from hybridrl.flow.graph import ComputeStage, StageMethod, UpdateStage
from hybridrl.flow.sample import Sample, SampleId, TokenSpan
from hybridrl.flow.workload import (
    LMSYS,
    Group,
    LogNormal,
    Shape,
    Workload,
    read_costs,
    read_workload,
)
from hybridrl.plan.schedule import (
    Setting,
    lower_bound,
    replay,
    simulated_graph,
    variants,
    what_if,
)
from hybridrl.plan.schedule_command import read_setting, run
from hybridrl.plan.simulate import SimulatedExecutor
from hybridrl.schedule.build import build

A, B, C = SampleId(0), SampleId(1), SampleId(2)
LENGTHS = {A: 3, B: 5, C: 9}
SCORE = ComputeStage(name="judge", method=StageMethod.SCORE, outputs=("reward",))
FORWARD = ComputeStage(name="reference", method=StageMethod.LOG_PROBS, outputs=("reference",))


def executor(costs: Costs, num_instances: int = 2, **options: Any) -> SimulatedExecutor:
    """Samples of `LENGTHS`, prompts of 10 tokens; generation has begun."""
    scopes = {"reference": Scope.INSTANCE}
    simulated = SimulatedExecutor(
        costs,
        num_instances,
        LENGTHS.__getitem__,
        lambda position: 10,
        **{"max_running": 8, "scopes": scopes, **options},
    )
    simulated.sync_weights()
    assert simulated.wait() == [WeightsReady(0)]
    return simulated


def submit(*ids: SampleId) -> Submit:
    return Submit(ids, None, Sampling(100))


def advanced(simulated: SimulatedExecutor) -> Advanced:
    (event,) = simulated.wait()
    assert isinstance(event, Advanced)
    return event


# -- the executor ----------------------------------------------------------------------------


def test_a_call_takes_what_its_work_costs() -> None:
    costs = Costs(
        step_s=1.0,
        row_s=0.1,
        cached_token_s=1e-3,
        prefill_token_s=0.01,
        admit_s=0.04,
        call_s=0.5,
        switch_s=7.0,
        round_trip_s=0.25,
    )
    simulated = executor(costs)
    simulated.advance(0, [submit(A), submit(B)], 4)
    event = advanced(simulated)
    # Three steps of two rows and one of B's; cached: 10, 11, 12 of each, then 13 of B.
    assert (event.work.decode_steps, event.work.rows, event.work.cached) == (4, 7, 2 * 33 + 13)
    assert event.work.prefill_tokens == 20
    assert event.work.admitted == 2
    seconds = 0.5 + 4 + 0.7 + 0.079 + 0.2 + 0.08
    assert event.work.seconds == pytest.approx(seconds)
    assert simulated.clock.now() == pytest.approx(7 + seconds + 0.25)
    assert [f.id for f in event.finished] == [A]
    assert event.running == 1
    simulated.advance(0, (), 4)
    event = advanced(simulated)
    assert event.work.decode_steps == 1
    assert event.finished[0].spans == (TokenSpan(0, 5, 0),)


def test_a_pass_verifies_guesses_at_the_cost_of_rows() -> None:
    """Drafts of two, half of them right: 1 + 1/2 + 1/4 tokens of a row and pass, on average."""
    drafting = Drafting(tokens=2, accept=0.5)
    costs = Costs(step_s=1.0, row_s=0.1, cached_token_s=1e-3, drafting=drafting)
    simulated = executor(costs)
    simulated.length_of = lambda id: 7
    simulated.advance(0, [submit(A)], 100)
    event = advanced(simulated)
    # 1.75, 3.5, 5.25, 7: four passes of three tokens each
    work = event.work
    assert (work.decode_steps, work.rows, work.drafted, work.accepted) == (4, 12, 8, 3)
    assert work.accepted / (work.accepted + work.refused) == drafting.accept
    # Each pass reads what is cached once: 10 tokens, and 1.75 more each time.
    cached = 10 * 4 + 7 * 3 / 2
    assert work.seconds == pytest.approx(4 * (1 + 0.3) + 1e-3 * cached)
    assert work.name() == simulated.slices[-1].name == "verify 3/8"
    assert event.finished[0].response_tokens == 7


def test_a_call_may_bound_tokens_in_place_of_passes() -> None:
    """Then nothing is guessed while samples wait for room."""
    costs = Costs(step_s=1.0, drafting=Drafting(tokens=3, accept=1.0))
    simulated = executor(costs, counts_tokens=True, max_running=2)
    simulated.length_of = {A: 8, B: 20, C: 20}.__getitem__
    simulated.advance(0, [submit(A), submit(B)], 8)
    event = advanced(simulated)
    assert ([f.id for f in event.finished], event.work.decode_steps) == ([A], 2)
    simulated.advance(0, [submit(C)], 8)
    assert advanced(simulated).work.decode_steps == 2
    simulated.advance(0, [submit(A)], 3)  # waits
    assert advanced(simulated).work.drafted == 0


def test_those_that_find_no_place_wait() -> None:
    simulated = executor(Costs(step_s=1.0), max_running=1)
    simulated.advance(0, [submit(A), submit(B)], 100)
    event = advanced(simulated)
    assert simulated.clock.now() == 3 + 5
    assert [f.id for f in event.finished] == [A, B]


def test_samples_of_a_prompt_share_its_prefill() -> None:
    simulated = executor(Costs(step_s=1.0, prefill_token_s=1.0))
    simulated.length_of = lambda id: 1
    simulated.advance(0, [submit(SampleId(0, k=0), SampleId(0, k=1))], 1)
    assert advanced(simulated).work.prefill_tokens == 10


@pytest.mark.parametrize("with_kv", [True, False])
def test_a_parked_sample_goes_on_where_it_stopped(with_kv: bool) -> None:
    costs = Costs(step_s=1.0, prefill_token_s=0.1, kv_token_s=0.02, kv_call_s=4.0)
    simulated = executor(costs)
    simulated.advance(0, [submit(A), submit(C)], 2)
    simulated.wait()
    simulated.advance(0, [Park((C,), with_kv)], 0)
    event = advanced(simulated)
    (parked,) = event.parked
    assert (parked.ids, parked.tokens, event.running) == ((C,), (12,), 1)
    before = simulated.clock.now()
    simulated.advance(1, [Resume((C,), parked)], 100)
    event = advanced(simulated)
    assert event.finished[0].response_tokens == LENGTHS[C]
    moved = 2.0 + 0.01 * 12 if with_kv else 0.1 * 12
    assert simulated.clock.now() - before == pytest.approx(moved + 7)
    assert event.work.kv_tokens == (12 if with_kv else 0)


def test_keys_and_values_of_other_weights_are_computed_again() -> None:
    simulated = executor(Costs(step_s=1.0))
    simulated.advance(0, [submit(C)], 2)
    simulated.wait()
    simulated.advance(0, [Park((C,), True)], 0)
    (parked,) = advanced(simulated).parked
    simulated.prepare(simulated.instances, Phase.TRAIN)
    assert simulated.wait() == [Prepared((0, 1), Phase.TRAIN)]
    stage = simulated_graph(Costs(step_s=1.0), 1).stages["update_actor"]
    simulated.update([(stage, [])])
    assert simulated.wait() == [UpdateDone("update_actor", {})]
    simulated.sync_weights()
    assert simulated.wait() == [WeightsReady(1)]
    simulated.advance(0, [Resume((C,), parked)], 3)
    work = advanced(simulated).work
    assert (work.prefill_tokens, work.kv_tokens) == (12, 0)
    simulated.advance(0, (), 100)
    assert advanced(simulated).finished[0].spans == (TokenSpan(0, 2, 0), TokenSpan(2, 9, 1))


def test_forward_passes_fetch_what_lies_elsewhere() -> None:
    costs = Costs(step_s=1.0, token_s={"reference": 0.1}, stage_call_s={"reference": 0.5})
    simulated = executor(costs)
    simulated.advance(0, [submit(A), submit(C)], 3)
    simulated.wait()
    simulated.advance(0, (), 4)  # until 7
    sample = Sample(id=A, rank=0, prompt_tokens=10, response_tokens=3)
    simulated.infer(FORWARD, 1, [sample])
    events = [event for _ in range(2) for event in simulated.wait()]
    (computed,) = (event for event in events if isinstance(event, Computed))
    assert (computed.ids, computed.instance, sample.rank) == ((A,), 1, 1)
    assert computed.seconds == pytest.approx(0.5 + 1.3)
    stop = next(s.stop for s in simulated.slices if s.name == "reference")
    assert stop == pytest.approx(3 + 1.8)


def test_verifiers_run_beside_the_instance() -> None:
    simulated = executor(Costs(step_s=1.0), verifier_s=2.0)
    simulated.advance(0, [submit(A), submit(C)], 3)
    simulated.wait()
    simulated.advance(0, (), 6)  # until 9
    simulated.compute(SCORE, [Sample(id=A, rank=0)])
    (event,) = simulated.wait()
    assert isinstance(event, Computed)
    assert simulated.clock.now() == 3 + 2


def test_a_judge_on_the_drivers_node_keeps_no_instance_busy() -> None:
    """Each sample alone, all at a time; they may move as soon as they are read."""
    costs = Costs(step_s=1.0, token_s={"judge": 0.1}, stage_call_s={"judge": 2.0})
    simulated = executor(costs, scopes={"judge": Scope.DRIVER})
    simulated.advance(0, [submit(C)], 9)  # until 9
    samples = [Sample(id=A, rank=0, prompt_tokens=10), Sample(id=B, rank=0, prompt_tokens=20)]
    simulated.compute(SCORE, samples)
    assert simulated.wait() == [SamplesRead("judge", (A, B))]
    assert simulated.clock.now() == 0
    for sample, end in zip(samples, (3.0, 4.0), strict=True):
        (event,) = simulated.wait()
        assert isinstance(event, Computed)
        assert (event.ids, event.seconds) == ((sample.id,), pytest.approx(end))
        assert simulated.clock.now() == pytest.approx(end)
    advanced(simulated)
    assert simulated.clock.now() == 9
    assert [(s.instance, s.name) for s in simulated.slices] == [(0, "generate")]


def test_a_sharded_role_takes_all_instances() -> None:
    costs = Costs(step_s=1.0, token_s={"critic": 0.1})
    simulated = executor(costs, scopes={"critic": Scope.WORLD})
    stage = ComputeStage(name="critic", method=StageMethod.VALUES, outputs=("values",))
    simulated.compute(stage, [Sample(id=A, rank=0, prompt_tokens=10, response_tokens=10)])
    simulated.wait()
    assert simulated.clock.now() == pytest.approx(1.0)
    assert [s.instance for s in simulated.slices] == [0, 1]


def test_an_early_part_of_an_update_is_not_trained_again() -> None:
    costs = Costs(step_s=1.0, train_token_s=0.1, train_switch_s=2.0)
    simulated = executor(costs)
    simulated.advance(0, [submit(C)], 9)  # until 9
    samples = [
        Sample(id=id, rank=0, prompt_tokens=10, response_tokens=n) for id, n in LENGTHS.items()
    ]
    stage = simulated_graph(costs, 1).stages["update_actor"]
    assert isinstance(stage, UpdateStage)
    simulated.train_early(stage, 1, samples[:2])  # 28 tokens on one of two instances
    (event,) = simulated.wait()
    assert event == EarlyTrained(stage.name, 1, (A, B), pytest.approx(5.6))
    assert simulated.clock.now() == pytest.approx(2 + 5.6)
    advanced(simulated)
    simulated.prepare(simulated.instances, Phase.TRAIN)
    assert simulated.wait() == [Prepared((0, 1), Phase.TRAIN)]
    simulated.update([(stage, samples)])
    simulated.wait()
    assert simulated.clock.now() == pytest.approx(9 + 2 + 1.9)
    assert next(s.name for s in simulated.slices if s.instance == 1) == "early backward"


# -- whole steps -----------------------------------------------------------------------------

COSTS = Costs(
    step_s=2e-3,
    row_s=1e-4,
    cached_token_s=1e-7,
    prefill_token_s=5e-5,
    call_s=2e-3,
    token_s={"reference": 2e-4, "reward": 1e-4},
    stage_call_s={"reference": 2e-3, "reward": 1e-3},
    kv_token_s=1e-5,
    train_token_s=3e-4,
    switch_s=0.05,
    train_switch_s=0.02,
    round_trip_s=1e-3,
)


def setting(
    lengths: LogNormal | None = None, costs: Costs = COSTS, steps: int = 3, **options: Any
) -> Setting:
    """Twelve prompts of eight tokens a step, four samples each, on two instances."""
    drawn = (lengths or LogNormal(40, 0.9, 400)).draw(12 * steps + 24, 4, 8)
    workload = Workload(tuple(drawn), 12, steps)
    values: dict[str, Any] = {"num_instances": 2, "decode_steps": 8, "chunk_tokens": 1024}
    values |= {"group_size": 4} | options
    return Setting(costs=costs, workload=workload, **values)


def executor_of(case: Setting, counts_tokens: bool = False) -> SimulatedExecutor:
    """Return the executor of a case, which has two instances."""
    return SimulatedExecutor(
        case.costs,
        2,
        case.workload.length_of,
        case.workload.prompt_tokens_of,
        max_running=256,
        scopes=case.scope_of,
        counts_tokens=counts_tokens,
    )


def test_serial_takes_the_sum_of_its_parts() -> None:
    """All of one length, no overhead: prefill, decoding, two passes, the update."""
    costs = Costs(
        step_s=1.0,
        row_s=0.1,
        prefill_token_s=0.01,
        token_s={"reference": 0.001, "reward": 0.002},
        train_token_s=0.01,
        switch_s=5.0,
        train_switch_s=3.0,
    )
    outcome = replay(setting(LogNormal(16, 0.0), costs), SerialScheduleConfig())
    tokens = 24 * (16 + 8)  # an instance's
    front = 6 * 8 * 0.01 + 16 * (1 + 24 * 0.1) + 0.003 * tokens
    assert outcome.front_s == pytest.approx(front)
    assert outcome.step_s == pytest.approx(5 + front + 3 + 0.01 * 2 * tokens)
    assert outcome.bubbles == pytest.approx(0.0)


@pytest.mark.parametrize(
    "config",
    [
        SerialScheduleConfig(),
        FusedScheduleConfig(migration_threshold=12),
        PartialScheduleConfig(),
        PackedScheduleConfig(),
    ],
    ids=lambda config: config.kind.value,
)
def test_an_instance_does_one_thing_at_a_time(
    config: ScheduleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors: list[SimulatedExecutor] = []
    begin = SimulatedExecutor.__init__

    def watched(self: SimulatedExecutor, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        executors.append(self)

    monkeypatch.setattr(SimulatedExecutor, "__init__", watched)
    replay(setting(), config)
    (simulated,) = executors
    for instance in range(2):
        mine = sorted(
            (s for s in simulated.slices if s.instance == instance), key=lambda s: s.start
        )
        assert len(mine) > 5
        for before, after in pairwise(mine):
            assert after.start >= before.stop - 1e-9


@settings(max_examples=15)
@given(
    median=st.integers(1, 60),
    sigma=st.floats(0, 1.2),
    seed=st.integers(0, 1000),
    num_instances=st.integers(1, 4),
    threshold=st.sampled_from([0, 5, 20]),
)
def test_no_schedule_beats_the_bound(
    median: int, sigma: float, seed: int, num_instances: int, threshold: int
) -> None:
    case = setting(
        LogNormal(median, sigma, 500, seed), steps=1, num_instances=num_instances, max_held=64
    )
    bound = lower_bound(case)
    serial, fused = (
        replay(case, SerialScheduleConfig()),
        replay(case, FusedScheduleConfig(migration_threshold=threshold)),
    )
    assert min(serial.front_s, fused.front_s) >= bound * (1 - 1e-9)
    assert serial.off_policy == fused.off_policy == 0
    assert 0 <= fused.bubbles < 1


def test_the_bound_is_of_the_steps_that_are_shown() -> None:
    """Means leave out the first step. Its long responses do not raise the bound of the others."""
    long, short = Group(1, (100,)), Group(1, (10,))
    workload = Workload((long, short, short, short, short, short), 2, 3)
    case = Setting(costs=Costs(step_s=1.0), num_instances=2, workload=workload, group_size=1)
    assert lower_bound(case) == pytest.approx(10.0)
    assert replay(case, SerialScheduleConfig()).front_s == pytest.approx(10.0)
    assert lower_bound(case, skip=0) == pytest.approx((100 + 10 + 10) / 3)


@pytest.mark.parametrize("config", [SerialScheduleConfig(), FusedScheduleConfig()])
def test_a_judge_on_the_drivers_node_in_whole_steps(config: ScheduleConfig) -> None:
    """After the last response it takes its latency once, not that of all samples together."""
    free = replace(COSTS, token_s={}, stage_call_s={})
    costs = replace(free, token_s={"reward": 0.0}, stage_call_s={"reward": 1.0})
    without = replay(setting(costs=free), config)
    judged = replay(setting(costs=costs, scopes={"reward": Scope.DRIVER}), config)
    assert judged.front_s - without.front_s == pytest.approx(1.0)


def test_partial_steps_are_shorter_and_say_what_is_off_policy() -> None:
    case = setting(LogNormal(40, 0.9, 600), steps=6)
    serial, partial = replay(case, SerialScheduleConfig()), replay(case, PartialScheduleConfig())
    assert partial.front_s < serial.front_s
    assert 0 < partial.off_policy < 1


def test_early_backward_shortens_a_step_with_a_tail() -> None:
    """A verifier alone: without it, freed instances have nothing to do."""
    costs = replace(COSTS, token_s={}, stage_call_s={}, row_s=0.0, train_token_s=2e-4)
    case = setting(LogNormal(40, 0.9, 600), costs, steps=6, chunk_tokens=256)
    serial, fused, early = (
        replay(case, config)
        for config in (
            SerialScheduleConfig(),
            FusedScheduleConfig(),
            FusedScheduleConfig(early_backward=EarlyBackward.auto),
        )
    )
    assert early.step_s < 0.9 * min(serial.step_s, fused.step_s)
    assert early.off_policy == 0


def test_guesses_shorten_a_tail_whose_rows_are_nearly_free() -> None:
    """A pass of one row takes 1 s, and 0.01 s for each guess; packed counts tokens."""
    costs = Costs(step_s=1.0, row_s=0.01)
    case = setting(LogNormal(40, 0.9, 600), costs, steps=4)
    guessing = replace(case, costs=replace(costs, drafting=Drafting(tokens=None, accept=0.6)))
    for config in (SerialScheduleConfig(), FusedScheduleConfig(), PackedScheduleConfig()):
        off, on = replay(case, config), replay(guessing, config)
        assert 1.5 < off.front_s / on.front_s < 1 / (1 - 0.6)


def test_guesses_change_no_batch_of_a_schedule_that_counts_tokens() -> None:
    from hybridrl.plan.schedule import _parts

    def prompts_of(drafting: Drafting | None) -> list[list[int]]:
        case = setting(LogNormal(40, 0.9, 600), replace(COSTS, drafting=drafting), steps=6)
        simulated = executor_of(case, counts_tokens=True)
        schedule = build(_parts(case, simulated), PackedScheduleConfig())
        return [[s.id.prompt for s in schedule.run_step(step).samples] for step in range(6)]

    batches = prompts_of(None)
    assert batches == prompts_of(Drafting(tokens=3, accept=0.6))
    assert batches != sorted(batches)


def test_packed_steps_are_shorter_and_on_policy() -> None:
    """Where a decode step costs as much for few samples as for many, and prompts differ."""
    drawn = LogNormal(40, 1.2, 2000, alike=0.5).draw(48 * 14, 4, 8)
    case = setting(costs=Costs(step_s=1.0, train_token_s=1e-6))
    case = replace(case, workload=Workload(tuple(drawn), 48, 12))
    serial, packed = (
        replay(case, config, skip=4) for config in (SerialScheduleConfig(), PackedScheduleConfig())
    )
    assert packed.front_s < 0.7 * serial.front_s
    assert packed.off_policy == 0


@pytest.mark.parametrize("drafting", [None, Drafting(tokens=None, accept=0.6)], ids=["", "guess"])
def test_a_simulated_run_teaches_the_costs_that_it_has(drafting: Drafting | None) -> None:
    """So simulating with measured costs is simulating with those that were there."""
    from hybridrl.plan.schedule import _parts

    case = setting(costs=replace(COSTS, drafting=drafting), steps=4)
    simulated = executor_of(case)
    config = FusedScheduleConfig(migration_threshold=16)
    schedule = build(_parts(case, simulated), config)
    for step in range(4):
        schedule.run_step(step)
    learned = schedule.meter.costs()
    assert learned is not None
    # Calls of eight steps each do not tell a call's cost from that of its steps.
    assert learned.call_s + learned.decode(10, 8, 300) == pytest.approx(
        COSTS.call_s + COSTS.decode(10, 8, 300), rel=0.02
    )
    for name in ("row_s", "train_token_s", "switch_s"):
        assert getattr(learned, name) == pytest.approx(getattr(COSTS, name), rel=0.02), name
    assert learned.token_s == pytest.approx(dict(COSTS.token_s), rel=0.02)
    assert (learned.drafting is None) == (drafting is None)
    if learned.drafting is not None and drafting is not None:
        assert learned.drafting.accept == pytest.approx(drafting.accept, rel=0.02)


@pytest.mark.long
def test_what_if_tries_every_schedule() -> None:
    progress: list[tuple[int, int]] = []
    outcomes = what_if(setting(), lambda done, of: progress.append((done, of)))
    assert [(outcome.schedule, outcome.mechanisms) for outcome in outcomes] == [
        ("serial", ""),
        ("fused", "no migration"),
        ("fused", ""),
        ("fused", "early backward"),
        ("partial", ""),
        ("packed", ""),
    ]
    never, chosen, early = outcomes[1:4]
    assert never.threshold == 0
    assert chosen.threshold is not None
    assert early.step_s <= 1.01 * chosen.step_s
    assert progress == [(done, 6) for done in range(1, 7)]


def test_each_mechanism_alone_and_together_where_the_schedule_allows_it() -> None:
    case = setting(
        schedules=(SerialScheduleConfig(), FusedScheduleConfig(), PackedScheduleConfig())
    )
    case = replace(case, widths=(2,), workload=replace(case.workload, accept=0.5))
    lines = {(v.config.kind.value, v.mechanisms): v for v in variants(case)}
    assert [*lines] == [
        ("serial", ""),
        ("serial", "speculation"),
        ("fused", "no migration"),
        ("fused", ""),
        ("fused", "early backward"),
        ("fused", "wide tail"),
        ("fused", "speculation"),
        ("fused", "all"),
        ("packed", ""),
        ("packed", "speculation"),
    ]
    for (_, mechanisms), line in lines.items():
        assert bool(line.setting.widths) == (mechanisms in ("wide tail", "all"))
        drafting = line.setting.costs.drafting
        assert (drafting is not None) == (mechanisms in ("speculation", "all"))
        assert line.config.trains_early == (mechanisms in ("early backward", "all"))
        assert drafting is None or (drafting.tokens, drafting.accept) == (None, 0.5)
    # Costs of a run that guessed: they say how often it was right.
    recorded = replace(COSTS, drafting=Drafting(tokens=4, accept=0.7))
    lines = {(v.config.kind.value, v.mechanisms): v for v in variants(setting(costs=recorded))}
    assert lines["serial", ""].setting.costs.drafting is None
    drafting = lines["serial", "speculation"].setting.costs.drafting
    assert drafting == Drafting(tokens=None, accept=0.7)


def test_a_verifier_stands_in_where_no_model_judges() -> None:
    graph = simulated_graph(Costs(step_s=1.0, token_s={"reference": 1.0}), 2)
    assert list(graph.stages) == ["prompts", "generate", "reward", "reference", "update_actor"]
    graph = simulated_graph(COSTS, 2)
    assert list(graph.stages) == ["prompts", "generate", "reference", "reward", "update_actor"]


# -- workloads and costs ---------------------------------------------------------------------


def test_a_recorded_run_is_read_by_prompt(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "phase": "warm_start", "lengths": [1, 1]},
        {"step": 2, "phase": "rl", "lengths": [9, 9]},
        {"step": 3, "phase": "rl", "prompts": [2, 3, 2, 3], "lengths": [5, 6, 7, 8]}
        | {"prompt_tokens": [20, 30, 20, 30]},
        {"step": 2, "phase": "rl", "prompts": [0, 0, 1, 1], "lengths": [1, 2, 3, 4]}
        | {"prompt_tokens": [10, 10, 11, 11]},
    ]
    (tmp_path / "lengths.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    workload = read_workload(str(tmp_path), Shape())
    assert workload.prompts_per_step == workload.num_steps == workload.group_size == 2
    groups = [Group(10, (1, 2)), Group(11, (3, 4)), Group(20, (5, 7)), Group(30, (6, 8))]
    assert sorted(workload.groups, key=lambda g: g.prompt_tokens) == groups
    assert workload.length_of(SampleId(len(groups), k=1)) == workload.groups[0].lengths[1]


def test_lengths_without_prompts_are_cut_into_groups(tmp_path: Path) -> None:
    file = tmp_path / "my.jsonl"
    file.write_text('{"lengths": [1, 2, 3, 400]}\n[5, 6, 7, 8]\n')
    workload = read_workload(str(file), Shape(group_size=2, prompt_tokens=3, max_tokens=100))
    assert workload.groups == (
        Group(3, (1, 2)),
        Group(3, (3, 100)),
        Group(3, (5, 6)),
        Group(3, (7, 8)),
    )
    assert (workload.prompts_per_step, workload.num_steps) == (2, 2)


def test_a_distribution_has_its_quantiles() -> None:
    text = "lognormal:median=200,sigma=0.9,max=5000,seed=3"
    workload = read_workload(text, Shape(prompts_per_step=400, group_size=8, num_steps=1))
    lengths = sorted(n for group in workload.groups for n in group.lengths)
    p50, p99 = (lengths[len(lengths) * p // 100] for p in (50, 99))
    assert p50 == pytest.approx(200, rel=0.05)
    assert p99 / p50 == pytest.approx(math.exp(2.33 * 0.9), rel=0.1)
    assert lengths[-1] <= 5000
    assert read_workload(text, Shape(num_steps=1)).groups[0].lengths == workload.groups[0].lengths


@pytest.mark.parametrize("alike", [0.0, 0.6, 1.0])
def test_a_prompt_s_samples_are_as_alike_as_is_asked_for(alike: float) -> None:
    text = f"lognormal:median=500,sigma=1,alike={alike},seed=5"
    groups = read_workload(text, Shape(prompts_per_step=2000, group_size=4, num_steps=1)).groups
    logs = [[math.log(n) for n in group.lengths] for group in groups]
    within = fmean(variance(values) for values in logs)
    # A variance of 6,000 numbers has a deviation of 1.8 %.
    assert within == pytest.approx(1 - alike, abs=0.05)
    assert variance([values[0] for values in logs]) == pytest.approx(1, abs=0.05)


def test_a_seed_of_the_shape_counts_where_the_text_has_none() -> None:
    drawn = [
        read_workload(f"lognormal:median=200,sigma=0.9{own}", Shape(num_steps=1, seed=seed)).groups
        for own, seed in (("", 3), ("", 4), (",seed=3", 4))
    ]
    assert drawn[0] == drawn[2] != drawn[1]


def test_lengths_may_say_how_many_guesses_are_right() -> None:
    shape = Shape(num_steps=1)
    assert read_workload("lognormal:median=200,sigma=1,accept=0.6", shape).accept == 0.6
    assert read_workload("lognormal:median=200,sigma=1", shape).accept is None
    with pytest.raises(ConfigError, match="accept between 0 and 1"):
        read_workload("lognormal:median=200,sigma=1,accept=1.5", shape)


def test_lmsys_has_the_published_mean_and_tail() -> None:
    draw = random.Random(0)
    lengths = sorted(LMSYS.median * draw.lognormvariate(0, LMSYS.sigma) for _ in range(200_000))
    assert sum(lengths) / len(lengths) == pytest.approx(214.5, rel=0.02)
    assert lengths[-200] / lengths[100_000] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "/none",
        "lognormal:median=3",
        "lognormal:median=x,sigma=1",
        "lognormal:median=3,sigma=-1",
        "lognormal:median=3,p99=9",
        "lognormal:median=3,sigma=nan",
        "lognormal:median=3,sigma=1,mode=2",
        "lognormal:median=3,sigma=1,max=0",
        "lognormal:median=3,sigma=1,alike=1.5",
        "lognormal:median=3,sigma=1,alike=-0.1",
        "empty.jsonl",
        "text.jsonl",
        "negative.jsonl",
        "uneven.jsonl",
        "bytes.jsonl",
    ],
)
def test_wrong_lengths_are_refused(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"lengths": []}\n')
    (tmp_path / "text.jsonl").write_text("many\n")
    (tmp_path / "negative.jsonl").write_text('{"lengths": [3, -1]}\n')
    (tmp_path / "uneven.jsonl").write_text('{"lengths": [3, 4], "prompts": [1]}\n')
    (tmp_path / "bytes.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="--lengths"):
        read_workload(wrong, Shape())


def test_costs_of_a_run(tmp_path: Path) -> None:
    facts = {
        "costs": COSTS.to_json(),
        "num_instances": 4,
        "max_held": 32,
        "decode_steps": 16,
        "chunk_tokens": 2048,
        "scopes": {"reward": "rank"},
        "other": "ignored",
    }
    (tmp_path / "costs.json").write_text(json.dumps(facts))
    facts = read_costs(tmp_path)
    assert facts.pop("costs") == COSTS
    assert facts.pop("scopes") == {"reward": Scope.RANK}
    assert facts == {k: facts[k] for k in facts}
    (tmp_path / "plain.json").write_text(json.dumps(COSTS.to_json()))
    assert read_costs(tmp_path / "plain.json") == {"costs": COSTS, "scopes": {}}


def test_a_cost_of_earlier_versions_is_left_out_of_runs_alone(tmp_path: Path) -> None:
    """In a file that was written by hand it would say something, so it is refused there."""
    earlier = {"step_s": 1.0, "fused_train_token_s": 0.5}
    (tmp_path / "costs.json").write_text(json.dumps({"costs": earlier}))
    assert read_costs(tmp_path)["costs"] == Costs(step_s=1.0)
    by_hand = tmp_path / "by_hand.json"
    by_hand.write_text(json.dumps(earlier | {"fused_train_token_s": 0}))
    assert read_costs(by_hand)["costs"] == Costs(step_s=1.0)
    by_hand.write_text(json.dumps(earlier))
    with pytest.raises(ConfigError, match=r"^--costs=.*fused_train_token_s.*wanted step_s and any"):
        read_costs(by_hand)


@pytest.mark.parametrize(
    "wrong",
    [
        "no json",
        "[]",
        '{"row_s": 1}',
        '{"costs": {"step_s": -1}}',
        '{"costs": {"step_s": 1}, "num_instances": 0}',
        '{"costs": {"step_s": 1}, "max_held": "many"}',
        '{"costs": {"step_s": 1}, "scopes": {"reward": "moon"}}',
        '{"costs": {"step_s": 1}, "scopes": 3}',
    ],
)
def test_wrong_costs_are_refused(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(wrong)
    with pytest.raises(ConfigError, match="--costs"):
        read_costs(tmp_path)


# -- accelerators ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    # As published, norms left out: Llama 3 70B has 70,553,706,496 with them.
    [
        ("7b", 6.74e9),
        ("13b", 13.02e9),
        ("33b", 32.5e9),
        ("65b", 65.3e9),
        ("8b", 8.03e9),
        ("70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
    ],
)
def test_models_have_their_published_sizes(name: str, parameters: float) -> None:
    assert MODELS[name].parameters == pytest.approx(parameters, rel=1e-3)


def test_a_roofline_by_hand() -> None:
    """13B on eight H100 of 256, with 1,024 tokens a sample, of which 768 are scored.

    26 GB of weights at 0.7 of 26.8 TB/s, of the embedding a row alone; a graph and two copies.
    A forward pass has half of the datasheet's operations a second and 81 all-reduces of hidden
    states. A rank trains 8 samples as one micro-batch, and gathers layers in less time than they
    compute; then it casts 12 bytes of each weight and steps 28 bytes of each of its own.
    """
    llama = MODELS["13b"]
    costs = Roofline.of("gpu:model=13b,gpus=8,total=256").costs()
    read, host = 26.03e9 - 2 * 32_000 * 5120, 6.5e-6 * 3
    assert costs.step_s == pytest.approx(read / (0.7 * 26.8e12) + 80 * 15e-6 + host, rel=1e-3)
    layer, tokens, scored, pairs = 4 * 5120**2 + 3 * 5120 * 13_824, 8192, 6144, 8 * 1024 * 1025 / 2
    operations = 40 * (2 * layer * tokens + 4 * 5120 * pairs) + 2 * 5120 * 32_000 * scored
    reduce = 3 * 5e-6 + 7 / 8 * 2 * 2 * 5120 * tokens / (0.7 * 450e9)
    forward = 1e-3 + operations / (0.5 * 8 * 989e12) + 81 * reduce
    assert costs.token_s["reference"] == pytest.approx(forward / tokens, rel=1e-6)
    passes = 2 * 1e-3 + 3 * operations / (0.4 * 989e12)
    weights = (40 * layer + 2 * 32_000 * 5120) / (0.7 * 3.35e12)
    once = 2e-3 + 12 * weights + 28 * weights / 256 + 8 * 5e-6
    assert costs.train_token_s == pytest.approx((passes + once) / (256 * tokens), rel=1e-6)
    assert llama.kv_bytes == 2 * 40 * 5120 * 2
    assert MODELS["70b"].kv_bytes == 2 * 80 * 1024 * 2


@pytest.mark.parametrize(
    "wrong",
    [
        "gpu:",
        "gpu:model=14b",
        "gpu:model=13b,gpu=tpu",
        "gpu:model=13b,gpus=0",
        "gpu:model=13b,gpus=x",
        "gpu:model=13b,x=1",
        "gpu:model=13b,gpus=8,total=20",
        "gpu:model=8b,gpus=12,total=24",
        "gpu:model=8b,gpus=48,total=96",
        "gpu:model=13b,critic=1b",
        "gpu:model=13b,pp=2",
    ],
)
def test_wrong_rooflines_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--costs"):
        Roofline.of(wrong)


def test_what_a_roofline_had_is_told_where_it_went() -> None:
    with pytest.raises(ConfigError, match=r"wanted no pp, tp: hybridrl plan auto --price has"):
        Roofline.of("gpu:model=13b,tp=2,pp=2")


# -- the command -----------------------------------------------------------------------------


def test_the_command_prints_a_table_and_a_record(tmp_path: Path) -> None:
    rows = [
        {"step": s, "phase": "rl", "prompts": [2 * s, 2 * s, 2 * s + 1, 2 * s + 1]}
        | {"lengths": [10, 20, 30, 100 + s], "prompt_tokens": [4] * 4}
        for s in range(1, 5)
    ]
    (tmp_path / "lengths.jsonl").write_text("\n".join(map(json.dumps, rows)))
    facts = {"costs": COSTS.to_json(), "num_instances": 2, "decode_steps": 8}
    (tmp_path / "costs.json").write_text(json.dumps(facts))
    measured = [{"step": s, "phase": "rl", "step_s": 1.0 + (s == 1)} for s in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, measured)))
    lines, remarks, record = run([f"--lengths={tmp_path}"], lambda done, of: None)
    assert [line[0] for line in lines] == [
        "schedule",
        "serial",
        "fused + no migration",
        "fused",
        "fused + early backward",
        "partial",
        "packed",
    ]
    assert {len(line) for line in lines} == {7}
    assert lines[1][2] == lines[3][3] == "1.00"
    assert "2 prompts x 2 samples a step on 2 instances" in remarks[0]
    assert remarks[-1] == "the run took 1 s a step, the median of 3"
    assert json.loads(json.dumps(record))["measured"] == {
        "step_s": 1.0,
        "num_steps": 3,
        "has_costs": True,
        "emulated": False,
    }
    assert record["bound_s"] <= min(o["front_s"] for o in record["schedules"][:4])


def test_a_roofline_has_the_widths_that_divide_the_heads() -> None:
    """Eight instances of four GPUs; 8b has 32 heads."""
    args = "--lengths=lognormal:median=60,sigma=0.5,accept=0.5 --prompts=4 --steps=1"
    lines, remarks, record = run(
        [*args.split(), "--costs=gpu:model=8b,gpus=4,total=32", "--speculate=3"], lambda *_: None
    )
    names = [line[0] for line in lines]
    assert {"fused + wide tail", "serial + speculation", "fused + all"} < set(names)
    assert set(record["costs"]["wide_step_s"]) == {2, 4, 8}
    assert "speculation: 3 tokens a row and pass, 0.5 of them right" in remarks


def test_options_come_before_what_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"costs": {"step_s": 1}, "num_instances": 3}))
    args = f"--lengths=lmsys --costs={tmp_path} --instances 5 --steps=2 --prompts=7 --group-size=3"
    options, measured = read_setting([*args.split(), "--max-tokens=50", "--verifier-s=0.5"])
    assert (options.num_instances, options.verifier_s, measured) == (5, 0.5, None)
    assert (options.workload.num_steps, options.workload.prompts_per_step) == (2, 7)
    assert max(n for group in options.workload.groups for n in group.lengths) == 50


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "--lengths=: wanted a run's directory"),
        ("--lengths=lmsys --x=3", "option=--x=3: wanted one of --lengths"),
        ("--lengths=lmsys --speculate=0", "--speculate=0: wanted auto, or a number of tokens"),
        ("--lengths=lmsys --speculate=4", "--speculate=4: wanted accept=P in --lengths, the share"),
        ("--lengths=lmsys --speculate=auto", "--speculate=auto: wanted accept=P in --lengths"),
        ("--lengths=lmsys --steps=x", "--steps=x: wanted a whole number, 1 or more"),
        ("--lengths=lmsys --instances=0", "--instances=0: wanted a whole number, 1 or more"),
        ("--lengths=lmsys --verifier-s=-1", "--verifier-s=-1: wanted a number, 0 or more"),
        ("--lengths=lmsys --steps", "--steps=: wanted --steps=VALUE, as hybridrl plan schedule --"),
        ("--lengths --steps=3", "--lengths=--steps=3: wanted --lengths=VALUE, as hybridrl plan s"),
        (
            "--lengths=lmsys --over-provision=9",
            "--over-provision=9.0: wanted 1 to 1 + --max-staleness",
        ),
        ("--lengths=lmsys --costs=gpu:model=65b,gpus=1", "wanted accelerators that hold"),
        ("--lengths=lmsys --costs=/none", "--costs=/none: wanted a run's directory"),
    ],
)
def test_wrong_arguments_are_one_line(args: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(args.split(), lambda done, of: None)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_costs_that_do_not_say_how_many_instances(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"step_s": 1}')
    with pytest.raises(ConfigError, match="--instances"):
        read_setting(["--lengths=lmsys", f"--costs={tmp_path}"])
