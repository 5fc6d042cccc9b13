"""A micro-batch as one packed row, and the module that computes its log-probabilities or values."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from hybridrl.config import Attention
from hybridrl.config.loss import Loss
from hybridrl.engines.train.image_rows import place_images, sharing_prompts
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.shared_prompts import Arrangement, row_tokens
from hybridrl.engines.train.truncated import kept_rows, truncated
from hybridrl.kernels.linear_log_probs import VocabShard, linear_log_probs
from hybridrl.models.image_text import tower_in
from hybridrl.models.images import RowImages, RowPixels, idle_tower
from hybridrl.models.logits import logits_transform
from hybridrl.models.packed_attention import Packing, gather_keys
from hybridrl.models.router_balance import KEYWORD as SEQUENCES_KEYWORD
from hybridrl.models.router_balance import TokenSequences
from hybridrl.models.router_replay import KEYWORD, NO_RECORD, Routing
from hybridrl.models.stages import Chunk, head_name
from hybridrl.models.vision import Tower


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that are scored besides the response's own: `number` ids a position, in a `field`."""

    field: str
    number: int

    @classmethod
    def of(cls, loss: Loss[torch.Tensor]) -> "Candidates | None":
        """The candidates that a loss reads; None for one that reads none."""
        return None if loss.candidates is None else cls(loss.candidates, loss.num_candidates)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences concatenated in one row, by ascending length.

    `ids` and `position_ids` [1, tokens]; `predicting` [scored] are the positions in the row whose
    hidden state predicts a scored token, `targets` [scored] those tokens. `order[i]` is the index
    of the row's i-th sequence among the caller's, `counts[i]` its number of scored tokens.
    `routing` has the experts of the row's tokens, where they are replayed or recorded. Where the
    load of experts is counted, `token_sequences` has the sequences of its tokens. With `candidates`
    [scored, k] the tokens of these ids are scored at each position, too. `kept` [scored, most] are
    the ids over which each token's distribution is renormalized (`engines.train.truncated`).

    A row with shared prompts has `places` [tokens of the sequences]: where the tokens of each
    sequence in `order` are in it, prompt and response. Its sequences have `lengths`.

    A row whose prompts have images has `position_ids` [4, 1, tokens]: the rotary positions are
    behind the tokens' own. Its `images` are on the stage that embeds the tokens alone.

    Where the ranks of `packing.group` share a row, the tensors are this rank's. `own` is the
    place of its scored tokens among all of the row. A row with `passes` is computed by these rows
    in turn (`engines.train.chunks`), whose scored tokens together are its own. It has no tensors
    besides theirs.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    order: tuple[int, ...]
    counts: tuple[int, ...]
    packing: Packing
    own: slice
    passes: "tuple[PackedBatch, ...]" = ()
    routing: Routing | None = None
    token_sequences: TokenSequences | None = None
    candidates: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()
    places: torch.Tensor | None = None
    images: RowImages | RowPixels | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the row."""
        return 1 if self.packing.group is None else self.packing.group.size()

    @property
    def num_shared(self) -> int:
        """Tokens of shared prompts that the row would have more if they were repeated."""
        return 0 if self.places is None else len(self.places) - self.ids.shape[1]

    @property
    def sequence(self) -> torch.Tensor:
        """Index of every scored token's sequence among the caller's, [scored]."""
        order, counts = torch.tensor(self.order), torch.tensor(self.counts)
        return order.long().repeat_interleave(counts.long()).to(self.ids.device)


def pack(
    sequences: Sequence[TrainSequence],
    attention: Attention,
    device: torch.device,
    trained_only: bool = False,
    total_tokens: int = 0,
    group: ProcessGroup | None = None,
    records_experts: bool = False,
    counts_experts: bool = False,
    candidates: Candidates | None = None,
    shares_prompts: bool = False,
    tower: Tower | None = None,
) -> PackedBatch:
    """Pack sequences into one row; `trained_only` scores the unmasked response tokens only.

    A row shorter than `total_tokens` is padded by a sequence with nothing to score, -1 in `order`:
    token shards need a multiple of their number. No position of it is beyond the others', since a
    model may rotate a row by its longest sequence. No sequences give a row of one token with
    nothing to score. A rank without work computes it to take part in the collectives, and its
    gradient is exactly zero. The ranks of `group` share the row's tokens, whose number they
    divide. With `records_experts` a pass records the experts of all tokens; without, tokens
    take those of their sequences. With `counts_experts` the row has `token_sequences`, with
    `candidates` those of the sequences. With `shares_prompts` it has a prompt of several sequences
    once. The `tower` makes the features of images. Raises ValueError for a response without a token
    before it, or a mask of another length.
    """
    assert group is None or not shares_prompts, "ranks that share a row share no prompts"
    # A sequence with nothing to score fills the row up.
    missing = total_tokens - row_tokens(sequences, shares_prompts)
    longest = max([sequence.ids.shape[0] for sequence in sequences], default=1)
    filler = [TrainSequence(torch.zeros(missing, dtype=torch.long), 0)] if missing > 0 else []
    sequences = [*sequences, *filler]
    pieces = Arrangement.of(sequences, shares_prompts)
    members = [sequences[i] for i in pieces.order]
    lengths = [member.ids.shape[0] for member in members]
    # All is computed for the whole row: a call of torch for each sequence takes longer.
    scored, counts = _scored(members, lengths, trained_only)
    # A row without sequences has a token.
    ids = torch.cat([member.ids for member in members] or [torch.zeros(1, dtype=torch.long)])
    targets = ids[scored]
    ends = torch.tensor(lengths or [1])
    starts = ends.cumsum(0) - ends
    positions = torch.arange(ids.shape[0]) - starts.repeat_interleave(ends)
    positions, images = place_images(members, positions.clamp(max=longest - 1), tower)
    assert positions.dim() == 1 or group is None, "ranks share no row with images"
    routing = Routing(records=True) if records_experts else _replay(sequences, pieces.order)
    numbers = tuple([-1 if filler and i == len(sequences) - 1 else i for i in pieces.order])
    predicting = scored - 1
    places = pieces.places() if pieces.shares else None
    if places is not None:  # until here prompts have been repeated
        once = torch.empty(sum(pieces.lengths), dtype=torch.long)
        once[places] = torch.arange(ids.shape[0])
        ids, positions, predicting = ids[once], positions[..., once], places[predicting]
        images = images and sharing_prompts(images, places)
        if routing is not None and routing.forced is not None:
            routing = Routing(routing.forced[once])
    row = PackedBatch(
        ids=ids[None],
        position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
        predicting=predicting,
        targets=targets,
        order=numbers,
        counts=tuple(counts),
        packing=pieces.packing(attention, device, group),
        own=slice(None),
        routing=routing,
        token_sequences=_token_sequences(pieces, numbers, group) if counts_experts else None,
        candidates=None if candidates is None else _candidates(sequences, pieces.order, candidates),
        kept=_kept(members, trained_only),
        lengths=tuple(lengths),
        places=places,
        images=images and images.to(device),
    )
    return own_share(row, device)


def own_share(row: PackedBatch, device: torch.device) -> PackedBatch:
    """This rank's tokens of a whole row, on `device`: all of them unless ranks share it."""
    group, names = row.packing.group, ["ids", "position_ids", "predicting", "targets"]
    of_scored = [name for name in ("candidates", "kept") if getattr(row, name) is not None]
    names += of_scored
    tensors = {name: getattr(row, name) for name in names}
    own, routing, token_sequences = row.own, row.routing, row.token_sequences
    tokens = slice(None)
    forced = None if routing is None else routing.forced
    if group is not None:
        size = row.ids.shape[1] // group.size()
        start = group.rank() * size
        tokens = slice(start, start + size)
        bounds = torch.searchsorted(row.predicting, torch.tensor([start, start + size]))
        own = slice(*bounds.tolist())
        tensors = {
            "ids": row.ids[:, tokens],
            "position_ids": row.position_ids[:, tokens],
            "predicting": row.predicting[own] - start,
            "targets": row.targets[own],
        }
        tensors |= {name: getattr(row, name)[own] for name in of_scored}
        forced = None if forced is None else forced[tokens]
    if forced is not None:
        routing = Routing(forced.to(device))
    if token_sequences is not None:
        token_sequences = token_sequences.of_rank(tokens, device)
    on_device = {name: x.to(device) for name, x in tensors.items()}
    return replace(row, own=own, routing=routing, token_sequences=token_sequences, **on_device)


