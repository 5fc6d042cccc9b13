"""The serial schedule: exactly once, training order by identity, nothing chosen by time."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, SampleId, TokenSpan, recipe
from hybridrl.flow.executor import Sampling, Scope
from hybridrl.flow.ledger import Ledger
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.serial import SerialSchedule


class ToyLoss(Loss):
    fields = ("advantages", "old_log_probs", "reference_log_probs")

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


@recipe("toy")
def toy(flow: Flow, cfg: dict[str, Any]) -> None:
    """GRPO with a filter, and a take where `cfg` has one."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.get("k", 2))
    samples = flow.reward.score(samples)
    samples = samples.filter(lambda rewards: max(rewards) > min(rewards), name="spread")
    if "take" in cfg:
        samples = samples.take(**cfg["take"])
    samples = flow.reference.log_probs(samples)
    samples = samples.by_group(lambda rewards: [r - max(rewards) for r in rewards])
    flow.actor.update(samples, loss=ToyLoss())


def make(executor, cfg, *, prompts_per_step=4, decode_steps=5, num_prompts=10_000, graph=None):
    return SerialSchedule(
        graph or toy.build(cfg),
        executor,
        ((i, f"prompt {i}") for i in range(num_prompts)),
        StepSettings(
            sampling=Sampling(max_new_tokens=20),
            decode_steps=decode_steps,
            prompts_per_step=prompts_per_step,
        ),
    )


def batch(result):
    """What reaches training, and what becomes of the rest; where a sample lay is left out."""
    rows = [(s.id, s.tokens, sorted(s.scalars.items()), sorted(s.tensors)) for s in result.samples]
    return rows, result.dropped


cases = given(
    seeds=st.tuples(st.integers(0, 2**16), st.integers(0, 2**16)),
    num_instances=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    decode_steps=st.tuples(st.integers(1, 25), st.integers(1, 25)),
    k=st.integers(1, 4),
    prompts_per_step=st.integers(1, 6),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=7),
    rewards=st.lists(
        st.sampled_from([(0.0, "ok"), (1.0, "ok"), (0.0, "error"), (0.0, "timeout")]),
        min_size=1,
        max_size=5,
    ),
)


def of_id(values):
    return lambda id: values[(7 * id.prompt + 3 * id.k) % len(values)]


@settings(max_examples=60)
@cases
def test_batch_is_the_same_whatever_the_timing(
    virtual_executor, seeds, num_instances, decode_steps, k, prompts_per_step, lengths, rewards
):
    seen = []
    for i in range(2):
        executor = virtual_executor(num_instances[i], seeds[i], of_id(lengths), of_id(rewards))
        schedule = make(
            executor, {"k": k}, prompts_per_step=prompts_per_step, decode_steps=decode_steps[i]
        )
        results = [schedule.run_step(step) for step in range(2)]
        schedule.release()
        schedule.release()
        seen.append(([batch(result) for result in results], executor.updates))
        dispatched = [id for _, submit in executor.submits for id in submit.ids]
        expected = [SampleId(p, "", n) for p in range(2 * prompts_per_step) for n in range(k)]
        assert sorted(dispatched) == expected
        assert executor.released == expected
        for result in results:
            used = [sample.id for sample in result.samples]
            assert used == sorted(used)
            assert not set(used) & set(result.dropped)
            assert len(used) + len(result.dropped) == k * prompts_per_step
        assert [name for name, _ in executor.updates] == ["update_actor"] * sum(
            bool(result.samples) for result in results
        )
    assert seen[0] == seen[1]


