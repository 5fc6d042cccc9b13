"""The packed schedule: the prompts of serial in every cycle, by length; none waits too long."""

import json
from collections import Counter
from typing import Any

import pytest
from conversations import of_turns
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, SampleId, recipe
from hybridrl.flow.executor import Sampling, Scope
from hybridrl.flow.lengths import LengthModel, LengthRanker, PromptKey
from hybridrl.flow.packing import choose, limit_of
from hybridrl.flow.sample import OUT_OF_TOKENS
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.packed import ENDED, Packed
from hybridrl.schedule.serial import SerialSchedule

MAX_TOKENS = 200


class ToyLoss(Loss):
    fields = ("advantages", "old_log_probs", "reference_log_probs")

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


@recipe("toy")
def toy(flow: Flow, cfg: dict[str, Any]) -> None:
    """GRPO with a filter where `cfg` asks for it, and a reference."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.get("k", 2))
    samples = flow.reward.score(samples)
    if cfg.get("filter"):
        samples = samples.filter(lambda rewards: max(rewards) > min(rewards), name="spread")
    samples = flow.reference.log_probs(samples)
    samples = samples.by_group(lambda rewards: [r - max(rewards) for r in rewards])
    flow.actor.update(samples, loss=ToyLoss())


def item_of(position, num_items=7):
    """Prompts repeat, so that lengths are seen before."""
    return f"item {position % num_items}"


def make(
    executor, cfg, *, prompts=4, decode_steps=5, wait=3, limit=None, held=100,
    num_prompts=10_000, first_prompt=0, num_steps=None, turns=False,
):  # fmt: skip
    return LoopSchedule(
        toy.build(cfg),
        executor,
        ((i, item_of(i)) for i in range(first_prompt, num_prompts)),
        StepSettings(
            sampling=Sampling(MAX_TOKENS, max_turn_tokens=MAX_TOKENS if turns else 0),
            decode_steps=decode_steps,
            prompts_per_step=prompts,
        ),
        Packed(max_wait_steps=wait, limit_tokens=limit, num_steps=num_steps),
        limits=RoundLimits(max_held=held, chunk_tokens=50),
        length_model=LengthModel(key_of=key_of),
    )


def key_of(prompt):
    return PromptKey(prompt, "task", (1, 2, 3))


def of_id(values):
    return lambda id: values[(7 * id.prompt + 3 * id.k) % len(values)]


lengths = st.one_of(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.integers(0, 20).map(lambda n: [n]),
    st.integers(1, 10).map(lambda n: [n] * 12 + [19 * n]),
)


# -- the choice ------------------------------------------------------------------------------------


@given(fits=st.lists(st.booleans(), min_size=1, max_size=12), data=st.data())
def test_the_choice_does_not_depend_on_the_order_of_knowing(fits, data):
    """The choice is final as soon as no further knowledge can change it, at the latest with all."""
    num_wanted = data.draw(st.integers(1, len(fits)))
    order = data.draw(st.permutations(range(len(fits))))
    # what it is to be, with all known
    taken, put_off = [], []
    for position in order:
        may = len(put_off) < len(fits) - num_wanted
        (put_off if may and not fits[position] else taken).append(position)
        if len(taken) == num_wanted:
            break
    known: dict[int, bool] = {}
    before: tuple[int, ...] = ()
    for position in data.draw(st.permutations(range(len(fits)))):
        choice = choose(order, num_wanted, known)
        assert set(before) <= set(choice.put_off) <= set(put_off)
        assert len(choice.taken) == num_wanted
        before = choice.put_off
        if choice.is_final:
            break
        known[position] = fits[position]
    choice = choose(order, num_wanted, known)
    assert choice.is_final
    assert (list(choice.taken), list(choice.put_off)) == (taken, put_off)


def test_the_examples_of_the_docstrings():
    order = (0, 1, 2, 3)
    assert choose(order, 2, {}).taken == (0, 1)
    assert choose(order, 2, {1: False}).taken == (0, 2)
    last = choose(order, 2, {0: True, 1: False, 2: False})
    assert (last.taken, last.put_off, last.is_final) == ((0, 3), (1, 2), False)
    assert choose(order, 2, {0: True, 1: False, 2: False, 3: False}).is_final
    assert limit_of([*range(64, 0, -1)], 4, 64) == 56
    assert limit_of([90, 10, 30, 20], 4, 4) == 90  # of so few it is not known what they keep to
    assert limit_of([], 4, 64) is None


# -- what a step takes -----------------------------------------------------------------------------


def specification(length_of, own_of, k, prompts, wait, limit, steps):
    """The prompts of every step, with all lengths known: no clock, no instances.

    `length_of` an id and a version, `own_of` the model's own tokens of them.
    None where a step needs a prompt past all those of its cycle.
    """
    ranker, cycle, longest, position, waiting = LengthRanker(), wait + 1, [], 0, {}
    for step in range(steps):
        if not waiting:
            waiting = dict.fromkeys(range(position, position + prompts * cycle), 0)
            position += prompts * cycle
        predicted = {p: ranker.predict([key_of(item_of(p))])[0] for p in waiting}
        order = sorted(waiting, key=lambda p: (max(predicted[p], waiting[p]), p))
        seen = [n for of in longest[-cycle:] for n in of]
        most = limit or limit_of(seen, cycle, cycle * prompts)
        drawn = {p: [length_of(SampleId(p, "", i), step) for i in range(k)] for p in waiting}
        taken, num_put_off = [], 0
        for p in order:
            fits = most is None or (waiting[p] < most and max(drawn[p]) <= most)
            if not fits and num_put_off < len(waiting) - prompts:
                num_put_off += 1
                waiting[p] = max(waiting[p], most)
            else:
                taken.append(p)
            if len(taken) == prompts:
                break
        longest.append([])
        for p in sorted(taken):
            del waiting[p]
            longest[-1].append(max(drawn[p]))
            own = [own_of(SampleId(p, "", i), step) for i in range(k)]
            ranker.observe(key_of(item_of(p)), own)
        yield sorted(taken), num_put_off, sum(map(sum, (drawn[p] for p in taken)))


cases = given(
    seed=st.integers(0, 2**16),
    num_instances=st.integers(1, 4),
    decode_steps=st.integers(1, 12),
    k=st.integers(1, 3),
    prompts=st.integers(1, 5),
    wait=st.integers(1, 3),
    limit=st.none() | st.integers(1, 40),
    held=st.integers(1, 30),
    filtered=st.booleans(),
    drifts=st.booleans(),
    lengths=lengths,
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    finishes=st.just(["stop"])
    | st.lists(st.sampled_from(["stop", "stop", "stop", "abort"]), min_size=1, max_size=7),
    hangs=st.lists(st.booleans(), min_size=1, max_size=7),
    deaths=st.dictionaries(st.integers(1, 60), st.integers(0, 3), max_size=3),
    turns=st.sampled_from([0, 0, 3]),
)


def check(
    virtual_executor, seed, num_instances, decode_steps, k, prompts, wait, limit, held,
    filtered, drifts, lengths, rewards, finishes, hangs, deaths, turns,
):  # fmt: skip
    mortal = {n: who for n, who in deaths.items() if who < num_instances - 1}
    of_version = of_id(lengths)

    def length_of(id, version):
        """With another version of the weights other lengths, where they drift."""
        return of_version(id) + (5 * version * drifts) % 11

    def length_now(id):
        return length_of(id, executor.version)

    def own_of(id, version):
        length = length_of(id, version)
        if not turns:
            return length
        stops = of_turns(lambda id: length, turns)(id)
        return sum(stops[i] - (stops[i - 1] if i else 0) for i in range(0, len(stops), 2))

    def turns_of(id):
        return of_turns(length_now, turns)(id)

    if turns:  # all conversations have their number of turns, which is an end of its own
        finishes = ["length" if finish == "stop" else finish for finish in finishes]
    executor = virtual_executor(
        num_instances, seed, length_now, lambda id: (of_id(rewards)(id), "ok"),
        of_id(finishes), of_id(hangs), mortal, cuts=True,
        turns_of=turns_of if turns else None,
    )  # fmt: skip
    cfg = {"k": k, "filter": filtered}
    schedule = make(
        executor, cfg, prompts=prompts, decode_steps=decode_steps, wait=wait, limit=limit,
        held=held, turns=bool(turns),
    )  # fmt: skip
    cycle, steps, left = wait + 1, 2 * (wait + 1), []
    wanted = specification(length_of, own_of, k, prompts, wait, limit, steps)
    for step, (positions, num_put_off, num_tokens) in enumerate(wanted):
        result = schedule.run_step(step)
        used, dropped = [s.id for s in result.samples], list(result.dropped)
        ids = sorted(used + dropped)
        assert used == sorted(used)
        assert ids == sorted(s.id for s in result.dispatched)
        # a filter that leaves nothing to update on leaves the weights as they are
        if not (filtered and drifts) and "abort" not in finishes:
            assert [(id.prompt, id.k) for id in ids] == [
                (p, i) for p in positions for i in range(k)
            ]
            assert result.metrics["samples/put_off"] == num_put_off
            assert sum(s.response_tokens for s in result.dispatched) == num_tokens
        assert turns or all(s.scalars["finish"] != "length" for s in result.samples)
        assert not any(s.scalars.get(OUT_OF_TOKENS) for s in result.samples)
        assert all({span.version for span in s.spans if span.trained} <= {executor.version - 1}
                   for s in result.samples)  # fmt: skip
        left += ids
        if step % cycle == wait:  # a cycle has ended: nothing waits
            done = [(id.prompt, id.k) for id in left]
            assert sorted(done) == [(p, i) for p in range(prompts * (step + 1)) for i in range(k)]
        event("some are put off" if num_put_off else "none is put off")
        event("tokens are discarded" if result.metrics["samples/discarded_tokens"] else "-")
    assert not schedule.close()
    assert schedule._ledger.samples == ()
    submitted = {id for _, submit in executor.submits for id in submit.ids}
    assert submitted == set(left)
    assert submitted <= set(executor.released)
    assert not executor.tensors
    judged = [id for _, _, ids in executor.infers for id in ids]
    assert set(judged) <= set(left)  # nothing runs on samples that begin again


test_every_step_takes_what_the_specification_says = settings(max_examples=60)(cases(check))
test_thousands_of_cases = pytest.mark.slow(settings(max_examples=4000)(cases(check)))


@pytest.mark.long
@given(
    seeds=st.tuples(st.integers(0, 2**16), st.integers(0, 2**16)),
    instances=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    decode_steps=st.tuples(st.integers(1, 12), st.integers(1, 40)),
    held=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    lengths=lengths,
    limit=st.none() | st.integers(1, 40),
)
@settings(max_examples=20)
def test_neither_time_nor_instances_change_a_batch(
    virtual_executor, seeds, instances, decode_steps, held, lengths, limit
):
    seen = []
    for i in range(2):
        executor = virtual_executor(instances[i], seeds[i], of_id(lengths), cuts=True)
        schedule = make(executor, {}, limit=limit, decode_steps=decode_steps[i], held=held[i])
        for step in range(6):
            schedule.run_step(step)
        seen.append(executor.updates)
    assert seen[0] == seen[1]


def trained_lengths(executor, schedule, steps):
    """How often each length was trained, and the steps of each prompt."""
    counts, step_of = Counter(), {}
    for step in range(steps):
        for sample in schedule.run_step(step).samples:
            counts[sample.response_tokens] += 1
            step_of[sample.id.prompt] = step
    return counts, step_of


def serial_of(executor, cfg, prompts):
    settings = StepSettings(
        sampling=Sampling(max_new_tokens=MAX_TOKENS), decode_steps=5, prompts_per_step=prompts
    )
    prompts_of = ((i, item_of(i)) for i in range(10_000))
    return SerialSchedule(toy.build(cfg), executor, prompts_of, settings)


@given(lengths=lengths, prompts=st.integers(1, 4), wait=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_every_length_has_the_share_that_it_has_under_serial(
    virtual_executor, lengths, prompts, wait, seed
):
    """Over an epoch of three cycles; no prompt is trained more than `wait` steps late, or early."""
    steps = 3 * (wait + 1)
    executor = virtual_executor(2, seed, of_id(lengths), cuts=True)
    ours = trained_lengths(executor, make(executor, {}, prompts=prompts, wait=wait), steps)
    executor = virtual_executor(2, seed, of_id(lengths), cuts=True)
    theirs = trained_lengths(executor, serial_of(executor, {}, prompts), steps)
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    assert all(abs(ours[1][p] - theirs[1][p]) <= wait for p in ours[1])


# -- by hand ---------------------------------------------------------------------------------------

LENGTHS = {0: 4, 1: 30, 2: 3, 3: 5, 4: 4, 5: 28}


def test_the_example_of_the_docs(virtual_executor):
    """Six prompts in three steps of two, limit 10: prompt 1 is put off, and comes last."""
    executor = virtual_executor(2, 0, lambda id: LENGTHS[id.prompt], cuts=True)
    schedule = make(executor, {"k": 1}, prompts=2, wait=2, limit=10, num_prompts=6, decode_steps=1)
    results = [schedule.run_step(step) for step in range(3)]
    trained = [[s.id.prompt for s in result.samples] for result in results]
    assert trained == [[0, 2], [3, 4], [1, 5]]
    put_off = [result.metrics["samples/put_off"] for result in results]
    assert put_off == [1, 0, 0]
    discarded = [result.metrics["samples/discarded_tokens"] for result in results]
    assert discarded == [10, 5, 0]
    assert [result.metrics["samples/limit_tokens"] for result in results] == [10, 10, 0]
    spans = {s.id.prompt: s.spans for result in results for s in result.samples}
    assert [(span.start, span.stop, span.version) for span in spans[1]] == [(0, 30, 2)]
    # prompt 1 begins twice, once with at most 10 tokens
    begun = [s.sampling.max_new_tokens for _, s in executor.submits if s.ids[0].prompt == 1]
    assert begun == [10, MAX_TOKENS]


def test_a_step_without_enough_short_prompts_takes_long_ones_too(virtual_executor):
    """All are long: half of the four may be put off, and the other half begins again at once."""
    executor = virtual_executor(2, 0, lambda id: 30, cuts=True)
    schedule = make(executor, {"k": 2}, prompts=2, wait=1, limit=10)
    first, second = schedule.run_step(0), schedule.run_step(1)
    assert [s.id.prompt for s in first.samples] == [2, 2, 3, 3]
    assert [s.id.prompt for s in second.samples] == [0, 0, 1, 1]
    assert all(s.response_tokens == 30 for s in (*first.samples, *second.samples))
    assert first.metrics["samples/discarded_tokens"] == 2 * 4 * 10
    assert second.metrics["samples/discarded_tokens"] == 0


def test_seen_lengths_make_the_long_ones_wait_without_a_try(virtual_executor):
    """From the second epoch on no token of theirs is discarded."""
    executor = virtual_executor(2, 0, lambda id: 50 if id.prompt % 7 == 3 else 5, cuts=True)
    schedule = make(executor, {"k": 1}, prompts=7, wait=6, limit=20)
    results = [schedule.run_step(step) for step in range(14)]
    first, later = results[:7], results[7:]
    assert first[0].metrics["samples/discarded_tokens"] > 0
    assert [r.metrics["samples/put_off"] for r in later] == [0] * 7
    assert {s.id.prompt % 7 for s in later[-1].samples} == {3}


def test_stages_run_on_trained_samples_alone(virtual_executor):
    """A judge that is paid for reads no response that is discarded."""
    executor = virtual_executor(
        2, 0, lambda id: LENGTHS.get(id.prompt % 6, 4), scopes={"reward": Scope.DRIVER}, cuts=True
    )
    schedule = make(executor, {}, prompts=2, wait=2, limit=10)
    trained = [s.id for step in range(6) for s in schedule.run_step(step).samples]
    assert sorted(id for ids in executor.judged for id in ids) == sorted(trained)
    assert len(trained) == 24


# -- a run's length, resuming ----------------------------------------------------------------------


def test_the_last_cycle_ends_with_the_run(virtual_executor):
    executor = virtual_executor(2, 0, of_id([3, 40, 5, 9]), cuts=True)
    schedule = make(executor, {"k": 1}, prompts=2, wait=3, limit=10, num_steps=6)
    trained = [s.id.prompt for step in range(6) for s in schedule.run_step(step).samples]
    assert sorted(trained) == list(range(12))
    assert schedule.state_dict()["waiting"] == []


def test_a_run_that_is_cut_within_a_cycle_says_what_it_has_not_trained(virtual_executor):
    """The docs' example, which resumes after its first step, and is to have two in all."""
    options = {"prompts": 2, "wait": 2, "limit": 10, "decode_steps": 1}

    def length_of(id):
        return LENGTHS[id.prompt]

    executor = virtual_executor(2, 0, length_of, cuts=True)
    schedule = make(executor, {}, **options, num_prompts=6, num_steps=3)
    trained = [s.id.prompt for s in schedule.run_step(0).samples]
    state = json.loads(json.dumps(schedule.state_dict()))
    executor = virtual_executor(2, 0, length_of, cuts=True)
    schedule = make(executor, {}, **options, first_prompt=6, num_prompts=6, num_steps=2)
    schedule.load_state_dict(state, prompt_at=item_of, ranks=range(2))
    trained += [s.id.prompt for s in schedule.run_step(1).samples]
    assert sorted({*trained}) == [0, 2, 3, 4]
    left = schedule.close()
    # Prompt 1 was put off.
    assert [*left] == [SampleId(prompt, "", k) for prompt in (1, 5) for k in (0, 1)]
    assert set(left.values()) == {ENDED}
    assert schedule.close() == {}


