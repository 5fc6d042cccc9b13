"""What recurrent layers exclude is refused by its key, with the reason, before a process starts."""

from collections.abc import Callable

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config

from hybridrl.config import Config, ConfigError, Device, SharePrompts, TrainLayoutConfig
from hybridrl.preflight import recurrent_layers
from hybridrl.preflight.prepare import build_recipe, check_model_settings
from hybridrl.preflight.prompt_sharing import decide_prompt_sharing
from hybridrl.preflight.recurrent_layers import check_recurrent_value_model

HYBRID = Qwen3_5TextConfig(num_hidden_layers=4)
SET = [
    "run.dir=out", "model=tiny_hybrid", "cluster=processes", "cluster.device=cpu",
    "cluster.ranks=2", "schedule=fused",
]  # fmt: skip


def settings_of(make_config: Callable[..., Config], *overrides: str) -> Config:
    return make_config(*SET, "model.compute_dtype=float32", *overrides)


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("trainer.layout.tp=2", "trainer.layout.tp=2: wanted 1 ("),
        ("rollout.layout.tp=2", "rollout.layout.tp=2: wanted 1 ("),
        ("rollout.tail_tp=2", "rollout.tail_tp=2: wanted off ("),
        ("trainer.layout.cp=2", "trainer.layout.cp=2: wanted 1: "),
        ("trainer.chunk_tokens=64", "trainer.chunk_tokens=64: wanted 0: "),
        ("trainer.compile=true", "trainer.compile=True: wanted false: "),
        ("rollout=vllm", "rollout.engine=vllm: wanted native: "),
    ],
)
def test_what_recurrent_layers_exclude(
    make_config: Callable[..., Config], override: str, refused: str
) -> None:
    config = settings_of(make_config, override)
    with pytest.raises(ConfigError) as error:
        check_model_settings(config, HYBRID)
    assert str(error.value).startswith(refused)
    assert "qwen3_5_text has recurrent layers" in str(error.value)


def test_gpus_are_refused(make_config: Callable[..., Config]) -> None:
    config = settings_of(make_config)
    check_model_settings(config, HYBRID)
    config.cluster.device = Device.cuda
    with pytest.raises(ConfigError, match=r"^cluster.device=cuda: wanted cpu: qwen3_5_text has"):
        check_model_settings(config, HYBRID)
    check_model_settings(config, Qwen3Config())


def test_value_models_are_refused_alike(make_config: Callable[..., Config]) -> None:
    """Beside an actor that attends."""
    config, layout = settings_of(make_config), TrainLayoutConfig()
    config.cluster.device = Device.cuda
    with pytest.raises(ConfigError, match=r"^cluster.device=cuda: wanted cpu: qwen3_5_text has"):
        check_recurrent_value_model(config, HYBRID, layout, "roles.critic", own=True)


def test_bfloat16_is_refused_where_a_part_cannot_keep_float32(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    half = "model.compute_dtype=bfloat16"
    check_model_settings(settings_of(make_config, half, "rollout.dtype=bfloat16"), HYBRID)
    apart = ["schedule=one_step", "cluster.pools.rollout=1", "cluster.pools.actor=1"]
    config = make_config(*SET[:-1], *apart, "rollout.dtype=bfloat16")
    with pytest.raises(ConfigError, match=r"^rollout.dtype=bfloat16: wanted float32 with cluster"):
        check_model_settings(config, HYBRID)
    monkeypatch.setattr(recurrent_layers, "version", lambda _: "2.11.0")
    with pytest.raises(ConfigError, match=r"^model.compute_dtype=bfloat16: wanted float32, or t"):
        check_model_settings(settings_of(make_config, half), HYBRID)


def test_prompts_are_not_shared(make_config: Callable[..., Config]) -> None:
    config = settings_of(make_config, "data.max_prompt_tokens=64")
    line = decide_prompt_sharing(config, build_recipe(config.recipe), HYBRID)
    assert config.trainer.share_prompts is SharePrompts.never
    assert "recurrent layers compute each sequence" in line


def test_a_critic_shares_no_prompts_either(make_config: Callable[..., Config]) -> None:
    """Where the actor's model would decide that prompts are shared."""
    config = settings_of(make_config)
    layout = TrainLayoutConfig()
    check_recurrent_value_model(config, HYBRID, layout, "roles.critic", own=False)
    check_recurrent_value_model(config, Qwen3Config(), layout, "roles.critic", own=True)
    with pytest.raises(ConfigError, match=r"^trainer.share_prompts=auto: wanted never: the model"):
        check_recurrent_value_model(config, HYBRID, layout, "roles.critic", own=True)
