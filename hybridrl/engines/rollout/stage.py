"""One rank's forward pass, and the messages between the ranks of an instance.

Each stage sends hidden states to the next as soon as they are computed; the last stage sends
sampled tokens to all others. Sends do not block, so a stage computes while its messages are in
flight. One tensor-parallel rank samples and sends the tokens to the others, so that all agree. On
GPUs they go from device to device, where they feed the next step.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.engines.rollout.batch import PassInputs
from hybridrl.engines.rollout.decode import FAMILIES as FUSED_FAMILIES
from hybridrl.engines.rollout.decode import FusedDecoder
from hybridrl.engines.rollout.device_copies import Download
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.kept_ids import IdArray
from hybridrl.engines.rollout.logit_edits import barred
from hybridrl.engines.rollout.memory import num_states
from hybridrl.engines.rollout.sampling import SamplingBatch, sample
from hybridrl.models import paged_attention
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.config_json import num_recurrent
from hybridrl.models.image_text import image_pads, tower_in
from hybridrl.models.images import PlacedImages, RowImages
from hybridrl.models.logits import logits_transform
from hybridrl.models.mixers import has_keys
from hybridrl.models.paged_attention import KVCache
from hybridrl.models.parallel import kv_heads_of_rank
from hybridrl.models.recurrent import continues, state_shapes, state_tokens
from hybridrl.models.router_replay import (
    KEYWORD,
    ExpertShape,
    ReplayingLayer,
    Routing,
    enable_replay,
)
from hybridrl.models.shard import GenParallel, StageLink, local_model, own_layers
from hybridrl.models.states import StateCache, state_bytes
from hybridrl.models.vision import VisionTower, image_reader, vision_tower


class DrawnTokens(NamedTuple):
    """Tokens [rows] of a step on the host, their log-probabilities, and the ids of `sample`.

    `kept` [rows, num_kept] is None where no row keeps its ids.
    """

    tokens: npt.NDArray[np.integer[Any]]
    log_probs: npt.NDArray[np.float32]
    kept: IdArray | None = None


class Drawn:
    """What a decode step has drawn for its rows, perhaps still in flight.

    `tokens` are the pending ones of the next step. They stay on the device, and their copies are on
    the way to the host. Stages of a pipeline send each other one int64 message [2 + num_kept, rows]
    from host to host, the log-probabilities as bits of a double.
    """

    def __init__(self, tokens: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """`values` are those of `sample`, or a message with all of them."""
        self.tokens = tokens
        self.underway: list[dist.Work] = []
        self._copies = Download(values)

    def wait(self) -> DrawnTokens:
        """What was drawn, once it is on the host."""
        for work in self.underway:
            work.wait()
        tokens, *others = self._copies.wait()
        if not others:
            message, tokens = tokens, tokens[0]
            others = [message[1].view(torch.float64).float()]
            others += [message[2:].T] if len(message) > 2 else []
        log_probs, *kept = others
        ids = kept[0].int().numpy() if kept else None
        return DrawnTokens(tokens.numpy(), log_probs.numpy(), ids)


class RolloutStage:
    """The rank's layers with their weights, KV cache and neighbors.

    `decode` and `prefill` are called in the same order on all ranks of the instance, with the same
    batches. Each rank caches its own layers and heads.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        parallel: GenParallel,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_sequence: int,
        takes_routing: bool = False,
        weights: Mapping[str, torch.Tensor] | None = None,
        max_running: int = 0,
    ) -> None:
        """With `weights` these are the rank's tensors, and stay where they are (`wide.py`).

        States of recurrent layers are for `max_running` sequences, and as many prefixes.
        """
        self.parallel = parallel
        self.dtype, self.device = dtype, device
        self.model = local_model(
            config,
            parallel,
            attn_implementation=paged_attention.NAME,
            dtype=dtype,
            device=device,
            weights=weights,
        )
        self._path: str = config.name_or_path
        self._pads = image_pads(config)
        self._state_shapes = state_shapes(self.model)
        self._key_layers = sum(map(has_keys, own_layers(self.model)))
        # Stages decide alike, so a stage without recurrent layers counts those of others.
        recurrent = num_recurrent(config) > 0
        self.num_states = num_states(max_running) if recurrent else 0
        self.state_bytes = state_bytes(self._state_shapes)
        self._continues = bool(self._state_shapes) and continues(config)
        self.state_tokens = state_tokens(config, dtype) if recurrent else 0
        self._replaying: list[ReplayingLayer] = []
        if takes_routing:
            self._replaying = enable_replay(self.numbered_layers(), ExpertShape.of(config))
        fused = config.model_type in FUSED_FAMILIES
        self.decoder = FusedDecoder(self.model, max_sequence, weights is None) if fused else None
        self._vocab_size: int = config.vocab_size
        self._hidden_size: int = config.hidden_size
        self._head_dim = attention_shape(config).head_size
        self._kv_heads = kv_heads_of_rank(config, parallel.tp)
        self._transform = logits_transform(config)
        self._shapes = {name: (p.shape, p.dtype) for name, p in self.model.named_parameters()}
        self.buffers = persistent_buffers(self.model)
        self.aliases = set(self.model.state_dict()) - set(self._shapes) - set(self.buffers)
        self._link = StageLink(parallel)
        self._vocab_shards: list[int] | None = None  # rows of each tp rank, where they differ

    @cached_property
    def _tower(self) -> VisionTower:
        """A frozen tower, or that of the model, once the first image has come."""
        own = tower_in(self.model)
        if own is None:
            return vision_tower(self._path, self.dtype, self.device)
        return VisionTower(self._path, self.dtype, self.device, own)

    def forget_images(self) -> None:
        """Drop the features of images, if the tower's weights change with the model's."""
        if "_tower" in vars(self) and tower_in(self.model) is not None:
            self._tower.forget()

    def share_vocabulary(self, model: PreTrainedModel, width: int) -> None:
        """Take the embedding of `model`, of which this one has views, and the cuts of its head.

        `model` has equal shards, each cut in `width` chunks. The last one may be smaller.
        """
        if self.parallel.first:
            self.model.set_input_embeddings(model.get_input_embeddings())
        if self.parallel.last:
            rows = len(model.get_output_embeddings().weight)
            each = -(-rows // width)
            ends = [min(rows, each * number) for number in range(width + 1)]
            chunks = [stop - start for start, stop in itertools.pairwise(ends)]
            self._vocab_shards = chunks * (self.parallel.tp // width)

    def numbered_layers(self) -> list[tuple[int, nn.Module]]:
        """The rank's decoder layers, with their numbers in the whole model."""
        own = own_layers(self.model)
        return [(i, layer) for i, layer in enumerate(decoder_layers(self.model)) if layer in own]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The rank's own tensors by state-dict name, tied ones once."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def copy_in(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors, named as in `state_dict()`, into the parameters and buffers.

        The names of a tied pair fill the same tensor: the pair's second name is skipped. Raises
        ValueError for an unknown name or another shape.
        """
        own = {**self.parameters(), **self.buffers}
        for name, tensor in weights:
            if name in self.aliases:
                continue
            if name not in own:
                raise ValueError(f"the rollout model has no parameter {name!r}")
            if own[name].shape != tensor.shape:
                wanted = tuple(own[name].shape)
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted {wanted}")
            own[name].copy_(tensor)

    def free(self) -> None:
        """Free the weights, after all messages are sent."""
        self._link.flush()
        self.forget_images()
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
        if self.decoder is not None:
            self.decoder.free()

    def allocate(self) -> None:
        """Allocate memory for the weights, uninitialized."""
        for name, parameter in self.model.named_parameters():
            shape, dtype = self._shapes[name]
            parameter.data = torch.empty(shape, dtype=dtype, device=self.device)
        if self.decoder is not None:
            self.decoder.allocate()

    def kv_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of the rank's keys and values: [layers, 2, kv_heads, tokens, head_dim].

        Layers are those that have some.
        """
        return self._key_layers, 2, self._kv_heads, tokens, self._head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on this rank."""
        return math.prod(self.kv_shape(1)) * self.dtype.itemsize

    def make_cache(
        self, num_blocks: int, block_size: int, lender: KVCache | None = None
    ) -> KVCache:
        """The cache of the rank's layers and key-value heads: blocks 0 to `num_blocks`.

        It may be in the memory of a `lender`, which has more heads and fewer blocks.
        """
        cache = KVCache(
            layers=self.kv_shape(1)[0],
            blocks=num_blocks + 1,
            block_size=block_size,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            dtype=self.dtype,
            device=self.device,
            lender=lender,
        )
        if self._state_shapes:
            rest = self.num_states, self.device, self._continues
            cache.states = StateCache(self._state_shapes, *rest)
        return cache

    def num_blocks(self, lender: KVCache) -> int:
        """The `num_blocks` of a cache in the memory of a `lender`."""
        return lender.blocks.shape[1] * lender.kv_heads // self._kv_heads - 1

    def prefill(self, inputs: PassInputs, routing: Routing | None = None) -> None:
        """Cache the keys and values of a pass."""
        self._pass_on(self._module(inputs, self._inputs(inputs.token_ids), routing))

    def decode(
        self,
        inputs: PassInputs,
        routing: Routing | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Logits [tokens, vocab], float32 on the rank that samples (`draws`), None on others.

        With `places` they are those of these tokens of the pass alone.
        """
        hidden = self.feed(inputs, routing)
        if not self.parallel.last:
            return None
        if places is not None and len(places) < len(hidden):
            hidden = hidden[places]
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [tokens, vocab] of the last stage's `hidden` [tokens, hidden]: see `decode`."""
        head = self.model.get_output_embeddings()
        return self._join(self._transform.apply_(_products(hidden, head)))

    def logits_everywhere(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits`, contiguous, on every rank of a stage that holds equal shards."""
        head = self.model.get_output_embeddings()
        logits = self._transform.apply_(_products(hidden, head))
        if self.parallel.tp > 1:
            logits = self.parallel.gather(logits)[:, : self._vocab_size]
        return logits.contiguous()

    def feed(self, inputs: PassInputs, routing: Routing | None = None) -> torch.Tensor:
        """A decode step without its logits: the stage's hidden states [tokens, hidden]."""
        x = self._inputs(inputs.token_ids)
        if self.decoder is not None:
            for layer in self._replaying:
                layer.take(routing)
            rotations = inputs.rotations  # of tokens that are none of an image: all are alike
            positions = inputs.positions if rotations is None else rotations[0]
            hidden = self.decoder(inputs.paged, x, positions)
        else:
            hidden = self._module(inputs, x, routing)
        self._pass_on(hidden)
        return hidden

    @property
    def bars_pads(self) -> bool:
        """Whether pads of images are left out of its draws."""
        return bool(self._pads)

    @property
    def draws(self) -> bool:
        """Whether this rank samples the tokens."""
        return self.parallel.last and self.parallel.tp_rank == 0

    def draw(
        self,
        logits: torch.Tensor | None,
        uniforms: torch.Tensor | None,
        batch: SamplingBatch,
        edited: torch.Tensor | None = None,
    ) -> Drawn:
        """Sample the tokens of a decode step, or receive them; `Drawn.wait` returns them.

        `logits` and `uniforms` [rows] are None on ranks that do not sample; `edited`: see `sample`.
        """
        parallel = self.parallel
        if logits is not None:
            assert uniforms is not None
            # Pads stand for images in prompts, and mean nothing elsewhere.
            edited = barred(logits, self._pads, edited)
            tokens, log_probs, kept = sample(logits, uniforms, batch, edited)
            if parallel.pp * parallel.tp == 1:
                return Drawn(tokens, [tokens, log_probs, *([] if kept is None else [kept])])
            message = torch.stack((tokens, log_probs.double().view(torch.int64)))
            if kept is not None:
                message = torch.cat((message, kept.T.long()))
        else:
            # A rank of the last stage gets them on the device, other stages on the host.
            device = self.device if parallel.last else None
            shape = 2 + batch.num_kept, len(batch.temperature)
            message = torch.empty(shape, dtype=torch.int64, device=device)
        if parallel.last and parallel.tp > 1:
            dist.broadcast(message, group=parallel.tp_group, group_src=parallel.tp_peers[0])
        if parallel.pp == 1:
            return Drawn(message[0], [message])
        message = message.cpu()
        drawn = Drawn(message[0], [message])
        drawn.underway = self._send_drawn(message)
        return drawn

    def _module(
        self, inputs: PassInputs, x: torch.Tensor, routing: Routing | None = None
    ) -> torch.Tensor:
        """The stage's layers (and norm) by the Hugging Face module, [tokens, hidden] likewise."""
        hidden: torch.Tensor = self.model.base_model(
            **self._with_images(inputs, x),
            position_ids=inputs.position_ids,
            use_cache=False,
            paged=inputs.paged,
            **({} if routing is None else {KEYWORD: routing}),
        ).last_hidden_state
        return hidden[0]

    def _with_images(self, inputs: PassInputs, x: torch.Tensor) -> dict[str, Any]:
        """The module's inputs, from the hidden states `x` [tokens, hidden]."""
        images = inputs.images
        if images is None or not self.parallel.first:
            return {"inputs_embeds": x[None]}
        features = [self._tower.features(own)[rows] for own, rows in images.parts]
        pads = torch.from_numpy(images.pads).to(x.device)
        return RowImages(pads, torch.cat(features)).inputs(x[None])

    def place(self, request: Request) -> PlacedImages | None:
        """Where the images of a request's prompt are among its tokens; None without any."""
        if not request.images:
            return None
        reader = self._tower if self.parallel.first else image_reader(self._path)
        return reader.placed(request.prompt_ids, request.images)

    def _inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, hidden]: embedded, or from the previous stage."""
        if self.parallel.first:
            embedded: torch.Tensor = self.model.get_input_embeddings()(token_ids)
            return embedded
        return self._link.receive((len(token_ids), self._hidden_size), self.dtype, self.device)

    def _pass_on(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the next stage; one message a lane may be in flight."""
        if not self.parallel.last:
            self._link.send(hidden)

    def _join(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Logits of all tp ranks, concatenated without padding, on the rank that samples."""
        if self.parallel.tp == 1:
            return logits
        shards, sizes = None, self._vocab_shards
        if sizes is not None and logits.shape[1] < max(sizes):
            logits = F.pad(logits, (0, max(sizes) - logits.shape[1]))
        if self.draws:
            shards = [torch.empty_like(logits) for _ in range(self.parallel.tp)]
        peers = self.parallel.tp_peers
        dist.gather(logits, shards, group=self.parallel.tp_group, group_dst=peers[0])
        if shards is None:
            return None
        if sizes is not None:  # without the padding of each
            shards = [shards[peer][:, :size] for peer, size in zip(peers, sizes, strict=True)]
            return torch.cat(shards, -1)[:, : self._vocab_size]
        return torch.cat([shards[peer] for peer in peers], -1)[:, : self._vocab_size]

    def _send_drawn(self, message: torch.Tensor) -> list[dist.Work]:
        """Send sampled tokens from the last stage to the others."""
        group, (*others, last) = self.parallel.pp_group, self.parallel.pp_peers
        if self.parallel.last:
            works = [dist.isend(message, group=group, group_dst=i) for i in others]
        else:
            works = [dist.irecv(message, group=group, group_src=last)]
        return [work for work in works if work is not None]


def _products(hidden: torch.Tensor, head: Any) -> torch.Tensor:
    """`hidden` [tokens, hidden] times the head's weight [vocab, hidden], and its bias, in float32.

    As in training: rounded to bfloat16, a logit of 16 to 32 is up to 0.06 off, and the engines'
    log-probabilities differ by that.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        products = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
    else:
        products = F.linear(hidden.float(), head.weight.float())
    if head.bias is not None:
        products += head.bias
    return products
