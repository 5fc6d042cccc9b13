"""Boxes of stored weights against transformers' from_pretrained, bit for bit."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter

from hybridrl.config import ConfigError
from hybridrl.engines.probe import random_model
from hybridrl.layout.box import Box
from hybridrl.layout.local import LocalTensor
from hybridrl.models import stored_weights
from hybridrl.models.shrink import shrink
from hybridrl.models.stored_tensor import StoredTensor, in_file
from hybridrl.models.stored_weights import StoredWeights, check_stored
from hybridrl.models.weight_files import check_files

FAMILIES = (
    "qwen3_moe", "minimax_m2", "deepseek_v3",
    "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "granitemoe", "phimoe",
    "flex_olmo", "llama", "gpt2", "gpt_neox", "opt", "phi3", "apertus",
)  # fmt: skip
FAST = 3


def write(family: str, folder: Path, **settings: Any) -> PreTrainedModel:
    """Random weights under hub names in several files; the model as transformers reads them."""
    torch.manual_seed(0)
    config = shrink(AutoConfig.for_model(family, **settings))
    random_model(config).save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").exists()
    return AutoModelForCausalLM.from_pretrained(folder)


def read(weights: StoredWeights, name: str, like: torch.Tensor, *boxes: Box) -> torch.Tensor:
    held = LocalTensor(boxes or (Box.whole(like.shape),))
    shape = held.shape
    assert shape is not None
    out = torch.full(shape, torch.nan, dtype=like.dtype)
    weights.fill(out, name, held)
    return out


@pytest.mark.parametrize(
    "family",
    [*FAMILIES[:FAST], *(pytest.param(f, marks=pytest.mark.models) for f in FAMILIES[FAST:])],
)
def test_every_box_is_what_transformers_reads(family: str, tmp_path: Path) -> None:
    model, draw = write(family, tmp_path), random.Random(0)
    buffers = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    with StoredWeights(str(tmp_path), AutoConfig.from_pretrained(tmp_path)) as weights:
        for name, tensor in {**dict(model.named_parameters()), **buffers}.items():
            assert torch.equal(read(weights, name, tensor), tensor), name
            assert not weights._tensor(name).reads_whole, "read by slices"
            for _ in range(8):
                ends = [sorted(draw.sample(range(size + 1), 2)) for size in tensor.shape]
                box = (
                    Box(*(tuple(side) for side in zip(*ends, strict=True))) if ends else Box((), ())
                )
                assert torch.equal(read(weights, name, tensor, box), tensor[box.slices()]), name
        weights.check_left_out()


def test_transformers_own_names_are_read_too(tmp_path: Path) -> None:
    model = write("qwen3_moe", tmp_path / "hub")
    model.save_pretrained(tmp_path / "own", save_original_format=False)
    stored = load_file(tmp_path / "own" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored
    with StoredWeights(str(tmp_path / "own"), model.config) as weights:
        for name, tensor in model.named_parameters():
            assert torch.equal(read(weights, name, tensor), tensor), name


def test_gate_and_up_cut_in_blocks_and_padding(tmp_path: Path) -> None:
    """Two boxes of a rank, and rows after the vocabulary's last."""
    model = write("qwen3_moe", tmp_path)
    gate_up = model.model.layers[0].mlp.experts.gate_up_proj
    experts, width, hidden = gate_up.shape
    with StoredWeights(str(tmp_path), model.config) as weights:
        boxes = [
            Box((0, half * width // 2 + width // 4, 0), (experts, (half + 1) * width // 2, hidden))
            for half in range(2)
        ]
        name = "model.layers.0.mlp.experts.gate_up_proj"
        got = read(weights, name, gate_up, *boxes)
        assert torch.equal(got, torch.cat([gate_up[box.slices()] for box in boxes], 1))
        embedding = model.model.embed_tokens.weight
        rows = len(embedding)
        padded = Box((rows - 2, 0), (rows + 3, hidden))
        got = read(weights, "model.embed_tokens.weight", embedding, padded)
        assert torch.equal(got[:2], embedding[-2:])
        assert not got[2:].any()


class Mirrored(ConversionOps):
    """A conversion of which no box is a box of the input."""

    def convert(self, input_dict: Any, target_patterns: Any, **_: Any) -> Any:
        (tensor,) = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        return {target_patterns[0]: torch.flip(tensor, (1,))}


def test_a_conversion_that_is_no_slices_reads_its_own_tensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write("qwen3_moe", tmp_path)
    mapping = stored_weights.get_model_conversion_mapping(model)
    own = WeightConverter(
        "mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(0), Mirrored()]
    )
    others = [entry for entry in mapping if entry.target_patterns != own.target_patterns]
    monkeypatch.setattr(stored_weights, "get_model_conversion_mapping", lambda *_: [own, *others])
    down = model.model.layers[1].mlp.experts.down_proj
    name, box = "model.layers.1.mlp.experts.down_proj", Box((2, 1, 0), (4, 9, 5))
    with StoredWeights(str(tmp_path), model.config) as weights:
        whole = [n for n, tensor in weights._tensors.items() if tensor.reads_whole]
        assert whole
        assert all(n.endswith("down_proj") and "experts" in n for n in whole)
        assert torch.equal(read(weights, name, down, box), down.flip(1)[box.slices()])


def _remove(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    """The tensors of all files less `names`, as one file."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    assert all(tensors.pop(name) is not None for name in names)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("model.norm.weight", "complete weights; missing: model.norm.weight"),
        (
            "model.layers.1.mlp.experts.3.up_proj.weight",
            r"model.layers.1.mlp.experts.gate_up_proj cannot be made of its tensors: shapes differ",
        ),
        (
            "model.layers.1.mlp.experts.3.down_proj.weight",
            r"weights of the config's shapes \(model.layers.1.mlp.experts.down_proj: \[7, ",
        ),
        (
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "complete weights; missing: model.layers.3.mlp.gate.e_score_correction_bias",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, name: str, allowed: str) -> None:
    family = "deepseek_v3" if "bias" in name else "qwen3_moe"
    config = write(family, tmp_path).config
    _remove(tmp_path, name)
    with pytest.raises(ConfigError, match=rf"^teacher.path=.*wanted .*{allowed}") as raised:
        StoredWeights(str(tmp_path), config, key="teacher.path")
    assert "\n" not in str(raised.value)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = write("llama", tmp_path).config
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^teacher.path=.*\.safetensors \(.*not a valid JSON"):
        StoredWeights(str(tmp_path), config, key="teacher.path")


def test_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    """from_pretrained takes the head's where a file lacks the embedding's."""
    model = write("qwen3", tmp_path, tie_word_embeddings=True)
    tensors = _remove(tmp_path, "model.embed_tokens.weight")
    embedding = model.model.embed_tokens.weight.detach()
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, embedding)
    with StoredWeights(str(tmp_path), model.config) as weights:
        assert torch.equal(read(weights, "model.embed_tokens.weight", embedding), embedding)


def _stored(folder: Path, **more: torch.Tensor) -> None:
    """One file with the model's tensors and `more`; dots are written as two underscores."""
    tensors = {n: x for f in folder.glob("*.safetensors") for n, x in load_file(f).items()}
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    tensors |= {name.replace("__", "."): value for name, value in more.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_what_no_parameter_is_made_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers ignores passes, and a causal model's head below a value model."""
    model = write("llama", tmp_path)
    _stored(tmp_path, model__rotary_emb__inv_freq=torch.ones(4))
    check_stored(str(tmp_path), model.config)
    check_stored(str(tmp_path), model.config, classifier=True, zeros=["score.weight"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    unused = r"has no use for model\.layers\.0\.self_attn\.q_proj\.bias"
    with pytest.raises(ConfigError, match=unused):
        check_stored(str(tmp_path), model.config)
    files = stored_weights.weight_files(str(tmp_path))
    monkeypatch.setattr(stored_weights, "weight_files", lambda path: files)
    monkeypatch.setattr(stored_weights, "whole_model", lambda path: None)
    check_stored("some/model", model.config)  # ranks check a hub's model
    with pytest.raises(ConfigError, match=unused):
        StoredWeights("some/model", model.config)


def test_a_tied_head_that_differs_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """transformers loads both, untied: it would be another model."""
    monkeypatch.setattr(stored_weights, "_COMPARED", 64)
    model = write("qwen3", tmp_path, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach()
    folder = tmp_path / "equal"
    model.save_pretrained(folder, max_shard_size="60KB")
    _stored(folder, lm_head__weight=embedding.clone())
    check_stored(str(folder), model.config)
    other = embedding.clone()
    other[-1, -1] += 1
    tensors = load_file(folder / "model.safetensors") | {"lm_head.weight": other}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, other)
    assert torch.equal(theirs.model.embed_tokens.weight, embedding)
    with pytest.raises(ConfigError, match=r"equal lm_head.weight and model.embed_tokens.weight"):
        check_stored(str(folder), model.config)


@pytest.mark.parametrize("rows", [-1, 1], ids=["fewer rows", "more rows"])
def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path, rows: int) -> None:
    model = write("qwen3", tmp_path, tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach()
    _stored(tmp_path, lm_head__weight=torch.cat([embedding, embedding])[: len(embedding) + rows])
    with pytest.raises(ConfigError, match=r"equal lm_head.weight and model.embed_tokens.weight"):
        check_stored(str(tmp_path), model.config)


def test_tensors_of_a_shard_that_the_index_leaves_out_are_read(tmp_path: Path) -> None:
    """transformers loads all that is in the files."""
    model = write("qwen3", tmp_path, tie_word_embeddings=True)
    check_stored(str(tmp_path), model.config)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    tensors, embedding = load_file(shard), model.model.embed_tokens.weight.detach()
    for name, allowed in {
        "lm_head.weight": "wanted equal lm_head.weight and model.embed_tokens.weight",
        "foo.bar": "it has no use for foo.bar",
    }.items():
        save_file(tensors | {name: embedding + 1}, shard, metadata={"format": "pt"})
        check_files(tmp_path, "model.path")
        with pytest.raises(ConfigError, match=allowed):
            check_stored(str(tmp_path), model.config)


def _shard_gone(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _cut_off(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _damaged(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes().replace(b'{"', b"{{", 1))


def _not_in_shard(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.of_tomorrow"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps(content))


def _twice(folder: Path) -> None:
    save_file(
        {n: torch.zeros(4) for n in ("w1", "w2")}, folder / "model-00002-of-00003.safetensors"
    )


def _no_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (_shard_gone, "index.json names model-00002-of-00003.safetensors, not there"),
        (_cut_off, "model-00002-of-00003.safetensors: .*"),
        (_damaged, "model-00002-of-00003.safetensors: .*header"),
        (_not_in_shard, "names model.of_tomorrow in model-00002-of-00003.safetensors, which lacks"),
        (_twice, "model-00002-of-00003.safetensors has w1, which model-00001-of-00003.*has, too"),
        (_no_map, "model.safetensors.index.json has no weight_map"),
    ],
)
def test_files_that_are_not_whole(tmp_path: Path, harm: Any, problem: str) -> None:
    names = {f"w{i}": f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    (tmp_path / "config.json").write_text("{}")
    for name, file in names.items():
        save_file({name: torch.ones(4)}, tmp_path / file)
    index = {"metadata": {}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_files(tmp_path, "model.path")
    harm(tmp_path)
    with pytest.raises(
        ConfigError, match=f"^model.path=.*wanted whole files .*{problem}"
    ) as raised:
        check_files(tmp_path, "model.path")
    assert "\n" not in str(raised.value)


def test_operations_on_stored_tensors_are_torchs() -> None:
    """Each alone and after another, over all boxes of a small tensor."""
    tensors = [torch.arange(24.0).view(2, 3, 4) + 100 * i for i in range(3)]
    stored: list[Any] = [in_file(tensor, tensor.shape) for tensor in tensors]

    def results(x: Any) -> list[Any]:
        return [
            torch.cat(x, dim=1),
            torch.stack(x, dim=-1),
            torch.transpose(torch.cat(x), 0, 2).contiguous(),
            *torch.chunk(torch.stack(x), 2, dim=0),
            *x[0].chunk(3, -1),
            torch.stack(x[:1]).squeeze(),
            torch.transpose(torch.stack(x[:1]).squeeze(0), 1, 2),
        ]

    for got, want in zip(results(stored), results(tensors), strict=True):
        assert isinstance(got, StoredTensor)
        assert got.shape == want.shape
        draw = random.Random(1)
        for _ in range(20):
            ends = [sorted(draw.sample(range(size + 1), 2)) for size in want.shape]
            box = Box(*(tuple(side) for side in zip(*ends, strict=True)))
            out = torch.empty(box.shape)
            got.copy_to(out, box)
            assert torch.equal(out, want[box.slices()])
    with pytest.raises(AttributeError, match="view"):
        stored[0].view(-1)
    with pytest.raises(AttributeError, match="flip"):
        torch.flip(stored[0], (0,))
