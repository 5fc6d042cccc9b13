"""A verifier's verdict, then another try."""

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from random import Random
from typing import Any, get_type_hints

from hybridrl.config import ConfigError, EnvironmentConfig, RewardConfig, RewardKind, SourceConfig
from hybridrl.config.bounds import check_values
from hybridrl.environments.arguments import PARAMS, read_params
from hybridrl.environments.program import Environment, Model
from hybridrl.environments.task import EpisodeTask
from hybridrl.rewards.results import RewardInput
from hybridrl.rewards.worker import make_verifier

DEFAULTS: dict[str, Any] = {
    "judge": {"kind": "dataset"},
    "again": "That is wrong. Try again.",
    "enough": 1.0,
}


def retry(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=retry: the model answers until the judge gives `enough`, or it has no turn left.

    `judge` has the keys of `reward`. Each turn earns what its answer is better than the best one
    before. So the turns of an episode have earned its best score together.
    """
    params = read_params(config, DEFAULTS)
    verify = make_verifier(judge_of(params["judge"]), sources)

    async def program(task: EpisodeTask, model: Model, rng: Random) -> None:
        reply: Any = task.messages
        best = 0.0
        while True:
            turn = await model.turn(reply)
            reward_input = RewardInput(
                task.question, turn.text, task.answer, task.row, task.source,
                answers=task.answers, expected=task.expected, question=task.asked,
            )  # fmt: skip
            score, _ = verify(reward_input)
            model.reward(max(0.0, score - best))
            best = max(best, score)
            if score >= params["enough"]:
                return
            reply = params["again"]

    return Environment(program)


def judge_of(settings: Mapping[str, Any]) -> RewardConfig:
    """The judge of `environment.params.judge`. Raises ConfigError."""
    key, hints = f"{PARAMS}.judge", get_type_hints(RewardConfig)
    known = {setting.name for setting in fields(RewardConfig)} - {
        "parts", "endpoint", "limits", "on_failure", "max_failed_share",
    }  # fmt: skip
    values = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(key, name, known)
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, Enum):
            options = [option.value for option in kind]
            if value not in options:
                raise ConfigError(f"{key}.{name}", value, options)
            value = kind(value)
        values[name] = value
    config = RewardConfig(**values)
    check_values(RewardConfig, {f.name: getattr(config, f.name) for f in fields(config)}, key)
    config.check(key)
    if config.kind in _NOT_HERE or config.is_central:
        kinds = [kind.value for kind in RewardKind if kind not in _NOT_HERE]
        raise ConfigError(f"{key}.kind", config.kind.value, kinds)
    return config


_NOT_HERE = {
    RewardKind.model,
    RewardKind.http,
    RewardKind.chat,
    RewardKind.sum,
    RewardKind.environment,
}
