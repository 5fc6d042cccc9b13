"""Layout `Parameter`s of a model, and the layouts that it takes, from transformers' own plans.

A family's config has a tensor-parallel plan (`base_model_tp_plan`): a style for each module, or for
a separate parameter. Its pipeline plan (`base_model_pp_plan`) is the order of the modules. Here
they become a dimension per parameter, and refusals where an axis is above 1. The embedding, which
the first plan omits, is added.
"""

import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridrl.config import ConfigError, PipelineSchedule, RolloutConfig, TrainLayoutConfig
from hybridrl.config.versions import release_of
from hybridrl.layout.parameters import BOTH, FIRST, LAST, Parameter
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.blocks import layers_name
from hybridrl.models.config_json import EXPERTS, EXPERTS_PER_TOKEN, ep_allowed, num_recurrent
from hybridrl.models.image_text import attach_tower
from hybridrl.models.mixers import precise_names
from hybridrl.models.stages import modules_before

FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Model types that tests prove under every axis: a run starts without probing them."""

SPLIT_TOKENS = (*FAMILIES, "qwen3_moe")
"""Model types that tests prove under sequence parallelism."""

_COLUMNS, _ROWS = 2, 1
_DIM_FROM_END = {
    "colwise": _COLUMNS,
    "colwise_gather_output": _COLUMNS,
    "packed_colwise": _COLUMNS,
    "rowwise": _ROWS,
    "rowwise_split_input": _ROWS,
}
_BLOCKS = {"packed_colwise": 2}
_WHOLE = ("replicated_with_grad_allreduce", "moe_tp_experts")
_SPLIT_EXPERTS = {"moe_tp_experts", "ep_dispatch_experts"}  # of transformers to 5.10, and newer
STYLES = frozenset({*_DIM_FROM_END, *_WHOLE})
"""The styles that training and generation compute."""


def meta_model(
    config: PretrainedConfig, classifier: bool = False, **settings: Any
) -> PreTrainedModel:
    """The causal language model, or sequence classifier, without memory for its weights.

    The `settings` go to transformers' `from_config`, which gets a copy of `config`.
    """
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(copy.deepcopy(config), **settings)
    if not classifier:  # critics and the like have no tower
        attach_tower(model)
    return model


def tp_style(config: PretrainedConfig, name: str) -> str | None:
    """transformers' tensor-parallel style of a module of the base model (`layers.3.mlp.up_proj`).

    Or of a parameter that is none of a linear layer's (`layers.3.mlp.experts.down_proj`).
    """
    for pattern, style in (config.base_model_tp_plan or {}).items():
        if fnmatchcase(name, pattern):
            return str(style)
    return None


def cuts_heads(config: PretrainedConfig) -> bool:
    """Whether tp divides the heads; else every rank attends with all of them."""
    plan = (config.base_model_tp_plan or {}).items()
    return any("att" in pattern and style == "colwise" for pattern, style in plan)


def kv_heads_of_rank(config: PretrainedConfig, tp: int) -> int:
    """Key-value heads that one of `tp` ranks attends with in generation."""
    shape = attention_shape(config)
    return shape.local_kv_heads(tp) if cuts_heads(config) else shape.kv_heads


def head_size(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(size)


def model_parameters(config: PretrainedConfig, classifier: bool = False) -> list[Parameter]:
    """Every parameter once, in the model's order; tied weights under their first name.

    With `classifier` the model is a sequence classifier: a `score` head, replicated on the last
    stage, in place of the vocabulary's. So a tied embedding is on the first stage only.
    """
    # A large model takes 0.1 s, and a search for a mapping asks hundreds of times.
    key = type(config), config.to_json_string(use_diff=False), classifier
    if key not in _PARAMETERS:
        _PARAMETERS[key] = _model_parameters(config, classifier)
    return list(_PARAMETERS[key])


_PARAMETERS: dict[tuple[type, str, bool], list[Parameter]] = {}


def _model_parameters(config: PretrainedConfig, classifier: bool) -> list[Parameter]:
    model = meta_model(config)
    prefix = f"{model.base_model_prefix}."
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied, first = head.weight is embedding, tuple(modules_before(config))
    precise = precise_names(model)
    layers = f"{layers_name(model)}."
    parameters = []
    for name, tensor in model.named_parameters():
        inner = name.removeprefix(prefix)
        if tensor is embedding:
            layer = BOTH if tied else FIRST
        elif inner.startswith(layers):
            layer = int(inner.removeprefix(layers).partition(".")[0])
        else:
            layer = FIRST if inner.split(".")[0] in first else LAST
        if any(tensor is x for x in (embedding, head.weight, head.bias)):
            parameters.append(Parameter(name, tuple(tensor.shape), layer, 0))
        else:
            whole = Parameter(name, tuple(tensor.shape), layer, precise=name in precise)
            parameters.append(_cut(config, whole, inner))
    if not classifier:
        return parameters
    untied = [replace(p, layer=FIRST) if p.layer == BOTH else p for p in parameters]
    score = Parameter("score.weight", (config.num_labels, config.hidden_size), LAST)
    own = [head.bias] if tied else [head.weight, head.bias]
    own_head = {name for name, t in model.named_parameters() if any(t is x for x in own)}
    return [*(p for p in untied if p.name not in own_head), score]


def _cut(config: PretrainedConfig, parameter: Parameter, inner: str) -> Parameter:
    """`parameter`, whose name in the base model is `inner`, with what its style says."""
    style = tp_style(config, inner) or tp_style(config, inner.rpartition(".")[0])
    if inner.rpartition(".")[0].endswith(".experts"):
        parameter = replace(parameter, experts=parameter.shape[0])
    from_end, dims = _DIM_FROM_END.get(style or "", 0), len(parameter.shape)
    if not from_end or (dims == 1 and from_end == _ROWS):  # a row-parallel layer's bias is whole
        return parameter
    dim = max(0, dims - from_end)
    in_heads = "att" in inner and style in ("colwise", "rowwise")
    units = parameter.shape[dim] // head_size(config) if in_heads else 0
    return replace(parameter, tp_dim=dim, units=units, blocks=_BLOCKS.get(style or "", 1))


def check_train_layout(
    config: PretrainedConfig, layout: TrainLayoutConfig, key: str = "trainer.layout"
) -> None:
    """Raise ConfigError, which names `key`, for a training layout that the model does not allow."""
    allowed = _tp_allowed(config, layout.tp, share_kv_heads=False, cut_experts=False)
    _check(f"{key}.tp", layout.tp, allowed)
    if layout.tp > 1 and _leaves_experts_whole(config):
        allowed = f"1 (transformers' plan of {config.model_type} leaves experts whole)"
        raise ConfigError(f"{key}.tp", layout.tp, allowed)
    if layout.tp > 1 and layout.sequence_parallel and config.model_type not in SPLIT_TOKENS:
        allowed = f"false: model type {config.model_type} is none of {', '.join(SPLIT_TOKENS)}"
        raise ConfigError(f"{key}.sequence_parallel", True, allowed)
    _check(f"{key}.pp", layout.pp, _pp_allowed(config, layout.pp, layout.schedule))
    if layout.splits_backward and not computes_halves():
        allowed = "one_f_one_b or interleaved: backward passes in halves need torch 2.13"
        raise ConfigError(f"{key}.schedule", layout.schedule.value, allowed)
    if layout.chunk_layers and sum(layout.chunk_layers) != config.num_hidden_layers:
        allowed = f"numbers whose sum is the model's {config.num_hidden_layers} layers"
        raise ConfigError(f"{key}.chunk_layers", layout.chunk_layers, allowed)
    _check(f"{key}.ep", layout.ep, _ep_allowed(config, layout.ep))


def computes_halves() -> bool:
    """Return whether this torch computes the two halves of a backward pass.

    Until 2.12 `torch.autograd.grad` fails at the nodes that FSDP adds.
    """
    return release_of(torch.__version__) >= (2, 13)


def check_tail_tp(config: PretrainedConfig, rollout: RolloutConfig) -> None:
    """Raise ConfigError for a `rollout.tail_tp` that the model does not allow."""
    layout, tp = rollout.layout, rollout.wide_tp
    if tp != 0 and num_recurrent(config):
        reason = f"model type {config.model_type} has recurrent layers, which tp does not cut"
        raise ConfigError("rollout.tail_tp", rollout.tail_tp, f"off ({reason})")
    if tp and (allowed := _wide_allowed(config, layout.tp, tp // layout.tp, layout.ep)) is not None:
        raise ConfigError("rollout.tail_tp", tp, allowed)


def wide_widths(
    config: PretrainedConfig, rollout: RolloutConfig, num_instances: int
) -> tuple[int, ...]:
    """Numbers of instances that may decode the tail as one: those that the model allows."""
    layout = rollout.layout
    return tuple(
        width
        for width in rollout.widths(num_instances)
        if _wide_allowed(config, layout.tp, width, layout.ep) is None
    )


def wide_ep(config: PretrainedConfig, tp: int, width: int, ep: int) -> int:
    """Expert parallelism of a wide instance: the experts of each rank are shared out whole."""
    return tp * width if num_experts(config) and ep == tp else 1


def _wide_allowed(config: PretrainedConfig, tp: int, width: int, ep: int) -> str | None:
    """The allowed values of `rollout.tail_tp` and the reason; None if `tp` x `width` is allowed."""
    if num_experts(config) and ep != tp:
        return f"off, or rollout.layout.ep={tp}: parts of an expert are no views"
    experts = num_experts(config)
    if experts % (tp * width):
        return f"a number that divides the {experts} experts"
    for parameter in model_parameters(config):
        if parameter.blocks > 1 and not parameter.experts:
            return f"off: {parameter.name} has {parameter.blocks} blocks, whose parts are no view"
    return _tp_allowed(config, tp * width, share_kv_heads=True, cut_experts=False, wider_than=tp)


def check_gen_layout(config: PretrainedConfig, pp: int, tp: int, ep: int = 1) -> None:
    """Raise ConfigError for a generation layout that the model does not allow.

    Several ranks may hold the same key and value head.
    """
    allowed = _tp_allowed(config, tp, share_kv_heads=True, cut_experts=ep == 1)
    _check("rollout.layout.tp", tp, allowed)
    _check("rollout.layout.ep", ep, _ep_allowed(config, ep))
    _check("rollout.layout.pp", pp, _pp_allowed(config, pp, PipelineSchedule.one_f_one_b))


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer; 0 for a dense model."""
    return next((int(n) for name in EXPERTS if (n := getattr(config, name, None))), 0)


