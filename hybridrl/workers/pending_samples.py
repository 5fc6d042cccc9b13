"""Samples that a step has left to the next one, written by the ranks that have them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.checkpoint.folder import note_sum
from hybridrl.engines.rollout.interface import Request
from hybridrl.flow.executor import Sampling
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.workers.actor import Actor, ParkedSample
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.store import SampleStore, StoredSample


@dataclass(frozen=True, slots=True)
class Carry:
    """One sample that a rank has to write or to take up: its identity, and what it came from.

    `sampling` of one that is parked, whose tokens so far are behind `reference`; None of one that
    is finished. To take it up, no reference is needed.
    """

    id: SampleId
    item: Any = None
    sampling: Sampling | None = None
    reference: Any = None


def save_carried(
    folder: Path, rank: int, carries: Sequence[Carry], store: SampleStore, plane: DataPlane
) -> None:
    """Write a rank's share. Keys and values are left out: they are computed again.

    Raises OSError with the file's path.
    """
    references = {id(c.reference): c.reference for c in carries if c.reference is not None}
    parked = {key: s for part in plane.get(list(references.values())) for key, s in part.items()}
    found = [
        _parked_record(parked[carry.id])
        if carry.reference is not None
        else _record(store, carry.id)
        for carry in carries
    ]
    file = folder / f"samples_{rank}.pt"
    try:
        torch.save(found, file)
        note_sum(file)
    except RuntimeError as error:  # a full disk
        raise OSError(0, f"the checkpoint could not be written: {error}", str(file)) from error


def load_carried(
    folder: Path, carries: Iterable[Carry], store: SampleStore, actor: Actor
) -> dict[SampleId, ParkedSample]:
    """Take up a rank's share: finished samples go into the store; answers with the parked ones."""
    files = sorted(folder.glob("samples_*.pt"))
    found = {
        SampleId(*record["id"]): record
        for file in files
        for record in torch.load(file, weights_only=True)
    }
    parked = {}
    for carry in carries:
        record = found[carry.id]
        if carry.sampling is None:
            made = StoredSample(record["response_tokens"], carry.item, record["tensors"])
            store.add(carry.id, made)
        else:
            request = actor.request(carry.id, carry.item, carry.sampling, record["shares"])
            parked[carry.id] = _as_parked(request, carry.item, record)
    return parked


def _record(store: SampleStore, id: SampleId) -> dict[str, Any]:
    sample = store[id]
    # Tensors may be views of a parcel, whose other samples nobody wants.
    tensors = {name: tensor.clone() for name, tensor in sample.tensors.items()}
    return {"id": list(id), "response_tokens": sample.response_tokens, "tensors": tensors}


def _parked_record(sample: ParkedSample) -> dict[str, Any]:
    request = sample.request
    id: Any = request.id
    return {
        "id": list(id),
        "shares": request.prefix is not None,
        "response_ids": list(request.response_ids),
        "log_probs": list(request.log_probs),
        "spans": [list(astuple(span)) for span in sample.spans],
    }


def _as_parked(request: Request, item: Any, record: Mapping[str, Any]) -> ParkedSample:
    made = replace(request, response_ids=record["response_ids"], log_probs=record["log_probs"])
    return ParkedSample(made, item, tuple(TokenSpan(*span) for span in record["spans"]))