@pytest.mark.long
@settings(max_examples=40)
@given(
    passing=st.lists(st.booleans(), min_size=1, max_size=9).filter(any),
    seed=st.integers(0, 2**16),
    num_groups=st.integers(1, 5),
    round_prompts=st.integers(1, 5),
)
def test_take_is_by_prompt_order(virtual_executor, passing, seed, num_groups, round_prompts):
    def reward_of(id):
        return float(id.k and passing[id.prompt % len(passing)]), "ok"

    # Later prompts are shorter, so that whoever took what is quick would take the wrong ones.
    executor = virtual_executor(3, seed, lambda id: max(0, 40 - id.prompt), reward_of)
    take = {"num_groups": num_groups, "round_prompts": round_prompts, "max_rounds": 50}
    result = make(executor, {"take": take}).run_step(0)
    first = [p for p in range(1000) if passing[p % len(passing)]][:num_groups]
    assert [s.id for s in result.samples] == [SampleId(p, "", k) for p in first for k in (0, 1)]
    num_pulled = -(-(first[-1] + 1) // round_prompts) * round_prompts
    assert result.metrics["samples/prompts"] == num_pulled
    assert {drop.text for drop in result.dropped.values()} <= {
        "filter: spread",
        f"take: past the first {num_groups} groups of take",
    }
    assert len(result.samples) + len(result.dropped) == 2 * num_pulled


def test_take_gives_up_by_name(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (0.0, "ok"))
    schedule = make(executor, {"take": {"max_rounds": 3}})
    with pytest.raises(ValueError, match=r"take 'take': got 0 groups out of 12 prompts.*wanted 4"):
        schedule.run_step(0)


def test_take_may_go_on_with_fewer(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (float(id.k and id.prompt == 5), "ok"))
    schedule = make(executor, {"take": {"max_rounds": 3, "allow_fewer": True}})
    assert {s.id.prompt for s in schedule.run_step(0).samples} == {5}
    assert schedule.run_step(1).samples == ()


def test_a_group_shares_an_instance_and_prompts_are_dealt_round_robin(virtual_executor):
    executor = virtual_executor(num_instances=3)
    make(executor, {"k": 2}, prompts_per_step=7).run_step(0)
    dealt = {submit.ids[0].prompt: instance for instance, submit in executor.submits}
    assert dealt == {p: p % 3 for p in range(7)}
    assert all(len(submit.ids) == 2 for _, submit in executor.submits)
    assert {s.prompt for _, s in executor.submits if s.ids[0].prompt == 3} == {"prompt 3"}


def test_finishing_order_differs_from_training_order(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (float(id.k), "ok"))
    result = make(executor, {"k": 3}).run_step(0)
    assert executor.finish_order != sorted(executor.finish_order)
    assert [s.id for s in result.samples] == sorted(executor.finish_order)


def test_versions_stand_on_the_spans(virtual_executor):
    executor = virtual_executor(
        length_of=lambda id: 4 * id.k, reward_of=lambda id: (float(id.k), "ok")
    )
    schedule = make(executor, {})
    for version in range(2):
        empty, full = schedule.run_step(version).samples[:2]
        assert empty.spans == ()
        assert full.spans == (TokenSpan(0, 4, version),)


def test_a_step_whose_groups_are_all_dropped_trains_nothing(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (1.0, "ok"))
    schedule = make(executor, {})
    result = schedule.run_step(0)
    schedule.release()
    assert not result.samples
    assert not executor.updates
    assert len(result.dropped) == len(executor.released) == 8


def test_a_schedule_that_miscounts_its_samples_is_caught(virtual_executor):
    schedule = make(virtual_executor(), {})
    schedule._pending_ids = lambda: {SampleId(10_000)}  # never dispatched
    with pytest.raises(AssertionError, match="0 samples were pending and 8 dispatched"):
        schedule.run_step(0)


def test_a_sample_that_the_ledger_loses_is_caught(virtual_executor, monkeypatch):
    settle = Ledger.settle

    def lose_one(self, pending=()):
        self._records.popitem()
        return settle(self, pending)

    monkeypatch.setattr(Ledger, "settle", lose_one)
    schedule = make(virtual_executor(reward_of=lambda id: (1.0, "ok")), {})
    with pytest.raises(AssertionError, match="8 dispatched, but 0 used, 7 dropped, 0 are pending"):
        schedule.run_step(0)


def test_samples_of_a_failed_step_are_counted(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (float(id.k), "ok"))
    schedule, prepare = make(executor, {}), executor.prepare

    def fail(places, phase):
        raise RuntimeError("no memory")

    assert schedule.run_step(0).metrics["samples/step_failed"] == 0
    executor.prepare = fail
    with pytest.raises(RuntimeError, match="no memory"):
        schedule.run_step(1)
    executor.prepare = prepare
    result = schedule.run_step(2)
    assert result.metrics["samples/step_failed"] == 8
    assert (len(result.samples), len(result.dropped)) == (8, 0)


def test_stages_have_spans_in_order(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (float(id.k), "ok"))
    spans = make(executor, {}).run_step(0).spans
    assert [span.name for span in spans] == [
        "to_generate",
        "generate",
        "reward",
        "spread",
        "reference_log_probs",
        "by_group",
        "to_train",
        "update_actor",
    ]
    for before, after in pairwise(spans):
        assert before.start <= before.stop == after.start


def test_prompts_that_end_are_an_error(virtual_executor):
    schedule = make(virtual_executor(), {}, num_prompts=6)
    schedule.run_step(0)
    with pytest.raises(ValueError, match="got 2, wanted 4"):
        schedule.run_step(1)


@pytest.mark.parametrize(
    ("function", "outputs", "message"),
    [
        (lambda rewards: rewards[1:], ("advantage",), "returned 1 values of 'advantage'"),
        (lambda rewards: 3.0, ("advantage",), "returned float values of 'advantage'"),
        (lambda rewards: rewards, ("a", "b"), "returned list, wanted a tuple"),
        (lambda rewards: rewards, (), "has no outputs but returned list"),
    ],
)
def test_what_a_barrier_returns_is_checked(virtual_executor, function, outputs, message):
    flow = Flow()
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2))
    flow.collect(samples.by_group(function, outputs=outputs, name="mine"))
    with pytest.raises(ValueError, match=message):
        make(virtual_executor(), {}, graph=flow.graph).run_step(0)


