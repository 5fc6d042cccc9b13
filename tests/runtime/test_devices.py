"""Which GPU is whose, and what follows from the GPUs that there are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import Config, ConfigError, Device, SlurmClusterConfig
from hybridrl.config.compose import check, register
from hybridrl.runtime import devices
from hybridrl.system.devices import cores_beside, local_gpus, local_index, own_device


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@pytest.mark.parametrize(
    ("settings", "gpus", "device", "ranks"),
    [
        ([], 0, Device.cpu, 2),
        ([], 1, Device.cuda, 1),
        ([], 8, Device.cuda, 8),
        (["cluster.ranks=4"], 8, Device.cuda, 4),
        (["cluster.ranks=4"], 0, Device.cpu, 4),
        (["cluster.device=cpu"], 8, Device.cpu, 2),
        (["cluster.device=cpu", "cluster.ranks=3"], 1, Device.cpu, 3),
        (["cluster.device=cuda"], 2, Device.cuda, 2),
        (["cluster=processes"], 8, Device.cuda, 1),
    ],
)
def test_ranks_and_device(settings: list[str], gpus: int, device: Device, ranks: int) -> None:
    """The layouts follow."""
    config = check(settings)
    config.resolve_device(gpus, "this machine")
    assert (config.cluster.device, config.cluster.ranks) == (device, ranks)
    assert config.trainer.layout.fsdp == ranks


@pytest.mark.parametrize(
    ("settings", "gpus", "message"),
    [
        (["cluster.device=cuda"], 0, "cluster.device=cuda: wanted auto or cpu: torch finds no GPU"),
        (
            ["cluster.ranks=3"],
            2,
            "cluster.ranks=3: wanted at most 2 (the GPUs of this machine), or cluster.device=cpu",
        ),
        (["trainer.layout.tp=3"], 8, "trainer.layout=1 x 1 x ? x 3: wanted"),
        (["cluster.placement=split"], 1, "cluster.pools=? + ?: wanted actor + critic = cluster.ra"),
    ],
)
def test_ranks_that_cannot_be(settings: list[str], gpus: int, message: str) -> None:
    config = check(settings)
    with pytest.raises(ConfigError) as raised:
        config.resolve_device(gpus, "this machine")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"device": Device.cuda, "ranks": 1},
            "cluster.device=cuda: wanted auto with cluster.gpus_",
        ),
        ({"device": Device.cpu, "gpus_per_node": 8}, "cluster.device=cpu: wanted auto with clust"),
    ],
)
def test_a_job_asks_for_its_gpus(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(cluster=SlurmClusterConfig(**settings))
    assert str(raised.value).startswith(message)


def test_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked only where the ranks may be on GPUs."""
    config = check([])
    monkeypatch.setattr(devices, "local_gpus", lambda: 4)
    devices.resolve_device(config)
    assert (config.cluster.ranks, config.cluster.device) == (4, Device.cuda)
    config = check(["cluster.device=cpu"])
    monkeypatch.setattr(devices, "local_gpus", lambda: 1 / 0)
    devices.resolve_device(config)
    assert config.cluster.ranks == 2


def test_only_who_asks_waits_for_the_sizes_of_a_clusters_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`hybridrl doctor` does not: it has no use for them."""

    @contextmanager
    def joined(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(cluster_resources=lambda: {"GPU": 4.0})

    monkeypatch.setattr(devices, "ray_runtime", joined)
    monkeypatch.setattr(devices, "gpu_memory", lambda ray, ranks, limit_s: (ranks, limit_s))
    overrides = ["cluster.address=head:6379", "cluster.start_timeout_s=7"]
    assert devices.resolve_device(check(overrides)) is None
    assert devices.resolve_device(check(overrides), asks_memory=True) == (4, 7)
    assert devices.resolve_device(check([*overrides, "cluster.device=cpu"]), True) is None


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [([], 1), (["trainer.layout.tp=2", "rollout.layout.pp=3"], 6), (["cluster.ranks=5"], 5)],
)
def test_who_submits_to_a_cluster_does_not_know_its_gpus(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], ranks: int
) -> None:
    """The layouts are checked at the least number of ranks that they take."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = check(["cluster=ray", "cluster.address=http://head:8265", *settings])
    devices.resolve_device(config)
    assert config.cluster.ranks == ranks


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ("3", None, 3),
        ("3", "3", 0),
        ("5", "2,5", 1),
        ("GPU-b", "GPU-a,GPU-b", 1),
        ("MIG-a", "MIG-a", 0),
        ("0", "", 0),
        (" 2", "5, 2", 1),  # Ray does not strip names either
    ],
)
def test_the_index_of_a_ranks_gpu(assigned: str, visible: str | None, index: int) -> None:
    assert local_index([assigned], visible) == index


def test_a_second_mig_device_is_refused() -> None:
    """CUDA shows a process one. It would compute on another rank's."""
    with pytest.raises(RuntimeError, match=r"this rank is on MIG-b, .* \(MIG-a,MIG-b\); name one"):
        local_index(["MIG-b"], "MIG-a,MIG-b")


def test_a_rank_without_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"is on GPU 1 of its node, and torch .* finds 0 there"):
        own_device()


@pytest.mark.parametrize("visible", ["", "-1", "GPU-none", "MIG-none"])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """Nor those that are not there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == 0


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5\n", {5}), ("\n", set()), (None, set())],
)
def test_cores_beside_a_gpu(tmp_path: Path, text: str | None, cores: set[int]) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "local_cpulist").write_text(text)
    assert cores_beside("0000:3b:00", tmp_path) == cores


class AnsweringRay:
    """Ray, whose nodes with GPUs answer a task with these; None is a node that fails."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, answers: dict[str, tuple[list[int], str] | None]) -> None:
        self.answers = answers

    def remote(self, **_: Any) -> Any:
        pick = SimpleNamespace(
            options=lambda scheduling_strategy: SimpleNamespace(
                remote=lambda: scheduling_strategy.node_id[0]
            )
        )
        return lambda function: pick

    def nodes(self) -> list[dict[str, Any]]:
        of_all = {"Alive": True, "Resources": {"GPU": 1.0}}
        return [of_all | {"NodeID": 56 * n, "NodeManagerAddress": n} for n in self.answers]

    def wait(self, *_: Any, **__: Any) -> None:
        """All have answered."""

    def get(self, node: str, timeout: float) -> tuple[list[int], str]:
        answer = self.answers[node]
        if answer is None:
            raise RuntimeError("gone")
        return answer


def test_a_clusters_nodes_without_a_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """Some are warned of: the run may not come there. A run that must is refused."""
    ray = AnsweringRay({"a": ([80], ""), "b": ([40], "no gcc"), "c": None})
    assert devices.gpu_memory(ray, 1, 1) == 80
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["no C compiler for Triton's kernels on b: no gcc"]
    del ray.answers["a"], ray.answers["c"]
    line = r"cluster.device=cuda: wanted a C compiler .* on nodes with GPUs \(b: no gcc\), or cpu"
    with pytest.raises(ConfigError, match=line):
        devices.gpu_memory(ray, 1, 1)


def test_a_node_says_what_its_gpus_and_its_compiler_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        devices, "read_gpus", lambda visible: ([SimpleNamespace(memory_bytes=8)], "")
    )
    monkeypatch.setattr(devices, "compiler_fault", lambda: "no gcc")
    assert devices._gpus_and_compiler() == ([8], "no gcc")
