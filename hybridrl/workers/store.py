"""The samples of one rank: their tensors, and how they are packed for another rank."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from hybridrl.flow.sample import LOSS_MASK, TRAINED, TURN_REWARDS, TURN_STATE, SampleId
from hybridrl.models.image_files import Images

ROUTED_EXPERTS = "routed_experts"
"""The field of the experts that a sample's tokens take (uint8 or int16)."""
KEPT_IDS = "kept_ids"
"""The field of the ids that each token was drawn from (int32): see `KeptIds.flat`."""
# Fields that do not have one entry a response token.
_OF_ALL_TOKENS = ("tokens", ROUTED_EXPERTS, KEPT_IDS, TURN_REWARDS, TURN_STATE)


@dataclass(slots=True)
class StoredSample:
    """A sample on its rank.

    `tensors` holds `tokens` [prompt + response] (int64) and per-response-token fields
    [response_tokens] (`log_probs`, ...), and where experts are replayed `ROUTED_EXPERTS`
    [tokens - 1, layers, k]. Where rollouts are truncated they have `KEPT_IDS`
    [response_tokens + ids]. The dataset's own responses have a bool `LOSS_MASK` [response_tokens],
    and conversations `turns.conversation_tensors`.
    `item` is for the verifier (an opaque object), `images` are those of the prompt.
    """

    response_tokens: int
    item: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    images: Images = ()

    @property
    def response_ids(self) -> torch.Tensor:
        """Token ids of the response [response_tokens]."""
        tokens = self.tensors["tokens"]
        return tokens[tokens.numel() - self.response_tokens :]

    @property
    def mask(self) -> torch.Tensor | None:
        """Tokens that are trained, bool [response_tokens]; None: all."""
        return self.tensors.get(LOSS_MASK, self.tensors.get(TRAINED))

    def of_model(self, name: str) -> torch.Tensor:
        """A field of `map`: of a conversation without the tokens that its environment wrote."""
        value, trained = self.tensors[name], self.tensors.get(TRAINED)
        return value if trained is None or name in _OF_ALL_TOKENS else value[trained]

    def with_replies(self, value: torch.Tensor) -> torch.Tensor:
        """A field [response_tokens] from a result of `map` [the model's tokens].

        Nothing reads it where the environment wrote: numbers are NaN there, whole ones 0. Raises
        ValueError for a result of another length.
        """
        trained = self.tensors.get(TRAINED)
        if trained is None:
            return value
        if value.ndim == 0 or len(value) != int(trained.sum()):
            raise ValueError(
                f"map: got a tensor {list(value.shape)} of a conversation in which the model wrote "
                f"{int(trained.sum())} tokens, wanted one entry for each of them"
            )
        fill = float("nan") if value.is_floating_point() else 0
        whole = value.new_full((len(trained), *value.shape[1:]), fill)
        whole[trained] = value
        return whole


@dataclass(frozen=True, slots=True)
class Parcel:
    """Samples packed for another rank: one array a field, so that a send is a few copies.

    An array has the entries of all samples, `sizes` each sample's number of them. `ids` are plain
    tuples, which pickle faster. `items` is for verifiers, or empty where no verifier will score the
    samples. `images` has those of each prompt, beside `tokens`, and is empty where no prompt has
    any: pickle writes those of a group once.
    """

    ids: tuple[tuple[int, str, int], ...]
    response_tokens: tuple[int, ...]
    columns: dict[str, np.ndarray]
    sizes: dict[str, tuple[int, ...]]
    items: tuple[Any, ...] = ()
    images: tuple[Images, ...] = ()


class SampleStore:
    """Samples by id. A sample lives on one rank: `pack` and `drop` send it, `accept` stores it.

    A sample that was packed and not dropped may change on another rank. Then the copy here is old,
    and no rank asks for it until `drop`.
    """

    def __init__(self) -> None:
        self._samples: dict[SampleId, StoredSample] = {}

    def __getitem__(self, id: SampleId) -> StoredSample:
        return self._samples[id]

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, id: SampleId, sample: StoredSample) -> None:
        """Keep a new sample; an id that is here already is a bug."""
        assert id not in self._samples, f"sample {id} is stored already"
        self._samples[id] = sample

    def drop(self, ids: Iterable[SampleId]) -> None:
        """Forget samples; ids that are not here are ignored."""
        for id in ids:
            self._samples.pop(id, None)

    def pack(
        self, ids: Sequence[SampleId], fields: Sequence[str], with_items: bool = False
    ) -> Parcel:
        """Pack `fields` of `ids`, with their items if asked; the samples stay."""
        samples = [self._samples[id] for id in ids]
        columns = {name: [s.tensors[name] for s in samples] for name in fields}
        empty = torch.zeros(0)
        return Parcel(
            ids=tuple([id[:] for id in ids]),
            response_tokens=tuple([s.response_tokens for s in samples]),
            columns={
                name: torch.cat(tensors or [empty]).numpy() for name, tensors in columns.items()
            },
            sizes={name: tuple([t.shape[0] for t in tensors]) for name, tensors in columns.items()},
            items=tuple(s.item for s in samples) if with_items else (),
            images=_images_of(samples) if "tokens" in fields else (),
        )

    def pack_whole(self, ids: Sequence[SampleId]) -> list[Parcel]:
        """Pack all that is known of `ids`, a parcel for each set of fields; the samples stay.

        One sample's stages may have run already, another's not.
        """
        by_fields: dict[tuple[str, ...], list[SampleId]] = {}
        for id in ids:
            by_fields.setdefault(tuple(sorted(self._samples[id].tensors)), []).append(id)
        return [self.pack(alike, fields, True) for fields, alike in by_fields.items()]

    def accept(self, parcel: Parcel, only: Collection[SampleId] | None = None) -> None:
        """Store the samples of a parcel, or `only` some of them.

        A sample that is here already gets the new fields: samples come in several parcels, and
        back to a rank with an old copy. The tensors share the parcel's memory, which an object
        store may hand out to several readers. So no tensor of a sample is written in place: a new
        value is a new tensor.
        """
        # DLPack, unlike from_numpy, takes a read-only array without a warning.
        columns = [
            from_dlpack(column).split(parcel.sizes[name]) for name, column in parcel.columns.items()
        ]
        tensors_of = zip(*columns, strict=True) if columns else iter([()] * len(parcel.ids))
        names = tuple(parcel.columns)
        ids, none = [*map(SampleId._make, parcel.ids)], (None,) * len(parcel.ids)
        items, all_images = parcel.items or none, parcel.images or none
        for id, response_tokens, item, images, tensors in zip(
            ids, parcel.response_tokens, items, all_images, tensors_of, strict=True
        ):
            if only is not None and id not in only:
                continue
            fields = dict(zip(names, tensors, strict=True))
            sample = self._samples.get(id)
            if sample is None:
                self._samples[id] = StoredSample(response_tokens, item, fields, images or ())
                continue
            sample.tensors.update(fields)
            sample.item = sample.item if item is None else item
            sample.images = sample.images or images or ()


def _images_of(samples: Sequence[StoredSample]) -> tuple[Images, ...]:
    images = tuple(sample.images for sample in samples)
    return images if any(images) else ()
