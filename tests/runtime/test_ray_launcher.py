"""Ranks that start anew on a Ray cluster that may have become smaller."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, ConfigError
from hybridrl.runtime import ray_launcher
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.ray_launcher import RayLauncher


class RayError(Exception):
    """What Ray raises."""


def fake_ray() -> MagicMock:
    ray = MagicMock()
    ray.exceptions.RayError = RayError
    return ray


def test_their_resources_are_those_of_the_ranks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are free before new ones are asked for. That a node is gone is no error of a user."""
    removed: list[str] = []
    names = iter(["a", "b"])

    def placement(ray: Any, config: ClusterConfig) -> Sequence[Any]:
        name = next(names, None)
        if name is None:
            raise ConfigError("cluster.ranks", 2, "at most the pool's 1 CPU")
        assert len(removed) == (name == "b")
        return [SimpleNamespace(group=SimpleNamespace(id=name))] * 2

    ray = fake_ray()
    ray.util.remove_placement_group = lambda group: removed.append(group.id)
    monkeypatch.setattr(ray_launcher, "ranks_placement", placement)
    monkeypatch.setattr(verl, "worker_class", MagicMock())
    monkeypatch.setattr(verl, "worker_group", MagicMock())
    launcher = RayLauncher(ray, ClusterConfig(ranks=2))
    launcher.start(object, MagicMock())
    launcher.start(object, MagicMock())
    with pytest.raises(RayStartError, match=r"could not start anew: cluster\.ranks=2: wanted at"):
        launcher.start(object, MagicMock())
    assert removed == ["a", "b"]


def test_a_first_start_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ConfigError("cluster.ranks", 2, "at most the pool's 1 CPU")
    monkeypatch.setattr(ray_launcher, "ranks_placement", MagicMock(side_effect=refused))
    with pytest.raises(ConfigError):
        RayLauncher(fake_ray(), ClusterConfig(ranks=2)).start(object, MagicMock())


@pytest.mark.parametrize("placed", [[], [SimpleNamespace(id="a")]])
def test_a_raylet_that_dies_while_ranks_are_placed(
    placed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says that the placement group is gone, over several lines; the run has one."""
    gone = RayError("The placement group\n has been removed.")
    monkeypatch.setattr(ray_launcher, "ranks_placement", MagicMock(side_effect=gone))
    launcher = RayLauncher(fake_ray(), ClusterConfig(ranks=2))
    launcher._placed = placed
    again = " anew" if placed else ""
    message = f"the ranks could not start{again}: The placement group has been removed."
    with pytest.raises(RayStartError, match=message):
        launcher.start(object, MagicMock())
