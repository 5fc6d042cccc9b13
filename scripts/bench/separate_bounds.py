"""What a step takes at least, with ranks that generate alone and on shared ranks.

Let, for a mean step, in the batches that its plan has

- G: seconds in which an instance decodes;
- A: the longest response from its first token to its last, with its waits for replies, alone on an
  instance;
- T: training, on the ranks that train; g: training of the longest response's group alone.

| side | at least |
|---|---|
| separate, S > 0 | max(G, T, A / (S + 1)) |
| separate, S = 0 | that, and A + g + push + load |
| serial | max(G, A) + T + switch |
| early backward | max(G + T, A + g) + switch |
| partial | max(G, A / (S + 1)) + T + switch |
"""

from dataclasses import dataclass, replace
from statistics import fmean

from hybridrl.config import (
    AsyncScheduleConfig,
    FusedScheduleConfig,
    PartialScheduleConfig,
    ScheduleConfig,
)
from hybridrl.flow.sample import SampleId
from hybridrl.plan.schedule import Setting


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds of a step, and which of its terms is the largest."""

    terms: dict[str, float]
    sums: dict[str, float]

    @property
    def by(self) -> str:
        """The name of the largest sum."""
        return max(self.sums, key=lambda name: self.sums[name])

    @property
    def seconds(self) -> float:
        """The largest sum."""
        return max(self.sums.values())

    def scaled(self, factor: float) -> "Bound":
        """All seconds times `factor`."""
        terms, sums = (
            {name: factor * value for name, value in values.items()}
            for values in (self.terms, self.sums)
        )
        return replace(self, terms=terms, sums=sums)


def bound(setting: Setting, config: ScheduleConfig, decode_s: float, skip: int) -> Bound:
    """The bound of a side, in whose plan an instance decodes for `decode_s` a step."""
    costs, apart, work = setting.costs, setting.apart, setting.workload
    size = work.prompts_per_step
    steps = [range(k * size, (k + 1) * size) for k in range(skip, work.num_steps)]
    alones = [{prompt: _alone(setting, prompt) for prompt in step} for step in steps]
    longest = [max(of_step, key=lambda prompt: of_step[prompt]) for of_step in alones]
    train = costs.train_token_s * fmean(sum(_tokens(setting, p) for p in step) for step in steps)
    last = costs.train_token_s * fmean(_tokens(setting, prompt) for prompt in longest)
    alone = fmean(max(of_step.values()) for of_step in alones)
    stale = 0
    if isinstance(config, AsyncScheduleConfig | PartialScheduleConfig):
        stale = config.max_staleness
    share = alone / (stale + 1)
    name = f"A/{stale + 1}" if stale else "A"
    switch = costs.switch_s + costs.train_switch_s
    if apart is not None:
        push = 0.0 if stale else last + apart.push_s + apart.load_s
        named = name if stale else "A+g+push+load"
        sums = {"G": decode_s, "T": train, named: share + push}
    elif isinstance(config, FusedScheduleConfig):
        sums = {"G+T": decode_s + train + switch, "A+g": share + last + switch}
    else:
        sums = {"G+T": decode_s + train + switch, f"{name}+T": share + train + switch}
    return Bound({"G": decode_s, "T": train, "A": alone, "g": last}, sums)


def _alone(setting: Setting, prompt: int) -> float:
    """Seconds of the prompt's longest response, alone on an instance, with its waits."""
    work, costs, seconds = setting.workload, setting.costs, []
    for id in (SampleId(prompt, k=k) for k in range(setting.group_size)):
        length, waits = work.length_of(id), 0.0
        if setting.conversations is not None:
            turns = setting.conversations.of(id, length).turns
            waits = sum(turn.wait_s for turn in turns)
        pace = float(costs.pace(1, work.prompt_tokens_of(prompt) + length / 2))
        seconds.append(waits + length * pace)
    return max(seconds)


def _tokens(setting: Setting, prompt: int) -> int:
    work = setting.workload
    lengths = (work.length_of(SampleId(prompt, k=k)) for k in range(setting.group_size))
    return sum(work.prompt_tokens_of(prompt) + n for n in lengths)
