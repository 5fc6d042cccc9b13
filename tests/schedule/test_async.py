"""The asynchronous schedule: which weights made each token, whatever the latencies."""

import logging
import random
from collections import Counter

import pytest
from async_cases import CASES, NUM_EVALUATED, make, of_id, run_case
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from separate_executor import Latencies, SeparateExecutor

from hybridrl.flow import SampleId
from hybridrl.flow.sample import NO_VERSION
from hybridrl.flow.turns import RecordDiffers
from hybridrl.flow.versions import RunRecord
from hybridrl.schedule.dealing import Dealer
from hybridrl.schedule.loop_schedule import LoopSchedule

pytestmark = pytest.mark.long

cases = given(**CASES)
TAKE = {"take": {"num_groups": 1, "round_prompts": 2, "max_rounds": 2}}


def check(staleness, resumes, seed, **case):
    case["staleness"] = staleness
    executors, results, versions = run_case(case, seed, resumes=frozenset(resumes))
    prompts, left = case["prompts"], list[SampleId]()
    for number, result in enumerate(results):
        # Step k trains batch k, in the order of ids, and each sample leaves once.
        used, dropped = [s.id for s in result.samples], list(result.dropped)
        assert used == sorted(used)
        assert sorted(used + dropped) == sorted(s.id for s in result.dispatched)
        batch = {*range(number * prompts, (number + 1) * prompts)}
        assert {id.prompt for id in used + dropped} == batch
        left += used + dropped
        # Its tokens are those of the table's version.
        version = versions[max(0, number - staleness)]
        for sample in result.dispatched:
            versions_of_tokens = {span.version for span in sample.spans if span.trained}
            assert versions_of_tokens <= {version}, (number, sample.id)
            assert all((x.version == NO_VERSION) is not x.trained for x in sample.spans)
        has_tokens = any(span.trained for sample in result.samples for span in sample.spans)
        assert result.metrics["samples/staleness"] == min(number, staleness) * has_tokens
    assert Counter(left) == Counter(
        SampleId(p, k=k) for p in range(case["steps"] * prompts) for k in range(case["k"])
    )
    for executor in executors:
        # Models compute with the weights that the step of their samples begins with.
        for name, version, ids in executor.passes:
            assert {versions[id.prompt // prompts] for id in ids} == {version}, name
        assert executor.most_loads() <= 1 + len(case["pauses"]) + 3 * len(case["evaluations"])
        held = case["k"] * prompts * (staleness + 1)
        assert max(executor.most_held) <= (
            max(held, NUM_EVALUATED) if case["evaluations"] else held
        )
    last = executors[-1]
    assert not last.tensors, "samples are stored beyond the end"
    overlapped = any(executor.num_overlapped for executor in executors)
    event("instances decode while an update runs" if overlapped else "none decodes meanwhile")
    event(f"resumed {len(executors) - 1} times")
    event("goes on with copies" if any(e.num_copied for e in executors) else "no copies")
    event("trained early" if any(executor.num_early for executor in executors) else "trained late")
    if resumes or staleness == 0:
        _, wanted = trained_of(case, seed + 7, serial=staleness == 0)
        got = [update for executor in executors for update in executor.updates]
        assert got == wanted


def trained_of(case, seed, serial=False):
    """What an uninterrupted run with other latencies trains on: ids and fields of each update."""
    executors, results, _ = run_case(case, seed, serial=serial)
    assert len(executors) == 1
    return results, executors[0].updates


test_tokens_are_of_the_table_s_version = settings(max_examples=100)(cases(check))
test_thousands_of_cases = pytest.mark.slow(settings(max_examples=5000)(cases(check)))


def check_takes(staleness, resumes, seed, groups, per_round, **case):
    """Further rounds of a step are of its weights, and what it takes is what `serial` takes."""
    case |= {"staleness": 0, "kind": "filter"}
    take = {"num_groups": groups, "round_prompts": per_round, "max_rounds": 4, "allow_fewer": True}
    case["more"] = {"take": take}
    executors, results, versions = run_case(case, seed, resumes=frozenset(resumes))
    again, wanted = trained_of(case, seed + 7, serial=True)
    assert [update for executor in executors for update in executor.updates] == wanted
    for number, (result, other) in enumerate(zip(results, again, strict=True)):
        assert {s.id for s in result.dispatched} == {s.id for s in other.dispatched}
        assert result.dropped == other.dropped
        spans = [span for sample in result.dispatched for span in sample.spans if span.trained]
        assert {span.version for span in spans} <= {versions[number]}
        assert result.versions.keys() == {s.id for s in result.dispatched}
    several = any(len({s.id.prompt for s in r.dispatched}) > per_round for r in results)
    event("steps of several rounds" if several else "one round a step")


take_cases = given(**(CASES | {"groups": st.integers(1, 3), "per_round": st.integers(1, 3)}))
test_rounds_of_a_take_are_of_its_step = settings(max_examples=60)(take_cases(check_takes))


def check_followed_takes(resumes, seed, groups, per_round, others, shared, **case):
    """A record has the prompts of all rounds of a step: who follows begins them at once."""
    take = {"num_groups": groups, "round_prompts": per_round, "max_rounds": 4, "allow_fewer": True}
    case |= {"staleness": 0, "kind": "filter", "more": {"take": take}}
    case["lengths"] = [1 + n for n in case["lengths"]]
    first, results, _ = run_case(case, seed)
    versions = {id: x for result in results for id, x in result.versions.items()}
    prompts = (sorted({id.prompt for id in result.versions}) for result in results)
    case |= {"record": RunRecord(versions, {}, dict(enumerate(prompts)))}
    case |= {"num_instances": others, "shared": shared, "late": Latencies(), "pauses": set()}
    executors, again, _ = run_case(case, seed + 1, resumes=frozenset(resumes))
    for one, other in zip(results, again, strict=True):
        assert one.versions == other.versions
        assert one.dropped == other.dropped
    assert [x for e in executors for x in e.updates] == first[0].updates


followed_takes = given(
    **(CASES | {"groups": st.integers(1, 3), "per_round": st.integers(1, 3)}),
    others=st.integers(1, 4), shared=st.booleans(),
)  # fmt: skip
test_rounds_of_a_take_are_followed = settings(max_examples=60)(followed_takes(check_followed_takes))


def check_in_flight(staleness, resumes, seed, **case):
    case |= {"staleness": staleness, "in_flight": True}
    executors, results, versions = run_case(case, seed, resumes=frozenset(resumes))
    prompts, num_steps, reached = case["prompts"], case["steps"], 0
    for number, result in enumerate(results):
        batch = {*range(number * prompts, (number + 1) * prompts)}
        assert {sample.id.prompt for sample in result.dispatched} == batch
        allowed = versions[max(0, number - staleness) : number + 1]
        for sample in result.dispatched:
            of_tokens = [span.version for span in sample.spans if span.trained]
            assert of_tokens == sorted(of_tokens)
            assert {*of_tokens} <= {*allowed}, (number, sample.id)
        if result.samples:
            # A step whose samples are all dropped leaves the weights as they are.
            last = {version: steps for steps, version in enumerate(versions[: number + 1])}
            spans = [span for s in result.samples for span in s.spans if span.trained]
            least, most = (
                max((number - steps(span.version) for span in spans), default=0)
                for steps in (last.__getitem__, versions.index)
            )
            assert least <= result.metrics["samples/staleness"] <= most
            reached = max(reached, most)
    changed = any(
        len({span.version for span in sample.spans if span.trained}) > 1
        for result in results
        for sample in result.samples
    )
    event("weights change within a response" if changed else "responses are of one version")
    event(f"staleness {reached} of {min(staleness, num_steps - 1)}")
    assert not executors[-1].tensors, "samples are stored beyond the end"


in_flight_cases = given(**(CASES | {"staleness": st.integers(1, 3)}))
test_no_token_in_flight_is_older = settings(max_examples=100)(in_flight_cases(check_in_flight))
test_thousands_in_flight = pytest.mark.slow(
    settings(max_examples=5000)(in_flight_cases(check_in_flight))
)


def check_followed(
    staleness, resumes, pauses, seed, lengths, others, shared, loses, deaths, **case
):
    """On other numbers of instances, that train too or not, resumed or not: the same batches.

    Where the run `loses` caches that would stay, they are computed again at the same tokens. What
    an instance that died had made is not in its record.
    """
    case |= {"staleness": staleness, "lengths": [1 + 4 * n for n in lengths]}
    flies = staleness > 0
    recorded = {"in_flight": flies, "pauses": pauses, "loses": loses and flies, "tells": False}
    if deaths:
        num_instances = case["num_instances"] + 1
        mortal = {n: who for n, who in deaths.items() if who < num_instances - 1}
        recorded |= {"num_instances": num_instances, "deaths": mortal}
    first, results, _ = run_case(case | recorded, seed)
    record = RunRecord(
        {id: segments for result in results for id, segments in result.versions.items()},
        {},
        dict(enumerate(sorted({id.prompt for id in result.versions}) for result in results)),
    )
    case |= {"record": record, "num_instances": others, "late": Latencies(), "pauses": set()}
    case["shared"] = shared
    executors, again, _ = run_case(case, seed + 1, resumes=frozenset(resumes))
    for one, other in zip(results, again, strict=True):
        assert one.versions == other.versions
        assert [s.spans for s in one.samples] == [s.spans for s in other.samples]
        assert one.metrics["samples/mean_staleness"] == other.metrics["samples/mean_staleness"]
    assert [x for e in executors for x in e.updates] == first[0].updates
    segments = record.versions.values()
    rests = sum(len(of_sample) > 1 for of_sample in segments)
    event("caches are lost" if any(x.recomputed for one in segments for x in one) else "none is")
    restarted = sum(result.metrics["samples/restarted"] for result in results)
    event("samples began anew" if restarted else "none began anew")
    event("samples rest" if rests else "none rests")


FOLLOWED = {
    "staleness": st.integers(0, 3), "others": st.integers(1, 4), "shared": st.booleans(),
    "loses": st.booleans(),
    "deaths": st.one_of(
        st.just({}), st.dictionaries(st.integers(1, 40), st.integers(0, 3), max_size=2)
    ),
}  # fmt: skip
followed_cases = given(**(CASES | FOLLOWED))
test_a_record_is_followed = settings(max_examples=100)(followed_cases(check_followed))
test_thousands_are_followed = pytest.mark.slow(
    settings(max_examples=3000)(followed_cases(check_followed))
)


def test_a_run_that_is_not_the_recorded_one_ends_with_its_first_sample():
    executor = SeparateExecutor(2, 0, lambda id: 9, in_flight=True)
    schedule = make(executor, {"k": 2}, num_steps=3, in_flight=True)
    results = [schedule.run_step(step) for step in range(3)]
    versions = {id: x for result in results for id, x in result.versions.items()}
    (last,) = versions[SampleId(5, k=1)]
    versions[SampleId(5, k=1)] = (last._replace(stop=8),)
    batches = {step: range(4 * step, 4 * step + 4) for step in range(3)}
    record = RunRecord(versions, {}, batches)
    again = make(SeparateExecutor(1, 1, lambda id: 9), {"k": 2}, num_steps=3, record=record)
    again.run_step(0)
    told = r"schedule\.follow: .* sample 5\.1 has tokens up to 9 by v_0, not 8 by v_0$"
    with pytest.raises(RecordDiffers, match=told):
        again.run_step(1)


def check_replayed(staleness, seed, lengths, replays, **case):
    """From the checkpoints of a run with weights in flight, each by the weights that it has."""
    case |= {"staleness": staleness, "lengths": [1 + 4 * n for n in lengths], "in_flight": True}
    record, checkpoints = RunRecord({}, {}, {}), dict[int, LoopSchedule]()
    case |= {"replays": replays, "replayed": record, "checkpoints": checkpoints}
    _, results, _ = run_case(case, seed)
    for number, result in enumerate(results):
        record.versions.update(result.versions)
        record.batches[number] = sorted({id.prompt for id in result.versions})
    for step, schedule in checkpoints.items():
        for number in range(step + 1, case["steps"]):
            again = schedule.run_step(number)
            assert again.versions == results[number].versions
            assert [s.spans for s in again.samples] == [s.spans for s in results[number].samples]
        assert schedule.close() == {}
        event("goes on with copies" if schedule.executor.num_copied else "no copies")


REPLAYED = {
    "staleness": st.integers(1, 3), "replays": st.sets(st.integers(0, 2), min_size=1),
    "steps": st.integers(3, 6), "decode_steps": st.integers(1, 4), "resumes": st.just(set()),
    "lengths": st.lists(st.integers(2, 20), min_size=1, max_size=9),
}  # fmt: skip
replayed_cases = given(**(CASES | REPLAYED))
# A checkpoint whose samples are complete, with tokens of weights that have still to be pushed.
late_checkpoint = example(
    staleness=1, seed=251, lengths=[2], replays={0, 1}, num_instances=1, decode_steps=2, k=1,
    prompts=3, held=3, kind="own", judges=False, early=False, rewards=[0.0], finishes=["stop"],
    hangs=[False], turns=0, late=Latencies(push=1.0, load=0.0, update=0.1), steps=3,
    resumes=set(), pauses=set(), saves=set(), evaluations=set(),
)  # fmt: skip
test_steps_are_replayed_from_checkpoints = settings(max_examples=50)(
    late_checkpoint(replayed_cases(check_replayed))
)


def check_times(seed, resumes, **case):
    """Nor from the times in which environments reply, weights are pushed and judges judge."""
    seen = [trained_of(case, seed + other)[1] for other in (0, 1)]
    case["late"] = Latencies(push=5.0, load=0.5, update=7.0)
    seen.append(trained_of(case, seed + 2)[1])
    assert seen[0] == seen[1] == seen[2]


test_batches_do_not_depend_on_latencies = settings(max_examples=40)(cases(check_times))
test_hundreds_of_latencies = pytest.mark.slow(settings(max_examples=500)(cases(check_times)))


def check_deaths(staleness, seed, deaths, in_flight, early, maps, **case):
    """Each step has its batch, once, of weights that are not too old; all is computed anew."""
    case |= {"staleness": staleness, "resumes": (), "in_flight": in_flight}
    case["num_instances"] += 1
    mortal = {n: who for n, who in deaths.items() if who < case["num_instances"] - 1}
    case |= {"early": early, "deaths": mortal, "more": {"maps": maps}}
    (executor,), results, versions = run_case(case, seed)
    prompts = case["prompts"]
    for number, result in enumerate(results):
        batch = {*range(number * prompts, (number + 1) * prompts)}
        used, dropped = [s.id for s in result.samples], [*result.dropped]
        assert used == sorted(used)
        assert sorted(used + dropped) == [
            SampleId(p, k=k) for p in sorted(batch) for k in range(case["k"])
        ]
        allowed = {*versions[max(0, number - staleness) : number + 1]}
        if not in_flight:
            allowed = {versions[max(0, number - staleness)]}
        for sample in result.dispatched:
            assert {span.version for span in sample.spans if span.trained} <= allowed
        trained = {s.id.prompt: [] for s in result.samples}
        for sample in result.samples:
            trained[sample.id.prompt].append(sample)
        for group in trained.values():
            most = max(sample.number("reward") for sample in group)
            for sample in group:
                assert sample.number("advantage") == sample.number("reward") - most
                if maps:
                    assert sample.number("twice") == 2 * sample.number("advantage")
                tokens = sum((1 + x.version) * (x.stop - x.start) for x in sample.spans)
                assert sample.number("reward") == of_id(case["rewards"])(sample.id) + tokens
    if not in_flight:
        _, wanted = trained_of(case | {"deaths": {}}, seed + 7)
        assert executor.updates == wanted
    assert not executor.tensors, "samples are stored beyond the end"
    restarted = sum(result.metrics["samples/restarted"] for result in results)
    event("samples began anew" if restarted else "none began anew")
    event("the trainer was refused samples" if executor.num_refused else "it had all")
    event("trained early" if executor.num_early else "trained late")


death_cases = given(
    **{x: cases for x, cases in CASES.items() if x != "resumes"},
    deaths=st.dictionaries(st.integers(1, 80), st.integers(0, 3), max_size=3),
    in_flight=st.booleans(),
    maps=st.booleans(),
)
test_deaths_cost_no_step = settings(max_examples=200)(death_cases(check_deaths))
test_thousands_of_deaths = pytest.mark.slow(settings(max_examples=5000)(death_cases(check_deaths)))


def test_groups_are_trained_while_others_are_made():
    """`periodic` trains the first group as it comes, by the step's weights; the batch is whole."""
    executor = SeparateExecutor(2, 0, lambda id: 5 if id.prompt % 2 else 20)
    schedule = make(executor, {"k": 2}, staleness=0, prompts=4, num_steps=2, early=True)
    results = [schedule.run_step(step) for step in range(2)]
    early = [(version, ids) for name, version, ids in executor.passes if "update" in name]
    assert {id.prompt for _, ids in early for id in ids} >= {1, 3, 5, 7}
    assert all({id.prompt // 4 for id in ids} == {version} for version, ids in early)
    assert [len(result.samples) for result in results] == [8, 8]
    assert executor.num_early == sum(r.metrics["samples/trained_early"] for r in results)


@pytest.mark.parametrize(
    ("cfg", "early", "reason"),
    [
        ({}, True, None),
        ({}, False, "these cases train whole batches"),
        (TAKE, True, "take may ask for another round, which every rank generates"),
    ],
    ids=["early", "settings", "recipe"],
)
def test_the_log_says_why_groups_are_trained_when_all_are_there(caplog, cfg, early, reason):
    with caplog.at_level(logging.INFO, "hybridrl.schedule.asynchronous"):
        make(SeparateExecutor(2), {"k": 2, **cfg}, staleness=0, early=early)
    said = f"groups are trained when all are there: {reason}"
    assert caplog.messages == [said] * (reason is not None)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_instances_are_given_samples_of_a_batch_ahead(monkeypatch, staleness):
    """12 samples of a batch, two instances of 2 rows: each is given 12 // 4 more, of that batch.

    Rows refill within a call, so there are fewer calls, by which the same batches are made.
    """

    def run():
        executor = SeparateExecutor(2, 0, lambda id: 9)
        schedule = make(
            executor, {"k": 4}, staleness=staleness, prompts=3, held=2, decode_steps=20, num_steps=4
        )
        batches = [[sample.id for sample in schedule.run_step(n).samples] for n in range(4)]
        assert batches == [[SampleId(3 * n + p, k=k) for p in range(3) for k in range(4)]
                           for n in range(4)]  # fmt: skip
        first = [(instance, commands) for instance, commands, _ in executor.calls[:2]]
        given = {instance: [id for c in commands for id in c.ids] for instance, commands in first}
        assert all(id.prompt < 3 for ids in given.values() for id in ids)
        return executor, {instance: len(ids) for instance, ids in given.items()}

    refilled, given = run()
    assert given == {0: 5, 1: 5}
    assert max(refilled.most_held) == 5
    monkeypatch.setattr(Dealer, "_ahead", lambda self, num_queued: 0)
    by_call, given = run()
    assert given == {0: 2, 1: 2}
    assert max(by_call.most_held) == 2
    assert len(refilled.calls) < len(by_call.calls)
    assert refilled.updates == by_call.updates


def test_what_is_trained_early_while_lost_samples_are_made_again_is_counted():
    """The first samples are too few tokens for the pool, those made anew are longer."""
    attempts = Counter()

    def length_of(id):
        attempts[id] += 1
        return 3 if attempts[id] == 1 else 18

    executor = SeparateExecutor(2, 0, length_of, deaths={12: 0}, tells=True)
    schedule = make(executor, {"k": 1}, num_steps=3, early=True, least_tokens=25)
    results = [schedule.run_step(step) for step in range(3)]
    assert sum(result.metrics["samples/restarted"] for result in results) > 0
    trained_early = sum(result.metrics["samples/trained_early"] for result in results)
    assert trained_early == executor.num_early > 0


@pytest.mark.parametrize("seed", range(20))
def test_a_checkpoint_between_steps_trains_nothing_early(seed):
    """Groups of the next step may be complete while instances give copies."""
    draw = random.Random(seed)
    length_of = of_id([draw.randint(1, 20) for _ in range(draw.randint(2, 9))])
    executor = SeparateExecutor(
        draw.randint(1, 4), seed, length_of, of_id([(0.0, "ok"), (1.0, "ok")])
    )
    more = {"prompts": draw.randint(2, 5), "decode_steps": draw.randint(1, 6)}
    schedule = make(executor, {"k": draw.randint(1, 3)}, num_steps=6, early=True, **more)
    for step in range(6):
        result = schedule.run_step(step)
        assert result.metrics["samples/trained_early"] <= len(result.samples)
        schedule.copy_open()
    assert executor.num_early > 0
    assert schedule.close() == {}


def test_the_example_of_the_docstring():
    """Batch k + 1 is made while step k trains batch k; an instance loads each version once."""
    executor = SeparateExecutor(
        2, 0, lambda id: 9 + id.prompt % 2, latencies=Latencies(update=100.0)
    )
    schedule = make(executor, {"k": 1}, prompts=2, num_steps=3)
    first = schedule.run_step(0)
    assert {id.prompt for _, submit in executor.submits for id in submit.ids} == {0, 1, 2, 3}
    results = [first, schedule.run_step(1), schedule.run_step(2)]
    assert [[s.id.prompt for s in r.samples] for r in results] == [[0, 1], [2, 3], [4, 5]]
    assert [{s.spans[0].version for s in r.samples} for r in results] == [{0}, {0}, {1}]
    assert [r.metrics["samples/off_policy_tokens"] for r in results] == [0.0, 19.0, 19.0]
    assert sorted(executor.loads) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert executor.num_overlapped, "nothing was generated while a step trained"
    assert schedule.close() == {}


@pytest.mark.parametrize("more", [{}, {"in_flight": True}, {"as_complete": True}])
def test_engines_are_compared_on_a_group_of_the_trainer_s_weights(more):
    """One that a later step trains, once a step, and only where the step has none of its own."""
    num_compared = 0
    for seed in range(6):
        executor = SeparateExecutor(
            3, seed, of_id([3, 3, 14, 60, 12]), latencies=Latencies(push=0.1, load=0.1, update=0.1),
            in_flight=more.get("in_flight", False),
        )  # fmt: skip
        schedule = make(executor, {"k": 2}, prompts=3, num_steps=6, held=4, decode_steps=4, **more)
        results = [schedule.run_step(step) for step in range(6)]
        assert schedule.close() == {}
        trained = {s.id.prompt: step for step, r in enumerate(results) for s in r.samples}
        compared = dict(executor.compared)
        assert len(compared) == len(executor.compared)
        for step, result in enumerate(results):
            own = {
                step in {s.version for s in one.spans} and len({*one.spans}) == 1
                for one in result.samples
            }
            assert ("actor/mismatch/mean" in result.metrics) is (step in compared)
            if step in compared:
                assert own == {False}
                (prompt,) = compared[step]
                assert trained[prompt] > step
        num_compared += len(compared)
    assert num_compared > 3