def candidate_ids(
    sequence: TrainSequence, candidates: Candidates, places: torch.Tensor
) -> torch.Tensor:
    """The ids [scored, k] at the scored `places` in `sequence.ids`."""
    if not len(places):
        return torch.zeros(0, candidates.number, dtype=torch.int64)
    ids = sequence.fields[candidates.field]
    assert isinstance(ids, torch.Tensor), candidates
    return ids[places - (sequence.ids.shape[0] - sequence.response_tokens)].long()


def _candidates(
    sequences: Sequence[TrainSequence], order: Sequence[int], candidates: Candidates
) -> torch.Tensor:
    empty = torch.zeros(0, candidates.number, dtype=torch.int64)
    members = [sequences[index] for index in order]
    places = [scored_positions(member, trained_only=True) for member in members]
    pairs = zip(members, places, strict=True)
    return torch.cat([empty, *(candidate_ids(member, candidates, x) for member, x in pairs)])


def _kept(members: Sequence[TrainSequence], trained_only: bool) -> torch.Tensor | None:
    """The kept ids [scored, most] of a row's sequences; None where they have none."""
    if all(member.kept_ids is None for member in members):
        return None
    return kept_rows(members, [scored_positions(member, trained_only) for member in members])


def _token_sequences(
    pieces: Arrangement, numbers: Sequence[int], group: ProcessGroup | None
) -> TokenSequences:
    """The sequences of a row's tokens, from the `numbers` of them among the caller's."""
    sizes, real = torch.tensor(pieces.lengths or [1]), torch.tensor(numbers or (-1,)) >= 0
    ends, prompts = torch.tensor(pieces.ends or [0]), torch.tensor(pieces.prompts or [0])
    before = torch.tensor(pieces.before or [0])[ends]
    # Sequences, then shared prompts, then what fills the row up, then a prompt without tokens.
    num = int(real.sum())
    shared, of_shared = prompts[before > 0].unique(return_inverse=True)
    places = torch.full_like(sizes, num + len(shared))
    places[ends[real]] = torch.arange(num)
    places[shared] = num + torch.arange(len(shared))
    of_sequences = torch.full_like(ends, num + len(shared) + 1)
    of_sequences[before > 0] = num + of_shared
    return TokenSequences(
        places.repeat_interleave(sizes),
        (sizes[ends] + before)[real],
        group,
        prompts=of_sequences[real] if len(shared) else None,
        num_prompts=len(shared),
    )


