"""A family is taken because it computes right: the probe finds what an engine gets wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    CohereConfig,
    DeepseekV3Config,
    FuyuConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)
from transformers.models.granitemoe import modeling_granitemoe

from hybridrl.config import ConfigError, RouterReplay
from hybridrl.engines import probe as probe_module
from hybridrl.engines.probe import (
    Verdict,
    check_has_classifier,
    check_model,
    check_replay,
    probe,
    probed,
)
from hybridrl.models import packed_attention, paged_attention
from hybridrl.models.shrink import HEAD_DIM, shrink


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hybridrl" / "verdicts"


@pytest.mark.parametrize("config", [Olmo2Config(), Qwen3MoeConfig(), Gemma3TextConfig()])
def test_families_that_are_right(config: PretrainedConfig) -> None:
    assert probe(config) == Verdict(None, None)


def whole_row(lengths, implementation, device, group=None):
    """A packing that forgets where sequences begin."""
    return packed_attention.make_packing([sum(lengths)], implementation, device)


def no_window(function: Callable) -> Callable:
    return lambda *args, **kwargs: function(*args, **{**kwargs, "sliding_window": None})


@pytest.mark.long
@pytest.mark.parametrize("broken", ["leak", "packed window", "paged window", "head", "gradient"])
def test_what_is_wrong_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault on its own, in a family that is right without it."""
    match broken:
        case "leak":
            monkeypatch.setattr("hybridrl.engines.train.shared_prompts.make_packing", whole_row)
        case "packed window":
            wrong = no_window(packed_attention.packed_attention)
            packed_attention.AttentionInterface.register(packed_attention.NAME, wrong)
        case "paged window":
            wrong = no_window(paged_attention.paged_attention)
            paged_attention.AttentionInterface.register(paged_attention.NAME, wrong)
        case "head":
            logits = "hybridrl.engines.rollout.stage._products"
            monkeypatch.setattr(logits, lambda h, head: h.float() @ (1.001 * head.weight).t())
        case "gradient":
            original = packed_attention._torch

            def detached(query, key, value, *rest):
                return original(query, key, value.detach(), *rest)

            monkeypatch.setattr(packed_attention, "_torch", detached)
    try:
        verdict = probe(Gemma3TextConfig())
    finally:
        for module, function in (
            (packed_attention, packed_attention.packed_attention),
            (paged_attention, paged_attention.paged_attention),
        ):
            module.AttentionInterface.register(module.NAME, function)
    in_training = broken in ("leak", "packed window", "gradient")
    wrong, right = (
        (verdict.train, verdict.native) if in_training else (verdict.native, verdict.train)
    )
    assert right is None
    assert wrong is not None
    assert ("the gradient of " if broken == "gradient" else "log-probabilities differ by") in wrong


def test_a_model_that_an_engine_cannot_run_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        check_model(StableLmConfig(), "teacher.path", train=True, native=False)
    assert str(error.value).startswith("teacher.path=stablelm: wanted a model that training compu")
    assert "\n" not in str(error.value)


def test_only_the_engines_in_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "probe", lambda _: Verdict(None, "its numbers are wrong"))
    check_model(Olmo2Config(), "model.path", train=True, native=False)
    with pytest.raises(ConfigError, match=r"native rollout engine .*olmo2: its numbers are wrong"):
        check_model(Olmo2Config(), "model.path", train=False, native=True)


