"""Packages of the extra `agents`: environments of gymnasium, agents on OpenAI's clients."""

from typing import Any

import pytest
from environment_pools import Make, Pool, played, settled, task

from hybridrl.config import ConfigError, EnvironmentConfig, EnvironmentKind
from hybridrl.environments.load import load_environment

pytestmark = pytest.mark.agents


def gym(path: str, **params: Any) -> EnvironmentConfig:
    return settled(EnvironmentConfig(kind=EnvironmentKind.gym, path=path, params=params))


def test_a_walk_on_the_lake(pool: Pool) -> None:
    """FrozenLake without slips: right, right, down, down, down, right comes to the goal."""
    options = {"is_slippery": False, "render_mode": "ansi"}
    actions = ["left", "down", "right", "up"]
    episodes = pool(gym("FrozenLake-v1", options=options, actions=actions))
    way = ["right", "I go\nright", "jump", "down", "DOWN", "down", "right"]
    start, steps = played(episodes, task("Walk to G."), way)
    assert start.messages[0]["content"].startswith("Walk to G.\n")
    assert "SFFF" in start.messages[0]["content"].replace("\x1b[41mS\x1b[0m", "S")
    assert steps[2].messages == (
        {"role": "user", "content": "A line says the action: left, down, right, up."},
    )
    assert steps[-1].messages is None
    assert steps[-1].rewards == (0.0,) * 6 + (1.0,)


def test_numbers_are_actions_and_tasks_are_seeds(pool: Pool) -> None:
    episodes = pool(gym("CartPole-v1"))
    start, steps = played(episodes, task("Balance."), ["0", "1, then 7", "1"])
    again = episodes.start((9,), task("Balance.")).result(60)
    other = episodes.start((10,), task("Balance it.")).result(60)
    assert start.messages == again.messages != other.messages
    assert steps[1].messages == (
        {"role": "user", "content": "The action is a number from 0 to 1."},
    )
    assert steps[2].rewards == (1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (gym("Nowhere-v0"), r"environment\.path=Nowhere-v0: wanted an environment that gymnasium"),
        (gym("CartPole-v1", actions=["left"]), r"params\.actions=.*names of 2 actions"),
        (gym("CartPole-v1", view="x"), r"params\.view=x"),
        (gym("CartPole-v1", look="x"), r"environment\.params=look"),
    ],
)
def test_environments_that_cannot_be(config: EnvironmentConfig, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_environment(config)


AGENTS = """
import asyncio

import agents
import openai
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel

agents.set_tracing_disabled(True)


async def plain(task, model, rng):
    address, key = await model.endpoint()
    client = openai.AsyncOpenAI(base_url=address, api_key=key)
    messages = [{"role": "user", "content": task.question}]
    while True:
        made = await client.chat.completions.create(model="policy", messages=messages)
        message = made.choices[0].message
        if message.content == "end":
            return 1.0
        messages += [message, {"role": "user", "content": message.content.upper()}]


async def streaming(task, model, rng):
    \"\"\"Notes what the client has made of the chunks, and what it was charged.\"\"\"
    address, key = await model.endpoint()
    client = openai.AsyncOpenAI(base_url=address, api_key=key)
    messages = [{"role": "user", "content": task.question}]
    while True:
        text = ""
        async for chunk in await client.chat.completions.create(
            model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (7, 2), chunk
        assert finish == "stop", finish
        if text == "end":
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": text * 2}]


async def refused(task, model, rng):
    \"\"\"What it may not have: several choices, log-probabilities, the key of another.\"\"\"
    address, key = await model.endpoint()
    messages = [{"role": "user", "content": task.question}]
    codes = []
    for key, more in ((key, {"n": 2}), (key, {"logprobs": True}), ("sk-other", {})):
        client = openai.AsyncOpenAI(base_url=address, api_key=key, max_retries=0)
        try:
            await client.chat.completions.create(model="policy", messages=messages, **more)
        except openai.APIStatusError as error:
            codes.append(error.status_code)
    await model.turn(messages)
    model.note("codes", " ".join(map(str, codes)))


async def blocking(task, model, rng):
    address, key = await model.endpoint()
    client = openai.OpenAI(base_url=address, api_key=key)
    messages = [{"role": "user", "content": task.question}]
    made = await asyncio.to_thread(
        client.chat.completions.create, model="policy", messages=messages
    )
    return float(made.choices[0].message.content == "end")


async def rewriting(task, model, rng):
    address, key = await model.endpoint()
    client = openai.AsyncOpenAI(base_url=address, api_key=key, max_retries=0)
    for text in ("one", "two"):
        messages = [{"role": "user", "content": text}]
        await client.chat.completions.create(model="policy", messages=messages)


@agents.function_tool
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    return a + b


async def agent(task, model, rng):
    address, key = await model.endpoint()
    client = openai.AsyncOpenAI(base_url=address, api_key=key)
    policy = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    solver = agents.Agent(name="solver", instructions="Add.", tools=[add], model=policy)
    result = await agents.Runner.run(solver, task.question)
    model.note("output", result.final_output)
    return float(result.final_output == "It is 5.")
"""


@pytest.mark.parametrize(
    ("name", "turns", "replies", "rewards"),
    [
        ("plain", ["one", "two", "end"], ["ONE", "TWO"], (0.0, 0.0, 1.0)),
        ("blocking", ["end"], [], (1.0,)),
        ("streaming", ["one", "end"], ["oneone"], (0.0, 1.0)),
        (
            "agent",
            [
                '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
                "It is 5.",
            ],
            ["5"],
            (0.0, 1.0),
        ),
    ],
)
def test_agents_on_the_clients_of_openai(
    make: Make, pool: Pool, name: str, turns: list[str], replies: list[str], rewards: Any
) -> None:
    _, steps = played(pool(make(AGENTS, name)), task("2+3?"), turns)
    assert [(step.failure, step.error) for step in steps] == [(None, "")] * len(steps)
    assert [step.messages[0]["content"] for step in steps if step.messages] == replies
    assert steps[-1].rewards == rewards


def test_what_a_client_may_not_have(make: Make, pool: Pool) -> None:
    _, steps = played(pool(make(AGENTS, "refused")), task("q"), ["a"])
    assert steps[0].scalars["codes"] == "400 400 401"


def test_an_agent_that_rewrites_is_dropped(make: Make, pool: Pool) -> None:
    _, steps = played(pool(make(AGENTS, "rewriting")), task("q"), ["a"])
    assert steps[0].failure == "rewritten"
