"""How a router spreads tokens over the experts: counts by sequence, and the loss that evens them.

The loss is that of DeepSeek-V3, by sequence (arXiv 2412.19437, equations 17 to 20). In a layer of
N experts, of which a token takes K, for a sequence of T tokens:

    f_i = N / (K T) x the tokens that take expert i
    P_i = the mean over the tokens of s_i / (s_1 + ... + s_N), with the router's scores s
    loss = f_1 P_1 + ... + f_N P_N

It is 1 where the load is even, and N / K where K experts have all. A sequence's loss does not
depend on the other sequences, so no layout and no packing changes it.

f counts tokens and has no gradient, so the gradient of each score is known in the forward pass. It
enters the backward pass at the weights of the experts, as in Megatron-LM. So each pipeline stage
adds that of its layers, and recomputation adds none twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from hybridrl.config import ConfigError
from hybridrl.models.buffers import persistent_buffers, routing_biases
from hybridrl.models.parallel import meta_model
from hybridrl.models.router_replay import hook_routers

KEYWORD = "token_sequences"
"""The keyword of a model's call that takes `TokenSequences`, once routers are watched."""


def check_bias_update(config: PretrainedConfig, rate: float) -> None:
    """Raise ConfigError for biases that are to move in a model whose routers have none."""
    if rate and not routing_biases(persistent_buffers(meta_model(config))):
        allowed = f"0 (the routers of {config.model_type} have no bias to move)"
        raise ConfigError("trainer.router_bias_update_rate", rate, allowed)


