"""Runs on the text part of checkpoints for images and text: trained, resumed, evaluated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_checkpoints import image_checkpoint, open_whole
from resumed_runs import check_same, ended

from hybridrl import cli
from hybridrl.config import ConfigError
from hybridrl.engines.rollout import available
from hybridrl.models.load import load_config
from hybridrl.preflight.models import language_model_line
from hybridrl.preflight.prepare import prepare

SETTINGS = [
    "deterministic=strict", "trainer.optim.eps=1e-8", "trainer.optim.lr=1e-2", "trainer.steps=2",
    "trainer.save_every=1", "eval.sets.main.num_prompts=2", "trainer.layout.fsdp=2",
]  # fmt: skip


@pytest.mark.layouts
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3_vl", marks=pytest.mark.wide)])
def test_a_run_trains_resumes_and_is_evaluated(
    family: str, train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    path = image_checkpoint(family, tmp_path / "source")
    settings = [x for x in tiny_run if not x.startswith("model.")]
    settings = [*settings, *SETTINGS, f"model.path={path}"]
    train_here(tmp_path / "run", *settings)
    copy = ended(tmp_path / "run", tmp_path / "copy", 1)
    assert len(train_here(copy, *settings, "trainer.resume=auto").steps) == 1
    check_same(tmp_path / "run", copy, tmp_path)
    before = open_whole(path).state_dict()
    after = open_whole(tmp_path / "run" / "final").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "language_model" in name or "lm_head" in name}
    written = f"model.path={tmp_path / 'run' / 'final'}"
    line = ["eval", *settings[:-1], written, "cluster=processes", f"run.dir={tmp_path / 'eval'}"]
    line = [x for x in line if not x.startswith("trainer.")]
    cli.main([*line, "cluster.ranks=1", "cluster.rank_in_driver=true", "schedule=serial"])


def test_the_line_at_the_start(make_config: Callable[..., Any], tmp_path: Path) -> None:
    path = str(image_checkpoint("qwen3_vl", tmp_path))
    line = language_model_line(make_config(f"model.path={path}"), path)
    assert line.startswith("model.path: the text part of qwen3_vl trains; its image tower")


@pytest.mark.parametrize(
    ("family", "obstacle"),
    [
        ("qwen3_vl", None),
        ("qwen3_vl_moe", "the text part of qwen3_vl_moe trains, and vLLM has the whole"),
        ("gemma3", "the text part of gemma3 trains, and vLLM has the whole"),
        ("qwen3_5", "no switch writes the weights of recurrent layers into vLLM's"),
    ],
)
def test_what_vllm_generates_for(
    family: str, obstacle: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "check_vllm_installed", lambda: "vllm")
    path = str(image_checkpoint(family, tmp_path))
    assert available.vllm_obstacle(load_config(path)) == obstacle


def test_vllm_gets_no_features_of_a_tower_that_trains(make_config: Callable[..., Any]) -> None:
    config = make_config("rollout=vllm", "model.vision=train")
    with pytest.raises(ConfigError, match=r"^model.vision=train: wanted frozen with rollout.eng"):
        available.VLLMChecks().check_model(config, None)


def test_a_name_that_the_hub_does_not_have(
    make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = make_config("model.path=nobody/none", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"^model.path=nobody/none: wanted a Hugging Face model"):
        prepare(config)
