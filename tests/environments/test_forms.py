"""The forms of a program: an async function, a class, a list of tools; and those that are none."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from environment_pools import Make, Pool, played, settled, task

from hybridrl.config import ConfigError, EnvironmentConfig, EnvironmentKind
from hybridrl.environments import EpisodePool, EpisodeStep, ModelTurn, PastTurn
from hybridrl.environments.load import load_environment
from hybridrl.environments.tool_calls import CallForm
from hybridrl.environments.tools import schema_of

PROGRAMS = '''
import asyncio


async def guess(task, model, rng, most=9):
    """Guess a number."""
    number, reply = rng.randint(1, most), task.messages
    while (turn := await model.turn(reply)).text != str(number):
        await asyncio.sleep(0)
        model.reward(-0.125)
        reply = [{"role": "user", "content": "larger" if int(turn.text) < number else "smaller"}]
    model.note("number", number)
    return 1.0


class Guess:
    def __init__(self, most=9):
        self.most = most

    def reset(self, task, rng):
        self.number = rng.randint(1, self.most)
        return list(task.messages)

    async def step(self, text):
        if text == str(self.number):
            return "", 1.0, True
        return "larger" if int(text) < self.number else "smaller", -0.125, False

    def close(self):
        raise OSError("it was closed already")


async def early(task, model, rng):
    pass


async def two(task, model, rng):
    await asyncio.gather(model.turn("a"), model.turn("b"))


async def forever(task, model, rng):
    turn = await model.turn(task.messages)
    while True:
        model.reward(1.0)
        turn = await model.turn(turn.text)


async def grouped(task, model, rng, fails=False):
    reply = task.messages

    async def wait():
        try:
            await asyncio.sleep(1000)
        finally:
            if fails and len(model.turns) == 3:
                raise ValueError("so")

    while True:
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(wait())
            turn = await group.create_task(model.turn(reply))
            waits.cancel()
        model.reward(1.0)
        reply = turn.text


async def nonsense(task, model, rng):
    turn = await model.turn(task.messages)
    await model.turn({"role": "wizard", "content": "abracadabra"})


async def not_json(task, model, rng):
    await model.turn({"role": "user", "content": "a", "extra": object()})


def plain(task, model, rng):
    pass


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first one
    """
    return a + b


async def fail(text: str) -> str:
    raise ValueError(text)


TOOLS = [add, fail]
MET = None


async def meet(name: str) -> str:
    """Wait until two are there."""
    global MET
    MET = MET or asyncio.Barrier(2)
    return f"{name} came {'last' if await MET.wait() else 'first'}"


MEETING = [meet]


def untyped(a, b: int):
    pass


