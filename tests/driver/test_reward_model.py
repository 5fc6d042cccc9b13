"""A reward model from preferences on real ranks, and who takes it afterwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.config import ConfigError
from hybridrl.models.tiny import make_char_tokenizer, make_tiny_model
from hybridrl.preflight.prepare import prepare
from hybridrl.rewards.model import make_reward_model
from hybridrl.telemetry.records import read_lines

RM = ["recipe=rm", "trainer.steps=6", "roles.reward.optim.lr=1e-2", "eval.sets.main.every=3"]


@pytest.fixture(scope="module")
def run(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    settings += [*RM, "trainer.prompts_per_step=16", "trainer.save_every=3", "data.eval_size=40"]
    layout = ["roles.reward.layout.tp=2", "warm_start.steps=2"]
    return train_here(tmp_path_factory.mktemp("rm") / "run", *settings, *layout)


def lines(run: Any, key: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(run.dir / "metrics.jsonl") if key in line]


@pytest.mark.layouts
def test_the_recorded_accuracy_is_that_of_transformers(run: Any) -> None:
    """Transformers scores the same held-out pairs with the saved model."""
    path = run.dir / "final" / "reward"
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.num_labels == 1

    @torch.no_grad()
    def score(line: dict[str, Any]) -> float:
        ids = tokenizer(line["prompt"] + line["response"])["input_ids"]
        return model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits.item()

    scores: dict[tuple[str, str], float] = {}
    for line in read_lines(run.dir / "samples.jsonl"):
        if line["phase"] == "evaluation" and line["step"] == 8:
            prompt, branch, _ = line["id"].split(".")
            scores[prompt, branch] = score(line)
    assert len(scores) == 80
    prompts = {prompt for prompt, _ in scores}
    margins = [scores[p, "eval_chosen"] - scores[p, "eval_rejected"] for p in prompts]
    last = lines(run, "eval_accuracy")[-1]
    assert last["eval_margin"] == pytest.approx(sum(margins) / 40, abs=1e-5)
    assert last["eval_accuracy"] == sum(margin > 0 for margin in margins) / 40
    assert lines(run, "eval_accuracy")[0]["eval_accuracy"] == 0.5  # its head begins at zero


@pytest.mark.layouts
def test_it_learns_and_the_actor_stays(run: Any) -> None:
    losses = [line["reward/loss"] for line in lines(run, "reward/loss")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] == pytest.approx(0.6931, abs=1e-4)
    saved = [run.dir / "checkpoints" / "step_000005", run.dir / "final"]
    actors = [load_file(path / "model.safetensors") for path in saved]
    assert all(torch.equal(actors[0][name], actors[1][name]) for name in actors[0])
    models = [load_file(path / "reward" / "model.safetensors") for path in saved]
    assert not torch.equal(models[0]["score.weight"], models[1]["score.weight"])
    (event,) = [e for e in read_lines(run.dir / "events.jsonl") if e["kind"] == "role"]
    assert (event["role"], event["train_layout"]["tp"]) == ("reward", 2)
    assert run.stored == [0, 0]


@pytest.mark.layouts
def test_it_judges_and_begins_other_runs(
    run: Any, make_config: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Found before anything starts; then PPO's critic may start from it as well."""
    path = run.dir / "final" / "reward"
    settings = [setting for setting in tiny_run if not setting.startswith(("recipe", "reward"))]
    settings += ["reward=model", f"reward.model={path}", f"run.dir={tmp_path / 'run'}"]
    config = make_config(*settings, "recipe=ppo", f"roles.critic.path={path}")
    assert prepare(config).graph.judges == ("reward",)
    prepare(make_config(*settings, "recipe=rm", f"roles.reward.path={path}"))


@pytest.mark.layouts
def test_a_judge_with_another_tokenizer_in_a_pool_of_its_own(
    train_here: Callable[..., Any], make_config: Callable[..., Any], tiny_run: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """It judges the text, on its rank, as transformers does with its own tokenizer."""
    tiny = make_config(*tiny_run, "run.dir=out").model.tiny
    make_tiny_model(tmp_path / "actor", tiny, 0)
    make_reward_model(tmp_path / "judge", str(tmp_path / "actor"), 1)
    tokenizer = make_char_tokenizer(tiny.alphabet[::-1], tiny.max_positions)
    tokenizer.save_pretrained(tmp_path / "judge")
    settings = [setting for setting in tiny_run if not setting.startswith("reward")]
    settings += ["model=pretrained", f"model.path={tmp_path / 'actor'}", "trainer.steps=1",
                 "reward=model", f"reward.model={tmp_path / 'judge'}",
                 "model.compute_dtype=float32", "cluster.pool_of.reward=reward",
                 "eval.sets.main.every=null"]  # fmt: skip
    run = train_here(tmp_path / "run", *settings)
    lanes = {span.lane for span in run.spans if span.name == "reward"}
    assert {lane for lane in lanes if lane.startswith("rank")} == {"rank 1"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    rewards = set()
    for line in read_lines(run.dir / "samples.jsonl"):
        if line["phase"] != "rl":
            continue
        ids = tokenizer(line["prompt"] + line["response"])["input_ids"]
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits.item()
        assert line["reward"] == pytest.approx(wanted, abs=1e-5)
        rewards.add(line["reward"])
    assert len(rewards) > 8


def test_what_cannot_be_trained(make_config: Callable[..., Any], tmp_path: Path) -> None:
    settings = ["data.size=20", "data.eval_size=4", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"^data.sources.spell=.*whose 'chosen' is a response"):
        prepare(make_config("recipe=rm", "data=spell_backward", *settings))
    with pytest.raises(ConfigError, match=r"^roles.reward.path=nowhere/at/all: wanted a dir"):
        prepare(make_config("recipe=rm", "roles.reward.path=nowhere/at/all", *settings))
    with pytest.raises(ConfigError, match=r"^roles.reward.layout=.*cluster.ranks=2"):
        make_config("recipe=rm", "roles.reward.layout.tp=3", *settings)
