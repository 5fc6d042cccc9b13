"""Whether groups share their prompts, decided before a run, with the reason."""

from collections.abc import Callable

import pytest
from transformers import AutoConfig

from hybridrl.config import Config, ConfigError, SharePrompts
from hybridrl.preflight.prepare import build_recipe
from hybridrl.preflight.prompt_sharing import decide_prompt_sharing

ADAPTERS = ["actor.lora.rank=4", "actor.lora.dropout=0.1"]
OF_CRITIC = ["roles.critic.lora.rank=4", "roles.critic.lora.dropout=0.1"]


def decide(
    make_config: Callable[..., Config], *overrides: str, sinks: bool = False
) -> tuple[SharePrompts, str]:
    config = make_config("run.dir=out", "data.max_prompt_tokens=64", *overrides)
    shape = AutoConfig.for_model("gpt_oss" if sinks else "qwen3")
    line = decide_prompt_sharing(config, build_recipe(config.recipe), shape)
    return config.trainer.share_prompts, line


@pytest.mark.parametrize(
    ("settings", "shares", "reason"),
    [
        (["recipe=grpo"], True, "always"),
        (["recipe=dpo"], True, "always"),  # a pair has one prompt
        (["recipe=sft"], False, "each prompt has one sample"),
        (["recipe=grpo", "deterministic=strict"], False, "deterministic=strict sums"),
        (["recipe=grpo", *ADAPTERS], False, "dropout is drawn for each response"),
        (["recipe=ppo", "recipe.num_samples=4", *OF_CRITIC], False, "roles.critic.lora.dropout=0"),
    ],
    ids=str,
)
def test_auto_shares_where_a_run_can(
    make_config: Callable[..., Config], settings: list[str], shares: bool, reason: str
) -> None:
    decided, line = decide(make_config, *settings)
    assert decided is (SharePrompts.always if shares else SharePrompts.never)
    assert line.startswith("trainer.share_prompts=auto: ")
    assert reason in line


@pytest.mark.parametrize("settings", [["deterministic=strict"], ADAPTERS], ids=str)
def test_what_cannot_share_is_refused(
    make_config: Callable[..., Config], settings: list[str]
) -> None:
    wanted = "trainer.share_prompts=always"
    with pytest.raises(ConfigError, match=f"^{wanted}: wanted auto or never: "):
        decide(make_config, "recipe=grpo", *settings, wanted)


def test_never_says_nothing(make_config: Callable[..., Config]) -> None:
    off = SharePrompts.never
    assert decide(make_config, "recipe=grpo", "trainer.share_prompts=never") == (off, "")


def test_sinks_share_nothing(make_config: Callable[..., Config]) -> None:
    decided, line = decide(make_config, "recipe=grpo", sinks=True)
    assert decided is SharePrompts.never
    assert "attention sinks" in line
    wanted = "trainer.share_prompts=always"
    with pytest.raises(ConfigError, match=f"^{wanted}: wanted auto or never: .*attention sinks"):
        decide(make_config, "recipe=grpo", wanted, sinks=True)


def test_short_prompts_are_shared_on_request_alone(make_config: Callable[..., Config]) -> None:
    short = "recipe=grpo", "data.max_prompt_tokens=63"
    assert decide(make_config, *short) == (SharePrompts.never, "")
    assert decide(make_config, *short, "trainer.share_prompts=always")[0] is SharePrompts.always
