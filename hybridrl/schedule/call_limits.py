"""How long the next call of an instance may be."""

from hybridrl.costs.meter import CostMeter
from hybridrl.flow.executor import ENOUGH_TURNS
from hybridrl.flow.turns import enough_turns
from hybridrl.schedule.groups import BegunPrompts
from hybridrl.schedule.instances import Instance, RoundLimits


class CallLimits:
    """Decode steps, at most `decode_steps`, and ended turns after which a call returns."""

    def __init__(
        self, groups: BegunPrompts, meter: CostMeter, limits: RoundLimits, decode_steps: int
    ) -> None:
        self.groups, self.turns = groups, groups.turns
        self.meter, self.limits, self.decode_steps = meter, limits, decode_steps

    def steps(self, instance: Instance, awaited: bool, queued: bool) -> int:
        """Decode steps: as many as allowed where nothing is `awaited` of it.

        Where samples are `queued` in the driver that is until rows are likely to have none ahead.
        """
        costs, steps = self.meter.costs(), self.decode_steps
        if costs is None:
            return steps
        rows = min(len(instance.held), self.limits.max_held)
        short = self.limits.steps(costs.at_width(instance.width), rows, steps)
        if awaited:
            return short
        if queued:
            ahead = len(instance.held) - rows
            tokens = sum(self.groups.task(id).tokens for id in instance.held)
            return max(short, min(steps, round(ahead * tokens / len(instance.held) / rows)))
        return steps

    def enough_turns(self, instance: Instance) -> int:
        """One in how many turns that have ended ends the call."""
        costs, tokens = self.meter.costs(), self.turns.turn_tokens
        if costs is None or not tokens:
            return ENOUGH_TURNS
        going = sum(not self.turns.waits(id) for id in instance.held)
        costs = costs.at_width(instance.width)
        return enough_turns(costs, min(going, self.limits.max_held), tokens)
