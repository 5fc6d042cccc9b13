"""Prompts with images in the native engine: tokens are transformers', whatever moves a sample."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_prompts import FAMILIES, TOKENS, A, B, C, ImageModel, image_model, tolerance
from safetensors.torch import load_file, save_file

from hybridrl.config import Vision
from hybridrl.engines.rollout.draft_lengths import FixedLength
from hybridrl.engines.rollout.entries import Entry
from hybridrl.engines.rollout.graph_step import obstacle
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.speculation import Speculation
from hybridrl.engines.rollout.stage import RolloutStage
from hybridrl.models.image_text import TOWER, own_name, tower_in
from hybridrl.models.load import load_config
from hybridrl.models.local_weights import fill_parameters
from hybridrl.models.shard import GenParallel, instance_layout
from hybridrl.models.stored_weights import StoredWeights
from hybridrl.models.vision import VisionTower, check_tower, vision_tower

NEW, SAMPLES = 10, 2
PADS = [TOKENS["image_token_id"], TOKENS["video_token_id"]]
PROMPTS = [(4, (A,), 0), (12, (), 1), (3, (B, A), 2), (4, (C,), 0)]
ENGINE: dict[str, Any] = {
    "dtype": torch.float32, "device": torch.device("cpu"), "max_running": 4, "block_size": 4,
    "kv_cache_tokens": 0, "max_sequence": 80,
}  # fmt: skip
Models = Callable[[str], ImageModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    models: dict[str, ImageModel] = {}

    def model_of(family: str) -> ImageModel:
        if family not in models:
            models[family] = image_model(family, tmp_path_factory.mktemp(family))
        return models[family]

    return model_of


class Half:
    """Guesses two tokens of another engine's `outputs` right, and a third wrong."""

    def __init__(self, outputs: dict[object, Output]) -> None:
        self._outputs = outputs

    def begin(self, request: Request) -> None: ...

    def end(self, request: Request) -> None: ...

    def siblings(self, request: Request) -> dict[object, list[int]]:
        return {}

    def draft(self, request: Request, most: int) -> list[int]:
        tokens = self._outputs[request.id].token_ids[len(request.response_ids) :]
        return [*tokens[:2], 5][:most]


def make_engine(
    model: ImageModel,
    speculation: Speculation | None = None,
    deterministic: bool = False,
    vision: Vision = Vision.frozen,
) -> NativeEngine:
    engine = NativeEngine(
        load_config(str(model.path), vision=vision),
        deterministic=deterministic,
        speculation=speculation,
        **ENGINE,
    )
    load_weights(engine, model)
    return engine


def load_weights(engine: NativeEngine, model: ImageModel) -> None:
    """Load the weights of the text part, and of a tower that trains with it."""
    own = dict(engine.model.named_parameters())
    named = ((own_name(name), tensor) for name, tensor in model.whole.state_dict().items())
    engine.load_weights((name, tensor) for name, tensor in named if name in own)


def requests(model: ImageModel, temperature: float = 1.0) -> list[Request]:
    """Two samples of each prompt; the first and the last are equal but for the picture."""
    sampling = SamplingParams(NEW, temperature=temperature)
    requests = []
    for number, (length, images, seed) in enumerate(PROMPTS):
        ids = model.prompt(length, images, seed)
        for k in range(SAMPLES):
            key = stream_key(0, number, "", k)
            id = (number, k)
            requests.append(Request(id, ids, sampling, key, prefix=number, images=images))
    return requests


def finished(engine: NativeEngine) -> dict[object, Output]:
    outputs: list[Output] = []
    while engine.unfinished:
        outputs += engine.step()
    return {output.id: output for output in outputs}


