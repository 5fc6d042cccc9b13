"""One empty dispatch to 4 ranks, and 32 MB of samples from rank to rank: ours, plain Ray, verl.

All three groups live in one Ray and take turns. Each moves the same bytes the same way: rank r made
a quarter of the samples, rank r + 1 needs them.

- ours: `SampleStore.take` and `RayDataPlane.put` where they were made, references through the
  driver, `RayDataPlane.get` and `SampleStore.accept` where they are needed.
- plain Ray: the maker puts numpy arrays and answers with their reference. The driver hands it to
  the consumer, which gets the arrays and cuts them into samples. `flat` packs a field into one
  array first, `listed` puts the list of the samples' arrays; the faster one is the baseline.
- verl: `DataProto` out of one method and into another under DP_COMPUTE_PROTO, as its trainers do.
  Its batch is padded, so its samples are all of the mean length: the padding that ragged samples
  would need does not count against it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lines import line, show, take_turns

from hybridrl.compat import verl as compat
from hybridrl.config import ClusterConfig, Device
from hybridrl.flow.sample import SampleId
from hybridrl.runtime.ray_cluster import ranks_placement, ray_runtime
from hybridrl.runtime.ray_data_plane import RayDataPlane
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.store import SampleStore, StoredSample

RANKS = 4
SETTLE = 0.05  # seconds in which the store frees what the side before has dropped
BYTES_PER_TOKEN = 8 + 4  # a token id (int64) and its log-probability (float32)


def sample_lengths(rank: int, num_bytes: int) -> list[int]:
    """Ragged lengths, 50 to 550 tokens, of samples that weigh `num_bytes` together."""
    tokens = num_bytes // BYTES_PER_TOKEN
    drawn = np.random.default_rng(rank).integers(50, 550, size=tokens // 50)
    ends = np.cumsum(drawn)
    whole = drawn[ends <= tokens].tolist()
    left = tokens - sum(whole)
    return [*whole, left] if left else whole


class Samples:
    """The samples that one rank has made: token ids and log-probabilities of ragged length."""

    def __init__(self, rank: int, num_bytes: int) -> None:
        self.lengths = sample_lengths(rank, num_bytes)
        self.tokens = [torch.arange(n) for n in self.lengths]
        self.log_probs = [torch.full((n,), -1.0) for n in self.lengths]


class OurWorker:
    """A rank of hybridrl: a store, the data plane, and the moves between them."""

    def __init__(self, rank: int, world_size: int, num_bytes: int, plane: RayDataPlane) -> None:
        torch.set_num_threads(1)
        self.store, self.plane, self.rank = SampleStore(), plane, rank
        self.samples = Samples(rank, num_bytes)
        self.ids = [SampleId(i, f"rank{rank}") for i in range(len(self.samples.lengths))]

    @dispatch(Dispatch.SAME)
    def empty(self) -> None:
        """Nothing."""

    @dispatch(Dispatch.SAME)
    def reset(self) -> None:
        """Put the samples that were made here back into an empty store."""
        self.store = SampleStore()
        for id, tokens, log_probs in zip(
            self.ids, self.samples.tokens, self.samples.log_probs, strict=True
        ):
            tensors = {"tokens": tokens, "log_probs": log_probs}
            self.store.add(id, StoredSample(len(tokens), None, tensors))

    @dispatch(Dispatch.SAME)
    def export(self) -> Any:
        """Hand out all samples; answers with the parcel's reference."""
        parcel = self.store.pack(self.ids, ("tokens", "log_probs"))
        self.store.drop(self.ids)
        return self.plane.put(parcel)

    @dispatch(Dispatch.PER_RANK)
    def fetch(self, parcel: Any) -> int:
        """Bring a parcel in; the number of samples that arrived."""
        before = len(self.store)
        for arrived in self.plane.get([parcel]):
            self.store.accept(arrived)
        return len(self.store) - before


