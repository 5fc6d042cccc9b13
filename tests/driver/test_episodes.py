"""The driver's side of conversations: a resumed run takes them up where they were."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from environment_pools import task

from hybridrl.config import Config
from hybridrl.driver.async_calls import Rounds
from hybridrl.driver.emulated_executor import EmulatedEpisodes
from hybridrl.driver.episodes import EnvironmentFailed, Episodes
from hybridrl.environments.tool_calls import CallForm
from hybridrl.flow import Flow, Graph
from hybridrl.flow.clock import VirtualClock
from hybridrl.flow.executor import Computed, EpisodeReply, Parked, Replied, Sampling, TurnEnded
from hybridrl.flow.sample import SampleId
from hybridrl.flow.versions import FailureRecord
from hybridrl.preflight.prepare import build_recipe
from hybridrl.runtime.emulated_launcher import EmulatedLauncher
from hybridrl.runtime.process_launcher import ProcessLauncher
from hybridrl.schedule.base import PendingSample

PROGRAMS = """
import asyncio
import os

async def talk(task, model, rng, fails=""):
    reply = task.messages
    for number in range(3):
        turn = await model.turn(reply)
        model.reward(len(turn.text))
        if turn.text == fails:
            raise ValueError("nothing to say")
        reply = f"{number}{turn.text}{rng.randint(0, 9999)}"

async def notes(task, model, rng):
    for name in ("reward", "num_turns", "environment_failure", "out_of_tokens", "finish"):
        model.note(name, "many")
    await model.turn(task.messages)

async def waits(task, model, rng):
    await model.turn(task.messages)
    await asyncio.sleep(1000)

async def rewrites(task, model, rng):
    await model.turn(task.messages)
    model.rewrite("message 1 was a, and is b")

async def differs(task, model, rng):
    await model.turn(task.messages)
    await model.turn(str(os.getpid()))
"""
NOBODY = SimpleNamespace(failures=SimpleNamespace(ended=[]))  # no ranks are called
ITEM = SimpleNamespace(prompt="q", prompt_ids=(1, 2), task=task("q"))
NONE: FailureRecord = {}
Make = Callable[..., Episodes]


class Words:
    """Tokens of replies are their characters' numbers."""

    call_form = CallForm()

    def reply(self, turn: Any, messages: Any, most: int) -> tuple[tuple[int, ...], bool]:
        text = "".join(message["content"] for message in messages)
        if "!" in text:
            raise ValueError("roles must alternate")
        return tuple(map(ord, text))[:most], len(text) > most


@pytest.fixture
def make(make_config: Callable[..., Config], tmp_path: Path) -> Iterator[Make]:
    """`make(program, *overrides)`: the episodes of a run, closed after the test."""
    file = tmp_path / "programs.py"
    file.write_text(PROGRAMS)
    with ExitStack() as stack:

        def make(program: str, *overrides: str, failures: FailureRecord = NONE) -> Episodes:
            settings = ["environment=function", f"environment.path={file}:{program}"]
            config = make_config(*settings, "rollout.max_new_tokens=64", *overrides, "run.dir=out")
            return stack.enter_context(
                closing(Episodes(config, Words(), ProcessLauncher(config.cluster), failures))
            )

        yield make


def answered(episodes: Episodes, id: SampleId, text: str, response: int = 3) -> EpisodeReply:
    """What a turn is answered."""
    return event_of(episodes, TurnEnded(id, (1, 2, 3), text, "stop", response))


def event_of(episodes: Episodes, ended: TurnEnded) -> EpisodeReply:
    work = episodes.answer(ended)
    try:
        calls = next(work)
        while True:
            calls = work.send([future.result(60) for future in calls])
    except StopIteration as over:
        (event,) = over.value
        (reply,) = event.replies
        return reply


def graph_of(name: str | None = None) -> Graph:
    """A graph of responses, those of an evaluation by its name."""
    flow = Flow()
    flow.collect(flow.actor.generate(flow.prompts, num_samples=1, name=name))
    return flow.graph


def pending(id: SampleId, waits: bool) -> PendingSample:
    return PendingSample(id, ITEM, Sampling(64, 1.0), 0, Parked((id,), (9,), 0, None), waits)


