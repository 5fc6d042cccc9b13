"""Requests whose weights change on the caches that they have, and what transformers says to them.

They begin under each of several versions, some with prompts that have been there before.
"""

import copy
from dataclasses import dataclass, field

import torch
from answered_turns import answer
from transformers import DynamicCache, PreTrainedModel
from vllm_engines import BLOCK, VOCAB, Outputs, change, load, moves_of, prompt_of, waits

from hybridrl.engines.rollout.interface import HeldTurn, Request, SamplingParams
from hybridrl.engines.rollout.vllm.engine import VLLMEngine
from hybridrl.layout.switching import Switch

NUM_VERSIONS = 4
STEPS = 6
"""Decode steps under each version but the last."""
LONGEST = 50


def version_of(directory: str, number: int) -> PreTrainedModel:
    """A version of a model: the same wherever it is asked for."""
    torch.manual_seed(number)
    model = load(directory)
    change(model)
    return model


def requests_of(version: int) -> list[Request]:
    """The requests that come with a version, with the prompts of all others.

    Two samples of each of four prompts, of which three have full blocks, and two conversations.
    """
    turns = SamplingParams(LONGEST, max_turn_tokens=8)
    ways = [SamplingParams(34)] * 8 + [turns] * 2
    lengths = 100, 64, 40, 3, 70, 75
    prompts = [prompt_of(length, salt) for salt, length in enumerate(lengths)]
    of_prompt = prompts[:4] * 2 + prompts[4:]  # a sample may begin before the other has a row
    parts = enumerate(zip(of_prompt, ways, strict=True))
    return [Request((version, i), prompt, way, 10 * version + i) for i, (prompt, way) in parts]


@dataclass(slots=True)
class Lives:
    """What became of the requests.

    `known` has the response tokens that each had when a version came, if it was unfinished.
    """

    outputs: Outputs = field(default_factory=dict)
    known: dict[object, dict[int, int]] = field(default_factory=dict)
    shared_prompt_tokens: int = 0
    kept_tokens: int = 0
    num_preempted: int = 0


def live(engine: VLLMEngine, switch: Switch, directory: str) -> Lives:
    """Let requests begin under each version, and go on under those that come."""
    moves = moves_of(switch)
    lives, due, before = Lives(), list[tuple[int, HeldTurn]](), engine.stats()
    for step in range(2000):
        version, within = divmod(step, STEPS)
        if version < NUM_VERSIONS and not within:
            going = engine.copy()
            weights = dict(version_of(directory, version).named_parameters())
            shards = {name: tensor.detach() for name, tensor in weights.items()}
            moves.switch(shards, lambda fill: engine.load(fill, keeps_kv=True))
            for request in going:
                lives.known.setdefault(request.id, {})[version] = len(request.response_ids)
            engine.submit(copy.deepcopy(requests_of(version)))
        due += [(step + waits(turn), turn) for turn in engine.take_turns()]
        for number, turn in [pair for pair in due if pair[0] <= step]:
            due.remove((number, turn))
            answer(engine, turn, VOCAB, {turn.id: LONGEST}, lives.outputs)
        if not (engine.unfinished or due):
            break
        lives.outputs |= {output.id: output for output in engine.step()}
    after = engine.stats()
    for name in ("shared_prompt_tokens", "kept_tokens", "num_preempted"):
        setattr(lives, name, getattr(after, name) - getattr(before, name))
    return lives


@torch.no_grad()
def check_lives(directory: str, lives: Lives) -> None:
    """Against transformers in float64, on a cache of which each version has made its part.

    The last token of a version has no keys and values before the next version computes them. Of a
    conversation that waited full blocks stay. A request without a token begins anew.
    """
    models = [version_of(directory, number).double() for number in range(NUM_VERSIONS)]
    apart, spans, kept = 0.0, 0, 0
    for request in (request for version in range(NUM_VERSIONS) for request in requests_of(version)):
        output, num_prompt = lives.outputs[request.id], len(request.prompt_ids)
        known = {request.id[0]: 0} | lives.known.get(request.id, {})  # type: ignore[index]
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        turns = [(turn.start, turn.stop) for turn in output.turns] or [(0, len(output.token_ids))]
        cache = DynamicCache()
        for start, stop in turns:
            if start:
                full = cache.get_seq_length() // BLOCK * BLOCK
                cache.crop(full)
                kept += full
            while start < stop:
                version = max(number for number, tokens in known.items() if tokens <= start)
                end = min([stop, *(n for other, n in known.items() if other > version)])
                model, done = models[version], cache.get_seq_length()
                until, drawn = num_prompt + end - 1, ids[0, num_prompt + start : num_prompt + end]

                def of_drawn(logits: torch.Tensor, drawn: torch.Tensor = drawn) -> torch.Tensor:
                    scores = logits[0, -len(drawn) :].log_softmax(-1)
                    return scores.gather(1, drawn[:, None])[:, 0]

                wanted = of_drawn(model(ids[:, done:until], past_key_values=cache).logits)
                got = torch.tensor(output.log_probs[start:end]).double()
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
                again = of_drawn(model(ids[:, :until]).logits)
                apart = max(apart, float((again - wanted).abs().max()))
                start, spans = end, spans + 1
    assert apart > 1e-3  # so that a cache that was computed again cannot be mistaken for a kept one
    assert spans > 2 * len(lives.outputs)
    assert lives.outputs.keys() == {r.id for v in range(NUM_VERSIONS) for r in requests_of(v)}
    assert lives.shared_prompt_tokens > 0
    assert lives.kept_tokens == kept > 0
