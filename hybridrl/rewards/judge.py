"""A judge in sandboxes: responses go in, results come out, under a time limit."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridrl.config import (
    ConfigError,
    JailKind,
    JudgeConfig,
    RewardCall,
    RewardKind,
    SourceConfig,
)
from hybridrl.rewards.results import (
    BUDGET_SPENT,
    TIMEOUT,
    BudgetSpent,
    RewardInput,
    RewardResult,
    failure,
    result_of,
)
from hybridrl.rewards.worker import make_verifier
from hybridrl.sandbox import SandboxPool, SandboxProcess, SandboxTask, Settings
from hybridrl.sandbox.process import settle

logger = logging.getLogger(__name__)

WINDOWS = (4, 128)
"""Calls that a process has where it computes, at least and at most: the next ones are there when
one ends."""
WINDOW_S = 0.02
"""Seconds of such calls between these bounds: a cheap call takes less than to ask for it."""


_NAMES = {True: "judge's", False: "verifier"}


@dataclass(eq=False, slots=True, kw_only=True)
class _Unit(SandboxTask):
    """Responses that are judged by one call; `left` are those without a result.

    The future of the `batch` that it came with has the results of all of its units, in order.
    """

    items: list[RewardInput]
    results: list[RewardResult | None]
    left: list[int]
    batch: "_Batch"

    def settle(self, result: Any) -> None:
        """Its results are there, or an error that ends its whole batch."""
        self.due = False
        self.batch.num_due -= 1
        if isinstance(result, BaseException):
            settle(self.future, result)
        elif not self.batch.num_due:
            settle(self.future, [x for unit in self.batch.units for x in unit.results])


@dataclass(eq=False, slots=True)
class _Batch:
    """Units that came together, of which so many have no results yet."""

    units: list[_Unit]
    num_due: int


class JudgePool(SandboxPool[_Unit]):
    """Judges units of responses, each by one call, in any order.

    A judge that computes has `num_processes`, each with one call at a time. A judge that waits has
    one process, whose event loop has up to `max_in_flight` calls at a time. So has an endpoint,
    which bounds its requests itself. `SandboxPool` says what becomes of calls that hang or die. A
    call that fails by an error is made once more, for the responses that have failed.

    `counts` are what an endpoint was asked (`Endpoint`). kind=exact without `extract`, and
    kind=environment, cannot hang and are judged in this process, without a message a sample.
    """

    def __init__(
        self,
        config: JudgeConfig,
        sources: Mapping[str, SourceConfig] | None = None,
        replies: Path | str | None = None,
        key: str = "reward",
    ) -> None:
        """`replies` is where those of an endpoint are kept, `key` the place of the settings.

        With empty `replies` it is seen at the start whether the endpoint answers.
        """
        assert config.kind is not RewardKind.model, "a reward model needs no verifier"
        self.config, self.key = config, key
        self.ended = f"the {_NAMES[config.is_central]} process ended"
        self.waits = bool(config.waits)
        self._jail_is_logged = False
        self._inline = None
        number = 1 if config.kind.asks or self.waits else config.num_processes
        if config.kind is RewardKind.environment or (
            config.kind is RewardKind.exact and config.extract is None
        ):
            self._inline, number = make_verifier(config), 0
        settings = Settings(
            "hybridrl.rewards.worker",
            (config, dict(sources or {}), None if replies is None else str(replies)),
            config.jail,
            config.limits,
        )
        super().__init__(
            [settings] * number,
            f"verifier ({key}.kind={config.kind.value})",
            step_s=config.timeout_s,
            late=f"no reward within {config.timeout_s} s",
        )

    def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per input, in order. With call=batch each process has one call.

        Raises ConfigError or RuntimeError if a process cannot start.
        """
        size = 1
        if self.config.call is not RewardCall.sample:
            size = max(1, math.ceil(len(items) / max(1, len(self.settings))))
        logger.debug("verifying %d responses", len(items))
        units = [items[i : i + size] for i in range(0, len(items), size)]
        results = self._submit(units).result() if units else []
        logger.debug("%d responses are verified", len(results))
        return results

    def submit(self, items: Sequence[RewardInput]) -> "Future[list[RewardResult]]":
        """Have responses judged by one call; gives their results, in order.

        The future raises BudgetSpent, or the error of a judge that cannot start.
        """
        return self._submit([items])

    def _submit(self, calls: Sequence[Sequence[RewardInput]]) -> "Future[list[RewardResult]]":
        """Have the responses of each of these calls judged; gives the results of all, in order."""
        future: Future[list[RewardResult]] = Future()
        if self._inline is not None:
            judged = [self._inline(item) for call in calls for item in call]
            future.set_result([RewardResult(reward, text=text) for reward, text in judged])
            return future
        batch = _Batch([], len(calls))
        for call in calls:
            results: list[RewardResult | None] = [None] * len(call)
            left = list(range(len(call)))
            unit = _Unit(items=list(call), results=results, left=left, batch=batch, future=future)
            batch.units.append(unit)
        self._do(functools.partial(self._queue.extend, batch.units), future)
        return future

    # -- in the thread -------------------------------------------------------------------------

    def _is_ready(self, process: SandboxProcess, details: list[Any]) -> None:
        jail, self.waits = str(details[0]), bool(details[1])
        if not self.config.kind.asks:
            self.window = self.config.max_in_flight if self.waits else WINDOWS[0]
        if jail and not self._jail_is_logged:
            self._jail_is_logged = True
            level = logging.WARNING if self.config.jail is JailKind.off else logging.INFO
            logger.log(level, "the programs in responses run in: %s", jail)

    def _note_busy(self, process: SandboxProcess) -> None:
        """A process has work of `WINDOW_S` at a time, by the seconds of the calls that it had."""
        super()._note_busy(process)
        span = self.spans[-1]
        if not (self.waits or self.config.kind.asks) and span.answers:
            of_time = WINDOW_S * span.answers / max(1e-9, span.end - span.start)
            self.window = max(WINDOWS[0], min(WINDOWS[1], int(of_time)))

    def _refusal(self, error: BaseException) -> BaseException:
        """The process calls its settings `reward`."""
        if isinstance(error, ConfigError):
            key = error.key.replace("reward.", f"{self.key}.", 1)
            return ConfigError(key, error.value, error.allowed)
        return error

    def _request(self, task: _Unit, process: SandboxProcess) -> tuple[str, tuple[Any, ...], float]:
        before = 0 if self.waits else len(process.requests)  # calls that it makes first
        seconds = (before + 1) * self.config.timeout_s
        left = [task.items[i] for i in task.left]
        return "judge", (left,), math.inf if self.config.kind.asks else seconds

    def _read(self, task: _Unit, answer: list[Any]) -> list[RewardResult] | BudgetSpent:
        answers, counts = answer
        self.counts.update({str(name): int(count) for name, count in counts.items()})
        if answers[:1] == [BUDGET_SPENT]:
            return BudgetSpent(f"{self.key}.endpoint.{answers[1]}")
        if len(answers) != len(task.left):
            raise ValueError(f"{len(answers)} results for {len(task.left)} responses")
        return list(map(result_of, answers))

    def _answered(self, task: _Unit, answer: list[RewardResult] | BudgetSpent) -> None:
        assert task.home is not None
        task.home.leave(task)
        if isinstance(answer, BudgetSpent):
            task.settle(answer)
            return
        for index, result in zip(task.left, answer, strict=True):
            task.results[index] = result
        failed = [i for i, x in zip(task.left, answer, strict=True) if x.status == "error"]
        whole = self.config.call is not RewardCall.group or len(failed) == len(task.left)
        if failed and whole and not task.strikes and not self.config.kind.asks:
            task.left, task.strikes = failed, 1
            self._again(task)
        else:
            task.settle(task.results)

    def _failed(self, task: _Unit, kind: str, error: BaseException | str) -> None:
        result = result_of(failure(f"{TIMEOUT}{error}" if kind == "timeout" else error))
        for index in task.left:
            task.results[index] = result
        task.settle(task.results)


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a judge's trial."""

    waits: bool = False
    """Whether it waits for something else than a core (`JudgeConfig.waits`)."""
    results: tuple[RewardResult, ...] = ()
    """Its results for the responses that it was tried on, in order."""


