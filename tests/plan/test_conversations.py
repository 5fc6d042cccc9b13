"""Conversations on the virtual clock: how long they take, by hand, and in which schedule."""

import random
from dataclasses import replace

import pytest

from hybridrl.config import ConfigError, FusedScheduleConfig
from hybridrl.costs.instance import Costs
from hybridrl.flow import Flow, TokenSpan
from hybridrl.flow.conversations import ConversationModel, ModeledConversation, ModeledTurn
from hybridrl.flow.executor import Answer, EpisodeReply, Park, Resume, Sampling, Scope, Submit
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.flow.modeled_instance import ModeledInstance
from hybridrl.flow.sample import NO_VERSION, SampleId
from hybridrl.flow.turns import OpenTurns
from hybridrl.flow.workload import Group, Workload
from hybridrl.plan import schedule, schedule_command
from hybridrl.plan.simulate import SimulatedExecutor
from hybridrl.schedule import call_limits
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.fused import Fused
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.serial import SerialSchedule

COSTS = Costs(step_s=1.0, prefill_token_s=0.5)
SAMPLING = Sampling(max_new_tokens=100, max_turn_tokens=50)
A, B = SampleId(0), SampleId(1)


def instance(turns, max_running=1):
    return ModeledInstance(
        COSTS, lambda id: 5, lambda prompt: 4, max_running,
        conversation_of=lambda id: ModeledConversation(turns[id]),
    )  # fmt: skip


def test_a_held_row_takes_no_room_and_goes_on_before_fresh_ones():
    """Three tokens, a reply of two, one token; b has the only row meanwhile, and c waits."""
    talk, alone = (ModeledTurn(3, 2, 9.0), ModeledTurn(1, None, 0.0)), (ModeledTurn(2, None, 0.0),)
    c = SampleId(2)
    rows = instance({A: talk, B: alone, c: alone})
    first = rows.advance([Submit((id,), None, SAMPLING) for id in (A, B, c)], 4, 0, 0)
    assert [row.id for row in first.turns] == [A]
    assert not first.finished
    assert (first.work.decode_steps, first.work.prefill_tokens, rows.unfinished) == (4, 8, 2)
    second = rows.advance([Answer((EpisodeReply(A, (7, 7)),))], 2, 0, 0)
    assert [row.id for row in second.turns] == [B, A]  # c still waits for its first step
    assert second.work.prefill_tokens == 2
    replies = (EpisodeReply(A, None, "length", (0.5, 1.0), {"num_turns": 2}),)
    (row,) = rows.advance([Answer(replies)], 1, 0, 0).finished
    assert (row.finish, row.scalars, row.num_generated) == ("length", {"num_turns": 2}, 6)
    assert row.spans == [TokenSpan(0, 3, 0), TokenSpan(3, 5, NO_VERSION, False), TokenSpan(5, 6, 0)]


@pytest.mark.parametrize(("num_others", "steps"), [(8, 3), (9, 10)])
def test_a_call_ends_once_one_turn_in_eight_has_ended(num_others, steps):
    ids = tuple(SampleId(0, k=k) for k in range(1 + num_others))
    others = dict.fromkeys(ids[1:], (ModeledTurn(20, None, 0.0),))
    rows = instance({ids[0]: (ModeledTurn(3, 2, 9.0), ModeledTurn(1, None, 0.0)), **others}, 16)
    advance = rows.advance([Submit(ids, None, SAMPLING)], 10, 0)
    assert advance.work.decode_steps == steps
    assert [row.id for row in advance.turns] == [ids[0]]


@pytest.mark.parametrize("with_kv", [False, True])
def test_a_held_row_moves_and_still_waits(with_kv):
    talk = {A: (ModeledTurn(3, 2, 9.0), ModeledTurn(1, None, 0.0))}
    here, there = instance(talk), instance(talk)
    here.advance([Submit((A,), None, SAMPLING)], 4, 0)
    (parked,) = here.advance([Park((A,), with_kv)], 1, 0).parked
    assert here.is_empty
    assert there.advance([Resume((A,), parked)], 4, 0).work.decode_steps == 0
    assert not there.unfinished
    assert not there.is_empty
    done = there.advance([Answer((EpisodeReply(A, (7, 7)),))], 4, 0)
    assert done.work.prefill_tokens == 2 + 7 * (not with_kv)
    assert done.work.kv_tokens == 7 * with_kv
    assert [row.id for row in done.turns] == [A]


@pytest.mark.parametrize(
    ("most", "tokens", "finish"),
    [(9, [(4, 3), (2, None)], "stop"), (8, [(4, 3), (1, None)], "length"),
     (7, [(4, None)], "length"), (3, [(3, None)], "length")],
)  # fmt: skip
def test_a_conversation_is_cut(most, tokens, finish):
    whole = ModeledConversation((ModeledTurn(4, 3, 1.0), ModeledTurn(2, None, 1.0)))
    cut = whole.cut_at(most)
    assert ([turn[:2] for turn in cut.turns], cut.finish) == (tokens, finish)


