"""Conversations on real ranks: turns end, are answered, move while they wait, and are finished."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parked_samples import PROMPT, TINY, generating_worker, shared

from hybridrl.config import RolloutConfig, RolloutLayoutConfig
from hybridrl.engines.rollout.interface import Turn
from hybridrl.flow.executor import (
    Advanced,
    Answer,
    Command,
    EpisodeReply,
    Finished,
    Park,
    Parked,
    Resume,
    Sampling,
    Submit,
    TurnEnded,
)
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.pending_samples import PendingRecord
from hybridrl.workers.turns import (
    answered,
    conversation_tensors,
    grown,
    recomputed,
    turn_texts,
)

pytestmark = pytest.mark.long

IDS = tuple(SampleId(0, k=k) for k in range(6))
SAMPLING = Sampling(40, max_turn_tokens=6)
FIELDS = ("tokens", "log_probs", "trained", "turn", "turn_rewards", "turn_state")


def reply_to(turn: TurnEnded) -> EpisodeReply:
    """The reply of 1 to 5 tokens that follows from a turn, or the end with its rewards."""
    draw = random.Random(repr(turn))
    tokens = tuple(draw.randrange(3, 13) for _ in range(draw.randint(1, 5)))
    if draw.random() < 0.25 or turn.response_tokens + len(tokens) >= SAMPLING.max_new_tokens:
        return EpisodeReply(turn.id, None, "stop", scalars={"environment_reward": 1.5})
    return EpisodeReply(turn.id, tokens)


class Instance:
    """An instance as its ranks see it: all of them send the same commands."""

    def __init__(self, worker: ActorWorker, tp: int) -> None:
        self.worker, self.tp, self.number = worker, tp, worker.generator.instance
        self.turns: list[TurnEnded] = []
        self.idle = False  # it and all others
        self.finished: list[Finished] = []

    def advance(self, commands: Sequence[Command], steps: int) -> Advanced:
        """The event with the turns and samples of all ranks, each spoken of by one of them."""
        number = self.number
        event: Advanced = self.worker.advance(number, commands, steps).value.event
        everything = shared(event)
        self.idle = not any(other.turns or other.running for other in everything)
        events = [other for other in everything if other.instance == number]
        assert len(events) == self.tp
        assert {other.running for other in events} == {event.running}
        self.turns = [turn for other in events for turn in other.turns]
        self.finished += [sample for other in events for sample in other.finished]
        return event

    def converse(self, commands: Sequence[Command], most: int = 1000) -> None:
        """Answer at most so many calls' turns, until nothing is left on any instance."""
        for _ in range(most):
            self.advance(commands, 3)
            if self.idle:
                return
            commands = [Answer(tuple(map(reply_to, self.turns)))] if self.turns else []


def talk(model: str, folder: Path, tp: int, with_kv: bool) -> dict[str, Any]:
    """Two instances do alike; then again, where all that is unfinished moves to the other one."""
    layout = RolloutLayoutConfig(tp=tp)
    worker = generating_worker(model, folder, RolloutConfig(max_new_tokens=40, layout=layout))
    instance, submit = Instance(worker, tp), Submit(IDS, PROMPT, SAMPLING)
    instance.converse([submit])
    wanted = dict(stored(worker))
    events = {event.id: event for event in instance.finished}
    worker.release(IDS)

    instance = Instance(worker, tp)
    instance.converse([submit], most=4)
    done, waiting = [event.id for event in instance.finished], instance.turns
    event = instance.advance([Park(IDS, with_kv)], 0)
    (state,) = event.parked
    held = {id for id, sample in state.state[worker.generator.instance_rank].items()} & {
        turn.id for turn in waiting
    }
    # To the other instance, whose samples come here.
    exported = shared((worker.generator.instance, state))
    theirs = [parked for number, parked in exported if number != worker.generator.instance]
    places = {place: refs for parked in theirs for place, refs in parked.state.items()}
    resume = Resume(
        theirs[0].ids, Parked(theirs[0].ids, theirs[0].tokens, theirs[0].version, places)
    )
    assert instance.advance([resume], 0).running == len(IDS) - len(done) - len(held)
    instance.converse([Answer(tuple(map(reply_to, waiting)))] if waiting else [])
    stats = worker.generator.rollout.stats()
    return {
        "wanted": wanted, "events": events, "again": dict(stored(worker)), "held": held,
        "moved": len(theirs[0].ids), "restored": stats.restored_tokens,
        "finished": [event.id for event in instance.finished], "done": done,
    }  # fmt: skip


def stored(worker: ActorWorker, number: int | None = None) -> dict[SampleId, dict[str, Any]]:
    """All fields of the samples of instance `number`, else of this rank's, each on one rank."""
    number = worker.generator.instance if number is None else number
    mine = {
        id: {name: sample.tensors[name].tolist() for name in FIELDS}
        for id, sample in worker.store._samples.items()
    }
    shares = [
        share for other, share in shared((worker.generator.instance, mine)) if other == number
    ]
    assert sum(map(len, shares)) == len({id for share in shares for id in share}), "held twice"
    return {id: fields for share in shares for id, fields in share.items()}


