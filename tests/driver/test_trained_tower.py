"""Whole runs whose image tower trains: engines agree after each step, and runs can be resumed."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_checkpoints import open_whole
from resumed_runs import check_same, ended

from hybridrl.config import ConfigError
from hybridrl.preflight.images import check_images
from hybridrl.preflight.prepare import build_recipe
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

# A model of one layer would add DeepStack's features where no later token reads them.
SMALL = [
    "model.tiny.num_layers=2", "experiment=shapes_tiny", "model.vision=train", "data.size=24",
    "data.eval_size=4",
    "warm_start.steps=1", "trainer.steps=3", "trainer.save_every=1", "trainer.optim.lr=1e-2",
    "trainer.optim.eps=1e-8", "eval.sets.main.num_prompts=2", "rollout.max_new_tokens=12",
]  # fmt: skip
Train = Callable[..., Any]


def lines(run: Any, key: str) -> list[float]:
    return [line[key] for line in read_lines(run.dir / "metrics.jsonl") if key in line]


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout", ["trainer.layout.fsdp=2", "trainer.layout.pp=2 rollout.layout.tp=2"]
)
def test_engines_agree_and_all_weights_are_written(
    train_here: Train, tiny_run: list[str], tmp_path: Path, layout: str
) -> None:
    """The log-probabilities of generated tokens are the trainer's, under each step's new tower."""
    run = train_here(tmp_path / "run", *tiny_run, *SMALL, *layout.split())
    distances = lines(run, "mismatch/kl")
    assert len(distances) == 3
    assert all(abs(distance) < 1e-9 for distance in distances)
    before = open_whole(run.dir / "start").state_dict()
    after = open_whole(run.dir / "final").state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.layouts
def test_a_resumed_run_is_the_whole_one(
    train_here: Train, tiny_run: list[str], tmp_path: Path
) -> None:
    settings = [*tiny_run, *SMALL, "deterministic=strict", "schedule=partial"]
    run = train_here(tmp_path / "run", *settings)
    copy = ended(run.dir, tmp_path / "copy", 1)
    train_here(copy, *settings, "trainer.resume=auto")
    check_same(run.dir, copy, tmp_path)


@pytest.mark.layouts
def test_pushes_carry_the_tower(train_here: Train, tiny_run: list[str], tmp_path: Path) -> None:
    """Instances on ranks of their own, which have the weights of the last step."""
    apart = ["cluster.ranks=2", "cluster.pools.rollout=1", "schedule=periodic"]
    run = train_here(tmp_path / "run", *tiny_run, *SMALL, *apart)
    assert all(abs(distance) < 1e-9 for distance in lines(run, "mismatch/kl"))


@pytest.mark.parametrize("decay", ["null", "0.5"])
def test_a_reference_has_the_tower_of_its_weights(
    train_here: Train, tiny_run: list[str], tmp_path: Path, decay: str
) -> None:
    """It begins with the tower of a warm start; with a `decay` it follows the actor."""
    recipe = ["recipe.kl_coef=0.1", f"recipe.reference_ema_decay={decay}"]
    more = ["recipe.correction.old_log_probs=trainer", "trainer.steps=2", "cluster.ranks=1"]
    run = train_here(tmp_path / "run", *tiny_run, *SMALL, *recipe, *more)
    first, second = lines(run, "kl")
    assert abs(first) < 1e-9 < second


@pytest.mark.each
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.lora.rank=4", r"^actor.lora.rank=4: wanted 0 with model.vision=train"),
        ("data=spell_backward", r"^model.vision=train: wanted frozen: no prompt that trains has"),
        ("model=tiny", r"^model.vision=train: wanted frozen: model type qwen3 has no image tower"),
    ],
)
def test_what_is_refused_before_a_process_starts(
    make_config: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    override: str,
    message: str,
) -> None:
    from hybridrl.preflight.prepare import prepare

    settings = [*tiny_run, *SMALL, override, f"run.dir={tmp_path}", "cluster.ranks=2"]
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(make_config(*settings))
    assert "\n" not in str(caught.value)


def test_images_of_an_evaluation_alone_train_no_tower(
    make_config: Callable[..., Any], tiny_run: list[str]
) -> None:
    config = make_config(*tiny_run, *SMALL)
    graph = build_recipe(config.recipe)
    shape: Any = SimpleNamespace(num_hidden_layers=1, tower_config=None)
    items = [SimpleNamespace(images=images, source="s", place="row 1") for images in ((), (b"",))]
    check_images(config, graph, shape, items, items)
    with pytest.raises(ConfigError, match=r"^model.vision=train: .* no prompt that trains has"):
        check_images(config, graph, shape, items[:1], items)