def test_what_is_drawn_adds_up_and_has_its_mean():
    model = ConversationModel(turns=8, reply_tokens=40, wait_s=0.5, seed=3)
    drawn = [model.of(SampleId(i), 100) for i in range(2000)]
    assert all(sum(turn.tokens for turn in talk.turns) == 100 for talk in drawn)
    assert {len(talk.turns) for talk in drawn} == {8}
    turns = [turn for talk in drawn for turn in talk.turns]
    assert sum(turn.wait_s for turn in turns) / len(turns) == pytest.approx(0.5, rel=0.05)
    replies = [turn.reply_tokens for turn in turns if turn.reply_tokens is not None]
    assert sum(replies) / len(replies) == pytest.approx(40, rel=0.02)
    assert model.of(SampleId(7), 100) == drawn[7]
    assert model.of(SampleId(0), 3).turns[-1].reply_tokens is None
    assert [turn.tokens for turn in model.of(SampleId(0), 3).turns] == [1, 1, 1]


def run(kind, conversations, prompts=8):
    flow = Flow()
    flow.collect(flow.actor.generate(flow.prompts, num_samples=2))
    executor = SimulatedExecutor(
        COSTS, 2, lambda id: 20, lambda prompt: 4, max_running=8, scopes={},
        conversations=conversations,
    )  # fmt: skip
    settings = StepSettings(sampling=SAMPLING, decode_steps=4, prompts_per_step=prompts)
    step = flow.graph, executor, ((i, "prompt") for i in range(1000)), settings
    if kind == "serial":
        chosen = SerialSchedule(*step)
    else:
        chosen = LoopSchedule(
            *step,
            Fused(),
            limits=RoundLimits(max_held=16, chunk_tokens=100),
            length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1,))),
        )
    result = chosen.run_step(0)
    return executor.clock.now(), [(s.id, s.tokens, s.spans, s.scalars) for s in result.samples]


def test_one_conversation_takes_its_turns_and_its_waits():
    """Prefills 4 and replies at half a second a token, 20 decode steps, the waits."""
    model = ConversationModel(turns=3, reply_tokens=6, wait_s=30)
    turns = model.of(SampleId(0), 20).turns
    waits = sum(turn.wait_s for turn in turns)
    replies = sum(turn.reply_tokens or 0 for turn in turns)
    flow = Flow()
    flow.collect(flow.actor.generate(flow.prompts))
    executor = SimulatedExecutor(
        COSTS, 1, lambda id: 20, lambda prompt: 4, max_running=8, scopes={}, conversations=model
    )
    settings = StepSettings(sampling=SAMPLING, decode_steps=100, prompts_per_step=1)
    (sample,) = SerialSchedule(flow.graph, executor, iter([(0, "")]), settings).run_step(0).samples
    assert executor.clock.now() == pytest.approx(2 + replies / 2 + 20 + waits)
    assert sample.scalars["num_turns"] == 3
    assert sample.response_tokens == 20 + replies
    assert sample.model_tokens == 20


@pytest.mark.parametrize("wait_s", [0.0, 3.0, 300.0])
def test_what_is_made_does_not_depend_on_waits(wait_s):
    def of(wait, sigma):
        return ConversationModel(turns=4, reply_tokens=5, wait_s=wait, wait_sigma=sigma)

    seconds, serial = run("serial", of(wait_s, 1.0))
    assert serial == run("fused", of(wait_s, 1.0))[1] == run("fused", of(1.0, 0.0))[1]
    assert len(serial) == 16
    fastest, _ = run("serial", of(0.0, 0.0))
    assert seconds >= fastest


def test_others_have_the_rows_of_those_that_wait():
    """One row, two conversations: each decodes while the other waits for 10 seconds a turn."""
    conversations = ConversationModel(turns=2, reply_tokens=1, wait_s=10, wait_sigma=0)
    flow = Flow()
    flow.collect(flow.actor.generate(flow.prompts))
    executor = SimulatedExecutor(
        Costs(step_s=1.0), 1, lambda id: 4, lambda prompt: 4, max_running=1, scopes={},
        conversations=conversations,
    )  # fmt: skip
    settings = StepSettings(sampling=SAMPLING, decode_steps=1, prompts_per_step=2)
    fused = LoopSchedule(
        flow.graph, executor, iter([(0, ""), (1, "")]), settings, Fused(),
        limits=RoundLimits(max_held=1, chunk_tokens=100),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1,))),
    )  # fmt: skip
    fused.run_step(0)
    (whole,) = {sum(t.tokens for t in conversations.of(SampleId(i), 4).turns) for i in (0, 1)}
    assert 20 + whole <= executor.clock.now() <= 20 + 2 * whole + 1


def test_passes_run_while_all_samples_wait():
    """On one instance, which is never free: it parks what waits, and nothing but that is slower."""
    costs = replace(COSTS, token_s={"reference": 0.01}, kv_token_s=0.001)
    talks = ConversationModel(turns=6, reply_tokens=5, wait_s=100)
    setting = schedule.Setting(
        costs=costs, num_instances=1, max_held=16, group_size=2, conversations=talks,
        workload=Workload(groups=(Group(4, (20,)),) * 8, prompts_per_step=8, num_steps=4),
    )  # fmt: skip
    serial, fused, *_ = (
        schedule.replay(setting, config, skip=2) for config in setting.schedules[:2]
    )
    assert serial.hidden == 0
    assert fused.hidden > 0.9
    assert fused.front_s < serial.front_s


