"""Where vLLM's model holds the parameters that Hugging Face names.

vLLM fuses parameters: q, k and v are rows of one tensor, gate and up of another. The experts of a
layer are two tensors of one module (`RoutedExperts`), and the block around it may have
another name (Mixtral's). Other names differ as the model's own mapper for checkpoints says.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from hybridrl.models.image_text import whole_name

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What vLLM fuses where a model does not say it itself (`packed_modules_mapping`)."""

EXPERTS = {
    "gate_up_proj": "w13_weight",
    "down_proj": "w2_weight",
}
"""vLLM's names of the tensors of a layer's experts; gate is before up in both."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of the parameter `kind` (weight, bias, w13_weight) of a module."""

    module: str
    kind: str
    start: int
    stop: int


class VLLMNames:
    """The rows of vLLM's parameters that Hugging Face's parameters are.

    `shapes` are those of the rank's shards, by Hugging Face's names. Raises ValueError for a
    parameter that vLLM's model does not have.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes
        self._modules = dict(model.named_modules())
        self._fused = {**FUSED, **getattr(model, "packed_modules_mapping", {})}
        self._fused_name = {
            projection: fused_module
            for fused_module, projections in self._fused.items()
            for projection in projections
        }
        self._experts = {
            _layer(name): name
            for name, module in self._modules.items()
            if isinstance(module, RoutedExperts)
        }

    def rows(self, name: str) -> Rows:
        """The rows of the parameter `name`."""
        for candidate in self._candidates(name):
            path, _, kind = candidate.rpartition(".")
            if _is_experts(path) and _layer(path) in self._experts:
                kind = EXPERTS.get(kind, kind)
                return self._whole(name, self._experts[_layer(path)], kind)
            if path in self._modules:
                return self._whole(name, path, kind)
            parent, _, child = path.rpartition(".")
            fused_module = self._fused_name.get(child, "")
            if f"{parent}.{fused_module}" in self._modules:
                return self._among(name, f"{parent}.{fused_module}", kind, child)
        raise ValueError(f"vLLM's {type(self._model).__name__} has no module for {name}")

    def constant(self, name: str) -> tuple[str, str] | None:
        """The module and parameter that hold a buffer of Hugging Face's; None if none does."""
        for candidate in self._candidates(name):
            path, _, kind = candidate.rpartition(".")
            if path in self._modules and hasattr(self._modules[path], kind):
                return path, kind
        return None

    def _whole(self, name: str, module: str, kind: str) -> Rows:
        return Rows(module, kind, 0, self._shapes[name][0])

    def _among(self, name: str, module: str, kind: str, child: str) -> Rows:
        """The rows of one of the projections that are fused in `module`."""
        projections = list(self._fused[module.rpartition(".")[2]])
        if f".{child}." not in name:
            raise ValueError(f"vLLM renames {name} to a part of {module}: its siblings are unknown")
        siblings = [
            name.replace(f".{child}.", f".{projection}.")
            for projection in projections[: projections.index(child)]
        ]
        start = sum(self._shapes[sibling][0] for sibling in siblings)
        return Rows(module, kind, start, start + self._shapes[name][0])

    def _candidates(self, name: str) -> list[str]:
        """The names it may have in vLLM's model: its own, and what the model's mapper makes of it.

        The mapper of a model for images knows the names of the whole. In all of them the block
        around experts has vLLM's name.
        """
        name = name.replace(".gate.moe_statics.", ".gate.")  # Ernie's routing bias
        names = [name]
        for model in (self._model, getattr(self._model, "model", None)):
            mapper = getattr(model, "hf_to_vllm_mapper", None)
            if mapper is not None:
                names += mapper.get_rename_mapper().apply_list([name, whole_name(name)])
                break
        return [self._in_block(each) for each in names]

    def _in_block(self, name: str) -> str:
        """The name with vLLM's name of the block around experts, such as `block_sparse_moe`."""
        layer = re.match(r"(.*\.layers\.\d+)\.mlp\.", name)
        if layer and _layer(name) in self._experts and f"{layer[1]}.mlp" not in self._modules:
            block = self._experts[_layer(name)].partition(".experts")[0]
            return f"{block}.{name[layer.end() :]}"
        return name


def _layer(name: str) -> str:
    """The prefix of a parameter's or module's decoder layer; empty outside of layers."""
    layer = re.match(r"(.*\.)?layers\.\d+", name)
    return layer[0] if layer else ""


def _is_experts(path: str) -> bool:
    return path.rpartition(".")[2] == "experts"
