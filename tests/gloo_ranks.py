"""Real gloo processes for tests of every room."""

import gc
import io
import multiprocessing
import operator
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle
import nccl_order
import pytest
import torch
import torch.distributed as dist
from nccl_recorder import Recorder
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from hybridrl.runtime.process_launcher import FORK_SERVER_IMPORTS

# Also for the ranks of whole runs, which the same server forks.
PRELOAD = [*FORK_SERVER_IMPORTS, "hybridrl.workers.worker_factory", "torch.distributed.fsdp"]
PRELOAD += ["peft", "pytest", "_pytest.assertion.rewrite"]
PRELOAD += [f"transformers.models.{f}.modeling_{f}" for f in ("qwen3", "llama", "gemma3")]
VLLM = ["hybridrl.engines.rollout.vllm.weights", "vllm.v1.worker.cpu_worker"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where tests with vLLM run, the server imports it, too."""
    if any(item.get_closest_marker("vllm") for item in session.items):
        PRELOAD.extend(VLLM)


def fork_context() -> Any:
    """What starts processes of the server, which has imported `PRELOAD` and is running now."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return context


class ByValue:
    """A call that reaches a process which cannot import the module of its function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        module = sys.modules[self.function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            return cloudpickle.loads, (cloudpickle.dumps(partial(self.function, *self.args)),)
        finally:
            cloudpickle.unregister_pickle_by_value(module)


class _Rank:
    """A process that runs one function after another, each with a default group of its own."""

    def __init__(self, context: Any) -> None:
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=operator.call, args=(ByValue(_serve), end))
        self.process.daemon = True
        self.process.start()
        end.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    """Run what comes through the pipe; a failure ends the process, so that no peer waits for it."""
    gc.freeze()  # what the server has imported, so that collecting is cheap
    gc.enable()
    torch.set_num_threads(1)
    environment = dict(os.environ)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = _run(*call)
        except BaseException:
            pipe.send((None, traceback.format_exc()))
            raise
        pipe.send((answer, None))
        os.environ.clear()
        os.environ.update(environment)


def _run(
    payload: bytes, number: int, rank: int, size: int, rendezvous: Path, records: bool
) -> bytes:
    """What the function returns. `number` counts calls, so no name of a group comes back.

    With `records` also what the rank has sent and waited for (`nccl_recorder`), else None.
    """
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    dist.distributed_c10d._world.group_count += 1000 * number
    dist.barrier()  # a rank that is done at once would leave before the others have met it
    answer, call, log = io.BytesIO(), pickle.loads(payload), None
    if records:
        with Recorder() as recorder:
            result = call()
        log = recorder.log
    else:
        result = call()
    torch.save((result, log), answer)
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it holds the meshes of these groups
    gc.collect()
    return answer.getvalue()


class _Ranks:
    """Processes that serve one call after another; those of a call that failed are replaced."""

    def __init__(self, rendezvous: Path, checks: bool) -> None:
        self._context = fork_context()
        self._rendezvous, self._checks = rendezvous, checks
        self._ranks: list[_Rank] = []
        self._calls = 0

    def __call__(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._checks:
            return [result for result, _ in self._call(False, size, function, *args)]
        results, logs = self.recorded(size, function, *args)
        faults = nccl_order.check(logs)
        assert not faults, "under NCCL: " + "\n".join(map(str, faults))
        return results

    def recorded(
        self, size: int, function: Callable[..., Any], *args: Any
    ) -> tuple[list[Any], list[nccl_order.Log]]:
        """What the function returns and what it sends, both by rank."""
        answers = self._call(True, size, function, *args)
        return [result for result, _ in answers], [log for _, log in answers]

    def _call(
        self, records: bool, size: int, function: Callable[..., Any], *args: Any
    ) -> list[tuple[Any, Any]]:
        self._calls += 1
        self._ranks += [_Rank(self._context) for _ in range(size - len(self._ranks))]
        ranks, payload = self._ranks[:size], ForkingPickler.dumps(ByValue(function, *args))
        for number, rank in enumerate(ranks):
            file = self._rendezvous / str(self._calls)
            rank.pipe.send((bytes(payload), self._calls, number, size, file, records))
        end = time.monotonic() + 240
        answers = [_answer(rank, end - time.monotonic()) for rank in ranks]
        errors = [error for _, error in answers if error]
        if errors:
            self.end()
            raise AssertionError("\n".join(errors))
        return [torch.load(io.BytesIO(result), weights_only=False) for result, _ in answers]

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._ranks = []


def _answer(rank: _Rank, timeout: float) -> tuple[bytes, str | None]:
    if not rank.pipe.poll(max(timeout, 0)):
        return b"", "a rank hangs"
    try:
        return rank.pipe.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join()
        return b"", f"a rank ended with {rank.process.exitcode}"


@pytest.fixture(scope="session")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(size, function, *args)` runs `function(*args)` in `size` gloo processes.

    Returns what they returned, by rank; raises with their tracebacks when one failed. The processes
    serve all tests of a session. A server that has imported torch forks them.
    `ranks.recorded(size, function, *args)` also returns their logs for `nccl_order.check`.
    """
    pool = _Ranks(tmp_path_factory.mktemp("ranks"), pytestconfig.getoption("--nccl-order"))
    yield pool
    pool.end()


@pytest.fixture
def fresh_ranks(tmp_path: Path, pytestconfig: pytest.Config) -> Iterator[Callable[..., list[Any]]]:
    """`ranks` in processes that end with the test: for functions that leave something behind."""
    pool = _Ranks(tmp_path, pytestconfig.getoption("--nccl-order"))
    yield pool
    pool.end()
