"""What the doctor makes of facts, and what it measures on this machine."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from hybridrl.cli import main
from hybridrl.config import ClusterConfig, ConfigError
from hybridrl.config.compose import check, register
from hybridrl.costs.links import LinkTable
from hybridrl.doctor import command
from hybridrl.doctor.checks import Facts, Needs, Severity, diagnose
from hybridrl.doctor.command import Report, examine, needs_of, write_links
from hybridrl.doctor.measure import Disk, Link, gpu_problem, measure_disk
from hybridrl.system import node_info, signals
from hybridrl.system.node_info import NodeInfo, read_node_info
from hybridrl.system.nvidia_smi import Gpu

GIB = 2**30
GPU = Gpu("H100", 80 * GIB, GIB, "550.54", "9.0")
SOUND = NodeInfo(
    node="a", host="a", clock=0.0, system="Linux", python="3.11.7",
    packages={"torch": "2.13.0", "ray": "2.60.0"}, unmet=(), cpu="", cores=8, cpus=16,
    cpu_quota=None, memory=64 * GIB, memory_limit=None, memory_available=60 * GIB, shm=32 * GIB,
    shm_free=32 * GIB, open_files=65536, gpus=(), networks={"eth0": 25.0}, infiniband={},
)  # fmt: skip
NEEDS = Needs(
    ranks_per_node=2, threads_per_rank=1, wants_gpus=False, rank_memory=GIB,
    object_store=GIB // 2, train_bytes=GIB, gen_bytes=GIB, checkpoint_bytes=GIB, checkpoints=4,
    layers=32,
)  # fmt: skip
ON_GPUS = replace(NEEDS, wants_gpus=True)
WITH_GPUS = replace(SOUND, gpus=(GPU, GPU))
LARGE = replace(WITH_GPUS, memory=999 * GIB, memory_available=999 * GIB)
RUN_DIR = Disk("a", "run.dir", "/data", "nfs4", 100 * GIB, 50 * GIB, 1e9, 1e9, 1e-3, 1e3)
SCRATCH = replace(RUN_DIR, role="scratch", path="/tmp", kind="ext4")


def facts(*infos: NodeInfo, **others: Any) -> Facts:
    return Facts(nodes=infos or (SOUND,), **others)


def two(**different: Any) -> Facts:
    return facts(SOUND, replace(SOUND, node="b", host="b", **different))


def ring(*rates: float, nodes: str = "aabb") -> Facts:
    """Messages from each rank to the next at so many GB/s."""
    size = len(rates)
    links = [Link("send", (r, (r + 1) % size), 10**9, 1 / rate) for r, rate in enumerate(rates)]
    return replace(two(), links=links, node_of=tuple(nodes))


def test_a_sound_site_has_no_findings() -> None:
    sound = replace(ring(10, 10, 10, 10), disks=(RUN_DIR, SCRATCH), clocks={"b": (0.2, 0.1)})
    assert diagnose(sound, NEEDS) == []
    assert diagnose(facts(WITH_GPUS), ON_GPUS) == []
    without_compiler = facts(replace(SOUND, compiler_fault="no gcc"))
    assert diagnose(without_compiler, NEEDS) == []  # CPUs run no kernel


@pytest.mark.parametrize(
    ("measured", "needs", "severity", "what", "why"),
    [
        (facts(replace(SOUND, memory=4 * GIB)), NEEDS, Severity.ERROR, "4 GiB of memory",
         "2 ranks of 3 GiB and an object store of 0.5 GiB need 6.5 GiB"),
        (facts(replace(SOUND, memory_limit=6 * GIB)), NEEDS, Severity.ERROR, "6 GiB of memory", ""),
        (facts(replace(SOUND, memory_available=5 * GIB)), NEEDS, Severity.WARNING,
         "5 GiB of memory are free", "the run needs 6.5 GiB"),
        (facts(replace(SOUND, shm=GIB // 16, shm_free=GIB // 16)), NEEDS, Severity.WARNING,
         "/dev/shm has 0.0625 GiB free of 0.0625 GiB", "Ray's object store needs 0.5 GiB there"),
        (facts(replace(SOUND, open_files=4096)), NEEDS, Severity.WARNING,
         "at most 4096 open files", "Ray asks for 8192"),
        (facts(replace(SOUND, cpus=1)), NEEDS, Severity.WARNING, "1 CPUs for 2 threads", ""),
        (facts(replace(SOUND, cpu_quota=2.5)), NEEDS, Severity.WARNING,
         "16 CPUs are shown, the control group gives 2.5", "a thread for each that is shown"),
        (facts(), ON_GPUS, Severity.ERROR, "0 GPUs for 2 ranks", ""),
        (facts(replace(SOUND, gpu_fault="No devices")), NEEDS, Severity.WARNING,
         "nvidia-smi fails", "No devices"),
        (facts(replace(WITH_GPUS, gpu_fault="GPU 3 is lost")), ON_GPUS, Severity.WARNING,
         "nvidia-smi fails", "GPU 3 is lost"),
        (facts(replace(SOUND, gpu_fault="GPU 3 is lost")), ON_GPUS, Severity.ERROR,
         "0 GPUs for 2 ranks", "GPU 3 is lost"),
        (facts(replace(WITH_GPUS, compiler_fault="no gcc")), ON_GPUS, Severity.ERROR,
         "no C compiler that Triton can use", "no gcc"),
        (facts(replace(WITH_GPUS, compiler_fault="no gcc")), NEEDS, Severity.WARNING,
         "no C compiler that Triton can use", "no gcc"),
        (facts(replace(SOUND, packages={"torch": "2.10.0"})), NEEDS, Severity.WARNING,
         "torch 2.10.0 is older than what was tried: 2.11.0 to 2.14.1", ""),
        (facts(WITH_GPUS, gpu_problems={"a": "driver too old"}), ON_GPUS, Severity.ERROR,
         "torch cannot use the GPUs", "driver too old"),
        (facts(WITH_GPUS, gpu_problems={"a": "built without CUDA"}), NEEDS, Severity.WARNING,
         "torch cannot use the GPUs", "built without CUDA"),
        (facts(LARGE), replace(ON_GPUS, train_bytes=81 * GIB), Severity.ERROR,
         "a rank does not fit in the 80 GiB of a GPU", "81 GiB"),
        (facts(LARGE), replace(ON_GPUS, gen_bytes=159 * GIB // 2), Severity.ERROR,
         "GPUs are occupied", "1 GiB of a GPU are in use"),
        (facts(replace(SOUND, gpus=(GPU, replace(GPU, name="A100")))), ON_GPUS, Severity.WARNING,
         "different GPUs", "A100, H100"),
        (facts(replace(SOUND, unmet=("vllm 0.30 wants torch==2.13, not 2.12",))), NEEDS,
         Severity.WARNING, "vllm 0.30 wants torch==2.13, not 2.12", ""),
        (two(packages={"torch": "2.12.0", "ray": "2.60.0"}), NEEDS, Severity.ERROR,
         "torch 2.12.0, and 2.13.0 on a", ""),
        (two(packages={**SOUND.packages, "numpy": "2.0"}), NEEDS, Severity.WARNING,
         "numpy 2.0, and none on a", ""),
        (two(python="3.12.1"), NEEDS, Severity.ERROR, "Python 3.12.1, and 3.11.7 on a", ""),
        (replace(two(), hidden=["b"]), NEEDS, Severity.ERROR,
         "the run directory is another one there", ""),
        (facts(disks=[replace(RUN_DIR, free=GIB // 2)]), NEEDS, Severity.ERROR,
         "0.5 GiB are free in /data", "4 checkpoints of 1 GiB need 4 GiB"),
        (facts(disks=[replace(RUN_DIR, free=2 * GIB)]), NEEDS, Severity.WARNING,
         "2 GiB are free in /data", ""),
        (facts(disks=[replace(RUN_DIR, write=30e6)]), NEEDS, Severity.WARNING,
         "a checkpoint takes 36 s at 30 MB/s in /data", "30 s after a job's SIGTERM"),
        (facts(disks=[replace(RUN_DIR, kind="tmpfs")]), NEEDS, Severity.WARNING,
         "/data is in memory (tmpfs)", ""),
        (facts(disks=[replace(SCRATCH, free=4 * GIB)]), NEEDS, Severity.WARNING,
         "/tmp is 96% full", "above 95% Ray refuses"),
        (facts(disks=[replace(SCRATCH, kind="nfs4")]), NEEDS, Severity.WARNING,
         "temporary files are on nfs4 (/tmp)", ""),
        (replace(two(), clocks={"b": (-0.4, 0.1)}), NEEDS, Severity.WARNING,
         "its clock is -0.4 s off", "the timeline"),
        (replace(two(), clocks={"b": (400.0, 0.1)}), NEEDS, Severity.ERROR,
         "its clock is +400 s off", "munge"),
        (facts(jails={"a": ("none", "bwrap is not installed")}),
         replace(NEEDS, runs_programs=True), Severity.ERROR,
         "no jail works for the model's programs", "bwrap is not installed"),
        (ring(10, 9, 10, 10, 4, 10, nodes="aaaaaa"), NEEDS, Severity.WARNING,
         "ranks 4 and 5: 4 GB/s within this node", "others have 10 GB/s"),
        (ring(9, 1, 9, 1, 9, 0.4, nodes="aabbaa"), NEEDS, Severity.WARNING,
         "", ""),
        (replace(two(), links=[Link("all_reduce", (0, 1, 2, 3), 8, 5e-5)], node_of="aabb"),
         replace(NEEDS, gen_tp=4), Severity.WARNING,
         "tensor parallelism of 4 ranks, 2 on a node", "3.2 ms of every token's decoding"),
    ],
)  # fmt: skip
def test_what_facts_mean(
    measured: Facts, needs: Needs, severity: Severity, what: str, why: str
) -> None:
    (finding,) = diagnose(measured, needs)
    assert finding.severity is severity
    assert what in finding.what
    assert why in finding.why
    assert finding.fix


@pytest.mark.parametrize(
    ("capability", "problem"),
    [
        ((8, 0), ""),
        ((8, 6), ""),  # of the same generation, and newer than the kernels
        ((7, 5), "torch has no kernels for compute capability 7.5"),
        ((12, 0), "torch has no kernels for compute capability 12.0"),
        (None, "The NVIDIA driver on your system is too old"),
    ],
)
def test_why_torch_cannot_use_a_gpu(
    capability: tuple[int, int] | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        if capability is None:
            raise RuntimeError("The NVIDIA driver on your system is too old\nUpdate it")

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_120"])
    assert gpu_problem() == (problem, "12.8")


def test_infiniband_that_is_not_used() -> None:
    has_both = replace(WITH_GPUS, infiniband={"mlx5_0:1": 400.0})
    slow = replace(ring(50, 3, 50, 3), nodes=(has_both,))  # 24 Gbit/s of eth0's 25
    (finding,) = diagnose(slow, NEEDS)
    assert finding.what == "24 Gbit/s between nodes, with InfiniBand of 400 Gbit/s"
    assert diagnose(replace(slow, links=ring(50, 40, 50, 40).links), NEEDS) == []


def test_the_worst_comes_first_and_the_same_is_said_once() -> None:
    slow = replace(
        facts(*(replace(SOUND, node=node, open_files=1024, cpus=1) for node in "abc")),
        hidden=["c"],
    )
    findings = diagnose(slow, NEEDS)
    assert [f.severity for f in findings] == [Severity.ERROR, Severity.WARNING, Severity.WARNING]
    assert [f.nodes for f in findings] == [("c",), ("a", "b", "c"), ("a", "b", "c")]


def test_what_a_model_needs() -> None:
    """Each of 8 x 2 ranks has its share of the 16 bytes a parameter in training."""
    register()
    overrides = (
        "model=llama3_8b cluster=slurm cluster.nodes=2 cluster.gpus_per_node=8"
        " trainer.layout.tp=2 rollout.layout.tp=4 rollout.dtype=bfloat16 trainer.save_every=10"
    )
    config = check(overrides.split())
    needs, parameters = needs_of(config), 8_030_261_248  # Llama 3's card: 8.03 B
    assert needs.train_bytes == parameters
    assert needs.gen_bytes == parameters // 2
    assert needs.checkpoint_bytes == 12 * parameters
    assert (needs.ranks_per_node, needs.checkpoints, needs.layers) == (8, 4, 32)


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        ({"cgroup": "0::/job/step", "job/cpu.max": "max 100000",
          "job/step/cpu.max": "150000 100000", "job/memory.max": "1000",
          "job/step/memory.max": "max"}, 1.5, 1000),
        ({"cgroup": "4:cpu,cpuacct:/x\n3:memory:/x", "cpu/x/cpu.cfs_quota_us": "-1",
          "cpu/x/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "400000",
          "cpu/cpu.cfs_period_us": "100000",
          "memory/x/memory.limit_in_bytes": str(2**63 - 4096)}, 4.0, None),
        ({"cgroup": "0::/"}, None, None),
    ],
    ids=["version 2", "version 1", "none"],
)  # fmt: skip
def test_limits_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str], quota: float | None, limit: int | None,
) -> None:  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(node_info, "_CGROUP", tmp_path)
    monkeypatch.setattr(node_info, "_OWN_GROUPS", tmp_path / "cgroup")
    here = read_node_info()
    assert (here.cpu_quota, here.memory_limit) == (quota, limit)


def test_the_kernels_tables_of_networks_are_read(tmp_path: Path) -> None:
    """Directories as in /sys."""
    for name, text in {
        "net/eth0/speed": "25000", "net/eth0/operstate": "up", "net/eth1/speed": "-1",
        "net/eth1/operstate": "up", "ib/mlx5_0/ports/1/state": "4: ACTIVE",
        "ib/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)", "ib/mlx5_1/ports/1/state": "1: DOWN",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert dict(node_info._networks(tmp_path / "net")) == {"eth0": 25.0}
    assert dict(node_info._infiniband(tmp_path / "ib")) == {"mlx5_0:1": 400.0}


def test_requirements_that_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_node_info().unmet == ()  # of this environment
    versions = {"vllm": "0.30.0", "torch": "2.12.0+cpu"}
    monkeypatch.setattr(node_info, "_versions", lambda names: versions)
    wanted = ["torch==2.13.0", "numpy>=2", 'torch==1; extra == "old"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    assert list(node_info._unmet(["vllm"])) == [
        "vllm 0.30.0 wants torch==2.13.0, not 2.12.0+cpu"
    ]  # fmt: skip


def test_a_file_system_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    disk = measure_disk("run.dir", tmp_path, "a")
    assert min(disk.write, disk.read, disk.replace_s, disk.files_per_s) > 0
    assert 0 < disk.free < disk.total
    assert disk.kind != "unknown"
    assert list(tmp_path.iterdir()) == []


def test_an_all_reduce_counts_what_every_rank_must_send() -> None:
    assert Link("all_reduce", (0, 1, 2, 3), 1000, 1.0).rate == 1500
    assert Link("send", (0, 1), 1000, 0.5).rate == 2000


@pytest.mark.ray
def test_this_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ray, two ranks that meet over gloo, and one that cannot come up, for real."""
    register()
    caplog.set_level("DEBUG", "hybridrl.doctor")
    report = examine(check(["cluster.ranks=2"]), tmp_path, all_links=True)
    assert caplog.messages[:2] == ["starting 2 ranks", "2 ranks are to start"]
    assert report.works, report.findings
    (here,) = report.facts.nodes
    changing = ("clock", "memory_available", "shm_free")
    assert here == replace(read_node_info(), **{name: getattr(here, name) for name in changing})
    assert [disk.role for disk in report.facts.disks] == ["run.dir", "scratch"]
    assert report.facts.hidden == []
    sizes = [link.nbytes for link in report.facts.links if link.kind == "all_reduce"]
    assert sizes == [8, 2**16, 2**20, 2**24]
    (sent,) = [link for link in report.facts.links if link.kind == "send"]
    assert sent.ranks == (0, 1)
    assert all(1e-7 < link.seconds < 10 for link in report.facts.links)
    assert len(report.facts.peaks) == 2
    assert report.facts.peak_format == "float32"
    assert report.facts.jails.keys() == {here.node}
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(report.record()))["works"]
    write_links(report, tmp_path / "links.json")
    table = LinkTable.from_json(json.loads((tmp_path / "links.json").read_text()))
    assert table.size == 2
    assert table.link(0, 1) == table.link(1, 0)
    assert 1e6 < table.link(0, 1).bytes_per_s < 1e12
    assert 1e-7 < table.link(0, 1).message_s < sent.seconds