def experts_per_token(config: PretrainedConfig) -> int:
    """Experts that a token goes to, in the layer where these are most; 0 for a dense model."""
    chosen = next((n for name in EXPERTS_PER_TOKEN if (n := getattr(config, name, None))), 0)
    return max(chosen) if isinstance(chosen, list) else int(chosen)


def _leaves_experts_whole(config: PretrainedConfig) -> bool:
    plan = config.base_model_tp_plan or {}
    return num_experts(config) > 0 and "moe_tp_experts" not in plan.values()


def _ep_allowed(config: PretrainedConfig, ep: int) -> str | None:
    """The allowed values and the reason; None if `ep` is allowed."""
    of_experts = (getattr(config, "base_model_ep_plan", None) or {}).values()
    if ep > 1 and _leaves_experts_whole(config) and not _SPLIT_EXPERTS & {*of_experts}:
        return f"1 (transformers has no plan for the experts of model type {config.model_type})"
    return ep_allowed(config.model_type, num_experts(config), ep)


def _check(key: str, value: int, allowed: str | None) -> None:
    if allowed is not None:
        raise ConfigError(key, value, allowed)


def _tp_allowed(
    config: PretrainedConfig, tp: int, share_kv_heads: bool, cut_experts: bool, wider_than: int = 0
) -> str | None:
    """The allowed values and the reason; None if `tp` is allowed.

    With `wider_than` those that are several times as much.
    """
    if tp == 1:
        return None
    if num_recurrent(config):
        return f"1 (model type {config.model_type} has recurrent layers, which tp does not cut)"
    plan = config.base_model_tp_plan or {}
    if not plan:
        return f"1 (transformers has no tensor-parallel plan for model type {config.model_type})"
    for pattern, style in plan.items():
        if style not in STYLES:
            computed = ", ".join(sorted(STYLES))
            return f"1 ({config.model_type}: {pattern} is {style}, and computed are {computed})"
    widths = _widths(config, cut_experts)
    reason = _tp_problem(config, tp, share_kv_heads, widths)
    if reason is None:
        return None
    heads = range(1, config.num_attention_heads + 1)
    choices = [n for n in heads if not _tp_problem(config, n, share_kv_heads, widths)]
    if wider_than:
        wider = [str(n) for n in choices if n > wider_than and n % wider_than == 0]
        return f"{', '.join(['off', *wider])} ({reason})"
    return f"one of {', '.join(map(str, choices))} ({reason})"


