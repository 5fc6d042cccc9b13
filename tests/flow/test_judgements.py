"""Where samples leave whose judge has failed, and how many of them a run bears."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import PackedScheduleConfig, PartialScheduleConfig
from hybridrl.config.loss import Loss
from hybridrl.flow import Flow
from hybridrl.flow.barriers import run_barrier
from hybridrl.flow.executor import Sampling
from hybridrl.flow.graph import Graph
from hybridrl.flow.judgements import JudgeFailed, check_failed_share, leaving_failed
from hybridrl.flow.ledger import DropReason, Ledger, SampleStatus
from hybridrl.flow.lengths import PromptKey
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.build import ScheduleParts, build


class ToyLoss(Loss):
    fields = ("advantages",)

    def __call__(self, log_probs: Any, entropy: Any, fields: Any) -> Any:
        raise AssertionError("only what it reads matters here")


def grpo() -> Graph:
    flow = Flow()
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = flow.reference.log_probs(samples)
    samples = samples.by_group(lambda rewards: [x - max(rewards) for x in rewards], name="compare")
    flow.actor.update(samples, loss=ToyLoss())
    return flow.graph


def test_samples_leave_behind_the_forward_passes() -> None:
    """So that none waits for a judge; later stages follow, each once."""
    graph = leaving_failed(grpo(), {"reward": False})
    before = "reference_log_probs"
    assert list(graph.stages) == [
        "prompts", "generate", "reward", before, f"{before}_judged", "compare", "update_actor",
    ]  # fmt: skip
    assert graph.stages[before].upstream == ("reward",)
    assert graph.stages["compare"].upstream == (f"{before}_judged",)
    assert graph.stages["update_actor"].upstream == ("compare",)
    assert list(leaving_failed(grpo(), {}).stages) == list(grpo().stages)


def failing(id: SampleId) -> tuple[float, str]:
    """All samples of every fourth prompt, and one of every other one."""
    fails = id.prompt % 4 == 1 or (id.prompt % 4 == 2 and id.k == 3)
    return (1e6, "error: down") if fails else (float(id.k), "ok")


@pytest.mark.parametrize("kind", ["partial", "packed"])
def test_schedules_that_keep_samples_leave_them_out(virtual_executor: Any, kind: str) -> None:
    """`fused` is held to the batches of `serial` by `test_fused.py`."""
    executor = virtual_executor(2, reward_of=failing)
    parts = ScheduleParts(
        graph=leaving_failed(grpo(), {"reward": False}),
        executor=executor,
        prompts=((i, i) for i in range(100)),
        settings=StepSettings(
            sampling=Sampling(max_new_tokens=20), decode_steps=4, prompts_per_step=6
        ),
        max_held=50,
        chunk_tokens=50,
        key_of=lambda prompt: PromptKey(str(prompt), "task", (1, 2, 3)),
        num_steps=4,
    )
    partial, packed = (
        PartialScheduleConfig(over_provision=1.5),
        PackedScheduleConfig(max_wait_steps=3),
    )
    schedule = build(parts, partial if kind == "partial" else packed)
    dropped = 0
    for step in range(4):
        result = schedule.run_step(step)
        assert all(failing(sample.id)[1] == "ok" for sample in result.samples)
        assert all(sample.scalars["advantage"] <= 0 for sample in result.samples)
        assert {drop.reason for drop in result.dropped.values()} <= {DropReason.JUDGE}
        assert {drop.text for drop in result.dropped.values()} <= {"reward: error: down"}
        dropped += len(result.dropped)
    assert dropped > 4
    assert len(executor.updates) == 4


def test_a_pair_leaves_whole() -> None:
    flow = Flow()
    pairs = flow.actor.generate(flow.prompts, name="a").pair(flow.actor.generate(flow.prompts))
    flow.collect(flow.reward.score(pairs))
    graph = leaving_failed(flow.graph, {"reward": False})
    samples = [Sample(id=SampleId(p, branch)) for p in range(2) for branch in ("a", "")]
    ledger = Ledger()
    ledger.dispatch(samples, SampleStatus.FINISHED)
    for sample in samples:
        sample.scalars |= {"reward": 0.0, "reward_status": "ok"}
    samples[1].scalars["reward_status"] = "timeout: late"
    assert run_barrier(graph.stages["reward_judged"], samples, [], ledger) == samples[2:]
    assert {drop.reason for drop in ledger.settle()[1].values()} == {
        DropReason.JUDGE, DropReason.UNUSED
    }  # fmt: skip


def test_a_partner_of_a_whole_group_is_the_only_one_shared() -> None:
    """One of two partners has failed: the other one serves its own k alone."""
    flow = Flow()
    others = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2, name="others"))
    samples = flow.actor.generate(flow.prompts, num_samples=2).join(others, "other_")
    flow.collect(samples)
    mine = [Sample(id=SampleId(0, k=k)) for k in range(2)]
    theirs = [Sample(id=SampleId(0, "others", 1), scalars={"reward": 3.0, "reward_status": "ok"})]
    theirs[0].scalars["finish"] = "stop"
    ledger = Ledger()
    ledger.dispatch([*mine, *theirs], SampleStatus.FINISHED)
    assert run_barrier(flow.graph.stages["join_other"], mine, theirs, ledger) == [mine[1]]
    assert mine[1].scalars["other_reward"] == 3.0


def test_too_many_end_the_run() -> None:
    graph = leaving_failed(grpo(), {"reward": False})

    def judged(*statuses: str) -> list[Any]:
        return [
            SimpleNamespace(scalars={"reward": 0.0, "reward_status": status}) for status in statuses
        ] + [SimpleNamespace(scalars={})]

    check_failed_share(graph, judged("ok", "error: a"), {"reward": 0.5}, "the step")
    message = (
        r"^reward has judged 2 of 3 responses of the step in vain"
        r" \(reward\.max_failed_share=0\.5\); the first: reward: error: a$"
    )
    with pytest.raises(JudgeFailed, match=message):
        check_failed_share(graph, judged("ok", "error: a", "timeout"), {"reward": 0.5}, "the step")
    check_failed_share(grpo(), judged("error: a"), {"reward": 0.5}, "the step")
