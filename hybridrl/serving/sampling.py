"""Samples that clients wait for: drawn on the instances, snapshot by snapshot."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from hybridrl.serving.ranks import ServingRanks
from hybridrl.serving.requests import (
    NO_TOKEN,
    ClientAnswer,
    Float32,
    LikeliestTokens,
    SampledResponse,
    SampleRequest,
    Samples,
    StopReason,
)
from hybridrl.serving.snapshots import Snapshot
from hybridrl.workers.serving import (
    DrawnResponse,
    DrawnSample,
    ScoredTokens,
    ServingWorker,
    TokenScores,
)


@dataclass(slots=True, eq=False)
class OpenSampling:
    """A request for samples of a snapshot, from `since` on, until its `future` has them."""

    request: SampleRequest
    future: "Future[ClientAnswer]"
    snapshot: Snapshot
    max_tokens: int
    number: int
    since: float
    prompt: TokenScores = field(default_factory=TokenScores)
    drawn: dict[int, DrawnResponse] = field(default_factory=dict)

    @property
    def wants_prompt(self) -> bool:
        """Whether something of its prompt is scored."""
        one = self.request
        scores = one.prompt_logprobs or one.topk_prompt_logprobs or one.named is not None
        return len(one.prompt) > 1 and bool(scores)

    @property
    def is_drawn(self) -> bool:
        """Whether all its responses have ended."""
        return len(self.drawn) == self.request.count

    def may_be_answered(self, generating: Snapshot) -> bool:
        """Whether its responses have ended, and are scored by its own snapshot if at all."""
        scores = self.request.topk_logprobs > 0
        return self.is_drawn and (self.snapshot is generating or not scores)


class ClientSampling:
    """Requests for samples on ranks that generate with their snapshot.

    A request is open from `begin` until all of its responses have ended. A response may end as the
    ranks change to another snapshot, whose `draw` then returns it: if it is to be scored, its
    request stays open until its own snapshot generates again. Which instance draws a response
    changes none of its tokens.
    """

    def __init__(self, ranks: ServingRanks, scores: bool = True) -> None:
        """With `scores` the weights that generate score, too; else prompts come scored."""
        self.ranks, self.scores = ranks, scores
        self._load = [0] * len(ranks.instances)  # tokens that may be drawn, by instance
        self._instance_of: dict[tuple[int, int], int] = {}
        self._open: dict[int, OpenSampling] = {}  # by number
        self._new: list[OpenSampling] = []  # of which nothing is drawn yet

    def begin(self, requests: Sequence[OpenSampling]) -> None:
        """Let requests of the snapshot that generates be drawn from the next `draw` on."""
        self._open |= {one.number: one for one in requests}
        self._new += requests

    def draw(self, generating: Snapshot, num_decode_steps: int) -> list[OpenSampling]:
        """Decode for so many steps with the snapshot that generates; the requests answered."""
        new, self._new = self._new, []
        if self.scores:
            self._score_prompts(new)
        begun: dict[int, list[DrawnSample]] = {i: [] for i in range(len(self._load))}
        for one in new:
            for sample in _samples(one):
                begun[self._dealt(sample)].append(sample)
        for drawn in self.ranks.draw(begun, num_decode_steps):
            self._take(drawn)
        done = [one for one in self._open.values() if one.may_be_answered(generating)]
        for one in done:
            one.future.set_result(self._answer(one))
            del self._open[one.number]
        return done

    def open(self) -> list[OpenSampling]:
        """The requests that are begun and not answered."""
        return list(self._open.values())

    def drop(self, requests: Sequence[OpenSampling]) -> None:
        """Draw no more of requests that are open, whichever snapshot generates now."""
        numbers = frozenset(one.number for one in requests)
        self.ranks.ask(ServingWorker.drop_samples, numbers)
        self._new = [one for one in self._new if one.number not in numbers]
        for one in requests:
            del self._open[one.number]
            for k in range(one.request.count):
                instance = self._instance_of.pop((one.number, k), None)
                if instance is not None:
                    self._load[instance] -= one.max_tokens

    def _dealt(self, sample: DrawnSample) -> int:
        """The instance with the fewest tokens to draw, which gets the sample."""
        instance = min(range(len(self._load)), key=lambda i: (self._load[i], i))
        self._load[instance] += sample.max_tokens
        self._instance_of[sample.id] = instance
        return instance

    def _take(self, drawn: DrawnResponse) -> None:
        number, k = drawn.id
        if (one := self._open.get(number)) is None:
            return  # it ended just before it was dropped
        self._load[self._instance_of.pop(drawn.id)] -= one.max_tokens
        one.drawn[k] = drawn

    # -- scores --------------------------------------------------------------------------------

    def _score_prompts(self, new: Sequence[OpenSampling]) -> None:
        """Score the prompts of which that is wanted."""
        wanted = [one for one in new if one.wants_prompt]
        scores = self._scored([_prompt(one.request) for one in wanted])
        for one, own in zip(wanted, scores, strict=True):
            one.prompt = own

    def _scored(self, wanted: Sequence[ScoredTokens]) -> list[TokenScores]:
        """Scores of sequences, dealt to the instances in turn."""
        num = len(self._load)
        answers = self.ranks.score({i: wanted[i::num] for i in range(num)})
        return [answers[i % num][i // num] for i in range(len(wanted))]

    # -- answers -------------------------------------------------------------------------------

    def _answer(self, one: OpenSampling) -> Samples:
        request = one.request
        responses = [one.drawn[k] for k in range(request.count)]
        tops: list[LikeliestTokens | None] = [None] * len(responses)
        if request.topk_logprobs:
            scored = self._scored([_response(request, x) for x in responses])
            tops = [_likeliest(x, len(y.tokens)) for x, y in zip(scored, responses, strict=True)]
        sequences = tuple(
            SampledResponse(x.tokens, x.log_probs, _reason(x.finish), top)
            for x, top in zip(responses, tops, strict=True)
        )
        length, prompt = len(request.prompt), one.prompt
        log_probs = top = None
        if request.prompt_logprobs:
            log_probs = _behind(prompt.log_probs, length)
        if request.topk_prompt_logprobs:
            top = _likeliest(prompt, length, request.topk_prompt_logprobs)
        named = None
        if request.named is not None:
            named = (
                np.zeros(request.named.shape, np.float32) if prompt.named is None else prompt.named
            )
        return Samples(sequences, log_probs, top, named)


def _samples(one: OpenSampling) -> list[DrawnSample]:
    """The responses to draw, each with a key of its own."""
    request = one.request
    prefix, stream = one.number if request.count > 1 else None, _stream(request)
    rest = request.prompt, one.max_tokens, request.settings
    return [DrawnSample((one.number, k), *rest, (*stream, k), prefix) for k in range(request.count)]


def _stream(request: SampleRequest) -> tuple[int, str]:
    """Prompt and branch of the draws' key: of prompt `seed` in a run, or the client's numbers."""
    if request.settings.seed is not None:
        return request.settings.seed, ""
    *client, number = request.key
    return number, f"client {client}"


def _prompt(request: SampleRequest) -> ScoredTokens:
    """What is wanted of a prompt [N], at its positions 1 to N - 1."""
    return ScoredTokens(
        request.prompt,
        len(request.prompt) - 1,
        request.prompt_logprobs,
        request.topk_prompt_logprobs,
        request.named,
    )


def _response(request: SampleRequest, drawn: DrawnResponse) -> ScoredTokens:
    """The likeliest tokens where a response was drawn, as likely as they were there."""
    tokens = np.concatenate([request.prompt, drawn.tokens])
    temperature = request.settings.temperature or 1.0
    return ScoredTokens(
        tokens, len(drawn.tokens), False, request.topk_logprobs, temperature=temperature
    )


def _behind(log_probs: Float32 | None, length: int) -> Float32:
    """Log-probabilities [N] of a prompt, of which the first is NaN."""
    whole = np.full(length, np.nan, np.float32)
    if log_probs is not None:
        whole[1:] = log_probs
    return whole


def _likeliest(scores: TokenScores, length: int, k: int = 0) -> LikeliestTokens:
    """The likeliest tokens at the last positions of `length` ones; none at those before."""
    k = k if scores.top_tokens is None else scores.top_tokens.shape[1]
    tokens = np.zeros((length, k), np.int32)
    log_probs = np.full((length, k), NO_TOKEN, np.float32)
    if scores.top_tokens is not None and scores.top_log_probs is not None:
        tokens[length - len(scores.top_tokens) :] = scores.top_tokens
        log_probs[length - len(scores.top_tokens) :] = scores.top_log_probs
    return LikeliestTokens(tokens, log_probs)


def _reason(finish: str) -> StopReason:
    return "stop" if finish == "stop" else "length"
