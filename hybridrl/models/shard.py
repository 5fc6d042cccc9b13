"""One rank's shard of a generating model: plain local tensors, collectives in the forward pass.

`gen_layout` says which boxes a rank holds. Heads and widths of a Hugging Face module follow from
the shapes of its weights, so a module with smaller weights computes its shard. This module adds the
sum after a row-parallel product and the look-up in a sharded vocabulary (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import gen_layout
from hybridrl.layout.process_groups import axis_group, warm_up
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.buffers import fill_buffers
from hybridrl.models.expert_parallel import LocalExperts, experts_of
from hybridrl.models.image_text import TOWER_MODULE, tower_in
from hybridrl.models.mixers import has_keys, is_recurrent, precise_names
from hybridrl.models.parallel import (
    check_gen_layout,
    meta_model,
    model_parameters,
    num_experts,
    tp_style,
)
from hybridrl.models.recurrent import use_batches
from hybridrl.models.stages import head_name, modules_after, modules_before


@dataclass(frozen=True, slots=True)
class GenParallel:
    """A rank's coordinates among the `pp` x `tp` ranks of a generation instance, and its groups.

    `tp_group` has the instance's ranks of the same stage, `pp_group` those of the same `tp_rank`;
    None for a single rank. By torch the ranks of a group ascend, and coordinates may not:
    `tp_peers` and `pp_peers` map a coordinate to its group rank. Stages send sampled tokens from
    the host: a group of GPUs needs both backends (`cpu:gloo,cuda:nccl`).
    """

    pp: int = 1
    tp: int = 1
    pp_rank: int = 0
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    tp_peers: tuple[int, ...] = ()
    pp_peers: tuple[int, ...] = ()
    ep: int = 1
    """1: tp cuts every expert. Equal to tp: each rank has whole experts."""

    def __post_init__(self) -> None:
        assert self.ep in (1, self.tp), f"ep={self.ep} with tp={self.tp}"
        for axis, size, rank, group in (
            ("pp", self.pp, self.pp_rank, self.pp_group),
            ("tp", self.tp, self.tp_rank, self.tp_group),
        ):
            assert 0 <= rank < size, f"{axis} rank {rank} of {size}"
            peers = getattr(self, f"{axis}_peers") or tuple(range(size))
            object.__setattr__(self, f"{axis}_peers", peers)
            if size > 1:
                assert group is not None, f"{axis}={size} without its group"
                actual = (group.size(), group.rank())
                assert actual == (size, peers[rank]), f"not the group of {axis}"

    @classmethod
    def make(cls, mesh: Mesh, device_type: str, ep: int = 1) -> "GenParallel":
        """This process's coordinates in a generation mesh (`layout.mesh.gen_mesh`) of all ranks.

        Creates the process groups: all ranks call it together.
        """
        coordinates, grid = mesh.coordinates(dist.get_rank()), mesh.grid()
        rows = {
            "pp": grid[coordinates["instance"], :, coordinates["tp"]].tolist(),
            "tp": grid[coordinates["instance"], coordinates["pp"]].tolist(),
        }
        settings: dict[str, Any] = {"ep": ep}
        for axis, ranks in rows.items():
            settings[axis], settings[f"{axis}_rank"] = len(ranks), coordinates[axis]
            settings[f"{axis}_peers"] = tuple(sorted(ranks).index(rank) for rank in ranks)
            settings[f"{axis}_group"] = axis_group(mesh, axis) if len(ranks) > 1 else None
        parallel = cls(**settings)
        parallel.warm_up(torch.device(device_type))
        return parallel

    def warm_up(self, device: torch.device) -> None:
        """Create the communicators on `device`; those of two neighboring stages by a message."""
        warm_up([self.tp_group, self.pp_group], device)
        link = StageLink(self)
        if not self.first:
            link.receive((1, 1), torch.float32, device)
        if not self.last:
            link.send(torch.zeros(1, 1, device=device))
        link.flush()

    @property
    def instance_rank(self) -> int:
        """This rank's number in its instance, tp fastest."""
        return self.pp_rank * self.tp + self.tp_rank

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the head."""
        return self.pp_rank == self.pp - 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over the tp ranks, in place."""
        if self.tp > 1:
            dist.all_reduce(x, group=self.tp_group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The `x` of all tp ranks, concatenated along the last dimension."""
        shards = [torch.empty_like(x) for _ in range(self.tp)]
        dist.all_gather(shards, x.contiguous(), group=self.tp_group)
        return torch.cat([shards[peer] for peer in self.tp_peers], -1)

    def of_first(self, numbers: list[float]) -> list[float]:
        """What tp rank 0 has measured, on all tp ranks, so that they agree."""
        if self.tp == 1:
            return numbers
        message = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(message, group=self.tp_group, group_src=self.tp_peers[0])
        agreed: list[float] = message.tolist()
        return agreed


class StageLink:
    """Sends hidden states between the pipeline stages of an instance.

    Sends do not block, so a stage computes while its messages are in flight: at most `pp` of them,
    kept until they are sent.
    """

    def __init__(self, parallel: GenParallel) -> None:
        self._parallel = parallel
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def receive(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Hidden states [tokens, features] of the previous stage."""
        hidden = torch.empty(shape, dtype=dtype, device=device)
        source = self._parallel.pp_peers[self._parallel.pp_rank - 1]
        dist.recv(hidden, group=self._parallel.pp_group, group_src=source)
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states [tokens, features] to the next stage."""
        if len(self._sending) == self._parallel.pp:
            self._sending.popleft()[0].wait()
        hidden = hidden.contiguous()
        target = self._parallel.pp_peers[self._parallel.pp_rank + 1]
        work = dist.isend(hidden, group=self._parallel.pp_group, group_dst=target)
        assert work is not None
        self._sending.append((work, hidden))

    def flush(self) -> None:
        """Wait until all messages are sent."""
        while self._sending:
            self._sending.popleft()[0].wait()


class RowLinear(nn.Module):
    """A linear layer sharded over tp along its inputs.

    The bias is replicated and added once, after the sum. With `splits` ranks get all inputs.
    """

    def __init__(self, linear: nn.Linear, parallel: GenParallel, splits: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._parallel, self._splits = parallel, splits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., local inputs] to [..., outputs], the same on every tp rank."""
        if self._splits:
            x = x.chunk(self._parallel.tp, -1)[self._parallel.tp_rank]
        out = self._parallel.sum(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer sharded over tp along its outputs, which every rank then has all of."""

    def __init__(self, linear: nn.Linear, parallel: GenParallel) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], the same on every tp rank."""
        return self._parallel.gather(functional.linear(x, self.weight, self.bias))


class ExpertsShard:
    """The forward pass of a rank's experts, without gradients and without a wait of the host.

    Under tp all ranks have all tokens. A rank has a part of each expert, or some whole ones. It
    computes its part of the output, and the sum joins the parts. The numbers equal transformers'
    grouped products bit for bit; these take twice as many kernels, for the sake of gradients.
    """

    def __init__(self, module: nn.Module, parallel: GenParallel) -> None:
        self._module: Any = module
        self._parallel, self._local = parallel, LocalExperts(module, parallel.ep > 1)
        number, device = self._local.num_experts, next(module.parameters()).device
        self._numbers = torch.arange(number, device=device)
        self.first = parallel.tp_rank * number if parallel.ep > 1 else 0
        """The layer's number of this rank's first expert."""
        self._places: torch.Tensor | None = None
        """This rank's number of each expert of the layer: `num_experts` for one elsewhere."""
        if parallel.ep > 1:
            self._places = torch.full((number * parallel.ep,), number, device=device)
            self._places[self.first :][:number] = self._numbers
        # Widths do not change; storage may be freed later.
        self._grouped = (
            self._local.takes_grouped_products()
            and getattr(module, "has_gate", False)
            and not self._module.has_bias
            and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))
        )

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As transformers': tokens [tokens, features], their experts and weights [tokens, k]."""
        if self._places is not None:
            chosen = self._places[chosen]
        compute = self._products if self._grouped else self._local
        return self._parallel.sum(compute(hidden, chosen, weights))

    def _products(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        module, (tokens, k) = self._module, chosen.shape
        # rows by expert, those of experts elsewhere last
        experts, order = chosen.flatten().sort()
        ends = torch.searchsorted(experts, self._numbers, right=True, out_int32=True)
        rows = hidden[order // k]
        rows = self._product(rows, module.gate_up_proj, ends)
        rows = self._product(module._apply_gate(rows), module.down_proj, ends)
        if self._places is not None:  # the product leaves them unwritten
            rows.masked_fill_((experts == len(self._numbers))[:, None], 0)
        # rows by token again, in the router's order, in which they are added
        outputs = torch.empty_like(rows).index_copy_(0, order, rows).view(tokens, k, -1)
        return (outputs * weights[..., None]).sum(1).to(hidden.dtype)

    def _product(
        self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Rows [rows, in] by their expert's weight; expert i has those up to `ends[i]`."""
        weight = weight if self._module.is_transposed else weight.transpose(1, 2)
        return functional.grouped_mm(rows, weight, offs=ends)


_MULTIPLY_LOOKED_UP = {"falcon_h1"}
"""Families that multiply what they look up by `embedding_multiplier`.

Granite multiplies what it is given as well, so its embedding does not.
"""


class VocabEmbedding(nn.Module):
    """An embedding sharded over tp along its (padded) rows, times `multiplier`."""

    def __init__(
        self, embedding: nn.Embedding, parallel: GenParallel, multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._parallel = parallel
        self._rows = len(self.weight)
        # Gemma scales what it looks up.
        self._scale: float | None = getattr(embedding, "scalar_embed_scale", None)
        self._multiplier = multiplier

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [tokens] to [tokens, hidden], the same on every tp rank."""
        if self._parallel.tp > 1:
            rows = ids - self._parallel.tp_rank * self._rows
            elsewhere = (rows < 0) | (rows >= self._rows)
            x = functional.embedding(rows.masked_fill(elsewhere, 0), self.weight)
            x = self._parallel.sum(x.masked_fill_(elsewhere[..., None], 0))
        else:
            x = functional.embedding(ids, self.weight)
        if self._multiplier != 1:
            x = x * self._multiplier
        # Rounded to the weight's dtype first, as Gemma does.
        return x if self._scale is None else x * torch.tensor(self._scale, dtype=x.dtype)


class Elsewhere(nn.Module):
    """Replaces a layer of another pipeline stage."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """The hidden states, unchanged."""
        return hidden_states


def instance_layout(
    config: PretrainedConfig, pp: int, tp: int, classifier: bool = False, ep: int = 1
) -> Layout:
    """The layout of the parameters on the ranks `pp_rank * tp + tp_rank` of one instance.

    With `classifier` the model is a sequence classifier, see `model_parameters`.
    """
    parameters, mesh = model_parameters(config, classifier), Mesh((("pp", pp), ("tp", tp)))
    return gen_layout(parameters, mesh, config.num_hidden_layers, ep=ep)


def local_shapes(
    config: PretrainedConfig, parallel: GenParallel, classifier: bool = False
) -> dict[str, torch.Size]:
    """Shape of each parameter that the rank holds, by name; see `instance_layout`."""
    layout = instance_layout(config, parallel.pp, parallel.tp, classifier, parallel.ep)
    shapes = {}
    for name in layout.shapes:
        shape = LocalTensor(layout.local(name, parallel.instance_rank)).shape
        if shape is not None:
            shapes[name] = torch.Size(shape)
    return shapes


def local_model(
    config: PretrainedConfig,
    parallel: GenParallel,
    *,
    attn_implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    classifier: bool = False,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """The rank's shard of the model with uninitialized weights, under the full model's names.

    Layers of other stages are `Elsewhere`; `layer_idx` counts this stage's layers that have keys.
    Only the first stage has an embedding to call (elsewhere a tied one holds the head's weight),
    only the last norm and head. Memory is allocated for the rank's shards alone, in `dtype` but for
    what mixers have in float32 (`mixers.precise_names`). With `classifier`
    the head is a sequence classifier's, see `instance_layout`. With `weights` these are the rank's
    tensors, and no memory is allocated.
    """
    ep = parallel.ep if num_experts(config) else 1
    check_gen_layout(config, parallel.pp, parallel.tp, ep=ep)
    shapes = local_shapes(config, parallel, classifier)
    model = meta_model(config, classifier, attn_implementation=attn_implementation, dtype=dtype)
    config = model.config
    # Weights of the rank's own shapes; those of other stages stay on the meta device.
    body: Any = model.base_model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = not classifier and head.weight is embedding.weight
    precise = precise_names(model)
    for name in [name for name, _ in model.named_parameters()]:
        module, _, leaf = name.rpartition(".")
        if name in shapes:
            if weights is None:
                own = torch.float32 if name in precise else dtype
                tensor = torch.empty(shapes[name], dtype=own, device=device)
            else:
                tensor = weights[name]
            parameter = nn.Parameter(tensor, requires_grad=False)
            setattr(model.get_submodule(module), leaf, parameter)
    # What other ranks have, and the collectives that join their parts.
    multiplier = config.embedding_multiplier if config.model_type in _MULTIPLY_LOOKED_UP else 1.0
    model.set_input_embeddings(VocabEmbedding(embedding, parallel, multiplier))
    if tied:
        head.weight = embedding.weight
    if parallel.pp > 1:
        _cut(model, head_name(model), parallel, shapes)
    if parallel.tp > 1:
        _join_shards(model, config, parallel)
    else:
        shard_experts(model, parallel)
    # Its buffers are computed from the config, so not on the meta device.
    if getattr(body, "rotary_emb", None) is not None:  # Granite 4 has none
        body.rotary_emb = type(body.rotary_emb)(config).to(device)
    fill_buffers(model, device)
    left = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"without memory: {', '.join(left)}"
    if use_batches(model):
        _number_keys(model)
    return model.eval()


def shard_experts(model: nn.Module, parallel: GenParallel) -> None:
    """Have the experts of a model's layers compute without gradients (`ExpertsShard`)."""
    for experts in experts_of(model):
        if hasattr(experts, "has_gate"):  # it is called as transformers' functions are
            experts.forward = ExpertsShard(experts, parallel)


def _number_keys(model: PreTrainedModel) -> None:
    """Number the layers that have keys and values, by which attention asks the cache."""
    for index, layer in enumerate(filter(has_keys, own_layers(model))):
        for module in layer.modules():
            if hasattr(module, "layer_idx") and not is_recurrent(module):
                module.layer_idx = index


def own_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers of this rank's stage."""
    return [layer for layer in decoder_layers(model) if not isinstance(layer, Elsewhere)]


def _cut(model: Any, head: str, parallel: GenParallel, shapes: dict[str, torch.Size]) -> None:
    """Remove the modules of other stages."""
    body, prefix = model.base_model, model.base_model_prefix
    for index, layer in enumerate(body.layers):
        name = f"{prefix}.layers.{index}"
        if f"{name}.{next(layer.named_parameters())[0]}" not in shapes:
            body.layers[index] = Elsewhere()
    for index, layer in enumerate(own_layers(model)):
        for module in (m for m in layer.modules() if hasattr(m, "layer_idx")):
            module.layer_idx = index
    embedding = modules_before(model.config)[0]
    if f"{prefix}.{embedding}.weight" not in shapes:
        setattr(body, embedding, None)
    if not parallel.first and tower_in(model) is not None:
        setattr(body, TOWER_MODULE, None)
    if not parallel.last:
        for name in modules_after(model.config):
            setattr(body, name, nn.Identity())
        setattr(model, head, None)


def _join_shards(model: PreTrainedModel, config: PretrainedConfig, parallel: GenParallel) -> None:
    """Add the collectives that the styles of the modules ask for."""
    for name, module in list(model.base_model.named_modules()):
        joined: nn.Module
        match tp_style(config, name):
            case "rowwise" if isinstance(module, nn.Linear):
                joined = RowLinear(module, parallel)
            case "rowwise_split_input":
                joined = RowLinear(module, parallel, splits=True)
            case "colwise_gather_output":
                joined = GatheredLinear(module, parallel)
            case "moe_tp_experts":
                module.forward = ExpertsShard(module, parallel)
                continue
            case _:
                continue
        parent, _, child = name.rpartition(".")
        setattr(model.base_model.get_submodule(parent), child, joined)