class TokenSequences:
    """The sequences of this rank's tokens of a row.

    `of_token` [tokens] has the number of each token's sequence. Tokens that fill the row up have
    the number after the last. `lengths` [sequences] count all tokens of each. The ranks of `group`
    share the row. Chunks of one sequence share `chunks`, where each leaves its counts.

    In a row with shared prompts these have numbers between those of sequences and of what fills the
    row up, `num_prompts` of them. Then `prompts` [sequences] is the number of each sequence's
    prompt, or after all others one without tokens. A prompt's tokens count for each of its
    sequences.

    It is no dataclass, of which FSDP passes copies to the layers.

    Example: of two sequences of 1 and 3 tokens and one that fills up, `of_token` is 0 1 1 1 2.
    """

    def __init__(
        self,
        of_token: torch.Tensor,
        lengths: torch.Tensor,
        group: ProcessGroup | None = None,
        start: int = 0,
        chunks: dict[tuple[int, int], torch.Tensor] | None = None,
        prompts: torch.Tensor | None = None,
        num_prompts: int = 0,
    ) -> None:
        self.of_token, self.lengths, self.group = of_token, lengths, group
        self._start, self._chunks = start, chunks
        self._prompts, self._num_prompts = prompts, num_prompts
        self._numbers = len(lengths) + num_prompts + (1 if prompts is None else 2)

    def of_rank(self, own: slice, device: torch.device) -> "TokenSequences":
        """The sequences of the tokens `own` of the row, on `device`."""
        tensors = self.of_token[own].to(device), self.lengths.to(device)
        prompts = None if self._prompts is None else self._prompts.to(device)
        of_chunk = self._start, self._chunks
        return TokenSequences(*tensors, self.group, *of_chunk, prompts, self._num_prompts)

    def counts(self, chosen: torch.Tensor, experts: int) -> torch.Tensor:
        """This rank's tokens of each sequence and expert [sequences, experts].

        `chosen` [tokens, k] are their experts.
        """
        counts = torch.zeros(self._numbers * experts, dtype=torch.long, device=chosen.device)
        places = (self.of_token[:, None] * experts + chosen).flatten()
        counts.scatter_add_(0, places, torch.ones_like(places))
        by_number = counts.view(self._numbers, experts)
        own = by_number[: len(self.lengths)]
        return own if self._prompts is None else own + by_number[self._prompts]

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` [sequences, n] of each token's sequences, [tokens, n]; 0 where it has none.

        Those of the sequences of a prompt are added up.
        """
        by_number = values.new_zeros(self._numbers, values.shape[1])
        by_number[: len(values)] = values
        if self._prompts is not None:
            by_number.index_add_(0, self._prompts, values)
        return by_number[self.of_token]

    def of_whole(self, layer: int, counts: torch.Tensor) -> torch.Tensor:
        """The `counts` of a layer over all ranks and chunks of the sequences.

        Of chunks whose forward pass has run: all of them, before the first backward pass.
        """
        if self.group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.group)
        if self._chunks is not None:
            self._chunks[layer, self._start] = counts
            counts = torch.stack([x for (of, _), x in self._chunks.items() if of == layer]).sum(0)
        return counts


class RouterLoss:
    """The balance loss of the layers of this rank, while their gradients are computed.

    `scale` multiplies its gradient; with 0 there is no loss. `value` sums the scaled loss up.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = 0.0
        self.value = torch.zeros((), device=device)

    def start(self, scale: float) -> None:
        """Sum from zero."""
        self.scale = scale
        self.value.zero_()

    def attach(
        self,
        weights: torch.Tensor,
        scores: torch.Tensor,
        counts: torch.Tensor,
        sequences: TokenSequences,
    ) -> torch.Tensor:
        """The `weights` [tokens, k] of the experts, whose backward pass adds the loss's gradient.

        `scores` [tokens, experts] are the router's, `counts` [sequences, experts] those of whole
        sequences.
        """
        experts, k = scores.shape[1], weights.shape[1]
        per_token = self.scale * experts / k / sequences.lengths.float().square()
        share = counts * per_token[:, None]
        balanced: torch.Tensor = _Attached.apply(weights, scores, share, sequences, self.value)
        return balanced


class _Attached(torch.autograd.Function):
    """`RouterLoss.attach`, with `share` = f_i / T of each sequence [sequences, experts]."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        scores: torch.Tensor,
        share: torch.Tensor,
        sequences: TokenSequences,
        value: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(scores)
        ctx.constants = share, sequences, value
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scores,) = ctx.saved_tensors
        share, sequences, value = ctx.constants
        total = scores.float().sum(-1, keepdim=True)
        wanted = sequences.of_tokens(share)
        of_token_loss = (scores * wanted).sum(-1, keepdim=True) / total
        value.add_(of_token_loss.sum())
        return grad, ((wanted - of_token_loss) / total).to(scores.dtype), None, None, None


Observe = Callable[[int, torch.Tensor], None]
"""Gets a layer's number, and the counts [sequences, experts] of this rank's tokens."""


class WatchedLayer:
    """A decoder layer that takes `TokenSequences`, with experts or without.

    `number` is its number in the whole model. `observe` is called where gradients are computed;
    again, where the layer is recomputed.
    """

    def __init__(
        self,
        number: int,
        layer: nn.Module,
        experts: int,
        observe: Observe,
        loss: RouterLoss | None,
    ) -> None:
        self._number, self._experts, self._observe = number, experts, observe
        self._loss = loss
        self._sequences: TokenSequences | None = None
        self._scores: _Scores | None = None
        within = None if loss is None else self._reading
        hook_routers(layer, KEYWORD, self._take, self._count, within)

    def _take(self, sequences: TokenSequences | None) -> None:
        self._sequences = sequences

    def _reading(self) -> AbstractContextManager[Any]:
        if self._sequences is None:
            return nullcontext()
        self._scores = _Scores(self._experts)
        return self._scores

    def _count(
        self, _: nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        sequences = self._sequences
        if sequences is None:
            return None
        counts = sequences.counts(inputs[1], self._experts)
        if torch.is_grad_enabled():  # else the pass is repeated
            self._observe(self._number, counts)
        if self._loss is None:
            return None
        counts = sequences.of_whole(self._number, counts)
        reader, self._scores = self._scores, None  # it holds the graph
        if not torch.is_grad_enabled():
            return None
        assert reader is not None
        weights = self._loss.attach(inputs[2], reader.read(), counts, sequences)
        return *inputs[:2], weights, *inputs[3:]


class _Scores(TorchFunctionMode):
    """Reads a router's scores [tokens, experts] while a block computes.

    They are what `softmax` or `sigmoid` makes of the logits of all experts. A router that takes
    `topk` of the logits themselves has the softmax of those.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._scores: Any = None
        self._chosen = False

    def read(self) -> torch.Tensor:
        """The scores, once the router has chosen."""
        assert self._chosen, "the router does not choose by topk"
        scores: torch.Tensor = self._scores
        return scores

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._chosen or name not in ("softmax", "sigmoid", "topk"):
            return result
        scores = result
        if name == "topk":
            scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[1] != self._experts:
            return result
        if name == "topk":
            self._chosen = True
            scores = scores.softmax(-1) if self._scores is None else self._scores
        self._scores = scores
        return result