def _replay(sequences: Sequence[TrainSequence], order: Sequence[int]) -> Routing | None:
    """The experts that a row's tokens take; None where no sequence has any."""
    recorded = (s.routed_experts for s in sequences if s.routed_experts is not None)
    like = next(recorded, None)
    if like is None:
        return None
    rows = [forced_experts(sequences[index], like.shape[1:]) for index in order]
    return Routing(torch.cat(rows))


def forced_experts(sequence: TrainSequence, shape: torch.Size) -> torch.Tensor:
    """The experts [tokens, *shape] that a sequence's tokens take, in the format of `Routing`."""
    forced = torch.full((sequence.ids.shape[0], *shape), NO_RECORD, dtype=torch.int16)
    if sequence.routed_experts is not None:
        forced[:-1] = sequence.routed_experts
    return forced


def recorded_experts(
    batch: PackedBatch, by_layer: Mapping[int, torch.Tensor]
) -> list[tuple[int, torch.Tensor]]:
    """The experts [tokens, layers, k] of each sequence, with its index among the caller's.

    `by_layer` has those of the row's tokens, [tokens, k] for each layer of the whole model.
    """
    whole = torch.stack([by_layer[layer] for layer in sorted(by_layer)], 1)
    if batch.places is not None:
        whole = whole[batch.places]
    pieces = whole.split(batch.lengths or batch.packing.starts.diff().tolist())
    pairs = zip(batch.order, pieces, strict=False)  # a row without sequences has one token
    return [(index, piece) for index, piece in pairs if index >= 0]


