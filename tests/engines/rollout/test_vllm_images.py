"""Prompts with images in vLLM: tokens are the native engine's, log-probabilities transformers'."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_prompts import A, B, C, ImageModel, image_model
from safetensors.torch import load_file
from vllm_engines import BLOCK, finish, moves_of

from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.vllm.engine import VOCAB_MULTIPLE, VLLMEngine
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.switching import plan_switch
from hybridrl.models.image_text import own_name
from hybridrl.models.load import load_config
from hybridrl.models.parallel import model_parameters
from hybridrl.models.vision import VisionTower, vision_tower

pytestmark = pytest.mark.vllm

NEW, SAMPLES = 10, 2
PROMPTS = [(20, (A,), 0), (40, (), 1), (18, (B, A), 2), (20, (C,), 0)]
"""The first and the last are equal but for the picture, which is in a block that is shared."""
TEXT = {
    "head_dim": 32,  # its CPU attention has no smaller ones
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "dtype": torch.float32, "device": torch.device("cpu"), "max_running": 16, "block_size": BLOCK,
    "kv_cache_tokens": 0, "max_sequence": 128,
}  # fmt: skip
Outputs = dict[object, Output]


def requests(model: ImageModel, **sampling: Any) -> list[Request]:
    """Two samples of each prompt."""
    params = SamplingParams(NEW, **sampling)
    requests = []
    for number, (length, images, seed) in enumerate(PROMPTS):
        ids = model.prompt(length, images, seed)
        for k in range(SAMPLES):
            key = stream_key(0, number, "", k)
            requests.append(Request((number, k), ids, params, key, prefix=number, images=images))
    return requests


def text_weights(path: Path) -> Iterator[tuple[str | None, torch.Tensor]]:
    """All tensors of a checkpoint; those of the text part by their names in that."""
    for name, tensor in load_file(path / "model.safetensors").items():
        yield own_name(name), tensor


def started(path: Path, pp: int, tp: int) -> VLLMEngine:
    """vLLM with the weights of the text part.

    What sleep on a GPU leaves undefined of DeepStack's buffers is 3 before they come.
    """
    config = load_config(str(path))
    parameters, axes = model_parameters(config), TrainAxes(replicas=dist.get_world_size())
    switch = plan_switch(parameters, axes, pp, tp, vocab_multiple=VOCAB_MULTIPLE, ascending=True)
    engine = VLLMEngine(str(path), config, switch.plan.dst, **ENGINE)
    for features in engine._worker.get_model().deepstack_input_embeds:
        features.fill_(3)
    names = {parameter.name for parameter in parameters}
    shards = {name: tensor for name, tensor in text_weights(path) if name in names}
    moves_of(switch).switch(shards, engine.load)
    return engine


def lives(
    path: Path, pp: int, tp: int, asked: list[Request], in_turns: Request
) -> tuple[dict[str, Outputs], int]:
    """What samples go through in vLLM, and how many images its tower has computed."""
    vision_tower.cache_clear()
    computed, compute = [], VisionTower._compute

    def counted(self: VisionTower, image: bytes) -> torch.Tensor:
        computed.append(image)
        return compute(self, image)

    VisionTower._compute = counted  # type: ignore[method-assign]
    engine = started(path, pp, tp)
    texts = [request for request in asked if not request.images]
    results = {"texts": finish(engine, texts), "batch": finish(engine, asked)}
    engine.submit([request.copy() for request in asked])
    for _ in range(4):
        engine.step()
    parked = engine.park([request.id for request in asked])
    assert {len(request.response_ids) for request in parked} == {4}
    assert engine._worker.model_runner.encoder_cache or pp > 1  # a last stage has none
    engine._forget_prompts()  # all tokens of prompt and response are computed again
    assert not engine._worker.model_runner.encoder_cache
    results["parked"] = finish(engine, parked)
    results["turn"] = two_turns(engine, in_turns)
    engine.close()
    return results, len(computed)


def two_turns(engine: VLLMEngine, request: Request) -> Outputs:
    """A conversation of two turns of three tokens, with a reply of two."""
    engine.submit([request])
    for reply in ([5, 6], None):
        while not engine.take_turns():
            engine.step()
        output = engine.answer(request.id, reply)
    assert output is not None
    return {request.id: output}


def native(model: ImageModel) -> Outputs:
    engine = NativeEngine(load_config(str(model.path)), **ENGINE)
    own = dict(engine.model.named_parameters())
    engine.load_weights((name, x) for name, x in text_weights(model.path) if name in own)
    return finish(engine, requests(model))


@pytest.mark.parametrize(
    ("pp", "tp"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.wide),
        pytest.param(1, 2, marks=pytest.mark.wide),
    ],
)
def test_tokens_are_those_of_the_native_engine(
    fresh_ranks: Callable[..., list[Any]], tmp_path: Path, pp: int, tp: int
) -> None:
    """Samples that are parked or go on behind a reply draw them, too; a tower computes once."""
    model = image_model("qwen3_vl", tmp_path, **TEXT)
    wanted, asked = native(model), {request.id: request for request in requests(model)}
    in_turns = requests(model, max_turn_tokens=3)[4]
    ranks = fresh_ranks(pp * tp, lives, model.path, pp, tp, list(asked.values()), in_turns)
    assert [num_computed for _, num_computed in ranks] == ([3, 0] if pp == 2 else [3] * tp)
    for results, _ in ranks:
        for outputs in results.values():
            for id, output in outputs.items():
                request, length = asked[id], len(output.token_ids)
                whole = torch.tensor([*request.prompt_ids, *output.token_ids])
                with torch.no_grad():
                    of_model = model.log_probs(whole, request.images, length)
                got = torch.tensor(output.log_probs)
                of_model[got == 0] = 0  # a reply's
                torch.testing.assert_close(got, of_model, atol=1e-5, rtol=0)
        for way in ("batch", "parked"):
            assert {id: x.token_ids for id, x in results[way].items()} == {
                id: x.token_ids for id, x in wanted.items()
            }
        (turn,) = results["turn"].values()
        assert turn.token_ids[:5] == [*wanted[2, 0].token_ids[:3], 5, 6]
