"""Numbers that cannot be are refused with their key, whether the recipe would use them or not."""

import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from hybridrl.config import Config, ConfigError
from hybridrl.config.compose import to_config
from hybridrl.config.dotted import load_function
from hybridrl.preflight.prepare import build_recipe

RECIPES = sorted(p.parent.name for p in Path(__file__).parents[2].glob("recipes/*/config.yaml"))


def refused(recipe: str, **settings: Any) -> str:
    """What is said of a recipe's settings."""
    with pytest.raises(ConfigError) as raised:
        build_recipe({"target": f"hybridrl.recipes.{recipe}:{recipe}", **settings})
    return str(raised.value)


OUTSIDE = [
    ("cispo", {"clip_low": 2}, "clip_low=2.0: wanted 0 to 1"),
    ("dapo", {"max_tokens": 0}, "max_tokens=0: wanted 1 or more"),
    ("dapo", {"max_rounds": 0}, "max_rounds=0: wanted 1 or more"),
    ("dapo", {"overlong_share": 1.5}, "overlong_share=1.5: wanted 0 to 1"),
    ("dars", {"max_samples": 7}, "max_samples=7: wanted recipe.group_size=8 or more"),
    ("distill", {"num_samples": 0}, "num_samples=0: wanted 1 or more"),
    ("dpo", {"beta": 0}, "beta=0.0: wanted above 0"),
    ("dpo", {"variant": "hinge"}, "variant=hinge: wanted one of sigmoid, ipo"),
    ("dpo", {"label_smoothing": 0.6}, "label_smoothing=0.6: wanted 0 to below 0.5"),
    (
        "dpo",
        {"reference_ema_decay": 1},
        "reference_ema_decay=1.0: wanted above 0 and below 1, or null",
    ),
    ("grpo", {"group_size": 0}, "group_size=0: wanted 2 or more"),
    ("grpo", {"clip_high": -1}, "clip_high=-1.0: wanted 0 or more"),
    ("grpo", {"correction": {"bound": 1}}, "correction.bound=1.0: wanted above 1"),
    ("grpo", {"dual_clip": 1}, "dual_clip=1.0: wanted above 1, or null"),
    (
        "grpo",
        {"correction": {"weights": "clip"}},
        "correction.weights=clip: wanted one of none, truncate, mask",
    ),
    ("grpo", {"correction": "mask"}, "correction=mask: renamed, now recipe.correction.weights"),
    (
        "grpo",
        {"correction": {"level": "batch"}},
        "correction.level=batch: wanted one of token, sequence",
    ),
    (
        "grpo",
        {"correction": {"step_scale": "cube"}},
        "correction.step_scale=cube: wanted one of none, sqrt, linear",
    ),
    (
        "grpo",
        {"correction": {"ewma_decay": 5}},
        "correction.ewma_decay=5.0: wanted above 0 and below 1",
    ),
    ("grpo", {"kl_coef": -0.1}, "kl_coef=-0.1: wanted 0 or more"),
    (
        "grpo",
        {"reference_ema_decay": 7},
        "reference_ema_decay=7.0: wanted above 0 and below 1, or null",
    ),
    ("ppo", {"clip": 2}, "clip=2.0: wanted above 0, at most 1"),
    ("ppo", {"kl": "k9"}, "kl=k9: wanted one of k1, k2, k3, package.module:name"),
    ("ppo", {"kl_horizon": 0}, "kl_horizon=0.0: wanted above 0"),
    ("ppo", {"kl_target": 0}, "kl_target=0.0: wanted above 0, or null"),
    ("ppo", {"value_clip": 0}, "value_clip=0.0: wanted above 0, or null"),
    ("reinforce_pp", {"kl_coef": -1}, "kl_coef=-1.0: wanted 0 or more"),
    ("rloo", {"kl_coef": -1}, "kl_coef=-1.0: wanted 0 or more"),
    ("rm", {"center": -1}, "center=-1.0: wanted 0 or more"),
    ("safe_rlhf", {"clip": -1}, "clip=-1.0: wanted above 0, at most 1"),
    ("safe_rlhf", {"multiplier": 0}, "multiplier=0.0: wanted above 0"),
    ("safe_rlhf", {"multiplier": 6}, "multiplier=6.0: wanted at most recipe.multiplier_max=5.0"),
    ("safe_rlhf", {"multiplier_lr": -1}, "multiplier_lr=-1.0: wanted 0 or more"),
    ("safe_rlhf", {"multiplier_max": 0}, "multiplier_max=0.0: wanted above 0, or null"),
    ("xrpo", {"confidence": 0}, "confidence=0.0: wanted above 0 and below 1"),
    ("xrpo", {"confidence": 1.5}, "confidence=1.5: wanted above 0 and below 1"),
    ("xrpo", {"exploration": -1}, "exploration=-1.0: wanted 0 or more"),
    ("xrpo", {"max_samples": 3}, "max_samples=3: wanted recipe.group_size=4 or more"),
    ("xrpo", {"novelty": -1}, "novelty=-1.0: wanted 0 or more"),
    ("xrpo", {"novelty_bound": -1}, "novelty_bound=-1.0: wanted 0 or more"),
    ("xrpo", {"round_samples": -4}, "round_samples=-4: wanted 1 or more"),
    ("xrpo", {"rounds": -1}, "rounds=-1: wanted 0 or more"),
]


@pytest.mark.parametrize(
    ("recipe", "settings", "line"), OUTSIDE, ids=[f"{case[0]}:{case[2]}" for case in OUTSIDE]
)
def test_out_of_bounds(recipe: str, settings: dict[str, Any], line: str) -> None:
    assert refused(recipe, **settings) == f"recipe.{line}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_numbers_are_finite(recipe: str) -> None:
    function = load_function("recipe.target", f"hybridrl.recipes.{recipe}:{recipe}").function
    hints = get_type_hints(get_type_hints(function)["cfg"])
    for key in (key for key, hint in hints.items() if float in (hint, *get_args(hint))):
        for value in (math.nan, math.inf, "-inf"):
            line = f"recipe.{key}={float(value)}: wanted a finite number"
            assert refused(recipe, **{key: value}) == line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.temperature", math.nan),
        ("trainer.optim.lr", math.nan),
        ("trainer.optim.betas", [0.9, math.nan]),
        ("recipe.of.my.own", math.nan),
    ],
)
def test_all_numbers_are_finite(key: str, value: Any) -> None:
    config = OmegaConf.structured(Config)
    OmegaConf.update(config, key, value, force_add=True)
    with pytest.raises(ConfigError) as raised:
        to_config(config)
    assert str(raised.value) == f"{key}=nan: wanted a finite number"
