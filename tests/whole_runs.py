"""Whole jobs on a small Ray cluster of their own, and traces of processes that should be gone."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gloo_ranks import fork_context
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridrl.config import ClusterKind, Config, SourceConfig, TinyModelConfig
from hybridrl.config.compose import check, composed, register
from hybridrl.data import sources
from hybridrl.driver import train as controller_train
from hybridrl.driver.run_records import ReadTexts, RunRecords
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model
from hybridrl.rewards.model import make_reward_model
from hybridrl.schedule import StepResult
from hybridrl.system import signals
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.trace import TraceSpan, read_timeline
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.rank_calls import Reference, SharedIds

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
    "warm_start.steps=0",
    "warm_start.prompts_per_step=4",
    "rollout.max_new_tokens=12",
    "telemetry.loggers=[]",
    "telemetry.report=false",
    "telemetry.samples_per_step=1000",
]

# As users train: AdamW divides by gradients near zero, so a last bit somewhere reaches everything.
REPLAYED = [
    "deterministic=strict", "trainer.steps=5", "trainer.save_every=2", "trainer.keep_last=9",
    "trainer.optim.lr=1e-2", "trainer.optim.schedule=linear", "trainer.optim.eps=1e-8",
    "trainer.optim.clip_grad_norm=1.0", "trainer.mini_batches=2", "eval.sets.main.num_prompts=2",
    "recipe.kl_coef=0.05",
]  # fmt: skip

USER_REWARDS = """
import time


def score(prompt, response, answer, item):
    return (sum(map(ord, response)) % 7) / 6


def troubled(prompt, response, answer, item):
    kind = sum(map(ord, response)) % 8
    if kind == 0:
        raise ValueError("no such word")
    if kind == 1:
        time.sleep(600)
    return kind / 7


def sleepy(prompt, response, answer, item):
    if len(response) <= 2:
        time.sleep(600)
    return len(response) / 48
"""

USER_CODE = """
import json

import torch.distributed as dist

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
from hybridrl.algorithms.rewards import has_spread


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


class OneEngineRaises(losses.ClippedLoss):
    def __call__(self, log_probs, entropy, fields):
        from vllm.v1.engine.llm_engine import LLMEngine

        step, calls = LLMEngine.step, []

        def failing(engine):
            calls.append(engine)
            if len(calls) == 5 and dist.get_rank() == 1:
                raise MemoryError("in the engine's fifth step")
            return step(engine)

        LLMEngine.step = failing  # in all steps of generation that follow
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
def tell(tokens, log_probs, reference):
    found = (tokens.tolist(), log_probs.tolist(), reference.tolist())
    return json.dumps(found)


def make_told(name, old_policy):
    @recipe(name)
    def dataflow(flow, cfg):
        samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
        if old_policy:
            samples = flow.actor.log_probs(samples.filter(has_spread))
        samples = flow.reference.log_probs(samples)
        fields = ("tokens", "log_probs", "reference_log_probs")
        samples = samples.map(tell, fields, scalars=("told",))
        loss = losses.ClippedLoss(kl_coef=0.2)
        flow.actor.update(samples.by_group(advantages.group_relative), loss=loss)

    return dataflow


told = make_told("told", False)
told_old = make_told("told_old", True)
poison = make("poison", NaNLoss())
lonely = make("lonely", OneRankRaises())
engineless = make("engineless", OneEngineRaises())
"""


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """What commands install within is gone after it: processes started later inherit it."""
    kept = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number in (n for n in kept if signal.getsignal(n) != kept[n]):
            signal.signal(number, kept[number])


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """Each test leaves them as they were."""
    with signal_handlers_kept():
        yield


@pytest.fixture(scope="session", autouse=True)
def _generated_datasets() -> Iterator[None]:
    """Runs of the same settings share them: each reads thousands of words when it is made."""
    make, datasets = sources._reasoning_gym_dataset, {}

    def make_once(key: str, source: SourceConfig, seed: int, size: int) -> Any:
        settings = (key, repr(source), seed, size)
        if settings not in datasets:
            datasets[settings] = make(key, source, seed, size)
        return datasets[settings]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_reasoning_gym_dataset", make_once)
        yield


@pytest.fixture(scope="session")
def user_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's file with recipes."""
    file = tmp_path_factory.mktemp("user") / "mine.py"
    file.write_text(USER_CODE)
    return file


@pytest.fixture(scope="session")
def user_rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's file with reward functions, which every verifier process imports: without torch."""
    file = tmp_path_factory.mktemp("user") / "rewards.py"
    file.write_text(USER_REWARDS)
    return file


@pytest.fixture(scope="session")
def tiny_run(user_rewards: Path) -> list[str]:
    """Overrides of a run of seconds whose rewards differ within a group."""
    reward = ["reward=function", f"reward.function={user_rewards}:score", "reward.extract=null"]
    return [*TINY, *reward, "recipe.group_size=4"]


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """The `Config` of some overrides; its schedule is the specification, if they name none."""

    def make(*overrides: object) -> Config:
        register()
        named = [str(override) for override in overrides]
        if not any(override.startswith("schedule=") for override in named):
            named.append("schedule=serial")
        config = check(named)
        if config.cluster.kind is not ClusterKind.slurm:
            config.resolve_device(0, "a machine without GPUs")
        return config

    return make