def _tp_problem(
    config: PretrainedConfig, tp: int, share_kv_heads: bool, widths: dict[str, int]
) -> str | None:
    heads, kv_heads = config.num_attention_heads, attention_shape(config).kv_heads
    if heads % tp and cuts_heads(config):
        return f"it must divide the {heads} attention heads"
    shared = share_kv_heads and tp % kv_heads == 0
    if kv_heads % tp and cuts_heads(config) and not shared:
        shared_too = " or be a multiple of them" if share_kv_heads else ""
        return f"it must divide the {kv_heads} key-value heads{shared_too}"
    for name, width in widths.items():
        if width % tp:
            return f"it must divide {name}={width}"
    return None


def _widths(config: PretrainedConfig, cut_experts: bool) -> dict[str, int]:
    """What tp divides besides heads: each width under its key in the config, else its module.

    An expert's width is among them if `cut_experts`.
    """
    keys = {v: k for k, v in config.to_dict().items() if "intermediate" in k and isinstance(v, int)}
    widths: dict[str, int] = {}
    for parameter in model_parameters(config):
        of_layer = parameter.layer >= 0 and (cut_experts or not parameter.experts)
        if of_layer and parameter.tp_dim is not None and not parameter.units:
            width = parameter.shape[parameter.tp_dim] // parameter.blocks
            module = parameter.name.removesuffix(".weight").rpartition(".")[2]
            widths.setdefault(keys.get(width, f"the width of {module}"), width)
    return widths


def _pp_allowed(config: PretrainedConfig, pp: int, schedule: PipelineSchedule) -> str | None:
    if pp == 1:
        return None
    if not config.base_model_pp_plan:
        return f"1 (transformers has no pipeline plan for model type {config.model_type})"
    if getattr(config, "embedding_multiplier", 1) not in (None, 1):
        return f"1 ({config.model_type} would scale what each stage gets by embedding_multiplier)"
    layers, chunks = config.num_hidden_layers, schedule.chunks_per_rank
    if pp * chunks > layers:
        per_rank = f", {chunks} chunks a rank" if chunks > 1 else ""
        return f"at most {max(1, layers // chunks)} ({layers} layers{per_rank})"
    return None
