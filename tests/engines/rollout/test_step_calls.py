"""The Python calls that a generated token costs, counted exactly by `cProfile`."""

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

import pytest
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
