"""A conversation on its rank: what is known of its tokens, and how its response is told apart."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import torch

from hybridrl.engines.rollout.interface import Turn
from hybridrl.flow.sample import TRAINED, TURN, TURN_REWARDS, TURN_STATE, TokenSpan

CONVERSATION_TENSORS = (TRAINED, TURN, TURN_REWARDS, TURN_STATE)
"""Tensors of a conversation besides `tokens` and `log_probs`."""


class TurnText(NamedTuple):
    """A turn for the record: what the model said, what was replied, what the turn has earned."""

    text: str
    reply: str
    reward: float


class SampleTexts(NamedTuple):
    """A sample for the record; one that is no conversation has no `turns`."""

    prompt: str
    response: str
    turns: tuple[TurnText, ...] = ()


def turn_texts(
    response: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    decode: Callable[[torch.Tensor], str],
) -> tuple[TurnText, ...]:
    """The turns of a response [tokens] by the tensors of its conversation; none without them."""
    if TURN_REWARDS not in tensors:
        return ()
    trained, number = tensors[TRAINED], tensors[TURN]
    return tuple(
        TurnText(
            decode(response[(number == turn) & trained]),
            decode(response[(number == turn) & ~trained]),
            reward,
        )
        for turn, reward in enumerate(tensors[TURN_REWARDS].tolist())
    )


def grown(spans: tuple[TokenSpan, ...], num_tokens: int, version: int) -> tuple[TokenSpan, ...]:
    """`spans` with the tokens up to `num_tokens`, which `version` has made since.

    It has read the reply before them, too, which may have come under an older version.
    Example: 3 tokens of version 1, then 5 in all: (0 to 3 of 1, 3 to 5 of 2).
    """
    start = spans[-1].stop if spans else 0
    if num_tokens == start:
        return spans
    if spans and not spans[-1].trained:
        spans = (*spans[:-1], replace(spans[-1], version=version))
    elif spans and spans[-1].version == version:
        return (*spans[:-1], replace(spans[-1], stop=num_tokens))
    return (*spans, TokenSpan(start, num_tokens, version))


def recomputed(spans: tuple[TokenSpan, ...], positions: Collection[int]) -> tuple[TokenSpan, ...]:
    """`spans` cut where keys and values were computed again: with so many tokens.

    Not where they were computed by the version that had made all of them.
    Example: 5 tokens of version 1 and 8 of version 2, computed again with 3 and with 9 tokens:
    (0 to 5 of 1, 5 to 9 of 2, 9 to 13 of 2, recomputed).
    """
    if not positions:
        return spans
    cut, versions = list[TokenSpan](), set[int]()  # the versions of keys and values
    for span in spans:
        if not span.trained:
            cut.append(span)
            continue
        within = [p for p in positions if span.start <= p < span.stop]
        if within and versions - {span.version}:
            if (position := min(within)) > span.start:
                cut.append(replace(span, stop=position))
            span, versions = replace(span, start=position, recomputed=True), set()
        cut.append(span)
        versions.add(span.version)
    return tuple(cut)


def answered(spans: tuple[TokenSpan, ...], num_tokens: int, version: int) -> tuple[TokenSpan, ...]:
    """`spans` with the `num_tokens` of a reply, which are read by `version` and not trained."""
    if not num_tokens:
        return spans
    start = spans[-1].stop
    return (*spans, TokenSpan(start, start + num_tokens, version, trained=False))


def conversation_tensors(
    turns: Sequence[Turn], prompt: Sequence[int], response: Sequence[int], rewards: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Tensors of a conversation with these tokens: of the response, and of its turns.

    `trained` bool [response tokens] is False where an environment wrote. `turn` int32 [response
    tokens] is the number of the turn, and in a reply that of the turn before. `turn_rewards`
    float32 [turns]: no `rewards` are zeros. `turn_state` int64 [turns] tells the texts apart that
    came before turns: the prompt, then replies. Raises ValueError for another number of `rewards`.
    """
    if rewards and len(rewards) != len(turns):
        raise ValueError(f"{len(rewards)} turn rewards for {len(turns)} turns")
    trained = torch.zeros(len(response), dtype=torch.bool)
    number = torch.zeros(len(response), dtype=torch.int32)
    for index, turn in enumerate(turns):
        trained[turn.start : turn.stop] = True
        number[turn.start :] = index
    values = torch.tensor(list(rewards) or [0.0] * len(turns), dtype=torch.float32)
    shown = [prompt, *(response[a.stop : b.start] for a, b in pairwise(turns))]
    states = torch.tensor([_hash(tokens) for tokens in shown[: len(turns)]], dtype=torch.int64)
    return {TRAINED: trained, TURN: number, TURN_REWARDS: values, TURN_STATE: states}


def _hash(tokens: Sequence[int]) -> int:
    """A signed number of 64 bits, the same in every process."""
    digest = blake2b(repr(list(tokens)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
