"""Toy versions of the field's algorithms: the operations suffice, the serial schedule runs them.

Advantages are compared with their formula on the very rewards, not only with themselves.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, Graph, recipe
from hybridrl.flow.executor import Phase, Sampling
from hybridrl.flow.graph import UpdateStage
from hybridrl.schedule import StepResult
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.serial import SerialSchedule


@dataclass(frozen=True)
class ToyLoss(Loss):
    """Stands for a loss: only what it reads matters here."""

    fields: tuple[str, ...] = ()

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


def centered(rewards):
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def make(graph: Graph, executor, prompts_per_step: int = 4) -> SerialSchedule:
    prompts = ((i, f"prompt {i}") for i in range(1000))
    return SerialSchedule(
        graph,
        executor,
        prompts,
        StepSettings(
            sampling=Sampling(max_new_tokens=20), decode_steps=6, prompts_per_step=prompts_per_step
        ),
    )


def run(graph: Graph, executor, prompts_per_step: int = 4) -> StepResult:
    schedule = make(graph, executor, prompts_per_step)
    result = schedule.run_step(0)
    assert not executor.released, "the step's samples can be looked at before they are released"
    schedule.release()
    used = {sample.id for sample in result.samples}
    assert not used & set(result.dropped)
    assert sorted(used | set(result.dropped)) == sorted(executor.released)
    assert len(executor.released) == len(set(executor.released))
    return result


@recipe("grpo")
def grpo(flow: Flow, cfg: Any) -> None:
    samples = flow.actor.generate(flow.prompts, num_samples=4)
    samples = flow.reward.score(samples)
    samples = flow.reference.log_probs(samples)
    samples = samples.by_group(centered)
    flow.actor.update(
        samples, loss=ToyLoss(("advantages", "old_log_probs", "reference_log_probs")), epochs=2
    )


def test_grpo(virtual_executor):
    executor = virtual_executor()
    result = run(grpo.build(None), executor)
    assert [s.id.prompt for s in result.samples] == [p for p in range(4) for _ in range(4)]
    assert executor.entered == [Phase.GENERATE, Phase.TRAIN]
    for prompt in range(4):
        group = [s for s in result.samples if s.id.prompt == prompt]
        rewards = [executor.reward_of(s.id)[0] for s in group]
        assert [s.scalars["advantage"] for s in group] == centered(rewards)
    [(name, seen)] = executor.updates
    assert name == "update_actor"
    assert all(
        set(fields) == {"tokens", "advantage", "log_probs", "reference_log_probs"}
        for _, fields in seen
    )
    assert result.metrics["actor/num_samples"] == 16
    assert not result.dropped


def token_rewards(log_probs, reference_log_probs, reward, kl_coef):
    rewards = [-kl_coef * (p - q) for p, q in zip(log_probs, reference_log_probs, strict=True)]
    if rewards:
        rewards[-1] += reward
    return rewards


def gae(rewards, values, gamma=1.0, lam=0.95):
    """Generalised advantage estimation, and the sums that whitening over the batch needs."""
    advantages, last = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        last = rewards[t] + gamma * following - values[t] + gamma * lam * last
        advantages[t] = last
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return advantages, returns, len(advantages), sum(advantages), sum(a * a for a in advantages)


def moments(num, total, squares):
    count = sum(num)
    mean = sum(total) / count
    std = (sum(squares) / count - mean**2) ** 0.5
    return [mean] * len(num), [std] * len(num)


def whiten(advantages, mean, std):
    return [(a - mean) / (std + 1e-8) for a in advantages]


@recipe("ppo")
def ppo(flow: Flow, cfg: Any) -> None:
    samples = flow.actor.generate(flow.prompts)
    samples = flow.reward.score(samples)
    samples = flow.actor.log_probs(samples)
    samples = flow.reference.log_probs(samples)
    samples = flow.critic.values(samples)
    samples = samples.map(
        partial(token_rewards, kl_coef=0.1),
        inputs=("old_log_probs", "reference_log_probs", "reward"),
        outputs=("token_rewards",),
    )
    samples = samples.map(
        gae,
        inputs=("token_rewards", "values"),
        outputs=("raw_advantages", "returns"),
        scalars=("num", "sum", "squares"),
    )
    samples = samples.by_batch(moments, inputs=("num", "sum", "squares"), outputs=("mean", "std"))
    samples = samples.map(whiten, inputs=("raw_advantages", "mean", "std"), outputs=("advantages",))
    flow.critic.update(samples, loss=ToyLoss(("returns", "values")), mini_batches=2)
    flow.actor.update(samples, loss=ToyLoss(("advantages", "old_log_probs")), mini_batches=2)


def test_ppo_whitens_tokens_over_the_batch(virtual_executor):
    executor = virtual_executor(num_instances=3)
    result = run(ppo.build(None), executor, prompts_per_step=8)
    assert [name for name, _ in executor.updates] == ["update_critic", "update_actor"]
    assert len(result.samples) == 8
    advantages = [a for _, f in executor.updates[1][1] for a in f["advantages"]]
    assert statistics.fmean(advantages) == pytest.approx(0, abs=1e-6)
    assert statistics.pstdev(advantages) == pytest.approx(1, abs=1e-6)


@recipe("warm_critic")
def warm_critic(flow: Flow, cfg: Any) -> None:
    samples = flow.critic.values(flow.reward.score(flow.actor.generate(flow.prompts)))
    flow.critic.update(samples, loss=ToyLoss(("rewards", "values")))
    flow.actor.update(samples, loss=ToyLoss(("rewards", "old_log_probs")), after=cfg)


def test_an_update_is_left_out_of_the_first_steps(virtual_executor):
    executor = virtual_executor()
    schedule = make(warm_critic.build(2), executor)
    results = [schedule.run_step(step) for step in (11, 12, 13)]
    assert [name for name, _ in executor.updates] == ["update_critic"] * 3 + ["update_actor"]
    assert [sorted({k.partition("/")[0] for k in r.metrics}) for r in results] == [
        ["critic", "samples"], ["critic", "samples"], ["actor", "critic", "samples"]
    ]  # fmt: skip
    assert all(len(r.samples) == 4 and not r.dropped for r in results)
    with pytest.raises(ValueError, match="'update_actor': got after=-1, wanted 0 or more"):
        warm_critic.build(-1)


@recipe("remax")
def remax(flow: Flow, cfg: Any) -> None:
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2))
    greedy = flow.reward.score(flow.actor.generate(flow.prompts, greedy=True, name="greedy"))
    samples = samples.join(greedy, prefix="greedy_")
    samples = samples.by_group(
        lambda rewards, baselines: [r - b for r, b in zip(rewards, baselines, strict=True)],
        inputs=("reward", "greedy_reward"),
    )
    flow.actor.update(samples, loss=ToyLoss(("advantages", "old_log_probs")))


def test_remax(virtual_executor):
    executor = virtual_executor()
    result = run(remax.build(None), executor)
    assert executor.entered == [Phase.GENERATE, Phase.TRAIN]
    temperatures = {s.ids[0].branch: s.sampling.temperature for _, s in executor.submits}
    assert temperatures == {"": 1.0, "greedy": 0.0}
    assert {id.branch for id in result.dropped} == {"greedy"}
    assert {drop.text for drop in result.dropped.values()} == {
        "join: only its scalars go into join_greedy"
    }
    by_prompt = {id.prompt: executor.reward_of(id)[0] for id in result.dropped}
    for sample in result.samples:
        reward = executor.reward_of(sample.id)[0]
        assert sample.scalars["advantage"] == reward - by_prompt[sample.id.prompt]


def has_spread(rewards):
    return max(rewards) > min(rewards)


@recipe("dapo")
def dapo(flow: Flow, cfg: Any) -> None:
    samples = flow.actor.generate(flow.prompts, num_samples=3)
    samples = flow.reward.score(samples)
    samples = samples.filter(has_spread).take(max_rounds=20)
    samples = samples.by_group(centered)
    flow.actor.update(samples, loss=ToyLoss(("advantages", "old_log_probs")))


def test_dapo_takes_the_first_groups_that_pass(virtual_executor):
    executor = virtual_executor(
        reward_of=lambda id: (float(id.k == 0 and id.prompt % 3 == 1), "ok")
    )
    result = run(dapo.build(None), executor)
    assert sorted({s.id.prompt for s in result.samples}) == [1, 4, 7, 10]
    assert result.metrics["samples/prompts"] == 12
    assert {drop.text for drop in result.dropped.values()} == {"filter: has_spread"}


@recipe("more_of_the_hard")
def more_of_the_hard(flow: Flow, cfg: Any) -> None:
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2))
    samples = samples.by_group(lambda rewards: [3 * (sum(rewards) == 0)] * 2, outputs=("count",))
    more = flow.reward.score(flow.actor.generate_more(samples, "count"))
    samples = samples.merge(more).by_group(centered)
    flow.actor.update(samples, loss=ToyLoss(("advantages", "old_log_probs")))


def test_more_samples_of_some_prompts_join_their_group(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (float(id.prompt % 2), "ok"))
    result = run(more_of_the_hard.build(None), executor)
    ids = [(s.id.prompt, s.id.branch, s.id.k) for s in result.samples]
    first = [(p, "", k) for p in range(4) for k in (0, 1)]
    more = [(p, "more", k) for p in (0, 2) for k in (0, 1, 2)]
    assert ids == sorted(first + more)
    assert {executor.prompts[s.id] for s in result.samples if s.id.branch} == {
        "prompt 0",
        "prompt 2",
    }
    executor = virtual_executor(reward_of=lambda id: (1.0, "ok"))
    assert len(run(more_of_the_hard.build(None), executor).samples) == 8


@pytest.mark.parametrize("count", [-1, 0.5])
def test_a_count_that_is_no_number_of_samples_is_told(virtual_executor, count):
    flow = Flow()
    samples = flow.reward.score(flow.actor.generate(flow.prompts))
    samples = samples.by_group(lambda rewards: [count], outputs=("count",))
    flow.collect(flow.actor.generate_more(samples, "count"))
    with pytest.raises(
        ValueError, match=f"'more': got count={float(count)}, wanted a whole number"
    ):
        run(flow.graph, virtual_executor())


def test_what_merge_and_generate_more_cannot_take():
    flow = Flow()
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2))
    with pytest.raises(ValueError, match="'more' wants the scalar 'count'"):
        flow.actor.generate_more(samples, "count")
    more = flow.actor.generate_more(samples, "reward")
    with pytest.raises(ValueError, match="got 2 and differing numbers of samples a prompt"):
        samples.pair(more)
    with pytest.raises(
        ValueError, match="got differing numbers of samples a prompt, wanted 1 or 2"
    ):
        samples.join(more, "more_")
    with pytest.raises(ValueError, match="joins a stream with itself"):
        samples.merge(samples)


@recipe("dpo")
def dpo(flow: Flow, cfg: Any) -> None:
    pairs = flow.targets("chosen").pair(flow.targets("rejected"))
    pairs = flow.reference.log_probs(pairs)
    flow.actor.update(pairs, loss=ToyLoss(("reference_log_probs",)))


@recipe("online_dpo")
def online_dpo(flow: Flow, cfg: Any) -> None:
    one = flow.reward.score(flow.actor.generate(flow.prompts, name="one"))
    two = flow.reward.score(flow.actor.generate(flow.prompts, name="two"))
    pairs = one.pair(two, sides=("one", "two")).filter(has_spread)
    pairs = pairs.by_group(lambda rewards: [float(r == max(rewards)) for r in rewards])
    pairs = flow.reference.log_probs(pairs)
    flow.actor.update(pairs, loss=ToyLoss(("reference_log_probs", "advantages")))


@recipe("rm")
def rm(flow: Flow, cfg: Any) -> None:
    pairs = flow.targets("chosen").pair(flow.targets("rejected"))
    flow.reward.update(pairs, loss=ToyLoss())


@pytest.mark.parametrize("pairwise", [dpo, rm])
def test_pairs_stay_together(virtual_executor, pairwise):
    executor = virtual_executor()
    graph = pairwise.build(None)
    result = run(graph, executor)
    sides = [(s.id.prompt, s.scalars["side"], s.id.branch) for s in result.samples]
    assert sides == [(p, side, side) for p in range(4) for side in ("chosen", "rejected")]
    [update] = [s for s in graph.stages.values() if isinstance(s, UpdateStage)]
    assert update.samples_per_row == 2
    assert Phase.GENERATE not in executor.entered


def test_online_dpo_drops_ties(virtual_executor):
    executor = virtual_executor()
    result = run(online_dpo.build(None), executor, prompts_per_step=8)
    assert 0 < len(result.samples) < 16
    for one, two in zip(result.samples[::2], result.samples[1::2], strict=True):
        assert one.id.prompt == two.id.prompt
        assert {one.scalars["advantage"], two.scalars["advantage"]} == {0.0, 1.0}


@recipe("sft")
def sft(flow: Flow, cfg: Any) -> None:
    flow.actor.update(flow.answers, loss=ToyLoss())


def test_sft(virtual_executor):
    executor = virtual_executor()
    result = run(sft.build(None), executor)
    assert executor.entered == [Phase.TRAIN]
    assert [s.rank for s in result.samples] == [0, 1, 0, 1]
    assert executor.prompts[result.samples[2].id] == "prompt 2"


@recipe("safe_rlhf")
def safe_rlhf(flow: Flow, cfg: Any) -> None:
    multiplier = flow.state("multiplier", 1.0)

    def dual_step(costs: list[float]) -> None:
        multiplier.set(max(0.0, multiplier.get() + 0.1 * statistics.fmean(costs)))

    def lagrangian(rewards: list[float], costs: list[float]) -> list[float]:
        weight = multiplier.get()
        return [
            (r - weight * c) / (1 + weight)
            for r, c in zip(centered(rewards), centered(costs), strict=True)
        ]

    samples = flow.actor.generate(flow.prompts, num_samples=2)
    samples = flow.reward.score(samples, name="helpful")
    samples = flow.cost.score(samples)
    samples = samples.by_batch(dual_step, inputs=("cost",), outputs=())
    samples = samples.by_group(lagrangian, inputs=("helpful", "cost"))
    flow.actor.update(samples, loss=ToyLoss(("advantages", "old_log_probs")))


def test_safe_rlhf_state_moves_and_is_checkpointed(virtual_executor):
    executor = virtual_executor(reward_of=lambda id: (2.0, "ok"))
    graph = safe_rlhf.build(None)
    result = run(graph, executor)
    assert graph.state_dict() == {"multiplier": pytest.approx(1.2)}
    assert result.metrics["state/multiplier"] == pytest.approx(1.2)
    resumed = safe_rlhf.build(None)
    resumed.load_state_dict(graph.state_dict())
    assert run(resumed, virtual_executor(reward_of=lambda id: (2.0, "ok"))).metrics[
        "state/multiplier"
    ] == pytest.approx(1.4)


@recipe("distill")
def distill(flow: Flow, cfg: Any) -> None:
    samples = flow.actor.generate(flow.prompts)
    samples = flow.teacher.log_probs(samples)
    slow = flow.copy(flow.actor, update="ewma", decay=0.9, name="slow")
    samples = slow.log_probs(samples)
    flow.actor.update(samples, loss=ToyLoss(("teacher_log_probs", "slow_log_probs")))


def test_distill_with_a_weight_copy(virtual_executor):
    graph = distill.build(None)
    result = run(graph, virtual_executor())
    assert graph.copies["slow"].of == "actor"
    assert graph.roles == ("actor", "teacher", "slow")
    assert {"slow_log_probs", "teacher_log_probs"} <= result.samples[0].tensors


@recipe("evaluate")
def evaluate(flow: Flow, cfg: Any) -> None:
    flow.collect(flow.reward.score(flow.actor.generate(flow.prompts, greedy=True, name="eval")))


def test_evaluation_collects_without_training(virtual_executor):
    executor = virtual_executor()
    result = run(evaluate.build(None), executor)
    assert len(result.samples) == 4
    assert not executor.updates
    assert all(s.id.branch == "eval" for s in result.samples)