def validate_reward(
    config: JudgeConfig,
    sources: Mapping[str, SourceConfig] | None = None,
    role: str = "reward",
    items: Sequence[RewardInput] = (),
) -> Trial:
    """Raise ConfigError if the judge cannot be built; starts one process and ends it.

    `config` are the settings under the key `role`. The judge is tried on `items`, unless it is an
    endpoint or a model.

    The process starts as in a run. It compiles the expressions, imports the function or
    math-verify, builds the datasets, or asks whether the endpoint is there. This process does not
    import a user's module. A reward model has no verifier: see `hybridrl.rewards.model`.
    """
    if config.kind is RewardKind.model:
        return Trial()
    results = list[RewardResult]()
    with JudgePool(replace(config, num_processes=1), sources, "", role) as judge:
        try:
            judge.wait_ready()
        except RuntimeError as error:
            key = f"{role}.function" if config.kind is RewardKind.function else f"{role}.kind"
            value = config.function or config.kind.value
            raise ConfigError(key, value, f"a verifier that starts ({error})") from error
        for item in () if config.kind.asks else items:
            results += judge.submit([item]).result()
            if results[-1].status == "timeout" or judge.ended in results[-1].message:
                gone = result_of(failure("the verifier process has ended"))
                results += [gone] * (len(items) - len(results))
                break  # each of the others could take as long
    return Trial(judge.waits, tuple(results))