ARGS = "--lengths=lognormal:median=60,sigma=0.5 --instances=2 --prompts=8 --group-size=4 --steps=3"


@pytest.mark.long
def test_plan_schedule_knows_waits():
    turns = "--turns=turns=4,reply=20,wait=2,sigma=1"
    lines, remarks, _ = schedule_command.run([*ARGS.split(), turns], lambda *_: None)
    setting, _ = schedule_command.read_setting([*ARGS.split(), turns])
    outcomes = [schedule.replay(setting, config) for config in setting.schedules]
    # Partial and packed choose by length, so that a step may be without its longest conversation.
    bound = schedule.lower_bound(setting)
    assert all(outcome.front_s >= max(bound, 8) for outcome in outcomes[:2])
    assert [outcome.off_policy for outcome in outcomes[:2]] == [0, 0], "replies are of no policy"
    # Replies come while others decode.
    assert all(outcome.front_s < 1.15 * outcomes[0].front_s for outcome in outcomes)
    assert {line[0] for line in lines} >= {"serial", "fused", "partial", "packed"}
    told = "conversations: up to 4 turns; a reply has 20 tokens after 2 s, on average"
    assert told in remarks


@pytest.mark.parametrize(
    "text",
    [
        "turns=2",
        "turns=0,reply=1,wait=1",
        "turns=2,reply=1,wait=x",
        "turns=2,reply=1,wait=1,pause=3",
        "turns=2,reply=1,wait=-1",
    ],
)
def test_turns_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=r"--turns=turns=.*: wanted turns"):
        schedule_command.read_setting([*ARGS.split(), f"--turns={text}"])


def forecasts(conversations, steps=4, prompts=4):
    """Seconds that each step is expected to take where no sample moves, and those that it took."""
    flow = Flow()
    flow.collect(flow.reference.log_probs(flow.actor.generate(flow.prompts, num_samples=4)))
    costs = Costs(
        step_s=0.01, row_s=5e-4, prefill_token_s=1e-4, call_s=0.002, kv_call_s=0.002,
        token_s={"reference_log_probs": 2e-4},
    )  # fmt: skip
    executor = SimulatedExecutor(
        costs, 2, lambda id: 20 + 7 * (id.prompt * 5 + id.k) % 60, lambda prompt: 4, max_running=8,
        scopes=dict.fromkeys(costs.token_s, Scope.INSTANCE), conversations=conversations,
    )  # fmt: skip
    fused = LoopSchedule(
        flow.graph, executor, ((i, "prompt") for i in range(1000)),
        StepSettings(sampling=SAMPLING, decode_steps=16, prompts_per_step=prompts), Fused(),
        limits=RoundLimits(max_held=16, chunk_tokens=1000),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1,) * 4)),
    )  # fmt: skip
    known = []
    for step in range(steps):
        began = executor.clock.now()
        result = fused.run_step(step)
        known.append((result.metrics.get("plan/stay_s"), executor.clock.now() - began))
    return [pair for pair in known if pair[0] is not None]


def test_waits_are_part_of_the_forecast(monkeypatch):
    """Steps wait ten times as long as they decode; errors of plans are not known yet."""
    talks = ConversationModel(turns=4, reply_tokens=10, wait_s=1.0)
    expected, took = map(sum, zip(*forecasts(talks), strict=True))
    assert expected == pytest.approx(took, rel=0.1)
    monkeypatch.setattr(OpenTurns, "waited", lambda self, id: 0.0)
    expected, took = map(sum, zip(*forecasts(talks), strict=True))
    assert expected < 0.15 * took


@pytest.mark.parametrize(("call_s", "one_in"), [(0.06, 8), (0.06, 32), (0.002, 1)])
def test_calls_end_by_what_they_cost(monkeypatch, call_s, one_in):
    """A call that ends at a fixed share of ended turns takes longer; here are 64 conversations."""
    draw = random.Random(1)
    lengths = [tuple(round(draw.lognormvariate(5.3, 0.5)) for _ in range(8)) for _ in range(24)]
    costs = Costs(step_s=0.01, row_s=2e-4, prefill_token_s=1e-5, call_s=call_s, admit_s=1e-4)
    setting = schedule.Setting(
        costs=costs, num_instances=1, max_held=64, group_size=8,
        workload=Workload(tuple(Group(40, of) for of in lengths), 8, 3),
        conversations=ConversationModel(turns=8, reply_tokens=20, wait_s=0.1),
    )  # fmt: skip
    seconds = schedule.replay(setting, FusedScheduleConfig()).front_s
    monkeypatch.setattr(call_limits, "enough_turns", lambda *_: one_in)
    assert seconds < 0.97 * schedule.replay(setting, FusedScheduleConfig()).front_s
