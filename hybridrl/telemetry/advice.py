"""What a practitioner would see in a run's records: each with its figure and the key to change.

A check looks at the recipe's last steps, and says nothing about a run that is too short for it.
Thresholds are wide: no advice on a run that learns (`tests/telemetry/test_advice.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import yaml

from hybridrl.config import ScheduleKind
from hybridrl.config.schedule import entry_of
from hybridrl.telemetry.rundata import RunData

_WINDOW = 20
"""Steps that a check looks at, at the end of a run or at its start."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to look at: what was seen, with its figure, and the key that changes it."""

    text: str
    key: str


def advise(run: RunData) -> list[Advice]:
    """The advice on a run; none for one of fewer than 20 steps of its recipe."""
    history = _History(run)
    if len(history.rows) < _WINDOW:
        return []
    return [advice for check in _CHECKS if (advice := check(history))]


class _History:
    """The recipe's steps of a run: `rows` of metrics in order, and settings by dotted key."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.rows = run.steps("rl")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The run's settings, as groups; empty where none were written."""
        settings = yaml.safe_load(self.run.config) if self.run.config else None
        return settings if isinstance(settings, dict) else {}

    def setting(self, key: str) -> Any:
        """The value of a dotted key, None where it is not known."""
        value: Any = self.settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def last(self, key: str, steps: int = _WINDOW) -> list[float]:
        """A metric's values in the last steps; those that are no finite numbers are left out."""
        return _numbers(self.rows[-steps:], key)

    def first(self, key: str, steps: int = _WINDOW) -> list[float]:
        """A metric's values in the first steps; see `last`."""
        return _numbers(self.rows[:steps], key)


