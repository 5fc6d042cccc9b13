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

from hybridrl.config import (
    ConfigError,
    DataConfig,
    EvalSetConfig,
    SourceConfig,
    SourceKind,
    TinyModelConfig,
)
from hybridrl.data import Data, load_data, load_eval_set
from hybridrl.data.images import PromptImages
from hybridrl.data.known_rows import row_digest
from hybridrl.data.records import SourceRecord, UnusableRowError
from hybridrl.data.tasks import shapes
from hybridrl.models.images import ImageProcessor, read_picture
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
    tokenizer = load_tokenizer(str(model), settings.pop("template", TEMPLATE))
    if any("label" in row for row in rows):
        raise AssertionError
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = SourceConfig(kind=SourceKind.parquet, name=str(file))
    config = DataConfig(
        sources={"s": source},
        **{"eval_size": 1, "max_prompt_tokens": 64, "chat": False, **settings},
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


def test_equal_questions_are_drawn_in_no_order_of_a_sorted_file(
    model: Path, tmp_path: Path
) -> None:
    """The held-out rows of 12, of which the first half has one answer and the second another."""
    rows = [
        {"prompt": "<image>?", "answer": str(number // 6), "images": [picture(8, 8, number)]}
        for number in range(12)
    ]
    data = load(model, rows, tmp_path, eval_size=6)
    assert {item.answer for item in data.eval} == {"0", "1"}
    order = [int(item.answer) for item in [*data.eval, *data.train]]
    assert order not in (sorted(order), sorted(order, reverse=True))
    numbers = [item.place for item in [*data.eval, *data.train] if item.answer == "0"]
    assert numbers != sorted(numbers)


def message(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def read(model: Path, row: dict[str, Any]) -> SourceRecord:
    """As a source of Python gives a row: parquet would write its parts alike."""
    images = PromptImages.of(str(model), load_tokenizer(str(model)))
    assert images is not None
    return images.read("k", [Path()], SourceRecord(row, row["prompt"], "1", "row 1"))


def test_marks_and_parts_are_read_in_one_order(model: Path) -> None:
    """By texts, a message of text alone, and parts with an image and without."""
    first = {"role": "system", "content": "as <image>"}
    own = {"type": "image", "image": B}
    rest = message({"type": "text", "text": "or <image>?"}, own, {"type": "image"})
    columns = [picture(8, 8, number) for number in range(3)]
    record = read(model, {"prompt": [first, rest], "images": columns})
    assert record.images == (columns[0], columns[1], B, columns[2])
    assert [m["content"] for m in record.question] == ["as <image>", "or <image>?<image><image>"]
    for rows in ([], [A, A]):
        with pytest.raises(UnusableRowError, match=r"row 1.*(missing|0, 2 images)") as caught:
            read(model, {"prompt": [message(own, *([] if rows else [{"type": "image"}]))],
                         "images": rows})  # fmt: skip
        assert "\n" not in str(caught.value)


def test_a_template_marks_no_image_of_a_part(model: Path, tmp_path: Path) -> None:
    row = {"prompt": [message({"type": "image", "image": {"bytes": A}})], "answer": "1"}
    with pytest.raises(ConfigError, match=r"row 1: 2 <image>, 1 images"):
        load(model, [row, row], tmp_path, chat=True, prompt_template="<image>{question}")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(image: bytes) -> Image.Image:
    return Image.open(io.BytesIO(image))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "Pillow"])
def test_pictures_are_upright(model: Path, tmp_path: Path, kind: str, orientation: int) -> None:
    """As transformers' `load_image` turns them; pads and features agree."""
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(opened(B), "PNG" if kind == "PNG" else "JPEG", exif=exif)
    (tmp_path / "b").write_bytes(file)
    wanted = load_image(str(tmp_path / "b"))
    assert wanted.size == ((16, 40) if orientation > 4 else (40, 16))
    source = opened(file) if kind == "Pillow" else file
    (image,) = read(model, {"prompt": "<image>?", "images": [source]}).images
    assert read_picture(image).tobytes() == wanted.tobytes()
    processor = ImageProcessor(str(model))
    pixels, grid = processor.patches(image)
    assert processor.grid(image) == grid == processor.grid(encoded(wanted, "PNG"))
    assert len(pixels) == grid[1] * grid[2]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_on_white(mode: str) -> None:
    clear = Image.new("RGBA", (8, 8), (9, 9, 9, 0))
    clear.paste((200, 200, 200, 255), (0, 0, 4, 8))
    image = opened(encoded(clear.convert(mode), "PNG"))
    if mode == "P":
        image.info["transparency"] = clear.convert("P").getpixel((7, 7))
        image = opened(encoded(image, "PNG"))
    picture = read_picture(encoded(image, "PNG"))
    assert picture.getpixel((7, 7)) == (255, 255, 255)
    assert picture.getpixel((0, 0)) != (255, 255, 255)


def animated() -> bytes:
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 200)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


BASE64 = base64.b64encode(picture(40, 40, 3)).decode()
UNREADABLE: dict[str, tuple[Any, str]] = {
    "16 bits": (encoded(Image.new("I;16", (8, 8), 40000), "PNG"), r"mode I;16, and"),
    "32 bits": (encoded(Image.new("I", (8, 8), 40000), "TIFF"), r"mode I, and"),
    "floats": (encoded(Image.new("F", (8, 8)), "TIFF"), r"mode F, and"),
    "floats of Pillow": (Image.new("F", (8, 8)), r"an object of Pillow that is not written"),
    "a film": (animated(), r"2 frames, and"),
    "a film of Pillow": (opened(animated()), r"2 frames, and"),
    "base64 alone": (BASE64, r"File name too long: '.{60}'; base64 begins with data:"),
    "broken base64": (f"data:image/png;base64,{BASE64[:-3]}", r"no base64 in 'data:image/png"),
    "an address": ({"url": "https://host/a.png"}, r"addresses are not fetched: 'https://host/a"),
    "a number": (3, r"int is no image"),
    "nothing": (None, r"it is missing\)"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_is_no_image_is_told_in_a_line(model: Path, case: str) -> None:
    image, message = UNREADABLE[case]
    message = rf"^k=images: wanted images that can be read \(row 1, image 2: .*{message}"
    with pytest.raises(UnusableRowError, match=message) as caught:
        read(model, {"prompt": "<image><image>?", "images": [A, image]})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_that_may_not_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    images = PromptImages.of(str(model), load_tokenizer(str(model)))
    assert images is not None
    row = {"images": ["a.png"]}
    with pytest.raises(UnusableRowError, match=r"row 1, image 1: Permission denied: 'a.png'"):
        images.read("k", [Path("x")], SourceRecord(row, "<image>", "1", "row 1"))


@pytest.mark.parametrize("text", [{"type": "text"}, {"type": "text", "text": None}])
def test_a_part_without_a_text(model: Path, text: dict[str, Any]) -> None:
    with pytest.raises(UnusableRowError, match=r"row 1: a part of type 'text' without a text"):
        read(model, {"prompt": [message(text, {"type": "image", "image": A})]})


def test_pictures_in_cmyk_are_read(model: Path) -> None:
    image = opened(A).convert("CMYK")
    (got,) = read(model, {"prompt": "<image>", "images": [image]}).images
    assert read_picture(got).tobytes() == image.convert("RGB").tobytes()


def test_marks_of_rows_without_the_column_are_text(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"the tag <image> in HTML {n}", "answer": "1"} for n in range(2)]
    data = load(model, rows, tmp_path)
    assert all("<image>" in item.prompt for item in [*data.train, *data.eval])


def test_rows_that_are_refused_with_their_prompts_may_be_left_out(
    model: Path, tmp_path: Path
) -> None:
    """Two have other marks than images, and the template drops the message of a third's."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{number}{marks}"}], "answer": "1", "images": [A]}
        for number, marks in enumerate(("<image>", "<image>", "<image><image>", "", "<image>"))
    ]
    dropped = [{"role": "system", "content": "<image>"}, {"role": "user", "content": "?"}]
    rows.append({"prompt": dropped, "answer": "1", "images": [B]})
    template = TEMPLATE.replace("in messages", "in messages if m['role'] != 'system'")
    settings: dict[str, Any] = {"chat": True, "template": template}
    with pytest.raises(ConfigError, match=r"s=<image>: .*\(row 2: it writes 0 of 1 images\); data"):
        load(model, [rows[0], rows[-1]], tmp_path, **settings)
    data = load(model, rows, tmp_path, skip_unusable_rows=True, **settings)
    assert data.dropped == {
        "other images than its prompt names": 2, "an image that the template drops": 1,
    }  # fmt: skip
    assert {item.place[:5] for item in [*data.train, *data.eval]} == {"row 1", "row 2", "row 5"}


@pytest.mark.parametrize("converses", [False, True])
def test_evaluation_sets_are_named(model: Path, tmp_path: Path, converses: bool) -> None:
    file = tmp_path / "rows.parquet"
    row = {"prompt": "?", "turns": [{"role": "user", "content": "?"}], "images": [A]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    columns = {"messages_column": "turns" if converses else None, "answer_column": None}
    source = SourceConfig(kind=SourceKind.parquet, name=str(file), **columns)
    tokenizer = load_tokenizer(str(model), TEMPLATE)
    key = f"^eval.sets.e.source={'images' if converses else '<image>'}: "
    with pytest.raises(ConfigError, match=key):
        load_eval_set(
            "e", EvalSetConfig(source=source), DataConfig(chat=converses), tokenizer,
            max_context=128, max_new_tokens=8, images=PromptImages.of(str(model), tokenizer),
        )  # fmt: skip


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
