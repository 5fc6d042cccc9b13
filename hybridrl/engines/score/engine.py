"""Forward passes on one generation instance: log-probabilities, and the scores of a reward model.

A role that only scores has a replica within an instance, in the generation layout. So it can run
while other instances still decode (RLHFuse, arXiv 2409.13221, section 4): it communicates only
among the instance's `pp` x `tp` ranks.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config import Attention
from hybridrl.engines.score.node_copy import NodeCopy, shared_copy
from hybridrl.engines.train.image_rows import check_images_came
from hybridrl.engines.train.interface import TrainSequence, last_position
from hybridrl.engines.train.packed import PackedBatch, keep_experts, pack
from hybridrl.engines.train.shared_prompts import prompt_groups
from hybridrl.engines.train.truncated import truncated
from hybridrl.kernels.linear_log_probs import VocabShard, linear_log_probs
from hybridrl.kernels.top_log_probs import top_log_probs
from hybridrl.models.attention_choice import choose_attention
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.config_json import num_recurrent
from hybridrl.models.fused_layers import fuse_layers
from hybridrl.models.image_text import image_pads, tower_in
from hybridrl.models.load import check_supported
from hybridrl.models.local_weights import load_buffers, load_local, take_local
from hybridrl.models.logits import logits_transform
from hybridrl.models.packed_attention import NAME
from hybridrl.models.router_replay import KEYWORD, ExpertShape
from hybridrl.models.shard import GenParallel, StageLink, local_model
from hybridrl.models.vision import tower_of
from hybridrl.system.activity import mark

logger = logging.getLogger(__name__)

Head = Callable[[torch.Tensor, PackedBatch, Sequence[TrainSequence]], torch.Tensor]
"""(hidden [tokens, features], row, its sequences) to the row's values, in the row's order."""


class Weights(Enum):
    """The state of an engine's weights."""

    empty = "empty"  # memory without values
    here = "here"  # on the device, ready to score
    offloaded = "offloaded"  # on the host
    borrowed = "borrowed"  # another owner's


