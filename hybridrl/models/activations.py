"""Activations of a row of tokens, counted on tensors without memory.

A decoder layer itself runs, on the `meta` device, so its counts follow transformers' code. The
head's follow `linear_log_probs`, where Triton computes it; else that runs, too.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from hybridrl.config import Attention, LoraConfig
from hybridrl.kernels.linear_log_probs import CHUNK_ELEMENTS, linear_log_probs
from hybridrl.models.adapters import add_adapters
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.chunk_keys import ChunkKeys, SequenceKeys
from hybridrl.models.expert_parallel import LocalExperts, experts_of
from hybridrl.models.logits import logits_transform
from hybridrl.models.packed_attention import capped_attention, with_sink
from hybridrl.models.paged_attention import PagedGroup, attend_scores
from hybridrl.models.parallel import head_size
from hybridrl.models.peak_memory import PeakMemory
from hybridrl.models.ulysses import to_heads, to_tokens

_NAME = "hybridrl_counted"


class Activations(NamedTuple):
    """Bytes besides the module's weights.

    `kept` from forward to backward; a layer's input counts where backward needs it. `backward` is
    the most within backward, with the gradients of the module's weights. `scoring` is the most of a
    forward pass that has none, besides its input. Of a row in chunks, `keys` are the keys and
    values of the whole sequence, with their gradients.
    """

    kept: int
    backward: int
    scoring: int
    keys: int = 0


class Halves(NamedTuple):
    """Bytes of a backward pass in two halves: gradients of the input, then those of the weights.

    `between` them come to what is kept from the forward pass. `first` and `second` are the most in
    each half, with what is kept, and with the gradients of the module's weights.
    """

    between: int
    first: int
    second: int


_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def _once(
    count: Callable[Concatenate[PretrainedConfig, int, _P], _Result],
) -> Callable[Concatenate[PretrainedConfig, int, _P], _Result]:
    """The same function, which counts anew only for arguments that this process has not had."""
    known: dict[tuple[object, ...], _Result] = {}

    @functools.wraps(count)
    def call(
        config: PretrainedConfig, tokens: int, *options: _P.args, **settings: _P.kwargs
    ) -> _Result:
        named = sorted((name, repr(value)) for name, value in settings.items())
        arguments = config.to_json_string(use_diff=False), tokens, repr(options), *named
        if arguments not in known:
            with _GroupedProducts():
                known[arguments] = count(config, tokens, *options, **settings)
        return known[arguments]

    return call


@_once
def layer_activations(
    config: PretrainedConfig,
    tokens: int,
    *,
    dtype: torch.dtype,
    attention: Attention,
    tp: int = 1,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
    lora: LoraConfig | None = None,
    fused_dropout: bool = False,
    cp: int = 1,
    earlier: int = 0,
    ep: int | None = None,
) -> Activations:
    """Of a decoder layer over a row of `tokens`, on one of `tp` tensor-parallel ranks.

    Under sequence parallelism norms and sums have 1 / tp of the tokens. With `fused_dropout`, as on
    GPUs, a mask of dropout has a byte for each number. `cp` ranks share the row, each with
    `tokens`. With `earlier` tokens before it, the row is the last chunk of a sequence. With `ep`
    training spreads experts over its ranks, and over those of tp; each computes as many tokens.
    """
    row = _Row(attention, cp)
    if earlier:
        stop = earlier + tokens * cp
        row = _Row(attention, cp, ChunkKeys(SequenceKeys(stop, for_backward=True), earlier, stop))
    model = _narrow_model(config, tp, dtype, lora)
    if ep is not None:
        for module in experts_of(model):
            module.forward = _SpreadExperts(module, ep, tp)
    layer, hidden, run, present = _trained_layer(model, tokens, row, checkpointing, fused_dropout)
    keys = row.sequence_keys()
    counts = _count(run, hidden, layer, *present, *keys, previous=True)
    counts = counts._replace(keys=sum(x.nbytes for x in keys))
    if not sequence_parallel or tp == 1:
        return counts
    norm = _count(layer.input_layernorm, hidden, layer)
    two_norms = 2 * norm.kept * (tp - 1) // tp
    kept = hidden.nbytes * (tp - 1) // tp if checkpointing else two_norms
    return counts._replace(
        kept=counts.kept - kept,
        backward=counts.backward - two_norms,
        scoring=counts.scoring - two_norms // 2,
    )


@_once
def backward_in_halves(
    config: PretrainedConfig,
    tokens: int,
    *,
    dtype: torch.dtype,
    attention: Attention,
    tp: int = 1,
    checkpointing: bool = False,
    lora: LoraConfig | None = None,
    fused_dropout: bool = False,
    cp: int = 1,
) -> Halves:
    """Of a decoder layer, as zero-bubble pipelines compute its backward pass."""
    model, row = _narrow_model(config, tp, dtype, lora), _Row(attention, cp)
    layer, hidden, run, present = _trained_layer(model, tokens, row, checkpointing, fused_dropout)
    hidden.requires_grad_(True)
    memory = PeakMemory()
    memory.track_external(hidden, layer, *present)
    before = memory.allocated("meta")
    with memory:
        out = run(hidden.clone())
        kept, grad = memory.allocated("meta") - out.nbytes, torch.empty_like(out)
        memory.restart()
        _, groups = stage_backward_input([out], [grad], [hidden], layer.parameters())
        first = memory.peak("meta")
        del out, grad
        between = memory.allocated("meta") - hidden.nbytes  # the gradient, which is sent
        memory.restart()
        stage_backward_weight(layer.parameters(), groups)
        second = memory.peak("meta") - hidden.nbytes
    return Halves(between - kept, first - before, second - before)


def _trained_layer(
    model: Any, tokens: int, row: "_Row", checkpointing: bool, fused_dropout: bool
) -> tuple[Any, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    """The layer, its input, its forward pass, and the tensors that all layers share."""
    if fused_dropout:
        for name, module in [*model.named_modules()]:
            if isinstance(module, nn.Dropout):
                model.set_submodule(name, _FusedDropout(module.p))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    layer: Any = decoder_layers(model.train())[0]
    width = model.config.hidden_size
    hidden = torch.empty(1, tokens, width, dtype=model.dtype, device="meta")
    keywords = _layer_keywords(model, layer, hidden, row)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = layer(x, **keywords)
        return out if isinstance(out, torch.Tensor) else out[0]

    return layer, hidden, run, [x for x in tree_leaves(keywords) if isinstance(x, torch.Tensor)]


@_once
def prefill_activations(
    config: PretrainedConfig, tokens: int, longest: int, *, dtype: torch.dtype, tp: int = 1
) -> int:
    """Bytes of a prefill of `tokens`, in prompts of `longest`, within a decoder layer.

    On one of `tp` ranks, without the layer's input. The masks of prompts stay from the first layer
    to the last, for each kind of layer one.
    """
    model = _narrow_model(config, tp, dtype, None)
    layer = decoder_layers(model.eval())[0]
    hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, device="meta")
    rows = max(1, tokens // longest)
    positions = torch.empty(rows, longest, dtype=torch.long, device="meta")
    prompts = PagedGroup(0, rows, longest, longest, positions)
    keywords = _layer_keywords(model, layer, hidden, prompts)
    prompts.masks.clear()
    memory = PeakMemory()
    present = [x for x in tree_leaves(keywords) if isinstance(x, torch.Tensor)]
    memory.track_external(hidden, layer, positions, *present)
    before = memory.allocated("meta")
    with memory, torch.no_grad():
        shared = config.num_attention_heads // tp // attention_shape(config).local_kv_heads(tp)
        for kind in range(1, len(set(getattr(config, "layer_types", None) or ()))):
            prompts.mask(kind, shared, dtype)
        layer(hidden, **keywords)
        return memory.peak("meta") - before


@_once
def head_activations(
    config: PretrainedConfig,
    scored: int,
    *,
    dtype: torch.dtype,
    triton: bool,
    tp: int = 1,
    trained: bool = True,
) -> Activations:
    """Of the head over `scored` hidden states; `trained` is whether it gets a gradient."""
    rows, features = -(-config.vocab_size // tp), config.hidden_size
    transform = logits_transform(config).under(1.0)
    if triton:
        chunk = CHUNK_ELEMENTS // max(1, scored)
        wide = 4 * scored * features  # the gradient of the hidden states
        products = dtype.itemsize * (CHUNK_ELEMENTS + chunk * features + scored * features)
        weight = dtype.itemsize * rows * features if trained else 0
        return Activations(0, weight + wide + products, 0)
    weights = torch.empty(rows, features, dtype=dtype, device="meta", requires_grad=trained)
    targets = torch.empty(scored, dtype=torch.long, device="meta")
    hidden = torch.empty(scored, features, dtype=dtype, device="meta")
    bias: torch.Tensor | None = None
    if _narrow_model(config, 1, dtype, None).get_output_embeddings().bias is not None:
        bias = torch.empty(rows, dtype=dtype, device="meta", requires_grad=trained)

    def run(x: torch.Tensor) -> torch.Tensor:
        log_probs, entropy = linear_log_probs(
            x, weights, targets, with_entropy=True, bias=bias, **transform
        )
        return log_probs if entropy is None else log_probs + entropy

    return _count(run, hidden, weights, targets, *([] if bias is None else [bias]))


class _FusedAttention(torch.autograd.Function):
    """A fused kernel's tensors: its inputs, its result, and a float32 for each token and head."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class _FusedDropout(nn.Dropout):
    """As torch computes it on GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.native_dropout(x, self.p, self.training)[0]
        return out


class _Exchange(torch.autograd.Function):
    """An all-to-all: as much arrives as is sent."""

    @staticmethod
    def forward(ctx: Any, messages: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(messages)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad)


class _GroupedProducts(TorchDispatchMode):
    """Products of experts in every format: torch's `meta` kernel knows bfloat16 alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[:3]
        shape = left.shape[0], right.shape[-1]
        return left.new_empty(shape if right.ndim == 3 else (len(ends), *shape))


