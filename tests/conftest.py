"""What all tests share; `gloo_ranks` and `whole_runs` hold the fixtures that start processes."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from breadth import breadth

PLUGINS = ("gloo_ranks", "virtual_executor", "whole_runs")
pytest.register_assert_rewrite(*PLUGINS)

# One thread of torch, as a rank on CPUs has. Several spin while they wait for each other, which is
# most of the CPU time where tensors are tiny; and tests run in several processes already.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job ignores it, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nccl-order",
        action="store_true",
        help="hold every run of `ranks` to NCCL's order, see tests/nccl_order.py",
    )
    parser.addoption(
        "--narrow",
        action="store_true",
        help="less breadth, see tests/breadth.py",
    )


ROOT = Path(__file__).parents[1]
# Files whose tests take longest, in CPU seconds: none of them runs alone at the end.
LONG_FILES = (
    "driver/test_async.py",
    "engines/train/test_layouts.py",
    "test_cli.py",
    "replay/test_replay.py",
    "engines/rollout/test_parallel.py",
    "driver/test_run_records.py",
    "driver/test_recipes.py",
    "test_python_calls.py",
    "driver/test_runs.py",
    "driver/test_early.py",
    "driver/test_restarts.py",
    "checkpoint/test_distributed.py",
    "driver/test_environments.py",
    "driver/test_async_evaluation.py",
    "chaos/test_chaos.py",
    "driver/test_async_weights.py",
    "driver/test_hangs.py",
    "driver/test_judges.py",
    "driver/test_fused.py",
    "plan/test_mapping_command.py",
    "engines/train/test_state_memory.py",
    "config/test_keys.py",
    "test_layers.py",
    "test_words.py",
    "test_customize.py",
    "environments/test_failures.py",
    "driver/test_resumed_inputs.py",
    "rewards/test_functions.py",
    "checkpoint/test_hf.py",
    "plan/test_mapping_search.py",
    "engines/train/test_sequence_losses.py",
    "driver/test_ppo.py",
    "driver/test_wide.py",
    "replay/test_blame.py",
    "engines/rollout/test_speculation.py",
    "driver/test_pools.py",
    "schedule/test_fused.py",
    "rewards/test_judge.py",
    "engines/rollout/test_deterministic.py",
    "engines/score/test_parallel.py",
    "test_nccl_runs.py",
    "plan/test_fused_against_serial.py",
    "driver/test_emulated.py",
    "kernels/test_linear_log_probs_triton.py",
    "engines/train/test_engine.py",
    "engines/rollout/test_native.py",
    "plan/test_mapping_memory.py",
    "driver/test_checkpoints.py",
    "driver/test_command.py",
    "telemetry/test_report.py",
)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what takes seconds where tests run: the process that hands them out starts sooner."""
    hands_out = session.config.getoption("dist", "no") != "no"
    if hands_out and not hasattr(session.config, "workerinput"):
        return
    gc.disable()  # until all tests are there: what is imported stays
    from hypothesis import HealthCheck, settings

    # A loaded machine is slow, not wrong.
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")
    for plugin in PLUGINS:
        session.config.pluginmanager.import_plugin(plugin)


@pytest.hookimpl(trylast=True)  # once `-m` has chosen: the last case is one of those that run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the breadth where `--narrow` says so; long files first.

    xdist hands files out in the order of their tests.
    """
    order = {ROOT / "tests" / file: place for place, file in enumerate(LONG_FILES)}
    assert all(file.is_file() for file in order), "LONG_FILES has a file that is gone"
    items.sort(key=lambda item: order.get(item.path, len(order)))
    if config.getoption("narrow"):
        left_out = breadth(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """What has been imported by now stays: the garbage collector need not look at it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


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
            shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
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
