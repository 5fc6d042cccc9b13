"""The trial of a judge before a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.config import ConfigError, JudgeConfig, RewardKind, SourceConfig
from hybridrl.rewards.judge import JudgePool
from hybridrl.rewards.results import RewardInput, RewardResult, failure, result_of


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
