"""The asynchronous schedule: which weights made each token, whatever the latencies."""

import json
from collections import Counter
from typing import Any

import pytest
from conversations import of_turns
from hypothesis import event, given, settings
from hypothesis import strategies as st
from separate_executor import Latencies, SeparateExecutor

from hybridrl.config.loss import Loss
from hybridrl.flow import Flow, SampleId, recipe
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Sampling, Scope, WeightsReady
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.flow.sample import NO_VERSION
from hybridrl.schedule.asynchronous import Async
from hybridrl.schedule.base import StepSettings, next_events
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
    flow.actor.update(samples, loss=ToyLoss())


WHOLE = EarlySettings(obstacle="these cases train whole batches")


def make(
    executor, cfg, *, staleness=1, prompts=4, decode_steps=5, held=100, num_steps=None,
    first_prompt=0, turns=False, serial=False,
):  # fmt: skip
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
    return LoopSchedule(
        *parts,
        Async(max_staleness=staleness, early=WHOLE, num_steps=num_steps),
        limits=RoundLimits(max_held=held, chunk_tokens=50),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1, 2, 3))),
    )


def of_id(values):
    return lambda id: values[(7 * id.prompt + 3 * id.k) % len(values)]


latencies = st.builds(
    Latencies,
    push=st.sampled_from([0.0, 1.0, 30.0]),
    load=st.sampled_from([0.0, 1.0, 30.0]),
    update=st.sampled_from([0.1, 1.0, 100.0]),
)
cases = given(
    seed=st.integers(0, 2**16),
    num_instances=st.integers(1, 4),
    decode_steps=st.integers(1, 12),
    k=st.integers(1, 3),
    prompts=st.integers(1, 5),
    staleness=st.integers(0, 3),
    held=st.integers(1, 30),
    kind=st.sampled_from(["plain", "filter", "own"]),
    judges=st.booleans(),
    lengths=st.one_of(
        st.lists(st.integers(0, 20), min_size=1, max_size=9),
        st.integers(0, 20).map(lambda n: [n]),
        st.integers(1, 10).map(lambda n: [n] * 12 + [100 * n]),
    ),
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    finishes=st.lists(st.sampled_from(["stop", "stop", "stop", "abort"]), min_size=1, max_size=7),
    hangs=st.lists(st.booleans(), min_size=1, max_size=7),
    turns=st.sampled_from([0, 0, 1, 4]),
    late=latencies,
    steps=st.integers(1, 6),
    resumes=st.sets(st.integers(0, 5), max_size=2),
    pauses=st.sets(st.integers(0, 5), max_size=1),
)


def run_case(
    case: dict[str, Any], seed: int, *, serial: bool = False, resumes: frozenset[int] = frozenset()
):
    """Run the steps of a case, resumed after some of them; gives what executors saw, and results.

    A resumed run is a fresh schedule on a fresh executor, which has what a checkpoint has.
    """
    length_of, turns = of_id(case["lengths"]), case["turns"]
    cfg = {"k": case["k"], case["kind"]: True}

    def new_executor(seed: int) -> SeparateExecutor:
        return SeparateExecutor(
            case["num_instances"], seed, length_of, lambda id: (of_id(case["rewards"])(id), "ok"),
            of_id(case["finishes"]), of_id(case["hangs"]),
            scopes={"reward": Scope.DRIVER} if case["judges"] else None,
            turns_of=of_turns(length_of, turns) if turns else None, latencies=case["late"],
        )  # fmt: skip

    more = {x: case[x] for x in ("staleness", "prompts", "decode_steps", "held")}
    more |= {"num_steps": case["steps"], "turns": bool(turns), "serial": serial}
    executor = new_executor(seed)
    schedule = make(executor, cfg, **more)
    executors, results, versions = [executor], [], [0]
    for step in range(case["steps"]):
        results.append(schedule.run_step(step))
        versions.append(executor.version)
        if step in case["pauses"] and not serial:
            schedule.pause()
            executor.sync_weights()  # as an evaluation does, whose samples are of all new weights
            while not (ready := next_events(executor)):
                pass
            assert ready == [WeightsReady(executor.version)]
        if step in resumes and not serial:
            schedule.release()
            state = json.loads(json.dumps(schedule.state_dict()))
            pulled = next(schedule.prompts)[0]
            before, executor = executor, new_executor(seed + 1 + step)
            executor.continues(before, {*schedule.needs_versions()})
            schedule = make(executor, cfg, **more, first_prompt=pulled)
            ranks = range(case["num_instances"])
            schedule.load_state_dict(state, prompt_at=lambda i: f"prompt {i}", ranks=ranks)
            for one in schedule.pending():
                executor.place(one.id, one.rank, before.tensors[one.id])
            executors.append(executor)
    assert schedule.close() == {}, "the run has ended, and samples are left"
    return executors, results, versions


