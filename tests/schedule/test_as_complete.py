"""Steps that train groups as they complete: the bound, what leaves once, what is trained."""

from collections import Counter

import pytest
from async_cases import CASES, NUM_EVALUATED, run_case
from hypothesis import event, given, settings
from hypothesis import strategies as st
from separate_executor import Latencies

from hybridrl.flow.ledger import DropReason
from hybridrl.flow.versions import RunRecord
from hybridrl.schedule.lost_samples import InstanceDied

pytestmark = pytest.mark.long


def ages_of(sample, number, versions):
    """The staleness of each token span: the least that it may be, as a version may have several."""
    steps_of = {version: steps for steps, version in enumerate(versions[: number + 1])}
    return [number - steps_of[span.version] for span in sample.spans if span.trained]


def check_bound(case, results, versions):
    """No token is older than allowed; without weights in flight a response is of one version."""
    reached, seen = 0, Counter()
    for number, result in enumerate(results):
        assert [s.id for s in result.samples] == sorted(s.id for s in result.samples)
        used, dropped = [s.id for s in result.samples], list(result.dropped)
        assert sorted(used + dropped) == sorted(s.id for s in result.dispatched)
        seen.update(used + dropped)
        for sample in result.dispatched:
            ages = ages_of(sample, number, versions)
            assert all(0 <= age <= case["staleness"] for age in ages), (number, sample.id, ages)
            assert ages == sorted(ages, reverse=True)
            if not case["in_flight"]:
                assert len({*ages}) <= 1, sample.id
            reached = max(reached, *ages, 0)
    assert {*seen.values()} <= {1}
    whole = {(id.prompt, id.k) for id in seen}
    assert whole == {(p, k) for p, _ in whole for k in range(case["k"])}
    return reached, {id.prompt for id in seen}


def check(staleness, resumes, seed, **case):
    case |= {"staleness": staleness, "as_complete": True}
    executors, results, versions = run_case(case, seed, resumes=frozenset(resumes))
    reached, prompts = check_bound(case, results, versions)
    # All prompts are trained, P a step, and none that begins later is missing before.
    assert prompts == {*range(case["steps"] * case["prompts"])}
    for result in results:
        assert len({s.id.prompt for s in result.dispatched}) == case["prompts"]
        assert result.versions.keys() == {s.id for s in result.dispatched}
    # Models compute with the weights of the step that trains the samples.
    steps = {s.id: number for number, r in enumerate(results) for s in r.dispatched}
    for executor in executors:
        for name, version, ids in executor.passes:
            assert {versions[steps[id]] for id in ids} == {version}, name
        held = case["k"] * case["prompts"] * (staleness + 1)
        assert max(executor.most_held) <= (
            max(held, NUM_EVALUATED) if case["evaluations"] else held
        )
    assert not executors[-1].tensors, "samples are stored beyond the end"
    order = [prompt for r in results for prompt in sorted({s.id.prompt for s in r.dispatched})]
    event(f"staleness {reached} of {min(staleness, case['steps'] - 1)}")
    event("batches in order" if order == sorted(order) else "another order")
    event(f"resumed {len(executors) - 1} times")
    moved = sum(result.metrics["samples/migrated"] for result in results)
    event("samples move" if moved else "none moves")
    event("trained early" if any(executor.num_early for executor in executors) else "trained late")
    event("goes on with copies" if any(e.num_copied for e in executors) else "no copies")


MORE = CASES | {"staleness": st.integers(1, 3), "in_flight": st.booleans()}
cases = given(**MORE)
test_the_bound_holds = settings(max_examples=150)(cases(check))
test_thousands_of_cases = pytest.mark.slow(settings(max_examples=5000)(cases(check)))


def check_takes(staleness, resumes, seed, groups, per_round, **case):
    """Groups that a filter leaves out take no slot: a step has as many as it wants, if it can."""
    take = {"num_groups": groups, "round_prompts": per_round, "max_rounds": 4, "allow_fewer": True}
    case |= {"kind": "filter", "more": {"take": take}, "staleness": staleness, "as_complete": True}
    resumed = {"resumes": frozenset(resumes), "leaves_some": True}
    _, results, versions = run_case(case, seed, **resumed)
    reached, _ = check_bound(case, results, versions)
    for result in results:
        trained = {s.id.prompt for s in result.samples}
        seen = {s.id.prompt for s in result.dispatched}
        assert len(trained) == groups or len(seen) == 4 * per_round, (len(trained), len(seen))
        assert not any(drop.reason is DropReason.TAKE for drop in result.dropped.values())
    event(f"staleness {reached} of {min(staleness, case['steps'] - 1)}")
    event("some are left out" if any(r.dropped for r in results) else "none is left out")


takes = {"groups": st.integers(1, 3), "per_round": st.integers(1, 3)}
take_cases = given(**(MORE | takes))
test_a_take_has_its_groups = settings(max_examples=100)(take_cases(check_takes))
test_thousands_of_takes = pytest.mark.slow(settings(max_examples=3000)(take_cases(check_takes)))


