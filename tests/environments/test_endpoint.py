"""The policy behind OpenAI's API: conversations continue by their messages, others are refused."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from environment_pools import Make, Pool, played, task

from hybridrl.config import ConfigError
from hybridrl.environments import ModelTurn, Openings
from hybridrl.environments.endpoint import chunks_of
from hybridrl.environments.episode import Episode
from hybridrl.environments.program import Model, as_messages

pytestmark = pytest.mark.long

PROGRAMS = '''
import asyncio, json

import aiohttp

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def post(address, key, **body):
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{address}/chat/completions", json=body, headers=headers) as got:
            return got.status, await got.json()


async def agent(task, model, rng, tools=(), change="", extra={}):
    """Talks until the model says `end`; what it is told comes back in capitals."""
    address, key = await model.endpoint()
    messages = [{"role": "system", "content": "Brief."}, *task.messages]
    while True:
        more = {"tools": list(tools)} if tools else {}
        code, body = await post(address, key, model="any", messages=messages, **more, **extra)
        if code != 200:
            model.note("code", code)
            model.note("error", body["error"]["message"])
            return 0.25
        choice = body["choices"][0]
        message, content = choice["message"], choice["message"]["content"]
        if content == "end":
            return 1.0
        model.note("reason", choice["finish_reason"])
        messages.append({**message, "refusal": None, "annotations": []})
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
        if not message.get("tool_calls"):
            parts = [{"type": "text", "text": (content or "").upper()}]
            messages.append({"role": "user", "content": parts})
        if change == "first":
            messages[1] = {"role": "user", "content": "other"}
        if change == "answer":
            messages[2]["content"] = "I said else"
        if change == "cut":
            del messages[1:]
        if change == "tools":
            tools = [TOOL]


async def forgetful(task, model, rng):
    """Sends each request twice, and notes how many answers were the same."""
    address, key = await model.endpoint()
    messages, same, content = list(task.messages), 0, ""
    while content != "end":
        request = {"model": "any", "messages": messages, "tools": [TOOL]}
        code, body = await post(address, key, **request)
        same += await post(address, key, **request) == (200, body)
        message, content = body["choices"][0]["message"], body["choices"][0]["message"]["content"]
        if content is None:
            model.note("reason", body["choices"][0]["finish_reason"])
        messages += [message, {"role": "user", "content": "more"}]
    model.note("same", same)
    return 1.0


async def tooled(task, model, rng):
    return await agent(task, model, rng, tools=[TOOL])


async def changing(task, model, rng):
    return await agent(task, model, rng, tools=[{**TOOL, "seed": task.seed}])


async def keys(task, model, rng):
    """Leaves address and key for others, and waits."""
    address, key = await model.endpoint()
    await model.turn([{"role": "user", "content": f"{address} {key}"}])
    await asyncio.sleep(1000)
'''


@pytest.mark.parametrize("again", [False, True], ids=["once", "replayed"])
def test_a_client_converses(make: Make, pool: Pool, again: bool) -> None:
    episodes = pool(make(PROGRAMS, "agent"))
    start, steps = played(episodes, task("Hi"), ["one", "two", "end"])
    assert [m["content"] for m in start.messages] == ["Brief.", "Hi"]
    assert [step.messages[0]["content"] for step in steps if step.messages] == ["ONE", "TWO"]
    assert (steps[-1].rewards, steps[-1].failure) == ((0.0, 0.0, 1.0), None)
    if again:
        from hybridrl.environments import PastTurn

        past = [PastTurn(ModelTurn("one"), steps[0]), PastTurn(ModelTurn("two"), steps[1])]
        assert episodes.start((7,), task("Hi"), past, start.messages).result(60).failure is None
        assert episodes.turn((7,), ModelTurn("end")).result(60) == steps[-1]


def test_calls_of_tools_have_their_form(make: Make, pool: Pool) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    start, steps = played(pool(make(PROGRAMS, "tooled")), task("2+3"), [call, "end"])
    assert [tool["function"]["name"] for tool in start.tools] == ["add"]
    assert steps[0].messages == ({"role": "tool", "tool_call_id": "call01000", "content": "5"},)
    assert steps[1].scalars["reason"] == "tool_calls"


@pytest.mark.parametrize("with_usage", [False, True])
def test_chunks_of_a_stream_add_up_to_the_completion(with_usage: bool) -> None:
    """What OpenAI's client makes of them: tests/environments/test_clients.py."""
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    whole = {"id": "x", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    first, last, *more = chunks_of(whole, with_usage)
    (one,), (other,) = first["choices"], last["choices"]
    assert one["delta"] == {**message, "tool_calls": [{"index": 0, **calls[0]}]}
    assert (one["finish_reason"], other) == (
        None, {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    )  # fmt: skip
    assert [(chunk["choices"], chunk["usage"]) for chunk in more] == [([], usage)] * with_usage


def test_the_tools_of_a_client_are_those_of_the_prompt(make: Make) -> None:
    with Openings(make(PROGRAMS, "tooled")) as opening:
        opening([task("a"), task("b")])
        assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    with (
        Openings(make(PROGRAMS, "changing")) as opening,
        pytest.raises(ConfigError, match="whose first request has the same tools"),
    ):
        opening([task("a"), task("b")])


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("first", "message 1 was user 'Hi', and is user 'other'"),
        ("answer", "message 2 was assistant 'one', and is assistant 'I said else'"),
        ("cut", "message 1 was user 'Hi', and is left out"),
        ("tools", "the tools are not those of the first request"),
    ],
)
def test_a_conversation_that_is_rewritten_is_dropped(
    make: Make, pool: Pool, change: str, difference: str
) -> None:
    episodes = pool(make(PROGRAMS, "agent", params={"change": change}))
    _, steps = played(episodes, task("Hi"), ["one", "two"])
    assert (steps[0].failure, steps[0].error) == ("rewritten", difference)
    assert episodes.counts["replays"] == 0


