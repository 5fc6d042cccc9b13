"""Activations of a row of tokens, counted on tensors without memory.

A decoder layer itself runs, on the `meta` device, so its counts follow transformers' code. The
head's follow `linear_log_probs`, where Triton computes it; else that runs, too.
"""

import copy
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from hybridrl.config import ActivationMode, Attention, LoraConfig
from hybridrl.kernels.linear_log_probs import CHUNK_ELEMENTS, linear_log_probs
from hybridrl.models.adapters import add_adapters
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.chunk_keys import ChunkKeys, SequenceKeys
from hybridrl.models.counted_modules import (
    ATTENTION,
    CountedRow,
    FusedDropout,
    GroupedProducts,
    SpreadExperts,
    split_tokens,
)
from hybridrl.models.expert_parallel import experts_of
from hybridrl.models.fused_layers import fuse_layers
from hybridrl.models.logits import logits_transform
from hybridrl.models.paged_attention import PagedGroup
from hybridrl.models.parallel import cuts_heads, head_size, kv_heads_of_rank, meta_model
from hybridrl.models.recomputation import recompute_layers
from hybridrl.models.shard import GenParallel, shard_experts

_KEPT_ID_SAVED, _KEPT_ID_BACKWARD, _KEPT_ID_SCORED, _KEPT_ID_GATHERED = 27, 49, 26, 18
"""Bytes of each kept id of a scored token, and of the token itself, in the head
(`engines.train.truncated`): saved for the backward pass, and its peak besides; the peak of a
forward pass that saves nothing, and what is there while rows of the head's weight are gathered. The
backward pass has no `meta` form, so these were measured, on CPUs."""


