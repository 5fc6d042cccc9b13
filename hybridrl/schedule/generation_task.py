"""A sample that a round is to make, and the bounds of the instances that make it."""

from dataclasses import dataclass
from typing import Any

from hybridrl.config import Migration
from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import Parked, Sampling
from hybridrl.flow.graph import SourceStage
from hybridrl.flow.sample import Sample

_CALL_SHARE = 0.02  # of the decoding: what calls may cost so that they end sooner


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """Bounds of an instance, and how the tail moves.

    An instance decodes at most `max_held` samples at a time, without those that wait for replies.
    With `ahead` it is given more while others wait, so that calls may be long: rows refill within.
    `chunk_tokens` bound one call of a forward pass. A call that decodes is to last about `call_s`
    seconds, with fewer steps while the batch is large. Finished samples are known only at its end.
    `stale_kv` lets a sample continue with keys and values of older weights.
    """

    max_held: int
    chunk_tokens: int
    call_s: float = 0.25
    migration: Migration = Migration.auto
    stale_kv: bool = False
    ahead: bool = True

    def steps(self, costs: Costs, rows: float, most: int) -> int:
        """Decode steps, at most `most`, of a call after which something may begin.

        Longer than `call_s` where calls would cost more than a fiftieth of the decoding.
        """
        call_s = max(self.call_s, costs.between_s / _CALL_SHARE)
        return max(1, min(most, round(call_s / max(float(costs.pass_s(rows)), 1e-9))))


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A sample to be made, from the beginning or from where it was parked.

    `total` response tokens are predicted, of which `tokens` are still to come. Without `sampling`
    it is the dataset's own answer.
    """

    sample: Sample
    stage: SourceStage
    prompt: Any
    sampling: Sampling | None
    total: float
    tokens: float
    parked: Parked | None = None

    @property
    def converses(self) -> bool:
        """Whether its response has turns, between which it waits."""
        return self.sampling is not None and self.sampling.max_turn_tokens > 0
