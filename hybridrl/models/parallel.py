"""Layout `Parameter`s of a model, from the tensor-parallel plan that transformers ships.

Every family has such a plan (`base_model_tp_plan` of its config). Here it becomes a dimension per
parameter; the embedding, which the plan omits, is added.
"""

import copy
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hybridrl.config import ConfigError, PipelineSchedule, TrainLayoutConfig
from hybridrl.layout.parameters import BOTH, FIRST, LAST, Parameter

FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Model types that take tensor and pipeline parallelism."""

_WEIGHT_DIM = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1}
_REPLICATED = "replicated_with_grad_allreduce"


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def tp_style(config: PretrainedConfig, module: str) -> str | None:
    """transformers' tensor-parallel style of a module of the base model (`layers.3.mlp.up_proj`).

    Raises ValueError for a style that is not translated, in a family that takes tp.
    """
    for pattern, style in (config.base_model_tp_plan or {}).items():
        if fnmatchcase(module, pattern):
            known = style in _WEIGHT_DIM or style == _REPLICATED
            if not known and config.model_type in FAMILIES:
                raise ValueError(
                    f"model type {config.model_type}: {module} has the tensor-parallel style"
                    f" {style}; known are {', '.join([*_WEIGHT_DIM, _REPLICATED])}"
                )
            return style
    return None


def head_size(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def model_parameters(config: PretrainedConfig, classifier: bool = False) -> list[Parameter]:
    """Every parameter once, in the model's order; tied weights under their first name.

    With `classifier` the model is a sequence classifier: a `score` head, replicated on the last
    stage, in place of the vocabulary's. So a tied embedding is on the first stage only.
    """
    model = meta_model(config)
    prefix = f"{model.base_model_prefix}."
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    head, output_bias = head_size(config), model.get_output_embeddings().bias
    parameters = []
    for name, tensor in model.named_parameters():
        inner = name.removeprefix(prefix)
        module, _, leaf = inner.rpartition(".")
        layer = int(inner.split(".")[1]) if inner.startswith("layers.") else LAST
        dim = _WEIGHT_DIM.get(tp_style(config, module) or "")
        if leaf == "bias" and dim == 1:
            dim = None
        if tensor is model.get_input_embeddings().weight:
            layer, dim = (BOTH if tied else FIRST), 0
        elif tensor is model.get_output_embeddings().weight or tensor is output_bias:
            dim = 0
        units = 0
        if dim is not None and ".self_attn." in inner:
            units = tensor.shape[dim] // head
        parameters.append(Parameter(name, tuple(tensor.shape), layer, dim, units))
    if not classifier:
        return parameters
    untied = [replace(p, layer=FIRST) if p.layer == BOTH else p for p in parameters]
    score = Parameter("score.weight", (config.num_labels, config.hidden_size), LAST)
    return [*(p for p in untied if not p.name.startswith("lm_head.")), score]


def check_train_layout(
    config: PretrainedConfig, layout: TrainLayoutConfig, key: str = "trainer.layout"
) -> None:
    """Raise ConfigError, which names `key`, for a training layout that the model does not allow."""
    _check(f"{key}.tp", layout.tp, _tp_allowed(config, layout.tp, share_kv_heads=False))
    _check(f"{key}.pp", layout.pp, _pp_allowed(config, layout.pp, layout.schedule))


def check_gen_layout(config: PretrainedConfig, pp: int, tp: int) -> None:
    """Raise ConfigError for a generation layout that the model does not allow.

    Several ranks may hold the same key and value head.
    """
    _check("rollout.layout.tp", tp, _tp_allowed(config, tp, share_kv_heads=True))
    _check("rollout.layout.pp", pp, _pp_allowed(config, pp, PipelineSchedule.one_f_one_b))


def _check(key: str, value: int, allowed: str | None) -> None:
    if allowed is not None:
        raise ConfigError(key, value, allowed)


def _tp_allowed(config: PretrainedConfig, tp: int, share_kv_heads: bool) -> str | None:
    """The allowed values and the reason; None if `tp` is allowed."""
    if tp > 1 and config.model_type not in FAMILIES:
        return _fsdp_alone(config)
    reason = _tp_problem(config, tp, share_kv_heads)
    if reason is None:
        return None
    heads = range(1, config.num_attention_heads + 1)
    choices = [str(n) for n in heads if _tp_problem(config, n, share_kv_heads) is None]
    return f"one of {', '.join(choices)} ({reason})"


def _tp_problem(config: PretrainedConfig, tp: int, share_kv_heads: bool) -> str | None:
    if tp == 1:
        return None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        return f"it must divide the {heads} attention heads"
    if kv_heads % tp and not (share_kv_heads and tp % kv_heads == 0):
        shared = " or be a multiple of them" if share_kv_heads else ""
        return f"it must divide the {kv_heads} key-value heads{shared}"
    if config.intermediate_size % tp:
        return f"it must divide intermediate_size={config.intermediate_size}"
    return None


def _pp_allowed(config: PretrainedConfig, pp: int, schedule: PipelineSchedule) -> str | None:
    if pp == 1:
        return None
    if config.model_type not in FAMILIES:
        return _fsdp_alone(config)
    layers, chunks = config.num_hidden_layers, schedule.chunks_per_rank
    if pp * chunks > layers:
        per_rank = f", {chunks} chunks a rank" if chunks > 1 else ""
        return f"at most {max(1, layers // chunks)} ({layers} layers{per_rank})"
    return None


def _fsdp_alone(config: PretrainedConfig) -> str:
    return f"1 (model type {config.model_type} runs under FSDP alone, unlike {', '.join(FAMILIES)})"
