"""Real gloo processes for tests of every room."""

import multiprocessing
import operator
import shutil
import signal
import subprocess
import sys
import traceback
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# A loaded machine is slow, not wrong.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A shell's background job ignores it, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
PRELOAD = ["torch", "torch.distributed.fsdp", "transformers.models.auto.modeling_auto", "peft"]


RUNS = {"cluster", "controller", "scripts", "test_cli.py", "test_readme.py"}
"""Tests of whole runs: one after the other, so that Ray's waits are shared with other tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `-n 2 --dist loadgroup` one process has all runs, the other computes meanwhile."""
    for item in items:
        if item.path.relative_to(ROOT / "tests").parts[0] in RUNS:
            item.add_marker(pytest.mark.xdist_group("runs"))


class _ByValue:
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


def _rank(function: Callable[[], Any], rank: int, size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=size
        )
        dist.barrier()  # a rank that is done at once would leave before the others have met it
        torch.save(function(), directory / f"result{rank}")
        dist.destroy_process_group()
    except BaseException:
        (directory / f"error{rank}").write_text(traceback.format_exc())
        raise


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """`ranks(size, function, *args)` runs `function(*args)` in `size` gloo processes.

    Returns what they returned, by rank; raises with their tracebacks when one failed. A server
    that has imported torch forks them, so that a test does not pay for the imports again.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        directory = tmp_path_factory.mktemp("ranks")
        processes = [
            context.Process(
                target=operator.call,
                args=(_ByValue(_rank), _ByValue(function, *args), rank, size, directory),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        errors = [file.read_text() for file in sorted(directory.glob("error*"))]
        failed = [process.exitcode for process in processes if process.exitcode != 0]
        for process in processes:
            process.kill()
        if errors or failed:
            raise AssertionError(f"exit codes {failed} (None: hung)\n" + "\n".join(errors))
        return [torch.load(directory / f"result{rank}", weights_only=False) for rank in range(size)]

    return run


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Files of the repository that exist, relative to its root."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so what belongs to the tree is not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    return [file for file in files if (ROOT / file).exists()]


@pytest.fixture(scope="session")
def copy_tree(tracked_files: list[Path]) -> Callable[[Path], Path]:
    """`copy_tree(folder)` makes what a clone of the tree as it stands would be, less `.git`."""

    def copy(folder: Path) -> Path:
        for file in tracked_files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
        return folder

    return copy


@pytest.fixture(scope="session")
def install_into() -> Callable[..., None]:
    """`install_into(environment, *what)`: pip install into a new virtual environment.

    It sees the libraries that are installed here, but not this tree.
    """

    def install(environment: Path, *what: str | Path) -> None:
        venv.create(environment, with_pip=False)
        (site,) = (environment / "lib").glob("python*/site-packages")
        # A plain path in a .pth: the .pth files in it, an editable install's too, are not read.
        (site / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
        pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "install"]
        # Ignored, not replaced: nothing outside of the environment is uninstalled.
        options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        subprocess.run([*pip, *options, *what], check=True)

    return install