def sharded(
    path: Path, vision: Vision, pp: int, tp: int, asked: list[Request]
) -> tuple[dict[object, Output], bool]:
    """Outputs of an instance of two ranks, and whether this one has or reads a tower."""
    vision_tower.cache_clear()
    config, group, rank = load_config(str(path), vision=vision), dist.group.WORLD, dist.get_rank()
    pp_rank, tp_rank = divmod(rank, tp)
    parallel = GenParallel(pp, tp, pp_rank, tp_rank, group, group)
    engine = NativeEngine(config, parallel=parallel, **ENGINE)
    layout = instance_layout(config, pp, tp)
    with StoredWeights(str(path), config) as weights:
        fill_parameters(weights, engine.model.named_parameters(), layout, rank)
    engine.submit(asked)
    outputs = finished(engine)
    return outputs, tower_in(engine.model) is not None or vision_tower.cache_info().misses > 0


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "vision", "pp", "tp"),
    [
        ("qwen3_vl", Vision.train, 2, 1),
        ("qwen3_5", Vision.frozen, 2, 1),
        ("qwen3_vl_moe", Vision.train, 1, 2),
    ],
)
def test_an_instance_of_two_ranks_draws_as_transformers(
    models: Models, ranks: Any, family: str, vision: Vision, pp: int, tp: int
) -> None:
    """The log-probabilities are its own; a stage without embedding has no tower."""
    model = models(family)
    asked = requests(model)
    results = ranks(2, sharded, model.path, vision, pp, tp, asked)
    assert [has_tower for _, has_tower in results] == [True, pp == 1]
    for outputs, _ in results:
        for request in asked:
            output = outputs[request.id]
            whole = torch.tensor([*request.prompt_ids, *output.token_ids])
            with torch.no_grad():
                wanted = model.log_probs(whole, request.images, NEW)
            got = torch.tensor(output.log_probs)
            torch.testing.assert_close(got, wanted, atol=10 * tolerance(family), rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(models: Models, family: str) -> None:
    model = models(family)
    engine, asked = make_engine(model), requests(model, temperature=0.0)
    engine.submit(asked)
    outputs = finished(engine)
    assert engine.stats().shared_prompt_tokens > 0
    for request in asked[::SAMPLES]:
        ids, output = torch.tensor(request.prompt_ids), outputs[request.id]
        inputs = model.inputs(ids, request.images)
        generated = model.whole.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=PADS,
        )
        assert output.token_ids == generated[0, len(ids) :].tolist()
        whole = torch.tensor([*request.prompt_ids, *output.token_ids])
        with torch.no_grad():
            wanted = model.log_probs(whole, request.images, NEW)
        got = torch.tensor(output.log_probs)
        torch.testing.assert_close(got, wanted, atol=tolerance(family), rtol=0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "way", ["parked", "with its cache", "with drafts", "without shared prompts"]
)
def test_what_moves_a_sample_changes_no_token(models: Models, family: str, way: str) -> None:
    model = models(family)
    engine = make_engine(model)
    engine.submit(requests(model))
    wanted = finished(engine)
    assert len({tuple(output.token_ids) for output in wanted.values()}) == len(wanted)

    drafting = Speculation(Half(wanted), FixedLength(3)) if way == "with drafts" else None
    other = make_engine(model, drafting)
    asked = requests(model)
    if way == "without shared prompts":
        for request in asked:
            request.prefix = None
    other.submit(asked)
    if way in ("parked", "with its cache"):
        for _ in range(4):
            other.step()
        ids = [request.id for request in asked]
        parked = pickle.loads(pickle.dumps(other.park(ids, with_kv=way == "with its cache")))
        other = make_engine(model)
        other.submit(parked)
    got = finished(other)
    assert {id: x.token_ids for id, x in got.items()} == {
        id: x.token_ids for id, x in wanted.items()
    }
    if way == "with drafts":
        assert other.stats().accepted_tokens > 0 < other.stats().refused_drafts
    if way == "with its cache":
        assert other.stats().restored_tokens > 0


def test_strict_samples_are_replayed_bit_for_bit(models: Models) -> None:
    model = models("qwen3_vl")
    engine = make_engine(model, deterministic=True)
    engine.submit(requests(model))
    wanted = finished(engine)
    engine.submit(requests(model))
    for _ in range(4):
        engine.step()
    engine.submit(engine.park([request.id for request in requests(model)]))
    again = finished(engine)
    assert {id: x.log_probs for id, x in again.items()} == {
        id: x.log_probs for id, x in wanted.items()
    }


def test_a_turn_goes_on_behind_a_reply(models: Models) -> None:
    """As one prompt with the turn and the reply: rotary positions go on through both."""
    model = models("qwen3_vl")
    first = requests(model)[0]
    first.sampling = SamplingParams(NEW, temperature=0.0, max_turn_tokens=3)
    engine = make_engine(model)
    engine.submit([first])
    while not (turns := engine.take_turns()):
        engine.step()
    engine.answer(first.id, [5, 6])
    while not engine.take_turns():
        engine.step()
    output = engine.answer(first.id, None)
    assert output is not None
    first_turn = [*turns[0].token_ids, 5, 6]
    assert output.token_ids[: len(first_turn)] == first_turn
    whole = torch.tensor([*first.prompt_ids, *output.token_ids])
    with torch.no_grad():
        wanted = model.log_probs(whole, first.images, 3)
    torch.testing.assert_close(torch.tensor(output.log_probs[-3:]), wanted, atol=1e-5, rtol=0)