class ScoreEngine:
    """One rank's shard of a model that only scores.

    All ranks of the instance call `log_probs` and `values_at_end` together with the same sequences,
    and all get all results.

    States (`weights`): empty -> `load`, `load_once` or `share` -> here <-> (`offload`, `onload`)
    offloaded; an engine over the model of another one stays borrowed. Invariant: results come from
    here or borrowed alone.

    Example: `engine = ScoreEngine(config, GenParallel(), dtype=..., ...)`, `engine.load(path)`,
    `engine.log_probs(sequences)`; `ScoreEngine(config, parallel, model=rollout.model, ...)` scores
    with the weights that generate (old-policy log-probabilities) and owns none.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        parallel: GenParallel,
        *,
        model: PreTrainedModel | None = None,
        dtype: torch.dtype,
        device: torch.device,
        attention: Attention = Attention.auto,
        temperature: float = 1.0,
        max_tokens_per_micro_batch: int = 8192,
        deterministic: bool = False,
        shares_prompts: bool = False,
        classifier: bool = False,
        num_likeliest: int | None = None,
        fused: bool = False,
    ) -> None:
        """The rank's part of `model_config`, or an engine over `model`, which `local_model` made.

        `classifier` is for a reward model (a sequence classifier). `temperature` divides the
        logits. A row has at most `max_tokens_per_micro_batch` tokens, or one sequence. With
        `deterministic` it is always one sequence: a result is the same bit for bit whatever else is
        scored. It costs one pass a sequence. `top_log_probs` is a distribution over the first
        `num_likeliest` tokens, those of a smaller student; None takes all. With `fused` layers take
        fewer kernels (`models.fused_layers`), if the module is its own.

        Raises ValueError for a temperature that is not above 0, a bound below 1 or a model that is
        not supported. Raises ConfigError for a layout that the model cannot take.
        """
        if max_tokens_per_micro_batch < 1:
            raise ValueError(f"{max_tokens_per_micro_batch=}: wanted 1 or more")
        check_supported(model_config)

        # How it scores.
        self.config, self.parallel = model_config, parallel
        self.dtype, self.device = dtype, device
        self.temperature = temperature
        shape = attention_shape(model_config)
        self.attention = choose_attention(attention, device, dtype, shape)
        self.max_tokens, self.deterministic = max_tokens_per_micro_batch, deterministic
        self.shares_prompts = shares_prompts and not num_recurrent(model_config)
        self.classifier = classifier
        self._num_likeliest = min(num_likeliest or model_config.vocab_size, model_config.vocab_size)
        self._link = StageLink(parallel)

        # It scores with another engine's module, or with its own weights.
        self.weights = Weights.empty if model is None else Weights.borrowed
        self.model = model or local_model(
            model_config,
            parallel,
            attn_implementation=NAME,
            dtype=dtype,
            device=device,
            classifier=classifier,
        )
        if fused and model is None:
            fuse_layers(self.model)
        self._host: Sequence[torch.Tensor] = []
        self._copy: NodeCopy | None = None
        self._shares = False

    # Weights

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's own weights; 0 if they are borrowed."""
        if self.weights is Weights.borrowed:
            return 0
        parameters = list(self._host or self.model.parameters())
        return sum(parameter.nbytes for parameter in parameters)

    def load(self, path: str, key: str = "model.path") -> None:
        """Read this rank's shards of the weights at `path`; raises as `load_local` does."""
        assert self.weights in (Weights.empty, Weights.here), f"load: weights are {self.weights}"
        logger.debug("loading %s", path)
        load_local(
            self.model, path, self.config, self.parallel, classifier=self.classifier, key=key
        )
        self._forget_host()
        self.weights = Weights.here

    def load_once(self, path: str, key: str = "model.path") -> None:
        """`load` on one rank of a node: its copy in host memory is that of all with its shards.

        All ranks of the world call it together.
        """
        assert self.weights is Weights.empty, f"load_once: weights are {self.weights}"
        parameters = list(self.model.parameters())
        self._have(shared_copy(parameters, self._shards, lambda: self.load(path, key)))
        if self.weights is Weights.empty:  # another rank has loaded them
            load_buffers(self.model, path, self.config, self.classifier)
            self.weights = Weights.here

    def keep_once(self) -> None:
        """Share the present weights as `load_once` does, on all ranks together."""
        assert self.weights is Weights.here, f"keep_once: weights are {self.weights}"
        self._forget_host()
        self._have(shared_copy(list(self.model.parameters()), self._shards))

    @property
    def _shards(self) -> tuple[int, int]:
        """Equal for ranks with the same shards."""
        return self.parallel.pp_rank, self.parallel.tp_rank

    def _have(self, copy: NodeCopy | None) -> None:
        self._copy = copy
        if copy is not None and copy.pinned is not None:  # else they are the model's own
            self._host = copy.tensors

    def _forget_host(self) -> None:
        """Drop the copy in host memory: other weights are on the device, or will be."""
        if self._copy is not None:
            self._copy.release()
        self._host, self._copy = [], None

    def take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy another model's full parameters [..], and buffers, to those of the same names."""
        assert self.weights is Weights.here, f"take_weights: weights are {self.weights}"
        assert not self._shares, "these weights are shared"
        self._forget_host()
        take_local(self.model, weights, self.config, self.parallel)

    def share(self, host: Mapping[str, torch.Tensor], path: str) -> None:
        """Use tensors in host memory by name, which other owners share and no one changes.

        Without an accelerator the model computes with these very tensors. Its buffers are read from
        the weights at `path`.
        """
        assert self.weights is Weights.empty, f"share: weights are {self.weights}"
        self._host = [host[name] for name, _ in self.model.named_parameters()]
        load_buffers(self.model, path, self.config)
        self._shares, self.weights = True, Weights.offloaded
        self.onload()

    def parameters(self) -> dict[str, torch.Tensor]:
        """The rank's own tensors by state-dict name, tied ones once; to be written in place."""
        assert not self._shares, "these weights are shared"
        assert self.weights in (Weights.empty, Weights.here), f"weights are {self.weights}"
        self.weights = Weights.here
        self._forget_host()
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def offload(self) -> None:
        """Free the device's memory; a copy of the weights, which never change, stays on the host.

        Without an accelerator only the state changes.
        """
        assert self.weights is Weights.here, f"offload: weights are {self.weights}"
        self.weights = Weights.offloaded
        if self.device.type == "cpu":
            return
        parameters = list(self.model.parameters())
        self._host = self._host or [p.data.cpu().pin_memory() for p in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)

    def onload(self) -> None:
        """Bring the weights back to the device."""
        assert self.weights is Weights.offloaded, f"onload: weights are {self.weights}"
        self.weights = Weights.here
        # Without an accelerator it is empty, or shared.
        for parameter, kept in zip(self.model.parameters(), self._host, strict=False):
            parameter.data = kept.to(self.device, non_blocking=True)

    @property
    def temperature(self) -> float:
        """What divides the logits, from the next pass on."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"temperature={value}: wanted a number above 0")
        self._temperature = value
        self._transform = logits_transform(self.config).under(value)

    # Scores

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequence[TrainSequence], records_experts: bool = False
    ) -> list[torch.Tensor]:
        """Log-probability of every response token, [response_tokens] a sequence.

        In float32 on the CPU. With `records_experts` it fills `routed_experts` of the sequences;
        without, it replays those that they have. For both the model must take a `Routing`. Raises
        ValueError for a response without a token before it.
        """
        assert not self.classifier, "a sequence classifier has no vocabulary"
        counts = [s.response_tokens for s in sequences]
        return self._run(sequences, counts, self._token_log_probs, records_experts)

    @torch.no_grad()
    def top_log_probs(
        self, sequences: Sequence[TrainSequence], k: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The `k` likeliest tokens of every response position, the likeliest first.

        Of each sequence their ids and their log-probabilities, [response_tokens, k], on the CPU.
        Raises ValueError as `log_probs` does.
        """
        assert not self.classifier, "a sequence classifier has no vocabulary"
        counts = [s.response_tokens for s in sequences]
        head = partial(self._top_log_probs, k)
        columns = self._run(sequences, counts, head, width=(2 * k,))
        pairs = (rows.reshape(-1, 2 * k).split(k, 1) for rows in columns)
        return [(ids.long(), log_probs.contiguous()) for ids, log_probs in pairs]

    @torch.no_grad()
    def named_log_probs(self, sequences: Sequence[TrainSequence], field: str) -> list[torch.Tensor]:
        """Log-probabilities of the tokens in a `field` [response_tokens, k], the same k in all.

        They are [response_tokens, k] a sequence, on the CPU. A token of -1 is none, and has 0.
        """
        assert not self.classifier, "a sequence classifier has no vocabulary"
        counts = [s.response_tokens for s in sequences]
        ids = [s.fields[field] for s in sequences]
        width = {x.shape[1] for x in ids if isinstance(x, torch.Tensor)}
        head = partial(self._named_log_probs, field)
        columns = self._run(sequences, counts, head, width=tuple(width))
        return [rows.reshape(count, *width) for rows, count in zip(columns, counts, strict=True)]

    @torch.no_grad()
    def values_at_end(self, sequences: Sequence[TrainSequence]) -> list[float]:
        """The classifier's score of every sequence, at its last token.

        As in transformers, the last one that is not `pad_token_id`: a model whose end token is its
        padding was trained with the score before it.
        """
        assert self.classifier, "only a sequence classifier has a score"
        bare = [TrainSequence(x.ids, 0, images=x.images) for x in sequences]
        return [value.item() for value in self._run(bare, [1] * len(bare), self._values)]

    def _run(
        self,
        sequences: Sequence[TrainSequence],
        counts: Sequence[int],
        head: Head,
        records_experts: bool = False,
        width: tuple[int, ...] = (),
    ) -> list[torch.Tensor]:
        """`counts[i]` values for sequence i, computed by `head` on the last stage; on the CPU.

        A value is a number, or a row of the `width`.
        """
        assert self.weights in (Weights.here, Weights.borrowed), f"weights are {self.weights}"
        assert next(self.model.parameters()).numel(), "the owner of the weights sleeps"
        if not self.classifier:  # whose sequences are all prompt
            check_images_came(sequences, image_pads(self.config))
        rows = self._rows(sequences, counts)
        logger.debug("scoring %d sequences, %d rows", len(sequences), len(rows))
        order: list[int] = []
        row_values: list[torch.Tensor] = []
        batches: list[PackedBatch] = []
        with self._packed():
            for number, row in enumerate(rows):
                mark("forward", number)
                members = [sequences[i] for i in row]
                batch = pack(
                    members,
                    self.attention,
                    self.device,
                    records_experts=records_experts,
                    shares_prompts=self.shares_prompts,
                    tower=tower_of(self.config, self.dtype, self.device, self.parallel.first),
                )
                if records_experts:
                    batches.append(replace(batch, images=None, kept=None))
                order += [row[position] for position in batch.order]
                hidden = self._stage(batch)
                if self.parallel.last:
                    row_values.append(head(hidden, batch, [members[i] for i in batch.order]))
                else:
                    self._link.send(hidden)
                del batch  # before the features of the next row's images are read
        if records_experts:
            members_by_row = [[sequences[i] for i in row] for row in rows]
            group = self.parallel.pp_group if self.parallel.pp > 1 else None
            keep_experts(members_by_row, batches, ExpertShape.of(self.config).dtype, group)
        joined = self._broadcast(row_values, (sum(counts), *width))
        values = joined.cpu().split([counts[i] for i in order])
        results = [torch.zeros(0)] * len(sequences)
        for index, value in zip(order, values, strict=True):
            results[index] = value.clone()
        return results

    def _rows(self, sequences: Sequence[TrainSequence], counts: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each row; those with nothing to score are omitted."""
        scored = [index for index, count in enumerate(counts) if count]
        if self.deterministic:
            return [[index] for index in scored]
        members = [sequences[index] for index in scored]
        groups = prompt_groups(members, shares_prompts=self.shares_prompts)
        return [[scored[i] for i in indices] for indices in groups.micro_batches(self.max_tokens)]

    @contextmanager
    def _packed(self) -> Iterator[None]:
        """Switch the model to attention over packed rows: a borrowed one uses another."""
        config = self.model.config
        before, config._attn_implementation = config._attn_implementation, NAME
        try:
            yield
        finally:
            config._attn_implementation = before

    # Heads

    def _token_log_probs(
        self, hidden: torch.Tensor, batch: PackedBatch, sequences: Sequence[TrainSequence]
    ) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        log_probs, _ = linear_log_probs(
            hidden.index_select(0, batch.predicting),
            head.weight,
            batch.targets,
            shard=self._shard(head.weight),
            bias=head.bias,
            candidates=batch.kept,
            **self._transform,
        )
        if batch.kept is not None:
            log_probs, _ = truncated(log_probs, None, batch.kept, batch.targets)
        return log_probs

    def _top_log_probs(
        self,
        k: int,
        hidden: torch.Tensor,
        batch: PackedBatch,
        sequences: Sequence[TrainSequence],
    ) -> torch.Tensor:
        """Ids, then log-probabilities, [scored, 2k]: float32 has whole numbers up to 2^24."""
        head = self.model.get_output_embeddings()
        num, shard = self._num_likeliest, self._shard(head.weight)
        if shard:
            shard = replace(shard, size=max(0, min(shard.size, num - shard.start)))
            num = len(head.weight)
        ids, log_probs = top_log_probs(
            hidden.index_select(0, batch.predicting),
            head.weight[:num],
            k,
            shard=shard,
            bias=None if head.bias is None else head.bias[:num],
            **self._transform,
        )
        assert self.config.vocab_size <= 2**24, self.config.vocab_size
        return torch.cat([ids.float(), log_probs.float()], 1)

    def _named_log_probs(
        self,
        field: str,
        hidden: torch.Tensor,
        batch: PackedBatch,
        sequences: Sequence[TrainSequence],
    ) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        ids = torch.cat([x for s in sequences if isinstance(x := s.fields[field], torch.Tensor)])
        ids = ids.to(self.device)
        log_probs, _ = linear_log_probs(
            hidden.index_select(0, batch.predicting),
            head.weight,
            batch.targets,
            shard=self._shard(head.weight),
            bias=head.bias,
            candidates=ids.clamp(min=0),
            **self._transform,
        )
        return log_probs[:, 1:].masked_fill(ids < 0, 0.0)

    def _shard(self, weight: torch.Tensor) -> VocabShard | None:
        """The rank's share of the head's rows; None where it has all of them."""
        if self.parallel.tp == 1:
            return None
        assert self.parallel.tp_group is not None
        # By the tp coordinate, which may differ from the rank in the group.
        start = self.parallel.tp_rank * len(weight)
        size = max(0, min(len(weight), self.config.vocab_size - start))
        return VocabShard(self.parallel.tp_group, start, size)

    def _values(
        self, hidden: torch.Tensor, batch: PackedBatch, sequences: Sequence[TrainSequence]
    ) -> torch.Tensor:
        pad = getattr(self.config, "pad_token_id", None)
        ends = torch.tensor([last_position(sequence.ids, pad) for sequence in sequences])
        rows = batch.packing.starts[:-1] + ends.to(self.device)
        scores = functional.linear(hidden.index_select(0, rows), self.model.score.weight)
        return scores[:, 0].float()

    # Stages

    def _stage(self, batch: PackedBatch) -> torch.Tensor:
        """The stage's layers (and norm) over a row: [tokens, features]."""
        inputs: dict[str, Any] = {"inputs_embeds": self._inputs(batch.ids[0])[None]}
        if batch.images is not None:
            images = batch.images.computed(tower_in(self.model))
            inputs = images.inputs(inputs["inputs_embeds"])
        hidden: torch.Tensor = self.model.base_model(
            **inputs,
            position_ids=batch.position_ids,
            use_cache=False,
            packing=batch.packing,
            **({} if batch.routing is None else {KEYWORD: batch.routing}),
        ).last_hidden_state
        return hidden[0]

    def _inputs(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [tokens, features]: embedded, or from the previous stage."""
        if self.parallel.first:
            embedded: torch.Tensor = self.model.get_input_embeddings()(ids)
            return embedded
        return self._link.receive((len(ids), self.config.hidden_size), self.dtype, self.device)

    def _broadcast(self, row_values: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The last stage's values, of this `shape`, on all stages."""
        values = torch.cat(row_values) if row_values else torch.empty(0, device=self.device)
        if self.parallel.pp == 1 or shape[0] == 0:
            return values
        self._link.flush()
        if not self.parallel.last:
            values = torch.empty(shape, device=self.device)
        last = self.parallel.pp_peers[-1]
        dist.broadcast(values, group=self.parallel.pp_group, group_src=last)
        return values