def test_grouped_by_batch_sees_groups(virtual_executor):
    flow = Flow()
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=3))
    samples = samples.by_batch(
        lambda groups: [[i + 10 * n for i in range(len(group))] for n, group in enumerate(groups)],
        outputs=("place",),
        grouped=True,
    )
    flow.collect(samples)
    result = make(virtual_executor(), {}, graph=flow.graph, prompts_per_step=2).run_step(0)
    assert [s.scalars["place"] for s in result.samples] == [0, 1, 2, 10, 11, 12]


@recipe("three")
def three(flow: Flow, cfg: dict[str, Any]) -> None:
    """Updates of three roles; the actor's begins with the second step."""
    samples = flow.actor.generate(flow.prompts, num_samples=2)
    samples = flow.critic.values(flow.cost_critic.values(samples))
    flow.critic.update(samples, loss=ValuesLoss())
    if "again" in cfg:
        flow.critic.update(samples, loss=ValuesLoss(), name="again")
    flow.cost_critic.update(samples, loss=ValuesLoss(), fields={"values": "cost_values"})
    flow.actor.update(samples, loss=ActorLoss(), after=1)


class ValuesLoss(Loss):
    fields = ("values",)

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


class ActorLoss(ValuesLoss):
    fields = ()


CALLS = {
    (False, False, False): ["critic", "cost_critic", "actor"],
    (True, False, False): ["critic cost_critic actor"],
    (True, True, False): ["critic", "again cost_critic actor"],
    (True, False, True): ["critic cost_critic", "actor"],
}


@pytest.mark.parametrize(("fuses", "again", "split"), CALLS)
def test_adjacent_updates_of_a_pool_are_one_call(virtual_executor, fuses, again, split) -> None:
    pools = {"critic": Scope.POOL, "cost_critic": Scope.POOL} if split else {}
    executor = virtual_executor(scopes=pools)
    executor.fuses_updates = fuses
    schedule = make(executor, {}, graph=three.build({"again": True} if again else {}))
    results = [schedule.run_step(step) for step in (1, 2)]
    names = [
        " ".join(name.removeprefix("update_") for name in call)
        for call in executor.calls_of_updates
    ]
    wanted = CALLS[fuses, again, split]
    first = [call.removesuffix("actor").strip() for call in wanted]
    assert names == [call for call in first if call] + wanted
    # A step has all roles' metrics, and costs as if each update had been alone.
    assert {"actor/loss", "critic/loss", "cost_critic/loss"} <= results[1].metrics.keys()
    assert {span.name for span in results[1].spans} >= {"update_critic", "update_actor"}


@recipe("scores")
def scores(flow: Flow, cfg: dict[str, Any]) -> None:
    """Old log-probabilities, a map and values, with or without what keeps them apart."""
    samples = flow.actor.generate(flow.prompts, num_samples=2)
    samples = flow.reward.score(samples)
    samples = flow.actor.log_probs(samples)
    samples = samples.map(lambda x: x, ("old_log_probs",), ("mapped",), name="mapped")
    if cfg.get("filter"):
        samples = samples.filter(lambda rewards: max(rewards) > min(rewards), name="spread")
    if cfg.get("update"):
        flow.critic.update(samples, loss=ActorLoss())
    if cfg.get("take"):
        samples = samples.take(num_groups=2, round_prompts=2)
    samples = flow.critic.values(samples)
    samples = flow.cost_critic.values(samples)
    flow.actor.update(samples, loss=ActorLoss())


@pytest.mark.parametrize(
    ("cfg", "wanted"),
    [
        ({}, ["old_log_probs values cost_values"]),
        ({"filter": True}, ["values cost_values"]),  # other samples come to them
        ({"take": True}, ["values cost_values"]),
        ({"update": True}, ["values cost_values"]),  # it changes the critic
    ],
)
def test_scores_by_training_shards_share_a_call(virtual_executor, cfg, wanted) -> None:
    """They read the same samples, and what is there already; the batch is that of each alone."""
    batches = []
    for fuses in (True, False):
        executor = virtual_executor(scopes={"actor": Scope.WORLD})
        executor.fuses_scores = fuses
        result = make(executor, {}, graph=scores.build(cfg)).run_step(1)
        calls = [" ".join(call) for call in executor.calls_of_scores]
        assert calls == (wanted if fuses else [])
        names = [span.name for span in result.spans]
        for name in ("old_log_probs", "values", "cost_values"):
            assert names.count(name) == 1
        assert result.samples
        batches.append(batch(result))
    assert batches[0] == batches[1]


def test_scores_in_rounds_share_a_call_each_time(virtual_executor) -> None:
    """A stage that ran with another one runs again in the next round."""
    executor = virtual_executor(scopes={"actor": Scope.WORLD}, reward_of=lambda id: (1.0, "ok"))
    executor.fuses_scores = True
    graph = scores.build({})
    schedule = make(executor, {}, graph=graph)
    for step in (1, 2):
        schedule.run_step(step)
    assert executor.calls_of_scores == [["old_log_probs", "values", "cost_values"]] * 2
