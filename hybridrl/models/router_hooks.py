"""Hooks by which replay and balance of experts reach the routers of a decoder layer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from hybridrl.models.expert_parallel import experts_of


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
