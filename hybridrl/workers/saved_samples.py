"""Finished samples of the step in progress, in files that outlive the rank."""

import logging
import os
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from hybridrl.checkpoint.sample_records import RecordPlace, encode, prompt_sum, read
from hybridrl.data import Item
from hybridrl.flow.executor import Finished
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.flow.saved_samples import SaveFinished
from hybridrl.workers.store import SampleStore, StoredSample

logger = logging.getLogger(__name__)

_SPAN_VALUES = attrgetter(*(field.name for field in fields(TokenSpan)))
"""As `dataclasses.astuple`, which takes a third of the time of a record."""


class SavedSamples:
    """The file of one rank: each sample is one write at the file's end, as soon as it is finished.

    What is written is the system's when `append` returns, so it outlives this process. Where a
    write fails a warning says so, and no further sample of that step is saved: the run goes on.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._into: SaveFinished | None = None  # the newest step's
        self._is_on = False
        self._file: int | None = None
        self._fails = False

    def begin_call(self, into: SaveFinished | None) -> None:
        """Save what finishes from now on there; None: nowhere."""
        if into is not None and into != self._into:
            self.close()
            self._fails = False
            self._into = into
        self._is_on = into is not None

    def append(self, finished: Finished, version: int, sample: StoredSample) -> None:
        """Write a sample that weights of `version` have finished."""
        if not self._is_on or self._fails or finished.finish == "abort":
            return
        facts = {
            "id": list(finished.id),
            "version": version,
            "prompt": prompt_sum(sample.item.prompt_ids),
            "prompt_tokens": finished.prompt_tokens,
            "response_tokens": finished.response_tokens,
            "finish": finished.finish,
            "spans": [_SPAN_VALUES(span) for span in finished.spans],
            "more_tensors": finished.more_tensors,
        }
        record = encode(facts, {name: tensor.numpy() for name, tensor in sample.tensors.items()})
        try:
            if self._file is None:
                self._file = self._opened()
            written = os.write(self._file, record)
            if written < len(record):  # a full disk; whoever reads passes over it
                raise OSError(0, f"{written} of {len(record)} bytes could be written")
        except OSError as error:
            self._fails = True
            assert self._into is not None
            folder, why = self._into.folder, error.strerror
            logger.warning("%s: %s; finished samples of the step are not saved", folder, why)

    def _opened(self) -> int:
        assert self._into is not None
        folder = Path(self._into.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank_{self.rank:04d}_{self._into.attempt}.records"
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def close(self) -> None:
        """Close the file, if one is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def take_saved(
    id: SampleId, place: RecordPlace, item: Item, store: SampleStore, rank: int
) -> Finished:
    """Store a saved sample on `rank`; gives the end of its generation.

    Raises ValueError where its record has changed since the driver has read it.
    """
    facts, arrays = read(place)
    assert SampleId.read(facts["id"]) == id, f"{place} has sample {facts['id']}, not {id}"
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    store.add(id, StoredSample(facts["response_tokens"], item, tensors, item.images))
    return Finished(
        id=id,
        rank=rank,
        prompt_tokens=facts["prompt_tokens"],
        response_tokens=facts["response_tokens"],
        finish=facts["finish"],
        spans=tuple(TokenSpan(*span) for span in facts["spans"]),
        more_tensors=tuple(facts["more_tensors"]),
    )
