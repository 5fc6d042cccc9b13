"""vLLM's weights under Hugging Face's names, so that the weight switch can write them.

vLLM fuses parameters: q, k and v are rows of one tensor, gate and up of another. The switch gets
views of those rows. If vLLM keeps the tensors unchanged (CUDA), they are written in place, so
captured graphs stay valid. Its CPU backend repacks them after loading and drops the tensors: there
each layer gets new tensors, which vLLM repacks before the next layer arrives.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from hybridrl.layout.weight_switch import Tensors


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows [start, stop) of the parameter `kind` (weight, bias) of a module."""

    module: str
    kind: str
    start: int
    stop: int


class VLLMWeights:
    """The parameters of one rank's vLLM model under Hugging Face's names.

    `shapes` are those of the rank's shards by the layout, padding included. They are None for
    parameters of other stages, which are freed if vLLM has them nevertheless. Raises ValueError if
    vLLM's model has another layout.
    """

    def __init__(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, ...] | None], dtype: torch.dtype
    ) -> None:
        self.model, self.dtype = model, dtype
        self._modules = dict(model.named_modules())
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self._rows = self._find_rows()
        self._full = {
            (rows.module, rows.kind): self._full_shape(rows) for rows in self._rows.values()
        }
        self.repacks = any(
            _tensor(self._modules[module], kind).shape != shape
            for (module, kind), shape in self._full.items()
        )
        """Whether vLLM holds some weight in another shape than the layout's."""
        self._free(shapes.keys() - self._shapes.keys())
        self._check()

    def tensors(self) -> Tensors:
        """Views of all parameters, to be written in place; only if nothing is repacked."""
        assert not self.repacks, "this backend keeps packed weights"
        return self._views(
            {
                (module, kind): _tensor(self._modules[module], kind).data
                for module, kind in self._full
            },
            self._rows,
        )

    @contextmanager
    def layer(self, names: Sequence[str]) -> Iterator[Tensors]:
        """Tensors for the parameters `names` (of which the rank may hold none), to be filled.

        On exit they become vLLM's weights. `names` must include all parameters of a fused tensor.
        """
        held_names = [name for name in names if name in self._rows]
        keys = {(self._rows[name].module, self._rows[name].kind): None for name in held_names}
        tensors = {}
        for module, kind in keys:
            held, shape = _tensor(self._modules[module], kind).data, self._full[module, kind]
            # A bias may have been turned into another format with its weight.
            same = held.shape == shape and held.dtype == self.dtype
            tensors[module, kind] = held if same else held.new_empty(shape, dtype=self.dtype)
        yield self._views(tensors, held_names)
        for (module, kind), tensor in tensors.items():
            if _tensor(self._modules[module], kind).data_ptr() != tensor.data_ptr():
                parameter = nn.Parameter(tensor, requires_grad=False)
                setattr(self._modules[module], kind, parameter)
        for name in self._users(dict.fromkeys(module for module, _ in keys)):
            _process(self._modules[name])

    def process(self) -> None:
        """Let vLLM recompute tensors derived from weights that were written in place."""
        for name in dict.fromkeys(module for module, _ in self._full):
            _process(self._modules[name])

    # Mapping of names to rows

    def _find_rows(self) -> dict[str, _Rows]:
        fused: dict[str, tuple[str, ...]] = getattr(self.model, "packed_modules_mapping", {})
        fused_name = {
            projection: fused_module
            for fused_module, projections in fused.items()
            for projection in projections
        }
        rows_by_name = {}
        for name, shape in self._shapes.items():
            path, _, kind = name.rpartition(".")
            parent, _, child = path.rpartition(".")
            start, module = 0, path
            if path not in self._modules and child in fused_name:
                fused_module = fused_name[child]
                module = f"{parent}.{fused_module}"
                before = fused[fused_module][: list(fused[fused_module]).index(child)]
                start = sum(
                    self._shapes[f"{parent}.{projection}.{kind}"][0] for projection in before
                )
            if module not in self._modules:
                raise ValueError(f"vLLM's {type(self.model).__name__} has no module for {name}")
            rows_by_name[name] = _Rows(module, kind, start, start + shape[0])
        return rows_by_name

    def _full_shape(self, rows_of: _Rows) -> torch.Size:
        sharing = {
            name: other
            for name, other in self._rows.items()
            if (other.module, other.kind) == (rows_of.module, rows_of.kind)
        }
        num_rows = max(other.stop for other in sharing.values())
        return torch.Size([num_rows, *self._shapes[next(iter(sharing))][1:]])

    def _free(self, names: Set[str]) -> None:
        """Free unused parameters: some families (Gemma 3) create both ends on every stage."""
        for name, parameter in self.model.named_parameters():
            if name in names:
                parameter.data = parameter.new_empty(0)

    def _check(self) -> None:
        """Check that every tensor has a source, and the layout's shape unless it is packed."""
        filled = set()
        for (module, kind), shape in self._full.items():
            tensor = _tensor(self._modules[module], kind)
            filled.add(tensor.data_ptr())
            if tensor.numel() and tensor.shape != shape:
                raise ValueError(
                    f"vLLM holds {module}.{kind} as {list(tensor.shape)}; "
                    f"the layout says {list(shape)}"
                )
        for name, parameter in self.model.named_parameters():
            if parameter.numel() and parameter.data_ptr() not in filled:
                raise ValueError(f"vLLM has a parameter {name} that nothing fills")

    def _views(
        self, tensors: Mapping[tuple[str, str], torch.Tensor], names: Sequence[str] | Mapping
    ) -> Tensors:
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
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)
