"""Where vLLM holds a rank's part of the weights, so that the weight switch can write it there.

vLLM fuses what the layout room knows under Hugging Face's names: q, k and v are rows of one tensor,
gate and up of another. The switch gets views of those rows. Where vLLM keeps the tensors as they
are (CUDA), they are written in place, so captured graphs stay valid. Where it repacks them after
loading (its CPU backend keeps a packed copy and drops the tensor), each layer gets new tensors,
which vLLM repacks as it does at its start, before the next layer comes.
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
class _Place:
    """Rows [start, stop) of the parameter `kind` (weight, bias) of a module."""

    module: str
    kind: str
    start: int
    stop: int


class VLLMWeights:
    """The parameters of one rank's vLLM model under Hugging Face's names.

    `shapes` are those of the rank's own parts by the layout, padding included; None for what lies
    on other stages alone, which is freed where vLLM has it all the same. Raises ValueError where
    vLLM's model is laid out in another way.
    """

    def __init__(
        self, model: nn.Module, shapes: Mapping[str, tuple[int, ...] | None], dtype: torch.dtype
    ) -> None:
        self.model, self.dtype = model, dtype
        self._modules = dict(model.named_modules())
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        self._places = self._find()
        self._full = {
            (place.module, place.kind): self._full_shape(place) for place in self._places.values()
        }
        self.repacks = any(
            _tensor(self._modules[module], kind).shape != shape
            for (module, kind), shape in self._full.items()
        )
        """Whether vLLM holds some weight in another form than the layout's."""
        self._free(shapes.keys() - self._shapes.keys())
        self._check()

    def tensors(self) -> Tensors:
        """Views of all parameters, to be written in place; only where nothing is repacked."""
        assert not self.repacks, "this backend keeps packed weights"
        return self._views(
            {
                (module, kind): _tensor(self._modules[module], kind).data
                for module, kind in self._full
            },
            self._places,
        )

    @contextmanager
    def layer(self, names: Sequence[str]) -> Iterator[Tensors]:
        """Tensors for the parameters `names` (of which the rank may hold none), to be filled.

        On leaving they become vLLM's weights. `names` must have all parts of a fused tensor.
        """
        mine = [name for name in names if name in self._places]
        keys = {(self._places[name].module, self._places[name].kind): None for name in mine}
        tensors = {}
        for module, kind in keys:
            held, shape = _tensor(self._modules[module], kind).data, self._full[module, kind]
            # A bias may have been turned into another format with its weight.
            same = held.shape == shape and held.dtype == self.dtype
            tensors[module, kind] = held if same else held.new_empty(shape, dtype=self.dtype)
        yield self._views(tensors, mine)
        for (module, kind), tensor in tensors.items():
            if _tensor(self._modules[module], kind).data_ptr() != tensor.data_ptr():
                parameter = nn.Parameter(tensor, requires_grad=False)
                setattr(self._modules[module], kind, parameter)
        for name in self._users(dict.fromkeys(module for module, _ in keys)):
            _process(self._modules[name])

    def process(self) -> None:
        """Let vLLM derive anew what it derives from weights that were written in place."""
        for name in dict.fromkeys(module for module, _ in self._full):
            _process(self._modules[name])

    # Where what lies

    def _find(self) -> dict[str, _Place]:
        fused: dict[str, tuple[str, ...]] = getattr(self.model, "packed_modules_mapping", {})
        whole_of = {part: whole for whole, parts in fused.items() for part in parts}
        places = {}
        for name, shape in self._shapes.items():
            path, _, kind = name.rpartition(".")
            parent, _, child = path.rpartition(".")
            start, module = 0, path
            if path not in self._modules and child in whole_of:
                whole = whole_of[child]
                module = f"{parent}.{whole}"
                before = fused[whole][: list(fused[whole]).index(child)]
                start = sum(self._shapes[f"{parent}.{part}.{kind}"][0] for part in before)
            if module not in self._modules:
                raise ValueError(f"vLLM's {type(self.model).__name__} has no place for {name}")
            places[name] = _Place(module, kind, start, start + shape[0])
        return places

    def _full_shape(self, place: _Place) -> torch.Size:
        parts = {
            name: other
            for name, other in self._places.items()
            if (other.module, other.kind) == (place.module, place.kind)
        }
        rows = max(other.stop for other in parts.values())
        return torch.Size([rows, *self._shapes[next(iter(parts))][1:]])

    def _free(self, names: Set[str]) -> None:
        """Some families (Gemma 3) make the embedding and the last norm on every stage."""
        for name, parameter in self.model.named_parameters():
            if name in names:
                parameter.data = parameter.new_empty(0)

    def _check(self) -> None:
        """What vLLM holds must be as the layout says, or packed, and must have a source."""
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
            place = self._places[name]
            views[name] = tensors[place.module, place.kind][place.start : place.stop]
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
    """What vLLM does with a module's weights after loading: nothing, or packing them."""
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)
