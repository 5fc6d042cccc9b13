"""Images of rows: read from columns and parts of messages, and put among a prompt's tokens.

A row has images in the column `images`, in the order of the texts `<image>` in its prompt: verl's
files do. Or a message's content is a list of parts, some of type `image`, which have theirs
themselves or stand for the next one of the column, as a text `<image>` does. An image is the bytes
of a file, a path, a struct of both as Arrow stores it, or an object of Pillow.
"""

import base64
import errno
import functools
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError, DataConfig
from hybridrl.config.row_fields import kind_of
from hybridrl.data.records import SKIP, SourceRecord, UnusableRowError
from hybridrl.environments.task import ChatMessage
from hybridrl.models.image_files import Images, digest_of
from hybridrl.models.images import (
    Grid,
    ImageProcessor,
    ImageTokens,
    image_config,
    picture_size,
)

MARK = "<image>"
"""Where an image stands in the text of a row."""
COLUMN = "images"
_PRIVATE = "\U0010fffc"
"""A mark within texts on their way through a template, which no row can spell."""
_PARTS = ("image", "image_url", "input_image")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OTHERS = "other images than its prompt names"
"""Why a row is left out whose images and marks differ."""


class PromptImages:
    """Puts the images of rows into prompts of the model at `path`, which has an image tower."""

    def __init__(self, path: str, tokenizer: Any, tokens: ImageTokens) -> None:
        self.path, self.tokens, self._tokenizer = path, tokens, tokenizer

    @functools.cached_property
    def _processor(self) -> ImageProcessor:
        """Read where the first image comes: runs on text need none."""
        try:
            return ImageProcessor(self.path)
        except (OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            allowed = f"a model with its preprocessor_config.json ({reason})"
            raise ConfigError("model.path", self.path, allowed) from None

    @functools.cached_property
    def _spelled(self) -> str:
        """An image in the text of a prompt: start, one pad, end."""
        ids = [self.tokens.start, self.tokens.image, self.tokens.end]
        return "".join(self._tokenizer.convert_ids_to_tokens(ids))

    @classmethod
    def of(cls, path: str, tokenizer: Any) -> "PromptImages | None":
        """Return what puts images into prompts of the model at `path`; None where it reads none."""
        config = image_config(path)
        return None if config is None else cls(path, tokenizer, ImageTokens.of(config))

    def read(self, key: str, folders: Sequence[Path], record: SourceRecord) -> SourceRecord:
        """The record with its images as bytes, and digests in place of them in its row.

        Images that are paths are below one of `folders`, unless the path is absolute. Raises
        UnusableRowError for one that is missing or cannot be read, for parts without a text, and
        for images of the column that no mark beside parts with their own stands for.
        """
        column = record.row.get(COLUMN)
        listed = [] if column is None else list(column) if _is_list(column) else [column]
        try:
            question, places = _as_marks(record.question)
        except ValueError as error:
            allowed = f"parts of messages that are texts or images ({record.place}: {error}){SKIP}"
            raise UnusableRowError("an unreadable part", key, "content", allowed) from None
        if not listed and not places:
            return record
        free = sum(image is None for image in places)
        if free < len(places) and free < len(listed):
            allowed = (
                f"a part without an image or {MARK} for each image of the column, beside parts "
                f"with their own ({record.place}: {free}, {len(listed)} images){SKIP}"
            )
            raise UnusableRowError(_OTHERS, key, COLUMN, allowed)
        rest = iter(listed)
        listed = [next(rest, None) if image is None else image for image in places] + [*rest]
        images, processor = [], self._processor
        for number, image in enumerate(listed, 1):
            try:
                file = _file_of(image, folders)
                processor.patches(file)
            except ValueError as error:
                reason = " ".join(str(error).split())[:200]
                allowed = (
                    f"images that can be read ({record.place}, image {number}: {reason}){SKIP}"
                )
                raise UnusableRowError("an unreadable image", key, COLUMN, allowed) from None
            images.append(file)
        row = {**record.row, COLUMN: [digest_of(image).hex() for image in images]}
        for name, value in record.row.items():
            if value is record.question:
                row[name] = question
        return replace(record, row=row, question=question, images=tuple(images))

    def marked(
        self, key: str, messages: Sequence[ChatMessage], record: SourceRecord
    ) -> list[ChatMessage]:
        """The messages of a prompt with its images marked, so that a template passes them on.

        Those of a row without images and without a column of them stay as they are. Raises
        UnusableRowError, which names `key`, for fewer or more marks than images.
        """
        if not record.images and COLUMN not in record.row:
            return list(messages)
        marked = [{**m, "content": m["content"].replace(MARK, _PRIVATE)} for m in messages]
        if (marks := sum(m["content"].count(_PRIVATE) for m in marked)) != len(record.images):
            allowed = (
                f"as many {MARK} in a prompt as the row has images ({record.place}: {marks} "
                f"{MARK}, {len(record.images)} images){SKIP}"
            )
            raise UnusableRowError(_OTHERS, key, MARK, allowed)
        return marked

    def check(
        self, key: str, records: Sequence[SourceRecord], config: DataConfig, converses: bool
    ) -> None:
        """Raise ConfigError for settings of rows that are of text alone, with `key` of the source.

        `converses`: an environment answers the model, or a row is a whole conversation.
        """
        record = next((record for record in records if record.images), None)
        if record is None:
            return
        if converses:
            allowed = "rows of text, with an environment, or messages_column"
            raise ConfigError(key, COLUMN, f"{allowed} ({record.place} has images)")
        if config.privileged_template is not None:
            allowed = f"null: {record.place} has images, which are in the prompt alone"
            raise ConfigError("data.privileged_template", config.privileged_template, allowed)

    def spelled(self, text: str) -> str:
        """The text of a prompt with the model's tokens in place of marks."""
        return text.replace(_PRIVATE, self._spelled) if _PRIVATE in text else text

    def expanded(self, ids: Sequence[int], record: SourceRecord, key: str) -> tuple[int, ...]:
        """A prompt's ids with as many pads for each image as it takes.

        Raises UnusableRowError for pads that the row's text spells, and for images that the chat
        template drops.
        """
        num_pads, images = list(ids).count(self.tokens.image), len(record.images)
        if num_pads < images:
            allowed = (
                "a chat template that writes all messages with images "
                f"({record.place}: it writes {num_pads} of {images} images){SKIP}"
            )
            raise UnusableRowError("an image that the template drops", key, MARK, allowed)
        if not num_pads and self.tokens.video not in ids:
            return tuple(ids)
        try:
            if self.tokens.video in ids:
                raise ValueError("the token of a video")
            return self.tokens.expanded(ids, self.grids(record.images))
        except ValueError as error:
            allowed = f"texts without the pads of images ({record.place}: {error}){SKIP}"
            raise UnusableRowError("a pad token in its text", key, self._spelled, allowed) from None

    def grids(self, images: Images) -> list[Grid]:
        """The patches of each image."""
        return [self._processor.grid(image) for image in images]

    def told(self, images: Images) -> str:
        """The images of a prompt for a message: their tokens, and their sides as they are read."""
        sizes = map(picture_size, images)
        tokens = sum(map(self.tokens.num_pads, self.grids(images)))
        sides = ", ".join(f"{width} x {height}" for width, height in sizes)
        return f"{tokens} of them for images of {sides} pixels"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _as_marks(question: Any) -> tuple[Any, list[Any]]:
    """A prompt with marks in place of parts of images, and its images in the order of all marks.

    Of a mark without an image of its own it is None. There are none where no part is an image.
    Raises ValueError for another part that is no text, beside an image.
    """
    if not _is_list(question):
        return question, []
    messages, places, has_parts = [], list[Any](), False
    for message in question:
        fields: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
        name = "content" if fields.get("value") is None else "value"
        content: Any = fields.get(name)
        pieces: Sequence[Any] = content if content and _is_list(content) else [content]
        kinds = [piece.get("type") if isinstance(piece, Mapping) else None for piece in pieces]
        own = any(kind in _PARTS for kind in kinds)
        texts = []
        for piece, kind in zip(pieces, kinds, strict=True):
            if kind in _PARTS:
                names = kind, "image", "url", "path"
                places.append(next((piece[name] for name in names if piece.get(name)), None))
                texts.append(MARK)
                continue
            text = piece.get("text") if isinstance(piece, Mapping) else piece
            if own and not isinstance(text, str):
                raise ValueError(f"a part of type {kind!r} without a text")
            texts.append(text if isinstance(text, str) else "")
            places += [None] * texts[-1].count(MARK)
        has_parts = has_parts or own
        messages.append({**message, name: "".join(texts)} if own else message)
    return (messages, places) if has_parts else (question, [])


def _file_of(image: Any, folders: Sequence[Path]) -> bytes:
    """The bytes of an image. Raises ValueError, which says why there are none."""
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, Mapping):
        names = "bytes", "path", "url", "image"
        inner = next((image[name] for name in names if image.get(name)), None)
        return _file_of(inner, folders)
    if isinstance(image, str) and image.startswith("data:"):  # as in OpenAI's messages
        try:
            return base64.b64decode("".join(image.partition(",")[2].split()), validate=True)
        except ValueError as error:
            raise ValueError(f"no base64 in {image[:40]!r}: {error}") from None
    if isinstance(image, str | Path):
        return _read(str(image).removeprefix("file://"), folders)
    if hasattr(image, "save"):
        return _written(image)
    raise ValueError("it is missing" if image is None else f"{kind_of(image)} is no image")


def _read(name: str, folders: Sequence[Path]) -> bytes:
    """The bytes of the file of a `name`. Raises ValueError where there is none to read."""
    told = repr(name[:60])
    if _ADDRESS.match(name):
        raise ValueError(f"addresses are not fetched: {told}")
    try:
        for folder in folders:
            if (folder / name).is_file():
                return (folder / name).read_bytes()
    except OSError as error:
        hint = "; base64 begins with data:" if error.errno == errno.ENAMETOOLONG else ""
        raise ValueError(f"{error.strerror}: {told}{hint}") from None
    raise ValueError(f"it is missing: {told}")


def _written(image: Any) -> bytes:
    """An object of Pillow as PNG. Raises ValueError for one that Pillow cannot write so."""
    from PIL import ImageOps

    written = io.BytesIO()
    try:
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            raise ValueError(f"{image.n_frames} frames, and a picture has one")
        upright = ImageOps.exif_transpose(image)  # PNG is written without EXIF
        if upright.mode in ("CMYK", "YCbCr"):  # as JPEG has it, and PNG does not
            upright = upright.convert("RGB")
        upright.save(written, "PNG")
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"an object of Pillow that is not written as PNG: {error}") from None
    return written.getvalue()
