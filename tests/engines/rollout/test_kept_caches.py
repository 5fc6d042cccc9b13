"""Weights that change under requests, on the keys and values that these have, unless lost."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from answered_turns import answer
from transformers import DynamicCache, PreTrainedModel

from hybridrl.engines.rollout.interface import HeldTurn, Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key

VOCAB, LONGEST = 52, 60
NUM_VERSIONS, STEPS = 4, 7
"""Versions of the weights, and decode steps under each but the last."""
Lives = tuple[dict[object, Output], dict[object, dict[int, int]]]


def requests_of(version: int) -> list[Request]:
    """Requests that come with a version: two responses and a conversation of each of two prompts.

    Those of other versions have the same prompts, which they share.
    """
    turns = SamplingParams(LONGEST, max_turn_tokens=9, stop_token_ids=(3, 7, 20, 41))
    prompts = list(range(5, 14)), list(range(20, 31))
    return [
        Request((version, i, k), prompt, way, stream_key(version, i, k=k), prefix=i)
        for i, prompt in enumerate(prompts)
        for k, way in enumerate([SamplingParams(25), SamplingParams(25), turns])
    ]


def live(engine: NativeEngine, versions: list[PreTrainedModel]) -> Lives:
    """Let requests begin under each version and go on under later ones: outputs by id.

    With the response tokens that each had when a version came, if it was unfinished.
    """
    outputs, known = dict[object, Output](), dict[object, dict[int, int]]()
    due = list[tuple[int, HeldTurn]]()
    for step in range(2000):
        version, within = divmod(step, STEPS)
        if version < NUM_VERSIONS and not within:
            for request in engine.copy():
                known[request.id][version] = len(request.response_ids)
            state = versions[version].state_dict().items()
            engine.load(lambda _, state=state: engine._stage.copy_in(state), keeps_kv=True)
            engine.submit(new := requests_of(version))
            known |= {request.id: {version: 0} for request in new}
        due += [(step + sum(turn.token_ids) % 9, turn) for turn in engine.take_turns()]
        for pair in [pair for pair in due if pair[0] <= step]:
            due.remove(pair)
            answer(engine, pair[1], VOCAB, {pair[1].id: LONGEST}, outputs)
        if not (engine.unfinished or due):
            return outputs, known
        outputs |= {output.id: output for output in engine.step()}
    raise AssertionError("the queue does not drain")


@torch.no_grad()
def check(versions: list[PreTrainedModel], lives: Lives) -> set[str]:
    """Against transformers in float64, on a cache of which each version has made its part.

    The last token of a version has no keys and values before the next version computes them, nor
    has a reply. A version that has computed all again has made all. Gives where that was.
    """
    (outputs, known), where = lives, set[str]()
    models = [version.double() for version in versions]
    prompts = {r.id: r.prompt_ids for v in range(NUM_VERSIONS) for r in requests_of(v)}
    assert outputs.keys() == prompts.keys()
    for id, output in outputs.items():
        prompt, lost = prompts[id], {*output.recomputed_at}
        ids = torch.tensor([[*prompt, *output.token_ids]])
        turns = [(turn.start, turn.stop) for turn in output.turns] or [(0, len(output.token_ids))]
        where |= {"at a reply" for start, _ in turns[1:] if start in lost}
        where |= {"amid a turn" for start, stop in turns if lost & {*range(start + 1, stop)}}
        cache = DynamicCache()
        for begin, stop in turns:
            changes = {n for n in (*known[id].values(), *lost) if begin < n < stop}
            for start, end in pairwise([begin, *sorted(changes), stop]):
                version = max(number for number, n in known[id].items() if n <= start)
                cache = DynamicCache() if start in lost else cache
                new = ids[:, cache.get_seq_length() : len(prompt) + end - 1]
                logits = models[version](new, past_key_values=cache).logits[0, start - end :]
                drawn = ids[0, len(prompt) + start : len(prompt) + end, None]
                wanted = logits.log_softmax(-1).gather(1, drawn)[:, 0]
                got = torch.tensor(output.log_probs[start:end]).double()
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
    return where


@pytest.mark.parametrize("deterministic", [False, True])
def test_new_prompts_and_lost_caches_are_of_the_weights_that_compute_them(
    make_model: Callable[..., PreTrainedModel],
    make_engine: Callable[..., NativeEngine],
    deterministic: bool,
) -> None:
    """The cache is too small for all; what gives way is lost."""
    versions = [make_model("qwen3") for _ in range(NUM_VERSIONS)]
    for number, model in enumerate(versions):
        model.load_state_dict({x: (1 + 0.05 * number) * y for x, y in model.state_dict().items()})
    engine = make_engine(
        versions[0], max_running=12, kv_cache_tokens=160, kv_host_tokens=0,
        deterministic=deterministic,
    )  # fmt: skip
    lives = live(engine, versions)
    stats = engine.stats()
    assert stats.shared_prompt_tokens > 0 < stats.num_preempted
    assert stats.kept_tokens > 0 < stats.recomputed_tokens
    assert check(versions, lives) == {"at a reply", "amid a turn"}
