"""A user's reward function: whose signature it has, how it is called, what it returns.

Functions for verl and TRL are called as they are there, so that one may bring them along.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hybridrl.config import ConfigError, JudgeConfig, RewardCall
from hybridrl.config.dotted import load_function
from hybridrl.rewards.results import JudgeAnswer, RewardInput, answer_of


class Signature(Enum):
    """The parameters of a reward function, told by their names."""

    own = ("prompt", "response", "answer", "item")
    own_batch = ("prompts", "responses", "answers", "items")
    verl = ("data_source", "solution_str", "ground_truth", "extra_info")
    verl_batch = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    trl = ("prompts", "completions")  # and columns of the rows

    @property
    def is_of_several(self) -> bool:
        """Whether it gets lists and returns one."""
        return self in (Signature.own_batch, Signature.verl_batch, Signature.trl)


_MARKS = {
    "completions": Signature.trl,
    "solution_strs": Signature.verl_batch,
    "solution_str": Signature.verl,
    "responses": Signature.own_batch,
    "response": Signature.own,
}
"""The parameter that tells a signature from the others: the model's text."""


@dataclass(frozen=True)
class UserFunction:
    """A reward function with its signature, which `accepts` so many of its parameters by name."""

    function: Callable[..., Any]
    signature: Signature
    accepts: frozenset[str] | None
    """None: all, since it has `**kwargs`."""
    needs: frozenset[str]
    """Parameters without a default."""

    def arguments(self, items: Sequence[RewardInput], texts: Sequence[str]) -> dict[str, Any]:
        """The arguments for responses whose judged texts are `texts`: lists, or of one its own.

        Raises ValueError where the function needs a column that the rows do not have.
        """
        several = _ARGUMENTS[self.signature](items, texts)
        if missing := self.needs - several.keys():
            wanted, there = ", ".join(sorted(missing)), ", ".join(map(str, items[0].item))
            never = ", which judges do not get" if missing & _NOT_OF_JUDGES else ""
            raise ValueError(
                f"the function wants {wanted}{never}; the columns of the row are {there}"
            )
        if self.accepts is not None:
            several = {name: value for name, value in several.items() if name in self.accepts}
        if self.signature.is_of_several:
            return several
        return {name: value for name, (value,) in several.items()}

    def values(self, returned: Any, number: int) -> list[Any]:
        """What the function has `returned` for each of so many responses.

        Raises TypeError or ValueError where it is no list of as many, but should be.
        """
        values = returned if self.signature.is_of_several else [returned]
        is_one = not hasattr(values, "__len__") or getattr(values, "ndim", None) == 0
        if is_one or isinstance(values, str | bytes | Mapping | Set):  # a set has no order
            kind = type(values).__name__
            raise TypeError(f"the function returned {kind}, wanted a list of numbers")
        if len(values) != number:
            count = len(values)
            raise ValueError(f"the function returned {count} rewards for {number} responses")
        if self.signature in (Signature.verl, Signature.verl_batch):
            values = [x.get("score", x) if isinstance(x, Mapping) else x for x in values]
        return list(values)

    def answers(self, returned: Any, texts: Sequence[str | None]) -> list[JudgeAnswer]:
        """The answers to several responses; one without a text to judge scores 0."""
        pairs = zip(self.values(returned, len(texts)), texts, strict=True)
        return [answer_of(value, text) for value, text in pairs]


def user_function(config: JudgeConfig) -> UserFunction:
    """The function of kind=function.

    Raises ConfigError where there is none, it must wait, or its parameters are nobody's.
    """
    if config.function is None:
        raise ConfigError("reward.function", None, "a dotted path, for reward.kind=function")
    function = _loaded(config.function)
    if config.waits is False and is_async(function):
        allowed = f"true or null: {config.function} is async"
        raise ConfigError("reward.waits", config.waits, allowed)
    described = _described(config.function, function)
    if config.call is not RewardCall.sample and not described.signature.is_of_several:
        allowed = f"sample: {config.function} judges one response a call"
        raise ConfigError("reward.call", config.call.value, allowed)
    return described