class _SpreadExperts:
    """Experts as `expert_parallel` computes them, if every rank gets as many tokens as it sends."""

    def __init__(self, module: nn.Module, ep: int, tp: int) -> None:
        self._module, self._ep, self._tp = module, ep, tp
        for name, parameter in [*module.named_parameters(recurse=False)]:
            own = torch.empty_like(parameter[: len(parameter) // ep])
            module.register_parameter(name, nn.Parameter(own, parameter.requires_grad))

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As transformers': tokens [tokens, features], their experts and weights [tokens, k]."""
        (tokens, features), k = hidden.shape, chosen.shape[1]
        share = -(-tokens // self._tp)
        hidden, weights = hidden[:share], weights[:share]
        experts, order = chosen[:share].flatten().sort(stable=True)
        rows = hidden[order // k]
        rows = rows if self._ep == 1 else _Exchange.apply(rows)
        outputs = LocalExperts(self._module)(rows, experts[:, None], torch.ones_like(rows[:, :1]))
        outputs = outputs if self._ep == 1 else _Exchange.apply(outputs)
        outputs = outputs * weights.flatten()[order, None]
        sums = outputs[order.argsort()].view(share, k, features).sum(1)
        if self._tp == 1:
            return sums
        # The tokens of all ranks of tp.
        return sums.repeat(self._tp, 1)[:tokens]


@dataclass(frozen=True, slots=True)
class _Row:
    """How a row is attended: by `cp` ranks that share it, and as a `chunk` of a sequence."""

    attention: Attention
    cp: int = 1
    chunk: ChunkKeys | None = None

    def sequence_keys(self) -> list[torch.Tensor]:
        """Keys and values of the chunk's sequence, and their gradients."""
        if self.chunk is None:
            return []
        sequence = self.chunk.sequence
        return [
            x for side in (sequence.kept, sequence.gradients) for x in tree_leaves([*side.values()])
        ]


def _counted_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    packing: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention`, as far as its tensors go; `packing` is a `_Row`.

    The row is one sequence: capped scores are then most. Or `packing` are the prompts of a prefill,
    as in `paged_attention`.
    """
    if isinstance(packing, PagedGroup):
        return _counted_prefill(packing, query, key, value, softcap, s_aux), None
    row, tensors = packing, (query[0], key[0], value[0])
    gathers = len(query[0]) % row.cp > 0
    if row.cp > 1 and not gathers:
        tensors = to_heads(*tensors, row.cp, _Exchange.apply)
        s_aux = None if s_aux is None else s_aux[: len(tensors[0])]

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return _attend(row.attention, q[None], k[None], v[None], scaling, softcap, sinks)[0]

    def attend_to_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k.repeat(1, row.cp, 1), v.repeat(1, row.cp, 1), s_aux)

    if row.chunk is None and gathers:
        out = checkpoint(attend_to_row, *tensors, use_reentrant=False, preserve_rng_state=False)
    elif row.chunk is None:
        out = attend(*tensors, s_aux)
    else:
        q, k, v = tensors
        if gathers:
            k, v = (x.repeat(1, row.cp, 1) for x in (k, v))
        sequence = row.chunk.sequence
        for side in (sequence.kept, sequence.gradients):
            if module not in side:  # in the first pass, which is not counted
                sizes = [(sequence.tokens, len(x), x.shape[2]) for x in (k, v)]
                side[module] = query.new_empty(sizes[0]), query.new_empty(sizes[1])
        out = row.chunk.attend(module, q, k, v, s_aux, attend)
    if row.cp > 1 and not gathers:
        out = to_tokens(out, row.cp, _Exchange.apply)
    return out[None], None


def _attend(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The tensors of one sequence's attention, [1, tokens, heads, dim]; keys may be more."""
    if attention is Attention.flash:
        out: torch.Tensor = _FusedAttention.apply(*(x.transpose(1, 2) for x in (query, key, value)))
        return out
    if query.shape[1] > key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask = None
    if key.shape[2] > query.shape[2]:
        near = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        mask = near.tril(key.shape[2] - query.shape[2])
    if softcap is not None:
        out = capped_attention(query, key, value, mask, scaling, softcap)
    elif sinks is not None:
        wide = with_sink(query, key, value, sinks)
        out = _FusedAttention.apply(*wide)[..., 1:, : value.shape[-1]]
    else:
        out = _FusedAttention.apply(query, key, value)
    return out.transpose(1, 2).contiguous()


def _counted_prefill(
    prompts: PagedGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The tensors of `paged_attention`: keys and values to write, those read, and scores or mask.

    query [1, heads, tokens, head_dim], key and value likewise with kv_heads.
    """
    (_, heads, tokens, size), value_size = query.shape, value.shape[-1]
    width = max(size, value_size)
    if size != value_size:
        query, key, value = (
            nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
        )
    new = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    rows, num = prompts.rows, prompts.queries
    if softcap is None and sinks is None:
        kept = new.new_empty(2, *key.shape)
        prompts.mask(None, heads // key.shape[1], query.dtype)
        out = _FusedAttention.apply(torch.empty_like(query), *kept)
        out = out.transpose(1, 2).contiguous()
    else:
        kept = new.new_empty(2, rows, key.shape[1], num, width)
        queries = query[0].transpose(0, 1)[: rows * num]
        read = attend_scores(queries, kept[0], prompts, 1.0, None, kept[1], softcap, sinks)
        out = read.new_empty(1, tokens, heads, width)
    return out[..., :value_size]


AttentionInterface.register(_NAME, _counted_attention)


def _narrow_model(
    config: PretrainedConfig, tp: int, dtype: torch.dtype, lora: LoraConfig | None
) -> Any:
    """One layer, as wide as that of a tensor-parallel rank."""
    config = copy.deepcopy(config)
    settings: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads // tp,
        "num_key_value_heads": attention_shape(config).local_kv_heads(tp),
        "intermediate_size": getattr(config, "intermediate_size", 0) // tp,
    }
    settings = {name: value for name, value in settings.items() if hasattr(config, name)}
    settings["head_dim"] = head_size(config)
    if getattr(config, "layer_types", None):
        settings["layer_types"] = config.layer_types[:1]
    config.update(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_NAME)
        if lora is not None and lora.rank:
            add_adapters(model, lora, 0, frozen=dtype)
            model.to(dtype)  # adapters too, as FSDP gathers them
    return model


def _layer_keywords(
    model: Any, layer: nn.Module, hidden: torch.Tensor, packing: _Row | PagedGroup
) -> dict[str, Any]:
    """What the model passes to its layer besides the hidden states: families differ."""
    passed: dict[str, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        passed.update(kwargs)

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    positions = torch.empty(hidden.shape[:2], dtype=torch.long, device="meta")
    with torch.no_grad():
        model.base_model(
            inputs_embeds=hidden, position_ids=positions, use_cache=False, packing=packing
        )
    hook.remove()
    return passed


def _count(
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *present: nn.Module | torch.Tensor,
    previous: bool = False,
) -> Activations:
    """Bytes that `run(x)` and its backward pass allocate besides `x` and what is `present`.

    With `previous` the input is the result of another layer, which only this one may keep.
    """

    def start() -> tuple[PeakMemory, int]:
        memory = PeakMemory()
        memory.track_external(x, *present)
        return memory, memory.allocated("meta")

    x.requires_grad_(True)
    memory, before = start()
    with memory:
        out = run(x.clone() if previous else x)
        edge, shape = get_gradient_edge(out), out.shape
        dtype = out.dtype
        del out  # as a model does, once the next layer has it
        kept = memory.allocated("meta")
        memory.restart()
        torch.autograd.backward(edge, torch.empty(shape, dtype=dtype, device="meta"))
        backward = memory.peak("meta")
    memory, now = start()  # gradients are there
    with memory, torch.no_grad():
        run(x)
        scoring = memory.peak("meta")
    return Activations(kept - before, backward - before, scoring - now)
