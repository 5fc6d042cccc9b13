"""Learns from a run's calls one scale for each kind of work."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hybridrl.costs.instance import UNLIMITED, Costs, Drafting
from hybridrl.costs.scales import CostScales

_CALLS_KEPT = 512  # of each kind: a few steps, since the machine and the lengths change
_ENOUGH_CALLS = 8
_ENOUGH_WIDE_CALLS = 3
_REFIT_CALLS = 64
_DECODE, _PREFILL, _KV, _DRAFTS = "decode", "prefill", "kv", "drafts"
_TRAIN, _SWITCH, _TRAIN_SWITCH, _ROUND_TRIP = "train", "switch", "train_switch", "round_trip"
_STAGE, _WIDE = "forward:", "wide "

PLAIN = Costs(
    step_s=5e-3,
    row_s=1e-4,
    cached_token_s=1e-7,
    prefill_token_s=1e-4,
    kv_token_s=1e-6,
    kv_call_s=1e-3,
    round_trip_s=1e-3,
)
"""Costs of a model whose operations are not counted: a small one on a core."""


class CostMeter:
    """Scales `counted` costs to the calls of a run.

    The scale of a kind is the median, over its last few hundred calls, of measured over counted
    seconds. So calls that another process slowed down do not count, and the proportions within a
    kind stay those that were counted. What has no counted seconds, as a verifier, has the median
    of its seconds a token. A call that decodes and prefills is of the kind that takes more of it.

    Example: a decode step of 4 rows is counted as 10 ms, of 8 rows as 12 ms. Most calls with 4 rows
    take 15 ms a step. So the scale is 1.5, and a step of 8 rows takes 18 ms.

    `draft_tokens` and `pass_tokens` are those of `Drafting`: the share of right guesses is learned.
    """

    def __init__(
        self,
        draft_tokens: int | None = 0,
        pass_tokens: int = UNLIMITED,
        counted: Costs | None = None,
    ) -> None:
        self._draft_tokens, self._pass_tokens = draft_tokens, pass_tokens
        self.counts = counted is not None
        """Whether seconds are those of the run's own operations, so that scales say something."""
        self._counted = counted or PLAIN
        self._seen: dict[str, deque[tuple[float, float]]] = {}  # measured and counted, by kind
        self._costs: Costs | None = None
        self._num_new = 0  # calls since the costs were scaled
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
        costs = self._counted.at_width(width)
        decode = costs.call_s + costs.admit_s * admitted + costs.step_s * steps
        decode += costs.row_s * rows_summed + costs.cached_token_s * cached_summed
        prefill = costs.prefill_token_s * prefill_tokens
        if width > 1:
            self._add(f"{_WIDE}{width}", seconds, decode + prefill)
        elif prefill > decode:
            self._add(_PREFILL, max(0.0, seconds - self._scale(_DECODE) * decode), prefill)
        else:
            other = self._prefill_scale() * prefill if prefill else 0.0
            self._add(_DECODE, max(0.0, seconds - other), decode)

    def saw_drafts(self, accepted: int, refused: int) -> None:
        """So many guessed tokens of a call were right, and so many drafts had one that was not."""
        self._add(_DRAFTS, accepted, refused)

    def saw_compute(self, stage: str, seconds: float, tokens: int) -> None:
        """A forward-only stage has run on samples of so many tokens together."""
        self._add(_STAGE + stage, seconds, self._counted.compute(stage, tokens) or tokens)

    def _saw(self, kind: str, seconds: float, number: float = 1.0) -> None:
        """`number` units of a kind; what has no counted seconds has its measured ones a unit."""
        self._add(kind, seconds, (self._unit_s(kind) or 1.0) * number)

    def _unit_s(self, kind: str) -> float:
        """Counted seconds of a token, or of a call that is alike each time; 0: not counted."""
        if kind.startswith(_STAGE):
            return self._counted.compute(kind.removeprefix(_STAGE), 1.0)
        own = self._counted
        seconds = {
            _TRAIN: own.train_token_s,
            _SWITCH: own.switch_s,
            _TRAIN_SWITCH: own.train_switch_s,
            _ROUND_TRIP: own.round_trip_s,
            _KV: own.kv_token_s,
        }
        return seconds.get(kind, own.step_s)  # decoding and prefill always are

    def saw_kv(self, seconds: float, tokens: int) -> None:
        """Keys and values of so many tokens went to another instance in one call."""
        self._add(_KV, seconds, self._counted.kv_call_s + self._counted.kv_token_s * tokens)

    def saw_train(self, seconds: float, tokens: int) -> None:
        """A step's updates, of all roles, on a batch of so many tokens."""
        self._saw(_TRAIN, seconds, tokens)

    def saw_switch(self, seconds: float) -> None:
        """All ranks went from training to generation."""
        self._saw(_SWITCH, seconds)

    def saw_train_switch(self, seconds: float) -> None:
        """All ranks went from generation to training."""
        self._saw(_TRAIN_SWITCH, seconds)

    def saw_round_trip(self, seconds: float) -> None:
        """A call took so much longer for the driver than the instance was at work on it."""
        self._saw(_ROUND_TRIP, seconds)

    def costs(self) -> Costs | None:
        """The counted costs, scaled to the calls; None until enough decoding was seen.

        Scaled again when an eighth of the kept calls is new, and not for a few calls.
        """
        if sum(len(self._seen.get(kind, ())) for kind in (_DECODE, _PREFILL)) < _ENOUGH_CALLS:
            return None
        enough = max(_REFIT_CALLS, sum(map(len, self._seen.values())) // 8)
        if self._costs is None or self._num_new >= enough:
            self._costs, self._num_new = self._scaled(), 0
        return self._costs

    def scales(self) -> CostScales:
        """The scale of each kind that the counted costs have."""
        stages = [kind for kind in self._seen if kind.startswith(_STAGE) and self._unit_s(kind)]
        kinds = {"decode": self._scale(_DECODE), "prefill": self._prefill_scale()}
        kinds["forward"] = median(map(self._scale, stages)) if stages else 1.0
        for kind in (_TRAIN, _SWITCH, _KV):
            kinds[kind] = self._scale(kind) if self._unit_s(kind) else 1.0
        return CostScales(**{kind: scale for kind, scale in kinds.items() if scale > 0})

    def table(self) -> list[tuple[str, int, float, float]]:
        """Return each counted kind with its kept calls, and their counted and measured seconds."""
        rows = []
        for kind in sorted(self._seen.keys() - {_DRAFTS}):
            if self._unit_s(kind):
                measured, counted = (sum(each) for each in zip(*self._seen[kind], strict=True))
                rows.append((kind, len(self._seen[kind]), counted, measured))
        return rows

    def _scaled(self) -> Costs:
        own, decode, prefill = self._counted, self._scale(_DECODE), self._prefill_scale()
        kv = self._scale(_KV)
        token_s, call_s = dict(own.token_s), dict(own.stage_call_s)
        for kind in sorted(self._seen):
            if kind.startswith(_STAGE):
                stage, scale = kind.removeprefix(_STAGE), self._scale(kind)
                if self._unit_s(kind):
                    token_s[stage] = scale * own.token_s.get(stage, 0.0)
                    call_s[stage] = scale * own.stage_call_s.get(stage, 0.0)
                else:
                    token_s[stage] = scale
        return replace(
            own,
            step_s=decode * own.step_s,
            row_s=decode * own.row_s,
            cached_token_s=decode * own.cached_token_s,
            admit_s=decode * own.admit_s,
            call_s=decode * own.call_s,
            prefill_token_s=prefill * own.prefill_token_s,
            token_s=token_s,
            stage_call_s=call_s,
            kv_token_s=kv * own.kv_token_s,
            kv_call_s=kv * own.kv_call_s,
            train_token_s=self._known(_TRAIN),
            switch_s=self._known(_SWITCH),
            train_switch_s=self._known(_TRAIN_SWITCH),
            round_trip_s=self._known(_ROUND_TRIP),
            wide_step_s=self._wide_steps(),
            drafting=self._drafting(),
        )

    def _known(self, kind: str) -> float:
        """Seconds of a unit; what was neither counted nor seen takes none."""
        return self._scale(kind) * (self._unit_s(kind) or float(kind in self._seen))

    def _wide_steps(self) -> dict[int, float]:
        """Return `step_s` of widths that had a few calls: the first one has much to prepare."""
        steps = {}
        for kind, calls in self._seen.items():
            if kind.startswith(_WIDE) and len(calls) >= _ENOUGH_WIDE_CALLS:
                width = int(kind.removeprefix(_WIDE))
                steps[width] = self._scale(kind) * self._counted.at_width(width).step_s
        return dict(sorted(steps.items()))

    def _drafting(self) -> Drafting | None:
        """None where nothing is guessed, or nothing was yet."""
        seen = self._seen.get(_DRAFTS, ())
        accepted, refused = (sum(call[i] for call in seen) for i in (0, 1))
        if self._draft_tokens == 0 or accepted + refused == 0:
            return None
        accept = accepted / (accepted + refused)
        return Drafting(tokens=self._draft_tokens, accept=accept, pass_tokens=self._pass_tokens)

    def _scale(self, kind: str) -> float:
        """The median of measured over counted seconds, 1 of none."""
        ratios = [measured / counted for measured, counted in self._seen.get(kind, ()) if counted]
        return median(ratios) if ratios else 1.0

    def _prefill_scale(self) -> float:
        """Until a call had more of it than of decoding, that of decoding."""
        return self._scale(_PREFILL if _PREFILL in self._seen else _DECODE)

    def state_dict(self) -> dict[str, dict[str, list[list[float]]]]:
        """Plain numbers: for each kind of work the measured and counted seconds of calls."""
        return {"kinds": {kind: [list(call) for call in seen] for kind, seen in self._seen.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]) -> None:
        """Continue from the measurements of another meter; earlier versions had other ones."""
        self._seen, self._costs = {}, None
        for kind, calls in state.get("kinds", {}).items():
            for call in calls:
                self._add(kind, *call)

    def _add(self, kind: str, measured: float, counted: float) -> None:
        assert all(0 <= seconds < math.inf for seconds in (measured, counted)), (kind, measured)
        self._seen.setdefault(kind, deque(maxlen=_CALLS_KEPT)).append((measured, counted))
        self._num_new += 1
