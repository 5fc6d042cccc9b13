"""The fused schedule trains on what the serial one trains on, whatever the timing and the moves."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from conversations import of_turns
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from hybridrl.config.loss import Loss
from hybridrl.costs.instance import Costs
from hybridrl.flow import Flow, SampleId, recipe
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Sampling, Scope
from hybridrl.flow.judgements import leaving_failed
from hybridrl.flow.ledger import SampleStatus
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.flow.migration import gather
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.fused import Fused
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.readiness import early_stages
from hybridrl.schedule.serial import SerialSchedule

pytestmark = pytest.mark.long


class ToyLoss(Loss):
    fields = ("advantages", "old_log_probs", "reference_log_probs")

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


class ValueLoss(ToyLoss):
    fields = ("rewards", "values", "advantages")


def centered(rewards):
    return [reward - max(rewards) for reward in rewards]


def sometimes(rewards):
    """More samples of a prompt: none of some, several of others."""
    return [int(2 * sum(rewards) + len(rewards)) % 3] * len(rewards)


@recipe("all_kinds")
def all_kinds(flow: Flow, cfg: dict[str, Any]) -> None:
    """Two branches, maps before and after the forward pass; a take, more samples of some prompts,
    and a critic, where `cfg` has them.
    """
    greedy = flow.reward.score(flow.actor.generate(flow.prompts, greedy=True, name="greedy"))
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.get("k", 2))
    samples = flow.reward.score(samples)
    if cfg.get("more"):
        samples = samples.by_group(sometimes, ("reward",), ("count",))
        samples = samples.merge(flow.reward.score(flow.actor.generate_more(samples, "count")))
    samples = samples.map(sum, inputs=("log_probs",), scalars=("total",))
    samples = samples.map(lambda x: -x, inputs=("total",), scalars=("surprise",))
    samples = samples.join(greedy, prefix="greedy_")
    if cfg.get("critic"):
        samples = flow.critic.values(samples)
        samples = samples.map(sum, inputs=("values",), scalars=("value",), name="value")
    if cfg.get("reference_first"):
        samples = flow.reference.log_probs(samples)
    samples = samples.filter(lambda rewards: max(rewards) > min(rewards), name="spread")
    if "take" in cfg:
        samples = samples.take(**cfg["take"])
    samples = samples.map(len, inputs=("tokens",), scalars=("size",), name="size")
    if not cfg.get("reference_first"):
        samples = flow.reference.log_probs(samples)
    samples = samples.map(
        lambda new, old: sum(new) - sum(old),
        inputs=("reference_log_probs", "log_probs"),
        scalars=("gap",),
        name="gap",
    )
    samples = samples.by_group(centered)
    if cfg.get("critic"):
        flow.critic.update(samples, loss=ValueLoss())
    flow.actor.update(samples, loss=ToyLoss())


def scored(flow: Flow, k: int = 2):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=k))
    flow.collect(samples)
    return flow.graph


def make(
    executor, graph, *, fused=True, threshold=0, max_held=100, prompts=4, decode_steps=5, chunk=40,
    early=None, must_widen=False, turns=False,
):  # fmt: skip
    sampling = Sampling(max_new_tokens=20, max_turn_tokens=20 if turns else 0)
    settings = StepSettings(sampling=sampling, decode_steps=decode_steps, prompts_per_step=prompts)
    stream = ((i, f"prompt {i}") for i in range(10_000))
    if not fused:
        return SerialSchedule(graph, executor, stream, settings)
    return LoopSchedule(
        graph,
        executor,
        stream,
        settings,
        Fused(migration_threshold=threshold, early=early, must_widen=must_widen),
        limits=RoundLimits(max_held=max_held, chunk_tokens=chunk),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1, 2, 3))),
    )


def outcome(result):
    """All that a step gives and that is not where or when; samples with their every field."""

    def rows(samples):
        return [
            (s.id, s.tokens, s.spans, sorted(s.scalars.items()), sorted(s.tensors)) for s in samples
        ]

    timed = ("migrated", "restarted", "migration_threshold", "trained_early", "widened")
    timed += ("moved_kv_bytes",)
    timed = tuple(f"samples/{name}" for name in timed)
    # The seconds of plans follow from costs that were measured.
    metrics = {k: v for k, v in result.metrics.items() if k not in timed and k[:5] != "plan/"}
    return rows(result.samples), rows(result.dispatched), result.dropped, metrics


def of_id(values):
    return lambda id: values[(7 * id.prompt + 3 * id.k + 5 * bool(id.branch)) % len(values)]


lengths = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=9),
    st.integers(0, 20).map(lambda n: [n]),  # all equal
    st.integers(1, 10).map(lambda n: [n] * 12 + [100 * n]),  # one a hundred times the median
)
rewards = st.lists(
    st.sampled_from([(0.0, "ok"), (1.0, "ok"), (0.0, "error")]), min_size=1, max_size=5
)


USUAL: dict[str, Any] = {
    "seeds": st.tuples(st.integers(0, 2**16), st.integers(0, 2**16)),
    "num_instances": st.tuples(st.integers(1, 4), st.integers(1, 4)),
    "decode_steps": st.tuples(st.integers(1, 25), st.integers(1, 8)),
    "threshold": st.one_of(st.integers(0, 30), st.none()),
    "max_held": st.integers(3, 30),
    "chunk": st.integers(1, 200),
    "k": st.integers(1, 4),
    "prompts": st.integers(1, 6),
    "take": st.booleans(),
    "more": st.booleans(),
    "reference_first": st.booleans(),
    "critic": st.booleans(),
    "lengths": lengths,
    "rewards": rewards,
    "drops": st.booleans(),
    "finishes": st.lists(
        st.sampled_from(["stop", "stop", "stop", "abort"]), min_size=1, max_size=7
    ),
    "hangs": st.lists(st.booleans(), min_size=1, max_size=7),
    "deaths": st.dictionaries(st.integers(1, 40), st.integers(0, 3), max_size=3),
    "early": st.booleans(),
    "widths": st.just(()),
    "must_widen": st.just(False),
    "turns": st.just(0),
}
"""Strategies of the arguments of `check`."""
cases = given(**USUAL)


def check(
    virtual_executor, seeds, num_instances, decode_steps, threshold, max_held, chunk, k, prompts,
    take, more, reference_first, critic, lengths, rewards, drops, finishes, hangs, deaths, early,
    widths, must_widen, turns,
):  # fmt: skip
    """Whatever the timing, the moves, the deaths (but for the last instance) and the aborts.

    The critic shares the ranks in serial, and has its own in fused. With `early` instances train on
    whole groups while others decode. With `drops` samples leave whose judge has failed. With
    `widths` so many may decode the tail as one. With `turns` responses have up to so many, and wait
    for random times between them.
    """
    cfg = {"k": k, "reference_first": reference_first, "more": more, "critic": critic}
    cfg |= {"take": {"num_groups": 2, "max_rounds": 3}} if take else {}
    seen = []
    for fused in (False, True):
        graph = leaving_failed(all_kinds.build(cfg), {"reward": False} if drops else {})
        mortal = {n: who for n, who in deaths.items() if fused and who < num_instances[True] - 1}
        executor = virtual_executor(
            num_instances[fused], seeds[fused], of_id(lengths), of_id(rewards), of_id(finishes),
            of_id(hangs), mortal, {"critic": Scope.POOL} if fused else {},
            widths=widths if fused else (),
            turns_of=of_turns(of_id(lengths), turns) if turns else None,
        )  # fmt: skip
        schedule = make(
            executor, graph, fused=fused, threshold=threshold, max_held=max_held,
            prompts=prompts, decode_steps=decode_steps[fused], chunk=chunk,
            early=EarlySettings() if early else None, must_widen=must_widen, turns=bool(turns),
        )  # fmt: skip
        results, error, died = [], None, None
        try:
            for step in range(2):
                result = schedule.run_step(step)
                statuses = {id: schedule._ledger.status(id) for id in result.dropped}
                statuses |= {s.id: schedule._ledger.status(s.id) for s in result.samples}
                assert statuses.keys() == {s.id for s in result.dispatched}
                assert {*statuses.values()} <= {SampleStatus.USED, SampleStatus.DROPPED}
                results.append(outcome(result))
        except ValueError as raised:  # the take gave up, and says why
            error = str(raised)
        except RuntimeError as raised:  # behind a take or a merge, or nobody is left to decode
            died = str(raised)
        if died is not None:
            assert take or more or (early and "still decodes" in died)
            assert len(executor.alive) < num_instances[True]
            return
        schedule.release()
        assert schedule._ledger.samples == ()
        submitted = [id for _, submit in executor.submits for id in submit.ids]
        assert not executor.parked
        assert executor.stale_resumes == 0
        assert not schedule._turns._conversations
        # Every dispatched sample finishes, is used or dropped once, and is released once.
        assert set(executor.finish_order) == set(submitted) == set(executor.released)
        assert len(executor.released) == len(set(executor.released))
        if len(executor.alive) == executor.num_instances:
            assert sorted(executor.finish_order) == sorted(submitted) == sorted(executor.released)
            moves = Counter(id for _, id in executor.resumes)
            # Once in the tail, and in each wait while its instance runs a pass.
            assert max(moves.values(), default=0) <= max(0, num_instances[fused] - 1) + turns
            ahead = len(submitted) // 2  # at most, where there is one instance
            assert max(executor.most_held) <= max_held * (1 + bool(turns)) + ahead or not fused
        for samples, dispatched, dropped, _ in results:
            left = [row[0] for row in samples] + list(dropped)
            assert sorted(left) == sorted(row[0] for row in dispatched)
        assert executor.most_updates <= 1 + (fused and critic)
        entered = [] if critic else executor.entered
        seen.append((results, executor.updates, entered, error))
        if fused:
            event("some are answered" if executor.num_answered else "none is answered")
            event("some move while they wait" if executor.num_moved_open else "none moves so")
            event("some decode wide" if executor.widened else "none decodes wide")
            event("some migrate" if executor.resumes else "none migrates")
            event("some move to be scored" if executor.num_moved else "none moves")
            event("some train early" if executor.num_early else "none trains early")
            event("two updates at a time" if executor.most_updates > 1 else "one update")
            event("some die" if len(executor.alive) < executor.num_instances else "none dies")
    assert seen[0] == seen[1]


early_cases = given(
    **USUAL
    | {
        "num_instances": st.tuples(st.just(2), st.integers(2, 4)),
        "decode_steps": st.tuples(st.integers(1, 25), st.integers(1, 4)),
        "threshold": st.one_of(st.integers(0, 8), st.none()),
        "max_held": st.integers(8, 30),
        "chunk": st.integers(20, 200),
        "k": st.integers(2, 3),
        "prompts": st.integers(4, 12),
        "take": st.just(False),
        "more": st.just(False),
        "critic": st.just(False),
        "lengths": st.integers(1, 12).map(lambda n: [1] * n + [2, 60]),
        "rewards": st.just([(x, "ok") for x in (0.0, 1.0, 0.5, 0.25)]),
        "finishes": st.lists(
            st.sampled_from(["stop", "stop", "stop", "stop", "stop", "abort"]),
            min_size=1,
            max_size=7,
        ),
        "hangs": st.just([False]),
        "deaths": st.dictionaries(st.integers(10, 60), st.integers(0, 3), max_size=2),
        "early": st.just(True),
    }
)
test_trains_early_what_serial_trains_on = settings(max_examples=60)(early_cases(check))
test_thousands_of_early_cases = pytest.mark.timeout(1200)(
    pytest.mark.slow(settings(max_examples=4000)(early_cases(check)))
)
wide_cases = given(
    **USUAL
    | {
        "num_instances": st.tuples(st.just(2), st.integers(2, 5)),
        "decode_steps": st.tuples(st.integers(1, 25), st.integers(1, 6)),
        "threshold": st.one_of(st.integers(1, 12), st.none()),
        "chunk": st.integers(20, 200),
        "k": st.integers(1, 3),
        "prompts": st.integers(1, 12),
        "lengths": st.one_of(lengths, st.integers(1, 12).map(lambda n: [1] * n + [2, 60])),
        "finishes": st.lists(st.sampled_from(["stop"] * 6 + ["abort"]), min_size=1, max_size=7),
        "deaths": st.dictionaries(st.integers(1, 60), st.integers(0, 4), max_size=2),
        "widths": st.sampled_from([(2,), (3,), (2, 4), (2, 3)]),
        "must_widen": st.booleans(),
    }
)
test_trains_wide_what_serial_trains_on = settings(max_examples=60)(wide_cases(check))
test_thousands_of_wide_cases = pytest.mark.timeout(1200)(
    pytest.mark.slow(settings(max_examples=4000)(wide_cases(check)))
)
conversation_cases = given(
    **USUAL
    | {
        "threshold": st.one_of(st.integers(0, 12), st.none()),
        "k": st.integers(1, 3),
        "prompts": st.integers(1, 4),
        "finishes": st.lists(st.sampled_from(["stop"] * 6 + ["abort"]), min_size=1, max_size=7),
        "deaths": st.dictionaries(st.integers(1, 60), st.integers(0, 3), max_size=2),
        "widths": st.sampled_from([(), (), (2,), (2, 4)]),
        "must_widen": st.booleans(),
        "turns": st.integers(1, 6),
    }
)
test_trains_conversations_that_serial_trains_on = settings(max_examples=200)(
    conversation_cases(check)
)
test_thousands_of_conversations = pytest.mark.timeout(1200)(
    pytest.mark.slow(settings(max_examples=4000)(conversation_cases(check)))
)
# Samples that the judge has failed begin anew in a later round, in which it does not run again.
LATE_DEATHS = {
    "seeds": (0, 0), "num_instances": (1, 3), "decode_steps": (1, 1), "threshold": None,
    "max_held": 3, "chunk": 1, "k": 1, "prompts": 3, "take": False, "more": True,
    "reference_first": False, "critic": False, "lengths": [0],
    "rewards": [(0.0, "ok"), (0.0, "error")], "drops": True, "finishes": ["stop"],
    "hangs": [False], "deaths": {1: 0, 18: 1}, "early": False, "widths": (),
    "must_widen": False, "turns": 0,
}  # fmt: skip
test_trains_on_what_serial_trains_on = settings(max_examples=60)(
    example(**LATE_DEATHS)(cases(check))
)
test_thousands_of_cases = pytest.mark.timeout(1200)(
    pytest.mark.slow(settings(max_examples=4000)(cases(check)))
)


@pytest.mark.parametrize(
    ("lengths", "happened"),
    [([6], "stay"), ([6, 7, 8, 60], "widen_to_2")],
    ids=["all end in one call", "a tail"],
)
def test_a_metric_says_what_became_of_the_plan(virtual_executor, lengths, happened):
    """A quarter of a second has 25 steps: what ends within them leaves no tail that could widen."""
    executor = virtual_executor(2, 0, of_id(lengths), widths=(2,))
    flow = Flow()
    schedule = make(
        executor, scored(flow), threshold=None, must_widen=True, decode_steps=64, prompts=8
    )
    costs = Costs(step_s=0.01)
    schedule.meter.costs = lambda: costs
    first, second = (schedule.run_step(step).metrics for step in range(2))
    assert not [key for key in first if key.startswith("plan/")]  # no lengths to choose by
    plans = {key: value for key, value in second.items() if key.startswith("plan/")}
    assert plans.pop("plan/widen_to_2_s") > 0
    assert plans == {
        "plan/widen_to_2_chosen": 1.0,
        "plan/widen_to_2_happened": float(happened == "widen_to_2"),
        f"plan/{happened}_happened": 1.0,
    }
    assert bool(second["samples/widened"]) == bool(executor.widened) == (happened != "stay")


@pytest.mark.parametrize("wait", [16, 26])
def test_a_death_after_a_round_with_a_late_forward_pass(virtual_executor, wait):
    """Behind a merge the reference runs once a round; its results do not come back."""
    cfg = {"k": 1, "take": {"num_groups": 2, "max_rounds": 3}, "more": True}
    executor = virtual_executor(
        2, 0, of_id([0]), of_id([(0.0, "ok"), (1.0, "ok")]), of_id(["stop"]), None, {wait: 0}
    )
    schedule = make(
        executor, all_kinds.build({**cfg, "reference_first": True}), threshold=None, max_held=3,
        prompts=1, decode_steps=1, chunk=1,
    )  # fmt: skip
    error = "died with .*reference_log_probs.* an earlier round has computed"
    with pytest.raises(RuntimeError, match=error):
        schedule.run_step(0)


LENGTHS = (2, 7, 50, 60)


def tail_of_two(virtual_executor, threshold, max_held=100, k=1):
    """A step of 4 prompts, one on each of 4 instances, of which the last two take much longer."""
    executor = virtual_executor(4, 0, lambda id: LENGTHS[id.prompt] - id.k)
    result = make(executor, scored(Flow(), k), threshold=threshold, max_held=max_held).run_step(0)
    return executor, result


def test_the_tail_is_gathered_on_one_instance(virtual_executor):
    executor, result = tail_of_two(virtual_executor, threshold=2)
    first, second, *tail = (sample.rank for sample in result.samples)
    assert (first, second) == (0, 1)
    assert tail == [2, 2]
    assert executor.resumes == [(2, SampleId(3))]
    assert result.metrics["samples/migrated"] == 1


@pytest.mark.parametrize(("threshold", "max_held"), [(0, 100), (1, 100), (100, 1)])
def test_nothing_moves_without_a_threshold_or_without_room(virtual_executor, threshold, max_held):
    executor, result = tail_of_two(virtual_executor, threshold, max_held)
    assert result.metrics["samples/migrated"] == 0
    assert not executor.resumes
    assert [s.rank for s in result.samples] == [0, 1, 2, 3]


@pytest.mark.parametrize("max_held", [5, 6, 8])
def test_no_instance_is_given_more_than_it_can_hold(virtual_executor, max_held):
    executor, result = tail_of_two(virtual_executor, threshold=16, max_held=max_held, k=4)
    assert result.metrics["samples/migrated"] > 0
    assert 4 < max(executor.most_held) <= max_held


def test_half_of_what_waits_goes_ahead_to_instances(virtual_executor):
    """12 samples of 3 prompts, two instances of 2 rows: each is given 12 // 4 ahead."""
    graph = all_kinds.build({"k": 4})
    executor = virtual_executor(2, length_of=lambda id: 9)
    make(executor, graph, prompts=3, max_held=2).run_step(0)
    first = executor.calls[:2]
    given = {instance: sum(len(c.ids) for c in commands) for instance, commands, _ in first}
    assert given == {0: 5, 1: 5}
    assert max(executor.most_held) == 5


