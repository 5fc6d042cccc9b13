"""The kinds that ship: another try, programs in a jail; and what of settings they refuse."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from environment_pools import Pool, played, settled

from hybridrl.config import (
    ConfigError,
    EnvironmentConfig,
    EnvironmentKind,
    JailKind,
    JailLimits,
    SourceConfig,
    SourceKind,
)
from hybridrl.environments import EpisodePool, EpisodeTask
from hybridrl.environments import python as environment_of_programs
from hybridrl.environments.episode import Episode
from hybridrl.environments.load import load_environment
from hybridrl.environments.program import Model
from hybridrl.environments.python import told
from hybridrl.environments.tool_calls import find_calls
from hybridrl.environments.tools import answered, schema_of
from hybridrl.sandbox import jail
from hybridrl.sandbox.jail import JailResult

SOURCES = {"main": SourceConfig(kind=SourceKind.reasoning_gym, name="spell_backward")}


def config(kind: str, **settings: Any) -> EnvironmentConfig:
    return settled(EnvironmentConfig(kind=EnvironmentKind(kind), **settings))


def asked(question: str, answer: str = "", **row: Any) -> EpisodeTask:
    messages = ({"role": "user", "content": question},)
    return EpisodeTask(messages, {"question": question, "answer": answer, **row}, answer, "main")


def test_a_wrong_answer_may_be_tried_again(pool: Pool) -> None:
    judge = {"kind": "exact", "extract": "#(.*)"}
    episodes = pool(config("retry", params={"judge": judge, "again": "No."}, max_turns=3))
    start, steps = played(episodes, asked("sun:", "nus"), ["#sun", "nus", "#nus", "#more"])
    assert start.messages == ({"role": "user", "content": "sun:"},)
    assert [step.messages for step in steps[:2]] == [({"role": "user", "content": "No."},)] * 2
    assert (steps[2].messages, steps[2].rewards, steps[2].finish) == (None, (0.0, 0.0, 1.0), "stop")
    _, steps = played(episodes, asked("sun:", "nus"), ["#a", "#b", "#c"], (1, "", 0))
    assert (steps[-1].rewards, steps[-1].finish) == ((0.0,) * 3, "length")


def sees_messages(prompts: list[Any], completions: list[Any]) -> list[float]:
    """A judge of TRL's signature."""
    is_list = [isinstance(x, list) for x in (*prompts, *completions)]
    return [float(all(is_list))] * len(prompts)


def test_a_judge_of_trl_gets_the_messages_of_a_row(pool: Pool) -> None:
    judge = {"kind": "function", "function": f"{__file__}:sees_messages"}
    episodes = pool(config("retry", params={"judge": judge}))
    task = replace(asked("sun:"), asked=[{"role": "user", "content": "sun:"}])
    _, steps = played(episodes, task, ["nus"])
    assert steps[-1].rewards == (1.0,)


