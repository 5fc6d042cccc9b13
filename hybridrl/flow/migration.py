"""When the long tail migrates: the migration threshold from a small model of a step.

RLHFuse (arXiv 2409.13221, section 4): once few samples are left they move to few instances. The
freed ones run the forward-only stages of finished samples. Too soon and the gathered batch slows
the longest; too late and the freed instances have no time left.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hybridrl.flow.costs import Costs

_EXACT = 64  # every threshold up to here is tried; above it 64 of each further factor of four


class MigrationPlan(NamedTuple):
    """When the tail migrates, and how densely; (0, 0) is never."""

    threshold: int
    """Unfinished samples at which it migrates."""
    cap: int
    """Most samples that an instance keeps."""
    width: int = 1
    """Instances that become one, which keeps the samples."""

    @property
    def moves(self) -> bool:
        """Whether it can move anything: a single sample stays, unless it is to decode wide."""
        return self.threshold > (self.width == 1)


NO_MIGRATION = MigrationPlan(0, 0)


def best_migration_plan(
    lengths: Sequence[int],
    num_instances: int,
    costs: Costs,
    inference_s_per_token: float,
    max_held: int,
    prompt_tokens: float = 0.0,
    threshold: int | None = None,
    wait_s: float = 0.0,
    training: np.ndarray | None = None,
    widths: Sequence[int] = (1,),
    must_move: bool = False,
) -> MigrationPlan:
    """When and how densely the tail migrates, so that generation and inference end soonest.

    RLHFuse keeps a decode step flat (`Costs.flat_rows`): the smallest cap tried. The others are its
    doublings up to `max_held` (samples that an instance has memory for). Where rows are not free, a
    slower tail may still pay for a freed instance. It is (0, 0) when nothing is sooner than
    inference after all samples are done. Of equal choices the smallest threshold, then the smallest
    cap. With `threshold` only the cap is chosen. The other parameters as in `expected_seconds`.

    `widths` are the numbers of instances that may become one; 1 leaves them as they are. Of equal
    ones the first. With `must_move` some migration is chosen, however late it ends.
    """
    widths = [width for width in widths if width <= num_instances]
    if num_instances < 2 or len(lengths) < 2 or threshold == 0 or not widths:
        return NO_MIGRATION
    model = (num_instances, costs, inference_s_per_token)
    least = serial_seconds(lengths, *model, prompt_tokens, training) * (1 - 1e-9)
    blocks, best = _blocks(len(lengths)), NO_MIGRATION
    if threshold is not None:
        blocks = [np.array([min(threshold, len(lengths) - 1)])]
    if threshold is not None or must_move:
        least = np.inf
    for width, tried in product(widths, blocks):
        caps = _caps(costs.at_width(width), max_held, prompt_tokens + max(lengths))
        pairs = np.stack(np.meshgrid(tried, caps, indexing="ij"), axis=-1).reshape(-1, 2)
        seconds = expected_seconds(
            lengths, *model, pairs[:, 0], pairs[:, 1], prompt_tokens, wait_s, training, width
        )
        first = int(np.argmax(seconds <= seconds.min() * (1 + 1e-9)))
        if seconds[first] < least:
            num_left, cap = pairs[first].tolist()
            best = MigrationPlan(num_left, cap, width)
            least = seconds[first] * (1 - 1e-9)
    return best if threshold is None else best._replace(threshold=threshold)


def _caps(costs: Costs, max_held: int, tail_tokens: float) -> list[int]:
    """Numbers of samples to keep on an instance that are tried."""
    caps = [min(max_held, costs.flat_rows(cached_per_row=tail_tokens))]
    while caps[-1] < max_held:
        caps.append(min(max_held, 2 * caps[-1]))
    return caps


def _blocks(num: int) -> list[np.ndarray]:
    """Thresholds to try, in blocks that look at ever more of the tail."""
    blocks, low, high = [], 1, _EXACT
    while low < num:
        last = min(high, num - 1)
        blocks.append(np.unique(np.linspace(low, last, min(_EXACT, last - low + 1)).astype(int)))
        low, high = high + 1, 4 * high
    return blocks


def serial_seconds(
    lengths: Sequence[int],
    num_instances: int,
    costs: Costs,
    inference_s_per_token: float,
    prompt_tokens: float = 0.0,
    training: np.ndarray | None = None,
) -> float:
    """Generation, then inference on all instances; parameters as in `expected_seconds`."""
    done, steps, alive, held = _intervals(lengths, prompt_tokens)
    rows = np.maximum(1.0, alive / num_instances)
    decode = steps * (costs.step_s + rows * (costs.row_s + costs.cached_token_s * held))
    inference = inference_s_per_token * float((done + prompt_tokens).sum())
    inference += 0.0 if training is None else float(training.sum())
    return float(decode.sum()) + inference / num_instances


def training_arrivals(
    lengths: Sequence[int],
    longest_of_prompt: Sequence[int],
    train_s_per_token: float,
    prompt_tokens: float,
) -> np.ndarray:
    """Seconds of training on one instance that become possible at each end of a sample [samples].

    A prompt's samples are trained when the longest of them has ended; prompts have equally many
    tokens here. `train_s_per_token` is that of one instance. `lengths` are ascending.
    """
    seconds, done = np.zeros(len(lengths)), np.asarray(lengths)
    if len(longest_of_prompt):
        at = np.searchsorted(done, np.asarray(longest_of_prompt)).clip(max=len(done) - 1)
        total = train_s_per_token * float((done + prompt_tokens).sum())
        np.add.at(seconds, at, total / len(longest_of_prompt))
    return seconds


def expected_seconds(
    lengths: Sequence[int],
    num_instances: int,
    costs: Costs,
    inference_s_per_token: float,
    thresholds: Sequence[int] | np.ndarray,
    caps: Sequence[int] | np.ndarray,
    prompt_tokens: float = 0.0,
    wait_s: float = 0.0,
    training: np.ndarray | None = None,
    width: int = 1,
) -> np.ndarray:
    """Seconds of generation and inference together, for each threshold and its cap.

    `lengths` are response tokens, `prompt_tokens` those of a prompt on average; inference is all
    forward-only stages together, per token. Thresholds are below the number of samples. A sample
    that moves waits `wait_s` for the end of its keeper's call.

    With `training` (`training_arrivals`) instances without samples do that, too. With a `width`
    above 1 the samples move to wide instances of so many members, from their members too. It is
    infinite where these have no room for all.

    The model: samples are spread evenly over the instances and all decode from the start. When n
    are left they move to the fewest instances that take them, at most `cap` each. A keeper waits
    for the samples that it is sent. An instance without samples runs inference on those that are
    done; when the last sample is done, all share the rest. Let s be the steps between two ends, r
    the rows of an instance that decodes, h the tokens a row. Decoding takes
    s (step_s + r (row_s + cached_token_s h)). The inference left when all are done is a maximum
    over all ends i: the work from i on less the capacity after i.
    """
    tried, most = np.asarray(thresholds, np.int64), np.asarray(caps, np.int64)
    num = len(lengths)
    assert ((tried >= 1) & (tried < num)).all(), "a threshold that leaves no sample to wait for"
    done, steps, alive, held = _intervals(lengths, prompt_tokens)
    reached = done[num - tried - 1]
    # Several may end together, so fewer are left, or none.
    tried = num - np.searchsorted(done, reached, side="right")
    keepers = np.clip(-(-tried // most), 1, num_instances // width)
    wide = costs.at_width(width)
    tokens = prompt_tokens + reached  # of each sample when it moves
    # What comes before the first gathering is the same for all: [1, before] and [tried, after].
    start = num - max(1, int(tried.max()))
    gathered = alive[start:] <= tried[:, None]
    decoding = np.where(gathered, keepers[:, None], num_instances)
    taken, left = np.zeros(len(tried)), np.zeros(len(tried))
    for span, on, moved in (
        (slice(start), np.full((1, start), num_instances), np.zeros((1, start), bool)),
        (slice(start, num), decoding, gathered),
    ):
        rows = np.maximum(1.0, alive[span] / on)
        seconds = steps[span] * np.where(
            moved,
            wide.step_s + rows * (wide.row_s + wide.cached_token_s * held[span]),
            costs.step_s + rows * (costs.row_s + costs.cached_token_s * held[span]),
        )
        if span.start:
            moving = _moving(tried, keepers, tokens, num_instances, wide, wait_s, width)
            seconds[np.arange(len(tried)), np.minimum(num - tried, num - 1) - start] += moving
        busy = np.minimum(on, alive[span]) * np.where(moved, width, 1)
        capacity = seconds * (num_instances - busy)
        work = inference_s_per_token * (done[span] + prompt_tokens)
        work = work if training is None else work + training[span]
        left = _left(left, work, capacity)
        taken = taken + seconds.sum(axis=1)
    fits = (width == 1) | (-(-tried // most) <= num_instances // width)
    return np.where(fits, taken + left / num_instances, np.inf)


def _left(backlog: np.ndarray, work: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The rest of `backlog` [rows] and of work that arrives at the end of each interval."""
    work_from = np.cumsum(work[::-1])[::-1]
    after = np.cumsum(capacity[:, ::-1], axis=1)[:, ::-1]
    at_once = backlog + work.sum() - after[:, 0]
    return np.asarray(np.maximum(at_once, (work_from - after + capacity).max(axis=1)))


def _intervals(
    lengths: Sequence[int], prompt_tokens: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Between the ends of samples: length at the end, steps, unfinished samples, tokens a row."""
    done = np.sort(np.asarray(lengths, dtype=np.float64))
    before = np.concatenate([[0.0], done[:-1]])
    alive = np.arange(len(done), 0, -1)
    return done, done - before, alive, prompt_tokens + (done + before) / 2


def _moving(
    tried: np.ndarray,
    keepers: np.ndarray,
    tokens: np.ndarray,
    num_instances: int,
    costs: Costs,
    wait_s: float,
    width: int,
) -> np.ndarray:
    """Seconds that samples wait, at each threshold: for their keeper, and it for them.

    Those of a wide instance's members move, too.
    """
    staying = keepers * np.maximum(1.0, tried / num_instances) * (width == 1)
    moved = np.maximum(0.0, tried - staying)
    by_kv = costs.kv_call_s + costs.kv_token_s * tokens
    each = np.minimum(by_kv, costs.prefill_token_s * tokens)
    return np.where(moved > 0, wait_s + costs.call_s + moved / keepers * each, 0.0)