@pytest.fixture(scope="session")
def cluster(start_cluster: Callable[..., Any]) -> Iterator[str]:
    """The address of a running Ray cluster with four CPUs, to be joined; it knows no token."""
    with start_cluster(RAY_AUTH_MODE="disabled") as address:
        yield address


@pytest.fixture(scope="session")
def start_cluster() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """`with start_cluster(**environment) as address` has a Ray cluster of its own."""
    return _start_cluster


@contextlib.contextmanager
def _start_cluster(**environment: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    with tempfile.TemporaryDirectory(prefix="ray") as temp, marked() as (env, processes):
        options = ["--num-cpus=4", "--include-dashboard=false", f"--temp-dir={temp}"]
        options += [f"--port={port}", "--object-store-memory=100000000", "--disable-usage-stats"]
        # No idle workers for each driver that joins: the ranks, whose environment differs, are
        # others.
        options += ['--system-config={"prestart_worker_first_driver":false}']
        options += ["--no-monitor"]  # the autoscaler of a cluster that does not grow
        env |= environment
        try:
            with _one_at_a_time():
                subprocess.run(
                    [ray, "start", "--head", *options], env=env, check=True, capture_output=True
                )
            yield f"127.0.0.1:{port}"
        finally:
            for process in processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Among the processes of the tests: several clusters that start make each other late."""
    with (Path(tempfile.gettempdir()) / "hybridrl-tests-ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class FinishedRun:
    """A job that has ended: its directory, the results of its steps, what the ranks held then.

    `stored` counts the samples on each rank after the last release.
    """

    dir: Path
    steps: list[StepResult]
    stored: list[int]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of steps with an update."""
        return [line for line in read_lines(self.dir / "metrics.jsonl") if "loss" in line]

    @property
    def spans(self) -> list[TraceSpan]:
        """The slices of trace.json in the recipe's steps, by their start."""
        spans, _ = read_timeline(self.dir / "trace.json")
        spans = [s for s in spans if s.args.get("phase") == "rl"]
        return sorted((s for s in spans if s.step > 0), key=lambda span: span.start)


@pytest.fixture(scope="session")
def train(
    request: pytest.FixtureRequest, make_config: Callable[..., Config]
) -> Callable[..., FinishedRun]:
    """`train(run_dir, *overrides)` trains on the Ray cluster that tests share."""

    def train(run_dir: Path, *overrides: object) -> FinishedRun:
        address = request.getfixturevalue("cluster")  # starts at the first run
        return _train(
            run_dir, make_config(*overrides, f"cluster.address={address}", f"run.dir={run_dir}")
        )

    return train


@pytest.fixture(scope="session")
def train_here(make_config: Callable[..., Config]) -> Callable[..., FinishedRun]:
    """`train` without Ray, seconds sooner: for what a run computes, not for how its ranks live.

    Rank 0 is this process, so that a patch reaches it, and two ranks share the cores alone.
    """
    fork_context()

    def train(run_dir: Path, *overrides: object) -> FinishedRun:
        in_driver = ["cluster.rank_in_driver=true"] * ("cluster=emulated" not in overrides)
        here = ["cluster=processes", "cluster.ranks=2", *in_driver]
        return _train(run_dir, make_config(*here, *overrides, f"run.dir={run_dir}"))

    return train


def goes_on(checkpoint: Path) -> bool:
    """Whether a checkpoint has samples with the tokens that they have had so far."""
    state = json.loads((checkpoint / "resume" / "state.json").read_text())
    return any(job["parked"] for group in state["schedule"]["open"] for job in group["jobs"])


@pytest.fixture(scope="session")
def make_run(train_here: Callable[..., Any], tiny_run: list[str]) -> Callable[..., Path]:
    """`make_run(directory, *overrides)` is a run as the command line leaves it.

    `without` are keys of `tiny_run` that its recipe does not have.
    """

    def make(directory: Path, *overrides: str, without: Sequence[str] = ()) -> Path:
        kept = [setting for setting in tiny_run if setting.partition("=")[0] not in without]
        settings = [*kept, "cluster=processes", *REPLAYED, *overrides]
        register()
        node = composed([*settings, f"run.dir={directory}"])
        (directory / ".hydra").mkdir(parents=True)
        OmegaConf.save(node, directory / ".hydra" / "config.yaml")
        run: Path = train_here(directory, *settings).dir
        return run

    return make


def _train(run_dir: Path, config: Config) -> FinishedRun:
    results: list[StepResult] = []
    stored: list[list[int]] = []
    record = RunRecords.record_step

    def spy(
        self: RunRecords, result: StepResult, seconds: float, read_texts: ReadTexts
    ) -> dict[str, float]:
        results.append(result)
        return record(self, result, seconds, read_texts)

    release = WorkerGroup.call_release

    def count(self: WorkerGroup, ids: tuple[SampleId, ...]) -> dict[Reference[int], int]:
        """The ranks answer at once, which a run does not wait for."""
        calls = [self._same(p, BaseWorker.release, SharedIds(ids)) for p in self.pools.values()]
        stored.append([n for of_pool in calls for n in self._gather_living(of_pool)])
        return release(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecords, "record_step", spy)
        patch.setattr(WorkerGroup, "call_release", count)
        controller_train.train(config)
    return FinishedRun(run_dir, results, stored[-1])


@contextlib.contextmanager
def marked() -> Iterator[tuple[dict[str, str], Callable[[], list[psutil.Process]]]]:
    """An environment, and a function that lists the processes that have it: nothing hides."""
    mark = f"HYBRIDRL_TEST_MARK={uuid.uuid4().hex}"

    def alive() -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    processes += [process, *process.children(recursive=True)]
        return list(dict.fromkeys(processes))

    name, value = mark.split("=")
    yield os.environ | {name: value, "OMP_NUM_THREADS": "1"}, alive


@pytest.fixture
def command_line_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line's handlers of signals, in this process, as if none had come."""
    for name in ("_requested_at", "_graceful", "_installed"):
        monkeypatch.setattr(signals, name, getattr(signals, name))
    monkeypatch.setattr(signals, "_last", {"signal": signal.SIGINT, "time": float("-inf")})
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    signals.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def long_tail(
    tiny_run: list[str], user_code: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Overrides of a run with a reference and a reward model of the actor's size, and a long tail.

    Responses end at one of five letters, so half of them have at most ten tokens. Calls are short,
    so that a tail of 12 of 16 samples is on both of two instances. Few samples ride in one pass, so
    that ranks share the passes. Plain descent: a gradient near zero stays small whatever its sign.
    The recipe tells, of every sample, its tokens and their log-probabilities.
    """
    folder = tmp_path_factory.mktemp("reward")
    actor, reward = folder / "actor", folder / "reward"
    tiny = TinyModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16
    )
    make_tiny_model(actor, tiny, seed=0)
    make_reward_model(reward, actor, seed=1)
    weights = load_file(reward / "model.safetensors")
    spread = {name: 8 * value if value.dim() > 1 else value for name, value in weights.items()}
    save_file(spread, reward / "model.safetensors", metadata={"format": "pt"})
    changed = ("reward", "recipe", "rollout", "model.tiny.num_layers")
    return [
        *[setting for setting in tiny_run if not setting.startswith(changed)],
        "model.tiny.num_layers=2", "reward=model", f"reward.model={reward}",
        "rollout.decode_steps=2", "rollout.max_new_tokens=48", "rollout.stop=[a,e,i,o,u]",
        "trainer.max_tokens_per_micro_batch=256", "trainer.optim.lr=1000", "trainer.optim.eps=1000",
        "trainer.optim.clip_grad_norm=0", "trainer.steps=3", "eval.sets.main.num_prompts=2",
        "eval.sets.main.every=null",
        f"recipe={{target: '{user_code}:told'}}",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def check_same() -> Callable[..., None]:
    """Asserts that two runs of three steps did the same."""
    return _check_same


def _check_same(serial: FinishedRun, fused: FinishedRun, loss: float = 1e-6) -> None:
    """Equal tokens, scores within rounding, losses and gradients within `loss`.

    Measured: losses 1e-7, norms of gradients 1e-7, of order 1; changes of parameters 4e-7.
    """
    assert len(serial.steps) == len(fused.steps) == 3
    for one, other in zip(serial.steps, fused.steps, strict=True):
        assert [s.id for s in one.samples] == [s.id for s in other.samples]
        assert len({s.response_tokens for s in one.samples}) > 5
        for a, b in zip(one.samples, other.samples, strict=True):
            (tokens, *scores), (others, *other_scores) = _told(a), _told(b)
            assert tokens == others, a.id
            # Measured: 2e-6, of order 4.
            torch.testing.assert_close(scores, other_scores, atol=1e-5, rtol=0)
            assert abs(a.scalars["reward"] - b.scalars["reward"]) < 1e-5
    for one, other in zip(serial.metrics, fused.metrics, strict=True):
        for key in ("loss", "kl", "grad_norm", "entropy", "reward_mean"):
            if key in one:
                assert abs(one[key] - other[key]) < loss * max(1.0, abs(one[key])), key
    change, other_change = _moved(serial), _moved(fused)
    assert change.norm() > 1e-2
    assert (change - other_change).norm() / change.norm() < 10 * loss


def _told(sample: Any) -> list[Any]:
    """Tokens, and the log-probabilities of the response by the actor and by the reference."""
    tokens, *scores = json.loads(sample.scalars["told"])
    return [tokens, *(torch.tensor(values) for values in scores)]


def _moved(run: FinishedRun) -> torch.Tensor:
    """How the parameters have changed over the whole run."""
    # Under the names of the model: files may have experts one by one.
    models = (AutoModelForCausalLM.from_pretrained(run.dir / f) for f in ("start", "final"))
    start, final = (dict(model.named_parameters()) for model in models)
    changes = [(final[name] - start[name]).detach().double().flatten() for name in start]
    return torch.cat(changes)


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
