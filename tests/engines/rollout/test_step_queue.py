"""The order in which batches are begun and read, with a forged scheduler and runner."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.engines.rollout.interface import SamplingParams
from hybridrl.engines.rollout.vllm.steps import BatchDraws, StepQueue, reads_tokens


class Core:
    """Batches of these sizes, numbered from 1; one of 0 has no rows. `log` has the calls."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.log, self.number = sizes, list[str](), 0
        self.scheduler = self.model_executor = self

    def has_requests(self) -> bool:
        return bool(self.sizes)

    def schedule(self) -> Any:
        self.number += 1
        return SimpleNamespace(number=self.number, total_num_scheduled_tokens=self.sizes.pop(0))

    def execute_model(self, scheduled: Any, non_block: bool) -> "Future[Any]":
        assert non_block
        has_rows = scheduled.total_num_scheduled_tokens > 0
        self.log.append(f"begin {scheduled.number}" if has_rows else "nothing")
        return done(None if has_rows else "empty")

    def sample_tokens(self, grammar: None, non_block: bool) -> "Future[Any]":
        assert non_block
        return done(f"output {self.number}")

    def update_from_output(self, scheduled: Any, output: str) -> dict[int, Any]:
        if output == "empty":
            return {}
        assert output == f"output {scheduled.number}"
        self.log.append(f"read {scheduled.number}")
        return {0: SimpleNamespace(outputs=[scheduled.number])}

    def take(self) -> BatchDraws:
        return BatchDraws({}, torch.tensor([float(self.number)]))


def done(value: Any) -> "Future[Any]":
    future = Future[Any]()
    future.set_result(value)
    return future


def queue_of(sizes: list[int], is_asynchronous: bool = True) -> tuple[StepQueue, Core]:
    core = Core(sizes)
    return StepQueue(core, core, is_asynchronous=is_asynchronous), core


def step(queue: StepQueue) -> list[int]:
    """The batch that a step reads; its draws are those of that batch."""
    outputs, was_read = queue.step()
    numbers = list(outputs[0].outputs) if outputs else []
    assert was_read == bool(numbers)
    if numbers:
        assert queue.drawn.log_probs.tolist() == numbers
    return numbers


def test_a_step_begins_the_next_batch_before_it_reads_its_own() -> None:
    queue, core = queue_of([2, 2, 2])
    assert [step(queue) for _ in range(4)] == [[1], [2], [3], []]
    assert core.log == ["begin 1", "begin 2", "read 1", "begin 3", "read 2", "read 3"]


def test_without_asynchronous_scheduling_each_is_read_at_once() -> None:
    queue, core = queue_of([2, 2], is_asynchronous=False)
    assert [step(queue), step(queue)] == [[1], [2]]
    assert core.log == ["begin 1", "read 1", "begin 2", "read 2"]


def test_a_call_that_counts_tokens_leaves_nothing_behind() -> None:
    """Every step reads a batch of its own call."""
    queue, core = queue_of([2] * 9)
    for first in (1, 4):
        queue.begin_call(3)
        assert [step(queue) for _ in range(3)] == [[first], [first + 1], [first + 2]]
        assert core.number == first + 2
    queue.begin_call(None)
    assert step(queue) == [7]
    assert core.number == 8


def test_draws_by_earlier_tokens_wait_for_them() -> None:
    """What computes already is read first, and nothing is begun."""
    queue, core = queue_of([2] * 9)
    assert step(queue) == [1]
    queue.num_reading = 1
    assert [step(queue), step(queue)] == [[2], [3]]
    assert core.log[2:] == ["read 1", "read 2", "begin 3", "read 3"]
    queue.num_reading = 0
    assert step(queue) == [4]
    assert core.log[-3:] == ["begin 4", "begin 5", "read 4"]


def test_a_call_counts_steps_that_wait_for_tokens() -> None:
    queue, core = queue_of([2] * 9)
    queue.begin_call(2)
    queue.num_reading = 1
    assert step(queue) == [1]
    queue.num_reading = 0
    assert step(queue) == [2]
    assert core.number == 2


def test_a_batch_without_rows_is_no_step() -> None:
    """vLLM schedules one to say which requests have left, or where all have their last token."""
    queue, core = queue_of([2, 0, 2])
    assert [step(queue), step(queue), step(queue)] == [[1], [3], []]
    assert core.log == ["begin 1", "nothing", "read 1", "begin 3", "read 3"]


def _leave(core: Core) -> None:
    core.update_from_output = lambda *_: {}  # type: ignore[method-assign]


@pytest.mark.parametrize("leave", [_leave, None])
def test_what_computes_for_requests_that_left_is_read_and_dropped(
    leave: Callable[[Core], None] | None,
) -> None:
    queue, core = queue_of([2, 2])
    assert step(queue) == [1]
    if leave is None:
        with pytest.raises(AssertionError, match="tokens are lost"):
            queue.drain()
        return
    leave(core)
    queue.drain()
    assert step(queue) == []


@pytest.mark.parametrize(
    ("ways", "reads"),
    [
        ({}, False),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.1, "stop_token_ids": (3,)}, False),
        ({"min_new_tokens": 4, "logit_bias": ((3, 1.0),), "bad_words": ((7,),)}, False),
        ({"bad_words": ((7,), (1, 2))}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_what_reads_earlier_tokens(ways: dict[str, Any], reads: bool) -> None:
    assert reads_tokens(SamplingParams(9, **ways)) is reads
