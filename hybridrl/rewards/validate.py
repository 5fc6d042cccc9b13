"""The trial of a judge before a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from hybridrl.config import ConfigError, JudgeConfig, RewardKind, SourceConfig
from hybridrl.rewards import pool, waiting
from hybridrl.rewards.process import JudgeProcess
from hybridrl.rewards.results import TIMEOUT, RewardInput, RewardResult, failure, result_of


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
    program = waiting.PROGRAM if config.is_central else pool.PROGRAM
    replies = [""] if config.is_central else []
    process = JudgeProcess(program, config, sources or {}, *replies, role=role)
    try:
        process.wait_ready()
        if process.waits and not config.is_central and items:  # an async function, told by itself
            process.kill()
            return validate_reward(replace(config, waits=True), sources, role, items)
        results = () if config.kind.asks else tuple(_judged(process, item) for item in items)
        return Trial(process.waits, results)
    except RuntimeError as error:
        key = f"{role}.function" if config.kind is RewardKind.function else f"{role}.kind"
        value = config.function or config.kind.value
        raise ConfigError(key, value, f"a verifier that starts ({error})") from error
    finally:
        process.kill()


def _judged(process: JudgeProcess, item: RewardInput) -> RewardResult:
    """The result of one response, judged alone."""
    central = process.config.is_central
    try:
        process.connection.send((1, [item]) if central else [item])
        wait(process.waitables, process.config.timeout_s + waiting.GRACE_S)
        if not process.connection.poll():
            process.kill()
            return result_of(failure(f"{TIMEOUT}no reward within {process.config.timeout_s} s"))
        answer = process.receive()
    except (EOFError, OSError, ValueError):  # it has died, or been killed before
        return result_of(failure("the verifier process has ended"))
    return result_of(answer[1][0] if central else answer)