def test_prompts_that_end_are_an_error(virtual_executor):
    schedule = make(virtual_executor(cuts=True), {}, num_prompts=20)
    for step in range(4):
        schedule.run_step(step)
    with pytest.raises(ValueError, match="got 4, wanted 16"):
        schedule.run_step(4)


@pytest.mark.long
@given(
    lengths=lengths,
    decode_steps=st.integers(1, 12),
    num_instances=st.integers(1, 4),
    wait=st.integers(1, 3),
    limit=st.none() | st.integers(1, 40),
)
@settings(max_examples=12)
def test_a_new_schedule_goes_on_from_what_an_old_one_has_written(
    virtual_executor, lengths, decode_steps, num_instances, wait, limit
):
    """After every step, through JSON, in the middle of cycles too."""
    seen = []
    for resumes in (False, True):
        executor = virtual_executor(num_instances, 0, of_id(lengths), cuts=True)
        options = {"decode_steps": decode_steps, "wait": wait, "limit": limit}
        schedule = make(executor, {}, **options)
        for step in range(6):
            schedule.run_step(step)
            if resumes:
                schedule.release()
                assert schedule.pending() == ()
                state = json.loads(json.dumps(schedule.state_dict()))
                pulled = next(schedule.prompts)[0]
                schedule = make(executor, {}, **options, first_prompt=pulled)
                schedule.load_state_dict(state, prompt_at=item_of, ranks=range(num_instances))
        seen.append((executor.updates, [id for _, s in executor.submits for id in s.ids]))
    assert seen[0] == seen[1]


# -- recipes ---------------------------------------------------------------------------------------


def graph_of(kind):
    flow = Flow()
    samples = flow.targets() if kind == "answers" else flow.actor.generate(flow.prompts)
    samples = flow.reward.score(samples)
    if kind == "take":
        samples = samples.filter(lambda rewards: max(rewards) > 0).take(2)
    if kind == "more":
        samples = samples.by_group(lambda rewards: rewards, outputs=("count",))
        samples = samples.merge(flow.reward.score(flow.actor.generate_more(samples, "count")))
    samples = samples.by_group(lambda rewards: rewards, name="advantage")
    flow.collect(samples)
    return flow.graph


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("take", r"a recipe without take \(stage 'take' asks for prompts as it needs them"),
        ("more", r"generates once a step \(stage 'more' makes more samples"),
        ("answers", r"whose responses are all generated \(stage 'answers' has the dataset's own"),
    ],
)
def test_recipes_whose_prompts_cannot_wait_are_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        Packed.check_graph(graph_of(kind))