def test_nothing_starts_on_a_sample_that_is_on_its_way(virtual_executor):
    """The reference comes before the filter: a sample may move while its group is scored."""
    moved = 0
    for seed in range(60):
        executor = virtual_executor(3, seed, lambda id: 2 + 2 * id.k if id.prompt < 2 else 1)
        executor.reward_of = lambda id: (float(id.k), "ok")
        graph = all_kinds.build({"k": 4, "reference_first": True})
        make(executor, graph, prompts=3, chunk=8, decode_steps=2).run_step(0)
        moved += executor.num_moved
    assert moved > 60


@pytest.mark.parametrize("whole_groups", [False, True])
def test_a_judge_on_the_driver_s_node_lets_samples_move(virtual_executor, whole_groups):
    """The batch is that of serial; a group is judged once, with all its samples."""
    moved = 0
    for seed in range(12):
        steps = {}
        for fused in (False, True):
            graph = all_kinds.build({"k": 4, "reference_first": True})
            for name, stage in graph.stages.items():
                if stage.role == "reward":
                    graph.stages[name] = replace(stage, whole_groups=whole_groups)
            executor = virtual_executor(3, seed, lambda id: 2 + 2 * id.k if id.prompt < 2 else 1)
            executor.scopes = {name: Scope.DRIVER for name in graph.stages if "reward" in name}
            executor.scopes["reward"] = Scope.DRIVER
            executor.reward_of = lambda id: (float(id.k), "ok")
            schedule = make(executor, graph, fused=fused, prompts=3, chunk=8, decode_steps=2)
            steps[fused] = [outcome(schedule.run_step(step)) for step in range(2)]
            sizes = sorted(map(len, executor.judged))
            assert sizes == ([1] * 6 + [4] * 6 if whole_groups else [1] * 30)
            assert len({id for unit in executor.judged for id in unit}) == 30
        assert steps[False] == steps[True]
        moved += executor.num_moved
    assert moved > 5