@functools.cache  # its module runs once
def _loaded(path: str) -> Callable[..., Any]:
    return load_function("reward.function", path)


def _described(path: str, function: Callable[..., Any]) -> UserFunction:
    try:
        parameters = list(inspect.signature(function).parameters.values())
        written = " ".join(str(inspect.signature(function)).split())
    except (TypeError, ValueError):  # of a builtin
        parameters, written = [], "none that can be read"
    known = ", ".join(f"{name}({', '.join(x.value)})" for name, x in _EXAMPLES.items())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    signatures = {_MARKS[name] for name in named if name in _MARKS}
    if not signatures and takes_any:
        signatures = {Signature.own}
    by_position = any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    if len(signatures) != 1 or by_position:
        allowed = f"a function with the parameters of {known}, by name; it has {written}"
        raise ConfigError("reward.function", path, allowed)
    (signature,) = signatures
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    strange = needed - set(signature.value)
    if strange and signature is not Signature.trl:
        allowed = (
            f"a function whose parameters are among {', '.join(signature.value)}; "
            f"not {', '.join(sorted(strange))}"
        )
        raise ConfigError("reward.function", path, allowed)
    accepts = None if takes_any else frozenset(named)
    return UserFunction(function, signature, accepts, frozenset(needed))


_NOT_OF_JUDGES = {"completion_ids", "trainer_state", "log_extra", "log_metric"}
"""What GRPOTrainer gives, and a judge of texts does not have."""
_EXAMPLES = {"score": Signature.own, "verl's": Signature.verl, "TRL's": Signature.trl}


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives something to await."""
    called = getattr(function, "__call__", None)  # noqa: B004 (of an object, its method)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _own(items: Sequence[RewardInput], texts: Sequence[str]) -> dict[str, list[Any]]:
    prompts = [item.prompt for item in items]
    answers, rows = [item.told_answer for item in items], [dict(item.item) for item in items]
    return {"prompt": prompts, "response": list(texts), "answer": answers, "item": rows}


def _own_batch(items: Sequence[RewardInput], texts: Sequence[str]) -> dict[str, list[Any]]:
    return {f"{name}s": values for name, values in _own(items, texts).items()}


def _verl(items: Sequence[RewardInput], texts: Sequence[str]) -> dict[str, list[Any]]:
    """As verl's reward managers call it: `data_source` and `extra_info` are the row's columns."""
    rows = [item.item for item in items]
    sources = [row["data_source"] for row in rows if "data_source" in row]
    return {
        **({"data_source": sources} if len(sources) == len(rows) else {}),
        "solution_str": list(texts),
        "ground_truth": [_ground_truth(item) for item in items],
        "extra_info": [dict(row.get("extra_info") or {}) for row in rows],
    }


def _verl_batch(items: Sequence[RewardInput], texts: Sequence[str]) -> dict[str, list[Any]]:
    return {f"{name}s": values for name, values in _verl(items, texts).items()}


def _ground_truth(item: RewardInput) -> Any:
    """The answer as the row has it, a number, too."""
    answer: Any = item.answer if item.expected is None else item.expected
    return answer["ground_truth"] if _has_truth(answer) else answer


def _has_truth(answer: Any) -> bool:
    return isinstance(answer, Mapping) and "ground_truth" in answer


def _trl(items: Sequence[RewardInput], texts: Sequence[str]) -> dict[str, list[Any]]:
    """As GRPOTrainer calls it: a list for each column of the rows, messages where prompts are."""
    rows = [dict(item.item) for item in items]
    asked = [item.asked for item in items]
    told = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(asked, texts, strict=True)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    several = {name: [row.get(name) for row in rows] for name in names if name != "prompt"}
    return {**several, "prompts": asked, "completions": told}


_ARGUMENTS: dict[
    Signature, Callable[[Sequence[RewardInput], Sequence[str]], dict[str, list[Any]]]
] = {
    Signature.own: _own,
    Signature.own_batch: _own_batch,
    Signature.verl: _verl,
    Signature.verl_batch: _verl_batch,
    Signature.trl: _trl,
}
