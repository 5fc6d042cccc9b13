"""What a decode step costs, counted exactly: Python calls by `cProfile`, and torch's operators."""

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine

OWN = f"{Path(__file__).parents[3] / 'hybridrl'}/"
NEW_TOKENS = 64
# Calls of this project's functions a token, by rows that begin and end together. The decoder makes
# two a layer, of which there are 3.
MOST = {8: 10.0, 64: 2.2}


@pytest.mark.parametrize("rows", MOST)
def test_a_token_costs_few_calls(
    rows: int,
    make_model: Callable[..., PreTrainedModel],
    make_engine: Callable[..., NativeEngine],
) -> None:
    """All in: from the submission to the last output, in groups of 8 that share a prompt."""
    engine = make_engine(make_model("qwen3", num_hidden_layers=3), block_size=16)
    # Prompts of unequal lengths: rows begin their blocks at different steps.
    prompts = [[number] * (12 + number) for number in range(rows // 8)]
    requests = [
        Request(row, prompts[row // 8], SamplingParams(NEW_TOKENS), row, prefix=row // 8)
        for row in range(rows)
    ]
    outputs = []
    with cProfile.Profile() as profile:
        engine.submit(requests)
        while engine.unfinished:
            outputs += engine.step()
            assert not engine.take_turns()
    calls = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    own = sum(row[1] for (file, _, _), row in calls if file.startswith(OWN))
    assert [len(output.token_ids) for output in outputs] == [NEW_TOKENS] * rows
    assert own > NEW_TOKENS  # the profile has this project's functions
    assert own / (rows * NEW_TOKENS) <= MOST[rows]


class Operators(TorchDispatchMode):
    """Counts the operators that torch dispatches, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += 1
        return operator(*args, **(kwargs or {}))


OPERATORS_A_LAYER, OPERATORS_BESIDES = 25, 63


def test_a_step_dispatches_few_operators(
    make_model: Callable[..., PreTrainedModel], make_engine: Callable[..., NativeEngine]
) -> None:
    """There are 8 rows of unequal lengths, in models of two and of three layers."""
    numbers = []
    for layers in (2, 3):
        engine = make_engine(make_model("qwen3", num_hidden_layers=layers), block_size=16)
        rows = range(8)
        engine.submit([Request(row, [row] * (3 + row), SamplingParams(8), row) for row in rows])
        engine.step()  # which admits them
        with Operators() as operators:
            engine.step()
        numbers.append(operators.number)
    two, three = numbers
    assert three - two <= OPERATORS_A_LAYER
    assert two - 2 * (three - two) <= OPERATORS_BESIDES