def near(prompt: str, response: str, answer: str, item: dict[str, Any]) -> float:
    """A judge: the share of letters that are right."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


def test_turns_earn_what_they_add_to_the_best_answer_before(pool: Pool) -> None:
    judge = {"kind": "function", "function": f"{__file__}:near"}
    episodes = pool(config("retry", params={"judge": judge}))
    _, steps = played(episodes, asked("?", "abcd"), ["abxx", "axxx", "abcx", "abcd"])
    assert steps[-1].rewards == (0.5, 0.0, 0.25, 0.25)


@pytest.mark.slow
def test_the_scorer_of_a_dataset_gives_the_verdict(pool: Pool) -> None:
    """Turns earn what they add to the best answer before."""
    import reasoning_gym

    row = dict(reasoning_gym.create_dataset("spell_backward", seed=1, size=1)[0])
    scorer = reasoning_gym.create_dataset("spell_backward", size=1)
    answer = row["answer"]
    near = answer[:-1] + ("a" if answer[-1] != "a" else "b")
    scores = [scorer.score_answer(text, row) for text in ("", near)]
    row_task = EpisodeTask(({"role": "user", "content": row["question"]},), row, answer, "main")
    _, steps = played(pool(config("retry"), SOURCES), row_task, ["", near, "", answer])
    assert steps[-1].rewards == pytest.approx([scores[0], scores[1] - scores[0], 0, 1 - scores[1]])


def block(program: str) -> str:
    return f"So I run\n```python\n{program}\n```\n"


HOSTILE = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "endless output": "while True: print('x' * 1000)",
    "hang": "while True: pass",
    "files": "print(open('/etc/passwd').read())",
}


@pytest.fixture(scope="module")
def jailed() -> Any:
    limits = JailLimits(seconds=3.0, processes=8, output_kb=64)
    episodes = EpisodePool(config("python", max_turns=12), limits=limits)
    yield episodes
    episodes.close()


def test_programs_are_run_and_what_they_print_is_told(jailed: EpisodePool) -> None:
    turns = [
        block("print(6 * 7)"),
        block("x = 1"),
        block("print('a')\nraise ValueError('so')"),
        block("open('/tmp/kept', 'w').write('still here')"),
        block("print(open('/tmp/kept').read())"),
        "The answer is 42.",
    ]
    _, steps = played(jailed, asked("6*7?"), turns, (0,))
    told = [step.messages[0]["content"] for step in steps if step.messages]
    assert told == [
        "42\n", "The program has printed nothing.", "a\nValueError: so",
        "The program has printed nothing.", "still here\n",
    ]  # fmt: skip
    assert (steps[-1].messages, steps[-1].failure) == (None, None)


STAYS = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        open("/tmp/alive", "w").write(str(time.monotonic()))
        time.sleep(0.01)
while not os.path.exists("/tmp/alive"):
    time.sleep(0.01)
print("left one behind")
"""
LOOKS = """
import time
from dataclasses import replace
seen = open("/tmp/alive").read()
time.sleep(0.3)
print("alive" if open("/tmp/alive").read() != seen else "gone")
"""


def test_no_process_of_a_program_is_there_in_the_next_one(jailed: EpisodePool) -> None:
    id = ("stays",)
    assert jailed.start(id, asked("q")).result(60).failure is None
    told = []
    for program in (STAYS, LOOKS):
        step = jailed.turn(id, _turn(program)).result(60)
        told += [message["content"] for message in step.messages or ()]
    assert told == ["left one behind\n", "gone\n"]
    jailed.end(id)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_stay_in_the_jail(jailed: EpisodePool, name: str) -> None:
    id = (name,)
    start = jailed.start(id, asked("q")).result(60)
    assert start.failure is None
    begin = time.monotonic()
    _, *steps = [None] + [
        jailed.turn(id, turn).result(60) for turn in map(_turn, (HOSTILE[name], "print('alive')"))
    ]
    told = [step.messages[0]["content"] for step in steps]
    wanted = {
        "network": "Error",
        "fork bomb": "Error",
        "endless output": "printed too much",
        "hang": "took too long",
        "files": "Error",
    }
    assert wanted[name] in told[0][:200]
    assert told[1] == "alive\n"
    assert time.monotonic() - begin < 10
    jailed.end(id)


def _turn(program: str) -> Any:
    from hybridrl.environments import ModelTurn

    return ModelTurn(block(program))


@pytest.mark.long
def test_programs_of_other_episodes_run_meanwhile(pool: Pool) -> None:
    """In the same process; the limit is far, so that nothing hangs on the machine's speed."""
    episodes = pool(config("python", num_processes=1), limits=JailLimits(seconds=60.0))
    for number in range(2):
        episodes.start((number,), asked("q")).result(60)
    hangs = episodes.turn((0,), _turn(HOSTILE["hang"]))
    quick = episodes.turn((1,), _turn("print('quick')")).result(60)
    assert [message["content"] for message in quick.messages or ()] == ["quick\n"]
    assert not hangs.done()