def check(staleness, resumes, seed, **case):
    case["staleness"] = staleness
    executors, results, versions = run_case(case, seed, resumes=frozenset(resumes))
    prompts, left = case["prompts"], list[SampleId]()
    for number, result in enumerate(results):
        # Step k trains batch k, in the order of ids, and each sample leaves once.
        used, dropped = [s.id for s in result.samples], list(result.dropped)
        assert used == sorted(used)
        assert sorted(used + dropped) == sorted(s.id for s in result.dispatched)
        batch = {*range(number * prompts, (number + 1) * prompts)}
        assert {id.prompt for id in used + dropped} == batch
        left += used + dropped
        # Its tokens are those of the table's version.
        version = versions[max(0, number - staleness)]
        for sample in result.dispatched:
            versions_of_tokens = {span.version for span in sample.spans if span.trained}
            assert versions_of_tokens <= {version}, (number, sample.id)
            assert all((x.version == NO_VERSION) is not x.trained for x in sample.spans)
        assert result.metrics["samples/staleness"] == min(number, staleness)
    assert Counter(left) == Counter(
        SampleId(p, k=k) for p in range(case["steps"] * prompts) for k in range(case["k"])
    )
    for executor in executors:
        # Models compute with the weights that the step of their samples begins with.
        for name, version, ids in executor.passes:
            assert {versions[id.prompt // prompts] for id in ids} == {version}, name
        assert executor.most_loads() <= 1 + len(case["pauses"])
        assert max(executor.most_held) <= case["k"] * prompts * (staleness + 1)
    last = executors[-1]
    assert not last.tensors, "samples are stored beyond the end"
    overlapped = any(executor.num_overlapped for executor in executors)
    event("instances decode while an update runs" if overlapped else "none decodes meanwhile")
    event(f"resumed {len(executors) - 1} times")
    if resumes or staleness == 0:
        _, wanted = trained_of(case, seed + 7, serial=staleness == 0)
        got = [update for executor in executors for update in executor.updates]
        assert got == wanted


def trained_of(case, seed, serial=False):
    """What an uninterrupted run with other latencies trains on: ids and fields of each update."""
    executors, results, _ = run_case(case, seed, serial=serial)
    assert len(executors) == 1
    return results, executors[0].updates


test_tokens_are_of_the_table_s_version = settings(max_examples=100)(cases(check))
test_thousands_of_cases = pytest.mark.slow(settings(max_examples=5000)(cases(check)))


def check_times(seed, resumes, **case):
    """Nor from the times in which environments reply, weights are pushed and judges judge."""
    seen = [trained_of(case, seed + other)[1] for other in (0, 1)]
    case["late"] = Latencies(push=5.0, load=0.5, update=7.0)
    seen.append(trained_of(case, seed + 2)[1])
    assert seen[0] == seen[1] == seen[2]


test_batches_do_not_depend_on_latencies = settings(max_examples=40)(cases(check_times))
test_hundreds_of_latencies = pytest.mark.slow(settings(max_examples=500)(cases(check_times)))


def test_the_example_of_the_docstring():
    """Batch k + 1 is made while step k trains batch k; an instance loads each version once."""
    executor = SeparateExecutor(
        2, 0, lambda id: 9 + id.prompt % 2, latencies=Latencies(update=100.0)
    )
    schedule = make(executor, {"k": 1}, prompts=2, num_steps=3)
    first = schedule.run_step(0)
    assert {id.prompt for _, submit in executor.submits for id in submit.ids} == {0, 1, 2, 3}
    results = [first, schedule.run_step(1), schedule.run_step(2)]
    assert [[s.id.prompt for s in r.samples] for r in results] == [[0, 1], [2, 3], [4, 5]]
    assert [{s.spans[0].version for s in r.samples} for r in results] == [{0}, {0}, {1}]
    assert [r.metrics["samples/off_policy_tokens"] for r in results] == [0.0, 19.0, 19.0]
    assert sorted(executor.loads) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert executor.num_overlapped, "nothing was generated while a step trained"
    assert schedule.close() == {}
