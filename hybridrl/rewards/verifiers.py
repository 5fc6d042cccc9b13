"""Verifiers: from a response to a number. Pure functions, built from the config.

They run in sandboxed processes (see `hybridrl.rewards.pool`); nothing here imports torch or ray.
"""

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from hybridrl.config import ConfigError, JudgeConfig, RewardKind, SourceConfig, SourceKind
from hybridrl.config.dotted import load_function
from hybridrl.config.patterns import compiled, last_match
from hybridrl.config.reasoning import import_reasoning_gym
from hybridrl.rewards.code import judge_program, program_in
from hybridrl.rewards.jail import choose
from hybridrl.rewards.results import JudgeAnswer, failure


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
    """The answer's column as the source has it, where it is no text or number."""

    @property
    def right_answers(self) -> tuple[str, ...]:
        """The texts of all right answers."""
        return self.answers or (self.answer,)

    @property
    def told_answer(self) -> Any:
        """The answer for a judge of the user's: its text, or the list or struct of the row."""
        return self.answer if self.expected is None else self.expected


MAX_TEXT = 4096
"""Characters of a judged text in a result; longer ones are cut."""

Verify = Callable[[RewardInput, str], float]
"""Reward of an input whose judged text is the second argument."""


def make_verifier(
    config: JudgeConfig, sources: Mapping[str, SourceConfig] | None = None
) -> Callable[[RewardInput], tuple[float, str]]:
    """The verifier of `config`: returns an input's reward, and the judged text.

    The judged text is the first group of the last match of `extract` (the full match if it has no
    group); without `extract` the response, of kind=code its last block of Python. Without a match
    the text is empty and the reward 0, of kind=environment what was earned. The scorers of
    kind=dataset depend on the parameters of `sources` (`data.sources`). Raises ConfigError.
    """
    reads_text = config.kind is not RewardKind.environment
    judge, select = _JUDGES[config.kind](config, sources or {}), make_selector(config)

    def verify(item: RewardInput) -> tuple[float, str]:
        text = select(item.response)
        if text is None and reads_text:
            return 0.0, ""
        text = text or ""
        return as_reward(judge(item, text)), text[:MAX_TEXT]

    return verify


def make_selector(config: JudgeConfig) -> Callable[[str], str | None]:
    """What of a response is judged, as `make_verifier` says; None where nothing matches."""
    if config.extract is not None:
        return functools.partial(last_match, compiled("reward.extract", config.extract))
    return program_in if config.kind is RewardKind.code else str


def user_function(config: JudgeConfig) -> Callable[..., Any]:
    """The function of kind=function; raises ConfigError where there is none, or it must wait."""
    if config.function is None:
        raise ConfigError("reward.function", None, "a dotted path, for reward.kind=function")
    function = _loaded(config.function)
    if config.waits is False and is_async(function):
        allowed = f"true or null: {config.function} is async"
        raise ConfigError("reward.waits", config.waits, allowed)
    return function


@functools.cache  # its module runs once
def _loaded(path: str) -> Callable[..., Any]:
    return load_function("reward.function", path)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives something to await."""
    called = getattr(function, "__call__", None)  # noqa: B004 (of an object, its method)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def of_sample(item: RewardInput, text: str) -> dict[str, Any]:
    """The arguments of a user's function of one response."""
    row = dict(item.item)
    return {"prompt": item.prompt, "response": text, "answer": item.told_answer, "item": row}


def of_several(items: Sequence[RewardInput], texts: Sequence[str | None]) -> dict[str, Any]:
    """The arguments of a user's function of several; one without a text to judge has an empty one.

    It scores 0 in `answers_of`.
    """
    return {
        "prompts": [item.prompt for item in items],
        "responses": [text or "" for text in texts],
        "answers": [item.told_answer for item in items],
        "items": [dict(item.item) for item in items],
    }


