"""Whole runs on prompts with pictures: samples move, are parked and resumed as text is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_checkpoints import open_whole
from resumed_runs import check_same, ended
from safetensors.torch import load_file, save_file

from hybridrl.config import ConfigError
from hybridrl.preflight.images import check_images
from hybridrl.preflight.prepare import build_recipe, prepare
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

SMALL = [
    "data.size=24", "data.eval_size=4", "warm_start.steps=1", "trainer.steps=2",
    "trainer.save_every=1", "trainer.optim.lr=1e-2", "trainer.optim.eps=1e-8",
    "eval.sets.main.num_prompts=2", "rollout.max_new_tokens=12",
]  # fmt: skip
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def small(tiny_run: list[str]) -> list[str]:
    """Overrides of a run of seconds, with rewards that differ whatever the model writes."""
    return ["experiment=shapes_tiny", *tiny_run, *SMALL]


@pytest.fixture(scope="module")
def whole_run(train_here: Train, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that shard training, in the order of the specification."""
    return train_here(tmp_path_factory.mktemp("serial"), *small, "trainer.layout.fsdp=2")


def texts(run: Any) -> dict[str, str]:
    return {f"{x['step']} {x['id']}": x["response"] for x in read_lines(run.dir / "samples.jsonl")}


def test_engines_agree_and_the_tower_stays(whole_run: Any) -> None:
    """The generated tokens' log-probabilities are the trainer's; what is written opens whole."""
    lines = [line for line in read_lines(whole_run.dir / "metrics.jsonl") if "mismatch/kl" in line]
    assert len(lines) == 2
    assert all(abs(line["mismatch/kl"]) < 1e-9 for line in lines)  # 4e-14 was measured
    before = open_whole(whole_run.dir / "start").state_dict()
    after = open_whole(whole_run.dir / "final").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "language_model" in name or "lm_head" in name}