@pytest.mark.long
def test_conversations_are_taken_up_where_they_were(make: Make) -> None:
    """One waits in mid-conversation, one has ended, one has failed, one is on its next turn."""
    episodes, ids = make("talk", "+environment.params.fails=x"), [SampleId(n) for n in range(4)]
    waits, over, failed, decodes = ids
    episodes.start(ids, ITEM, 64)
    replies = {}
    for id in ids:
        replies[id] = answered(episodes, id, "ab")
    replies[waits] = answered(episodes, waits, "cd", 12)
    for text in ("ef", "gh"):
        replies[over] = answered(episodes, over, text)
    replies[failed] = answered(episodes, failed, "x")
    assert [replies[over].finish, replies[failed].finish] == ["stop", "abort"]
    assert replies[over].turn_rewards == (2, 2, 2)
    samples = [pending(id, id != decodes) for id in ids]
    state = json.loads(json.dumps(episodes.state(samples)))
    assert [len(record["turns"]) for record in state] == [2, 3, 2, 1]
    counted = episodes.metrics()
    assert counted["environment/turns"] == 8
    # Another process, as of a resumed run.
    again = make("talk", "+environment.params.fails=x")
    open_turns = list(again.take_up(samples, state))
    assert [ended.id for ended in open_turns] == [waits, over, failed]
    assert {ended.id: event_of(again, ended) for ended in open_turns} == {
        id: replies[id] for id in (waits, over, failed)
    }
    assert again.pool.counts["episodes"] == 2  # those that are over do not run again
    assert again.metrics().get("environment/turns", 0) == 0  # counted before
    for id, turns in ((waits, ["yz"]), (decodes, ["cd", "yz"])):
        for text in turns:
            assert answered(again, id, text) == answered(episodes, id, text)
    assert again.metrics()["environment/failed"] == 0


@pytest.mark.long
def test_a_replay_that_answers_otherwise_has_failed(make: Make) -> None:
    episodes, id = make("differs"), SampleId(0)
    episodes.start([id], ITEM, 64)
    assert answered(episodes, id, "a").tokens is not None
    again = make("differs")
    (ended,) = again.take_up([pending(id, True)], episodes.state([pending(id, True)]))
    assert event_of(again, ended).scalars["environment_failure"] == "replay"
    assert again.metrics()["environment/failed/replay"] == 1
    # And where the turn after it is made before the replay is known to differ.
    later = make("differs")
    assert not list(later.take_up([pending(id, False)], episodes.state([pending(id, False)])))
    reply = answered(later, id, "b")
    assert (reply.finish, reply.scalars["environment_failure"]) == ("abort", "replay")


@pytest.mark.long
def test_what_has_failed_in_a_recorded_run_fails_again(make: Make) -> None:
    """In the turn in which it did there, whatever its environment says now."""
    ids = [SampleId(number) for number in range(2)]
    episodes, same = make("talk", failures={ids[0]: (2, "crash")}), make("talk")
    for one in (episodes, same):
        one.start(ids, ITEM, 64)
    assert [answered(episodes, id, "a") for id in ids] == [answered(same, id, "a") for id in ids]
    failed = answered(episodes, ids[0], "b")
    assert (failed.finish, failed.scalars["environment_failure"]) == ("abort", "crash")
    for text in "bc":
        assert answered(episodes, ids[1], text) == answered(same, ids[1], text)
    metrics = episodes.metrics()
    of_kinds = {name: value for name, value in metrics.items() if "/failed/" in name}
    names = ("error", "timeout", "crash", "replay", "rewritten")
    assert of_kinds == {f"environment/failed/{name}": float(name == "crash") for name in names}


def test_replies_of_another_schedule_come_after_it() -> None:
    rounds = Rounds(NOBODY)
    mine = Computed("s", (), {}, ())
    theirs = Replied((EpisodeReply(SampleId(0), None),), (0.0,))
    rounds.ready(theirs)
    with rounds.apart(lambda event: isinstance(event, Replied)):
        rounds.ready(mine)
        assert rounds.wait(lambda: None) == [mine]
        with pytest.raises(RuntimeError, match="nothing is in flight"):
            rounds.wait(lambda: None)
    assert rounds.wait(lambda: None) == [theirs]


def test_a_reply_that_the_template_refuses_fails_its_episode(make: Make) -> None:
    episodes, id = make("talk"), SampleId(0)
    episodes.start([id], ITEM, 64)
    reply = answered(episodes, id, "!")
    assert (reply.finish, reply.scalars["environment_failure"]) == ("abort", "error")
    with pytest.raises(EnvironmentFailed) as caught:
        episodes.check("the step", graph_of())
    reason = "the chat template refuses the reply: roles must alternate (task 'q')"
    assert reason in str(caught.value)


