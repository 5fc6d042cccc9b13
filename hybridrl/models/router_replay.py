"""Router replay: the experts that tokens took in one forward pass, taken again in another.

The choice alone is replayed, as in R3 (arXiv 2510.11370). Weights come from the scores of the
present pass, so that routers get gradients. Every router takes the experts of highest score by
`topk`, whatever it does with them afterwards. So for the time of a block's forward pass `topk` over
all experts gives the recorded ones, with their scores. `check_replay` in `hybridrl.engines.probe`
tries it on a model's own code.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from hybridrl.models.expert_parallel import experts_of
from hybridrl.models.parallel import experts_per_token, model_parameters, num_experts

KEYWORD = "routing"
"""The keyword of a model's call that takes a `Routing`, once `enable_replay` has been called."""

NO_RECORD = -1
"""In place of an expert: the router chooses for this token."""


class Routing:
    """The experts of one forward pass: `forced` ones, recorded ones, or both.

    `forced` [tokens, layers, k] (int16) has `NO_RECORD` for tokens whose experts the router
    chooses. Layers are those of the whole model that have experts, in order.

    Example: a first pass with `Routing(records=True)`, a second one with
    `Routing(first.recorded())`. With the same weights the two are equal bit for bit.
    """

    def __init__(self, forced: torch.Tensor | None = None, records: bool = False) -> None:
        self.forced, self.records = forced, records
        self.chosen: dict[int, torch.Tensor] = {}
        """Experts [tokens, k] by layer, of the layers that have run on this rank."""

    def force(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """The experts to take in place of the router's `own` [tokens, k]."""
        assert self.forced is not None
        forced = self.forced[:, layer].to(own.dtype)
        return torch.where(forced == NO_RECORD, own, forced)

    def recorded(self) -> torch.Tensor:
        """Experts [tokens, layers, k] of this rank's layers (int16)."""
        layers = [self.chosen[layer] for layer in sorted(self.chosen)]
        return torch.stack(layers, 1).to(torch.int16)

    def on_host(self) -> dict[int, torch.Tensor]:
        """Experts [tokens, k] by layer (int16), to be sent to other ranks."""
        return {layer: chosen.to("cpu", torch.int16) for layer, chosen in self.chosen.items()}


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a model: `layers` are the numbers of those that have any.

    Each has so many `experts`, of which a token takes `per_token`.
    """

    layers: tuple[int, ...]
    experts: int
    per_token: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ExpertShape":
        """The experts of a model; a dense one has no layers of them."""
        layers = sorted({p.layer for p in model_parameters(config) if p.experts})
        return cls(tuple(layers), num_experts(config), experts_per_token(config))

    @property
    def dtype(self) -> torch.dtype:
        """The format in which samples keep experts: a byte where that suffices.

        Ranks send each other pickles, and torch 2.13 reads none of uint16.
        """
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def numpy_dtype(self) -> "np.dtype[Any]":
        """`dtype` on the host, as numpy's."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)


def enable_replay(
    layers: Iterable[tuple[int, nn.Module]], shape: ExpertShape
) -> list["ReplayingLayer"]:
    """Let decoder `layers`, each with its number in the whole model, take a `Routing`.

    By keyword, or by `ReplayingLayer.take` where a layer's blocks are called one by one.
    """
    places = {number: place for place, number in enumerate(shape.layers)}
    return [ReplayingLayer(layer, places.get(number), shape.experts) for number, layer in layers]


class ReplayingLayer:
    """A decoder layer that takes a `Routing`; `place` is None for one without experts."""

    def __init__(self, layer: nn.Module, place: int | None, experts: int) -> None:
        self._place, self._experts = place, experts
        self._routing: Routing | None = None
        hook_routers(layer, KEYWORD, self.take, self._record, self._forcing)

    def take(self, routing: Routing | None) -> None:
        """What the layer's blocks record and replay until the next call."""
        self._routing = routing

    def _record(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if self._routing is not None and self._routing.records:
            assert self._place is not None
            self._routing.chosen[self._place] = inputs[1].detach()

    def _forcing(self) -> AbstractContextManager[Any]:
        if self._routing is None or self._routing.forced is None:
            return nullcontext()
        assert self._place is not None
        return _ForcedChoice(self._routing, self._place, self._experts)


class _ForcedChoice(TorchFunctionMode):
    """`topk` over the experts gives the forced ones, with their scores."""

    def __init__(self, routing: Routing, layer: int, experts: int) -> None:
        super().__init__()
        self._routing, self._layer, self._experts = routing, layer, experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # Other ones, among groups of experts, have fewer columns or another dimension.
        if scores.ndim != 2 or scores.shape[1] != self._experts:
            return result
        indices = self._routing.force(self._layer, result.indices)
        return type(result)((scores.gather(1, indices), indices))


def hook_routers(
    layer: nn.Module,
    keyword: str,
    take: Callable[[Any], None],
    before_experts: Callable[..., Any],
    within: Callable[[], AbstractContextManager[Any]] | None,
) -> None:
    """Let a decoder `layer` take a `keyword`, whose value, or None, `take` gets at every call.

    The keyword goes no further than the layer, so recomputation in the backward pass gets it again.
    `before_experts` is a forward pre-hook of the experts. The blocks around them, which have the
    routers, compute `within` a context.
    """

    def take_keyword(
        _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        take(keywords.get(keyword))
        return args, {name: value for name, value in keywords.items() if name != keyword}

    layer.register_forward_pre_hook(take_keyword, with_kwargs=True)
    modules = experts_of(layer)
    for module in modules:
        module.register_forward_pre_hook(before_experts)
    if within is None:
        return
    for block in list(layer.modules()):
        if any(child in modules for child in block.children()):
            block.forward = _under(within, block.forward)


def _under(within: Callable[[], AbstractContextManager[Any]], forward: Any) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        with within():
            return forward(*args, **keywords)

    return call
