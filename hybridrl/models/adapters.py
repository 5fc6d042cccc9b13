"""Low-rank adapters (LoRA) in a Hugging Face model: created by peft, named and laid out here.

A layer `q_proj` with weight W [out, in] gets `lora_A` [rank, in] and `lora_B` [out, rank] and
computes W x + scaling B A x (Hu et al., arXiv 2106.09685, section 4.1). B begins at zero, so the
model begins as it was.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config import ConfigError, LoraConfig
from hybridrl.config.lora import ALL_LINEAR
from hybridrl.layout.parameters import Parameter
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.parallel import meta_model, num_experts
from hybridrl.models.stages import ADAPTER, head_name, plain_name


def add_adapters(
    model: PreTrainedModel,
    lora: LoraConfig,
    seed: int,
    frozen: torch.dtype,
    device: torch.device | None = None,
) -> Any:
    """Add adapters to `model` and freeze its weights, converted to the dtype `frozen`.

    Adapters are where the weights are, or on `device`. Returns peft's config of the adapters.

    The head of a sequence classifier is trained in full. The same `seed` gives the same adapters
    on all ranks; the caller's random state is unchanged. Raises
    ValueError for a layer that the model does not have, see `check_lora`.
    """
    from peft import inject_adapter_in_model

    config = _peft_config(model, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with nullcontext() if device is None else _as_if_on(device, model):
            inject_adapter_in_model(config, model, ADAPTER)
    if head_name(model) == "score":
        model.score.requires_grad_(True)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(frozen)
    return config


@contextmanager
def _as_if_on(device: torch.device, model: PreTrainedModel) -> Iterator[None]:
    """Within, a number on `device` stands for each weight: peft puts adapters where weights are.

    A weight that is frozen within stays so.
    """
    modules = list(model.modules())
    weights = [(m, name, p) for m in modules for name, p in m.named_parameters(recurse=False)]
    for module, name, weight in weights:
        number = torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape)
        module._parameters[name] = nn.Parameter(number, weight.requires_grad)
    yield
    for module, name, weight in weights:
        stand_in = module._parameters[name]
        assert stand_in is not None
        weight.requires_grad_(stand_in.requires_grad)
        module._parameters[name] = weight


def _peft_config(model: PreTrainedModel, lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig
    from peft import TaskType

    classifier = head_name(model) == "score"
    return PeftLoraConfig(
        task_type=TaskType.SEQ_CLS if classifier else TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=target_modules(model, lora),
        base_model_name_or_path=model.name_or_path,
    )


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Names, within a block, of the layers with adapters."""
    known = _linear_layers(model)
    if ALL_LINEAR in lora.target_modules:
        return known
    unknown = sorted(set(lora.target_modules) - set(known))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}; linear layers of a block: {', '.join(known)}")
    return sorted(set(lora.target_modules))


def check_lora(config: PretrainedConfig, lora: LoraConfig, key: str) -> None:
    """Raise ConfigError for adapters of layers that the model does not have; `key` names them.

    Also where peft would put some on a mixture's experts, which are no linear layers.
    """
    if not lora.rank:
        return
    if config.model_type == "jamba":  # transformers 5.24 reads weights of layers without a call
        raise ConfigError(f"{key}.rank", lora.rank, "0 (jamba's mixers pass adapters by)")
    model = meta_model(config)
    known = _linear_layers(model)
    if not known:  # GPT-2's are transformers' Conv1D
        allowed = f"0 (adapters are for torch.nn.Linear, of which {config.model_type} has none)"
        raise ConfigError(f"{key}.rank", lora.rank, allowed)
    try:
        wanted = target_modules(model, lora)
    except ValueError as error:
        value, _, layers = str(error).partition("; ")
        raise ConfigError(f"{key}.target_modules", value, f"{ALL_LINEAR}, or {layers}") from None
    adapted = _adapted_layers(model) if num_experts(config) else {*known}
    if not adapted.issuperset(wanted):
        others = ", ".join(sorted({*known} - adapted))
        allowed = f"{', '.join(sorted(adapted))} (peft puts {others} on the experts)"
        raise ConfigError(f"{key}.target_modules", ", ".join(lora.target_modules), allowed)


def _adapted_layers(model: PreTrainedModel) -> set[str]:
    """The linear layers that get adapters, of all that `model` has; it gets them.

    Of mixtures peft puts some on the experts, which were linear layers in transformers 4.
    """
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of layers that have no experts
        inject_adapter_in_model(_peft_config(model, LoraConfig(rank=1)), model, ADAPTER)
    return {
        name.rpartition(".")[2]
        for name, module in decoder_layers(model).named_modules()
        if hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)
    }


def _linear_layers(model: PreTrainedModel) -> list[str]:
    names = {
        name.rpartition(".")[2]
        for name, module in decoder_layers(model).named_modules()
        if isinstance(module, nn.Linear)
    }
    return sorted(names)


def pair_of(weight: str) -> tuple[str, str]:
    """The names that A and B of a weight `....q_proj.weight` would have."""
    module = weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_parameters(model: PreTrainedModel, parameters: Sequence[Parameter]) -> list[Parameter]:
    """The adapters in `model` as `Parameter`s of a layout; `parameters` are the base model's.

    Tensor parallelism cuts an adapter where it cuts the weight: B along the outputs, A along the
    inputs. So a rank's shard of B A is B's shard times A's, and one of the two is replicated.
    """
    shapes = {plain_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    adapters = []
    for parameter in parameters:
        for dim, name in zip((1, 0), pair_of(parameter.name), strict=True):
            if name not in shapes:
                continue
            cut = parameter.tp_dim == dim
            adapters.append(
                replace(
                    parameter,
                    name=name,
                    shape=shapes[name],
                    tp_dim=dim if cut else None,
                    units=parameter.units if cut else 0,
                )
            )
    return adapters


@contextmanager
def enabled_dropout(
    modules: Sequence[nn.Dropout], device: torch.device, version: int
) -> Iterator[None]:
    """Enable `modules` in an update, seeded by `version` and rank: a resumed run repeats it."""
    if not any(module.p for module in modules):
        yield
        return
    # Of this device alone: by default torch saves the states of every GPU that it sees.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(version * dist.get_world_size() + dist.get_rank())
        for module in modules:
            module.train()
        yield
        for module in modules:
            module.eval()
