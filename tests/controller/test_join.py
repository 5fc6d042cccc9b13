"""A running Ray cluster is joined whether it wants a token or knows none."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.cluster.runtime import ray_runtime
from hybridrl.config import ClusterConfig, ConfigError

TOKEN = "a" * 64


def answer(address: str, logs: Path) -> Any:
    """What an actor of the joined cluster says."""

    class Actor:
        def answer(self) -> int:
            return 42

    with ray_runtime(ClusterConfig(address=address), {}, logs) as ray:
        return ray.get(ray.remote(Actor).remote().answer.remote(), timeout=60)


@pytest.fixture
def has_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a first local run, for which Ray writes `~/.ray/auth_token`."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


def test_a_token_is_not_shown_to_a_cluster_that_knows_none(
    cluster: str, has_token: None, tmp_path: Path
) -> None:
    assert answer(cluster, tmp_path) == 42


@pytest.mark.slow
def test_a_cluster_that_wants_a_token(
    start_cluster: Callable[..., contextlib.AbstractContextManager[str]],
    has_token: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with start_cluster(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as address:
        assert answer(address, tmp_path) == 42
        monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
        with pytest.raises(ConfigError, match=r"cluster\.address=.*[Tt]oken"):
            answer(address, tmp_path)
