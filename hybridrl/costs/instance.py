"""Times of work on a generation instance, and how a run learns them from its calls.

Schedules ask `Costs` when moving a sample pays; the planner replays runs with them.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np

UNLIMITED = 2**31 - 1
"""Rows of a batch whose size costs nothing."""

LONGEST_DRAFT = 16
"""Tokens of the longest draft, where as many are guessed as pay."""

Numbers = float | np.ndarray

_CALLS_KEPT = 512  # of each kind: a few steps, since the machine and the lengths change
_ENOUGH_CALLS = 8
_ENOUGH_WIDE_CALLS = 3
_WIDE = "wide "
_REFIT_CALLS = 64
_LONG_PREFILL = 64  # tokens a sample; shorter ones cost only their beginning
_DOUBT = 1e-2  # of a cost per call: how alike calls must be for work to explain them alone


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
        """Of a `Costs` as JSON; raises `ValueError`."""
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
    fused_train_token_s: float = 0.0
    """The same where all roles train in one pipeline plan (`trainer.fuse_updates`); 0: unknown."""
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

    def move(self, tokens: float) -> float:
        """Seconds to move a parked sample of so many tokens, by the cheaper way."""
        by_kv = self.kv_call_s + self.kv_token_s * tokens
        return min(by_kv, self.prefill_token_s * tokens)

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


class CostMeter:
    """Learns `Costs` from the calls of a run.

    Keeps the last few hundred calls of each kind. A fit is by least squares without negative
    costs, and robust: machines are shared, so some calls take many times as long as they should.

    Example: calls of 10 steps with 4 rows take 50 ms, of 10 steps with 8 rows 60 ms. Then a row of
    a step costs 0.25 ms. The other 4 ms are divided between step and call as far as calls of other
    lengths tell them apart.

    `draft_tokens` and `pass_tokens` are those of `Drafting`: the share of right guesses is learned.
    """

    def __init__(self, draft_tokens: int | None = 0, pass_tokens: int = UNLIMITED) -> None:
        self._draft_tokens, self._pass_tokens = draft_tokens, pass_tokens
        self._seen: dict[str, deque[list[float]]] = {}
        self._costs: Costs | None = None
        self._num_new = 0  # calls since the costs were fitted
        self.num_preempted = 0
        """Samples that have lost their KV cache to others; their tokens were computed again."""
        self.num_drafted = self.num_accepted = 0
        """Tokens that were guessed, and those of them that were drawn."""

    def saw_advance(
        self,
        seconds: float,
        steps: int,
        rows_summed: int,
        prefill_tokens: int = 0,
        cached_summed: int = 0,
        admitted: int = 0,
        width: int = 1,
    ) -> None:
        """A call of an instance has run `steps` decode steps; `admitted` samples began or resumed.

        `rows_summed` and `cached_summed` are rows, and the tokens they hold, summed over the steps.
        `width` instances were one.
        """
        work = (steps, rows_summed, cached_summed, prefill_tokens, admitted, 1)
        self._add(f"{_WIDE}{width}" if width > 1 else "advance", seconds, *work)

    def saw_drafts(self, accepted: int, refused: int) -> None:
        """So many guessed tokens of a call were right, and so many drafts had one that was not."""
        self._add("drafts", accepted, refused)

    def saw_compute(self, stage: str, seconds: float, tokens: int) -> None:
        """A forward-only stage has run on samples of so many tokens together."""
        self._add(f"compute:{stage}", seconds, tokens, 1)

    def saw_kv(self, seconds: float, tokens: int) -> None:
        """Keys and values of so many tokens went to another instance in one call."""
        self._add("kv", seconds, tokens, 1)

    def saw_train(self, seconds: float, tokens: int) -> None:
        """A step's updates, of all roles, on a batch of so many tokens."""
        self._add("train", seconds, tokens)

    def saw_switch(self, seconds: float) -> None:
        """All ranks went from training to generation."""
        self._add("switch", seconds, 1)

    def saw_train_switch(self, seconds: float) -> None:
        """All ranks went from generation to training."""
        self._add("train_switch", seconds, 1)

    def saw_round_trip(self, seconds: float) -> None:
        """A call took so much longer for the driver than the instance was at work on it."""
        self._add("round_trip", seconds, 1)

    def costs(self) -> Costs | None:
        """The costs measured from the calls; None until enough decoding was seen.

        Fitted again when an eighth of the kept calls is new, and not for a few calls, since a fit
        takes many milliseconds.
        """
        if len(self._seen.get("advance", ())) < _ENOUGH_CALLS:
            return None
        enough = max(_REFIT_CALLS, sum(map(len, self._seen.values())) // 8)
        if self._costs is None or self._num_new >= enough:
            self._costs, self._num_new = self._fitted(), 0
        return self._costs

    def _fitted(self) -> Costs:
        step, row, cached, prefill, admit, call = self._decoding()
        stages = [kind.removeprefix("compute:") for kind in self._seen if ":" in kind]
        computed = {stage: self._fit(f"compute:{stage}", 2) for stage in sorted(stages)}
        kv_token, kv_call = self._fit("kv", 2)
        costs = Costs(
            step_s=step,
            row_s=row,
            cached_token_s=cached,
            prefill_token_s=prefill,
            admit_s=admit,
            call_s=call,
            token_s={stage: token for stage, (token, _) in computed.items()},
            stage_call_s={stage: fixed for stage, (_, fixed) in computed.items()},
            kv_token_s=kv_token,
            kv_call_s=kv_call,
            train_token_s=self._fit("train", 1)[0],
            switch_s=self._fit("switch", 1)[0],
            train_switch_s=self._fit("train_switch", 1)[0],
            round_trip_s=self._fit("round_trip", 1)[0],
            drafting=self._drafting(),
        )
        wide = [int(kind.removeprefix(_WIDE)) for kind in self._seen if kind.startswith(_WIDE)]
        steps = {width: self._wide_step(width, costs) for width in sorted(wide)}
        return replace(costs, wide_step_s={w: s for w, s in steps.items() if s is not None})

    def _wide_step(self, width: int, costs: Costs) -> float | None:
        """Seconds of a step of `width` instances as one, besides those of rows and tokens.

        The median over the calls, of which the first has much to prepare. None for few calls.
        """
        calls = np.array([call for call in self._seen[f"{_WIDE}{width}"] if call[1] > 0])
        if len(calls) < _ENOUGH_WIDE_CALLS:
            return None
        seconds, steps, rows, cached, prefill, admitted, _ = calls.T
        work = costs.row_s * rows + costs.cached_token_s * cached + costs.prefill_token_s * prefill
        left = seconds - costs.call_s - costs.admit_s * admitted - work / width
        return max(0.0, float(np.median(left / steps)))

    def _drafting(self) -> Drafting | None:
        """None where nothing is guessed, or nothing was yet."""
        accepted, refused = np.array(self._seen.get("drafts") or [[0, 0]]).sum(axis=0)
        if self._draft_tokens == 0 or accepted + refused == 0:
            return None
        accept = float(accepted / (accepted + refused))
        return Drafting(tokens=self._draft_tokens, accept=accept, pass_tokens=self._pass_tokens)

    def _decoding(self) -> list[float]:
        """Costs of decode steps, rows, cached tokens, prefilled tokens, admissions and calls.

        Until prefills of some length were seen, a token of one is taken to cost as much as a row of
        a decode step. Short prompts would make recomputing a long response seem dear.
        """
        calls = np.array(self._seen["advance"], dtype=np.float64)
        work, seconds = calls[:, 1:], calls[:, 0]
        if (work[:, 3] >= _LONG_PREFILL * np.maximum(1, work[:, 4])).any():
            return robust_fit(work, seconds, doubtful=2)
        together = np.delete(work, 3, axis=1)
        together[:, 1] += work[:, 3]
        fitted = robust_fit(together, seconds, doubtful=2)
        return [*fitted[:3], fitted[1], *fitted[3:]]

    def state_dict(self) -> dict[str, list[list[float]]]:
        """Plain numbers: for each kind of call [seconds, amounts of work ...]."""
        return {kind: [list(call) for call in calls] for kind, calls in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Continue from the measurements of another meter."""
        self._seen, self._costs = {}, None
        for kind, calls in state.items():
            for call in calls:
                self._add(kind, *call)

    def _add(self, kind: str, *call: float) -> None:
        assert all(0 <= number < math.inf for number in call), (kind, call)
        self._seen.setdefault(kind, deque(maxlen=_CALLS_KEPT)).append([float(x) for x in call])
        self._num_new += 1

    def _fit(self, kind: str, num: int) -> list[float]:
        calls = np.array(self._seen.get(kind, ()), dtype=np.float64)
        return robust_fit(calls[:, 1:], calls[:, 0], int(num > 1)) if len(calls) else [0.0] * num


def robust_fit(work: np.ndarray, seconds: np.ndarray, doubtful: int) -> list[float]:
    """Costs x >= 0 [kinds] with work [calls, kinds] @ x close to seconds [calls].

    The last `doubtful` kinds are the call itself, or admissions and the call. Calls of about the
    same size hardly tell its cost from that of the work. Then the cost is the work's, or smaller
    calls would seem as dear. Most calls begin with admissions. Were these not as doubtful, they
    would explain what a call costs, and shorter calls would seem free.

    Least absolute residuals by reweighting, then least squares on the calls within three
    deviations. A call counts by the square root of its time: neither does a single long call rule
    the fit, nor the noise of short ones. If the calls cannot tell kinds of work apart, the costs
    are spread over them, so that such calls are still predicted.
    """
    weight = 1 / np.sqrt(np.maximum(seconds, 1e-9))
    scale = np.maximum(np.abs(work).max(axis=0), 1e-30)
    rows, wanted = work / scale * weight[:, None], seconds * weight
    fitted = _non_negative(rows, wanted, doubtful)
    least = 1e-3 * np.median(wanted) + 1e-12
    for _ in range(20):
        residuals = np.abs(wanted - rows @ fitted)
        closeness = 1 / np.sqrt(np.maximum(residuals, least))
        before = fitted
        fitted = _non_negative(rows * closeness[:, None], wanted * closeness, doubtful)
        # Calls without noise need no more. `np.allclose` would take as long as the fit.
        if (np.abs(fitted - before) <= 1e-9 * np.abs(before)).all():
            break
    residuals = wanted - rows @ fitted
    deviation = 1.4826 * np.median(np.abs(residuals))
    near = np.abs(residuals) <= 3 * deviation + 1e-9 * np.abs(wanted)
    return [float(x) for x in _non_negative(rows[near], wanted[near], doubtful) / scale]


def _non_negative(rows: np.ndarray, wanted: np.ndarray, doubtful: int) -> np.ndarray:
    """Least squares with x >= 0, by the active set (Lawson and Hanson 1974, chapter 23).

    A trace of ridge makes the answer unique.
    """
    gram = rows.T @ rows
    diagonal = gram.diagonal()
    ridge = 1e-9 * max(diagonal.sum(), 1e-30)
    np.fill_diagonal(gram, diagonal + ridge)
    for kind in range(len(gram) - doubtful, len(gram)):
        gram[kind, kind] *= 1 + _DOUBT
    right = rows.T @ wanted
    if len(gram) == 1:
        return np.maximum(right / gram[0], 0.0)
    solution = np.zeros(len(gram))
    used = solution > 0
    for _ in range(4 * len(gram)):  # ends sooner but for rounding
        slope = np.where(used, -np.inf, right - gram @ solution)
        if slope.max() <= 1e-12 * np.abs(right).max():
            break
        used[slope.argmax()] = True
        while True:
            kinds = np.flatnonzero(used)
            best = np.zeros_like(solution)
            best[kinds] = np.linalg.solve(gram[np.ix_(kinds, kinds)], right[kinds])
            negative = used & (best <= 0)
            if not negative.any():
                solution = best
                break
            # As far towards the best as none is below 0; what gets there is left out. A cost that
            # is best at 0 exactly, and was there, stops at once.
            distance = np.maximum(solution[negative] - best[negative], np.finfo(float).tiny)
            share = solution[negative] / distance
            solution = solution + share.min() * (best - solution)
            stopped = np.flatnonzero(negative)[share <= share.min()]
            solution[stopped] = 0.0
            used[stopped] = False
    return solution