def test_score_starts_before_the_last_sample_has_finished(virtual_executor):
    _, result = tail_of_two(virtual_executor, threshold=0)
    spans = {span.name: span for span in result.spans}
    assert spans["generate"].start < spans["reward"].start < spans["generate"].stop
    assert spans["generate"].stop < spans["reward"].stop


def test_early_stages_read_only_what_is_there(virtual_executor):
    graph = all_kinds.build({})
    names = [s.name for s in early_stages(graph, list(graph.stages.values()), virtual_executor())]
    assert names == [
        "reward@greedy",
        "reward",
        "sum",
        "map",
        "join_greedy",
        "spread",
        "size",
        "reference_log_probs",
        "gap",
    ]


def test_what_reads_the_early_ones_may_overtake_what_needs_the_shards(virtual_executor):
    flow = Flow()
    samples = flow.actor.generate(flow.prompts, num_samples=2)
    samples = flow.critic.values(samples)
    samples = flow.reward.score(samples).by_group(centered)
    samples = samples.map(len, inputs=("tokens",), scalars=("size",), name="size")
    samples = samples.filter(lambda rewards: True, name="all")
    samples = samples.map(len, inputs=("values",), scalars=("late",), name="late")
    samples = samples.filter(lambda late: True, ("late",), name="later")
    flow.collect(flow.reference.log_probs(samples))
    stages = list(flow.graph.stages.values())
    early = early_stages(flow.graph, stages, virtual_executor())
    assert [stage.name for stage in early] == ["reward", "size", "all"]