def answers_of(values: Any, texts: Sequence[str | None]) -> list[JudgeAnswer]:
    """The answers to several responses from what a user's function returned."""
    if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
        raise TypeError(f"the function returned {type(values).__name__}, wanted a list of numbers")
    if len(values) != len(texts):
        raise ValueError(f"the function returned {len(values)} rewards for {len(texts)} responses")
    return [answer_of(value, text) for value, text in zip(values, texts, strict=True)]


def answer_of(value: Any, text: str | None) -> JudgeAnswer:
    """The answer to a response from the value of its judge."""
    if text is None:
        return [0.0, None, ""]
    try:
        return [as_reward(value), None, text[:MAX_TEXT]]
    except (TypeError, ValueError) as error:
        return failure(error)


def as_reward(value: object) -> float:
    """`value` as a finite float; raises TypeError or ValueError if it is none."""
    if not isinstance(value, Real):
        raise TypeError(f"the reward is {type(value).__name__}, wanted a number")
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, wanted a finite number")
    return reward


def _exact(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    return lambda item, text: float(text in item.right_answers)


def _regex(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    if config.pattern is None:
        raise ConfigError("reward.pattern", None, "a regular expression, for reward.kind=regex")
    pattern = config.pattern
    compiled("reward.pattern", pattern.replace("{answer}", "answer"))
    named = "{answer}" in pattern

    def judge(item: RewardInput, text: str) -> float:
        answers = item.right_answers if named else ("",)
        expressions = (pattern.replace("{answer}", re.escape(answer)) for answer in answers)
        return float(any(re.fullmatch(expression, text) for expression in expressions))

    return judge


def _math(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    """math-verify without its time limits, which need SIGALRM in a main thread."""
    import logging

    # It warns once that its limits are off; ours is the pool's.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    @functools.lru_cache(maxsize=4096)
    def expected(answer: str) -> Any:
        return parse(_boxed(answer), parsing_timeout=None)

    def judge(item: RewardInput, text: str) -> float:
        forms = [text]
        if not _DELIMITED.search(text):
            # An answer alone reads as one. Words may be prose, which is searched for its answer.
            forms = [_boxed(text), text] if _WORD.search(text) else [_boxed(text)]
        parsed = [parse(form, parsing_timeout=None) for form in forms]
        pairs = itertools.product(map(expected, item.right_answers), parsed)
        return float(any(verify(*pair, timeout_seconds=None) for pair in pairs))

    return judge


_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")


def _boxed(answer: str) -> str:
    """An answer as math-verify reads one, whatever its text looks like: `(1,2)`, `A`, `x^2+1`."""
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _dataset(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    """reasoning_gym's `score_answer`, of the dataset with the source's parameters."""
    others = {n: s.kind.value for n, s in sources.items() if s.kind is not SourceKind.reasoning_gym}
    if others or not sources:
        raise ConfigError(
            "reward.kind",
            "dataset",
            f"another kind, since only reasoning_gym has scorers (data.sources: {others})",
        )
    reasoning_gym = import_reasoning_gym()  # a second, which other verifiers need not pay
    datasets = {
        name: reasoning_gym.create_dataset(source.name, **{**source.params, "size": 1})
        for name, source in sources.items()
    }
    return lambda item, text: float(datasets[item.source].score_answer(text, dict(item.item)))


def _function(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    function = user_function(config)
    # `as_reward` checks the user's value.
    return lambda item, text: function(**of_sample(item, text))


def _code(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    choose(config.jail)  # raises where none works

    def judge(item: RewardInput, text: str) -> float:
        return judge_program(text, {**item.item, "answer": item.told_answer}, config)

    return judge


def _environment(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> Verify:
    def judge(item: RewardInput, text: str) -> float:
        if item.earned is None:
            raise ValueError("a response that no environment has answered")
        return item.earned

    return judge


_JUDGES: dict[RewardKind, Callable[[JudgeConfig, Mapping[str, SourceConfig]], Verify]] = {
    RewardKind.dataset: _dataset,
    RewardKind.exact: _exact,
    RewardKind.regex: _regex,
    RewardKind.math: _math,
    RewardKind.function: _function,
    RewardKind.code: _code,
    RewardKind.environment: _environment,
}
