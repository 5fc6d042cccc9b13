"""How far steps were from what the model of the tail had said, by plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.flow.migration import TailPlan

_MOST = 8.0  # steps that count of a plan
_DOUBT = 2.0  # steps of the plainest plan's error that a plan begins with
_FADES = 0.95  # of what is known of a plan, at each step with another: it is tried again
_TRIAL = 0.05  # of its seconds: the plainest plan is taken once where others win less than this
_ANY = "any plan"  # in a checkpoint, beside the plans


@dataclass(slots=True)
class _Error:
    """The mean over so many steps, as a share of the plainest plan's seconds."""

    share: float = 0.0
    steps: float = 0.0

    def saw(self, share: float) -> None:
        """One more step."""
        self.steps = min(_MOST, self.steps + 1)
        self.share += (share - self.share) / self.steps


class PlanErrors:
    """Seconds of steps beyond those predicted, by the name of their plan.

    A model leaves things out: two ranks on one memory bus, smaller micro-batches, what a plan's
    calls cost beside decoding. They are not the same for all plans, so one that looks a few
    hundredths sooner may end later. To each plan's seconds is added what its steps have shown,
    where that is more than with the plainest plan. That one is taken once, where little is lost by
    it: of plans that are never compared, each has the same error. So a plan is never favored. One
    bad step says little, and what is known of a plan fades while others are taken. So a plan that
    once looked bad is tried again.

    *Example.* `stay` is predicted at 1.00 s and took 1.10, `train early` at 0.95. Five steps of it
    took 1.14. Its error is (2 x 0.10 + 5 x 0.19) / 7 = 0.16, so `stay` is taken: 1.10 is less than
    0.95 + 0.16.
    """

    def __init__(self) -> None:
        self._errors: dict[str, _Error] = {}
        self._any = _Error()  # of all plans' steps

    def saw(self, plans: Sequence[TailPlan], name: str, measured_s: float) -> None:
        """A step with the plan of this name took so long.

        The `plans` are for its own lengths. The first is the plainest.
        """
        predicted_s = {plan.name: plan.seconds for plan in plans}.get(name)
        if predicted_s is None or plans[0].seconds <= 0:
            return
        for other, error in self._errors.items():
            if other != name:
                error.steps *= _FADES
        beyond = (measured_s - predicted_s) / plans[0].seconds
        self._any.saw(beyond)
        self._errors.setdefault(name, _Error()).saw(beyond)

    def corrected(self, plans: Sequence[TailPlan]) -> list[TailPlan]:
        """The plans, of which the first is the plainest, with the seconds to be expected."""
        own = self._errors.get(plans[0].name)
        # Not taken yet, it has the benefit: a model that says too much says it of this plan, too.
        plainest = min(0.0, self._any.share) if own is None else own.share
        corrected = []
        for plan in plans:
            share = plainest
            if plan is plans[0] and own is None and self._any.steps >= _DOUBT:
                share -= _TRIAL
            elif plan is not plans[0] and (error := self._errors.get(plan.name)) is not None:
                beyond = (_DOUBT * plainest + error.steps * error.share) / (_DOUBT + error.steps)
                share = max(share, beyond)
            corrected.append(plan._replace(seconds=plan.seconds + share * plans[0].seconds))
        return corrected

    def state_dict(self) -> dict[str, list[float]]:
        """What is known, in plain JSON types."""
        known = self._errors | {_ANY: self._any}
        return {name: [error.share, error.steps] for name, error in known.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a `state_dict`; an older one knows plans alone."""
        known = {name: _Error(share, steps) for name, (share, steps) in state.items()}
        self._any = known.pop(_ANY, _Error())
        self._errors = known
