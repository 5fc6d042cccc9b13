"""Images of rows: where they may be, what becomes of a prompt's tokens, and what is refused."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from image_prompts import picture
from PIL import Image

from hybridrl.config import ConfigError, DataConfig, SourceConfig, SourceKind, TinyModelConfig
from hybridrl.data import Data, load_data
from hybridrl.data.images import PromptImages
from hybridrl.data.known_rows import row_digest
from hybridrl.data.tasks import shapes
from hybridrl.models.load import load_tokenizer
from hybridrl.models.tiny import IMAGE_TOKENS, make_tiny_model

A, B = picture(24, 24, 0), picture(40, 16, 1)
PADS = {A: 9, B: 10}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = TinyModelConfig(
        hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, vision_layers=1,
        alphabet="".join(map(chr, range(32, 127))),
    )  # fmt: skip
    make_tiny_model(path, config, 0)
    return path


def load(model: Path, rows: list[dict[str, Any]], folder: Path, **settings: Any) -> Data:
    tokenizer = load_tokenizer(str(model), TEMPLATE)
    if any("label" in row for row in rows):
        raise AssertionError
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = SourceConfig(kind=SourceKind.parquet, name=str(file))
    config = DataConfig(
        sources={"s": source}, eval_size=1, **{"max_prompt_tokens": 64, "chat": False, **settings}
    )
    images = PromptImages.of(str(model), tokenizer)
    return load_data(config, tokenizer, max_context=128, max_new_tokens=8, images=images)


def only(data: Data) -> Any:
    (item,) = [item for item in [*data.train, *data.eval] if item.images]
    return item


TEXT = {"prompt": "no picture", "answer": "x"}
PART = {"type": "text", "text": "how many?"}


def written(folder: Path) -> str:
    (folder / "a.png").write_bytes(A)
    return "a.png"


FORMS: dict[str, Any] = {
    "bytes": lambda folder: A,
    "Arrow's struct": lambda folder: {"bytes": A, "path": None},
    "a path beside the file": written,
    "a struct with a path": lambda folder: {"bytes": None, "path": written(folder)},
    "an absolute path": lambda folder: str(folder / written(folder)),
    "in base64": lambda folder: f"data:image/png;base64,{base64.b64encode(A).decode()}",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_found(model: Path, tmp_path: Path, form: str) -> None:
    row = {"prompt": "<image>how many?", "answer": "1", "images": [FORMS[form](tmp_path)]}
    item = only(load(model, [row, {**TEXT, "images": None}], tmp_path))
    assert item.images == (A,)
    tokenizer = load_tokenizer(str(model))
    pad, _, start, end = map(tokenizer.convert_tokens_to_ids, IMAGE_TOKENS)
    text = tuple(tokenizer("how many?")["input_ids"])
    assert item.prompt_ids == (start, *[pad] * PADS[A], end, *text)
    assert item.prompt == "<|vision_start|><|image_pad|><|vision_end|>how many?"
    assert A not in json.dumps(item.item, default=repr).encode()  # judges get digests


def test_an_image_of_pillow_is_found(model: Path) -> None:
    images = PromptImages.of(str(model), load_tokenizer(str(model)))
    assert images is not None
    with Image.open(io.BytesIO(A)) as opened:
        from hybridrl.data.records import SourceRecord

        row = {"prompt": "<image>?", "images": [opened]}
        record = images.read("data.sources.s", [], SourceRecord(row, "<image>?", "1", "row 1"))
    with Image.open(io.BytesIO(record.images[0])) as again, Image.open(io.BytesIO(A)) as wanted:
        assert again.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("own", [True, False], ids=["in parts", "in a column"])
def test_parts_of_messages(model: Path, tmp_path: Path, own: bool) -> None:
    parts = [PART, {"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    row: dict[str, Any] = {"answer": "1", "images": [A, B]}
    if own:
        parts = [{**piece, "image": None} for piece in parts]
        parts[1]["image"], parts[3]["image"] = ({"bytes": A}, {"bytes": B})  # type: ignore[assignment]
        row = {"answer": "1"}
    row["prompt"] = [{"role": "user", "content": parts}]
    item = only(load(model, [row, {"prompt": [{"role": "user", "content": [PART]}], "answer": "2"}],
                     tmp_path, chat=True))  # fmt: skip
    assert item.images == (A, B)
    triple = "<|vision_start|><|image_pad|><|vision_end|>"
    assert item.prompt == f"how many?{triple}and{triple}<eos>:"
    pad = load_tokenizer(str(model)).convert_tokens_to_ids("<|image_pad|>")
    assert item.prompt_ids.count(pad) == PADS[A] + PADS[B]


def test_pads_that_a_message_spells_stay_text(model: Path, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>?<|image_pad|>"}], "answer": "1",
           "images": [A]}  # fmt: skip
    other = {"prompt": [{"role": "user", "content": "?"}], "answer": "1", "images": None}
    item = only(load(model, [row, other], tmp_path, chat=True))
    pad = load_tokenizer(str(model)).convert_tokens_to_ids("<|image_pad|>")
    assert item.prompt_ids.count(pad) == PADS[A]


def test_equal_questions_of_other_pictures_are_other_prompts(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "<image>?", "answer": "1", "images": [image]} for image in (A, B, A)]
    data = load(model, rows, tmp_path)
    items = [*data.train, *data.eval]
    assert {item.images for item in items} == {(A,), (B,)}
    assert len(items) == len({item.identity for item in items}) == 2
    assert len({row_digest(item) for item in items}) == 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more marks": ({"prompt": "<image><image>?", "images": [A]},
                   r"s=<image>: wanted as many <image> in a prompt as the row has images "
                   r"\(row 1: 2 <image>, 1 images\)"),
    "fewer marks": ({"prompt": "?", "images": [A]}, r"row 1: 0 <image>, 1 images"),
    "no image": ({"prompt": "<image>?", "images": None}, r"row 1: 1 <image>, 0 images"),
    "no such file": ({"prompt": "<image>?", "images": ["b.png"]},
                     r"s=images: wanted images that can be read \(row 1, image 1: it is missing"),
    "cut off": ({"prompt": "<image>?", "images": [A[:-200]]}, r"row 1, image 1: no image that"),
    "no picture": ({"prompt": "<image>?", "images": [b"text"]}, r"row 1, image 1: no image that"),
    "a pad in the text": ({"prompt": "<image>?<|image_pad|>", "images": [A]},
                          r"texts without the pads of images \(row 1: 2 image tokens for 1 im"),
    "a film's pad": ({"prompt": "?<|video_pad|>", "images": None}, r"the token of a video"),
    "a video": ({"prompt": "?", "images": None, "videos": ["a.mp4"]},
                r"row 1 has images or other media in 'videos', which are read in 'images' and in"),
    "a long prompt": ({"prompt": "<image>" + 60 * "?", "images": [A]},
                      r"data.max_prompt_tokens=64: wanted 71 or more .* 9 of them for images of "
                      r"24 x 24 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(model: Path, tmp_path: Path, case: str) -> None:
    bad, message = BAD[case]
    good = {"prompt": "?", "images": None}
    rows = [{"answer": "1", "videos": None, **row} for row in (bad, good)]
    with pytest.raises(ConfigError, match=message) as caught:
        load(model, rows, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_row_that_cannot_be_used_may_be_left_out(model: Path, tmp_path: Path) -> None:
    rows = [{"answer": "1", "prompt": "<image>?", "images": [x]} for x in (A, b"text", B)]
    data = load(model, rows, tmp_path, skip_unusable_rows=True)
    assert data.dropped == {"an unreadable image": 1}


def test_what_goes_with_text_alone(model: Path, tmp_path: Path) -> None:
    row = {"answer": "1", "prompt": "<image>?", "images": [A]}
    with pytest.raises(ConfigError, match=r"^data.privileged_template=.*: wanted null: row 1 has"):
        load(model, [row, row], tmp_path, privileged_template="{question}{answer}")


def test_shapes_are_drawn_evenly_and_counted_right() -> None:
    """By the pixels: a red part above the others, on a ground below them."""
    rows = [row for row, _ in zip(shapes(3), range(400), strict=False)]
    numbers = [int(row["answer"]) for row in rows]
    assert {number: numbers.count(number) > 50 for number in range(5)} == dict.fromkeys(
        range(5), True
    )
    assert [row["images"] for row in rows[:9]] == [
        row["images"] for row, _ in zip(shapes(3), range(9), strict=False)
    ]
    for row, number in zip(rows, numbers, strict=True):
        with Image.open(io.BytesIO(row["images"][0])) as opened:
            pixels = torch.frombuffer(bytearray(opened.convert("RGB").tobytes()), dtype=torch.uint8)
        red, green, blue = pixels.view(24, 24, 3).int().unbind(-1)
        is_red = (red > 150) & (green < 80) & (blue < 80)
        cells = is_red.unfold(0, 8, 8).unfold(1, 8, 8).flatten(2).any(-1)
        assert int(cells.sum()) == number
