"""`make bench-async`: its bounds by hand, and a tiny case under the real driver."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

from hybridrl.config import (
    AsyncScheduleConfig,
    FusedScheduleConfig,
    PartialScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.costs.instance import Costs
from hybridrl.costs.push import PushCosts
from hybridrl.flow.conversations import ConversationModel
from hybridrl.flow.workload import Group, Shape, Workload, read_workload
from hybridrl.plan.schedule import Setting


def load(name: str) -> ModuleType:
    return load_script(f"bench/{name}.py")


def test_the_bounds_by_hand() -> None:
    """A decode step of 1 s, training of 0.5 s a token, a switch of 1 s; decoding takes 3 s.

    The second step counts, with prompts of a token, and responses of 10 and 2, 4 and 4 tokens:
    T is 12 s, A 10 s, and g 7 s of the long one's group.
    """
    bounds = load("separate_bounds")
    costs = Costs(step_s=1.0, train_token_s=0.5, switch_s=1.0)
    groups = [Group(1, (50, 50))] * 2 + [Group(1, (10, 2)), Group(1, (4, 4)), Group(1, (99, 99))]
    workload = Workload(groups=tuple(groups), prompts_per_step=2, num_steps=2)
    shared = Setting(costs=costs, num_instances=2, workload=workload, group_size=2)
    apart = replace(shared, apart=PushCosts(push_s=0.5, load_s=0.25))

    def seconds(setting: Setting, config: object, decode_s: float = 3.0) -> tuple[float, str]:
        bound = bounds.bound(setting, config, decode_s, 1)
        return bound.seconds, bound.by

    assert seconds(shared, SerialScheduleConfig()) == (10 + 12 + 1, "A+T")
    assert seconds(shared, SerialScheduleConfig(), 11.0) == (11 + 12 + 1, "G+T")
    assert seconds(shared, FusedScheduleConfig()) == (10 + 7 + 1, "A+g")
    assert seconds(shared, FusedScheduleConfig(), 6.0) == (6 + 12 + 1, "G+T")
    assert seconds(shared, PartialScheduleConfig()) == (10 / 2 + 12 + 1, "A/2+T")
    assert seconds(apart, AsyncScheduleConfig(max_staleness=0)) == (17.75, "A+g+push+load")
    assert seconds(apart, AsyncScheduleConfig(max_staleness=1)) == (12.0, "T")
    assert seconds(apart, AsyncScheduleConfig(max_staleness=1), 13.0) == (13.0, "G")
    quick = replace(apart, costs=replace(costs, train_token_s=0.0))
    assert seconds(quick, AsyncScheduleConfig(max_staleness=2)) == (10 / 3, "A/3")


def test_a_conversation_alone_has_its_waits() -> None:
    """Four tokens in two turns, whose waits do not vary: 4 s of decoding, and twice 20 s."""
    bounds = load("separate_bounds")
    workload = Workload(groups=(Group(1, (4,)),), prompts_per_step=1, num_steps=1)
    waits = ConversationModel(turns=2, reply_tokens=1, wait_s=20.0, wait_sigma=0.0)
    setting = Setting(
        costs=Costs(step_s=1.0), num_instances=1, workload=workload, group_size=1,
        conversations=waits, apart=PushCosts(),
    )  # fmt: skip
    bound = bounds.bound(setting, AsyncScheduleConfig(max_staleness=3), 1.0, 0)
    assert bound.terms["A"] == pytest.approx(44.0)
    assert (bound.seconds, bound.by) == (pytest.approx(11.0), "A/4")


def test_one_group_in_a_hundred_is_longer(tmp_path: Path) -> None:
    cases = load("separate_cases")
    case = next(case for case in cases.CASES if case.rare)
    case.settings(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "lengths.jsonl").read_text().splitlines()]
    lengths = [n for row in rows for n in row["lengths"]]
    groups = [lengths[k : k + case.group] for k in range(0, len(lengths), case.group)]
    longer = [number for number, group in enumerate(groups) if max(group) > 1024]
    assert longer == [*range(cases.RARE // 2, len(groups), cases.RARE)]
    assert max(lengths) <= case.limit
    shape = Shape(prompts_per_step=case.prompts, group_size=case.group, num_steps=1)
    (first, *_) = read_workload(case.lengths, shape).groups
    assert groups[0] == list(first.lengths)


def test_an_order_counts_where_plans_differ() -> None:
    bench = load("separate_ranks")
    rows = {
        "serial": bench.Row(0, 10.0, 10.0, None),
        "early": bench.Row(0, 10.1, 9.9, None),  # its plan is within two percent
        "periodic": bench.Row(4, 9.0, 12.0, None),
    }
    turned = bench.order(rows)
    assert turned["planned_order"] == ["early", "serial", "periodic"]
    assert turned["emulated_order"] == ["periodic", "serial", "early"]
    assert (turned["as_planned"], turned["turned"]) == (
        False, ["early, periodic", "serial, periodic"],
    )  # fmt: skip
    assert bench.order({side: rows[side] for side in ("serial", "early")})["as_planned"]


@pytest.mark.layouts
def test_a_tiny_case(capsys, tmp_path: Path) -> None:
    """Runs on ranks without a model, without Ray; each side has a plan, a bound and a split."""
    bench, cases = load("separate_ranks"), load("separate_cases")
    (case, *_) = cases.CASES
    case = replace(
        case, ranks=12, prompts=4, group=2, limit=64, steps=2, wall_s=0.05, splits=(1, 2),
        lengths=cases.long_tailed(64, 0.5),
    )  # fmt: skip
    bench.compare(case, tmp_path, planned=False)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_side = {line["name"].removeprefix(f"async_{case.name}_"): line for line in lines}
    assert {*cases.SIDES, "order"} == set(by_side)
    for side in cases.SIDES:
        line = by_side[side]
        assert line["emulated"] is True
        assert (line["generate_ranks"] in (4, 8)) == (side in cases.SEPARATE)
        assert line["planned_s"] >= line["bound_s"] * 0.99
        if side in ("serial", "early", "periodic"):  # their steps do not overlap
            # Modeled seconds are slept, so it is never sooner.
            assert line["step_over_planned"] > 0.9
