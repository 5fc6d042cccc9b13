"""An environment of the package `verifiers` (0.4), which talks to the policy over the endpoint."""

import asyncio
import contextvars
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from random import Random
from types import ModuleType
from typing import Any

from hybridrl.config import ConfigError, EnvironmentConfig, SourceConfig
from hybridrl.environments.arguments import PARAMS, PATH, read_params
from hybridrl.environments.program import Environment, Model
from hybridrl.environments.task import EpisodeTask

DEFAULTS: dict[str, Any] = {"env": {}}
HARNESS = "hybridrl_chat"
"""The harness that plays where `params.env` names none: it chats, in this process."""


def verifiers(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=verifiers: the environment of the taskset `path`; `params.env` are settings of `env`.

    Rows are those of `tasks`, which have the number of a task. An episode earns the reward of its
    traces.
    """
    params = read_params(config, DEFAULTS)
    environment = load(str(config.path), params["env"], config.max_turns)
    tasks = list(environment.taskset)
    served = _Served(environment)
    numbers = itertools.count()

    async def program(task: EpisodeTask, model: Model, rng: Random) -> float:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        await served.start()
        address, key = await model.endpoint()
        variable = f"HYBRIDRL_EPISODE_{next(numbers)}"  # its clients read keys from there alone
        os.environ[variable] = key
        try:
            client = EvalClientConfig(base_url=address, api_key_var=variable)
            context = ModelContext(model="policy", client=client)
            episode = await environment.run_episode(tasks[task.row["index"]], context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        model.at_limit = any(trace.stop_condition == "max_turns" for trace in episode.traces)
        return float(sum(trace.reward for trace in episode.traces))

    return Environment(program)


def load(taskset: str, settings: Mapping[str, Any], max_turns: int | None = None) -> Any:
    """The `Env` of a taskset. Raises ConfigError.

    Its agent has at most `max_turns`, unless `settings` say otherwise: verifiers scores what ends
    there, and not what the endpoint's own limit ends.
    """
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        allowed = f"another kind, or pip install 'hybridrl[verifiers]' ({error})"
        raise ConfigError("environment.kind", "verifiers", allowed) from error
    _add_harness()
    agent: dict[str, Any] = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    try:
        agent = {"max_turns": max_turns, **settings.get("agent", agent)}
        merged = {**settings, "agent": agent, "taskset": {"id": taskset}}
        return load_environment(resolve_env_config(merged))
    except ModuleNotFoundError as error:
        raise ConfigError(PATH, taskset, f"an installed taskset ({error})") from error
    except Exception as error:  # pydantic's, and what a taskset raises
        text = " ".join(str(error).split())[:200]
        raise ConfigError(f"{PARAMS}.env", dict(settings), f"settings of {taskset} ({text})") from (
            error
        )


def tasks(seed: int, taskset: str) -> Iterator[dict[str, Any]]:
    """Rows of kind=function sources: one for each task of a taskset, by its number."""
    for index, task in enumerate(load(taskset, {}).taskset):
        yield {"question": str(task.data.prompt), "answer": "", "index": index}


class _Served:
    """An `Env` whose resources are up from the first episode on."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Wait until they are."""
        if self._ready is None:
            loop, bare = asyncio.get_running_loop(), contextvars.Context()
            self._ready = loop.create_future()
            # Without the mark of the episode that is the first.
            self._task = loop.create_task(self._hold(), context=bare)
        await asyncio.shield(self._ready)

    async def _hold(self) -> None:
        assert self._ready is not None
        try:
            async with self._environment.serving():
                self._ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)


def _add_harness() -> None:
    """Make the chatting harness known to verifiers, which finds them as modules."""
    if HARNESS in sys.modules:
        return
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarnessConfig(HarnessConfig):
        """No settings of its own."""

    class ChatHarness(Harness[ChatHarnessConfig]):
        """Asks for one completion after what was said, in this process."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
            data: Any, **more: Any,
        ) -> Any:  # fmt: skip
            import openai

            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message.model_dump(exclude_none=True) for message in prompt or ()]
            async with openai.AsyncOpenAI(
                base_url=endpoint, api_key=secret, max_retries=0
            ) as client:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            return ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(HARNESS)
    ChatHarness.__module__ = ChatHarnessConfig.__module__ = HARNESS
    names = {"ChatHarness": ChatHarness, "ChatHarnessConfig": ChatHarnessConfig}
    module.__dict__.update(names, __all__=["ChatHarness"])
    sys.modules[HARNESS] = module
