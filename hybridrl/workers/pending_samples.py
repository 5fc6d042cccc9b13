"""Checkpoints of pending samples, written by the ranks that have their tensors."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.checkpoint.folder import note_sum, write_error
from hybridrl.engines.rollout.expert_record import ExpertRecord
from hybridrl.engines.rollout.interface import Request, Turn
from hybridrl.engines.rollout.kept_ids import KeptIds
from hybridrl.flow.executor import Sampling
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.workers.data_plane import DataPlane, SamplesLost
from hybridrl.workers.generator import Generator, ParkedSample
from hybridrl.workers.store import SampleStore, StoredSample


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """One pending sample in a rank's share, to be written or loaded.

    `sampling` is None for a finished sample. `reference` leads to the tokens of a parked one;
    loading needs none.
    """

    id: SampleId
    item: Any = None
    sampling: Sampling | None = None
    reference: Any = None


def save_pending(
    folder: Path, rank: int, share: Sequence[PendingRecord], store: SampleStore, plane: DataPlane
) -> list[SampleId]:
    """Write a rank's share. Keys and values are left out: they are computed again.

    Gives those that are lost: ranks that have ended had parked them. Raises OSError with the file's
    path.
    """
    # The same sample may be in several, with the tokens that it had at several times.
    references = {id(c.reference): c.reference for c in share if c.reference is not None}
    parked: dict[int, Any] = {}
    for key, reference in references.items():
        with contextlib.suppress(SamplesLost):
            (parked[key],) = plane.get([reference])
    records, lost = list[dict[str, Any]](), list[SampleId]()
    for pending in share:
        if pending.reference is None:
            records.append(_record(store, pending.id))
        elif id(pending.reference) in parked:
            records.append(_parked_record(parked[id(pending.reference)][pending.id]))
        else:
            lost.append(pending.id)
    write_records(folder / f"samples_{rank}.pt", records)
    return lost


def write_records(file: Path, records: Any) -> None:
    """Write what `torch.load` reads with weights alone; raises OSError with the file's path.

    If the rank dies meanwhile the file is not there.
    """
    hidden = file.with_name(f".{file.name}.new")
    try:
        with hidden.open("wb") as opened:  # torch's own files do not say that the disk is full
            torch.save(records, opened)
        hidden.rename(file)
        note_sum(file)
    except (OSError, RuntimeError) as error:
        raise write_error(error, file) from error


def load_pending(
    folder: Path, share: Iterable[PendingRecord], store: SampleStore, generator: Generator
) -> dict[SampleId, ParkedSample]:
    """Load a rank's share: finished samples go into the store; gives the parked ones."""
    files = sorted(folder.glob("samples_*.pt"))
    records = {
        SampleId.read(record["id"]): record
        for file in files
        for record in torch.load(file, weights_only=True)
    }
    parked = {}
    for pending in share:
        record = records[pending.id]
        if pending.sampling is None:
            item, tensors = pending.item, record["tensors"]
            sample = StoredSample(record["response_tokens"], item, tensors, item.images)
            store.add(pending.id, sample)
        else:
            params = generator.sampling.params(pending.sampling)
            request = generator.request(pending.id, pending.item, params, record["shares"])
            parked[pending.id] = _as_parked(request, pending.item, record)
    return parked


def _record(store: SampleStore, id: SampleId) -> dict[str, Any]:
    sample = store[id]
    # Tensors may be views of a parcel, whose other samples are not wanted.
    tensors = {name: tensor.clone() for name, tensor in sample.tensors.items()}
    return {"id": list(id), "response_tokens": sample.response_tokens, "tensors": tensors}


def _parked_record(sample: ParkedSample) -> dict[str, Any]:
    request = sample.request
    id: Any = request.id
    experts = request.routed_experts
    return {
        "id": list(id),
        "shares": request.prefix is not None,
        "response_ids": list(request.response_ids),
        "log_probs": list(request.log_probs),
        "spans": [list(astuple(span)) for span in sample.spans],
        "routed_experts": torch.from_numpy(experts.whole()) if experts else None,
        "kept_ids": torch.from_numpy(request.kept_ids.flat()) if request.kept_ids else None,
        "turns": [list(astuple(turn)) for turn in request.turns],
        "turn_start": request.turn_start,
        "recomputed_at": list(request.recomputed_at),
    }


def _as_parked(request: Request, item: Any, record: Mapping[str, Any]) -> ParkedSample:
    experts = record.get("routed_experts")  # checkpoints from before have none, and no turns
    kept = record.get("kept_ids")
    request = replace(
        request,
        response_ids=record["response_ids"],
        log_probs=record["log_probs"],
        routed_experts=None if experts is None else ExpertRecord([experts.numpy()]),
        kept_ids=None if kept is None else KeptIds.of(kept.numpy(), len(record["response_ids"])),
        turns=[Turn(*turn) for turn in record.get("turns", [])],
        turn_start=record.get("turn_start", 0),
        recomputed_at=record.get("recomputed_at", []),
    )
    return ParkedSample(request, item, tuple(TokenSpan(*span) for span in record["spans"]))
