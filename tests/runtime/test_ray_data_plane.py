"""Ray's object store between two processes: what one puts, the other gets."""

import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config import ClusterConfig
from hybridrl.flow.sample import SampleId
from hybridrl.runtime.ray_cluster import ray_runtime
from hybridrl.runtime.ray_data_plane import RayDataPlane
from hybridrl.workers.data_plane import SamplesLost
from hybridrl.workers.store import SampleStore, StoredSample

pytestmark = pytest.mark.ray

FIELDS = ("tokens", "log_probs")


class Rank:
    """A process with a store."""

    def __init__(self) -> None:
        self.store, self.plane = SampleStore(), RayDataPlane()

    def clear(self) -> None:
        self.store = SampleStore()

    def fill(self, lengths: list[int]) -> None:
        for i, n in enumerate(lengths):
            tensors = {"tokens": torch.arange(n + 2) + i, "log_probs": torch.full((n,), -float(i))}
            self.store.add(SampleId(i), StoredSample(n, None, tensors))

    def export(self, num: int) -> Any:
        ids = [SampleId(i) for i in range(num)]
        parcel = self.store.pack(ids, FIELDS)
        self.store.drop(ids)
        return self.plane.put(parcel)

    def fetch(self, parcels: list[Any]) -> list[tuple[int, list[int], list[float]]]:
        values = self.plane.get(parcels)
        large = [c for v in values for c in v.columns.values() if c.nbytes > 1e6]
        assert not any(column.flags.writeable for column in large)  # views of shared memory
        for parcel in values:
            self.store.accept(parcel)
        samples = [self.store[SampleId(i)] for i in range(len(self.store))]
        return [
            (s.response_tokens, s.tensors["tokens"].tolist(), s.tensors["log_probs"].tolist())
            for s in samples
        ]

    def fetch_lost(self, parcels: list[Any]) -> str:
        """The error, once Ray has noticed that the owner died."""
        for _ in range(100):
            try:
                self.plane.get(parcels)
            except SamplesLost as error:
                return str(error)
            time.sleep(0.2)
        return "no error"


@pytest.fixture(scope="module")
def ray(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ray import cloudpickle

    logs: Path = tmp_path_factory.mktemp("logs")
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    with ray_runtime(ClusterConfig(address=cluster), dict(os.environ), logs) as ray:
        yield ray
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def both(ray: Any) -> list[Any]:
    """Two ranks for all tests: they take seconds to import torch."""
    return [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2)]


@pytest.fixture
def ranks(ray: Any, both: list[Any]) -> list[Any]:
    """The two, with empty stores."""
    ray.get([rank.clear.remote() for rank in both])
    return both


def test_ragged_samples_go_from_rank_to_rank(ray: Any, ranks: list[Any]) -> None:
    source, destination = ranks
    lengths = [3, 0, 400_000, 1]  # one large enough to lie in shared memory
    ray.get(source.fill.remote(lengths))
    parcel = ray.get(source.export.remote(len(lengths)))
    arrived = ray.get(destination.fetch.remote([parcel]))
    expected = [(n, list(range(i, n + 2 + i)), [-float(i)] * n) for i, n in enumerate(lengths)]
    assert arrived == expected


def test_no_parcels_and_an_empty_one(ray: Any, ranks: list[Any]) -> None:
    source, destination = ranks
    assert ray.get(destination.fetch.remote([])) == []
    parcel = ray.get(source.export.remote(0))
    assert ray.get(destination.fetch.remote([parcel])) == []


def test_only_a_reference_passes_through_the_driver(ray: Any, ranks: list[Any]) -> None:
    (source, _) = ranks
    ray.get(source.fill.remote([300_000]))
    (reference,) = ray.get(source.export.remote(1))
    assert isinstance(reference, ray.ObjectRef)


def test_a_rank_that_is_gone_is_said_in_plain_words(ray: Any, ranks: list[Any]) -> None:
    source, destination = ray.remote(num_cpus=0)(Rank).remote(), ranks[1]
    ray.get(source.fill.remote([300_000]))
    parcel = ray.get(source.export.remote(1))
    ray.kill(source)
    message = ray.get(destination.fetch_lost.remote([parcel]), timeout=60)
    assert "rank's process has ended" in message


def test_the_plane_itself_travels_to_the_ranks() -> None:
    plane = pickle.loads(pickle.dumps(RayDataPlane()))
    assert isinstance(plane, RayDataPlane)