def _numbers(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    values = [row[key] for row in rows if isinstance(row.get(key), int | float)]
    return [float(value) for value in values]


def _share(run: _History, key: str) -> float:
    """The share of the last steps' samples that the metric `key` counts."""
    samples = sum(run.last("samples/used")) + sum(run.last("samples/dropped"))
    return sum(run.last(key)) / samples if samples else 0.0


def _no_spread(run: _History) -> Advice | None:
    share = _share(run, "samples/filtered")
    if share < 0.8:
        return None
    text = (
        f"{share:.0%} of the samples were left out: their prompts' responses earn the same reward,"
        " so there is nothing to compare. Prompts are too easy or too hard; more samples of each"
        " help with hard ones"
    )
    return Advice(text, "data.sources")


def _cut_off(run: _History) -> Advice | None:
    limit = run.setting("rollout.max_new_tokens")
    rows = [row for row in run.run.lengths if run.run.key(row).phase == "rl"][-_WINDOW:]
    lengths = [length for row in rows for length in row.get("lengths", [])]
    if not lengths or not isinstance(limit, int):
        return None
    share = sum(length >= limit for length in lengths) / len(lengths)
    if share < 0.1:
        return None
    return Advice(f"{share:.0%} of the responses end at the limit of {limit} tokens, cut off",
                  "rollout.max_new_tokens")  # fmt: skip


def _entropy_gone(run: _History) -> Advice | None:
    first, last = run.first("entropy"), run.last("entropy")
    if not first or not last or not fmean(last) < min(0.02, 0.1 * fmean(first)):
        return None
    text = (
        f"the entropy fell from {fmean(first):.3g} to {fmean(last):.2g} nats a token: responses to"
        " a prompt are nearly equal, and little is left to explore"
    )
    wider = run.setting("recipe.clip_high") is not None
    return Advice(text, "recipe.clip_high" if wider else "recipe.entropy_coef")


def _kl_growing(run: _History) -> Advice | None:
    """From the reference, in nats a token (`kl`) or a response (`kl_mean`)."""
    for key, unit, large in (("kl", "token", 0.5), ("kl_mean", "response", 50.0)):
        first, last = run.first(key), run.last(key)
        if first and last and fmean(last) > max(large, 3 * fmean(first)):
            text = (
                f"the KL from the reference grew from {fmean(first):.3g} to {fmean(last):.3g} nats"
                f" a {unit}: the policy has left what the reference knows"
            )
            return Advice(text, "recipe.kl_coef")
    return None


def _at_ceiling(run: _History) -> Advice | None:
    rewards = [s.get("reward") for s in run.run.samples if s.get("phase") == "rl"]
    seen = [float(reward) for reward in rewards if isinstance(reward, int | float)]
    mean = run.last("reward_mean")
    if not seen or not mean or min(seen) == max(seen):
        return None
    low, high = min(seen), max(seen)
    if min(mean) < high - 0.03 * (high - low):
        return None
    text = f"the mean reward is {fmean(mean):.3g} of at most {high:.3g}: these prompts are learned"
    return Advice(text, "data.sources")


def _source_not_learning(run: _History) -> Advice | None:
    """One source stays where it was while another one learns; over quarters of the run."""
    keys = {key for row in run.rows for key in row}
    names = sorted(key.split("/")[1] for key in keys
                   if key.startswith("source/") and key.endswith("/reward_mean"))  # fmt: skip
    quarter = len(run.rows) // 4
    if len(names) < 2 or quarter < _WINDOW:
        return None
    gains = {}
    for name in names:
        key = f"source/{name}/reward_mean"
        first, last = run.first(key, quarter), run.last(key, quarter)
        if first and last:
            gains[name] = (fmean(last) - fmean(first), fmean(last))
    best = max((gain for gain, _ in gains.values()), default=0.0)
    for name, (gain, mean) in gains.items():
        if best > 0.1 and gain < 0.1 * best and mean < 0.5:
            text = f"source {name} does not learn: its mean reward is {mean:.3g} as at the start"
            return Advice(text, f"data.sources.{name}.weight")
    return None


def _waiting(run: _History) -> Advice | None:
    idle, ranks = run.last("bubble_share"), run.setting("cluster.ranks")
    if ranks == 1 or not idle or fmean(idle) < 0.4:
        return None
    if run.last("bubble_share/rollout"):  # see `_split`
        return None
    kind = run.setting("schedule.kind")
    known = kind in ScheduleKind.__members__
    waits = known and not entry_of(ScheduleKind[kind]).moves_samples
    why = "the longest responses hold all others up" if waits else "the timeline shows where"
    return Advice(f"ranks wait for {fmean(idle):.0%} of a step: {why}",
                  "schedule" if waits else "rollout.max_running")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Waits:
    """Shares of a step in which the ranks that train wait, and those that generate alone."""

    trains: float
    generates: float
    text: str


def _waits(run: _History) -> _Waits | None:
    """The mean waits of a run whose ranks do one or the other; None of another run."""
    trains, generates = run.last("bubble_share/actor"), run.last("bubble_share/rollout")
    step_s = run.last("step_s")
    if not trains or not generates or not step_s:
        return None
    shares = fmean(trains), fmean(generates)
    of_train, of_generate = (f"{share:.0%} of a step ({share * fmean(step_s):.3g} s)"
                             for share in shares)  # fmt: skip
    text = f"ranks that train wait for {of_train}, those that generate for {of_generate}"
    return _Waits(*shares, text)


def _split(run: _History) -> Advice | None:
    """Ranks that generate and ranks that train, of which one kind waits for the other.

    The number under which both are as busy, in whole instances, if their work stays what it is.
    """
    waits = _waits(run)
    size, ranks = run.setting("cluster.pools.rollout"), run.setting("cluster.ranks")
    if waits is None or not size or not ranks or abs(waits.trains - waits.generates) < 0.3:
        return None
    layout = run.setting("rollout.layout") or {}
    instance = layout.get("pp", 1) * layout.get("tp", 1)
    generating, training = size * (1 - waits.generates), (ranks - size) * (1 - waits.trains)
    share = generating / ((generating + training) or 1.0)
    better = min(max(1, round(ranks * share / instance)), (ranks - 1) // instance) * instance
    if better == size:
        return None
    return Advice(f"{waits.text}: {better} of {ranks} should generate", "cluster.pools.rollout")


def _staleness(run: _History) -> Advice | None:
    """Ranks of each kind wait: the longest samples of S + 1 batches take longer than the work.

    Instances wait at their limit, since no batch further ahead may begin. A step takes A / (S + 1)
    then, and the staleness is named under which it takes what the busier ranks need.
    """
    waits, most = _waits(run), run.setting("schedule.max_staleness")
    if waits is None or run.setting("schedule.kind") != ScheduleKind.asynchronous.name:
        return None
    idle = min(waits.trains, waits.generates)
    if not isinstance(most, int) or idle < 0.3:
        return None
    better = math.ceil((most + 1) / max(1 - idle, 0.1)) - 1
    return Advice(f"{waits.text} at their limit: up to {better} steps of staleness, not {most},"
                  " would let both go on", "schedule.max_staleness")  # fmt: skip


def _preempted(run: _History) -> Advice | None:
    share = _share(run, "samples/preempted")
    if share < 0.05:
        return None
    text = (
        f"{share:.0%} of the samples lost their KV cache while they decoded, and it was computed"
        " again: it is too small for those that run together"
    )
    size = run.setting("rollout.kv_cache_tokens")
    return Advice(text, "rollout.kv_cache_tokens" if size else "rollout.max_running")


def _judge_fails(run: _History) -> Advice | None:
    for key, what, setting in (
        ("reward_timeout", "got no reward in time", _time_limit(run)),
        ("reward_error", "raised in the reward", "reward"),
    ):
        share = _share(run, key)
        if share > 0.01:
            return Advice(f"{share:.1%} of the samples {what} and count as 0", setting)
    return None


def _time_limit(run: _History) -> str:
    """The key of the time limit of the judge that was late last: of a part, where there are any."""
    judge, parts = "reward", run.setting("reward.parts") or {}
    for sample in run.run.samples:
        status, _, reason = str(sample.get("status")).partition(": ")
        name = reason.partition(": ")[0]
        if status == "timeout" and name in parts:
            judge = f"reward.parts.{name}"
    asks = run.setting(f"{judge}.kind") in ("chat", "http")
    return f"{judge}.endpoint.timeout_s" if asks else f"{judge}.timeout_s"


def _clipped(run: _History) -> Advice | None:
    limit, norms = run.setting("trainer.optim.clip_grad_norm"), run.last("grad_norm")
    if not isinstance(limit, int | float) or not limit or len(norms) < _WINDOW:
        return None
    if min(norms) < 2 * limit:
        return None
    text = (
        f"every gradient is clipped, to {limit:g} from {fmean(norms):.3g} in the mean: steps have"
        " a fixed length, and a smaller learning rate or a higher limit is steadier"
    )
    return Advice(text, "trainer.optim.lr")


_CHECKS: tuple[Callable[[_History], Advice | None], ...] = (
    _no_spread,
    _at_ceiling,
    _cut_off,
    _source_not_learning,
    _entropy_gone,
    _kl_growing,
    _clipped,
    _judge_fails,
    _preempted,
    _waiting,
    _split,
    _staleness,
)
