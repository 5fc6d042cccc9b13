"""When to gather the long tail: the migration threshold from a small model of a step.

RLHFuse (arXiv 2409.13221, section 4): once few samples are left they move to few instances, and
the freed ones run the forward-only stages of the samples that are done. Too soon and the gathered
batch slows the longest; too late and the freed instances have no time left.
"""

from collections.abc import Sequence

import numpy as np

from hybridrl.flow.costs import Costs

_EXACT = 128  # every threshold up to here is tried, above it as many spaced evenly


def best_threshold(
    lengths: Sequence[int],
    num_instances: int,
    costs: Costs,
    inference_s_per_token: float,
    max_held: int,
    prompt_tokens: float = 0.0,
) -> int:
    """How many unfinished samples to gather at, so that generation and inference end soonest.

    0 when it is not sooner than inference after all samples are done. Of equal thresholds the
    smallest; parameters as in `expected_seconds`.
    """
    if num_instances < 2 or not lengths:
        return 0
    num = len(lengths)
    tried = np.arange(num)
    if num > 2 * _EXACT:
        tried = np.union1d(tried[:_EXACT], np.linspace(_EXACT, num - 1, _EXACT).astype(int))
    seconds = expected_seconds(
        lengths, num_instances, costs, inference_s_per_token, max_held, prompt_tokens, tried[1:]
    )
    if not len(seconds):
        return 0
    waiting = serial_seconds(lengths, num_instances, costs, inference_s_per_token, prompt_tokens)
    least = seconds.min()
    if least >= waiting * (1 - 1e-9):
        return 0
    return int(tried[1:][seconds <= least * (1 + 1e-9)][0])


def serial_seconds(
    lengths: Sequence[int],
    num_instances: int,
    costs: Costs,
    inference_s_per_token: float,
    prompt_tokens: float = 0.0,
) -> float:
    """Generation, then inference on all instances; parameters as in `expected_seconds`."""
    done, steps, alive, held = _intervals(lengths, prompt_tokens)
    rows = np.maximum(1.0, alive / num_instances)
    decode = steps * (costs.step_s + rows * (costs.row_s + costs.cached_token_s * held))
    inference = inference_s_per_token * float((done + prompt_tokens).sum())
    return float(decode.sum()) + inference / num_instances


def expected_seconds(
    lengths: Sequence[int],
    num_instances: int,
    costs: Costs,
    inference_s_per_token: float,
    max_held: int,
    prompt_tokens: float,
    thresholds: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """Seconds of generation and inference together, for each of `thresholds` (below the samples).

    `lengths` are response tokens, `prompt_tokens` those of a prompt on average; `max_held` is how
    many samples fit an instance; inference is all forward-only stages together, per token.

    The model: samples are spread evenly over the instances and all decode from the start. When
    n are left they move to the fewest instances that take them: each at most `max_held`, and no
    more than keep a decode step flat. A keeper waits for what it is sent. An instance without
    samples runs inference on those that are done; when the last sample is done, all share what is
    left. With s steps between two ends, r = rows of an instance that decodes, and h tokens held by
    a row, decoding takes s (step_s + row_s r + cached_token_s r h); inference that is left at the
    end is the largest backlog, over all ends i, of work from i on less capacity after i.
    """
    tried = np.asarray(thresholds, dtype=np.int64)
    num = len(lengths)
    assert ((tried >= 1) & (tried < num)).all(), "a threshold that leaves no sample to wait for"
    done, steps, alive, held = _intervals(lengths, prompt_tokens)
    tokens = prompt_tokens + done[num - tried - 1]  # of each sample when it moves
    keepers, move = _moves(tried, tokens, num_instances, costs, max_held)
    gathered = alive[None, :] <= tried[:, None]  # [thresholds, intervals]
    decoding = np.where(gathered, keepers[:, None], num_instances)
    rows = np.maximum(1.0, alive / decoding)
    taken = steps * (costs.step_s + rows * (costs.row_s + costs.cached_token_s * held))
    taken[np.arange(len(tried)), num - tried] += move
    capacity = taken * (num_instances - np.minimum(decoding, alive))
    work = inference_s_per_token * (done + prompt_tokens)
    work_from = np.cumsum(work[::-1])[::-1]
    capacity_after = np.cumsum(capacity[:, ::-1], axis=1)[:, ::-1] - capacity
    left = (work_from - capacity_after).max(axis=1)
    return np.asarray(taken.sum(axis=1) + left / num_instances)


def _intervals(
    lengths: Sequence[int], prompt_tokens: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Between the ends of samples: length at the end, steps, unfinished samples, tokens a row."""
    done = np.sort(np.asarray(lengths, dtype=np.float64))
    before = np.concatenate([[0.0], done[:-1]])
    alive = np.arange(len(done), 0, -1)
    return done, done - before, alive, prompt_tokens + (done + before) / 2


def _moves(
    tried: np.ndarray, tokens: np.ndarray, num_instances: int, costs: Costs, max_held: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each threshold: the instances that keep samples, and the seconds that they wait."""
    flat = np.array([costs.flat_rows(cached_per_row=float(t)) for t in tokens])
    keepers = np.minimum(-(-tried // np.clip(flat, 1, max_held)), num_instances)
    moved = np.maximum(0.0, tried - keepers * np.maximum(1.0, tried / num_instances))
    each = np.array([costs.move(float(t)) for t in tokens])
    return keepers, np.where(moved > 0, costs.call_s + moved / keepers * each, 0.0)
