"""Sources that `make test-contracts` has downloaded."""

from pathlib import Path

import foreign_sources
import pytest
from foreign import Sources

CACHE = Path(__file__).parents[2] / ".cache/foreign"


def _sources(package: str) -> Sources:
    folder = foreign_sources.folder(CACHE, package)
    if not folder.is_dir():
        pytest.fail(f"no {folder}: `make test-contracts` downloads it")
    return Sources(folder)


@pytest.fixture(scope="session")
def vllm() -> Sources:
    """vLLM's GPU build."""
    return _sources("vllm")


@pytest.fixture(scope="session")
def flash_attn() -> Sources:
    """flash-attn's source archive."""
    return _sources("flash-attn")


@pytest.fixture(scope="session")
def trl() -> Sources:
    """TRL, which ships the chat templates of many families."""
    return _sources("trl")