def test_the_share_that_fails_is_that_since_the_last_check(make: Make) -> None:
    """So steps of which little fails do not hide another; metrics count all."""
    episodes, ids = make("talk", "+environment.params.fails=x"), [SampleId(n) for n in range(5)]
    episodes.start(ids, ITEM, 64)
    for id in ids[:4]:
        for text in ("ab", "cd", "ef"):
            answered(episodes, id, text)
    episodes.check("the first step", graph_of())
    answered(episodes, ids[4], "x")
    with pytest.raises(EnvironmentFailed) as caught:
        episodes.check("the step", graph_of())
    assert "1 of 1 episodes of the step have failed" in str(caught.value)
    episodes.check("what comes then", graph_of())
    assert episodes.metrics()["environment/episodes"] == 5


@pytest.mark.parametrize("text", ["ab", "x", "!"], ids=["over", "fails", "refused"])
def test_an_episode_counts_in_the_step_that_sees_its_end(make: Make, text: str) -> None:
    """The step in which it wrote its last turn has ended before its environment answers."""
    episodes, id = make("talk", "+environment.params.fails=x"), SampleId(0)
    episodes.start([id], ITEM, 64)
    for _ in range(2 * (text == "ab")):
        answered(episodes, id, text)
    work = episodes.answer(TurnEnded(id, (1, 2, 3), text, "stop", 3))
    calls = next(work)
    assert episodes.metrics()["environment/episodes"] == 0
    with suppress(StopIteration):
        while True:
            calls = work.send([future.result(60) for future in calls])
    has_failed = text != "ab"
    if has_failed:
        with pytest.raises(EnvironmentFailed, match="1 of 1 episodes of the step have failed"):
            episodes.check("the step", graph_of())
    else:
        assert episodes._unchecked[""].ended == 1
    metrics = episodes.metrics()
    assert (metrics["environment/episodes"], metrics["environment/failed"]) == (1, has_failed)


def test_what_is_forgotten_is_not_checked(make: Make) -> None:
    """An evaluation that begins again has all its samples anew."""
    episodes, ids = make("talk", "+environment.params.fails=x"), [SampleId(0), SampleId(0, "eval")]
    episodes.start(ids, ITEM, 64)
    for id in ids:
        answered(episodes, id, "x")
    episodes.forget(graph_of("eval"))
    episodes.check("the evaluation", graph_of("eval"))
    with pytest.raises(EnvironmentFailed, match="1 of 1 episodes of the step"):
        episodes.check("the step", graph_of())


@pytest.mark.long
def test_what_fails_in_an_evaluation_is_none_of_the_step_s(make: Make) -> None:
    """Three of the evaluation's four fail, and none of the step's."""
    episodes, evaluation = make("talk", "+environment.params.fails=x"), "eval_main"
    for branch, failing in ((evaluation, 3), ("", 0)):
        ids = [SampleId(n, branch) for n in range(4)]
        episodes.start(ids, ITEM, 64)
        for number, id in enumerate(ids):
            for text in ["x"] if number < failing else ["ab", "cd", "ef"]:
                answered(episodes, id, text)
    episodes.check("the step", graph_of())
    assert episodes.metrics()["environment/failed"] == 3
    with pytest.raises(EnvironmentFailed) as caught:
        episodes.check("the evaluation of main", graph_of(evaluation))
    assert "3 of 4 episodes of the evaluation of main have failed" in str(caught.value)


def test_the_log_has_the_first_error_of_each_kind_and_step(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    episodes, ids = make("talk", "+environment.params.fails=x"), [SampleId(n) for n in range(4)]
    episodes.start(ids, ITEM, 64)
    caplog.set_level("INFO", "hybridrl.driver.episodes")
    for number, id in enumerate(ids):
        answered(episodes, id, "x")
        if number == 2:
            episodes.metrics()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = "has failed (error): ValueError: nothing to say"
    assert errors == [f"the episode of sample {id} {told}" for id in (ids[0], ids[3])]


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "finish", "failure"),
    [("talk", "stop", "error"), ("rewrites", "abort", "rewritten")],
)
def test_failed_samples_that_are_kept_have_earned_nothing(
    make: Make, program: str, finish: str, failure: str
) -> None:
    """A rewritten sample is dropped in any case."""
    params = ["+environment.params.fails=x"] if program == "talk" else []
    zero = ["environment.on_failure=zero", "reward=environment"]
    episodes, id = make(program, *zero, *params), SampleId(0)
    episodes.start([id], ITEM, 64)
    reply = answered(episodes, id, "x")
    assert (reply.finish, reply.scalars["environment_failure"]) == (finish, failure)
    assert (reply.turn_rewards, reply.scalars["environment_reward"]) == ((0.0,), 0.0)


