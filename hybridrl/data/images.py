"""Images of rows: read from columns and parts of messages, and put among a prompt's tokens.

A row has images in the column `images`, in the order of the texts `<image>` in its prompt: verl's
files do. Or a message's content is a list of parts, some of type `image`, which have theirs
themselves or take the next one of the column. An image is the bytes of a file, a path, a struct of
both as Arrow stores it, or an object of Pillow.
"""

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError, DataConfig
from hybridrl.data.records import SKIP, SourceRecord, UnusableRowError
from hybridrl.environments.task import ChatMessage
from hybridrl.models.image_files import Images, digest_of
from hybridrl.models.images import Grid, ImageProcessor, ImageTokens, image_config

MARK = "<image>"
"""Where an image stands in the text of a row."""
COLUMN = "images"
_PRIVATE = "\U0010fffc"
"""A mark within texts on their way through a template, which no row can spell."""
_PARTS = ("image", "image_url", "input_image")


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
        UnusableRowError for one that is missing or cannot be read.
        """
        column = record.row.get(COLUMN)
        images = [] if column is None else list(column) if _is_list(column) else [column]
        question, parts = _as_marks(record.question)
        if not images and not parts:
            return record
        files = [_file_of(image, folders) for image in images]
        if parts:
            rest = iter(files)
            files = [_file_of(x, folders) if x is not None else next(rest, None) for x in parts]
            files += rest
        images, processor = [], self._processor
        for number, file in enumerate(files, 1):
            try:
                if file is None:
                    raise ValueError("it is missing")
                processor.patches(file)
            except ValueError as error:
                allowed = f"images that can be read ({record.place}, image {number}: {error}){SKIP}"
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

        Raises UnusableRowError, which names `key`, for fewer or more marks than images.
        """
        marked = [{**m, "content": m["content"].replace(MARK, _PRIVATE)} for m in messages]
        if (marks := sum(m["content"].count(_PRIVATE) for m in marked)) != len(record.images):
            allowed = (
                f"as many {MARK} in a prompt as the row has images ({record.place}: {marks} "
                f"{MARK}, {len(record.images)} images){SKIP}"
            )
            raise UnusableRowError("other images than its prompt names", key, MARK, allowed)
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

        Raises UnusableRowError for pads that the row's text spells.
        """
        if not {self.tokens.image, self.tokens.video} & set(ids):
            assert not record.images, "images that the template has dropped"
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
        from PIL import Image

        sizes = [Image.open(io.BytesIO(image)).size for image in images]
        tokens = sum(map(self.tokens.num_pads, self.grids(images)))
        sides = ", ".join(f"{width} x {height}" for width, height in sizes)
        return f"{tokens} of them for images of {sides} pixels"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _as_marks(question: Any) -> tuple[Any, list[Any]]:
    """A prompt with marks in place of parts of images; the images of these, None without one."""
    if not _is_list(question):
        return question, []
    messages, parts = [], list[Any]()
    for message in question:
        content: Any = message.get("content") if isinstance(message, Mapping) else None
        kinds = [x.get("type") if isinstance(x, Mapping) else None for x in content or ()]
        if isinstance(content, str) or not any(kind in _PARTS for kind in kinds):
            messages.append(message)
            continue
        texts = []
        for piece, kind in zip(content, kinds, strict=True):
            if kind in _PARTS:
                names = kind, "image", "url", "path"
                parts.append(next((piece[name] for name in names if piece.get(name)), None))
                texts.append(MARK)
            else:
                texts.append(piece["text"] if isinstance(piece, Mapping) else str(piece))
        messages.append({**message, "content": "".join(texts)})
    return (messages, parts) if parts else (question, [])


def _file_of(image: Any, folders: Sequence[Path]) -> bytes | None:
    """The bytes of an image; None where there is none, or no file of its name."""
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, Mapping):
        inner = image.get("bytes") or image.get("path") or image.get("url") or image.get("image")
        return None if inner is None else _file_of(inner, folders)
    if isinstance(image, str) and image.startswith("data:"):  # as in OpenAI's messages
        return base64.b64decode(image.partition(",")[2])
    if isinstance(image, str | Path):
        name = str(image).removeprefix("file://")
        for folder in folders:
            if (folder / name).is_file():
                return (folder / name).read_bytes()
        return None
    if hasattr(image, "save"):  # Pillow's
        written = io.BytesIO()
        image.save(written, "PNG")
        return written.getvalue()
    return None