@pytest.mark.parametrize("hangs_up", ["before", "as it comes"])
def test_a_client_that_has_hung_up_gets_its_turn_when_it_asks_again(
    make: Make, hangs_up: str
) -> None:
    """Once the model has made it; other messages are refused."""

    async def check() -> None:
        loop, hung_up = asyncio.get_running_loop(), asyncio.Event()
        clients = list[asyncio.Task[ModelTurn]]()

        async def program(task: Any, model: Model, rng: Any) -> None:
            clients.append(loop.create_task(model.turn("q")))
            await hung_up.wait()
            with pytest.raises(RuntimeError, match="other messages"):
                await model.turn("r")
            turn = await model.turn("q")
            model.reward(1)
            await model.turn(turn.text * 2)

        episode = Episode(1, program, task("q"), "key", make("", "x"), no_endpoint)
        assert (await episode.start()).messages == as_messages("q")
        if hangs_up == "before":
            clients[0].cancel()
            await asyncio.sleep(0)
        stepping = loop.create_task(episode.step(ModelTurn("one")))
        loop.call_soon(clients[0].cancel)
        loop.call_later(0.05, hung_up.set)
        step = await stepping
        assert clients[0].cancelled()
        assert (step.error, step.messages) == ("", as_messages("oneone"))
        assert (await episode.step(ModelTurn("two"))).rewards == (1.0, 0.0)

    asyncio.run(check())


async def no_endpoint(model: Model) -> tuple[str, str]:
    raise AssertionError


def test_a_client_that_has_lost_an_answer_gets_it_again(make: Make, pool: Pool) -> None:
    """Its request comes once more after the turn was recorded, whichever it is; nothing is new."""
    episodes = pool(make(PROGRAMS, "forgetful"))
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    start, steps = played(episodes, task("Hi"), ["one", call, "end"])
    assert (start.failure, [step.failure for step in steps]) == (None, [None] * 3)
    assert steps[-1].rewards == (0.0, 0.0, 1.0)
    assert steps[-1].scalars == {"same": 3, "reason": "tool_calls"}


def test_an_episode_of_a_client_ends_at_max_turns(make: Make, pool: Pool) -> None:
    _, steps = played(pool(make(PROGRAMS, "agent", max_turns=2)), task("Hi"), ["one", "two", "a"])
    assert (steps[-1].messages, steps[-1].finish, steps[-1].failure) == (None, "length", None)
    assert len(steps) == 2


