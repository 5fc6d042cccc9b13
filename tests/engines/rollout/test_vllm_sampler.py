"""The logits processor that draws in vLLM, without a model: rows that join, leave and move."""

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.random import stream_key, uniforms
from hybridrl.engines.rollout.sampling import SamplingBatch, sample

pytestmark = pytest.mark.vllm

VOCAB = 300
SLOTS = 64
WAYS = [{}, {"temperature": 0.7}, {"top_k": 9}, {"temperature": 0.0}, {"min_p": 0.1}]


class Batch:
    """vLLM's persistent batch and the sampler on it; `rows` are the requests by row."""

    def __init__(self, module: Any) -> None:
        self._module = module
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
            model_config=SimpleNamespace(hf_config=Qwen3Config()),
        )
        self.sampler = module.StreamSampler(config, torch.device("cpu"), False)
        self.arrays = SimpleNamespace(
            num_tokens_no_spec=np.zeros(SLOTS, np.int32),
            num_prompt_tokens=np.zeros(SLOTS, np.int32),
            logitsprocs_need_output_token_ids=True,
        )
        self.sampler.follow(self.arrays)
        assert self.arrays.logitsprocs_need_output_token_ids is False
        self.rows: list[tuple[Any, int]] = []  # of each its draws, and its tokens in vLLM

    def update(
        self,
        removed: Sequence[int] = (),
        added: Sequence[tuple[int, Request]] = (),
        moved: Sequence[tuple[int, int, bool]] = (),
    ) -> None:
        """As vLLM tells it; `moved` are source, target and whether they swap."""
        rows = dict(enumerate(self.rows))
        for index in removed:
            del rows[index]
        told = []
        for index, request in added:
            draws = self._module.Draws(request, len(request.response_ids))
            rows[index] = draws, 0
            extra = {self._module.DRAWS: draws}
            told.append((index, SimpleNamespace(extra_args=extra), [], []))
        ways = self._module.MoveDirectionality
        for source, target, swap in moved:
            one, other = rows.pop(source), rows.pop(target, None)
            rows[target] = one
            if swap:
                rows[source] = other
        change = SimpleNamespace(
            removed=removed,
            added=told,
            moved=[(s, t, ways.SWAP if w else ways.UNIDIRECTIONAL) for s, t, w in moved],
        )
        self.sampler.update_state(change)
        self.rows = [rows[index] for index in range(len(rows))]

    def draw(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """A step: tokens and log-probabilities by row."""
        for row, (draws, num_tokens) in enumerate(self.rows):
            prompt = len(draws.request.prompt_ids) + draws.start
            self.arrays.num_prompt_tokens[row] = prompt
            self.arrays.num_tokens_no_spec[row] = prompt + num_tokens
        marked = self.sampler.apply(logits.clone())
        drawn = self.sampler.take()
        assert marked.isinf().sum(1).tolist() == [1] * len(self.rows)
        values = drawn.log_probs.tolist()
        log_probs = [values[drawn.numbers[draws]] for draws, _ in self.rows]
        self.rows = [(draws, num_tokens + 1) for draws, num_tokens in self.rows]
        return marked.argmax(1).tolist(), log_probs

    def wanted(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Row by row, by the definition of a stream."""
        tokens, log_probs = [], []
        for row, (draws, num_tokens) in enumerate(self.rows):
            key = np.array([draws.request.stream], np.uint64)
            uniform = torch.from_numpy(uniforms(key, np.array([draws.start + num_tokens])))
            batch = SamplingBatch.of([draws.request.sampling], VOCAB, torch.device("cpu"))
            token, log_prob, _ = sample(logits[row : row + 1], uniform, batch)
            tokens.append(int(token))
            log_probs.append(float(log_prob))
        return tokens, log_probs


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    from hybridrl.engines.rollout.vllm import sampling

    group = SimpleNamespace(rank_in_group=0, world_size=1, broadcast=lambda tensor: tensor)
    monkeypatch.setattr(sampling, "get_tp_group", lambda: group)
    return Batch(sampling)


def request(number: int, done: int = 0, **ways: Any) -> Request:
    prompt, response = [1] * (3 + number % 7), [2] * done
    params = SamplingParams(2000, **ways)
    return Request(number, prompt, params, stream_key(5, number), response_ids=response)


def logits_of(batch: Batch, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return 3 * torch.randn(len(batch.rows), VOCAB, generator=generator)


def test_rows_draw_from_their_own_streams(batch: Batch) -> None:
    """While they join, leave, move and swap; some continue behind 250 tokens."""
    started = [request(n, 250 * (n % 2), **WAYS[n % 5]) for n in range(9)]
    changes: dict[int, Callable[[], None]] = {
        0: lambda: batch.update(added=list(enumerate(started))),
        3: lambda: batch.update(removed=[2, 7], added=[(2, request(20))], moved=[(8, 7, False)]),
        5: lambda: batch.update(moved=[(0, 4, True), (1, 7, True)]),
        8: lambda: batch.update(removed=[0], added=[(0, request(21, 511)), (8, request(22))]),
        9: lambda: batch.update(removed=[8]),
    }
    for step in range(12):
        if step in changes:
            changes[step]()
        logits = logits_of(batch, step)
        wanted, wanted_log_probs = batch.wanted(logits)
        tokens, log_probs = batch.draw(logits)
        assert tokens == wanted
        assert log_probs == pytest.approx(wanted_log_probs, abs=1e-6)


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of Python functions, and of C's, while it runs."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("ways", [{}, {"temperature": 0.7, "top_k": 9}])
def test_calls_do_not_grow_with_the_rows(batch: Batch, ways: dict[str, Any]) -> None:
    """A step in which none joins or leaves."""
    counts = {}
    for num_rows in (8, SLOTS):
        batch.update(added=[(row, request(row, **ways)) for row in range(num_rows)])
        batch.draw(logits_of(batch, 0))
        logits = logits_of(batch, 1)
        batch.arrays.num_tokens_no_spec += 1
        counts[num_rows] = calls_of(lambda logits=logits: batch.sampler.apply(logits))
        batch.sampler.take()
    assert counts[8] == counts[SLOTS] > 10
