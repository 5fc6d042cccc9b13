"""Verifiers: from a response to a number. Pure functions, built from the config.

They run in sandboxes (see `hybridrl.rewards.judge`); nothing here imports torch or ray.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.config import ConfigError, JudgeConfig, RewardKind, SourceConfig, SourceKind
from hybridrl.config.patterns import compiled, last_match
from hybridrl.config.reasoning import import_reasoning_gym
from hybridrl.rewards.code import judge_program, program_in
from hybridrl.rewards.functions import MAX_TEXT, as_reward, user_function
from hybridrl.rewards.results import RewardInput
from hybridrl.sandbox.jail import choose

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


def make_selector(config: JudgeConfig, key: str = "reward") -> Callable[[str], str | None]:
    """What of a response is judged, as `make_verifier` says; None where nothing matches.

    `key` is the place of the settings. Raises ConfigError.
    """
    if config.extract is not None:
        return functools.partial(last_match, compiled(f"{key}.extract", config.extract))
    return program_in if config.kind is RewardKind.code else str


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
        # math-verify takes a draft's \boxed{} and the answer's for a set of both.
        text = _THOUGHTS.sub("", text, count=1)
        forms = [text]
        if not _DELIMITED.search(text):
            # An answer alone reads as one. Words may be prose, which is searched for its answer.
            forms = [_boxed(text), text] if _WORD.search(text) else [_boxed(text)]
        parsed = [parse(form, parsing_timeout=None) for form in forms]
        pairs = itertools.product(map(expected, item.right_answers), parsed)
        return float(any(verify(*pair, timeout_seconds=None) for pair in pairs))

    return judge


_THOUGHTS = re.compile(
    r"\A.*(?:</think>|\[/THINK\]|</seed:think>|<channel\|>|<\|channel\|>final<\|message\|>)(?=.*\S)",
    re.DOTALL,
)
"""What comes before the answer, where there is one."""
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

    def judge(item: RewardInput, text: str) -> float:
        returned = function.function(**function.arguments([item], [text]))
        (value,) = function.values(returned, 1)
        return as_reward(value)

    return judge


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
