"""Programs in a file, and pools of episodes of them."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from environment_pools import Make, Pool, settled

from hybridrl.config import EnvironmentConfig, EnvironmentKind
from hybridrl.environments import EpisodePool


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(source, name)`: the settings of the program `name` in a file with that source."""

    def make(source: str, name: str, **settings: Any) -> EnvironmentConfig:
        file = tmp_path / "programs.py"
        file.write_text(source)
        kind = settings.pop("kind", EnvironmentKind.function)
        return settled(EnvironmentConfig(kind=kind, path=f"{file}:{name}", **settings))

    return make


@pytest.fixture
def pool() -> Iterator[Pool]:
    """`pool(config)`: a pool that is closed after the test."""
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(closing(EpisodePool(*args, **settings)))
