"""A running Ray cluster is joined whether it wants a token or knows none."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ClusterConfig, ConfigError
from hybridrl.runtime.ray_cluster import ray_runtime

TOKEN = "a" * 64


def answer(address: str, logs: Path) -> Any:
    """What an actor of the joined cluster says."""

    class Actor:
        def answer(self) -> int:
            return 42

    with ray_runtime(ClusterConfig(address=address), {}, logs) as ray:
        return ray.get(ray.remote(Actor).remote().answer.remote(), timeout=60)


@pytest.mark.ray
@pytest.mark.parametrize("homes", [["one"], pytest.param(["one", "other"], marks=pytest.mark.slow)])
def test_a_token_is_not_shown_to_a_cluster_that_knows_none(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, homes: list[str]
) -> None:
    """A local run before, in this process, has made Ray write one; another with another home."""
    for home in (tmp_path / name for name in homes):
        home.mkdir()
        monkeypatch.setenv("HOME", str(home))
        with ray_runtime(ClusterConfig(ranks=1), {}, tmp_path / "logs"):
            assert (home / ".ray" / "auth_token").exists()
    assert answer(cluster, tmp_path) == 42


@pytest.mark.slow
def test_a_cluster_that_wants_a_token(
    start_cluster: Callable[..., contextlib.AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with start_cluster(RAY_AUTH_MODE="token") as address:
        assert answer(address, tmp_path) == 42
        monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
        with pytest.raises(ConfigError, match=r"cluster\.address=.*[Tt]oken"):
            answer(address, tmp_path)
