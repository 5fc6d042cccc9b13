"""Recurrent layers over packed rows and over cached states, whatever family they are of.

A mixer (Gated DeltaNet, Mamba, a short convolution) hands a state from token to token. transformers
keeps the sequences of a packed row apart in some GPU kernels alone; elsewhere the state leaks from
one to the next without an error. Here the mixer keeps its weights and its code, and gets batches
[sequences, tokens, features] in place of a row:

- in training each run of equal lengths is a batch, and runs of like lengths are one, padded on the
  right. What is causal sees no padding behind it;
- in generation the rows of a pass are batches of equal lengths, with states from a `StateCache`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from types import NoneType
from typing import Any, get_args

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.config_json import layers_with_keys, num_recurrent
from hybridrl.models.mixers import CACHE_KEYWORDS, norms_of, recurrent_modules
from hybridrl.models.packed_attention import Packing
from hybridrl.models.parallel import meta_model
from hybridrl.models.shrink import shrink
from hybridrl.models.states import LayerStates, StateBatch, StateShapes, state_bytes

_CACHES = (Cache, NoneType)
_WASTE = 1.5  # of the tokens of a padded batch, over those of its sequences


class Mixer:
    """Takes the place of a mixer's forward: see the module. `index` is its number in the model.

    The decoder layer's keywords say what it computes: `packing`, the description of a packed row,
    or `paged`, a pass of the native engine. Without both it is transformers' own forward.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self.index, self.module = index, module
        self._forward = type(module).forward
        names = inspect.signature(self._forward).parameters
        self._keyword = next(name for name in CACHE_KEYWORDS if name in names)
        kinds = get_args(names[self._keyword].annotation)
        self._own_caches = [kind.__name__ for kind in kinds if not issubclass(kind, _CACHES)]
        self._keywords: Mapping[str, Any] = {}
        rule = getattr(module, "chunk_gated_delta_rule", None)
        if callable(rule) and rule.__module__.startswith("transformers"):  # no GPU's kernel
            module.chunk_gated_delta_rule = partial(_in_short_chunks, rule)  # type: ignore[assignment]
        for norm in norms_of(module):
            norm.register_forward_hook(_in_format_of_input)
        module.layer_idx = 0  # type: ignore[assignment]  # of a cache of one layer

    def take(self, keywords: Mapping[str, Any]) -> None:
        """Note the keywords of the decoder layer, some of which do not pass them on."""
        self._keywords = {name: keywords.get(name) for name in ("packing", "paged")}

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the module: [1, tokens, features] to the same."""
        keywords, self._keywords = self._keywords, {}  # a pass refers to a whole cache
        packing, paged = keywords.get("packing"), keywords.get("paged")
        if packing is not None:
            return self._packed(hidden_states[0], packing)[None]
        if paged is not None:
            return self._paged(hidden_states[0], paged.states)[None]
        return self._forward(self.module, hidden_states, *args, **kwargs)

    def compute(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """A batch [sequences, tokens, features] by the family's own code.

        Raises ValueError for a cache that a mixer would not understand.
        """
        if cache is not None and self._own_caches:
            raise ValueError(f"its mixers take {self._own_caches[0]}, and not transformers' Cache")
        out = self._forward(self.module, x, **{self._keyword: cache})
        return out[0] if isinstance(out, tuple) else out

    def _packed(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        """A packed row [tokens, features], batch by batch."""
        if packing.group is not None or packing.chunk is not None or packing.shared is not None:
            raise ValueError("recurrent layers need whole sequences in a row")
        outputs, start = [], 0
        for lengths in batches(packing.blocks):
            rows = x[start : start + sum(lengths)]
            start += len(rows)
            if lengths[0] == lengths[-1]:
                out = self.compute(rows.unflatten(0, (len(lengths), -1)), None).flatten(0, 1)
            else:
                places = _places(lengths, x.device)
                padded = x.new_zeros(len(lengths) * lengths[-1], x.shape[1])
                padded = padded.index_copy(0, places, rows).unflatten(0, (len(lengths), -1))
                out = self.compute(padded, None).flatten(0, 1).index_select(0, places)
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _paged(self, x: torch.Tensor, states: StateBatch) -> torch.Tensor:
        """The tokens [tokens, features] of a pass; padding gives zeros."""
        out = torch.zeros_like(x)
        tensors = states.cache.layers[self.index]
        for run in states.runs:
            places = run.places.flatten()
            hidden = x.index_select(0, places).unflatten(0, run.places.shape)
            cache = LayerStates(None if run.fresh else [t[run.slots] for t in tensors])
            out.index_copy_(0, places, self.compute(hidden, cache).flatten(0, 1))
            after = cache.tensors()
            for tensor, values in zip(tensors, after, strict=True):
                tensor[run.slots] = values.to(tensor.dtype)
            if states.keeps:
                states.keep(self.index, after)
        return out


def _in_format_of_input(_: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
    """The output of a norm whose weight may be in float32 where all others are in bfloat16."""
    return out.to(args[0].dtype)


def _in_short_chunks(
    rule: Callable[..., Any], query: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """transformers' own `rule` for a `query` [sequences, tokens, heads, dim], in shorter chunks.

    Its chunks are of 64 tokens, to which it pads, and it takes a step for each token of a chunk.
    """
    size = min(64, -(-query.shape[1] // 16) * 16)
    return rule(query, *args, chunk_size=size, **kwargs)


def batches(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The lengths of the sequences of each batch, from the (number, length) of a row's blocks.

    Lengths ascend. A block joins the batch before it while padding stays below half of the tokens.

    *Example.* 4 sequences of 10 tokens, 2 of 12 and one of 100 are two batches: six of 12, one.
    """
    lengths_by_batch: list[tuple[int, ...]] = []
    for number, length in blocks:
        own = (length,) * number
        if lengths_by_batch and (len(lengths_by_batch[-1]) + number) * length <= _WASTE * sum(
            lengths_by_batch[-1] + own
        ):
            lengths_by_batch[-1] += own
        else:
            lengths_by_batch.append(own)
    return lengths_by_batch


