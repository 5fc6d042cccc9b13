"""`make bench-tail`: its bounds by hand, a tiny case, the slices of its timeline."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

from hybridrl.costs.instance import Costs
from hybridrl.flow.workload import Group


def load(name: str) -> ModuleType:
    return load_script(f"bench/{name}.py")


def test_the_bounds_by_hand() -> None:
    """Two instances; a decode step of 1 s, a pass 0.1 s a token, training 0.5 s a token.

    A step has two prompts of a token, and responses of 10 and 2, 4 and 4 tokens.
    """
    tail = load("tail_bounds")
    costs = Costs(step_s=1.0, token_s={"reference": 0.1}, train_token_s=0.5, switch_s=1.0)
    machine = tail.Machine(
        costs=costs, instances=2, max_held=4, wide_step_s=0.5, pass_tokens=tail.pass_tokens(2, 0.5)
    )
    long, middle = Group(1, (10, 2)), Group(1, (4, 4))
    sides = ("serial", "fused", "early", "wide", "early_wide", "early_speculate", "all")
    first = tail.bounds([[long, middle]], machine, 1, sides)
    # 24 tokens: 1.2 s of passes on two instances, 12 s of training, 1 s of the switch. Alone: 10 s.
    assert first["serial"] == pytest.approx(10 + 1.2 + 12 + 1)
    # The long one's group has 14 tokens: passes of 0.7 s, training of 7 s.
    assert first["fused"] == pytest.approx(10 + 0.7 + 12 + 1)
    assert first["early"] == pytest.approx(10 + 0.7 + 7 + 1)
    assert first["wide"] == pytest.approx(5 + 0.7 + 12 + 1)
    # All work is 20 tokens in batches of four on two instances, 2.5 s, and 13.2 s: more than what
    # is left of the long one on a wide instance, 5 + 7.7 s, or with guesses, 10 / 1.75 + 7.7 s.
    for side in ("early_wide", "early_speculate", "all"):
        assert first[side] == pytest.approx(2.5 + 13.2 + 1)
    short, shorter = Group(1, (3, 3)), Group(1, (2, 2))
    both = tail.bounds([[long, short], [middle, shorter]], machine, 2, ("serial", "packed"))
    # In the order of their longest, the steps end after 3 and 10 tokens instead of 10 and 4.
    rest = (0.1 / 2 + 0.5) * (24 + 14) / 2 + 1
    assert both["serial"] == pytest.approx((10 + 4) / 2 + rest)
    assert both["packed"] == pytest.approx((3 + 10) / 2 + rest)
    assert tail.pass_tokens(4, 0.6) == pytest.approx(2.31, abs=5e-3)


@pytest.mark.layouts
def test_a_tiny_case(capsys, tmp_path: Path) -> None:
    """Runs on ranks without a model, without Ray; the planner predicts all of them."""
    tail, cases = load("tail"), load("tail_cases")
    (case, *_) = cases.CASES
    case = replace(
        case, ranks=8, instance=4, prompts=4, group=2, limit=64, cycles=1, wall_s=0.05,
        sides={"reference_and_reward_model": ("serial", "fused", "all")},
        lengths=cases.long_tailed(64, 0.5),
    )  # fmt: skip
    tail.compare(case, "reference_and_reward_model", tmp_path, planned=False)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_side = {line["name"].rpartition("model_")[2]: line for line in lines}
    assert {"serial", "fused", "all", "bounds", "took"} == set(by_side)
    assert by_side["serial"]["serial_over_step"] == 1.0
    for side in ("serial", "fused", "all"):
        line = by_side[side]
        assert line["emulated"] is True
        assert line["planned_s"] >= by_side["bounds"]["at_least_s"][side] * 0.99
        assert line["step_over_planned"] > 0.9  # modeled seconds are slept, so it is never sooner


@pytest.mark.long
def test_published_shares_are_those_of_a_serial_step(tmp_path: Path) -> None:
    tail, cases = load("tail"), load("tail_cases")
    case = replace(
        cases.PICTURE, prompts=4, limit=256, cycles=1, lengths=cases.long_tailed(256, 0.5)
    )
    runs = tail.CaseRuns(case, "reference", tmp_path, wall_s=1.0)
    setting = runs.planned("serial")
    whole = runs.planned_s("serial") * runs.scale
    bare = replace(setting, costs=replace(setting.costs, token_s={}, train_token_s=0.0))
    generated = tail.replay(bare, tail.SerialScheduleConfig(), cases.CYCLE).step_s
    assert generated / whole == pytest.approx(case.published_shares[0], abs=0.01)


def test_neighbors_of_one_name_are_one_slice() -> None:
    joined = load("tail_timeline").joined
    slices = [
        (0, 5, "generate"),
        (6, 9, "generate"),
        (30, 40, "verify 5/8"),
        (41, 50, "verify 1/8"),
    ]
    assert joined(slices, gap=2) == [(0, 9, "generate"), (30, 50, "verify")]
    assert len(joined(slices, gap=0)) == 4
    wide = [(0, 5, "wide decode"), (5, 9, "wide verify 3/8")]
    assert joined(wide, gap=0) == [(0, 9, "wide decode")]