def check_followed(staleness, resumes, pauses, seed, lengths, others, takes, loses, **case):
    """On other numbers of instances, resumed or not: the same versions, batches and updates.

    Where the run `loses` caches that would stay, they are computed again at the same tokens.
    """
    case |= {"staleness": staleness, "lengths": [1 + 4 * n for n in lengths]}
    if takes:
        take = {"num_groups": 2, "round_prompts": 2, "max_rounds": 3, "allow_fewer": True}
        case |= {"kind": "filter", "more": {"take": take}}
    flying = case | {"pauses": pauses, "as_complete": True, "loses": loses}
    first, results, _ = run_case(flying, seed, leaves_some=True)
    record = RunRecord(
        {id: segments for result in results for id, segments in result.versions.items()},
        {},
        dict(enumerate(sorted({id.prompt for id in result.versions}) for result in results)),
    )
    case |= {"record": record, "num_instances": others}
    case |= {"late": Latencies(), "pauses": set(), "in_flight": False}
    follows = {"resumes": frozenset(resumes), "leaves_some": True}
    executors, again, _ = run_case(case, seed + 1, **follows)
    for one, other in zip(results, again, strict=True):
        assert one.versions == other.versions
        assert [s.id for s in one.samples] == [s.id for s in other.samples]
        assert [s.spans for s in one.samples] == [s.spans for s in other.samples]
        assert one.metrics["samples/mean_staleness"] == other.metrics["samples/mean_staleness"]
    assert [x for e in executors for x in e.updates] == first[0].updates
    order = [id.prompt for result in results for id in sorted(result.versions)]
    event("batches in order" if order == sorted(order) else "another order")
    event("with a take" if takes else "without a take")


FOLLOWED = {"others": st.integers(1, 4), "takes": st.booleans(), "loses": st.booleans()}
follow_cases = given(**(MORE | FOLLOWED))
test_a_record_is_followed = settings(max_examples=100)(follow_cases(check_followed))
test_thousands_are_followed = pytest.mark.slow(
    settings(max_examples=3000)(follow_cases(check_followed))
)


def test_the_last_samples_of_an_instance_move_to_others_of_its_version():
    """So it loads, and makes what may not begin by the old weights; a response has one version."""
    moved = 0
    for seed in range(8):
        case = {
            "num_instances": 6, "decode_steps": 2, "k": 2, "prompts": 8, "staleness": 2,
            "held": 16, "kind": "plain", "judges": False, "early": False, "rewards": [0.0],
            "lengths": [2] * 9 + [100], "finishes": ["stop"], "hangs": [False], "turns": 0,
            "late": Latencies(), "steps": 6, "pauses": set(), "saves": set(), "evaluations": set(),
            "in_flight": False, "as_complete": True,
        }  # fmt: skip
        (executor,), results, versions = run_case(case, seed)
        check_bound(case, results, versions)
        moves = sum(result.metrics["samples/migrated"] for result in results)
        assert len(executor.resumes) == moves
        moved += moves
    assert moved > 20


def check_deaths(staleness, seed, deaths, **case):
    """Samples that begin again have the births of their new tokens, and obey the rule."""
    case |= {"staleness": staleness, "as_complete": True, "deaths": deaths}
    case |= {"pauses": set(), "saves": set()}
    (executor,), results, versions = run_case(case, seed)
    check_bound(case, results, versions)
    assert sum(len({s.id.prompt for s in r.dispatched}) for r in results) == (
        case["steps"] * case["prompts"]
    )
    restarted = sum(result.metrics["samples/restarted"] for result in results)
    event(f"{case['num_instances'] - len(executor.alive)} instances are dead")
    event("samples begin again" if restarted else "none begins again")


death_cases = given(
    **{name: values for name, values in MORE.items() if name != "resumes"}
    | {
        "num_instances": st.integers(2, 4),
        "deaths": st.dictionaries(st.integers(1, 60), st.integers(1, 3), max_size=3),
    }
)


def check_deaths_with_takes(staleness, seed, deaths, groups, per_round, early, **case):
    """Groups that filters have left out are not made again; one that comes back needs a slot.

    A death after the take ends the run, as is said of it.
    """
    take = {"num_groups": groups, "round_prompts": per_round, "max_rounds": 4, "allow_fewer": True}
    case |= {"kind": "filter", "more": {"take": take}, "staleness": staleness, "as_complete": True}
    case |= {"pauses": set(), "saves": set(), "deaths": deaths, "early": early}
    try:
        _, results, versions = run_case(case, seed, leaves_some=True)
    except InstanceDied:
        event("a death after the take")
        return
    check_bound(case, results, versions)
    for result in results:
        trained = {s.id.prompt for s in result.samples}
        seen = {s.id.prompt for s in result.dispatched}
        assert len(trained) == groups or len(seen) == 4 * per_round, (len(trained), len(seen))
    restarted = sum(result.metrics["samples/restarted"] for result in results)
    event("samples begin again" if restarted else "none begins again")


dead_takes = {name: values for name, values in MORE.items() if name != "resumes"} | {
    "num_instances": st.integers(2, 4),
    "deaths": st.dictionaries(st.integers(1, 60), st.integers(1, 3), max_size=3),
}
dead_take_cases = given(**(dead_takes | takes))
test_takes_survive_deaths = settings(max_examples=60)(dead_take_cases(check_deaths_with_takes))
test_thousands_of_takes_survive = pytest.mark.slow(
    settings(max_examples=3000)(dead_take_cases(check_deaths_with_takes))
)
test_samples_of_the_dead_obey_the_rule = settings(max_examples=100)(death_cases(check_deaths))
test_thousands_of_deaths = pytest.mark.slow(settings(max_examples=3000)(death_cases(check_deaths)))