async def answers(
    address: str, key: str, *bodies: Any, scheme: str = "Bearer"
) -> list[tuple[int, str]]:
    got = []
    async with aiohttp.ClientSession(headers={"Authorization": f"{scheme} {key}"}) as session:
        for body in bodies:
            data = body if isinstance(body, str) else json.dumps(body)
            async with session.post(f"{address}/chat/completions", data=data) as response:
                got.append((response.status, (await response.json())["error"]["message"]))
    return got


def test_requests_that_are_refused(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "keys"))
    start = episodes.start((0,), task("q")).result(60)
    address, key = start.messages[0]["content"].split()
    assert address.startswith("http://127.0.0.1:")
    messages = [{"role": "user", "content": "Hi"}]
    call = [{"role": "assistant", "content": "a", "tool_calls": ["x"]}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    requests: dict[str, Any] = {
        "n=2: wanted 1: an episode is one conversation": {"messages": messages, "n": 2},
        "logprobs=True: wanted false": {"messages": messages, "logprobs": True},
        "n=True: wanted 1": {"messages": messages, "n": True},
        "logprobs=0: wanted false": {"messages": messages, "logprobs": 0},
        "stream='no': wanted true or false": {"messages": messages, "stream": "no"},
        "stream=1: wanted true or false": {"messages": messages, "stream": 1},
        "model={'a': 1}: wanted a text": {"messages": messages, "model": {"a": 1}},
        "stream_options=1: wanted an object": {
            "messages": messages,
            "stream": True,
            "stream_options": 1,
        },
        "stream_options=[1]: wanted an object": {"messages": messages, "stream_options": [1]},
        "messages is no list": {"messages": []},
        "is no message": {"messages": [{"role": "wizard"}]},
        "not text alone": {"messages": image},
        "content is 5, wanted a text": {"messages": [{"role": "user", "content": 5}]},
        "content is {}, wanted a text": {"messages": [{"role": "user", "content": {}}]},
        "tools is 5, wanted a list of objects": {"messages": messages, "tools": 5},
        "tools is ['x'], wanted a list": {"messages": messages, "tools": ["x"]},
        "parameters of f: wanted a JSON schema": {
            "messages": messages,
            "tools": [{"function": {"name": "f", "parameters": ["a"]}}],
        },
        "parameters of g: wanted a JSON schema": {
            "messages": messages,
            "tools": [{"function": {"name": "g", "parameters": {"properties": ["a"]}}}],
        },
        "tool_calls has 'x', wanted objects": {"messages": call},
        "tool_calls is 5, wanted a list": {"messages": [{**call[0], "tool_calls": 5}]},
        "tool_calls is {'function'": {
            "messages": [{**messages[0], "tool_calls": {"function": {"name": "x"}}}]
        },
        "tool_calls has {'function': 5}": {
            "messages": [{**call[0], "tool_calls": [{"function": 5}]}]
        },
        "the request is no JSON": "{",
        "maximum recursion depth": "[" * 5000,
        "the request is no object": [],
        "another call of it waits": {"messages": messages},
    }
    for (code, error), wanted in zip(
        asyncio.run(answers(address, key, *requests.values())), requests, strict=True
    ):
        assert code == 400
        assert wanted in error
    ((code, _),) = asyncio.run(answers(address, key, {"messages": messages}, scheme="bearer"))
    assert code == 400  # for another call waits: the key is known
    ((code, error),) = asyncio.run(answers(address, "sk-other", {"messages": messages}))
    assert (code, error) == (401, "no episode has this key")
    episodes.end((0,))
    episodes.start((1,), task("q")).result(60)
    ((code, _),) = asyncio.run(answers(address, key, {"messages": messages}))
    assert code == 401


@pytest.mark.layouts
def test_a_port_that_is_taken_is_refused(make: Make, pool: Pool) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"environment\.port={port}: wanted 0, or a port"):
            Openings(make(PROGRAMS, "agent", port=port))
        first = port - 1  # of two processes; the second has the next port
        with pytest.raises(ConfigError, match=rf"environment\.port={port}: wanted 0, or a port"):
            Openings(make(PROGRAMS, "agent", port=first, num_processes=2))
    with Openings(make(PROGRAMS, "keys", port=port)) as opening, pytest.raises(ConfigError):
        opening([task("q")])  # the key differs between its two starts