def test_links_need_two_ranks_and_a_folder(tmp_path: Path, capsys: Any) -> None:
    """One line each."""
    alone = Report(Facts(nodes=[SOUND], gpu_problems={}, disks=[], node_of=["a"]), NEEDS, [])
    with pytest.raises(ConfigError, match=r"^--links=.*: wanted a run of two ranks or more"):
        write_links(alone, tmp_path / "links.json")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", f"--links={tmp_path}/none/links.json"])
    assert ended.value.code == 2
    assert "--links" in capsys.readouterr().err


def test_a_rank_that_ends_meanwhile_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After it has shown its node."""

    def get(calls: list[str], timeout: float) -> list[Any]:
        assert timeout == 3
        if calls == ["clock"]:
            raise ray.exceptions.RayActorError
        return [(SOUND, "", "")]

    probe = SimpleNamespace(
        look=SimpleNamespace(remote=lambda: "look"), clock=SimpleNamespace(remote=lambda: "clock")
    )
    monkeypatch.setattr(command, "_probes", lambda *_: [probe])
    fake_ray = SimpleNamespace(get=get, exceptions=ray.exceptions)
    with pytest.raises(TimeoutError, match="the ranks did not tell the time: The actor"):
        command.gather(fake_ray, ClusterConfig(ranks=1, start_timeout_s=3), tmp_path)


@pytest.mark.long
def test_more_ranks_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What keeps ranks from coming up is said beside what was found; exit code 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "install", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", "cluster.ranks=9999"])
    assert ended.value.code == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["works"]
    assert report["findings"][0]["what"] == "the ranks do not come up"
    assert report["findings"][0]["why"].startswith("cluster.ranks=9999: wanted at most ")
    assert list(tmp_path.iterdir()) == []