def test_a_prompt_is_not_shared_with_another_picture(models: Models) -> None:
    model = models("qwen3_vl")
    one, other = copy.copy(requests(model)[0]), copy.copy(requests(model)[-1])
    assert one.prompt_ids == other.prompt_ids
    one.prefix = other.prefix = "a"
    with pytest.raises(ValueError, match="names two different prompts"):
        make_engine(model).submit([one, other])
    alone = {}
    for request in (one, other):
        engine = make_engine(model)
        engine.submit([request])
        alone |= finished(engine)
    assert alone[one.id].log_probs != alone[other.id].log_probs


def test_graph_steps_are_refused(models: Models) -> None:
    """They would draw the pads of images, of prompts without any, too."""
    stage = make_engine(models("qwen3_vl"))._stage
    assert obstacle(stage).endswith("draws no pads of images, which a step may")
    stage._pads = []
    assert obstacle(stage) == ""


def test_tensors_that_the_tower_lacks_are_refused(models: Models, tmp_path: Path) -> None:
    """Such as the scales of quantized weights."""
    path = shutil.copytree(models("qwen3_vl").path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.visual.merger.linear_fc1.weight_scale"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"tower has no merger.linear_fc1.weight_scale, which"):
        VisionTower(str(path), torch.float32, torch.device("cpu"))


def test_a_bad_tower_is_told_before_it_is_read(models: Models, tmp_path: Path) -> None:
    path = shutil.copytree(models("qwen3_vl").path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    weight = tensors.pop("model.visual.merger.linear_fc1.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"tower lacks merger.linear_fc1.weight$"):
        check_tower(str(path))
    tensors["model.visual.merger.linear_fc1.weight"] = weight[1:].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"merger.linear_fc1.weight has the shape .*, wanted"):
        check_tower(str(path))


def test_a_frozen_tower_in_float8_is_dequantized(models: Models, tmp_path: Path) -> None:
    path = shutil.copytree(models("qwen3_vl").path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = "model.visual.merger.linear_fc1.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    expected = tensors[name].float() * 0.5
    tensors[f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in expected.shape], 0.5)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    tower = VisionTower(str(path), torch.float32, torch.device("cpu"))
    weight = tower._model.get_parameter("merger.linear_fc1.weight")
    assert torch.equal(weight, expected)


def test_later_tokens_at_their_numbers_are_wrong(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that `test_tokens_are_those_of_generate` must see."""
    model = models("qwen3_vl")
    monkeypatch.setattr(Entry, "delta", 0)
    engine, asked = make_engine(model), requests(model, temperature=0.0)
    engine.submit(asked[:1])
    output = finished(engine)[asked[0].id]
    whole = torch.tensor([*asked[0].prompt_ids, *output.token_ids])
    with torch.no_grad():
        wanted = model.log_probs(whole, asked[0].images, NEW)
    assert float((torch.tensor(output.log_probs) - wanted).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_tower_that_trains_is_that_of_the_last_load(family: str, tmp_path: Path) -> None:
    """Pictures have new features once the weights of the tower alone have changed."""
    model = image_model(family, tmp_path)
    engine, asked = make_engine(model, vision=Vision.train), requests(model, temperature=0.0)
    outputs = []
    for _ in range(2):
        engine.submit([request.copy() for request in asked])
        outputs.append(finished(engine))
        for request in asked[::SAMPLES]:
            output = outputs[-1][request.id]
            whole = torch.tensor([*request.prompt_ids, *output.token_ids])
            with torch.no_grad():
                wanted = model.log_probs(whole, request.images, NEW)
            got = torch.tensor(output.log_probs)
            torch.testing.assert_close(got, wanted, atol=10 * tolerance(family), rtol=0)
        with torch.no_grad():
            for name, parameter in model.whole.named_parameters():
                if name.startswith(TOWER):
                    parameter.mul_(1.3)
        load_weights(engine, model)
    # Rows of text are as they were.
    text, picture = asked[SAMPLES].id, asked[0].id
    assert outputs[0][text].log_probs == outputs[1][text].log_probs
    moved = torch.tensor(outputs[0][picture].log_probs) - torch.tensor(
        outputs[1][picture].log_probs
    )
    assert float(moved.abs().max()) > 1e-2


def test_a_tower_that_trains_turns_as_a_frozen_one(models: Models) -> None:
    """In bfloat16 the angles of its rotations stay in float32."""
    path, half = str(models("qwen3_vl").path), torch.bfloat16
    stage = RolloutStage(
        load_config(path, vision=Vision.train),
        GenParallel(),
        dtype=half,
        device=torch.device("cpu"),
        max_sequence=80,
    )
    tower = tower_in(stage.model)
    assert tower is not None
    assert {parameter.dtype for parameter in tower.parameters()} == {half}
    frozen = dict(VisionTower(path, half, torch.device("cpu"))._model.named_buffers())
    own = dict(tower.named_buffers())
    assert own.keys() == frozen.keys()
    for name, buffer in own.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, frozen[name])
