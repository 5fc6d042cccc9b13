"""A rank exports samples to others, in whole or in part, and imports what they made of its own."""

import logging
from typing import Any

import pytest
import torch

from hybridrl.config import Config, ModelConfig
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.data_plane import LocalDataPlane
from hybridrl.workers.store import Parcel, StoredSample

A, B, C, D = (SampleId(0, k=k) for k in range(4))


class CountingPlane(LocalDataPlane):
    """Counts what is put."""

    def __init__(self) -> None:
        self.puts: list[Parcel] = []

    def put(self, value: Any) -> Any:
        self.puts.append(value)
        return value


def worker(plane: CountingPlane) -> ActorWorker:
    """A rank that has not joined a group; C alone has been scored."""
    rank = ActorWorker(0, 1, Config(model=ModelConfig(path="unused")), "unused", plane)
    for i, id in enumerate((A, B, C, D)):
        rank.store.add(id, StoredSample(1, f"item {i}", {"tokens": torch.tensor([i, i])}))
    rank.store[C].tensors["scores"] = torch.tensor([0.5])
    return rank


def here(rank: ActorWorker) -> set[SampleId]:
    return {id for id in (A, B, C, D) if id in rank.store._samples}


@pytest.mark.parametrize("keep", [True, False])
def test_some_fields_are_one_parcel_a_receiver_without_items(keep: bool) -> None:
    plane = CountingPlane()
    rank = worker(plane)
    references = rank.export_samples({2: (B, C), 1: (A,)}, ("tokens",), keep).value
    assert list(references) == [2, 1]
    assert plane.puts == [references[2][0], references[1][0]]
    parcel = references[2][0]
    assert parcel.ids == (B[:], C[:])
    assert list(parcel.columns) == ["tokens"]
    assert parcel.columns["tokens"].tolist() == [1, 1, 2, 2]
    assert parcel.items == ()
    assert here(rank) == ({A, B, C, D} if keep else {D})


@pytest.mark.parametrize("keep", [True, False])
def test_whole_samples_are_a_parcel_for_each_set_of_fields(keep: bool) -> None:
    plane = CountingPlane()
    rank = worker(plane)
    references = rank.export_samples({1: (A, C, B)}, None, keep).value
    plain, scored = references[1]
    assert plane.puts == [plain, scored]
    assert plain.ids == (A[:], B[:])
    assert plain.items == ("item 0", "item 1")
    assert scored.ids == (C[:],)
    assert set(scored.columns) == {"tokens", "scores"}
    assert here(rank) == ({A, B, C, D} if keep else {D})


def test_what_others_made_comes_home_beside_what_was_there() -> None:
    plane = CountingPlane()
    rank, other = worker(plane), worker(plane)
    other.store[A].tensors["values"] = torch.tensor([2.0])
    other.store[B].tensors["values"] = torch.tensor([3.0])
    parcels = other.export_samples({0: (A, B)}, ("values",), True).value[0]
    reply = rank.import_samples((A,), tuple(parcels))
    assert [span.name for span in reply.spans] == ["fetch"]
    assert reply.concurrent
    assert rank.store[A].tensors["values"].tolist() == [2.0]
    assert rank.store[A].tensors["tokens"].tolist() == [0, 0]
    assert rank.store[A].item == "item 0"
    assert "values" not in rank.store[B].tensors


def test_the_log_says_what_starts(caplog: pytest.LogCaptureFixture) -> None:
    """So a run that hangs shows where; the launcher logs start and end of the whole call."""
    rank = worker(CountingPlane())
    with caplog.at_level(logging.DEBUG, logger="hybridrl.workers"):
        rank.export_samples({1: (A, B), 2: (C,)}, None, True)
    (record,) = caplog.records
    assert record.name == "hybridrl.workers.base_worker"
    assert record.getMessage() == "export, samples: 3"