class RayWorker:
    """A plain Ray actor that does the same."""

    def __init__(self, rank: int, num_bytes: int) -> None:
        torch.set_num_threads(1)
        self.samples = Samples(rank, num_bytes)
        self.held: list[Any] = []

    def empty(self) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Forget what arrived."""
        self.held = []

    def export(self, flat: bool) -> list[Any]:
        """Put all samples; the reference in a list, so that Ray hands it on unresolved."""
        import ray

        tokens, log_probs = self.samples.tokens, self.samples.log_probs
        if flat:
            arrays = (torch.cat(tokens).numpy(), torch.cat(log_probs).numpy(), self.samples.lengths)
            return [ray.put(arrays)]
        return [ray.put(([t.numpy() for t in tokens], [t.numpy() for t in log_probs]))]

    def fetch(self, reference: list[Any], flat: bool) -> int:
        """Get samples and keep them; their number."""
        import ray

        value = ray.get(reference[0])
        if flat:
            cuts = np.cumsum(value[2])[:-1]
            value = (np.split(value[0], cuts), np.split(value[1], cuts))
        self.held = list(zip(*value, strict=True))
        return len(self.held)


def verl_worker(num_bytes: int) -> type:
    """verl's worker that does the same; made here since `import verl` takes seconds."""
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch as VerlDispatch
    from verl.single_controller.base.decorator import register

    class VerlWorker(Worker):
        def __init__(self) -> None:
            super().__init__()
            torch.set_num_threads(1)
            rows = len(sample_lengths(0, num_bytes))  # the ranks' batches are joined: one shape
            shape = (rows, num_bytes // BYTES_PER_TOKEN // rows)
            self.samples = DataProto.from_dict(
                {"tokens": torch.ones(shape, dtype=torch.int64), "log_probs": torch.zeros(shape)}
            )

        @register(dispatch_mode=VerlDispatch.ONE_TO_ALL)
        def empty(self) -> None:
            return None

        @register(dispatch_mode=VerlDispatch.DP_COMPUTE_PROTO)
        def export(self, prompts: DataProto) -> DataProto:
            return self.samples

        @register(dispatch_mode=VerlDispatch.DP_COMPUTE_PROTO)
        def fetch(self, batch: DataProto) -> DataProto:
            assert batch.batch["tokens"].shape == self.samples.batch["tokens"].shape
            return batch.select(batch_keys=["tokens"]).slice(0, 1)

    return VerlWorker


@contextmanager
def groups(num_bytes: int) -> Iterator[tuple[Any, Any, list[Any], Any]]:
    """Ray, our group, plain actors and verl's group: `RANKS` ranks with `num_bytes` each."""
    cluster = ClusterConfig(ranks=RANKS)
    env = compat.environment(Device.cpu)
    with (
        tempfile.TemporaryDirectory() as logs,
        ray_runtime(ClusterConfig(ranks=4 * RANKS), env, Path(logs)) as ray,
    ):
        worker_env = env | {"OMP_NUM_THREADS": "1"}
        kinds = (
            compat.worker_class(OurWorker, OurWorker, num_bytes, RayDataPlane()),
            verl_worker(num_bytes),
        )
        ours, verl = (
            compat.worker_group(kind, ranks_placement(ray, cluster), Device.cpu, worker_env)
            for kind in kinds
        )
        actor = ray.remote(num_cpus=0)(RayWorker)
        plain = [actor.remote(rank, num_bytes) for rank in range(RANKS)]
        yield ray, ours, plain, verl


def seconds(action: Callable[[], Any]) -> float:
    """Seconds of `action`."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def dispatches(ray: Any, ours: Any, plain: list[Any], verl: Any, rounds: int) -> None:
    """Print the cost of an empty call to all ranks, answers awaited."""
    measured = take_turns(
        {
            "ours": lambda: seconds(lambda: ray.get(ours.empty())),
            "ray": lambda: seconds(lambda: ray.get([actor.empty.remote() for actor in plain])),
            "verl": lambda: seconds(verl.empty),
        },
        rounds,
    )
    for other in ("ray", "verl"):
        name = f"dispatch_empty_vs_{other}"
        show(line(name, "s", "lower", measured["ours"], measured[other], ranks=RANKS))


def transfers(
    ray: Any, ours: Any, plain: list[Any], verl: Any, rounds: int, num_bytes: int
) -> None:
    """Print the cost of moving `num_bytes` a rank from its maker to the next rank."""
    from verl import DataProto

    def next_rank(references: list[Any]) -> list[Any]:
        return references[-1:] + references[:-1]

    expected = [len(sample_lengths(r, num_bytes)) for r in next_rank(list(range(RANKS)))]

    def our_way() -> float:
        ray.get(ours.reset())
        time.sleep(SETTLE)
        start = time.perf_counter()
        parcels = ray.get(ours.export())
        arrived = ray.get(ours.fetch(next_rank(parcels)))
        stop = time.perf_counter()
        assert arrived == expected
        return stop - start

    def ray_way(flat: bool) -> float:
        ray.get([actor.reset.remote() for actor in plain])
        time.sleep(SETTLE)
        start = time.perf_counter()
        parcels = next_rank(ray.get([actor.export.remote(flat) for actor in plain]))
        arrived = ray.get(
            [actor.fetch.remote(p, flat) for actor, p in zip(plain, parcels, strict=True)]
        )
        stop = time.perf_counter()
        assert arrived == expected
        return stop - start

    prompts = DataProto.from_dict({"prompts": torch.zeros(RANKS, 1, dtype=torch.int64)})

    def verl_way() -> float:
        time.sleep(SETTLE)
        start = time.perf_counter()
        verl.fetch(verl.export(prompts))
        return time.perf_counter() - start

    measured = take_turns(
        {
            "ours": our_way,
            "flat": lambda: ray_way(True),
            "listed": lambda: ray_way(False),
            "verl": verl_way,
        },
        rounds,
    )
    faster = min("flat", "listed", key=lambda form: statistics.median(measured[form]))
    extra = {"megabytes": num_bytes * RANKS / 1e6, "samples": sum(expected), "ranks": RANKS}
    show(
        line(
            "transfer_32mb_vs_ray", "s", "lower", measured["ours"], measured[faster],
            ray_form=faster, **extra,
        )
    )  # fmt: skip
    show(line("transfer_32mb_vs_verl", "s", "lower", measured["ours"], measured["verl"], **extra))


def main(argv: list[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["dispatch", "transfer"])
    parser.add_argument("--tiny", action="store_true", help="a few rounds of little data")
    args = parser.parse_args(argv)
    total = 400_000 if args.tiny else 32_000_000
    with groups(total // RANKS) as (ray, ours, plain, verl):
        if args.only != "transfer":
            dispatches(ray, ours, plain, verl, 5 if args.tiny else 200)
        if args.only != "dispatch":
            transfers(ray, ours, plain, verl, 3 if args.tiny else 20, total // RANKS)


if __name__ == "__main__":
    main()