@lru_cache(maxsize=64)
def _places(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The places [tokens] of packed sequences in their batch, whose rows are as long as the last.

    The layers of a pass ask for the same ones.
    """
    sizes = torch.tensor(lengths)
    starts = torch.tensor([*accumulate(lengths, initial=0)][:-1])
    shift = torch.arange(len(lengths)) * lengths[-1] - starts
    return (torch.arange(sum(lengths)) + shift.repeat_interleave(sizes)).to(device)


def use_batches(model: PreTrainedModel) -> list[Mixer]:
    """Have the mixers of `model`, or of a rank's part of it, compute as a `Mixer`; gives these."""
    mixers = {module: Mixer(module, i) for i, module in enumerate(recurrent_modules(model))}
    for module, mixer in mixers.items():
        module.forward = mixer
    for layer in decoder_layers(model) if mixers else ():
        if own := [mixers[module] for module in recurrent_modules(layer)]:
            layer.register_forward_pre_hook(partial(_hand_over, own), with_kwargs=True)
    return [*mixers.values()]


def mixers_of(model: nn.Module) -> list[Mixer]:
    """What `use_batches` has put into a model, in order."""
    return [m.forward for m in recurrent_modules(model) if isinstance(m.forward, Mixer)]


def _hand_over(mixers: Sequence[Mixer], _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    for mixer in mixers:
        mixer.take(kwargs)


@torch.no_grad()
def state_shapes(model: PreTrainedModel) -> StateShapes:
    """The shapes and formats of a sequence's states, by mixer of a rank's model.

    A call with two tokens shows them, in the format of the mixer's projections: the weight of its
    convolution may be in float32 where all others are in bfloat16 (Bailing). Recurrent states are
    kept in float32.
    """
    shapes = []
    for mixer in mixers_of(model):
        weight = next(x.weight for x in mixer.module.children() if isinstance(x, nn.Linear))
        cache, width = LayerStates(None), model.config.hidden_size
        mixer.compute(torch.zeros(1, 2, width, dtype=weight.dtype, device=weight.device), cache)
        first, *others = cache.tensors()
        shapes.append(
            [(first.shape[1:], first.dtype), *((x.shape[1:], torch.float32) for x in others)]
        )
    return shapes


def state_tokens(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """The tokens whose keys and values take as many bytes as the states of a sequence.

    Of all layers, so that ranks with other layers agree.
    """
    shape = attention_shape(config)
    keys = 2 * shape.kv_heads * shape.head_size * dtype.itemsize
    token = keys * layers_with_keys(config).count(True)
    return -(-sum(layer_state_bytes(config, dtype)) // max(1, token))


def layer_state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> list[int]:
    """The bytes of the states of a sequence in each layer of a model in `dtype`."""
    if not num_recurrent(config):
        return [0] * config.num_hidden_layers
    model = meta_model(config, dtype=dtype)
    use_batches(model)
    sizes = iter(state_shapes(model))
    return [
        state_bytes([next(sizes) for _ in recurrent_modules(layer)])
        for layer in decoder_layers(model)
    ]


_TOLERANCE = 0.05
"""The difference from the largest output: right mixers have 1e-3, those that ignore a state 1."""


def continues(config: PretrainedConfig) -> bool:
    """Whether the mixers of a model are right for several tokens on top of a state.

    Some of transformers' ignore it. It is tried on a small model of the config, whose mixers
    compute four tokens at once, and the last two on the state of the first two.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shrink(config), dtype=torch.float32).eval()
        mixers = {type(mixer.module): mixer for mixer in use_batches(model)}.values()
        return all(_continues(mixer, model.config.hidden_size) for mixer in mixers)


@torch.no_grad()
def _continues(mixer: Mixer, width: int) -> bool:
    x = torch.randn(3, 4, width)
    for parameter in mixer.module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5)
    whole, cache = mixer.compute(x, LayerStates(None)), LayerStates(None)
    mixer.compute(x[:, :2], cache)
    rest = mixer.compute(x[:, 2:], LayerStates(cache.tensors()))
    return bool((rest - whole[:, 2:]).abs().max() < _TOLERANCE * whole.abs().max())
