"""A sample whose judge has failed is as if it had never been sampled, in every recipe."""

from typing import Any

import pytest
import torch

from hybridrl.flow.graph import StageMethod
from hybridrl.flow.judgements import JudgeFailed
from hybridrl.preflight.prepare import build_recipe

JUDGED = [
    "cispo", "clip_cov", "dapo", "dars", "dr_grpo", "gdpo", "gigpo", "gmpo", "grpo", "gspo",
    "kl_cov", "maxrl", "opo", "ppo", "reinforce_pp", "remax", "rloo", "safe_rlhf", "sapo", "ttrl",
    "xrpo",
]  # fmt: skip


def has_failed(id: Any) -> bool:
    """One of the first group, all of the second, all but one of the fourth."""
    return id.prompt == 1 or (id.prompt, id.k) == (0, 1) or (id.prompt == 3 and id.k > 0)


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def trained(bench: Any, recipe: str, value: float) -> list[Any]:
    """What updates have read, where judges that fail leave the score `value`."""
    field = type(bench).field

    def with_value(id: Any, name: str) -> Any:
        scores = ("reward", "true_reward", "cost")
        return value if name in scores and has_failed(id) else field(bench, id, name)

    bench.field = with_value
    bench.stops = {"reward": False, "cost": False}
    bench.status_of = lambda id, name: "error: down" if has_failed(id) else "ok"
    batch = bench.run(recipe)
    return [
        (name, [(id, {field: plain(x) for field, x in read.items()}) for id, read in seen])
        for name, seen in batch.updates
    ]


def test_no_recipe_with_a_judge_is_left_out(recipe_names: set[str]) -> None:
    graphs = {
        name: build_recipe({"target": f"hybridrl.recipes.{name}:{name}"}) for name in recipe_names
    }
    judges = [
        name
        for name, graph in graphs.items()
        if any(stage.method is StageMethod.SCORE for stage in graph.stages.values())
    ]
    assert sorted(judges) == JUDGED


@pytest.mark.parametrize("recipe", JUDGED)
def test_it_is_in_no_statistic_and_not_trained(bench: Any, recipe: str) -> None:
    """Whatever its score would be; a group without any other is no group."""
    best, worst = (trained(bench, recipe, value) for value in (1e6, -1e6))
    assert best == worst
    assert best
    for _, seen in best:
        assert seen
        assert not any(has_failed(id) for id, _ in seen)
        assert {id.prompt for id, _ in seen} <= {0, 2, 3, *range(4, 100)}


def test_the_others_of_its_group_are_compared(bench: Any) -> None:
    """With each other: GRPO's advantages, one of a group of one, none of a group of none."""
    trained(bench, "grpo", 0.0)
    batch = bench.run("grpo", skip_equal_groups=False)
    groups: dict[int, list[Any]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.id.prompt, []).append(sample)
    assert {prompt: len(group) for prompt, group in groups.items()} == {0: 7, 2: 8, 3: 1}
    rewards = torch.tensor([s.scalars["reward"] for s in groups[0]], dtype=torch.float64)
    advantages = [s.scalars["advantage"] for s in groups[0]]
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert advantages == pytest.approx(wanted.tolist())
    assert len(set(advantages)) > 2
    assert groups[3][0].scalars["advantage"] == 0


def test_one_failure_may_end_the_run(bench: Any) -> None:
    bench.status_of = lambda id, name: "timeout: late" if (id.prompt, id.k) == (2, 1) else "ok"
    bench.stops = {"reward": True}
    with pytest.raises(
        JudgeFailed, match=r"^reward\.on_failure=stop: sample 2\.1: reward: timeout: late$"
    ):
        bench.run("grpo")
