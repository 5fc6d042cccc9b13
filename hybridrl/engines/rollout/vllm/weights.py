"""vLLM's weights under Hugging Face's names, so that the weight switch can write them.

The switch gets views of the rows that a parameter has in vLLM's tensors (`names.py`). If vLLM keeps
the tensors unchanged (CUDA), they are written in place, so captured graphs stay valid. Its CPU
backend repacks them after loading and drops the tensors: there each layer gets new tensors, which
vLLM repacks before the next layer arrives. It packs experts into tensors of the same shape, which
are written in place, and packed again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from hybridrl.engines.rollout.vllm.names import VLLMNames
from hybridrl.layout.weight_switch import Tensors

Key = tuple[str, str]
"""A module of vLLM's model and its parameter: `weight`, `bias`, `w13_weight`."""


class VLLMWeights:
    """The parameters of one rank's vLLM model under Hugging Face's names.

    `shapes` are those of the rank's shards by the layout, padding included. They are None for
    parameters of other stages, which are freed if vLLM has them nevertheless. `constants` are
    tensors that no switch brings, by name: the routing bias of a checkpoint. Raises ValueError if
    vLLM's model has another layout.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...] | None],
        dtype: torch.dtype,
        constants: Tensors | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        self._modules = dict(model.named_modules())
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        names = VLLMNames(model, self._shapes)
        self._rows = {name: names.rows(name) for name in self._shapes}
        self._full = {
            (rows.module, rows.kind): self._full_shape((rows.module, rows.kind))
            for rows in self._rows.values()
        }
        self._dtypes = {key: self._dtype_of(key) for key in self._full}
        self._staged: dict[Key, torch.Tensor] = {}
        self.repacks = any(self._held(key).shape != shape for key, shape in self._full.items())
        """Whether vLLM holds some weight in another shape than the layout's."""
        self._free(shapes.keys() - self._shapes.keys())
        self._constants = {
            key: tensor.cpu()
            for name, tensor in (constants or {}).items()
            if (key := names.constant(name)) is not None
        }
        self._check()

    def tensors(self) -> Tensors:
        """Views of all parameters, to be written in place; only if nothing is repacked.

        A parameter in another format has a tensor beside it, which `process` casts.
        """
        assert not self.repacks, "this backend keeps packed weights"
        return self._views({key: self._incoming(key) for key in self._full}, self._rows)

    @contextmanager
    def layer(self, names: Sequence[str]) -> Iterator[Tensors]:
        """Tensors for the parameters `names` (of which the rank may hold none), to be filled.

        On exit they become vLLM's weights. `names` must include all parameters of a fused tensor.
        """
        held_names = [name for name in names if name in self._rows]
        keys = {(self._rows[name].module, self._rows[name].kind): None for name in held_names}
        tensors = {key: self._incoming(key) for key in keys}
        yield self._views(tensors, held_names)
        self._finish(tensors)

    def process(self) -> None:
        """Let vLLM recompute tensors derived from weights that were written in place."""
        self._finish({key: self._staged.get(key, self._held(key)) for key in self._full})
        self._staged = {}

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Write what vLLM forgets while it sleeps, and no switch brings.

        These are the constants, and the zeros of DeepStack's buffers, which every pass adds.
        """
        for (module, kind), tensor in self._constants.items():
            held = _tensor(self._modules[module], kind).data
            held.copy_(tensor.view(held.shape))
        for features in getattr(self.model, "deepstack_input_embeds", ()):
            features.zero_()

    # Tensors that are filled, and become weights

    def _incoming(self, key: Key) -> torch.Tensor:
        """A tensor of the layout's shape in the switch's format: the held one where it has both."""
        held, shape = self._held(key), self._full[key]
        if held.shape == shape and held.dtype == self.dtype:
            return held
        # A bias may have been turned into another format with its weight.
        tensor = held.new_empty(shape, dtype=self.dtype)
        if held.shape == shape and not self.repacks:
            self._staged[key] = tensor
        return tensor

    def _finish(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        for (module, kind), tensor in tensors.items():
            held, tensor = self._held((module, kind)), tensor.to(self._dtypes[module, kind])
            if held.shape == tensor.shape and held.dtype == tensor.dtype:
                if held.data_ptr() != tensor.data_ptr():
                    held.copy_(tensor)
            else:
                parameter = nn.Parameter(tensor, requires_grad=False)
                setattr(self._modules[module], kind, parameter)
        for name in self._users(dict.fromkeys(module for module, _ in tensors)):
            _process(self._modules[name])

    def _held(self, key: Key) -> torch.Tensor:
        """What vLLM has; one that is a row of the layout's in the layout's shape."""
        module, kind = key
        tensor, shape = _tensor(self._modules[module], kind).data, self._full.get(key)
        return tensor.view(shape) if shape == (1, *tensor.shape) else tensor

    def _dtype_of(self, key: Key) -> torch.dtype:
        """The format that vLLM's module has loaded: some routers are in float32."""
        module = self._modules[key[0]]
        if getattr(module, "quant_method", None) is None or key[1] not in ("weight", "bias"):
            return self._held(key).dtype
        dtype: torch.dtype = getattr(module, "params_dtype", self.dtype)
        return dtype

    def _full_shape(self, key: Key) -> torch.Size:
        sharing = {
            name: rows for name, rows in self._rows.items() if (rows.module, rows.kind) == key
        }
        num_rows = max(rows.stop for rows in sharing.values())
        return torch.Size([num_rows, *self._shapes[next(iter(sharing))][1:]])

    def _free(self, names: Set[str]) -> None:
        """Free unused parameters: some families (Gemma 3) create both ends on every stage."""
        for name, parameter in self.model.named_parameters():
            if name in names:
                parameter.data = parameter.new_empty(0)

    def _check(self) -> None:
        """Check that every tensor has a source, and the layout's shape unless it is packed."""
        filled = set()
        for key in (*self._full, *self._constants):
            tensor = _tensor(self._modules[key[0]], key[1])
            filled.add(tensor.data_ptr())
            if key not in self._full:
                continue
            held, shape = self._loaded_shape(key), self._full[key]
            if tensor.numel() and held != shape:
                module, kind = key
                raise ValueError(
                    f"vLLM holds {module}.{kind} as {list(held)}; the layout says {list(shape)}"
                )
        for name, parameter in self.model.named_parameters():
            if parameter.numel() and parameter.data_ptr() not in filled:
                raise ValueError(f"vLLM has a parameter {name} that nothing fills")

    def _loaded_shape(self, key: Key) -> torch.Size:
        """The shape that vLLM loads; its CPU backend pads the width of experts afterwards."""
        module, held = self._modules[key[0]], self._held(key)
        if not isinstance(module, RoutedExperts):
            return held.shape
        width = module.intermediate_size_per_partition
        widths = {"w13_weight": (1, 2 * width), "w2_weight": (2, width)}
        shape = list(held.shape)
        if key[1] in widths:
            dim, size = widths[key[1]]
            shape[dim] = size
        return torch.Size(shape)

    def _views(
        self, tensors: Mapping[Key, torch.Tensor], names: Iterable[str]
    ) -> dict[str, torch.Tensor]:
        views = {}
        for name in names:
            rows = self._rows[name]
            views[name] = tensors[rows.module, rows.kind][rows.start : rows.stop]
        return views

    def _users(self, written: Mapping[str, None]) -> list[str]:
        """The modules `written` and those that share a tensor with them (a tied head)."""
        shared = defaultdict(list)
        for name, module in self._modules.items():
            if isinstance(module, VocabParallelEmbedding):
                shared[_tensor(module, "weight").data_ptr()].append(name)
        users = dict(written)
        for name in written:
            module = self._modules[name]
            if isinstance(module, VocabParallelEmbedding):
                users |= dict.fromkeys(shared[_tensor(module, "weight").data_ptr()])
        return list(users)


def _tensor(module: nn.Module, kind: str) -> torch.Tensor:
    tensor = getattr(module, kind)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _process(module: nn.Module) -> None:
    """Run vLLM's processing of a module's weights after loading: nothing, or packing."""
    method: Any = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)
    if isinstance(module, RoutedExperts):
        # The method has its kernel pack them at the start alone.
        method.moe_kernel.fused_experts.process_weights_after_loading(module)