@pytest.mark.long
def test_waiting_for_a_thread_of_the_jail_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve programs that hang share one thread: a queue past the limit of a turn."""
    monkeypatch.setattr(environment_of_programs, "NUM_THREADS", 1)
    monkeypatch.setattr(jail, "_defaults", jail._Defaults(limits=JailLimits(seconds=1.0)))
    settings = config("python", turn_timeout_s=10.0)
    program = load_environment(settings).program

    async def play(number: int) -> tuple[str, str]:
        episode = Episode(number, program, asked("q"), "key", settings, no_endpoint)
        assert (await episode.start()).failure is None
        step = await episode.step(_turn(HOSTILE["hang"]))
        await episode.close()
        return step.error, "".join(message["content"] for message in step.messages or ())

    async def check() -> list[tuple[str, str]]:
        return await asyncio.gather(*map(play, range(12)))

    begin = time.monotonic()
    assert asyncio.run(check()) == [("", "the program took too long and was ended\n")] * 12
    assert time.monotonic() - begin > settings.turn_timeout_s


async def no_endpoint(model: Model) -> tuple[str, str]:
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "settings", "error"),
    [
        ("retry", {"params": {"judge": {"kind": "chat"}}}, r"params\.judge\..*"),
        ("retry", {"params": {"judge": {"kind": "model", "model": "m"}}}, r"judge\.kind=model"),
        ("retry", {"params": {"judge": {"kind": "oracle"}}}, r"judge\.kind=oracle: wanted one of"),
        ("retry", {"params": {"judge": {"weight": 1}}}, r"params\.judge=weight: wanted one of"),
        ("retry", {"params": {"judge": {"kind": "regex"}}}, r"judge\.pattern=null"),
        ("retry", {"params": {"judge": "exact"}}, r"environment\.params\.judge=exact"),
        ("python", {"params": {"full": "x"}}, r"environment\.params=full: wanted empty"),
    ],
)
def test_settings_of_kinds_that_cannot_work(kind: str, settings: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load_environment(config(kind, **settings))


@pytest.mark.long
def test_settings_of_a_run_that_cannot_work() -> None:
    from hybridrl.config.compose import check, register

    register()
    refused = {
        ("environment=python", "reward.jail=off"): r"reward\.jail=off: wanted one of auto",
        ("reward=environment",): r"reward\.kind=environment: wanted one of .*environment\.kind",
        ("environment=grid", "environment.max_turns=0"): r"max_turns=0: wanted 1 or more",
        ("environment=grid", "environment.max_turn_tokens=25"): r"rollout\.max_new_tokens=24",
        ("environment=grid", "schedule=partial", "environment.replay=false"): r"environment\.repl",
        ("environment=walk",): r"environment=walk",
        ("environment.stop=[x]",): r"environment\.stop=\['x'\]: wanted \[\], or an environment\.k",
    }  # fmt: skip
    for overrides, error in refused.items():
        with pytest.raises(ConfigError, match=error):
            check([*overrides, "run.dir=out"])
    assert check(["environment=grid", "run.dir=out"]).environment.max_turn_tokens == 24
    assert JailKind.off is not check(["environment=python", "run.dir=out"]).reward.jail


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 1\n", "KeyError: 1"),
        ("OSError: no\nTraceback (most recent call last):\n  File 'jail_child.py'", "OSError: no"),
        ("", "the program has ended with an error"),
    ],
)
def test_the_error_is_told_though_several_processes_write(stderr: str, line: str) -> None:
    assert told(JailResult("error", "", stderr)) == line


def test_lone_surrogates_in_the_arguments_of_a_call_are_replaced_and_counted() -> None:
    def echo(text: str) -> str:
        return text.encode().decode()  # raises for them

    async def ask(messages: Any) -> Any:
        raise AssertionError

    model = Model(ask, 1, ask)
    text = r'<tool_call>{"name": "echo", "arguments": {"text": "a\ud83db"}}</tool_call>'
    (call,) = find_calls(text, [schema_of(echo, "mine.py")])
    assert asyncio.run(answered(call, {"echo": echo}, model))["content"] == "a?b"
    assert model.replaced == 1
