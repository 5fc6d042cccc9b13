"""Evaluations as guests of a schedule, whose next step is trained meanwhile."""

import random

import pytest
from async_cases import NUM_EVALUATED, evaluate, make, of_id
from separate_executor import Latencies, SeparateExecutor

LATE = Latencies(push=1.0, load=1.0, update=60.0)


class Half(random.Random):
    """So that every latency is half of the most."""

    def random(self):
        return 0.5


def run(waits, seed=None, **more):
    """Six steps, each followed by an evaluation, which training `waits` for or not."""
    length_of = of_id([9, 3, 14, 7, 12])
    executor = SeparateExecutor(
        2, seed or 0, length_of, latencies=LATE, in_flight=more.get("in_flight", False)
    )
    if seed is None:
        executor._random = Half()
    schedule = make(executor, {"k": 2}, staleness=2, prompts=2, num_steps=6, held=4, **more)
    results, evaluated, guests = [], [], []
    update = executor.update

    def noting(updates):
        guests.append(schedule.loop.guest is not None)
        update(updates)

    executor.update = noting
    for step in range(6):
        results.append(schedule.run_step(step))
        assert len(evaluated) <= 2 * step
        evaluate(schedule, step, evaluated)
        if waits:
            schedule.wait_for_guest()
    schedule.wait_for_guest()
    assert schedule.close() == {}
    return executor, results, evaluated, guests


def test_a_step_is_trained_under_an_evaluation():
    """It takes less time, and makes the same tokens and batches, as one that waits."""
    one, results, evaluated, under = run(False)
    other, again, later, waited = run(True)
    assert any(under)
    assert not any(waited)
    assert one.clock.now() < 0.9 * other.clock.now()
    assert one.updates == other.updates
    for result, same in zip(results, again, strict=True):
        assert [s.spans for s in result.samples] == [s.spans for s in same.samples]
        assert result.metrics["samples/staleness"] <= 2
    # By the weights after the step, of which no other has any part.
    for number, ((step, version, result), (_, same, _)) in enumerate(
        zip(evaluated, later, strict=True)
    ):
        assert (step, version, same) == (number // 2, number // 2 + 1, number // 2 + 1)
        assert len(result.samples) == NUM_EVALUATED
        assert {span.version for s in result.samples for span in s.spans if span.trained} == {
            version
        }


@pytest.mark.parametrize("more", [{"in_flight": True}, {"as_complete": True}])
def test_the_bound_holds_under_evaluations(more):
    """With weights in flight, and as groups complete; no instance loads newer weights meanwhile."""
    under = []
    for seed in range(5):
        _, results, _, guests = run(False, seed, **more)
        under += guests
        for number, result in enumerate(results):
            spans = [span for s in result.samples for span in s.spans if span.trained]
            assert spans
            assert all(0 <= number - span.version <= 2 for span in spans)
    assert any(under)