UNTYPED, TWICE, NONE, ODD = [untyped], [add, add], [], [add, 3]
'''


def moves(pool: Any, id: tuple[Any, ...] = (0, "", 0)) -> list[EpisodeStep]:
    """The steps of a guess by halves."""
    start = pool.start(id, task("which?")).result(60)
    assert (start.failure, start.error) == (None, "")
    assert start.messages == ({"role": "user", "content": "which?"},)
    low, middle, high, steps = 1, 0, 9, list[EpisodeStep]()
    while not steps or steps[-1].messages is not None:
        if steps:
            (message,) = steps[-1].messages or ()
            low, high = (middle + 1, high) if message["content"] == "larger" else (low, middle - 1)
        middle = (low + high) // 2
        steps.append(pool.turn(id, ModelTurn(str(middle))).result(60))
    return steps


@pytest.mark.parametrize("name", ["guess", "Guess"])
def test_a_function_and_a_class_play_the_same(make: Make, pool: Pool, name: str) -> None:
    steps = moves(pool(make(PROGRAMS, name)))
    last = steps[-1]
    assert last.rewards == (-0.125,) * (len(steps) - 1) + (1.0,)
    assert (last.finish, last.failure) == ("stop", None)
    function = moves(pool(make(PROGRAMS, "guess")))
    assert [step.messages for step in steps] == [step.messages for step in function]
    assert function[-1].scalars.keys() == {"number"}


@pytest.mark.long
def test_random_numbers_follow_from_seed_and_sample(make: Make, pool: Pool) -> None:
    config = make(PROGRAMS, "guess", num_processes=2)
    first, second, other = pool(config), pool(config), pool(config, seed=1)
    ids = [(number, "", k) for number in range(6) for k in range(2)]
    numbers = [
        [moves(one, id)[-1].scalars["number"] for id in order]
        for one, order in ((first, ids), (second, ids[::-1]), (other, ids))
    ]
    assert numbers[0] == numbers[1][::-1] != numbers[2]
    assert len(set(numbers[0])) > 3


def test_params_are_arguments(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "guess", params={"most": 1}))
    assert len(moves(episodes)) == 3  # 5, 2, 1
    for name in ("guess", "Guess"):
        with pytest.raises(ConfigError, match=r"^environment\.params=.*'least': 0.*most"):
            load_environment(make(PROGRAMS, name, params={"least": 0}))


def test_an_error_of_close_takes_nothing_from_an_episode(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "Guess"))
    assert moves(episodes)[-1].failure is None
    assert episodes.counts["close_errors"] == 1


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("early", "the program has ended before the model's first turn"),
        ("two", "RuntimeError: model.turn is called while another call of it waits"),
        ("nonsense", "ValueError: model.turn was given .*wizard.*wanted a role of"),
        ("not_json", "messages that JSON does not have: .*object"),
    ],
)
def test_programs_that_ask_wrongly_fail(make: Make, pool: Pool, name: str, error: str) -> None:
    start, steps = played(pool(make(PROGRAMS, name)), task("q"), ["a", "b"])
    answer = start if start.failure else steps[-1]
    assert answer.failure == "error"
    assert re.match(error, answer.error), answer.error


def test_an_episode_ends_at_max_turns(make: Make, pool: Pool) -> None:
    _, steps = played(pool(make(PROGRAMS, "forever", max_turns=3)), task("q"), ["a"] * 5)
    assert steps[-1] == EpisodeStep(None, (1.0, 1.0, 1.0), "length")


@pytest.mark.long
def test_an_episode_is_taken_up_again(make: Make, pool: Pool) -> None:
    """A resumed run knows the turns alone; what followed them comes back."""
    config = make(PROGRAMS, "forever")
    _, steps = played(pool(config), task("q"), ["a", "b", "c"])
    past = [PastTurn(ModelTurn("a")), PastTurn(ModelTurn("b"))]
    again = pool(config)
    start = again.start((0, "", 0), task("q"), past).result(60)
    assert start.steps == tuple(steps[:2])
    assert again.turn((0, "", 0), ModelTurn("c")).result(60) == steps[2]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodePool]:
    file = tmp_path_factory.mktemp("tools") / "programs.py"
    file.write_text(PROGRAMS)
    config = EnvironmentConfig(kind=EnvironmentKind.tools, path=f"{file}:TOOLS")
    with closing(EpisodePool(settled(config))) as episodes:
        yield episodes


@pytest.mark.long
def test_a_turn_too_many_ends_an_episode_whose_tasks_are_a_group(make: Make, pool: Pool) -> None:
    """Unless another task of the group has failed."""
    _, steps = played(pool(make(PROGRAMS, "grouped", max_turns=3)), task("q"), list("abcd"))
    assert (steps[-1].finish, steps[-1].failure) == ("length", None)
    assert steps[-1].rewards == (1.0,) * 3
    config = make(PROGRAMS, "grouped", max_turns=3, params={"fails": True})
    _, steps = played(pool(config), task("q"), list("abcd"))
    assert (steps[-1].failure, len(steps)) == ("error", 3)


def test_an_episode_begins_as_its_prompt(make: Make, pool: Pool) -> None:
    episodes, asked = pool(make(PROGRAMS, "forever")), task("q")
    same = replace(asked, opening=asked.messages)
    assert episodes.start((0,), same).result(60).failure is None
    other = episodes.start((1,), replace(asked, opening=task("p").messages)).result(60)
    assert (other.failure, other.error) == (
        "replay",
        "the first messages differ between starts: 'q', before 'p'",
    )


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize(
    ("turn", "answers"),
    [
        (CALL % ("add", '{"a": 2, "b": 3}'), ["5"]),
        (CALL % ("add", '{"a": 2}') + CALL % ("add", '{"a": 5}'), ["3", "6"]),
        ("[add(2, b=3)]", ["5"]),
        ("<|python_tag|>" + '{"name": "add", "parameters": {"a": 1}}', ["2"]),
        (CALL % ("add", '{"a": "2"}'), ["error: TypeError: a='2' is no "]),
        (CALL % ("add", '{"c": 2}'), ["error: TypeError: missing a required argument: 'a'"]),
        (CALL % ("mul", "{}"), ["error: there is no tool 'mul', but add, fail"]),
        (CALL % ("fail", '{"text": "so"}'), ["error: ValueError: so"]),
        ("<tool_call>add 2 and 3", ["error: the call is no JSON"]),
        ("[add(2, 3", []),
        ("It is 5.", []),
    ],
)
def test_tools(tools: EpisodePool, turn: str, answers: list[str]) -> None:
    _, steps = played(tools, task("2+3?"), [turn, "5"], (turn,))
    if not answers:
        assert steps == [EpisodeStep(None, (0.0,))]
        return
    replies = steps[0].messages or ()
    assert [m["role"] for m in replies] == ["tool"] * len(answers)
    assert all(m["content"].startswith(a) for m, a in zip(replies, answers, strict=True)), replies
    assert steps[1] == EpisodeStep(None, (0.0, 0.0))


def test_calls_of_a_turn_run_at_the_same_time(make: Make, pool: Pool) -> None:
    """Each waits for the other; their answers come in the order of the calls."""
    episodes = pool(make(PROGRAMS, "MEETING", kind=EnvironmentKind.tools, turn_timeout_s=5.0))
    turn = CALL % ("meet", '{"name": "Ada"}') + CALL % ("meet", '{"name": "Bob"}')
    _, (step,) = played(episodes, task("q"), [turn])
    assert step.failure is None, step.error
    assert [message["content"][:8] for message in step.messages or ()] == ["Ada came", "Bob came"]


def test_tools_are_called_in_the_form_of_the_model(make: Make, pool: Pool) -> None:
    """Its processes are told; in any form the list would be a call."""
    config = make(PROGRAMS, "TOOLS", kind=EnvironmentKind.tools)
    episodes = pool(config, call_form=CallForm("hermes", thoughts_end="</think>"))
    written = CALL % ("add", '{"a": 2, "b": 3}')
    turns = [f"Say {written}</think>{written}", "</think>[add(2, b=3)]"]
    _, steps = played(episodes, task("2+3?"), turns)
    assert [message["content"] for message in steps[0].messages or ()] == ["5"]
    assert steps[1] == EpisodeStep(None, (0.0, 0.0))


def test_the_pool_knows_the_schemas_of_its_tools(tools: EpisodePool) -> None:
    tools.wait_ready()
    add, fail = (tool["function"] for tool in tools.tools)
    assert add == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first one"},
                "b": {"type": "integer"},
            },
            "required": ["a"],
        },
    }
    assert fail["parameters"]["required"] == ["text"]


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    def weather(city: str, days: list[int], scale: float = 1.0, note: str | None = None) -> str:
        """Tell the weather.

        Args:
            city: Where.
            days: When.
            scale: How much.
            note: What else.

        Returns:
            A text.
        """
        return city

    theirs = get_json_schema(weather)["function"]
    ours = schema_of(weather, "x:y")["function"]
    del theirs["return"], theirs["parameters"]["properties"]["note"]
    assert ours["parameters"]["properties"].pop("note")["description"] == "What else."
    assert ours == theirs


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("function", "plain", "async def f(task, model, rng), or a class with reset and step, not"),
        ("function", "TOOLS", "not list; a list of tools is environment=tools"),
        ("function", "missing", "that can be imported (AttributeError"),
        ("tools", "plain", "a list of functions, not function"),
        ("tools", "NONE", "a list of functions, not an empty one"),
        ("tools", "UNTYPED", "functions whose parameters have types (untyped.a has none)"),
        ("tools", "TWICE", "tools of different names, not add, add"),
        ("tools", "ODD", "functions, not 3"),
    ],
)
def test_what_is_no_environment(make: Make, kind: str, name: str, error: str) -> None:
    config = make(PROGRAMS, name, kind=EnvironmentKind(kind))
    with pytest.raises(ConfigError, match=r"^environment\.path=") as raised:
        load_environment(config)
    assert error in str(raised.value)


def test_a_process_says_why_it_cannot_start(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "missing"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^environment\.path=.*AttributeError"):
            episodes.wait_ready()
    with pytest.raises(ConfigError, match=r"^environment\.path="):
        episodes.start((0,), task("q")).result(60)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"kind": "function"}, r"environment\.path=null: wanted a value, for .*kind=function"),
        ({"kind": "grid", "path": "a:b"}, r"environment\.path=a:b: wanted null, or .*kind="),
        ({"kind": "grid", "max_turn_tokens": 65}, r"max_turn_tokens=65: wanted at most rollout"),
        ({"kind": "grid", "max_reply_tokens": 65}, r"max_reply_tokens=65: wanted at most"),
        ({"kind": "grid", "stop": [""]}, r"environment\.stop=.*one or more characters"),
        ({"kind": "grid", "turn_timeout_s": 900.0}, r"turn_timeout_s=900\.0: wanted at most"),
        ({"kind": "grid", "params": {"width": 3}}, r"environment\.params=width: wanted size, slip"),
        ({"kind": "grid", "params": {"size": "3"}}, r"environment\.params\.size=3: wanted a value"),
        ({"kind": "grid", "params": {"size": 10}}, r"environment\.params\.size=10: wanted 2 to 9"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], error: str) -> None:
    config = EnvironmentConfig(**{**settings, "kind": EnvironmentKind(settings["kind"])})
    with pytest.raises(ConfigError, match=error):
        load_environment(settled(config))