class PeakMemory(MemTracker):
    """torch's MemTracker without its accounts by module, which refuse a second micro-batch.

    Within `with` it counts the storages that operations create, on `meta` and fake devices too.
    """

    def __enter__(self) -> "PeakMemory":
        self._fake_mode_on_entry = None
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *args: Any) -> None:
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *args)

    def restart(self) -> None:
        """Forget the peak so far."""
        self._peak_mem = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within, nothing changes the peak."""
        before, self._peak_mem = self._peak_mem, {}
        try:
            yield
        finally:
            self._peak_mem = before

    def allocated(self, device: str) -> int:
        """Bytes on devices of this type now."""
        snapshot = self._curr_mem_snap
        return sum(sizes["Total"] for place, sizes in snapshot.items() if place.type == device)

    def peak(self, device: str) -> int:
        """Most bytes since `restart`."""
        most = sum(size for place, size in self._peak_mem.items() if place.type == device)
        return max(most, self.allocated(device))

    def _update_peak_stats(self, peak_state: Any) -> None:
        """The totals alone: torch copies its account of all kinds at each new peak."""
        for place, sizes in self._curr_mem_snap.items():
            if self._peak_mem.get(place, 0) < sizes["Total"]:
                self._peak_mem[place] = sizes["Total"]


class Activations(NamedTuple):
    """Bytes besides the module's weights.

    `kept` from forward to backward; a layer's input counts where backward needs it. `backward` is
    the most within backward, with the gradients of the module's weights. Of a row in chunks, `keys`
    are the keys and values of the whole sequence, with their gradients.
    """

    kept: int
    backward: int
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


def count_once(
    count: Callable[Concatenate[PretrainedConfig, _P], _Result],
) -> Callable[Concatenate[PretrainedConfig, _P], _Result]:
    """Return `count`, which counts anew only for arguments that this process has not had."""
    known: dict[tuple[object, ...], _Result] = {}

    @functools.wraps(count)
    def call(config: PretrainedConfig, *options: _P.args, **settings: _P.kwargs) -> _Result:
        named = sorted((name, repr(value)) for name, value in settings.items())
        sizes = config.to_dict() | {"_name_or_path": None}  # each run has its directory anew
        model = json.dumps(sizes, sort_keys=True, default=str)
        arguments = model, repr(options), *named
        if arguments not in known:
            with GroupedProducts():
                known[arguments] = count(config, *options, **settings)
        return known[arguments]

    return call


@count_once
def layer_activations(
    config: PretrainedConfig,
    tokens: int,
    *,
    dtype: torch.dtype,
    attention: Attention,
    tp: int = 1,
    sequence_parallel: bool = False,
    mode: ActivationMode = ActivationMode.keep,
    lora: LoraConfig | None = None,
    fused_dropout: bool = False,
    cp: int = 1,
    earlier: int = 0,
    ep: int | None = None,
    keys: int = 0,
    fused: bool = False,
) -> Activations:
    """Count a decoder layer over a row of `tokens`, on one of `tp` tensor-parallel ranks.

    Under sequence parallelism norms and sums have 1 / tp of the tokens, of a row that is filled up
    to a multiple of tp. With `fused_dropout`, as on GPUs, a mask of dropout has a byte for each
    number. `cp` ranks share the row, each with `tokens`. With `earlier` tokens before it, the row
    is the last chunk of a sequence. With `ep` training spreads experts over its ranks, and over
    those of tp; each computes as many tokens. With shared prompts its sequences attend to so many
    `keys` in all. `fused` layers keep less (`models.fused_layers`).
    """
    if sequence_parallel:
        tokens += -tokens % tp
    chunk = None
    if earlier:
        stop = earlier + tokens * cp
        chunk = ChunkKeys(SequenceKeys(stop, for_backward=True), earlier, stop)
    row = CountedRow(attention, cp, chunk, keys)
    model = _narrow_model(config, tp, dtype, lora, ep, fused)
    split = tp if sequence_parallel else 1
    layer, hidden, run, present = _trained_layer(model, tokens, row, mode, fused_dropout, split)
    of_chunk = row.sequence_keys()
    counts = _count(run, hidden, layer, *present, *of_chunk, previous=True)
    return counts._replace(keys=sum(x.nbytes for x in of_chunk))


@count_once
def scoring_activations(
    config: PretrainedConfig,
    tokens: int,
    *,
    dtype: torch.dtype,
    attention: Attention,
    tp: int = 1,
    keys: int = 0,
) -> int:
    """The most bytes of a decoder layer's forward pass that keeps nothing, besides its input.

    Over a row of `tokens`, on one of `tp` tensor-parallel ranks of a role that only scores.
    With shared prompts its sequences attend to so many `keys` in all.
    """
    model = _narrow_model(config, tp, dtype, None)
    shard_experts(model, GenParallel())
    row = CountedRow(attention, keys=keys)
    layer, hidden, run, present = _trained_layer(model, tokens, row, ActivationMode.keep, False, 1)
    return _forward_peak(run, hidden, layer, *present)


@count_once
def backward_in_halves(
    config: PretrainedConfig,
    tokens: int,
    *,
    dtype: torch.dtype,
    attention: Attention,
    tp: int = 1,
    sequence_parallel: bool = False,
    lora: LoraConfig | None = None,
    fused_dropout: bool = False,
    cp: int = 1,
    ep: int | None = None,
    keys: int = 0,
    fused: bool = False,
) -> Halves:
    """Count a decoder layer, as zero-bubble pipelines compute its backward pass."""
    if sequence_parallel:
        tokens += -tokens % tp
    row = CountedRow(attention, cp, keys=keys)
    model = _narrow_model(config, tp, dtype, lora, ep, fused)
    split = tp if sequence_parallel else 1
    layer, hidden, run, present = _trained_layer(
        model, tokens, row, ActivationMode.keep, fused_dropout, split
    )
    return count_halves(run, hidden, layer, *present)


def count_halves(
    run: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    layer: nn.Module,
    *present: torch.Tensor,
) -> Halves:
    """Bytes that the passes of `run(hidden)`, which is the `layer`, allocate besides `present`."""
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
    model: Any, tokens: int, row: CountedRow, mode: ActivationMode, fused_dropout: bool, split: int
) -> tuple[Any, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]:
    """The layer, its input, its forward pass, and the tensors that all layers share.

    Under sequence parallelism the input has a rank's share of the tokens: 1 / `split` of them.
    """
    if fused_dropout:
        for name, module in [*model.named_modules()]:
            if isinstance(module, nn.Dropout):
                model.set_submodule(name, FusedDropout(module.p))
    if mode.recomputes:
        recompute_layers(model, mode)
    layer: Any = decoder_layers(model.train())[0]
    width = model.config.hidden_size
    hidden = torch.empty(1, tokens, width, dtype=model.dtype, device="meta")
    keywords = _layer_keywords(model, layer, hidden, row)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = layer(x, **keywords)
        return out if isinstance(out, torch.Tensor) else out[0]

    if split > 1:  # once the model has run with all tokens
        split_tokens(layer, split)
        hidden = hidden.new_empty(1, tokens // split, width)
    return layer, hidden, run, [x for x in tree_leaves(keywords) if isinstance(x, torch.Tensor)]


@count_once
def prefill_activations(
    config: PretrainedConfig, tokens: int, longest: int, *, dtype: torch.dtype, tp: int = 1
) -> int:
    """Bytes of a prefill of `tokens`, in prompts of `longest`, within a decoder layer.

    On one of `tp` ranks, without the layer's input. The masks of prompts stay from the first layer
    to the last, for each kind of layer one.
    """
    model = _narrow_model(config, tp, dtype, None)
    shard_experts(model, GenParallel())
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
        heads = _heads_of_rank(config, tp)
        shared = heads // kv_heads_of_rank(config, tp)
        for kind in range(1, len(set(getattr(config, "layer_types", None) or ()))):
            prompts.mask(kind, shared, dtype)
        layer(hidden, **keywords)
        return memory.peak("meta") - before


@count_once
def head_activations(
    config: PretrainedConfig,
    scored: int,
    *,
    dtype: torch.dtype,
    triton: bool,
    tp: int = 1,
    trained: bool = True,
    kept: int = 0,
) -> Activations:
    """Count the head over `scored` hidden states; `trained` is whether it gets a gradient.

    Log-probabilities are renormalized over so many `kept` ids at each.
    """
    ids = scored * (1 + kept) if kept else 0
    saved, backward = _KEPT_ID_SAVED * ids, _KEPT_ID_BACKWARD * ids
    if triton:
        rows, features = -(-config.vocab_size // tp), config.hidden_size
        chunk = CHUNK_ELEMENTS // max(1, scored)
        wide = 4 * scored * features  # the gradient of the hidden states
        products = dtype.itemsize * (CHUNK_ELEMENTS + chunk * features + scored * features)
        weight = dtype.itemsize * rows * features if trained else 0
        return Activations(saved, weight + wide + products + backward)
    whole = _count(*_head(config, scored, dtype, tp, trained))
    return Activations(whole.kept + saved, whole.backward + backward)


@count_once
def scoring_head_activations(
    config: PretrainedConfig,
    scored: int,
    *,
    dtype: torch.dtype,
    triton: bool,
    tp: int = 1,
    kept: int = 0,
) -> int:
    """The most bytes of the head's forward pass over `scored` hidden states without gradients."""
    whole = 0 if triton else _forward_peak(*_head(config, scored, dtype, tp, trained=False))
    if not kept:
        return whole
    ids = scored * (1 + kept)
    gathered = min(CHUNK_ELEMENTS, ids * config.hidden_size)  # in the compute format, and widened
    gathered *= 4 + (dtype.itemsize if dtype.itemsize < 4 else 0)
    return whole + max(_KEPT_ID_SCORED * ids, _KEPT_ID_GATHERED * ids + gathered)


