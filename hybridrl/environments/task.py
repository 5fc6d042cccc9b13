"""What goes between a driver and an environment: tasks, turns, answers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ChatMessage = dict[str, Any]
"""A message of a chat: `role`, `content`, and what the role has besides."""

FailureKind = Literal["error", "timeout", "crash", "replay", "rewritten"]
"""Why an episode has failed. Its program raised, took too long, or ended its process. Or it
answered otherwise when it was run again, or a client has changed what the model had read."""


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One row of the data, from which every episode of a prompt starts.

    `messages` are those of the row: the question in its template, a system prompt before it.
    """

    messages: tuple[ChatMessage, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""
    source: str = ""
    opening: tuple[ChatMessage, ...] | None = None
    """The first messages, once they are known: every episode must begin with them."""
    answers: tuple[str, ...] = ()
    """The texts of all right answers, where there are several."""
    expected: Any = None
    """The answer's column as the source has it, where it is no text."""
    asked: Any = None
    """The prompt's column as the source has it, a text or messages."""

    @property
    def question(self) -> str:
        """The text of the last message."""
        return str(self.messages[-1].get("content") or "") if self.messages else ""

    @property
    def seed(self) -> int:
        """A number below 2^63 that follows from the row alone, for what its episodes share."""
        return int(self.digest[:16], 16) >> 1

    @property
    def digest(self) -> str:
        """Hexadecimal digits that tell rows apart."""
        text = json.dumps([self.row, self.messages], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """A turn of the model's: its text, and `stop` or, where it was cut off, `length`.

    It has so many `tokens`, after `prompt_tokens` of prompt, earlier turns and replies.
    """

    text: str
    finish: str = "stop"
    prompt_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """What a program has done since the last turn: it answers with `messages`, or has ended.

    `rewards` has what each turn has earned so far. An episode ends with `finish` `stop`, or
    `length` where a limit ended it; then `scalars` has what its program has noted. Or it fails:
    then `failure` says why.
    """

    messages: tuple[ChatMessage, ...] | None
    rewards: tuple[float, ...] = ()
    finish: Literal["stop", "length"] = "stop"
    scalars: Mapping[str, float | int | str] = field(default_factory=dict)
    failure: FailureKind | None = None
    error: str = ""

    def to_json(self) -> list[Any]:
        """Plain JSON types, which `from_json` takes back."""
        messages = None if self.messages is None else list(self.messages)
        scalars = dict(self.scalars)
        return [messages, list(self.rewards), self.finish, scalars, self.failure, self.error]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "EpisodeStep":
        """A step as it was written."""
        messages, rewards, *more = values
        answer = None if messages is None else tuple(messages)
        return cls(answer, tuple(map(float, rewards)), *more)


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn already made, for a replay, and the step that followed it, where that is known."""

    turn: ModelTurn
    step: EpisodeStep | None = None


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """A program waits for the model: the `messages` of the first turn.

    `steps` are those that followed the turns already made, in a replay. `failure` as in a step.
    `tools` are schemas that a client has told of with them.
    """

    messages: tuple[ChatMessage, ...] = ()
    steps: tuple[EpisodeStep, ...] = ()
    failure: FailureKind | None = None
    error: str = ""
    tools: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> list[Any]:
        """Plain JSON types, which `from_json` takes back."""
        steps = [step.to_json() for step in self.steps]
        return [list(self.messages), steps, self.failure, self.error, list(self.tools)]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> "EpisodeStart":
        """A start as it was written."""
        messages, steps, failure, error, tools = values
        past = tuple(map(EpisodeStep.from_json, steps))
        return cls(tuple(messages), past, failure, error, tuple(tools))


def as_before(step: EpisodeStep, known: EpisodeStep | None, number: int) -> EpisodeStep:
    """The step of turn `number` in a replay, or a failure where another one is `known` of it."""
    if step.failure is None and known is not None and step != known:
        return failed("replay", f"turn {number} is answered otherwise than before")
    return step


def failed(kind: FailureKind, error: BaseException | str) -> EpisodeStep:
    """The step of an episode that has failed."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return EpisodeStep(None, failure=kind, error=" ".join(text.split()).rstrip(": ")[:500])
