"""Exact speculative decoding: rows guess tokens ahead, and one pass verifies them.

Leviathan et al., arXiv 2211.17192, accept a draft with a probability. Here a draft is accepted
exactly where the sample's own uniform draws that token. So the tokens are those without drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridrl.engines.rollout.admission import Admission
from hybridrl.engines.rollout.batch import Prefill, VerifyBatch
from hybridrl.engines.rollout.draft_lengths import (
    BestLength,
    DraftLengths,
    FixedLength,
    PromptGroup,
)
from hybridrl.engines.rollout.drafts import DraftSource, SeenTexts
from hybridrl.engines.rollout.entries import Entry, Lane
from hybridrl.engines.rollout.expert_record import SequenceRows
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.kept_groups import Ints
from hybridrl.engines.rollout.random import UniformsOf
from hybridrl.engines.rollout.requests import append_token, tokens_left
from hybridrl.engines.rollout.stage import DrawnTokens
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.models.paged_attention import KVCache
from hybridrl.models.shard import GenParallel


@dataclass(frozen=True, slots=True)
class Guess:
    """A running request and the tokens that are guessed to come next, which may be none."""

    entry: Entry
    tokens: list[int]


class Speculation:
    """What an engine verifies, pass by pass, within the limits of a call.

    A call may be bounded in tokens (`begin_call`). Then no request makes more than so many, and
    those that have made them wait for its end. Without drafts every running request makes a token a
    step. So the requests that finish in a call are those that finish in it without drafts, if all
    run through the call in both. Drafts are therefore made only in calls that begin with nothing
    waiting, and with free blocks for all the tokens that the call may add.

    *Example.* A call of 8 tokens, requests a and b, drafts of 3. All of a's are accepted, and none
    of b's. In two passes a makes 4 and 4 tokens and waits. b makes 8 in
    eight passes.
    """

    def __init__(self, source: DraftSource, lengths: DraftLengths) -> None:
        self.source, self.lengths = source, lengths
        self.num_drafted = self.num_accepted = self.num_refused = 0
        self._limit: int | None = None
        self._ends: dict[object, int] | None = None  # response tokens that a request may have
        self._begins = self._holds = False

    def begin_call(self, limit: int | None) -> None:
        """Until the next call no request makes more than `limit` tokens; None: no limit."""
        self._limit, self._ends = limit, None
        self._begins = limit is not None
        self._holds = False

    def admitted(self, admission: Admission) -> None:
        """Requests were admitted. The first time in a bounded call it is decided whether to draft.

        The decision follows from lengths and blocks, as they are without drafts.
        """
        if not self._begins:
            return
        self._begins = False
        assert self._limit is not None
        self._holds = bool(admission.waiting) or admission.lacks_blocks(self._limit)
        if not self._holds:
            running = (entry.request for lane in admission.lanes for entry in lane.entries)
            self._ends = {r.id: len(r.response_ids) + self._limit for r in running}

    def call_is_done(self, admission: Admission) -> bool:
        """Whether every request has made the tokens that the call may add."""
        if self._ends is None or admission.waiting:
            return False
        entries = [entry for lane in admission.lanes for entry in lane.entries]
        return all(not self._left(entry.request) for entry in entries)

    def _left(self, request: Request) -> int:
        """The tokens that a request may still make in this call."""
        left = tokens_left(request)
        if self._ends is not None:
            left = min(left, self._ends[request.id] - len(request.response_ids))
        return left

    def guesses(self, lane: Lane, admission: Admission, most: int) -> list[Guess] | None:
        """The rows of the lane's next pass with drafts, the longest first; `most` tokens in all.

        None where every row of the lane makes a single token, as without speculation. Blocks are
        allocated for the drafts; those that get none are cut.
        """
        rows = [entry for entry in lane.entries if self._left(entry.request)]
        waits = len(rows) < len(lane.entries)
        if self._holds or any(e.request.sampling.edits_logits for e in lane.entries):
            # Edited logits depend on the tokens before, which a draft only guesses.
            drafts: list[list[int]] = [[] for _ in rows]
        else:
            drafts = self._drafts(rows, most - len(rows))
        if not waits and not any(drafts):
            return None
        guesses = []
        for entry, draft in zip(rows, drafts, strict=True):
            room = admission.extend(entry, len(draft)) if draft else 0
            guesses.append(Guess(entry, draft[:room]))
        return sorted(guesses, key=lambda guess: -len(guess.tokens))

    def _drafts(self, rows: Sequence[Entry], spare: int) -> list[list[int]]:
        """A draft for each row, `spare` tokens in all; the pass makes one token more than each."""
        wanted = self.lengths.choose([_group(entry.request) for entry in rows])
        drafts = []
        for entry, number in zip(rows, wanted, strict=True):
            most = min(number, self._left(entry.request) - 1, spare)
            draft = list(self.source.draft(entry.request, most))[:most] if most > 0 else []
            spare -= len(draft)
            drafts.append(draft)
        return drafts

    def accept_all(
        self,
        guesses: Sequence[Guess],
        batch: VerifyBatch,
        drawn: DrawnTokens,
        stops: StopStrings | None,
    ) -> tuple[list[SequenceRows], list[tuple[Request, str]]]:
        """Append what a pass has `drawn` to the requests, as `accept`.

        Gives where the experts of the new tokens are, and the requests that end, with the reason.
        """
        spans, ended, counts = [], [], []
        for guess, start, row in zip(guesses, batch.starts, batch.rows, strict=True):
            request, cached = guess.entry.request, guess.entry.length - 1
            num_new, finish = self.accept(guess, drawn, start, stops)
            counts.append(num_new)
            if request.routed_experts is not None:
                spans.append(SequenceRows(request.routed_experts, cached, num_new, row))
            if finish is not None:
                ended.append((request, finish))
        if batch.inputs.paged.states is not None:  # those behind refused tokens are undone
            batch.inputs.paged.states.accept(counts)
        return spans, ended

    def accept(
        self,
        guess: Guess,
        drawn: DrawnTokens,
        start: int,
        stops: StopStrings | None,
    ) -> tuple[int, str | None]:
        """Append what was drawn behind the pending token and behind each guess, while it is right.

        The first of its tokens, at `start` in `drawn`, is. If it is the first guess, so is the one
        drawn behind that guess, and so on: each from its own uniform. Gives the number of tokens
        that the request has made, and why its response ends, or None.
        """
        request, num_tokens, accepted, finish = guess.entry.request, 0, 0, None
        for guessed in (*guess.tokens, None):
            row = start + num_tokens
            token, log_prob = int(drawn.tokens[row]), float(drawn.log_probs[row])
            kept = None if drawn.kept is None else drawn.kept[row][drawn.kept[row] >= 0]
            finish = append_token(request, token, log_prob, kept, stops)
            num_tokens += 1
            accepted += token == guessed
            if token != guessed or finish is not None:
                break
        if guess.tokens:
            self.num_drafted += len(guess.tokens)
            self.num_accepted += accepted
            self.num_refused += guessed is not None and token != guessed
            # A response that has ended says nothing of the rest of a draft.
            known = len(guess.tokens) if finish is None else accepted
            self.lengths.saw_draft(_group(request), known, accepted)
        return num_tokens, finish


def verify_batch(
    guesses: Sequence[Guess],
    tables: Ints,
    cache: KVCache,
    vocab_size: int,
    device: torch.device,
    uniforms_of: UniformsOf | None,
) -> VerifyBatch:
    """The pass that verifies guesses, the longest first; `uniforms_of`: see `VerifyBatch.of`."""
    rows = []
    for guess in guesses:
        entry, request = guess.entry, guess.entry.request
        pending = (request.response_ids or request.prompt_ids)[-1]
        start, table = entry.length - 1, tables[entry.slot]
        job = Prefill(
            [pending, *guess.tokens], start, table, state=entry.state, images=entry.images
        )
        rows.append((request, entry.slot, job))
    return VerifyBatch.of(rows, cache, vocab_size, device, uniforms_of)


def _group(request: Request) -> PromptGroup:
    """The prompt's samples, by which acceptance is learned."""
    return PromptGroup(request.task, request.id if request.prefix is None else request.prefix)


def make_speculation(
    length: int | None, parallel: GenParallel, source: DraftSource | None = None
) -> Speculation | None:
    """Speculation with drafts of `length` tokens; 0: none at all, None: as long as pays."""
    if length == 0:
        return None
    lengths = FixedLength(length) if length else BestLength(parallel.of_first)
    return Speculation(source or SeenTexts(), lengths)