def test_a_bad_tower_is_one_line_before_a_process_starts(
    whole_run: Any, small: list[str], make_config: Callable[..., Any], tmp_path: Path
) -> None:
    path = shutil.copytree(whole_run.dir / "start", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.visual.merger.linear_fc1.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = [x for x in small if not x.startswith(("model", "warm_start"))]
    config = make_config(*settings, f"model.path={path}", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"^model.path=.* the image tower lacks merger.linear_fc"):
        prepare(config)


@pytest.mark.layouts
def test_a_fused_run_is_the_serial_one(
    whole_run: Any, small: list[str], train_here: Train, tmp_path: Path
) -> None:
    fused = ["schedule=fused", "schedule.migration_threshold=6", "schedule.migration=kv"]
    run = train_here(tmp_path, *small, "trainer.layout.fsdp=2", *fused)
    assert texts(run) == texts(whole_run)


@pytest.mark.layouts
def test_engines_agree_whose_ranks_have_parts(
    small: list[str], train_here: Train, tmp_path: Path
) -> None:
    """Tensor parallelism in training, a pipeline in generation and in a reference."""
    layout = ["model.tiny.num_layers=2", "trainer.layout.tp=2", "rollout.layout.pp=2"]
    recipe = ["recipe.kl_coef=0.1", "recipe.correction.old_log_probs=trainer"]
    run = train_here(tmp_path, *small, *layout, *recipe)
    lines = [line for line in read_lines(run.dir / "metrics.jsonl") if "mismatch/kl" in line]
    assert len(lines) == 2
    assert all(abs(line["mismatch/kl"]) < 1e-9 for line in lines)
    assert abs(lines[0]["kl"]) < 1e-9 < lines[1]["kl"]


@pytest.mark.vllm
def test_vllm_reads_the_pictures(small: list[str], train_here: Train, tmp_path: Path) -> None:
    """Its instance of two ranks draws the native engine's tokens, after a step, too."""
    settings = [*small, "model.tiny.head_dim=32", "model.tiny.num_layers=2"]
    native = train_here(tmp_path / "native", *settings, "cluster.ranks=1")
    run = train_here(tmp_path / "vllm", *settings, "rollout=vllm", "rollout.layout.tp=2")
    assert texts(run) == texts(native)
    lines = [line for line in read_lines(run.dir / "metrics.jsonl") if "mismatch/kl" in line]
    assert len(lines) == 2
    assert all(abs(line["mismatch/kl"]) < 1e-9 for line in lines)


@pytest.mark.layouts
def test_a_critic_reads_the_pictures(small: list[str], train_here: Train, tmp_path: Path) -> None:
    """PPO trains a critic with the actor's tower, and is resumed bit for bit."""
    settings = [x for x in small if "group_size" not in x]
    settings += ["recipe=ppo", "deterministic=strict", "roles.critic.optim.lr=1e-2"]
    run = train_here(tmp_path / "run", *settings, "trainer.steps=3")
    losses = [line["critic/loss"] for line in run.metrics if "critic/loss" in line]
    assert len(losses) == 3
    assert min(losses) > 0
    copy = ended(run.dir, tmp_path / "copy", 1)
    train_here(copy, *settings, "trainer.steps=3", "trainer.resume=auto")
    check_same(run.dir, copy, tmp_path)


def test_deep_features_belong_to_a_first_stage(
    make_config: Callable[..., Any], small: list[str]
) -> None:
    """Three of them: with four layers on two stages the last would be left out."""
    items = [SimpleNamespace(images=(b"",), source="s", place="row 1")]
    tower = SimpleNamespace(deepstack_visual_indexes=[0, 1, 2])
    shape: Any = SimpleNamespace(num_hidden_layers=4, tower_config=tower)
    for key, unit in {"trainer.layout.pp": "chunk", "rollout.layout.pp": "stage"}.items():
        config = make_config(*small, f"{key}=2", "cluster.ranks=2")
        graph = build_recipe(config.recipe)
        wanted = rf"^{key}=2: wanted a layout whose first {unit} has 3 layers or more, and not 2: "
        with pytest.raises(ConfigError, match=wanted):
            check_images(config, graph, shape, items, items)
        shape.num_hidden_layers = 5
        check_images(config, graph, shape, items, items)
        shape.num_hidden_layers = 2  # a whole model may be this small
        check_images(make_config(*small, "cluster.ranks=2"), graph, shape, items, items)
        shape.num_hidden_layers = 4


@pytest.mark.wide
@pytest.mark.layouts
def test_a_resumed_run_is_the_whole_one(
    small: list[str], train_here: Train, tmp_path: Path
) -> None:
    settings = [*small, "deterministic=strict", "schedule=partial", "trainer.steps=3"]
    run = train_here(tmp_path / "run", *settings)
    copy = ended(run.dir, tmp_path / "copy", 1)
    train_here(copy, *settings, "trainer.resume=auto")
    check_same(run.dir, copy, tmp_path)


@pytest.mark.each
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=tiny", r"^data.sources.shapes.name=.*has images or other media in 'images', which"),
        ("recipe=ppo model.vision=train", r"^model.vision=train: wanted frozen with the role cri"),
        ("recipe=ppo roles.critic.layout.cp=2", r"^roles.critic.layout.cp=2: wanted 1: prompts ha"),
        ("trainer.chunk_tokens=64", r"^trainer.chunk_tokens=64: wanted 0: prompts have images"),
        ("trainer.layout.cp=2", r"^trainer.layout.cp=2: wanted 1: prompts have images"),
        (
            "schedule=fused rollout.tail_tp=2",
            r"^rollout.tail_tp=2: wanted off: prompts have images",
        ),
    ],
)
def test_what_is_refused_before_a_process_starts(
    make_config: Callable[..., Any], small: list[str], tmp_path: Path, override: str, message: str
) -> None:
    from hybridrl.preflight.prepare import prepare

    settings = [x for x in small if "group_size" not in x or "ppo" not in override]
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(make_config(*settings, *override.split(), f"run.dir={tmp_path}", "cluster.ranks=2"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "pads"), [((), 9), (("data=spell_backward",), 0)], ids=["shapes", "texts"]
)
def test_the_most_pads_of_a_prompt_are_known_before_a_run(
    make_config: Callable[..., Any],
    small: list[str],
    tmp_path: Path,
    source: tuple[str, ...],
    pads: int,
) -> None:
    from hybridrl.preflight.prepare import prepare

    config = make_config(*small, *source, f"run.dir={tmp_path}", "cluster.ranks=1")
    assert prepare(config).image_pads == pads


@pytest.mark.slow
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_tiny_model_learns_to_count(train_here: Train, tmp_path: Path, exchanged: bool) -> None:
    """0.75 before, 0.91 after 10 steps, 0.99 after 20 were measured; chance is 0.2."""
    source = f"data.sources.shapes.params.exchanged={exchanged}".lower()
    run = train_here(tmp_path, "experiment=shapes_tiny", "cluster.ranks=1", source)
    lines = read_lines(run.dir / "metrics.jsonl")
    accuracy = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line][-1]
    assert accuracy < 0.3 if exchanged else accuracy > 0.8


@pytest.mark.slow
def test_a_tower_that_trains_learns_to_count(train_here: Train, tmp_path: Path) -> None:
    """0.84 before, 1.00 from 10 steps on were measured."""
    rates = ["warm_start.optim.lr=5e-4", "warm_start.steps=60", "trainer.optim.lr=1e-4"]
    trained = ["experiment=shapes_tiny", "model.vision=train", *rates, "cluster.ranks=1"]
    run = train_here(tmp_path, *trained, "trainer.steps=20", "trainer.save_every=20")
    lines = read_lines(run.dir / "metrics.jsonl")
    accuracy = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert accuracy[-1] > 0.95
    assert accuracy[-1] >= accuracy[0]