def _head(
    config: PretrainedConfig, scored: int, dtype: torch.dtype, tp: int, trained: bool
) -> tuple[Any, ...]:
    """The head in torch as a function of hidden states, the hidden states, its other tensors."""
    rows, features = -(-config.vocab_size // tp), config.hidden_size
    transform = logits_transform(config).under(1.0)
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

    return run, hidden, weights, targets, *([] if bias is None else [bias])


def _heads_of_rank(config: PretrainedConfig, tp: int) -> int:
    """All of them where a norm over all heads follows (OLMoE)."""
    heads: int = config.num_attention_heads
    return heads // tp if cuts_heads(config) else heads


def _narrow_model(
    config: PretrainedConfig,
    tp: int,
    dtype: torch.dtype,
    lora: LoraConfig | None,
    ep: int | None = None,
    fused: bool = False,
) -> Any:
    """One layer, as wide as that of a tensor-parallel rank."""
    config = copy.deepcopy(config)
    settings: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_attention_heads": _heads_of_rank(config, tp),
        "num_key_value_heads": kv_heads_of_rank(config, tp),
        "intermediate_size": getattr(config, "intermediate_size", 0) // tp,
    }
    settings = {name: value for name, value in settings.items() if hasattr(config, name)}
    settings["head_dim"] = head_size(config)
    if getattr(config, "layer_types", None):
        settings["layer_types"] = config.layer_types[:1]
    config.update(settings)
    model = meta_model(config, dtype=dtype, attn_implementation=ATTENTION)
    if lora is not None and lora.rank:
        with torch.device("meta"):
            add_adapters(model, lora, 0, frozen=dtype)
        model.to(dtype)  # adapters too, as FSDP gathers them
    if fused:
        fuse_layers(model)
    if ep is not None:
        for module in experts_of(model):
            module.forward = SpreadExperts(module, ep, tp)
    return model


def _layer_keywords(
    model: Any, layer: nn.Module, hidden: torch.Tensor, packing: CountedRow | PagedGroup
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
    x.requires_grad_(True)
    memory = PeakMemory()
    memory.track_external(x, *present)
    before = memory.allocated("meta")
    with memory:
        out = run(x.clone() if previous else x)
        edge, shape = get_gradient_edge(out), out.shape
        dtype = out.dtype
        del out  # as a model does, once the next layer has it
        kept = memory.allocated("meta")
        memory.restart()
        torch.autograd.backward(edge, torch.empty(shape, dtype=dtype, device="meta"))
        backward = memory.peak("meta")
    return Activations(kept - before, backward - before)


def _forward_peak(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *present: nn.Module | torch.Tensor
) -> int:
    """Bytes that `run(x)` without gradients allocates besides `x` and what is `present`."""
    memory = PeakMemory()
    memory.track_external(x, *present)
    before = memory.allocated("meta")
    with memory, torch.no_grad():
        run(x)
        return memory.peak("meta") - before
