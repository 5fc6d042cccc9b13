"""A response to judge, the result, why there is none, and their form between processes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

JudgeAnswer = list[Any]
"""`[reward, message, text]`, as JSON; the message is null where all is well, and else the reward is
0. A message that begins with TIMEOUT says that the judge took too long."""
TIMEOUT = "timeout: "
MAX_TEXT = 4096
"""Characters of a judged text in a result; longer ones are cut."""
LARGEST_REWARD = 1e18
"""Rewards are squared in float32 where groups are compared: a larger one would overflow."""
BUDGET_SPENT = "budget"
"""Begins the answer to a unit that the budget does not allow."""
WRONG_RETURNS = ("Error: the reward is ", "Error: the function returned ")
"""In the message of a function that returned what is no reward, after the error's class."""


class EndpointError(RuntimeError):
    """An endpoint gives no score; the message says why, without the key."""


class EndpointTimeout(EndpointError):
    """The last request had no answer in time."""


class BudgetSpent(RuntimeError):
    """`endpoint.budget` does not allow the request that is due."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One response to judge."""

    prompt: str
    """The text that the model read."""
    response: str
    """The model's text."""
    answer: str
    """The text of the expected answer, the first of several; empty without one."""
    item: Mapping[str, Any] = field(default_factory=dict)
    """The source's row."""
    source: str = ""
    """Name of the source in `data.sources`."""
    earned: float | None = None
    """What the turns of a conversation have earned, in sum."""
    answers: tuple[str, ...] = ()
    """The texts of all right answers, where there are several."""
    expected: Any = None
    """The answer's column as the source has it, where it is no text."""
    question: Any = None
    """The prompt's column as the source has it, a text or messages; None: `prompt`."""

    @property
    def right_answers(self) -> tuple[str, ...]:
        """The texts of all right answers."""
        return self.answers or (self.answer,)

    @property
    def asked(self) -> Any:
        """What the row asks. The row may have another column `question`, or `prompt`."""
        is_empty = self.question is None or (isinstance(self.question, str) and not self.question)
        return self.prompt if is_empty else self.question

    @property
    def told_answer(self) -> Any:
        """The answer for a judge of the user's: its text, or the list or struct of the row."""
        return self.expected if isinstance(self.expected, Mapping | list | tuple) else self.answer


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one sample; 0 unless `status` is `ok`, else `message` says why.

    `text` is the judged text: the match of `reward.extract` in the response, empty without one.
    """

    reward: float
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""
    text: str = ""

    @property
    def recorded_status(self) -> str:
        """The status with its reason, which the samples' records show."""
        return f"{self.status}: {self.message}" if self.message else self.status


def failure(error: BaseException | str) -> JudgeAnswer:
    """The answer where a judge fails with `error`, or a message."""
    message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return [0.0, message[:500], ""]


def answer_of(value: Any, text: str | None) -> JudgeAnswer:
    """The answer to a response from the value of its judge."""
    if text is None:
        return [0.0, None, ""]
    try:
        return [as_reward(value), None, text[:MAX_TEXT]]
    except (TypeError, ValueError) as error:
        return failure(error)


def as_reward(value: object) -> float:
    """`value` as a finite float; raises TypeError or ValueError if it is none.

    Scalars of numpy and torch are numbers, arrays of one element are not.
    """
    scalar = getattr(value, "item", None)
    if callable(scalar) and getattr(value, "ndim", None) == 0:
        value = scalar()
    if not isinstance(value, Real):
        kind = type(value).__name__
        if isinstance(value, Mapping):
            kind += f" with {', '.join(map(str, value)) or 'no field'}"
        raise TypeError(f"the reward is {kind}, wanted a number")
    try:
        reward = float(value)
    except OverflowError:
        raise ValueError("the reward is too large for a number") from None
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, wanted a finite number")
    if abs(reward) > LARGEST_REWARD:
        raise ValueError(f"the reward is {reward:g}, wanted at most {LARGEST_REWARD:g}")
    return reward


def result_of(answer: JudgeAnswer) -> RewardResult:
    """The result that an answer tells; raises ValueError for garbage."""
    reward, message, text = answer
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"{reward!r} is no reward")
    if message is None:
        return RewardResult(float(reward), text=str(text))
    if str(message).startswith(TIMEOUT):
        return RewardResult(0.0, "timeout", str(message).removeprefix(TIMEOUT))
    return RewardResult(0.0, "error", str(message))


def scalars_of(names: Sequence[str], results: Sequence[RewardResult]) -> dict[str, tuple[Any, ...]]:
    """The fields of judged samples: their reward, status and, where named, the judged text."""
    value, status, *text = names
    return {
        value: tuple(result.reward for result in results),
        status: tuple(result.recorded_status for result in results),
        **{name: tuple(result.text for result in results) for name in text},
    }