def test_verdicts_are_kept_by_config(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(config: PretrainedConfig) -> Verdict:
        calls.append(config.hidden_size)
        return Verdict(None, "a reason")

    monkeypatch.setattr(probe_module, "probe", counting)
    for size in (64, 64, 128, 64):
        assert probed(Olmo2Config(hidden_size=size)) == Verdict(None, "a reason")
    assert calls == [64, 128]
    for file in cache.iterdir():  # cut off, of another shape, gone
        file.write_text("{")
    assert probed(Olmo2Config(hidden_size=64)).native == "a reason"
    for file in cache.iterdir():
        file.write_text(json.dumps({"another": "file"}))
    assert probed(Olmo2Config(hidden_size=64)).native == "a reason"
    assert calls == [64, 128, 64, 64]


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(probe_module, "probe", lambda _: Verdict())
    assert probed(Olmo2Config()) == Verdict()


def test_small_models_keep_what_makes_a_family() -> None:
    big = Qwen3MoeConfig(
        num_hidden_layers=48, mlp_only_layers=[0, 1], decoder_sparse_step=2, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip
    small = shrink(big)
    assert small.num_hidden_layers == 6  # layers 1, 3, 5 have experts, but 1 is named: 3 and 5
    assert (small.num_experts, small.num_experts_per_tok, small.head_dim) == (8, 4, HEAD_DIM)
    assert small.num_attention_heads // small.num_key_value_heads == 4
    windows = shrink(Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=3))
    assert windows.layer_types == ["full_attention"] * 3 + ["sliding_attention"] * 2
    assert windows.sliding_window < 11  # shorter than the longest sequences
    groups = shrink(Glm4MoeConfig(n_group=8, topk_group=4, n_routed_experts=256))
    assert groups.n_routed_experts % groups.n_group == 0
    sparse = shrink(AutoConfig.for_model("glm_moe_dsa"))
    assert sparse.index_topk < 11  # attention chooses among the tokens of the longest sequences
    assert big.num_hidden_layers == 48


def test_a_model_that_stays_large_is_not_tried() -> None:
    """Fuyu's sizes are in a config of its own: a random model of them would fill the memory."""
    verdict = probe(FuyuConfig())
    assert verdict.train == verdict.native
    told = re.search("widths that cannot be told by name: (.*)", verdict.train)
    # transformers 5.10 gives its own widths, too, and 5.24 none.
    assert told
    assert told[1] in ("9,397,261,728 parameters are left", "there is no hidden_size")


def test_the_callers_randomness_is_untouched() -> None:
    before = torch.get_rng_state()
    probe(Olmo2Config())
    assert torch.equal(before, torch.get_rng_state())


def test_a_family_without_a_classifier_has_no_value_model() -> None:
    check_has_classifier(Qwen3MoeConfig(), "DIR", "roles.critic.path")
    with pytest.raises(
        ConfigError, match=r"^roles.critic.path=DIR: wanted a family with a value model"
    ):
        check_has_classifier(CohereConfig(), "DIR", "roles.critic.path")


ROUTERS = [Qwen3MoeConfig(), MixtralConfig(), OlmoeConfig(), DeepseekV3Config(), GptOssConfig()]


@pytest.mark.parametrize("config", ROUTERS, ids=lambda config: config.model_type)
def test_routers_take_the_experts_that_they_are_told(config: PretrainedConfig) -> None:
    """Softmax before the choice and after it, groups of experts, a bias for the choice alone."""
    check_replay(config, RouterReplay.rollout)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3Config(), "qwen3 has no experts"),
        pytest.param(
            GraniteMoeConfig(),
            "granitemoe: its experts are no separate module",
            marks=pytest.mark.skipif(
                hasattr(modeling_granitemoe, "GraniteMoeExperts"),
                reason="this transformers has one",
            ),
        ),
        (PhimoeConfig(), "phimoe: its router does not choose by topk over the experts"),
    ],
)
def test_replay_is_refused_where_it_would_be_another_choice(
    config: PretrainedConfig, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_replay(config, RouterReplay.trainer)
    assert str(refused.value) == f"trainer.router_replay=trainer: wanted off ({reason})"


def test_weights_that_do_not_follow_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of the router's own choice beside the experts that were forced."""

    def keep_scores(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk:
            return result
        return type(result)((result.values, self._routing.force(self._layer, result.indices)))

    forced = "hybridrl.models.router_replay._ForcedChoice.__torch_function__"
    monkeypatch.setattr(forced, keep_scores)
    with pytest.raises(ConfigError, match="its weights do not follow the experts"):
        check_replay(Qwen3MoeConfig(), RouterReplay.rollout)
