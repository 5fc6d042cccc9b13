"""The responses of rows that decode together: arrays, until a row ends or is asked for."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridrl.engines.rollout.expert_record import Experts
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.kept_groups import Ints
from hybridrl.engines.rollout.kept_ids import IdArray
from hybridrl.engines.rollout.requests import finish_of
from hybridrl.engines.rollout.stage import DrawnTokens
from hybridrl.engines.rollout.stops import StopStrings

_MOST = 256  # steps in the arrays
_MOST_KEPT = 2**22  # kept ids in the arrays, with their padding: 16 MiB


class GrowingResponses:
    """The responses of a batch's rows, for as long as none joins; `take` lets some leave.

    `append` puts the tokens of a step in arrays [rows, steps], and so the ids that they were drawn
    from and the experts of those that were fed. The requests lack them until `write`, which
    `append` calls where a row may end: with a stop token, a token that can complete a stop text, or
    the last one that a row may have. In other steps there is no work for each row. An `eager`
    batch, whose requests are read in each step, is written there.

    Invariant: no token in the arrays ends its row.

    Example: rows that may have 8, 8 and 5 more tokens. Four steps fill arrays. The fifth is written
    with them, and the last row has ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Ints,
        stops: StopStrings | None,
        eager: bool = False,
    ) -> None:
        """`requests` are the rows in their order, which end or rest with `limits` [rows] tokens.

        `stops` are texts that end any of them.
        """
        self._requests, self._stops = requests, stops
        texts = {stops, *[request.stops for request in requests]}
        self._texts = [one for one in texts if one is not None]
        self._stop_ids = _padded([request.sampling.stop_token_ids for request in requests])
        lengths = [len(request.response_ids) for request in requests]
        self._left = limits - np.array(lengths, np.int64)
        self._steps, self._eager = 0, eager
        self._begin()
        # By step: [rows, num_kept], [rows, layers, k].
        self._kept: list[IdArray] = []
        self._experts: list[Experts] = []

    def _begin(self) -> None:
        """Make the arrays as long as the row that may end first has tokens left."""
        self._soonest = int(self._left.min())
        shape = len(self._left), 1 if self._eager else min(_MOST, max(1, self._soonest))
        self._tokens, self._log_probs = np.empty(shape, np.int64), np.empty(shape, np.float32)

    def append(
        self, drawn: DrawnTokens, experts: Experts | None = None
    ) -> list[tuple[Request, str]]:
        """Append a token to each row; those that end with it, and why: see `finish_of`.

        `experts` [rows, layers, k] are those of the tokens before, where they are recorded.
        """
        self._tokens[:, self._steps] = drawn.tokens
        self._log_probs[:, self._steps] = drawn.log_probs
        self._steps += 1
        if drawn.kept is not None:
            self._kept.append(drawn.kept)
        if experts is not None:
            self._experts.append(experts)
        rows = self._may_end(drawn)
        is_full = self._steps == self._tokens.shape[1]
        if rows or is_full or sum(kept.size for kept in self._kept) >= _MOST_KEPT:
            self.write()
        ends = [(self._requests[row], finish_of(self._requests[row], self._stops)) for row in rows]
        return [(request, finish) for request, finish in ends if finish is not None]

    def _may_end(self, drawn: DrawnTokens) -> list[int]:
        """The rows that may end with this step's token."""
        may: npt.NDArray[np.bool_] = (self._stop_ids == drawn.tokens[:, None]).any(1)
        if self._steps >= self._soonest:
            may |= self._left <= self._steps
        if any(texts.may_close(drawn.tokens.tolist()) for texts in self._texts):
            may[:] = True
        return np.flatnonzero(may).tolist()

    def take(self, rows: Sequence[int]) -> None:
        """Keep these of the rows alone, in this order."""
        self._requests = [self._requests[row] for row in rows]
        if len(self._stop_ids) > 1:
            self._stop_ids = self._stop_ids[rows]
        self._left = self._left[rows]
        if not self._steps:
            self._begin()
            return
        self._tokens, self._log_probs = self._tokens[rows], self._log_probs[rows]
        self._kept = [kept[rows] for kept in self._kept]
        self._experts = [experts[rows] for experts in self._experts]
        self._soonest = int(self._left.min())

    def write(self) -> None:
        """Append what the arrays have to the requests."""
        if not self._steps:
            return
        tokens = self._tokens[:, : self._steps].tolist()
        log_probs = self._log_probs[:, : self._steps].tolist()
        for request, more, values in zip(self._requests, tokens, log_probs, strict=True):
            request.response_ids += more
            request.log_probs += values
        ids = np.stack(self._kept, 1) if self._kept else None
        for row, request in enumerate(self._requests):
            if request.kept_ids is not None:
                assert ids is not None, "some request keeps ids"
                request.kept_ids.extend(ids[row])
        if self._experts:
            for request, experts in zip(self._requests, np.stack(self._experts, 1), strict=True):
                assert request.routed_experts is not None
                request.routed_experts.append(experts)
        self._kept, self._experts = [], []
        self._left -= self._steps
        self._soonest -= self._steps
        self._steps = 0


def _padded(ids: Sequence[tuple[int, ...]]) -> Ints:
    """The ids of each row [rows, most], with -1 behind them; one row where all are alike."""
    if ids.count(ids[0]) == len(ids):
        return np.array([ids[0]], np.int64)
    padded = np.full((len(ids), max(map(len, ids))), -1)
    for row, own in enumerate(ids):
        padded[row, : len(own)] = own
    return padded