def keep_experts(
    rows: Sequence[Sequence[TrainSequence]],
    batches: Sequence[PackedBatch],
    dtype: torch.dtype,
    pp_group: ProcessGroup | None,
) -> None:
    """Fill `routed_experts` of each row's sequences with what a pass over `batches` has recorded.

    All ranks of `pp_group` call it, of which each has recorded its own layers. So do all ranks that
    share rows, of which each has recorded its own tokens.
    """
    passes = [(n, row) for n, batch in enumerate(batches) for row in batch.passes or (batch,)]
    by_layer = _of_all_ranks([row for _, row in passes], pp_group)
    pieces: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for (number, row), whole in zip(passes, by_layer, strict=True):
        for index, experts in recorded_experts(row, whole) if whole else ():
            pieces[number, index].append(experts)
    for (number, index), experts_of_chunks in pieces.items():
        sequence = rows[number][index]
        experts = torch.cat(experts_of_chunks)[: sequence.ids.shape[0] - 1]
        sequence.routed_experts = experts.to(dtype)


def _of_all_ranks(
    passes: Sequence[PackedBatch], pp_group: ProcessGroup | None
) -> list[dict[int, torch.Tensor]]:
    """The experts [tokens, k] by layer that each pass has recorded; empty for one without."""
    own = [{} if row.routing is None else row.routing.on_host() for row in passes]
    if pp_group is not None:
        stages: list[Any] = [None] * pp_group.size()
        dist.all_gather_object(stages, own, group=pp_group)
        own = [
            {k: v for stage in of_pass for k, v in stage.items()}
            for of_pass in zip(*stages, strict=True)
        ]
    shared = [number for number, row in enumerate(passes) if row.packing.group is not None]
    if shared:
        shares: list[Any] = [None] * passes[shared[0]].num_ranks
        group = passes[shared[0]].packing.group
        dist.all_gather_object(shares, [own[number] for number in shared], group=group)
        for number, *of_ranks in zip(shared, *shares, strict=True):
            own[number] = {k: torch.cat([x[k] for x in of_ranks]) for k in own[number]}
    return own


def _scored(
    members: Sequence[TrainSequence], lengths: Sequence[int], trained_only: bool
) -> tuple[torch.Tensor, list[int]]:
    """Positions in a row of the scored tokens of its sequences, and how many each of them has.

    `lengths` are those of the sequences, one after the other. Raises ValueError as `pack`.
    """
    responses = [member.response_tokens for member in members]
    masks: list[torch.Tensor | None] = [None] * len(members)
    if trained_only:
        masks = [member.mask for member in members]
    for length, response, mask in zip(lengths, responses, masks, strict=True):
        if not 0 <= response < length:
            raise ValueError(
                f"response_tokens={response} of {length} tokens: wanted 0 to {length - 1}, since "
                "the first token of a sequence has no token before it"
            )
        if mask is not None and mask.shape[0] != response:
            raise ValueError(f"mask has {mask.shape[0]} entries, response_tokens={response}")
    # A token is as far before the end of its sequence as before that of its response, if the
    # responses are put one after the other.
    sizes = torch.tensor(responses, dtype=torch.int64)
    ends, response_ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0), sizes.cumsum(0)
    positions = torch.arange(sum(responses)) + (ends - response_ends).repeat_interleave(sizes)
    if {mask is None for mask in masks} <= {True}:
        return positions, responses
    pairs = zip(masks, responses, strict=True)
    kept = torch.cat([torch.ones(n, dtype=torch.bool) if x is None else x.cpu() for x, n in pairs])
    through = torch.cat([sizes.new_zeros(1), kept.cumsum(0)])
    return positions[kept], (through[response_ends] - through[response_ends - sizes]).tolist()


