"""The trial of a judge before a run."""

from collections.abc import Mapping

from hybridrl.config import ConfigError, JudgeConfig, RewardKind, SourceConfig
from hybridrl.rewards import pool, waiting
from hybridrl.rewards.process import JudgeProcess


def validate_reward(
    config: JudgeConfig,
    sources: Mapping[str, SourceConfig] | None = None,
    role: str = "reward",
) -> bool:
    """Raise ConfigError if the judge cannot be built; starts one process and ends it.

    `config` are the settings under the key `role`. Gives whether it waits (`JudgeConfig.waits`).

    The process starts as in a run. It compiles the expressions, imports the function or
    math-verify, builds the datasets, or asks whether the endpoint is there. This process does not
    import a user's module. A reward model has no verifier: see `hybridrl.rewards.model`.
    """
    if config.kind is RewardKind.model:
        return False
    program = waiting.PROGRAM if config.is_central else pool.PROGRAM
    replies = [""] if config.is_central else []
    process = JudgeProcess(program, config, sources or {}, *replies, role=role)
    try:
        process.wait_ready()
        return process.waits
    except RuntimeError as error:
        key = f"{role}.function" if config.kind is RewardKind.function else f"{role}.kind"
        value = config.function or config.kind.value
        raise ConfigError(key, value, f"a verifier that starts ({error})") from error
    finally:
        process.kill()
