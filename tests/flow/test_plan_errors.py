"""The choice of a plan learns how far the model was off, plan by plan."""

import json

import pytest

from hybridrl.flow.migration import TailPlan, best_plan
from hybridrl.flow.plan_errors import PlanErrors

STAY, EARLY = TailPlan("stay", 1.0), TailPlan("train early", 0.95)


def chosen(errors: PlanErrors) -> str:
    return best_plan(errors.corrected([STAY, EARLY])).name


def test_a_plan_that_looks_better_and_ends_later_is_left() -> None:
    errors, taken = PlanErrors(), []
    truth = {"stay": 1.02, "train early": 1.08}
    for _ in range(40):
        taken.append(chosen(errors))
        errors.saw([STAY, EARLY], taken[-1], truth[taken[-1]])
    assert taken[0] == "train early"
    assert taken[10:].count("train early") <= 4, taken  # tried again, now and then


def test_a_plan_that_is_better_is_kept_whatever_both_take_beyond_the_model() -> None:
    """What every plan takes on top, the switch say, decides nothing."""
    errors, taken = PlanErrors(), []
    truth = {"stay": 1.50, "train early": 1.45}
    for _ in range(20):
        taken.append(chosen(errors))
        errors.saw([STAY, EARLY], taken[-1], truth[taken[-1]])
    assert taken[4:] == ["train early"] * 16, taken


def test_one_bad_step_does_not_decide() -> None:
    errors = PlanErrors()
    for seconds in (0.96, 0.95, 0.96, 1.15):
        errors.saw([STAY, EARLY], "train early", seconds)
    errors.saw([STAY, EARLY], "stay", 1.02)
    assert chosen(errors) == "train early"


def test_a_model_that_says_too_much_favors_no_plan() -> None:
    """Each plan is sooner than it says, `stay` by more, which only its own steps can show."""
    errors, taken = PlanErrors(), []
    truth = {"stay": 0.90, "train early": 0.93}
    for _ in range(40):
        taken.append(chosen(errors))
        errors.saw([STAY, EARLY], taken[-1], truth[taken[-1]])
    assert taken[10:].count("train early") <= 4, taken


def test_the_example_of_the_docstring() -> None:
    errors = PlanErrors()
    errors.saw([STAY, EARLY], "stay", 1.1)
    for _ in range(5):
        errors.saw([STAY, EARLY], "train early", 1.14)
    stay, early = errors.corrected([STAY, EARLY])
    assert stay.seconds == pytest.approx(1.1)
    assert early.seconds == pytest.approx(0.95 + (2 * 0.1 + 5 * 0.19) / 7)
    assert chosen(errors) == "stay"


def test_it_continues_from_a_checkpoint() -> None:
    errors, again = PlanErrors(), PlanErrors()
    for seconds in (1.1, 1.2):
        errors.saw([STAY, EARLY], "train early", seconds)
    again.load_state_dict(json.loads(json.dumps(errors.state_dict())))
    assert again.corrected([STAY, EARLY]) == errors.corrected([STAY, EARLY])
