"""The judge inside a sandbox: its service, and the verifiers. It imports neither torch nor ray."""

import asyncio
import functools
import inspect
import itertools
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config import (
    ConfigError,
    JailKind,
    JudgeConfig,
    RewardCall,
    RewardKind,
    SourceConfig,
    SourceKind,
)
from hybridrl.config.patterns import compiled, last_match
from hybridrl.config.reasoning import import_reasoning_gym
from hybridrl.rewards.code import judge_program, program_in
from hybridrl.rewards.functions import is_async, user_function
from hybridrl.rewards.results import (
    BUDGET_SPENT,
    MAX_TEXT,
    TIMEOUT,
    BudgetSpent,
    EndpointError,
    EndpointTimeout,
    JudgeAnswer,
    RewardInput,
    answer_of,
    as_reward,
    failure,
)
from hybridrl.sandbox import Service
from hybridrl.sandbox.jail import choose
from hybridrl.sandbox.worker import TimeLimitReached, cpu_limit

if TYPE_CHECKING:
    from hybridrl.rewards.endpoint import Endpoint

Unit = Sequence[RewardInput]
JudgeUnit = Callable[[Unit], Awaitable[list[JudgeAnswer]]]
Verify = Callable[[RewardInput, str], float]
"""Reward of an input whose judged text is the second argument."""


class JudgeService(Service):
    """Judges units: responses that one call is about."""

    def __init__(
        self,
        answer: Callable[..., None],
        config: JudgeConfig,
        sources: Mapping[str, SourceConfig],
        replies: str | None,
    ) -> None:
        super().__init__(answer)
        self.config, self.sources, self.replies = config, sources, replies
        self._endpoint: Endpoint | None = None
        self._told: dict[str, int] = {}

    async def open(self) -> list[Any]:
        """Build the judge; what confines programs, and whether it waits."""
        config, itself_waits = self.config, waits(self.config)
        # An endpoint's code is not foreign, and its process has requests that others would lose.
        self.marks_requests = not config.kind.asks
        if config.kind.asks:
            # aiohttp takes longer to import than all the rest, which every verifier does.
            from hybridrl.rewards.endpoint import Endpoint

            self._endpoint = Endpoint(config, Path(self.replies) if self.replies else None)
            self._judge = endpoint_judge(config, self._endpoint)
            if self.replies == "":
                await self._endpoint.probe()
        elif config.kind is RewardKind.function:
            self._judge = function_judge(config)
        else:
            self._judge = computing_judge(config, self.sources)
        return [jail_of(config), itself_waits]

    async def judge(self, number: int, unit: Unit) -> None:
        """Answer with `[answers, counts]`, counts since the last answer."""
        answers = await answered(self._judge, unit, self.config.timeout_s)
        told, self._told = self._told, dict(self._endpoint.counts) if self._endpoint else {}
        fresh = {name: count - told.get(name, 0) for name, count in self._told.items()}
        self.answer(number, answers, fresh)

    async def close(self, running: Collection["asyncio.Task[None]"]) -> None:
        """As the base class."""
        if self._endpoint is not None:
            await self._endpoint.close()


make = JudgeService


def computing_judge(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> JudgeUnit:
    """Judges responses one by one, in the only thread; the owner kills what takes too long."""
    verify = make_verifier(config, sources)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        return [[reward, None, text] for reward, text in map(verify, unit)]

    return judge


def function_judge(config: JudgeConfig) -> JudgeUnit:
    """Judges by a user's function; one that waits does so within `timeout_s`."""
    function, select = user_function(config), make_selector(config)
    call = function.function
    if config.waits and not is_async(call):
        call = in_thread(call)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        with cpu_limit(config.timeout_s):  # `extract` holds all others up
            texts = [select(item.response) for item in unit]
        if config.call is RewardCall.sample and texts == [None]:
            return [answer_of(0.0, None)]
        arguments = function.arguments(unit, [text or "" for text in texts])
        try:
            async with asyncio.timeout(config.timeout_s) as limit:
                returned = call(**arguments)
                if inspect.isawaitable(returned):
                    returned = await returned
        except TimeoutError as error:
            if limit.expired():
                raise TimeLimitReached from error
            raise  # the function's own
        return function.answers(returned, texts)

    return judge


def endpoint_judge(config: JudgeConfig, endpoint: "Endpoint") -> JudgeUnit:
    """Judges by an endpoint; a unit is one response, or those to one prompt."""
    select = make_selector(config)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        with cpu_limit(config.timeout_s):  # `extract` holds all others up
            texts = [select(item.response) for item in unit]
        if all(text is None for text in texts):
            return [answer_of(0.0, text) for text in texts]
        scores = await endpoint.scores(unit, texts)
        return [answer_of(score, text) for score, text in zip(scores, texts, strict=True)]

    return judge


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """`function`, each call in a thread, of which one that hangs takes no other's place."""

    def outcome(arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        try:
            return function(**arguments), None
        except BaseException as error:  # a future takes no StopIteration, and SystemExit ends loops
            return None, error

    async def call(**arguments: Any) -> Any:
        value, error = await asyncio.to_thread(outcome, arguments)
        if error is not None:
            raise error
        return value

    return call


async def answered(judge: JudgeUnit, unit: Unit, timeout_s: float) -> list[Any]:
    """The answers to a unit, or `[BUDGET_SPENT, message]`."""
    try:
        return await judge(unit)
    except BudgetSpent as error:
        return [BUDGET_SPENT, str(error)]
    except EndpointTimeout as error:
        answer = failure(f"{TIMEOUT}{error}")
    except EndpointError as error:
        answer = failure(str(error))
    except TimeLimitReached:
        answer = failure(f"{TIMEOUT}no reward within {timeout_s} s")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        answer = failure(error)  # the function's own
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the user's as well
        answer = failure(error)
    return [answer] * len(unit)


def jail_of(config: JudgeConfig) -> str:
    """What confines the programs that the verifier runs, in words; empty where it runs none."""
    runs_programs = config.kind is RewardKind.code or config.jail is not JailKind.auto
    return str(choose(config.jail)) if runs_programs else ""


def waits(config: JudgeConfig) -> bool:
    """Whether the verifier waits for something else than a core of this machine."""
    if config.waits is None and config.kind is RewardKind.function:
        return is_async(user_function(config).function)
    return bool(config.waits)


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
