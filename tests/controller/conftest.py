"""Whole jobs on a small Ray cluster of their own, and traces of processes that should be gone."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from hybridrl.config import Config
from hybridrl.config.compose import register, to_config

TINY = [
    "model.tiny.hidden_size=32",
    "model.tiny.intermediate_size=64",
    "model.tiny.num_layers=1",
    "model.tiny.num_heads=2",
    "model.tiny.num_kv_heads=2",
    "model.tiny.head_dim=16",
    "data.size=50",
    "data.eval_size=8",
    "trainer.prompts_per_step=4",
    "warm_start.prompts_per_step=4",
    "rollout.max_new_tokens=12",
    "telemetry.tensorboard=false",
    "telemetry.report=false",
    "telemetry.samples_per_step=1000",
]

USER_CODE = """
import time

import torch.distributed as dist

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe


def score(prompt, response, answer, item):
    return (sum(map(ord, response)) % 7) / 6


def troubled(prompt, response, answer, item):
    kind = sum(map(ord, response)) % 8
    if kind == 0:
        raise ValueError("no such word")
    if kind == 1:
        time.sleep(600)
    return kind / 7


def gap(sampled, trained):
    return float((sampled - trained).abs().max())


class NaNLoss(losses.ClippedLoss):
    def __call__(self, log_probs, entropy, fields):
        values, metrics = super().__call__(log_probs, entropy, fields)
        return values * float("nan"), metrics


class OneRankRaises(losses.ClippedLoss):
    def __call__(self, log_probs, entropy, fields):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("on one rank")  # the other waits in the gradients' reduction
        return super().__call__(log_probs, entropy, fields)


def make(name, loss):
    @recipe(name)
    def dataflow(flow, cfg):
        samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
        samples = flow.actor.log_probs(samples)
        samples = samples.map(gap, ("log_probs", "old_log_probs"), scalars=("gap",))
        flow.actor.update(samples.by_group(advantages.group_relative), loss=loss)

    return dataflow


probe = make("probe", losses.ClippedLoss())
poison = make("poison", NaNLoss())
lonely = make("lonely", OneRankRaises())
"""


@pytest.fixture(scope="session")
def user_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's file with recipes and two reward functions."""
    file = tmp_path_factory.mktemp("user") / "mine.py"
    file.write_text(USER_CODE)
    return file


@pytest.fixture(scope="session")
def tiny_run(user_code: Path) -> list[str]:
    """Overrides of a run of seconds whose rewards differ within a group."""
    reward = ["reward=function", f"reward.function={user_code}:score", "reward.extract=null"]
    return [*TINY, *reward, "recipe.group_size=4"]


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """The `Config` of some overrides."""

    def make(*overrides: object) -> Config:
        register()
        GlobalHydra.instance().clear()
        with initialize_config_module("hybridrl.conf", version_base="1.3"):
            return to_config(compose("train", overrides=[str(override) for override in overrides]))

    return make


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a running Ray cluster with four CPUs, to be joined."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    with tempfile.TemporaryDirectory(prefix="ray") as temp, marked() as (env, processes):
        options = ["--num-cpus=4", "--include-dashboard=false", f"--temp-dir={temp}"]
        options += [f"--port={port}", "--object-store-memory=100000000", "--disable-usage-stats"]
        try:
            subprocess.run(
                [ray, "start", "--head", *options], env=env, check=True, capture_output=True
            )
            yield f"127.0.0.1:{port}"
        finally:
            for process in processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@contextlib.contextmanager
def marked() -> Iterator[tuple[dict[str, str], Callable[[], list[psutil.Process]]]]:
    """An environment, and a function that lists the processes that have it: nothing hides."""
    mark = f"HYBRIDRL_TEST_MARK={uuid.uuid4().hex}"

    def alive() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
        return found

    name, value = mark.split("=")
    yield os.environ | {name: value, "OMP_NUM_THREADS": "1"}, alive


class Command:
    """`hybridrl train ...` as a process of its own, and all that it starts."""

    def __init__(self, args: list[str], cwd: Path, prefix: tuple[str, ...] = ()) -> None:
        with marked() as (env, self.alive):
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", "hybridrl.cli", "train", *args],
                env=env,
                cwd=cwd,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def end(self, timeout: float) -> tuple[int, str, str]:
        """Its exit code, standard output and standard error; kills all of it when time is up."""
        try:
            out, err = self.popen.communicate(timeout=timeout)
        finally:
            self.left = [(p.pid, " ".join(p.cmdline()[:2])) for p in self.alive()]
            for process in self.alive():
                process.kill()
        return self.popen.returncode, out, err

    def wait_for(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Return when `condition` holds; fails when the process ends before."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.popen.poll() is None, self.popen.communicate()[1]
            assert time.monotonic() < end, "the moment never came"
            time.sleep(0.05)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `hybridrl train` with overrides in an empty directory; nothing outlives the test."""
    started: list[Command] = []

    def start(*args: object, prefix: tuple[str, ...] = ()) -> Command:
        started.append(Command([str(arg) for arg in args], tmp_path, prefix))
        return started[-1]

    yield start
    for run in started:
        for process in run.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