@pytest.mark.parametrize(("tp", "with_kv"), [(1, False), (1, True), (2, True)])
def test_a_conversation_is_one_sample(
    tp: int, with_kv: bool, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Its tensors tell tokens apart, and a move in mid-conversation changes none of them."""
    model, folder = tmp_path / "model", tmp_path / "plane"
    make_tiny_model(model, TINY, seed=0)
    folder.mkdir()
    results = ranks(2 * tp, talk, str(model), folder, tp, with_kv)
    for result in results:
        assert result["held"]
        assert result["wanted"].keys() == result["again"].keys() == set(IDS)
        assert sorted([*result["finished"]]) == sorted(IDS)
        assert (result["restored"] > 0) == with_kv
        for id, fields in result["wanted"].items():
            again = result["again"][id]
            assert {n: again[n] for n in FIELDS if n != "log_probs"} == {
                n: fields[n] for n in FIELDS if n != "log_probs"
            }
            assert again["log_probs"] == pytest.approx(fields["log_probs"], abs=1e-5)
            check(result["events"][id], fields)


def widen(model: str, folder: Path, with_kv: bool) -> dict[str, Any]:
    """Two instances have their conversations alone; then again, where they end on a wide one."""
    rollout = RolloutConfig(max_new_tokens=40, tail_tp="2")
    worker = generating_worker(model, folder, rollout)
    own, (number,) = worker.generator.instance, worker.generator.wide
    submit = Submit(IDS[3 * own : 3 * own + 3], PROMPT, SAMPLING)
    instance = Instance(worker, 1)
    instance.converse([submit])
    wanted = {id: fields for i in range(2) for id, fields in stored(worker, i).items()}
    worker.release(IDS)
    instance.converse([submit], most=3)
    turns = instance.turns
    parked = merged(worker, instance.advance([Park(submit.ids, with_kv, width=2)], 0).parked)
    waiting = [turn for other in shared(turns) for turn in other]
    instance.tp, instance.number = 2, number
    resume: list[Command] = [Resume(event.ids, event) for event in parked]
    running = instance.advance(resume, 0).running
    held = worker.generator.engine.stats().held
    instance.converse([Answer(tuple(map(reply_to, waiting)))])
    assert not worker.generator.wide[number].engine.joined  # type: ignore[union-attr]
    again = {id: fields for i in range(2) for id, fields in stored(worker, i).items()}
    return {"wanted": wanted, "again": again, "held": held, "running": running}


@pytest.mark.parametrize("with_kv", [False, True])
def test_a_wide_instance_holds_conversations(
    with_kv: bool, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """It is one as long as a sample waits there, whether or not another decodes."""
    model, folder = tmp_path / "model", tmp_path / "plane"
    make_tiny_model(model, TINY, seed=0)
    folder.mkdir()
    for result in ranks(2, widen, str(model), folder, with_kv):
        assert result["held"]
        assert result["held"] + result["running"] <= len(IDS)
        assert result["again"].keys() == result["wanted"].keys() == set(IDS)
        for id, fields in result["wanted"].items():
            again = result["again"][id]
            assert again.pop("log_probs") == pytest.approx(fields.pop("log_probs"), abs=1e-5)
            assert again == fields


def merged(worker: ActorWorker, parked: tuple[Parked, ...]) -> list[Parked]:
    """What each instance has parked, with the references of all its ranks."""
    events = [event for share in shared(parked) for event in share]
    return [event for event in events if event.ids]


def save_and_load(model: str, folder: Path) -> dict[str, Any]:
    """A run that ends in mid-conversation, and one that resumes it from the files."""
    worker = generating_worker(model, folder, RolloutConfig(max_new_tokens=40))
    instance, submit = Instance(worker, 1), Submit(IDS, PROMPT, SAMPLING)
    instance.converse([submit])
    wanted = stored(worker)
    worker.release(IDS)
    instance.converse([submit], most=4)
    waiting = instance.turns
    (parked,) = instance.advance([Park(IDS, with_kv=True)], 0).parked
    done = [id for id in IDS if id not in parked.ids]
    records = [PendingRecord(id, PROMPT, SAMPLING, parked.state[0][id]) for id in parked.ids] + [
        PendingRecord(id, PROMPT) for id in done
    ]
    worker.save_pending(str(folder), tuple(records))
    worker.release(IDS)
    reference = worker.load_pending(str(folder), tuple(records)).value
    state = {0: dict.fromkeys(parked.ids, reference)}
    resume = Resume(parked.ids, Parked(parked.ids, parked.tokens, parked.version, state))
    instance.converse([resume, Answer(tuple(map(reply_to, waiting)))])
    return {"wanted": wanted, "again": stored(worker), "waiting": len(waiting)}


def test_a_checkpoint_in_mid_conversation(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Turns, and who waits, travel with the tokens."""
    make_tiny_model(tmp_path / "model", TINY, seed=0)
    (result,) = ranks(1, save_and_load, str(tmp_path / "model"), tmp_path)
    assert result["waiting"]
    assert result["again"].keys() == result["wanted"].keys() == set(IDS)
    for id, fields in result["wanted"].items():
        again = result["again"][id]
        assert again.pop("log_probs") == pytest.approx(fields.pop("log_probs"), abs=1e-5)
        assert again == fields


def check(event: Finished, fields: dict[str, Any]) -> None:
    num_prompt = len(PROMPT.prompt_ids)
    assert event.response_tokens == len(fields["tokens"]) - num_prompt == len(fields["trained"])
    num_turns = event.scalars["num_turns"]
    assert event.scalars == {"num_turns": num_turns, "environment_reward": 1.5}
    assert fields["turn_rewards"] == [0.0] * num_turns
    assert fields["turn"] == sorted(fields["turn"])
    assert set(fields["turn"]) == set(range(num_turns))
    spans = [span for span in event.spans if span.trained]
    assert len(spans) == num_turns
    trained = [False] * event.response_tokens
    for number, span in enumerate(spans):
        assert fields["turn"][span.start] == number
        trained[span.start : span.stop] = [True] * (span.stop - span.start)
    assert fields["trained"] == trained
    assert [span.start for span in event.spans[1:]] == [span.stop for span in event.spans[:-1]]
    pairs = zip(fields["log_probs"], trained, strict=True)
    assert all((log_prob < 0) == own for log_prob, own in pairs)


def test_tensors_of_a_conversation() -> None:
    """Two turns, of three and of two tokens, with a reply of two between them."""
    turns = [Turn(0, 3, "length"), Turn(5, 7, "stop")]
    response = [4, 5, 6, 7, 8, 9, 10]
    tensors = conversation_tensors(turns, [1, 2], response, (0.5, -1.0))
    assert tensors["trained"].tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert tensors["turn"].tolist() == [0] * 5 + [1] * 2
    assert tensors["turn_rewards"].tolist() == [0.5, -1.0]
    kinds = [tensors[name].dtype for name in FIELDS[2:]]
    assert kinds == [torch.bool, torch.int32, torch.float32, torch.int64]
    turns.append(Turn(9, 10, "stop"))  # after 8 and 9 again: tokens 7 and 8 of the response
    response[7:9] = response[3:5]
    response.append(1)
    again = conversation_tensors(turns, [1, 2], response[:10], ())["turn_state"].tolist()
    assert again[:2] == tensors["turn_state"].tolist()
    assert again[0] != again[1] == again[2]
    del turns[2]
    texts = turn_texts(torch.arange(7), tensors, lambda ids: str(ids.tolist()))
    assert texts == (("[0, 1, 2]", "[3, 4]", 0.5), ("[5, 6]", "[]", -1.0))
    assert turn_texts(torch.arange(7), {}, str) == ()
    with pytest.raises(ValueError, match="1 turn rewards for 2 turns"):
        conversation_tensors(turns, [1, 2], response, (1.0,))


def test_a_reply_is_read_by_the_version_that_goes_on() -> None:
    """It has come under version 1, and waited for a row until version 2 was there."""
    spans = answered(grown((), 5, 1), 3, 1)
    assert spans == (TokenSpan(0, 5, 1), TokenSpan(5, 8, 1, trained=False))
    assert grown(spans, 8, 2) == spans
    read = TokenSpan(0, 5, 1), TokenSpan(5, 8, 2, trained=False)
    assert grown(spans, 10, 2) == (*read, TokenSpan(8, 10, 2))
    assert grown(grown(spans, 10, 2), 12, 2) == (*read, TokenSpan(8, 12, 2))


def test_caches_that_are_computed_again_begin_spans() -> None:
    """Where one version has made all and computes it again, none begins."""
    spans = (TokenSpan(0, 5, 1), TokenSpan(5, 8, 2), TokenSpan(8, 10, 2, False))
    spans += (TokenSpan(10, 14, 2), TokenSpan(14, 20, 3))
    assert recomputed(spans, []) is spans
    assert recomputed(spans, [2, 20]) == spans
    assert recomputed(spans, [6, 12, 14]) == (
        spans[0],
        TokenSpan(5, 6, 2),
        TokenSpan(6, 8, 2, recomputed=True),
        *spans[2:4],
        TokenSpan(14, 20, 3, recomputed=True),
    )
    assert recomputed(spans, [10])[3] == TokenSpan(10, 14, 2, recomputed=True)


def test_replies_are_spans_of_their_own() -> None:
    spans = answered(grown((), 3, version=1), 2, version=1)
    assert grown(spans, 5, version=2) == spans == (TokenSpan(0, 3, 1), TokenSpan(3, 5, 1, False))
    assert grown(spans, 7, version=1) == (*spans, TokenSpan(5, 7, 1))
