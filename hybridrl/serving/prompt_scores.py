"""Prompts that the training shards score, where the weights that sample cannot.

Such a request waits for TRAIN first, and then for its snapshot to generate.
"""

from collections import deque
from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from hybridrl.serving.requests import Datum, Float32, SampleRequest
from hybridrl.serving.sampling import OpenSampling
from hybridrl.serving.training import ClientTraining
from hybridrl.workers.serving import TokenScores

TARGETS_A_CALL = 2**18
"""Targets for each rank in one call, of which a rank holds 12 bytes each; training waits for it."""


class PromptScoring:
    """Requests whose prompts are not scored yet, in the order of their arrival."""

    def __init__(self, clients: ClientTraining) -> None:
        self._clients = clients
        self._waiting: deque[OpenSampling] = deque()

    def __iter__(self) -> Iterator[OpenSampling]:
        return iter(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: OpenSampling) -> None:
        """Let a request wait."""
        self._waiting.append(request)

    def remove(self, requests: list[OpenSampling]) -> None:
        """Take requests out, whether they are scored or refused."""
        self._waiting = deque(one for one in self._waiting if one not in requests)

    def with_it(self, first: OpenSampling) -> list[OpenSampling]:
        """The requests that one call scores: the `first`, and with it those that fit.

        They are for one snapshot and name tokens all or none, since every position of a call has as
        many targets as the widest. With more targets than `TARGETS_A_CALL` the first is alone.
        """
        alike = [one for one in self._waiting if _kind(one) == _kind(first)]
        lengths = accumulate(len(one.request.prompt) for one in alike)
        widths = accumulate((_num_targets(one.request) for one in alike), max)
        most = TARGETS_A_CALL * self._clients.ranks.size
        fit = sum(length * width <= most for length, width in zip(lengths, widths, strict=True))
        return alike[: max(1, fit)]

    def score(self, requests: list[OpenSampling]) -> None:
        """Score prompts with the snapshot of all these requests, which the ranks have."""
        data = [_datum(one.request) for one in requests]
        scores = self._clients.score(requests[0].snapshot.version, data)
        for one, own in zip(requests, scores, strict=True):
            one.prompt = _scores(one.request, own)


def _kind(one: OpenSampling) -> tuple[int, bool]:
    """The snapshot of a request, and whether it names tokens."""
    return one.snapshot.version, one.request.named is not None


def _num_targets(request: SampleRequest) -> int:
    """The targets of each position of a prompt."""
    return 1 if request.named is None else 1 + request.named.shape[1]


def _datum(request: SampleRequest) -> Datum:
    """A prompt [N] whose targets are its next tokens [N - 1], or these and the named ones."""
    targets = request.prompt[1:]
    if request.named is not None:
        targets = np.concatenate([targets[:, None], request.named.clip(0)], 1)
    weights = np.ones(targets.shape, np.float32)
    return Datum(request.prompt[:-1], targets, {"weights": weights})


def _scores(request: SampleRequest, log_probs: Float32) -> TokenScores:
    """Log-probabilities of a datum's targets, as what the request wants."""
    if request.named is None:
        return TokenScores(log_probs)
    named = np.where(request.named < 0, np.float32(0), log_probs[:, 1:])
    return TokenScores(log_probs[:, 0], named=named)