def test_notes_are_no_fields_of_a_sample(make: Make) -> None:
    """Else a filter would read a note before the judge has given the reward."""
    episodes, id = make("notes"), SampleId(0)
    episodes.start([id], ITEM, 64)
    assert answered(episodes, id, "a").scalars == {
        "note/reward": "many", "note/num_turns": "many", "note/environment_failure": "many",
        "note/out_of_tokens": "many", "note/finish": "many",
        "environment_reward": 0.0, "cut_replies": 0, "out_of_tokens": 0,
    }  # fmt: skip


@pytest.mark.long
def test_a_sample_says_how_many_of_its_replies_were_cut(make: Make) -> None:
    """The count is right where the run resumes before or after a cut reply, too."""
    episodes, id = make("talk", "environment.max_reply_tokens=4"), SampleId(0)
    episodes.start([id], ITEM, 64)
    answered(episodes, id, "ab")
    for waits in (True, False):
        (record,) = json.loads(json.dumps(episodes.state([pending(id, waits)])))
        assert record["cut"] == [1]
        again = make("talk", "environment.max_reply_tokens=4")
        for ended in again.take_up([pending(id, waits)], [record]):
            event_of(again, ended)
        replies = [answered(again, id, text) for text in ("c", "de")]
        assert replies[1].scalars["cut_replies"] == 2


@pytest.mark.parametrize("program", ["waits", "talk"])
def test_a_reply_to_a_sample_that_has_left_is_no_event(make: Make, program: str) -> None:
    """Its environment has not replied, or has and it is not seen yet; it has begun anew."""
    episodes, id, rounds = make(program), SampleId(0), Rounds(NOBODY)
    episodes.start([id], ITEM, 64)
    episodes._there[id].start.result(60)
    rounds.begin(episodes.answer(TurnEnded(id, (1,), "ab", "stop", 3)))
    (reply,) = rounds._here
    if program == "talk":
        reply.result(60)
    episodes.start([id], ITEM, 64)
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        rounds.wait(lambda: None)
    assert program == "waits" or answered(episodes, id, "cd").tokens


def test_percentiles_are_of_all_waits_of_a_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long ones come last: of 5000 replies the last 100 take a minute."""
    episodes, clock = make("talk"), VirtualClock()
    seconds = iter([1.0] * 4900 + [60.0] * 100)

    def reply(ended: TurnEnded) -> Iterator[Any]:
        clock.advance_to(clock.now() + next(seconds))
        yield []
        return EpisodeReply(ended.id, (1,))

    episodes.clock = clock
    monkeypatch.setattr(episodes, "_answer", reply)
    for _ in range(5000):
        event_of(episodes, TurnEnded(SampleId(0), (1,), "", "stop", 1))
    episodes._counts.turns = 5000
    metrics = episodes.metrics()
    assert (metrics["environment/wait_p50_s"], metrics["environment/wait_p99_s"]) == (1.0, 60.0)


def test_an_emulated_reply_to_a_sample_that_has_left_is_no_event(
    make_config: Callable[..., Config],
) -> None:
    settings = ["cluster=emulated", 'cluster.turns="turns=4,reply=8,wait=0.1"', "run.dir=out"]
    config = make_config(*settings, "rollout.max_new_tokens=200")
    launcher, id = EmulatedLauncher(config.cluster), SampleId(0)
    launcher.start(object, object, config)
    group = SimpleNamespace(
        failures=NOBODY.failures,
        wait=launcher.wait,
        value_of=lambda rank, call: launcher.get(call).value,
    )
    rounds = Rounds(group)
    with closing(EmulatedEpisodes(config, build_recipe(config.recipe), launcher)) as episodes:
        for begins_anew in (True, False):
            episodes.start([id], ITEM, 200)
            rounds.begin(episodes.answer(TurnEnded(id, (1,), "", "stop", 3)))
            episodes.end([id])
            if begins_anew:
                episodes.start([id], ITEM, 200)
            with pytest.raises(RuntimeError, match="nothing is in flight"):
                rounds.wait(lambda: None)
