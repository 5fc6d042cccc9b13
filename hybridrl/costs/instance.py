"""Seconds of work on a generation instance: what schedules ask, and what the planner replays."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

UNLIMITED = 2**31 - 1
"""Rows of a batch whose size costs nothing."""

LONGEST_DRAFT = 16
"""Tokens of the longest draft, where as many are guessed as pay."""

Numbers = float | np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """Guessing ahead (`rollout.speculate`), as a cost model knows it.

    In each pass a row guesses `tokens` tokens; None: as many as give the most tokens a second, at
    most `LONGEST_DRAFT`. Each is right with probability `accept` once those before it were. A pass
    has at most `pass_tokens` tokens of all rows together, so of many rows some guess nothing.

    Example: with `accept` 0.5 a draft of 2 gives 1 + 0.5 + 0.25 = 1.75 tokens a pass.
    """

    tokens: int | None
    accept: float
    pass_tokens: int = UNLIMITED

    def expected(self, drafted: Numbers) -> Numbers:
        """Tokens that a pass makes of a row which guesses `drafted` tokens."""
        if self.accept >= 1:
            return 1 + drafted
        return (1 - self.accept ** (drafted + 1)) / (1 - self.accept)

    def best_length(self, share: Numbers) -> Numbers:
        """Guessed tokens a row that give the most tokens a second.

        `share` is the time that one more token of every row takes, over that of a pass without
        rows.
        """
        pays_below = _pays_below(self.accept)
        return LONGEST_DRAFT - np.searchsorted(pays_below, share, side="right")

    def of_row(self, rows: Numbers, share: Numbers) -> tuple[Numbers, Numbers]:
        """Tokens that a row guesses in a pass of `rows`, and those that are right; on average."""
        length: Numbers
        if self.tokens is None:
            length = self.best_length(share)
            right: Numbers = _right(self.accept)[np.asarray(length, np.intp)]
        else:
            length = float(self.tokens)
            right = self.expected(length) - 1
        if self.pass_tokens >= UNLIMITED:
            return length, right
        most = np.maximum(length * np.asarray(rows), 1e-9)
        room = np.clip((self.pass_tokens - np.asarray(rows)) / most, 0.0, 1.0)
        return room * length, room * right

    @classmethod
    def from_json(cls, values: Any) -> "Drafting | None":
        """Return the drafting of a `Costs` as JSON; raises `ValueError`."""
        if values is None:
            return None
        try:
            drafting = cls(**values)
            whole = [n for n in (drafting.tokens, drafting.pass_tokens) if n is not None]
            if all(isinstance(n, int) and n >= 0 for n in whole) and 0 <= drafting.accept <= 1:
                return drafting
        except TypeError:
            pass
        allowed = "tokens (or null), accept between 0 and 1, and pass_tokens"
        raise ValueError(f"costs.drafting: got {values!r}, wanted {allowed}")


@cache
def _pays_below(accept: float) -> np.ndarray:
    """Ascending: the share of a token's time below which draft token 16, 15, ... 1 pays.

    The next token of a draft of k pays where a^(k+1) / (1 + a + ... + a^k) is more than the time
    that it adds, over that of the pass.
    """
    below, drafting = [], Drafting(tokens=None, accept=accept)
    for length in range(LONGEST_DRAFT):
        gain = accept ** (length + 1)
        rest = float(drafting.expected(length)) - (length + 1) * gain
        below.append(gain / rest if rest > 1e-12 else (np.inf if gain else 0.0))
    return np.array(below[::-1])


@cache
def _right(accept: float) -> np.ndarray:
    """Right guesses of a draft of 0, 1, ... `LONGEST_DRAFT` tokens, on average."""
    drafting = Drafting(tokens=None, accept=accept)
    return np.array([drafting.expected(length) - 1 for length in range(LONGEST_DRAFT + 1)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds of work on one instance.

    A call of an instance that decodes takes `call_s`. Each step with r rows that hold k cached
    tokens in all adds `step_s + row_s * r + cached_token_s * k`. Each sample that begins or resumes
    adds `admit_s`, each token that is computed without being drawn `prefill_token_s`. A
    forward-only stage takes `stage_call_s[name]` a call and `token_s[name]` a token. Numbers that
    were not measured are 0, so that work that might be cheap is tried once.
    """

    step_s: float
    row_s: float = 0.0
    cached_token_s: float = 0.0
    prefill_token_s: float = 0.0
    admit_s: float = 0.0
    call_s: float = 0.0
    token_s: Mapping[str, float] = field(default_factory=dict)
    stage_call_s: Mapping[str, float] = field(default_factory=dict)
    kv_token_s: float = 0.0
    """Sending a token's keys and values to another instance, both ends together."""
    kv_call_s: float = 0.0
    train_token_s: float = 0.0
    """Forward, backward and step, per token of the whole batch, all ranks together at work."""
    switch_s: float = 0.0
    """Bringing all ranks from training to generation."""
    train_switch_s: float = 0.0
    """Bringing all ranks from generation to training."""
    round_trip_s: float = 0.0
    """From the end of an instance's call to the start of its next one, through the driver."""
    wide_step_s: Mapping[int, float] = field(default_factory=dict)
    """`step_s` of wide instances, by the number of instances that they consist of."""

    drafting: Drafting | None = None
    """How rows guess ahead; None where they do not. A guessed token costs what a row does."""

    @property
    def between_s(self) -> float:
        """What an instance's calls cost besides their steps, each of them."""
        return self.call_s + self.round_trip_s

    def at_width(self, width: int) -> "Costs":
        """The costs of `width` instances as one: each rank has a part of its weights and heads.

        So rows, cached and prefilled tokens cost a part of theirs, and a step its own time, with
        the sums over all ranks. One that was not measured costs a part of a step, so that it is
        tried once.
        """
        if width == 1:
            return self
        return replace(
            self,
            step_s=self.wide_step_s.get(width, self.step_s / width),
            row_s=self.row_s / width,
            cached_token_s=self.cached_token_s / width,
            prefill_token_s=self.prefill_token_s / width,
        )

    def drafts(self, rows: Numbers, held: Numbers = 0.0) -> tuple[Numbers, Numbers]:
        """Tokens that a row of `rows` guesses in a pass, and those that are right; on average.

        Each row holds `held` tokens.
        """
        if self.drafting is None:
            return 0.0, 0.0
        base = self.step_s + rows * self.cached_token_s * held
        return self.drafting.of_row(rows, rows * self.row_s / np.maximum(base, 1e-12))

    def pass_s(self, rows: Numbers, held: Numbers = 0.0) -> Numbers:
        """Seconds of a decode step of `rows` rows that hold `held` tokens each, with guesses."""
        return self._pass(rows, held)[0]

    def rows_s(self, prompt: int, response: int, drawn: float = 1.0) -> float:
        """Seconds of a sample's rows in all its decode steps, besides those of the steps.

        A pass draws `drawn` tokens of it.
        """
        cached = prompt + (response - 1) / 2  # tokens, in the mean over the steps
        return response * (self.row_s + self.cached_token_s * cached / drawn)

    def pace(self, rows: Numbers, held: Numbers = 0.0, more_s: float = 0.0) -> Numbers:
        """Seconds in which each of `rows` rows, of `held` tokens each, makes a token.

        A pass takes `more_s` besides its own seconds.
        """
        seconds, tokens = self._pass(rows, held)
        return (seconds + more_s) / tokens

    def _pass(self, rows: Numbers, held: Numbers) -> tuple[Numbers, Numbers]:
        """Seconds of a decode step, and the tokens that it makes of a row."""
        drafted, right = self.drafts(rows, held)
        seconds = self.step_s + rows * (self.row_s * (1 + drafted) + self.cached_token_s * held)
        return seconds, 1 + right

    def decode(self, rows: float, steps: int, cached: float = 0.0) -> float:
        """Seconds of `steps` decode steps of `rows` rows, which hold `cached` tokens on average.

        Nothing is guessed.
        """
        return steps * (self.step_s + self.row_s * rows + self.cached_token_s * cached)

    def compute(self, stage: str, tokens: float) -> float:
        """Seconds of one call of a forward-only stage; 0 for a stage that was not measured."""
        return self.stage_call_s.get(stage, 0.0) + self.token_s.get(stage, 0.0) * tokens

    def flat_rows(self, slack: float = 0.25, cached_per_row: float = 0.0) -> int:
        """The largest batch whose step costs at most 1 + slack of a single row's.

        So the longest response is hardly slowed by those that ride along (RLHFuse, section 4).
        At least 1; `UNLIMITED` where rows are free.
        """
        row = self.row_s + self.cached_token_s * cached_per_row
        if row <= 0:
            return UNLIMITED
        return math.floor(min(UNLIMITED, 1 + slack * (1 + self.step_s / row) + 1e-9))

    def cheaper_by_kv(self, tokens: float) -> bool:
        """Whether to send a parked sample's keys and values, rather than compute them again."""
        return self.kv_call_s + self.kv_token_s * tokens < self.prefill_token_s * tokens

    def move(self, tokens: Numbers) -> Numbers:
        """Seconds to move a parked sample of so many tokens, by the cheaper way."""
        by_kv = self.kv_call_s + self.kv_token_s * tokens
        return np.minimum(by_kv, self.prefill_token_s * tokens)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, which `from_json` takes back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Costs":
        """Raises `ValueError` on a name that is unknown or a number below 0."""
        known = {f.name for f in fields(cls)}
        if not isinstance(values, Mapping) or not {"step_s"} <= set(values) <= known:
            got = sorted(values) if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(f"costs: got {got}, wanted step_s and any of {sorted(known)}")
        drafting = Drafting.from_json(values.get("drafting"))
        values = {name: value for name, value in values.items() if name != "drafting"}
        for name, value in values.items():
            nested = name in ("token_s", "stage_call_s", "wide_step_s")
            if nested and not isinstance(value, Mapping):
                raise ValueError(f"costs.{name}: got {value!r}, wanted seconds by stage")
            for seconds in value.values() if nested else (value,):
                number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
                if not number or not 0 <= seconds < math.inf:
                    raise ValueError(f"costs.{name}: got {seconds!r}, wanted seconds, 0 or more")
        wide = {int(width): seconds for width, seconds in values.get("wide_step_s", {}).items()}
        return cls(**{**values, "wide_step_s": wide}, drafting=drafting)
