"""The partial schedule: every sample leaves once, none too old, spans by version."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from conversations import of_turns
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, SampleId, TokenSpan, recipe
from hybridrl.flow.executor import Sampling
from hybridrl.flow.ledger import SampleStatus
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.partial import ENDED, Partial, check_stale
from hybridrl.schedule.serial import SerialSchedule


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
    if "take" in cfg:
        samples = samples.take(**cfg["take"])
    samples = flow.reference.log_probs(samples)
    samples = samples.by_group(lambda rewards: [r - max(rewards) for r in rewards])
    flow.actor.update(samples, loss=ToyLoss())


def make(
    executor, cfg, *, prompts=4, decode_steps=5, over=1.5, staleness=1, stale_kv=False, held=100,
    num_prompts=10_000, first_prompt=0, turns=False,
):  # fmt: skip
    policy = Partial(over_provision=over, max_staleness=staleness)
    return LoopSchedule(
        toy.build(cfg),
        executor,
        ((i, f"prompt {i}") for i in range(first_prompt, num_prompts)),
        StepSettings(
            sampling=Sampling(max_new_tokens=20, max_turn_tokens=20 if turns else 0),
            decode_steps=decode_steps,
            prompts_per_step=prompts,
        ),
        policy,
        limits=RoundLimits(max_held=held, chunk_tokens=50, stale_kv=stale_kv),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1, 2, 3))),
    )


def of_id(values):
    return lambda id: values[(7 * id.prompt + 3 * id.k) % len(values)]


lengths = st.one_of(
    st.lists(st.integers(0, 20), min_size=1, max_size=9),
    st.integers(0, 20).map(lambda n: [n]),
    st.integers(1, 10).map(lambda n: [n] * 12 + [100 * n]),
)


cases = given(
    seed=st.integers(0, 2**16),
    num_instances=st.integers(1, 4),
    decode_steps=st.integers(1, 12),
    k=st.integers(1, 3),
    prompts=st.integers(1, 5),
    staleness=st.integers(1, 3),
    extra=st.floats(0, 1),
    held=st.integers(1, 30),
    stale_kv=st.booleans(),
    kind=st.sampled_from(["plain", "filter", "take"]),
    lengths=lengths,
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    finishes=st.lists(st.sampled_from(["stop", "stop", "stop", "abort"]), min_size=1, max_size=7),
    hangs=st.lists(st.booleans(), min_size=1, max_size=7),
    deaths=st.dictionaries(st.integers(1, 60), st.integers(0, 3), max_size=3),
    turns=st.sampled_from([0, 0, 1, 4]),
)


def assert_settled(schedule, result):
    """Every sample of the step is used, or dropped with a reason; pending ones are neither."""
    status_of = schedule._ledger.status
    assert all(status_of(sample.id) is SampleStatus.USED for sample in result.samples)
    assert all(
        status_of(id) is SampleStatus.DROPPED and drop.text for id, drop in result.dropped.items()
    )
    pending = {s.id for s in schedule._ledger.samples} - {s.id for s in result.dispatched}
    waits = (SampleStatus.QUEUED, SampleStatus.PARKED, SampleStatus.FINISHED)
    assert all(status_of(id) in waits for id in pending)


def check(
    virtual_executor, seed, num_instances, decode_steps, k, prompts, staleness, extra, held,
    stale_kv, kind, lengths, rewards, finishes, hangs, deaths, turns,
):  # fmt: skip
    cfg: dict[str, Any] = {"k": k, "filter": kind != "plain"}
    if kind == "take":
        cfg["take"] = {"num_groups": 1, "round_prompts": prompts, "max_rounds": 3}
    mortal = {n: who for n, who in deaths.items() if who < num_instances - 1}
    executor = virtual_executor(
        num_instances, seed, of_id(lengths), lambda id: (of_id(rewards)(id), "ok"),
        of_id(finishes), of_id(hangs), mortal,
        turns_of=of_turns(of_id(lengths), turns) if turns else None,
    )  # fmt: skip
    schedule = make(
        executor, cfg, prompts=prompts, decode_steps=decode_steps, over=1 + extra * staleness,
        staleness=staleness, stale_kv=stale_kv, held=held, turns=bool(turns),
    )  # fmt: skip
    left: list[SampleId] = []
    versions: dict[int, int] = {}  # the version that each prompt began with
    for step in range(5):
        try:
            result = schedule.run_step(step)
        except ValueError:
            assert kind == "take"  # it gave up
            return
        except RuntimeError:  # in the stages behind the take, which wait for the whole batch
            assert kind == "take"
            assert len(executor.alive) < num_instances
            return
        used, dropped = [s.id for s in result.samples], list(result.dropped)
        assert not set(used) & set(dropped)
        assert used == sorted(used)
        assert sorted(used + dropped) == sorted(s.id for s in result.dispatched)
        assert_settled(schedule, result)
        left += used + dropped
        assert result.metrics["samples/staleness"] <= staleness
        if kind != "take":
            assert len({id.prompt for id in used + dropped}) == prompts
        for sample in result.samples:
            versions.setdefault(sample.id.prompt, sample.spans[0].version if sample.spans else step)
            starts = [span.start for span in sample.spans]
            assert starts == [0, *(span.stop for span in sample.spans)][: len(starts)]
            assert sum(s.stop - s.start for s in sample.spans) == sample.response_tokens
            assert all(span.version <= executor.version for span in sample.spans)
        event("some are parked" if result.metrics["samples/parked"] else "none is parked")
        event("some are of two versions" if any(len(s.spans) > 1 for s in result.samples) else "-")
    unfinished = schedule.close()
    assert set(unfinished.values()) <= {ENDED}
    assert schedule._ledger.samples == ()
    left += unfinished
    submitted = {id for _, submit in executor.submits for id in submit.ids}
    assert len(left) == len(set(left))
    assert submitted <= set(left)
    assert sorted(executor.released) == sorted(left)
    assert executor.parked <= set(unfinished)
    assert set(executor.parks_with_kv) <= {stale_kv}


test_every_sample_leaves_once_and_none_too_old = settings(max_examples=60)(cases(check))
test_thousands_of_cases = pytest.mark.slow(settings(max_examples=4000)(cases(check)))


timed_cases = given(
    seeds=st.tuples(st.integers(0, 2**16), st.integers(0, 2**16)),
    lengths=lengths,
    decode_steps=st.integers(1, 12),
    num_instances=st.integers(1, 4),
    held=st.sampled_from([3, 100]),
    turns=st.integers(0, 4),
)


def check_times(virtual_executor, seeds, lengths, decode_steps, num_instances, held, turns):
    """Nor from the times in which environments reply."""
    seen = []
    for seed in seeds:
        turns_of = of_turns(of_id(lengths), turns) if turns else None
        executor = virtual_executor(num_instances, seed, of_id(lengths), turns_of=turns_of)
        schedule = make(executor, {}, decode_steps=decode_steps, held=held, turns=bool(turns))
        for step in range(4):
            schedule.run_step(step)
        seen.append(executor.updates)
    assert seen[0] == seen[1]


test_what_is_trained_follows_from_decode_steps_not_from_time = settings(max_examples=40)(
    timed_cases(check_times)
)
test_hundreds_of_times = pytest.mark.slow(settings(max_examples=400)(timed_cases(check_times)))


@given(
    seeds=st.tuples(st.integers(0, 2**16), st.integers(0, 2**16)),
    instances=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    decode_steps=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    lengths=lengths,
    turns=st.integers(2, 4),
)
@settings(max_examples=20)
def test_conversations_do_not_depend_on_instances_or_decode_steps(
    virtual_executor, seeds, instances, decode_steps, lengths, turns
):
    seen = []
    for seed, num, steps in zip(seeds, instances, decode_steps, strict=True):
        turns_of = of_turns(of_id(lengths), turns)
        executor = virtual_executor(num, seed, of_id(lengths), turns_of=turns_of)
        schedule = make(executor, {}, decode_steps=steps, turns=True)
        for step in range(4):
            schedule.run_step(step)
        seen.append([[id for id, _ in trained] for _, trained in executor.updates])
    assert seen[0] == seen[1]


def of_earlier_version(state: dict[str, Any]) -> Any:
    """A state as JSON, in which ids have a fourth part, as those of earlier versions had."""

    def earlier(values: dict[str, Any]) -> dict[str, Any]:
        return values | {"id": [*values["id"], 0]} if "id" in values else values

    return json.loads(json.dumps(state), object_hook=earlier)


@pytest.mark.long
@given(
    lengths=lengths,
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    decode_steps=st.integers(1, 12),
    num_instances=st.integers(1, 4),
    staleness=st.integers(1, 3),
    filtered=st.booleans(),
    turns=st.sampled_from([0, 3]),
)
@settings(max_examples=20)
def test_a_new_schedule_goes_on_from_what_an_old_one_has_written(
    virtual_executor, lengths, rewards, decode_steps, num_instances, staleness, filtered, turns
):
    """After every step, through JSON; what is parked is where it was.

    Conversations that wait are replayed, and their last replies come once more.
    """
    cfg: dict[str, Any] = {"k": 2, "filter": filtered}
    seen = []
    for resumes in (False, True):
        executor = virtual_executor(
            num_instances, 0, of_id(lengths), lambda id: (of_id(rewards)(id), "ok"),
            turns_of=of_turns(of_id(lengths), turns) if turns else None,
        )  # fmt: skip
        settings = {"decode_steps": decode_steps, "over": 1 + staleness, "staleness": staleness}
        settings |= {"turns": bool(turns)}
        schedule = make(executor, cfg, **settings)
        for step in range(4):
            schedule.run_step(step)
            if resumes:
                schedule.release()
                state, before = of_earlier_version(schedule.state_dict()), schedule.pending()
                pulled = next(schedule.prompts)[0]
                schedule = make(executor, cfg, **settings, first_prompt=pulled)
                schedule.load_state_dict(
                    state, prompt_at=lambda i: f"prompt {i}", ranks=range(num_instances)
                )
                after = schedule.pending()
                assert [replace(c, parked=None) for c in after] == [
                    replace(c, parked=None) for c in before
                ]
                parked = {c.id: c.parked.state[1][c.id] for c in before if c.parked is not None}
                if parked:
                    schedule.restore_parked((0, parked))
                executor.replay_episodes()
                event("some are parked" if parked else "none is parked")
        left = sorted(schedule.close())
        seen.append((executor.updates, sorted(executor.released), left))
    assert seen[0] == seen[1]


LENGTHS = {0: 30, 1: 4, 2: 30, 3: 4, 4: 4, 5: 30}


def test_the_long_ones_go_on_in_the_next_step(virtual_executor):
    """The example of the docstring: prompts 1 and 3 first, then 0 and 2, which cannot wait."""
    executor = virtual_executor(2, 0, lambda id: LENGTHS.get(id.prompt, 4))
    schedule = make(executor, {"k": 1}, prompts=2, over=2.0, staleness=1)
    first, second = schedule.run_step(0), schedule.run_step(1)
    assert [s.id.prompt for s in first.samples] == [1, 3]
    assert first.metrics["samples/parked"] == 2
    assert first.metrics["samples/staleness"] == 0
    assert [s.id.prompt for s in second.samples] == [0, 2]
    assert second.samples[0].spans == (TokenSpan(0, 5, 0), TokenSpan(5, 30, 1))
    assert second.metrics["samples/off_policy_tokens"] == 10
    assert second.metrics["samples/trained_tokens"] == 60
    assert second.metrics["samples/staleness"] == 1
    assert executor.stale_resumes == 2
    assert executor.parks_with_kv == [False] * len(executor.parks_with_kv)


def test_fields_are_the_serial_schedule_s(virtual_executor):
    """Samples reach training with the fields that they have under serial, in another order."""
    trained = {}
    for partial in (False, True):
        executor = virtual_executor(2, 0, lambda id: LENGTHS.get(id.prompt % 6, 4))
        if partial:
            schedule = make(executor, {}, prompts=3)
        else:
            schedule = SerialSchedule(
                toy.build({}),
                executor,
                ((i, f"prompt {i}") for i in range(100)),
                StepSettings(
                    sampling=Sampling(max_new_tokens=20), decode_steps=5, prompts_per_step=3
                ),
            )
        for step in range(4):
            schedule.run_step(step)
        trained[partial] = dict(sample for _, update in executor.updates for sample in update)
    common = trained[True].keys() & trained[False].keys()
    assert len(common) > 10
    assert all(trained[True][id] == trained[False][id] for id in common)


def test_longest_first_and_balanced_by_tokens(virtual_executor):
    """What was long in earlier steps is dealt out first, to different instances."""
    executor = virtual_executor(2, 0, lambda id: 20 if id.prompt % 4 < 2 else 2)
    schedule = make(executor, {"k": 1}, prompts=4, over=1.0)
    schedule.prompts = ((i, f"item {i % 4}") for i in range(100))
    for step in range(3):
        schedule.run_step(step)
    last = [(instance, submit.ids[0].prompt) for instance, submit in executor.submits[-4:]]
    assert {prompt % 4 for _, prompt in last if prompt % 4 < 2} == {0, 1}
    assert len({instance for instance, prompt in last if prompt % 4 < 2}) == 2
    firsts = dict(reversed(last))
    assert all(prompt % 4 < 2 for prompt in firsts.values())


def test_prompts_that_end_are_an_error(virtual_executor):
    schedule = make(virtual_executor(), {}, num_prompts=7)
    schedule.run_step(0)
    with pytest.raises(ValueError, match="got 3, wanted 4"):
        schedule.run_step(1)


def graph_of(kind):
    flow = Flow()
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2))
    if kind == "more":
        samples = samples.by_group(lambda rewards: rewards, outputs=("count",))
        samples = samples.merge(flow.reward.score(flow.actor.generate_more(samples, "count")))
    else:
        samples = flow.actor.log_probs(samples)
    fields = ("advantages", "old_log_probs")
    if kind == "weighted":
        samples = samples.map(min, ("old_log_probs", "log_probs"), ("rollout_weights",))
        fields += ("rollout_weights",)
    samples = samples.by_group(lambda rewards: rewards, name="advantage")
    flow.actor.update(samples, loss=type("L", (ToyLoss,), {"fields": fields})())
    return flow.graph


def test_weights_from_what_sampled_let_the_ratio_be_of_one_version():
    check_stale(graph_of("weighted"), "serial or fused")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ratio", r"old_log_probs as the rollout made them.*correction.*'old_log_probs'"),
        ("more", r"generates once a step \(stage 'more' makes more samples"),
    ],
)
def test_recipes_that_cannot_be_parked_are_refused(virtual_executor, kind, message):
    flow = Flow()
    flow.graph = graph_of(kind)
    with pytest.raises(ValueError, match=message):
        LoopSchedule(
            flow.graph, virtual_executor(), iter(()),
            StepSettings(sampling=Sampling(4), decode_steps=1, prompts_per_step=1),
            Partial(over_provision=1.0, max_staleness=1),
            limits=RoundLimits(max_held=1, chunk_tokens=1), length_model=LengthModel(key_of=str),
        )  # fmt: skip


def test_moves_are_counted(virtual_executor):
    executor = virtual_executor(3, 1, lambda id: 3 + 9 * (id.prompt % 3))
    schedule = make(executor, {"k": 1}, prompts=3, over=2.0)
    for step in range(4):
        schedule.run_step(step)
    assert max(Counter(id for _, id in executor.resumes).values()) <= 2