def scored_positions(sequence: TrainSequence, trained_only: bool) -> torch.Tensor:
    """Positions [scored] in `sequence.ids` of its response tokens, or of the unmasked ones."""
    return _scored([sequence], [sequence.ids.shape[0]], trained_only)[0]


def scored_fields(
    sequences: Sequence[TrainSequence],
    batch: PackedBatch,
    names: Sequence[str],
    missing: float | None = None,
) -> dict[str, torch.Tensor]:
    """The fields of the scored tokens [scored], in the order of the row, in float32 at least.

    A scalar applies to every token of its sequence. `missing` replaces a field that a sequence
    lacks. Raises ValueError for a missing field if `missing` is None, and for a field of another
    length than the response.
    """
    fields = {}
    numbered = zip(batch.order, batch.counts, strict=True)
    scored = [(sequences[index], count) for index, count in numbered if index >= 0]
    for name in names:
        values = [member.fields.get(name, missing) for member, _ in scored]
        if {type(value) for value in values} <= {float}:
            counts = torch.tensor([count for _, count in scored], dtype=torch.int64)
            row = torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)
        else:
            pairs = zip(scored, values, strict=True)
            pieces = [_field(member, name, value, count) for (member, count), value in pairs]
            row = torch.cat([torch.zeros(0), *pieces])
        fields[name] = row.to(batch.ids.device)
    return fields