@pytest.mark.parametrize("k", [1, 2])
def test_supervised_targets_are_scored_without_generation(virtual_executor, k):
    flow = Flow()
    flow.collect(flow.reward.score(flow.answers))
    executor = virtual_executor(num_instances=3)
    result = make(executor, flow.graph, threshold=k).run_step(0)
    assert [s.id for s in result.samples] == [SampleId(p) for p in range(4)]
    assert all("reward" in s.scalars for s in result.samples)
    assert not executor.entered


@given(
    held=st.dictionaries(st.integers(0, 9), st.integers(1, 8), min_size=1, max_size=6),
    max_held=st.integers(1, 20),
)
def test_gather_names_the_fewest_that_suffice(held, max_held):
    def suffices(keepers):
        room = sum(max(0, max_held - held[i]) for i in keepers)
        return room >= sum(n for i, n in held.items() if i not in keepers)

    keepers = gather(held, max_held)
    assert keepers <= held.keys()
    assert suffices(keepers)
    smaller = (set(c) for num in range(1, len(keepers)) for c in combinations(held, num))
    assert not any(suffices(instances) for instances in smaller)
    least = min(held[i] for i in keepers)
    assert all(held[i] <= least for i in held.keys() - keepers)


def test_gather_s_example():
    held = {0: 1, 1: 3, 2: 2}
    assert [gather(held, n) for n in (6, 4, 2)] == [{1}, {1, 2}, {0, 1, 2}]
