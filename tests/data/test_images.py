"""Rows with images, video or sound are refused by that word; other bytes are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data
from hybridrl.data.sources import column_with_images

Load = Callable[..., Data]

PART = {"type": "image_url", "image_url": {"url": "a.png"}}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "verl's column": {"prompt": "<image>?", "images": [{"bytes": b"\x89PNG", "path": None}]},
    "paths": {"prompt": "<image>?", "images": ["a.png"]},
    "a column of Arrow": {"prompt": "?", "picture": {"bytes": b"\x89PNG", "path": "a.png"}},
    "a part of a message": {"prompt": [{"role": "user", "content": [PART]}]},
    "a part without a source": {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
    "sound": {"prompt": "?", "sound": {"array": [0.0], "path": "a.wav", "sampling_rate": 8000}},
}


@pytest.mark.parametrize("case", WITH_IMAGES)
def test_images_are_refused_by_that_word(load: Load, tmp_path: Path, case: str) -> None:
    row = {"answer": "x", **WITH_IMAGES[case]}
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 3), file)
    message = r"^data\.sources\.s\.name=.*: wanted rows of text: row 1 has images or other media in"
    with pytest.raises(ConfigError, match=message) as caught:
        load(SourceConfig(kind=SourceKind.parquet, name=str(file)))
    assert "\n" not in str(caught.value)


def test_an_image_of_pillow_is_one() -> None:
    """As `datasets` decodes the column, if Pillow is installed."""

    class Image:
        __module__ = "PIL.PngImagePlugin"

    assert column_with_images({"prompt": "?", "picture": Image()}) == "picture"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "images": [], "videos": None},
        {"prompt": "?", "blob": b"\x89PNG", "path": "a.png"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "an image"}]}]},
        {"prompt": "?", "metadata": {"type": "image", "text": "of a cat"}},
    ],
)
def test_other_rows_have_none(row: dict[str, Any]) -> None:
    assert column_with_images(row) is None