def loss_inputs(
    sequences: Sequence[TrainSequence],
    batch: PackedBatch,
    loss: Loss[torch.Tensor],
    scores: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a loss is called with: the log-probabilities, or values, [scored] and its fields.

    `scores` are those of `PackedModel`.
    """
    names = tuple(name for name in loss.fields if name != loss.candidates)
    fields = scored_fields(sequences, batch, names) | {"sequence": batch.sequence}
    if loss.candidates is None:
        return scores, fields
    return scores[:, 0], {**fields, "candidate_log_probs": scores[:, 1:]}


def _field(
    sequence: TrainSequence, name: str, value: torch.Tensor | float | None, count: int
) -> torch.Tensor:
    """The value of a field for each of `count` scored tokens of a sequence."""
    if value is None:
        available = ", ".join(sorted(sequence.fields)) or "none"
        raise ValueError(f"the loss needs the field {name!r} of every sequence; got {available}")
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return torch.full((count,), float(value))
    length, value = value.shape[0], value.cpu()
    if length != sequence.response_tokens:
        raise ValueError(
            f"field {name!r} has {length} values, response_tokens={sequence.response_tokens}"
        )
    if count == length:
        return value
    assert sequence.mask is not None, "only a mask leaves tokens out"
    return value[sequence.mask.cpu()]


def joined(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The values of all scored tokens of a row, from this rank's, differentiable.

    All ranks of the row compute the loss of all of it, so each gets the gradient of its own.
    """
    group, scored = batch.packing.group, sum(batch.counts)
    if group is None or not scored:
        return values
    joined_values: torch.Tensor = _Joined.apply(values, batch.own, scored, group)
    return joined_values


class _Joined(torch.autograd.Function):
    """`joined`, as a sum of rows that are zero elsewhere: ranks have different numbers."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, own: slice, scored: int, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.own = own
        row = values.new_zeros(scored, *values.shape[1:])
        row[own] = values
        dist.all_reduce(row, group=group)
        return row

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad[ctx.own], None, None, None


class PackedModel(nn.Module):
    """A causal language model, or a pipeline chunk of one, over a packed row.

    The last chunk's forward returns log-probabilities of the scored tokens only; ranks that share a
    row all have those of the whole row. The head is applied to the scored positions in chunks. So
    logits of the prompt are never computed, and logits of the response never exist all at once.
    Under tensor parallelism the head's rows are sharded over `tp_group`.

    A sequence classifier returns a value for each scored token, that of the state before it. It is
    the head (`score`) over the hidden state that predicts the token.
    """

    def __init__(self, chunk: Chunk, tp_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.model = chunk.model
        self.gives_values = head_name(chunk.model) == "score"
        self.first, self.last = chunk.first, chunk.last
        self.tp_group = tp_group
        self.set_temperature(1.0)

    def set_temperature(self, temperature: float) -> None:
        """Divide the logits by `temperature` from the next forward pass on."""
        self._transform = logits_transform(self.model.config).under(temperature)

    def forward(
        self, x: torch.Tensor, batch: PackedBatch, with_entropy: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies [scored] after temperature, or values [scored] and None.

        With `candidates` [scored, k] log-probabilities are [scored, 1 + k], the target's first.
        With `kept` they and entropies are renormalized over the kept ids.

        See `PackedBatch`. `x` are the row's ids [1, tokens], or after the first chunk its hidden
        states [1, tokens, features], which all chunks but the last return.
        """
        inputs: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": x}
        tower = tower_in(self.model)
        if batch.images is not None and self.first:
            images = batch.images.computed(tower)
            inputs = images.inputs(self.model.get_input_embeddings()(x))
        elif tower is not None and torch.is_grad_enabled():
            inputs = {"inputs_embeds": self.model.get_input_embeddings()(x) + idle_tower(tower)}
        if batch.routing is not None:
            inputs[KEYWORD] = batch.routing
        if batch.token_sequences is not None:
            inputs[SEQUENCES_KEYWORD] = batch.token_sequences
        hidden: torch.Tensor = self.model.base_model(
            **inputs, position_ids=batch.position_ids, use_cache=False, packing=batch.packing
        ).last_hidden_state
        if not self.last:
            return hidden
        if batch.places is None:
            hidden = hidden[0].index_select(0, batch.predicting)
        else:  # the last token of a shared prompt predicts the first one of several responses
            hidden = gather_keys(hidden, batch.predicting)[0]
        if self.gives_values:
            return joined(self._values(hidden), batch), None
        head, shard = self.model.get_output_embeddings(), None
        weight, bias = head.weight, head.bias
        if self.tp_group is not None:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
            start = dist.get_rank(self.tp_group) * len(weight)
            rows = max(0, min(len(weight), self.model.config.vocab_size - start))
            shard = VocabShard(self.tp_group, start, rows)
        log_probs, entropy = linear_log_probs(
            hidden,
            weight,
            batch.targets,
            with_entropy=with_entropy,
            shard=shard,
            bias=bias,
            candidates=batch.candidates if batch.kept is None else batch.kept,
            **self._transform,
        )
        if batch.kept is not None:
            assert batch.candidates is None, "candidates are of the whole distribution"
            log_probs, entropy = truncated(log_probs, entropy, batch.kept, batch.targets)
        return joined(log_probs, batch), None if entropy is None else joined(entropy, batch)

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head over hidden states [scored, features], in float32: a value is no probability."""
        weight = self.model.score.weight
        if self.tp_group is not None:
            weight = weight.to_local()
        return hidden.float() @ weight[0].float()
