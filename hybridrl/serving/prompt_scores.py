"""Prompts that the training shards score, where the weights that sample cannot.

Such a request waits for TRAIN first, and then for its snapshot to generate.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from hybridrl.serving.requests import Datum, Float32, SampleRequest
from hybridrl.serving.sampling import OpenSampling
from hybridrl.serving.training import ClientTraining
from hybridrl.workers.serving import TokenScores


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
        """Let requests wait no more."""
        self._waiting = deque(one for one in self._waiting if one not in requests)

    @property
    def first(self) -> OpenSampling:
        """The request that has waited longest."""
        return self._waiting[0]

    def next(self) -> list[OpenSampling]:
        """The requests for the snapshot whose prompts have waited longest."""
        return [one for one in self._waiting if one.snapshot is self.first.snapshot]

    def score(self, requests: list[OpenSampling]) -> None:
        """Score prompts with the snapshot of all these requests, which the ranks have."""
        data = [_datum(one.request) for one in requests]
        scores = self._clients.score(self.first.snapshot.version, data)
        for one, own in zip(requests, scores, strict=True):
            one.prompt = _scores(one.request, own)


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
