"""Ranks that start anew on a Ray cluster that may have become smaller."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray import exceptions

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, ConfigError
from hybridrl.runtime import ray_launcher
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.ray_launcher import RayLauncher


def fake_ray() -> MagicMock:
    return MagicMock(exceptions=exceptions)


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

    fake = fake_ray()
    fake.util.remove_placement_group = lambda group: removed.append(group.id)
    monkeypatch.setattr(ray_launcher, "ranks_placement", placement)
    monkeypatch.setattr(verl, "worker_class", MagicMock())
    monkeypatch.setattr(verl, "worker_group", MagicMock())
    launcher = RayLauncher(fake, ClusterConfig(ranks=2))
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


BEFORE = [SimpleNamespace(id="a")]
GONE = exceptions.RpcError("The raylet\n does not answer.")
SETUP = exceptions.RuntimeEnvSetupError("a\nno such package")


@pytest.mark.parametrize(
    ("place", "placed"),
    [
        ("removal", BEFORE),
        ("placement", []),
        ("placement", BEFORE),
        ("actors", []),
        ("actors", BEFORE),
    ],
)
@pytest.mark.parametrize(
    ("error", "reason", "died"),
    [(GONE, "The raylet does not answer.", True), (SETUP, "no such package", False)],
)
def test_an_error_of_ray_is_one_line_that_tells_whether_a_part_of_it_died(
    place: str,
    placed: list[Any],
    error: Exception,
    reason: str,
    died: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it is raised; a job starts again after a death alone."""
    fake, parts = fake_ray(), {name: MagicMock() for name in ("removal", "placement", "actors")}
    parts["placement"].return_value = [SimpleNamespace(group=SimpleNamespace(id="b"))]
    parts[place].side_effect = error
    fake.util.remove_placement_group = parts["removal"]
    monkeypatch.setattr(ray_launcher, "ranks_placement", parts["placement"])
    monkeypatch.setattr(verl, "worker_class", MagicMock())
    monkeypatch.setattr(verl, "worker_group", parts["actors"])
    launcher = RayLauncher(fake, ClusterConfig(ranks=2))
    launcher._placed = placed
    with pytest.raises(RayStartError) as raised:
        launcher.start(object, MagicMock())
    assert str(raised.value) == f"the ranks could not start{' anew' * bool(placed)}: {reason}"
    assert raised.value.died == died


@pytest.mark.parametrize(
    ("alive", "message"), [(False, "Ray's node is gone"), (True, "the node of a placement group")]
)
def test_a_node_that_is_gone_is_no_lack_of_resources(alive: bool, message: str) -> None:
    """A first start would else ask for fewer ranks; a node may go before its address is read."""
    fake = fake_ray()
    fake.nodes.return_value = [{"NodeID": "a", "NodeManagerAddress": "::1", "Alive": alive}]
    fake.cluster_resources.return_value = {"CPU": 2.0} if alive else {}
    fake.util.placement_group_table.return_value = {"bundles_to_node_id": {0: "a", 1: ""}}
    with pytest.raises(RayStartError, match=f"the ranks could not start: {message}"):
        RayLauncher(fake, ClusterConfig(ranks=2)).start(object, MagicMock())
