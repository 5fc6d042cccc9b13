"""Safe RLHF on real ranks: the multiplier follows the recorded costs, two critics learn."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybridrl.config import ConfigError
from hybridrl.preflight.prepare import prepare
from hybridrl.recipes.safe_rlhf import estimate, penalized
from hybridrl.telemetry.records import read_lines

PATTERN = "(?s)[a-m].*"


@pytest.mark.layouts
def test_the_multiplier_follows_the_costs(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Equation 31, from the costs that are recorded; `cost` differs from the reward."""
    kept = [setting for setting in tiny_run if not setting.startswith("recipe")]
    settings = ["recipe=safe_rlhf", "recipe.multiplier=0.5", "recipe.multiplier_lr=0.8"]
    settings += ["recipe.threshold=-0.25", "cost=regex", f"cost.pattern='{PATTERN}'"]
    settings += [
        "cost.extract=null",
        "trainer.steps=3",
        "eval.sets.main.every=null",
        "recipe.num_samples=4",
    ]
    run = train_here(tmp_path / "run", *kept, *settings)
    lines = [x for x in read_lines(run.dir / "samples.jsonl") if x["phase"] == "rl"]
    assert all(line["cost"] == bool(re.fullmatch(PATTERN, line["response"])) for line in lines)
    assert len({line["cost"] for line in lines}) == 2
    assert any(line["cost"] != line["reward"] for line in lines)
    multiplier = 0.5
    for step, metrics in enumerate(run.metrics, 1):
        costs = [line["cost"] for line in lines if line["step"] == step]
        assert metrics["cost_mean"] == pytest.approx(sum(costs) / 16)
        multiplier *= math.exp(0.8 * multiplier * (sum(costs) / 16 + 0.25))
        assert metrics["state/multiplier"] == pytest.approx(multiplier)
        assert metrics["critic/grad_norm"] > 0 < metrics["cost_critic/grad_norm"]
    for name in ("critic", "cost_critic"):
        model = AutoModelForSequenceClassification.from_pretrained(run.dir / "final" / name)
        assert model.score.weight.abs().max() > 0
    assert run.stored == [0, 0]


def test_advantages_by_hand() -> None:
    """In float64: half of the penalty each, of opposite signs; equation 30 over two GAEs."""
    random = torch.Generator().manual_seed(0)
    log_probs, reference, values, cost_values = torch.randn(4, 5, generator=random).double()
    kl = log_probs - reference
    last = torch.tensor([0.0, 0, 0, 0, 1], dtype=torch.float64)
    rewards, costs = penalized(2.0, -3.0, log_probs, reference, 0.2, "k1")
    torch.testing.assert_close(rewards, 2 * last - 0.1 * kl)
    torch.testing.assert_close(costs, -3 * last + 0.1 * kl)

    def gae(r: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        deltas = r + 0.9 * torch.cat([v[1:], torch.zeros(1).double()]) - v
        powers = [(0.9 * 0.8) ** k for k in range(5)]
        sums = [sum(powers[k] * deltas[t + k] for k in range(5 - t)) for t in range(5)]
        return torch.stack([torch.as_tensor(x) for x in sums])

    advantages, returns, cost_returns, *_ = estimate(
        rewards, values, costs, cost_values, 0.25, gamma=0.9, lam=0.8
    )
    a, c = gae(rewards, values), gae(costs, cost_values)
    torch.testing.assert_close(advantages.double(), (a - 0.25 * c) / 1.25, atol=1e-6, rtol=0)
    torch.testing.assert_close(returns.double(), a + values, atol=1e-6, rtol=0)
    torch.testing.assert_close(cost_returns.double(), c + cost_values, atol=1e-6, rtol=0)


@pytest.mark.each
@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("recipe.multiplier=0", "^recipe.multiplier=0.0: wanted above 0"),
        ("recipe.multiplier_max=0", "^recipe.multiplier_max=0.0: wanted above 0, or null"),
        ("cost=function", "^cost.function=null: wanted a value, for cost.kind=function"),
        ("cost.function=nowhere:f", "^cost.function=nowhere:f: wanted a function that can be imp"),
        ("cost.extract='('", "^cost.extract=.: wanted a regular expression"),
        ("cost.timeout_s=0", "^cost.timeout_s=0.0: wanted seconds above 0"),
        (
            "roles.cost_critic.path=./nowhere",
            "^roles.cost_critic.path=./nowhere: wanted a directory that",
        ),
    ],
)
def test_wrong_settings(
    setting: str, message: str, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(make_config("recipe=safe_rlhf", setting, f"run.dir={tmp_path / 'run'}"))
