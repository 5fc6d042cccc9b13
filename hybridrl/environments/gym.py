"""A gymnasium environment: observations become text, and text becomes actions."""

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from hybridrl.config import ConfigError, EnvironmentConfig, SourceConfig
from hybridrl.config.dotted import load_function
from hybridrl.environments.arguments import PARAMS, PATH, read_params
from hybridrl.environments.program import Environment, of_class
from hybridrl.environments.task import ChatMessage, EpisodeTask

DEFAULTS: dict[str, Any] = {"options": {}, "view": "", "actions": []}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def gym(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=gym: `gymnasium.make(path, **options)`, which `reset` seeds by the task.

    `view` is a dotted path of a function of observation and environment that gives a text. Without
    one it is what `render` gives as text, or else the observation. `actions` are names of discrete
    actions. Without them an action is the last number in a turn, for a space of text all of it. A
    turn without an action is told so, and earns nothing.
    """
    try:
        import gymnasium
    except ImportError as error:
        allowed = f"another kind, or pip install 'hybridrl[agents]' ({error})"
        raise ConfigError("environment.kind", "gym", allowed) from error
    params = read_params(config, DEFAULTS)
    view = load_function(f"{PARAMS}.view", params["view"]) if params["view"] else seen
    try:
        space = gymnasium.make(str(config.path), **params["options"]).action_space
    except Exception as error:  # each environment has its own
        allowed = f"an environment that gymnasium makes ({type(error).__name__}: {error})"
        raise ConfigError(PATH, config.path, allowed) from error
    read = reader_of(space, list(map(str, params["actions"])))

    class Played:
        """One environment of gymnasium's, with text for observations and actions."""

        def __init__(self) -> None:
            self.environment = gymnasium.make(str(config.path), **params["options"])

        def reset(self, task: EpisodeTask, rng: Random) -> list[ChatMessage]:
            observation, _ = self.environment.reset(seed=task.seed % 2**31)
            text = "\n".join(filter(None, [task.question, view(observation, self.environment)]))
            return [*task.messages[:-1], {"role": "user", "content": text}]

        def step(self, text: str) -> tuple[str, float, bool]:
            try:
                action = read(text)
            except ValueError as error:
                return str(error), 0.0, False
            observation, reward, ended, cut, _ = self.environment.step(action)
            return view(observation, self.environment), float(reward), bool(ended or cut)

        def close(self) -> None:
            self.environment.close()

    return Environment(of_class(Played))


def seen(observation: Any, environment: Any) -> str:
    """What `render` gives as text, or the observation."""
    if environment.render_mode == "ansi":
        return str(environment.render())
    return str(observation.tolist() if hasattr(observation, "tolist") else observation)


def reader_of(space: Any, names: list[str]) -> Callable[[str], Any]:
    """What makes an action of a space of a text; it raises ValueError where there is none.

    Raises ConfigError for a space that text cannot say, or another number of names.
    """
    import gymnasium.spaces as spaces

    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        if names and len(names) != space.n:
            raise ConfigError(f"{PARAMS}.actions", names, f"names of {space.n} actions, or none")
        first, last = int(space.start), int(space.start + space.n - 1)

        def discrete(text: str) -> int:
            if names:
                lines = [line.strip().lower() for line in text.splitlines()]
                numbers = [names.index(n) for line in lines for n in names if line == n.lower()]
                if not numbers:
                    raise ValueError(f"A line says the action: {', '.join(names)}.")
                return first + numbers[-1]
            spoken = [int(float(number)) for number in _NUMBER.findall(text)]
            if not spoken or not first <= spoken[-1] <= last:
                raise ValueError(f"The action is a number from {first} to {last}.")
            return spoken[-1]

        return discrete
    if isinstance(space, spaces.Box | spaces.MultiDiscrete):

        def numbers(text: str) -> Any:
            spoken = [float(number) for number in _NUMBER.findall(text)]
            size = 1
            for length in space.shape:
                size *= length
            if len(spoken) != size:
                raise ValueError(f"The action has {size} numbers.")
            import numpy as np

            action = np.array(spoken).reshape(space.shape).astype(space.dtype)
            if not space.contains(action):
                raise ValueError(f"The action is of {space}.")
            return action

        return numbers
    allowed = f"an environment whose actions text can say, not {type(space).__name__}"
    raise ConfigError(PATH, str(space), allowed)
