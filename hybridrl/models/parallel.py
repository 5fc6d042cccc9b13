"""What transformers knows about a model's parallelism, as layouts need it.

transformers ships a tensor-parallel plan with every family (`base_model_tp_plan` of its config).
Here it becomes a dimension per parameter; what the plan leaves out (the embedding) is added.
"""

import copy
from fnmatch import fnmatchcase

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

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

    Raises ValueError for a style that is not translated.
    """
    for pattern, style in (config.base_model_tp_plan or {}).items():
        if fnmatchcase(module, pattern):
            if style not in _WEIGHT_DIM and style != _REPLICATED:
                raise ValueError(
                    f"model type {config.model_type}: {module} has the tensor-parallel style"
                    f" {style}; known are {', '.join([*_WEIGHT_DIM, _REPLICATED])}"
                )
            return style
    return None


def model_parameters(config: PretrainedConfig) -> list[Parameter]:
    """Every parameter once, in the model's order; tied weights under their first name."""
    model = meta_model(config)
    prefix = f"{model.base_model_prefix}."
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = []
    for name, tensor in model.named_parameters():
        inner = name.removeprefix(prefix)
        module, _, kind = inner.rpartition(".")
        layer = int(inner.split(".")[1]) if inner.startswith("layers.") else LAST
        dim = _WEIGHT_DIM.get(tp_style(config, module) or "")
        if kind == "bias" and dim == 1:
            dim = None
        if tensor is model.get_input_embeddings().weight:
            layer, dim = (BOTH if tied else FIRST), 0
        elif tensor is model.get_output_embeddings().weight:
            dim = 0
        units = 0
        if dim is not None and ".self_attn." in inner:
            units = tensor.shape[dim] // head
        found.append(Parameter(name, tuple(tensor.shape), layer, dim, units))
    return found


def check_tp(config: PretrainedConfig, tp: int, share_kv_heads: bool) -> str | None:
    """What keeps the model from `tp` ways of tensor parallelism, None where nothing does.

    With `share_kv_heads` (generation) several ranks may hold the same key and value head.
    """
    if tp == 1:
        return None
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type} trains under FSDP alone ({', '.join(FAMILIES)} can)"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        return f"tp must divide the {heads} attention heads"
    if kv_heads % tp and not (share_kv_heads and tp % kv_heads == 0):
        return f"tp must divide the {kv_heads} key-value heads" + (
            " or be a multiple of them" if share_kv_heads else ""
        )
    if config.intermediate_size % tp:
        return f"tp must divide intermediate_size={config.intermediate_size}"
    return None


def check_pp(config: PretrainedConfig, pp: int, chunks_per_rank: int = 1) -> str | None:
    """What keeps the model from `pp` pipeline stages, None where nothing does."""
    if pp == 1:
        return None
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type} trains under FSDP alone ({', '.join(FAMILIES)} can)"
    if pp * chunks_per_rank > config.num_hidden_layers:
        return f"at most the {config.num_hidden_layers} layers of the model"
    return None
