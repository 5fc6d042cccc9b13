"""Random cases of the asynchronous schedule on virtual executors, resumed, paused and saved."""

import copy
import json
import random
from dataclasses import replace
from typing import Any

from conversations import of_turns
from hypothesis import strategies as st
from separate_executor import Latencies, SeparateExecutor
from virtual_executor import VirtualExecutor

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, SampleId, recipe
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Sampling, Scope, WeightsReady
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.schedule.as_complete import AsComplete
from hybridrl.schedule.asynchronous import Async
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.events import next_events
from hybridrl.schedule.followed_rounds import FollowedRounds
from hybridrl.schedule.following import Followed
from hybridrl.schedule.guest import GuestStep, GuestWork
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.serial import SerialSchedule


class ToyLoss(Loss):
    fields = ("advantages", "old_log_probs", "reference_log_probs")

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


@recipe("toy")
def toy(flow: Flow, cfg: dict[str, Any]) -> None:
    """GRPO with a reference; `cfg` may ask for a filter, a judge and the trainer's own pass."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.get("k", 2))
    samples = flow.reward.score(samples)
    if cfg.get("filter"):
        samples = samples.filter(lambda rewards: max(rewards) > min(rewards), name="spread")
    samples = flow.reference.log_probs(samples)
    if cfg.get("own"):
        samples = flow.actor.log_probs(samples)
    samples = samples.by_group(lambda rewards: [r - max(rewards) for r in rewards])
    if cfg.get("maps"):
        samples = samples.map(lambda advantage: 2 * advantage, ("advantage",), scalars=("twice",))
    if "take" in cfg:
        samples = samples.take(**cfg["take"])
    flow.actor.update(samples, loss=ToyLoss())


WHOLE = EarlySettings(obstacle="these cases train whole batches")


def make(
    executor, cfg, *, staleness=1, prompts=4, decode_steps=5, held=100, num_steps=None,
    first_prompt=0, turns=False, serial=False, in_flight=False, record=None, early=False,
    as_complete=False, least_tokens=1,
):  # fmt: skip
    """With `early` the pool trains on whole groups as they come, else on batches.

    It begins with `least_tokens` or more.
    """
    most = 20
    parts = (
        toy.build(cfg),
        executor,
        ((i, f"prompt {i}") for i in range(first_prompt, 10_000)),
        StepSettings(
            sampling=Sampling(max_new_tokens=most, max_turn_tokens=most if turns else 0),
            decode_steps=decode_steps,
            prompts_per_step=prompts,
        ),
    )
    if serial:
        return SerialSchedule(*parts)
    policy = Async if executor.separate else FollowedRounds
    return LoopSchedule(
        *parts,
        (AsComplete if as_complete else policy)(
            max_staleness=staleness,
            early=EarlySettings() if early else WHOLE,
            num_steps=num_steps,
            in_flight=in_flight,
            follows=None if record is None else Followed(record),
        ),
        limits=RoundLimits(max_held=held, chunk_tokens=least_tokens if early else 50),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1, 2, 3))),
    )


NUM_EVALUATED = 6  # samples of an evaluation, of three prompts


def evaluation_graph():
    """Two responses to a prompt, judged."""
    flow = Flow()
    samples = flow.actor.generate(flow.prompts, num_samples=2, name="eval_main")
    flow.collect(flow.reward.score(samples))
    return flow.graph


def evaluate(schedule, step, results):
    """Have an evaluation of two sets use the instances; `results` gets version and result."""
    executor, settings = schedule.executor, schedule.settings

    def steps(version):
        for _ in range(2):
            guest = GuestStep(
                evaluation_graph(),
                executor,
                ((i, f"evaluated {i}") for i in range(NUM_EVALUATED // 2)),
                replace(settings, prompts_per_step=NUM_EVALUATED // 2),
                version,
                limits=RoundLimits(max_held=3, chunk_tokens=50),
                length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1,))),
            )
            guest.start(step)
            result = yield guest
            results.append((step, version, result))
            guest.release()

    if schedule.takes_guests:
        schedule.admit(lambda version: GuestWork(version, steps(version)))


def of_id(values):
    return lambda id: values[(7 * id.prompt + 3 * id.k) % len(values)]


latencies = st.builds(
    Latencies,
    push=st.sampled_from([0.0, 1.0, 30.0]),
    load=st.sampled_from([0.0, 1.0, 30.0]),
    update=st.sampled_from([0.1, 1.0, 100.0]),
)
CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**16),
    "num_instances": st.integers(1, 4),
    "decode_steps": st.integers(1, 12),
    "k": st.integers(1, 3),
    "prompts": st.integers(1, 5),
    "staleness": st.integers(0, 3),
    "held": st.integers(1, 30),
    "kind": st.sampled_from(["plain", "filter", "own"]),
    "judges": st.booleans(),
    "early": st.booleans(),
    "lengths": st.one_of(
        st.lists(st.integers(0, 20), min_size=1, max_size=9),
        st.integers(0, 20).map(lambda n: [n]),
        st.integers(1, 10).map(lambda n: [n] * 12 + [100 * n]),
    ),
    "rewards": st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    "finishes": st.lists(st.sampled_from(["stop"] * 3 + ["abort"]), min_size=1, max_size=7),
    "hangs": st.lists(st.booleans(), min_size=1, max_size=7),
    "turns": st.sampled_from([0, 0, 1, 4]),
    "late": latencies,
    "steps": st.integers(1, 6),
    "resumes": st.sets(st.integers(0, 5), max_size=2),
    "pauses": st.sets(st.integers(0, 5), max_size=1),
    "saves": st.sets(st.integers(0, 5), max_size=3),
    "evaluations": st.sets(st.integers(0, 5), max_size=2),
}


class SharedExecutor(VirtualExecutor):
    """Ranks that train and generate, from a checkpoint with finished and parked samples."""

    num_copied = 0

    def continues(self, before: VirtualExecutor, versions: set[int]) -> None:
        assert not versions, "weights that are pushed to nobody"
        self.version = before.version

    def place(self, id: SampleId, rank: int, tensors: dict[str, Any]) -> None:
        self._where[id], self.tensors[id] = rank, tensors


def continued(before, schedule, executor, cfg, more, pulled=None):
    """The schedule that goes on from a checkpoint on another executor; the one before may, too.

    Prompts before `pulled` have begun; None: those that the schedule has pulled.
    """
    schedule.release()
    schedule.copy_open()
    pending = {x.id: x for x in schedule.pending()}
    parked = {id: x.parked for id, x in pending.items() if x.parked is not None}
    copies = {id: before.snapshot(id, one) for id, one in parked.items()}
    state = json.loads(json.dumps(schedule.state_dict()))
    executor.continues(before, {*schedule.needs_versions()})
    first_prompt = next(schedule.prompts)[0] if pulled is None else pulled
    schedule = make(executor, cfg, **more, first_prompt=first_prompt)
    ranks = range(executor.num_instances)
    schedule.load_state_dict(state, prompt_at=lambda i: f"prompt {i}", ranks=ranks)
    for one in schedule.pending():
        if one.parked is None:
            executor.place(one.id, one.rank, copy.deepcopy(before.tensors[one.id]))
    if copies:
        schedule.restore_parked(executor.take_up(copies))
        executor.num_copied = sum(bool(spans) for _, spans, *_ in copies.values())
    return schedule


def run_case(
    case: dict[str, Any], seed: int, *, serial: bool = False,
    resumes: frozenset[int] = frozenset(), leaves_some: bool = False,
):  # fmt: skip
    """Run the steps of a case, resumed after some of them; gives what executors saw, and results.

    A resumed run is a fresh schedule on a fresh executor, which has what a checkpoint has. Where a
    take may have fewer groups than it wants, the run `leaves_some` samples.
    """
    length_of, turns = of_id(case["lengths"]), case["turns"]
    cfg = {"k": case["k"], case["kind"]: True, **case.get("more", {})}

    def new_executor(seed: int) -> Any:
        apart = {
            "latencies": case["late"], "in_flight": case.get("in_flight", False),
            "deaths": case.get("deaths"), "tells": case.get("tells", "deaths" in case),
        }  # fmt: skip
        kind, of_kind = (SharedExecutor, {}) if case.get("shared") else (SeparateExecutor, apart)
        return kind(
            case["num_instances"], seed, length_of, lambda id: (of_id(case["rewards"])(id), "ok"),
            of_id(case["finishes"]), of_id(case["hangs"]),
            scopes={"reward": Scope.DRIVER} if case["judges"] else None,
            turns_of=of_turns(length_of, turns) if turns else None, **of_kind,
        )  # fmt: skip

    more = {x: case[x] for x in ("staleness", "prompts", "decode_steps", "held", "early")}
    more |= {name: case.get(name) for name in ("in_flight", "record", "as_complete")}
    more |= {"num_steps": case["steps"], "turns": bool(turns), "serial": serial}
    executor = new_executor(seed)
    executor.loses = random.Random(seed) if case.get("loses") else None
    schedule = make(executor, cfg, **more)
    executors, results, versions, replays = [executor], [], [0], case.get("checkpoints", {})
    evaluated = []
    for step in range(case["steps"]):
        results.append(schedule.run_step(step))
        versions.append(executor.version)
        if step in case["pauses"] and not serial:
            schedule.pause()
            executor.sync_weights()  # as an evaluation does, whose samples are of all new weights
            with executor.apart():
                while not (ready := next_events(executor)):
                    pass
            assert ready == [WeightsReady(executor.version)]
        if step in case["evaluations"] and not serial:
            evaluate(schedule, step, evaluated)
        if step in case["saves"] and not serial:  # a checkpoint, from which nobody continues
            schedule.copy_open()
        if step in resumes and not serial:
            new = new_executor(seed + 1 + step)
            schedule = continued(executor, schedule, new, cfg, more)
            executor = new
            executors.append(executor)
        if step in case.get("replays", ()):
            new = new_executor(seed + 100 + step)
            followed = more | {"record": case["replayed"], "in_flight": False}
            num_prompts = (step + 1 + case["staleness"]) * case["prompts"]
            prompts = min(num_prompts, case["steps"] * case["prompts"])
            replays[step] = continued(executor, schedule, new, cfg, followed, prompts)
    assert schedule.close() == {} or leaves_some, "the run has ended, and samples are left"
    for step, version, result in evaluated:
        assert version == versions[step + 1], "an evaluation by other weights"
        assert len(result.dispatched) == NUM_EVALUATED
        spans = [span for sample in result.dispatched for span in sample.spans if span.trained]
        assert {span.version for span in spans} <= {version}
    return executors, results, versions
