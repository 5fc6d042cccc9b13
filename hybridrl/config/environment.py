"""Environments: what answers the model's turns, and the limits of a conversation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError
from hybridrl.config.reward import JailKind, RewardConfig, RewardKind


class EnvironmentKind(Enum):
    """The programs that answer a model's turns."""

    none = "none"  # no environment: a response is one turn
    tools = "tools"  # functions that the model may call
    grid = "grid"  # a walk on a grid
    python = "python"  # runs the programs that the model writes, in a jail
    retry = "retry"  # a verifier's verdict, then another try
    gym = "gym"  # a gymnasium environment with a text view
    verifiers = "verifiers"  # an environment of the package `verifiers`
    function = "function"  # a user's program by dotted path

    @property
    def needs_path(self) -> bool:
        """Whether `environment.path` says which one."""
        return self in _WITH_PATH


_WITH_PATH = frozenset(
    {
        EnvironmentKind.tools,
        EnvironmentKind.gym,
        EnvironmentKind.verifiers,
        EnvironmentKind.function,
    }
)


class OnFailure(Enum):
    """What becomes of a sample whose episode has failed."""

    drop = "drop"  # it leaves, as one that the engine gave up
    zero = "zero"  # it is trained, with what it earned set to 0; a rewritten one is dropped


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """The environment of a run's conversations, the processes it runs in, and its limits."""

    kind: EnvironmentKind = EnvironmentKind.none
    """Which one."""
    path: str | None = None
    """`package.module:name` or `/path/file.py:name`: of kind=tools a list of functions, of
    kind=function a program. Of kind=gym and verifiers the name that the package knows."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_turns: int = bounded(8, least=1)
    """Turns of the model in an episode, which ends there."""
    max_turn_tokens: int = bounded(0, least=0)
    """Longest turn, in tokens; 0: `rollout.max_new_tokens`, that of the whole response."""
    max_reply_tokens: int = bounded(0, least=0)
    """Longest reply, in tokens; a longer one is cut. 0: `rollout.max_new_tokens`."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a turn, besides the token that ends one. The turn keeps them."""
    turn_timeout_s: float = bounded(30.0, above=0, allowed="seconds above 0")
    """Seconds for the answer to one turn; past it the episode has failed."""
    episode_timeout_s: float = bounded(600.0, above=0, allowed="seconds above 0")
    """Seconds for all answers of an episode; the model's time does not count."""
    num_processes: int = bounded(1, least=1)
    """Processes in the run, each with many episodes on one event loop. Nodes of a Ray cluster share
    them by their CPUs, and have one at least; with a `port` all are on the driver's node."""
    memory_mb: int = bounded(4096, least=64)
    """Memory of a process."""
    on_failure: OnFailure = OnFailure.drop
    """What becomes of a sample whose episode fails twice."""
    max_failed_share: float = bounded(0.5, above=0, most=1)
    """The run ends where more than this share of a step's episodes fail, or an evaluation's."""
    tool_calls: str = "auto"
    """The form in which the model writes calls of tools. `auto`: that of its chat template, or of
    its tokenizer's response schema. A form by vLLM's name for it: `hermes`, `glm45` and others;
    `vllm:NAME` is vLLM's own parser. A .json file: a response schema of transformers."""
    replay: bool = True
    """Whether the program may be run again on the turns already made, and answers the same then."""
    port: int = bounded(0, least=0, most=65535)
    """Port on loopback of the first process's OpenAI endpoint, the next ones follow; 0: any."""

    @property
    def is_on(self) -> bool:
        """Whether responses are conversations."""
        return self.kind is not EnvironmentKind.none

    def resolve(self, max_new_tokens: int) -> None:
        """Fill in lengths that are those of the whole response."""
        if self.is_on:
            self.max_turn_tokens = self.max_turn_tokens or max_new_tokens
            self.max_reply_tokens = self.max_reply_tokens or max_new_tokens

    def check(self, max_new_tokens: int) -> None:
        """Raise ConfigError for settings that cannot work; the longest response is in tokens."""
        kind = self.kind
        if kind.needs_path != (self.path is not None):
            allowed = f"a value, for environment.kind={kind.value}"
            if not kind.needs_path:
                kinds = ", ".join(k.value for k in EnvironmentKind if k.needs_path)
                allowed = f"null, or environment.kind={kinds}"
            raise ConfigError("environment.path", self.path or "null", allowed)
        if not self.is_on:
            if self.stop:  # rollout.stop is that of plain responses
                allowed = "[], or an environment.kind; rollout.stop ends plain responses"
                raise ConfigError("environment.stop", self.stop, allowed)
            return
        for name in ("max_turn_tokens", "max_reply_tokens"):
            if getattr(self, name) > max_new_tokens:
                allowed = f"at most rollout.max_new_tokens={max_new_tokens}"
                raise ConfigError(f"environment.{name}", getattr(self, name), allowed)
        if "" in self.stop:
            raise ConfigError("environment.stop", self.stop, "texts of one or more characters")
        if self.turn_timeout_s > self.episode_timeout_s:
            allowed = f"at most environment.episode_timeout_s={self.episode_timeout_s:g}"
            raise ConfigError("environment.turn_timeout_s", self.turn_timeout_s, allowed)

    def check_jail(self, jail: JailKind) -> None:
        """Raise ConfigError where the model's programs would run without a jail."""
        if self.kind is EnvironmentKind.python and jail is JailKind.off:
            kinds = ", ".join(k.value for k in JailKind if k is not JailKind.off)
            allowed = f"one of {kinds}, with environment.kind=python"
            raise ConfigError("reward.jail", jail.value, allowed)

    def check_rewards(self, judges: Sequence[tuple[str, RewardConfig]]) -> None:
        """Raise ConfigError for a judge that reads what episodes earn, without an environment.

        Likewise where episodes that fail are to earn nothing, and another judge gives the reward.
        """
        for key, judge in judges:
            scorers = {f"{key}.parts.{name}": one for name, one in judge.parts.items()}
            for place, one in {key: judge, **scorers}.items():
                earned = one.kind in (RewardKind.environment, RewardKind.sum)
                zeroes = self.is_on and self.on_failure is OnFailure.zero
                if zeroes and key == "reward" and not earned:
                    allowed = f"drop, with {place}.kind={one.kind.value}, or reward=environment"
                    raise ConfigError("environment.on_failure", self.on_failure.value, allowed)
                if one.kind is RewardKind.environment and not self.is_on:
                    kinds = [k.value for k in RewardKind if k is not RewardKind.environment]
                    allowed = f"one of {', '.join(kinds)}, or an environment.kind"
                    raise ConfigError(f"{place}.kind", one.kind.value, allowed)

    def check_open_episodes(self, is_partial: bool, max_staleness: int) -> None:
        """Raise ConfigError where episodes are open between steps, and could not continue."""
        if not self.is_on or self.replay:
            return
        if is_partial:
            raise ConfigError("environment.replay", False, "true with schedule=partial")
        if max_staleness:
            allowed = "true with schedule=async (or one_step) and schedule.max_staleness above 0"
            raise ConfigError("environment.replay", False, f"{allowed}: checkpoints have open ones")
