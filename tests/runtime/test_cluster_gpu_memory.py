"""A run that joins a cluster is held to the memory of the cluster's GPUs.

Ray's logical GPUs, and a forged `nvidia-smi` on each node that has one; the driver's has neither.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import json, subprocess, sys
    import ray
    from ray.cluster_utils import Cluster
    from hybridrl.config.compose import check, register
    from hybridrl.preflight.prepare import prepare
    from hybridrl.runtime.devices import gpu_memory

    paths, lists, command, overrides = json.loads(sys.argv[1])
    cluster = Cluster()
    cluster.add_node(num_cpus=1, num_gpus=0, include_dashboard=False)  # the driver's
    for path in paths:
        cluster.add_node(num_cpus=2, num_gpus=1, env_vars={"PATH": path})
    overrides = [f"cluster.address={cluster.address}", *overrides]
    try:
        refused = subprocess.run([*command, *overrides], capture_output=True, text=True)
        ray.init(address=cluster.address, logging_level="error")
        left = [*ray._private.state.actors().values(), *ray.util.placement_group_table().values()]
        # None where no node answers in time, which it cannot before its process has started.
        sizes = [gpu_memory(ray, ranks, limit_s) for ranks, limit_s in ((2, 0), (1, 60), (2, 60))]
        ray.shutdown()
        for gpus in lists:
            with open(gpus, "w") as file:
                file.write("0, GPU-a, NVIDIA H100 80GB HBM3, 81559, 0, 550.54.15, 9.0\\\\n")
        register()
        config = check(overrides)
        prepare(config)
        ranks = config.cluster.ranks
        said = [refused.returncode, refused.stdout, refused.stderr]
        print(json.dumps([*said, left, ranks, sizes]))
    finally:
        cluster.shutdown()
"""
SMALL = "0, GPU-a, NVIDIA T1000, {mib}, 0, 550.54.15, 7.5\n"
KV_CACHE = 50_000_000  # tokens of 128 bytes


@pytest.mark.ray
def test_a_run_that_the_gpus_of_a_cluster_cannot_hold_is_refused(
    tiny_run: list[str], tmp_path: Path
) -> None:
    """By one line, before a rank starts; the same run passes on larger GPUs.

    Every node is asked. A run on one GPU may get the larger one, a run on both has the smaller.
    """
    nodes = [tmp_path / "large", tmp_path / "small"]
    for node, mib in zip(nodes, (8192, 4096), strict=True):
        node.mkdir()
        (node / "gpus").write_text(SMALL.format(mib=mib))
        program = node / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat {node}/gpus\n")
        program.chmod(0o755)
    command = [str(Path(sys.executable).with_name("hybridrl")), "train"]
    overrides = [*tiny_run, f"rollout.kv_cache_tokens={KV_CACHE}", f"run.dir={tmp_path / 'run'}"]
    paths = [f"{node}:{os.environ['PATH']}" for node in nodes]
    settings = [paths, [f"{node}/gpus" for node in nodes], command, overrides]
    env = os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # it would start a process for each CPU
    }
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(settings)],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code, stdout, stderr, left, ranks, sizes = json.loads(done.stdout.splitlines()[-1])
    assert code != 0
    (line,) = [*stdout.splitlines(), *stderr.splitlines()]
    assert "cluster.memory_check=refuse: wanted warn, or a run that fits: it does not fit" in line
    assert "of 4.0 GiB for it, and the largest phase, " in line
    assert not left
    assert ranks == 2
    assert sizes == [None, 8192 * 2**20, 4096 * 2**20]
