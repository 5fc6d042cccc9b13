"""Conversations of known length: the turns of a response, its replies, and how long they take."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config import ConfigError
from hybridrl.flow.executor import EpisodeReply, TurnEnded
from hybridrl.flow.sample import OUT_OF_TOKENS, SampleId

TURNS = "turns=N,reply=TOKENS,wait=SECONDS[,sigma=S][,seed=K]"


class ModeledTurn(NamedTuple):
    """A turn of `tokens`, answered after `wait_s` seconds with so many tokens.

    None instead of them: the episode ends with this turn.
    """

    tokens: int
    reply_tokens: int | None
    wait_s: float


class ModeledConversation(NamedTuple):
    """The turns of a response, and how it ends."""

    turns: tuple[ModeledTurn, ...]
    finish: str = "stop"

    def cut_at(self, most: int) -> "ModeledConversation":
        """With at most so many tokens of turns and replies; a reply that does not fit ends it."""
        turns: list[ModeledTurn] = []
        for turn in self.turns:
            tokens = min(turn.tokens, most)
            most -= tokens + (turn.reply_tokens or 0)
            if most <= 0 or turn.reply_tokens is None:
                is_cut = tokens < turn.tokens or turn.reply_tokens is not None
                turns.append(turn._replace(tokens=tokens, reply_tokens=None))
                return ModeledConversation(tuple(turns), "length" if is_cut else self.finish)
            turns.append(turn)
        raise AssertionError("a conversation without an end")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationModel:
    """The turns of responses whose own tokens are known.

    A response has `turns` turns, fewer where it has fewer tokens, of random shares. Replies have
    `reply_tokens` on average, and come after `wait_s` seconds on average. The logarithm of a wait
    is normal, with standard deviation `wait_sigma`; that of a reply's tokens with a half. What is
    drawn follows from `seed` and the sample's identity.
    """

    turns: int
    reply_tokens: float
    wait_s: float
    wait_sigma: float = 1.0
    seed: int = 0

    def of(self, id: SampleId, tokens: int) -> ModeledConversation:
        """The conversation of a sample that writes so many tokens itself."""
        draw = random.Random(f"{self.seed} {id} conversation")
        num = max(1, min(self.turns, tokens))
        ends = [*sorted(draw.sample(range(1, tokens), num - 1)), tokens] if tokens else [1]
        lengths = [stop - start for start, stop in zip([0, *ends], ends, strict=False)]
        waits, replies = self._draw(draw, self.wait_s, self.wait_sigma), self._replies(draw)
        last = len(lengths) - 1
        return ModeledConversation(
            tuple(
                ModeledTurn(length, None if i == last else next(replies), next(waits))
                for i, length in enumerate(lengths)
            )
        )

    def _replies(self, draw: random.Random) -> Iterator[int]:
        return (max(1, round(tokens)) for tokens in self._draw(draw, self.reply_tokens, 0.5))

    def _draw(self, draw: random.Random, mean: float, sigma: float) -> Iterator[float]:
        """Log-normal numbers of this mean."""
        while True:
            yield mean * math.exp(sigma * draw.gauss(0.0, 1.0) - sigma * sigma / 2)


def reply_to(turn: TurnEnded, modeled: ModeledTurn, num_turns: int, finish: str) -> EpisodeReply:
    """What the environment of a modeled conversation answers; rewards are all 0."""
    if modeled.reply_tokens is not None:
        return EpisodeReply(turn.id, (0,) * modeled.reply_tokens)
    is_cut = int(finish == "length")
    scalars = {"num_turns": num_turns, "environment_reward": 0.0, OUT_OF_TOKENS: is_cut}
    return EpisodeReply(turn.id, None, finish, (0.0,) * num_turns, scalars)


def read_conversations(text: str) -> ConversationModel:
    """The turns that `--turns` names; raises `ConfigError` for anything else than `TURNS`."""
    values = dict(item.split("=", 1) for item in text.split(",") if "=" in item)
    try:
        model = ConversationModel(
            turns=int(values.pop("turns")),
            reply_tokens=float(values.pop("reply")),
            wait_s=float(values.pop("wait")),
            wait_sigma=float(values.pop("sigma", 1)),
            seed=int(values.pop("seed", 0)),
        )
    except (KeyError, ValueError):
        raise ConfigError("--turns", text, TURNS) from None
    if values:
        raise ConfigError("--turns", text, TURNS)
    if not (
        model.turns >= 1
        and 1 <= model.reply_tokens < 1e6
        and 0 <= model.wait_s < 1e6
        and 0 <= model.wait_sigma < 5
    ):
        allowed = "turns and reply from 1, wait from 0, sigma from 0 to 5"
        raise ConfigError("--turns", text, allowed)
    return model
