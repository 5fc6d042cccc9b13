"""Images and other media in rows: found, since no model here reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")
"""Types of a message's parts in OpenAI's, transformers' and verl's messages."""
_COLUMNS = ("images", "videos", "audios")
"""Columns that verl and TRL read, with files, bytes or addresses."""


def column_with_images(row: Mapping[str, Any]) -> str | None:
    """The column of a row that has images, video or sound; None without any."""
    for column, value in row.items():
        if column in _COLUMNS and isinstance(value, Sequence) and value:
            return column
        if _has_media(value):
            return str(column)
    return None


def _has_media(value: Any) -> bool:
    if isinstance(value, Mapping):
        # Arrow stores an image as a struct of these two, and datasets a sound as an array.
        if value.keys() == {"bytes", "path"} or value.keys() == {"array", "path", "sampling_rate"}:
            return True
        if value.get("type") in _PARTS and not isinstance(value.get("text"), str):
            return True
        return any(map(_has_media, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return any(map(_has_media, value))
    return type(value).__module__.partition(".")[0] == "PIL"
