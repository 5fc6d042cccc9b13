"""The temperature of rollouts divides logits of samples that it drew, and of nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.flow import Flow, recipe
from hybridrl.flow.graph import GenerateStage, StageMethod, UpdateStage, with_temperatures
from hybridrl.preflight.prepare import build_recipe
from hybridrl.telemetry.records import read_lines

DRAWN = ["grpo", "ppo", "remax", "dars", "xrpo", "distill", "self_distill", "ttrl"]
STORED = ["sft", "dpo", "kto", "orpo", "simpo", "rm"]


def temperatures(make_config: Callable[..., Any], name: str, *more: str) -> set[float]:
    """Return the temperatures of the stages that compute log-probabilities."""
    graph = with_temperatures(build_recipe(make_config(f"recipe={name}", *more).recipe), 0.6)
    methods = (StageMethod.LOG_PROBS, StageMethod.TOP_LOG_PROBS)
    return {
        stage.temperature
        for stage in graph.stages.values()
        if stage.method in methods or isinstance(stage, UpdateStage)
    }


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_samples_have_that_of_rollouts(make_config: Callable[..., Any], name: str) -> None:
    assert temperatures(make_config, name) == {0.6}


@pytest.mark.parametrize("source", ["trainer", "ewma"])
def test_old_log_probabilities_have_that_of_rollouts(
    make_config: Callable[..., Any], source: str
) -> None:
    assert temperatures(make_config, "grpo", f"recipe.correction.old_log_probs={source}") == {0.6}


@pytest.mark.parametrize("name", STORED)
def test_responses_of_the_dataset_have_1(make_config: Callable[..., Any], name: str) -> None:
    assert temperatures(make_config, name) == {1.0}


@recipe("mixed")
def mixed(flow: Flow, cfg: Any) -> None:
    """Drawn samples beside those of the dataset."""
    drawn = flow.actor.generate(flow.prompts, 2)
    flow.actor.update(drawn.merge(flow.targets()), loss=CrossEntropyLoss())


def test_a_stage_of_both_is_refused() -> None:
    graph = mixed.build(None)
    assert with_temperatures(graph, 1.0).stages
    with pytest.raises(ValueError, match=r"reads samples of temperatures 0\.6 and 1 in one pass"):
        with_temperatures(graph, 0.6)


def test_a_stage_of_its_own_temperature() -> None:
    @recipe("own")
    def own(flow: Flow, cfg: Any) -> None:
        drawn = flow.actor.generate(flow.prompts, 2, temperature=0.8)
        flow.actor.update(drawn, loss=CrossEntropyLoss())

    stages = with_temperatures(own.build(None), 0.6).stages.values()
    assert [s.temperature for s in stages if isinstance(s, GenerateStage | UpdateStage)] == [
        0.8
    ] * 2


@pytest.mark.long
def test_supervised_loss_is_the_cross_entropy_of_transformers(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """In a run whose rollouts have another temperature, which the trainer then computes with."""
    few = ["trainer.steps=1", "eval.sets.main.num_prompts=2", "eval.sets.main.every=null"]
    settings = ["warm_start.steps=1", "rollout.temperature=0.6", *few]
    run = train_here(tmp_path / "run", *tiny_run, *settings)
    lines = read_lines(run.dir / "samples.jsonl")
    supervised = [line for line in lines if line["phase"] == "warm_start"]
    model = AutoModelForCausalLM.from_pretrained(run.dir / "start", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run.dir / "start")
    total, tokens = 0.0, 0
    for line in supervised:
        prompt = tokenizer(line["prompt"])["input_ids"]
        response = [*tokenizer(line["response"])["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([prompt + response])
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            total += float(model(ids, labels=labels).loss) * len(response)
        tokens += len(response)
    warm, rl = (next(m for m in read_lines(run.dir / "metrics.jsonl")
                     if m.get("phase") == phase and "loss" in m)
                for phase in ("warm_start", "rl"))  # fmt: skip
    assert len(supervised) == 4
    assert warm["loss"] == pytest.approx(total / tokens, abs=1e-5)
    # Both engines agree on what was drawn: 0.6 in both, and neither in the supervised step.
    assert rl["mismatch/mean"] < 1e-5
