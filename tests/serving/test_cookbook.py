"""tinker-cookbook's own recipes against `hybridrl serve`, as their users start them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import log
from pathlib import Path
from typing import Any

import pytest
from cookbook import MODEL, make_hub
from served_command import Served

pytestmark = pytest.mark.tinker
pytest.importorskip("tinker_cookbook")  # with the newest SDK alone
SERVE = [
    "model=pretrained",
    f"model.path={MODEL}",
    "cluster=processes",
    "cluster.ranks=1",
    "cluster.device=cpu",
    "actor.lora.rank=32",
    "data.max_prompt_tokens=1024",
    "rollout.max_new_tokens=64",
]
CENTERED = "loss_fn=importance_sampling"
RECIPES = {
    "sl_loop": ["batch_size=4", "learning_rate=1e-2", "save_every=2"],
    "rl_loop": [
        *("batch_size=2", "group_size=8", "max_tokens=64", "learning_rate=1e-3"),
        *("max_steps=6", "save_every=2", CENTERED),
    ],
    "math_rl.train": [
        *("env=arithmetic", "groups_per_batch=2", "group_size=8", "max_tokens=32"),
        *("eval_every=0", "max_steps=6", "save_every=2", CENTERED),
    ],
    "preference.dpo.train": ["batch_size=4", "learning_rate=3e-3"],
}
"""The modules below `tinker_cookbook.recipes`, and their settings."""

Row = dict[str, Any]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    make_hub(folder)
    return folder


@pytest.fixture(scope="module")
def served(hub: Path) -> Iterator[Served]:
    served = Served(hub / "run", *SERVE, "serve.port=0", cwd=hub)
    yield served
    served.kill()


class Recipe:
    """A process of a recipe; started again with its log, it goes on."""

    def __init__(self, hub: Path, served: Served, name: str, log: str, *more: str) -> None:
        settings = [f"model_name={MODEL}", f"log_path={log}", *RECIPES[name], *more]
        if "." in name:
            settings.append("behavior_if_log_dir_exists=resume")
        self.log = hub / log
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *settings],
            cwd=hub,
            env={**os.environ, **served.exported, "HOME": str(hub), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def rows(self, name: str = "metrics") -> list[Row]:
        """The rows of a log file that are complete."""
        file = self.log / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_checkpoints(self, count: int) -> None:
        """Wait until as many are in the log. Raises AssertionError where the recipe ends before."""
        while len(self.rows("checkpoints")) < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)

    def finished(self) -> list[Row]:
        """Wait for its end; the metrics of its steps."""
        output, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, output
        assert self.rows("checkpoints")[-1]["name"] == "final"
        return self.rows()


def check_supervised(rows: list[Row]) -> None:
    losses = [row["train_mean_nll"] for row in rows]
    assert len(losses) == 4
    assert losses[0] == pytest.approx(log(262), abs=0.1)  # random weights
    assert losses[-1] < losses[0] - 0.2


def check_rewards(rows: list[Row]) -> None:
    assert [row["progress/batch"] for row in rows] == list(range(6))
    trained = [row for row in rows if "grad_norm" in row]
    assert trained  # groups of equal rewards alone are not trained on
    assert all(row["grad_norm"] > 0 for row in trained)
    assert any(row["reward/total"] > 0 for row in rows)


def check_arithmetic(rows: list[Row]) -> None:
    trained = [row for row in rows if "optim/kl_sample_train_v2" in row]
    assert trained
    for row in trained:  # generation's log-probabilities against training's; measured: 7e-8
        assert abs(row["optim/kl_sample_train_v2"]) < 1e-6
        assert row["grad_norm"] > 0


def check_preferences(rows: list[Row]) -> None:
    losses = [row["dpo_loss"] for row in rows]
    assert losses[0] == pytest.approx(log(2), abs=1e-6)  # the reference is the model of step 0
    assert abs(rows[0]["margin"]) < 1e-6
    assert losses[-1] < losses[0] - 0.05
    assert rows[-1]["margin"] > 0.1


CHECKS: dict[str, Callable[[list[Row]], None]] = {
    "sl_loop": check_supervised,
    "rl_loop": check_rewards,
    "math_rl.train": check_arithmetic,
    "preference.dpo.train": check_preferences,
}


Start = Callable[..., Recipe]


@pytest.fixture
def start(hub: Path) -> Iterator[Start]:
    """Start a recipe against a server; none outlives the test."""
    with ExitStack() as stack:

        def started(served: Served, name: str, log: str, *more: str) -> Recipe:
            recipe = Recipe(hub, served, name, log, *more)
            stack.callback(recipe.kill)
            return recipe

        yield started


@pytest.mark.parametrize(
    "name",
    [
        "sl_loop",
        "math_rl.train",
        pytest.param("rl_loop", marks=pytest.mark.slow),
        pytest.param("preference.dpo.train", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_runs_to_its_end(start: Start, served: Served, name: str) -> None:
    CHECKS[name](start(served, name, name).finished())


@pytest.mark.slow
def test_recipes_at_once(start: Start, served: Served) -> None:
    """Four clients of one server."""
    recipes = {name: start(served, name, f"beside-{name}") for name in RECIPES}
    for name, recipe in recipes.items():
        CHECKS[name](recipe.finished())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_on_after_a_kill(start: Start, hub: Path, tmp_path: Path, name: str) -> None:
    """The client is killed after its first checkpoint, the server after the second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings = [*SERVE, f"serve.port={free.getsockname()[1]}"]
    more = ["batch_size=1"] if name in ("sl_loop", "preference.dpo.train") else []
    log = f"killed-{name}"
    with ExitStack() as stack:
        served = Served(tmp_path / "run", *settings, cwd=hub)
        stack.callback(served.kill)
        recipe = start(served, name, log, *more)
        recipe.wait_for_checkpoints(1)
        recipe.kill()
        assert recipe.process.returncode < 0

        recipe = start(served, name, log, *more)
        recipe.wait_for_checkpoints(2)
        served.kill()
        second = Served(tmp_path / "run", *settings, cwd=hub)
        stack.callback(second.kill)
        assert second.second == served.second  # the same address and key
        output, _ = recipe.process.communicate(timeout=600)
        assert recipe.process.returncode != 0
        assert "unknown to this server, which may be new" in output

        rows = start(second, name, log, *more).finished()
        if name == "sl_loop":  # which samples nothing
            whole = start(second, name, f"whole-{name}", *more).finished()
            norms = {row["step"]: row["grad_norm"] for row in whole}
            assert {row["step"]: row["grad_norm"] for row in rows} == norms
