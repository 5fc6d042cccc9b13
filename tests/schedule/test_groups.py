"""Prompts that have begun: what a step takes, and what goes on in the next one."""

import pytest

from hybridrl.flow import Flow, Sample, SampleId
from hybridrl.flow.executor import Parked, Sampling
from hybridrl.flow.graph import SourceStage
from hybridrl.flow.ledger import Ledger, SampleStatus
from hybridrl.flow.turns import OpenTurns
from hybridrl.schedule.groups import BegunPrompts, GenerationTask, tasks_of

SAMPLING = Sampling(100)


def begun(*positions: int) -> BegunPrompts:
    """Two samples of each of these prompts have begun in step 3."""
    flow = Flow()
    flow.actor.generate(flow.prompts, num_samples=2)
    groups = BegunPrompts(flow.graph, Ledger(), OpenTurns())
    (stage,) = (stage for stage in flow.graph.stages.values() if isinstance(stage, SourceStage))
    samples = [Sample(id=SampleId(position, "", k)) for position in positions for k in range(2)]
    groups.ledger.dispatch(samples)
    tasks = [GenerationTask(s, stage, f"p{s.id.prompt}", SAMPLING, 9.0, 9.0) for s in samples]
    groups.begin([(position, f"p{position}") for position in positions], 3, tasks)
    return groups


def finish(groups: BegunPrompts, *positions: int) -> None:
    for position in positions:
        for task in groups.open[position].tasks.values():
            groups.ledger.move(task.sample.id, SampleStatus.DECODING)
            groups.ledger.move(task.sample.id, SampleStatus.FINISHED)


def test_the_oldest_complete_ones_are_taken_and_the_others_stay_open() -> None:
    groups = begun(4, 2, 3)
    finish(groups, 4, 2)
    assert groups.complete() == [2, 4]
    groups.take([2])
    assert ([*groups.taken], [*groups.open], groups.complete()) == ([2], [4, 3], [4])
    with pytest.raises(AssertionError, match="prompt 2 is taken twice"):
        groups.take([2])
    groups.end_step()
    assert ([*groups.taken], [*groups.open]) == ([], [4, 3])


def test_a_death_makes_a_group_incomplete() -> None:
    groups = begun(2)
    finish(groups, 2)
    groups.ledger.restart(SampleId(2, "", 1))
    assert not groups.is_complete(2)
    assert groups.complete() == []


def test_one_with_more_samples_is_open_again() -> None:
    groups = begun(2, 3)
    finish(groups, 2, 3)
    groups.take([2, 3])
    sample = Sample(id=SampleId(2, "more", 0))
    first = tasks_of(groups.taken)[0]
    groups.ledger.dispatch([sample])
    task = GenerationTask(sample, first.stage, "p2", SAMPLING, 9.0, 9.0)
    groups.begin([(2, "p2"), (3, "p3")], 4, [task])  # none of prompt 3
    assert ([*groups.taken], [*groups.open], groups.complete()) == ([3], [2], [])
    assert (groups.open[2].step, len(groups.open[2].tasks)) == (3, 3)


def test_a_withdrawn_one_begins_again_later() -> None:
    groups = begun(2, 3)
    groups.withdraw([2])
    assert [*groups.open] == [3]
    groups.take([3])
    with pytest.raises(AssertionError):
        groups.withdraw([3])


def test_open_ones_go_on_from_what_is_written() -> None:
    groups = begun(2, 3)
    finish(groups, 3)
    id, other = SampleId(2, "", 0), SampleId(2, "", 1)
    groups.ledger.move(id, SampleStatus.DECODING)
    groups.ledger.move(id, SampleStatus.PARKED)
    tasks = groups.open[2].tasks
    tasks[id] = GenerationTask(
        tasks[id].sample, tasks[id].stage, "p2", SAMPLING, 9.0, 5.0, Parked((id,), (7,), 0, None)
    )
    for task in groups.open[3].tasks.values():
        task.sample.rank = 3
        task.sample.tensors.add("tokens")
    again = BegunPrompts(groups.graph, Ledger(), OpenTurns())
    again.load(groups.to_json(), "p{}".format, ranks=range(2), sampling=lambda stage: SAMPLING)
    assert again.to_json() != groups.to_json()  # ranks are others
    assert [(p, group.prompt, group.step) for p, group in again.open.items()] == [
        (2, "p2", 3), (3, "p3", 3)
    ]  # fmt: skip
    again.restore_parked("state")
    parked = {sample.id: sample for sample in again.pending()}
    assert other not in parked  # it is queued
    assert parked[id].parked == Parked((id,), (7,), -1, "state")
    assert [parked[SampleId(3, "", k)].rank for k in range(2)] == [1, 1]
