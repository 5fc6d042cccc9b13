"""Samples on their way between ranks: as parcels in the object store, the driver has references."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hybridrl.driver.async_calls import Calling, answers_of
from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Advanced, Computed
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.workers.base_worker import Published

Parcels = dict[int, list[Any]]
"""References by receiver."""
_Moves = dict[int, dict[int, list[SampleId]]]  # by sender and receiver


class SampleMoves:
    """Brings samples, or copies of their fields, to other ranks.

    A rank may publish what it has computed: then others fetch it without it, also while it decodes.
    The rest it exports, when its present call ends.

    Example: samples a and b of rank 0 go to rank 1, and only a's tensors are published. So rank 0
    exports b; rank 1 is given two references.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        # Tensors of samples that can be fetched without their rank: references by field.
        self._published: dict[SampleId, dict[str, Any]] = defaultdict(dict)

    def publish(
        self,
        published: Published[Advanced] | Published[Computed],
        ids: Sequence[SampleId],
        fields: Sequence[str],
    ) -> None:
        """`fields` of these samples are in what a rank has published, if it has."""
        if published.reference is not None:
            for id in ids:
                self._published[id] |= dict.fromkeys(fields, published.reference)

    def forget(self, ids: Sequence[SampleId]) -> None:
        """These are released, or made anew."""
        for id in ids:
            self._published.pop(id, None)

    def copy(
        self,
        samples: Sequence[Sample],
        receivers: Sequence[int],
        fields: Collection[str],
        whole: bool = False,
    ) -> Calling[None]:
        """Bring `fields` of samples, which stay on their ranks, to a receiver each.

        With `whole` their items, too. When this returns the receivers have them, whatever becomes
        of the samples' ranks.
        """
        # A parcel may have more samples than are wanted of it, some as they were before they began
        # anew: so each is taken with its ids.
        shares: dict[int, dict[int, tuple[Any, list[SampleId]]]] = defaultdict(dict)
        moves: _Moves = {}
        moving: dict[int, list[SampleId]] = defaultdict(list)
        for sample, receiver in zip(samples, receivers, strict=True):
            known = self._published[sample.id]
            if not known.keys() >= set(fields):
                moves.setdefault(sample.rank, {}).setdefault(receiver, []).append(sample.id)
                moving[receiver].append(sample.id)
                continue
            for parcel in once(known[name] for name in sorted(fields)):
                _, ids = shares[receiver].setdefault(id(parcel), (parcel, []))
                ids.append(sample.id)
        exported: Parcels = defaultdict(list)
        yield from self._export(moves, exported, None if whole else sorted(fields), keep=True)
        for receiver, parcels in exported.items():
            for parcel in parcels:
                shares[receiver][id(parcel)] = parcel, moving[receiver]
        calls = {}
        for receiver, share in sorted(shares.items()):
            of_parcels = [(parcel, tuple(ids)) for parcel, ids in share.values()]
            calls[self.group.call_fetch(receiver, of_parcels)] = receiver
        yield from answers_of(calls)

    def import_at_home(self, samples: Sequence[Sample], field: str) -> Calling[None]:
        """Have the ranks of samples import `field`, which another pool has published."""
        imports = {}
        for rank, mine in by_rank(samples).items():
            references = once(self._published[sample.id][field] for sample in mine)
            ids = [sample.id for sample in mine]
            imports[self.group.call_import_samples(rank, ids, references)] = rank
        yield from answers_of(imports)

    def to_instance(
        self, instance: int, samples: Sequence[Sample]
    ) -> Calling[tuple[dict[int, list[SampleId]], Parcels]]:
        """Bring samples of other instances to an instance, whose ranks they get.

        Gives by rank the samples that arrive, and their parcels.
        """
        ranks = self.group.instances[instance]
        coming = [sample for sample in samples if sample.rank not in ranks]
        receivers = [ranks[(s.id.prompt + s.id.k) % len(ranks)] for s in coming]
        parcels, moves = self._published_or_moves(coming, receivers, lambda sample: sample.tensors)
        arriving: dict[int, list[SampleId]] = defaultdict(list)
        for sample, rank in zip(coming, receivers, strict=True):
            arriving[rank].append(sample.id)
            sample.rank = rank
        yield from self._export(moves, parcels, None, keep=False)
        return arriving, parcels

    def to_ranks(self, samples: Sequence[Sample], ranks: Sequence[int]) -> Calling[Parcels]:
        """Bring each sample to the rank that trains it.

        A sample goes with all tensors that every sample has: another update may read others than
        this one.
        """
        parcels: Parcels = defaultdict(list)
        moving = [(s, rank) for s, rank in zip(samples, ranks, strict=True) if s.rank != rank]
        if moving:
            common = set.intersection(*(sample.tensors for sample in samples))
            moves: _Moves = {}
            for sample, receiver in sorted(moving, key=lambda pair: (pair[0].rank, pair[1])):
                moves.setdefault(sample.rank, {}).setdefault(receiver, []).append(sample.id)
                sample.rank = receiver
                sample.tensors &= common
            yield from self._export(moves, parcels, sorted(common), keep=False)
        return parcels

    def _published_or_moves(
        self,
        samples: Sequence[Sample],
        receivers: Sequence[int],
        fields_of: Callable[[Sample], Collection[str]],
    ) -> tuple[Parcels, _Moves]:
        """References to published tensors; moves of the rest.

        A sample's fields are published all, or its rank exports them.
        """
        parcels: Parcels = defaultdict(list)
        moves: _Moves = {}
        for sample, receiver in zip(samples, receivers, strict=True):
            known, wanted = self._published[sample.id], fields_of(sample)
            if known.keys() >= set(wanted):
                parcels[receiver] += [known[name] for name in sorted(wanted)]
            else:
                moves.setdefault(sample.rank, {}).setdefault(receiver, []).append(sample.id)
        return parcels, moves

    def _export(
        self, moves: _Moves, parcels: Parcels, fields: Sequence[str] | None, keep: bool
    ) -> Calling[None]:
        """Have every rank of `moves` export its samples; their references come to the parcels."""
        calls = {
            self.group.call_export_samples(sender, by_receiver, fields, keep): sender
            for sender, by_receiver in moves.items()
        }
        for exported in (yield from answers_of(calls)):
            for receiver, references in exported.items():
                parcels[receiver] += references


class Homes:
    """Where samples are as a piece of work begins: they may begin anew elsewhere meanwhile."""

    def __init__(self, samples: Sequence[Sample], group: WorkerGroup) -> None:
        self._rank_of = {sample.id: sample.rank for sample in samples}
        self._dead = group.failures.dead
        self._num_dead = len(self._dead)

    @contextmanager
    def may_die(self) -> Iterator[None]:
        """Within, instances with some of the samples may end; the work is to begin again then.

        Raises RuntimeError where some are lost, and no rank has died since it was last asked.
        """
        try:
            yield
        except InstanceEnded:
            before, self._num_dead = self._num_dead, len(self._dead)
            if before == self._num_dead:
                raise RuntimeError("samples are lost, and ranks that had them live") from None

    def live(self, ids: Iterable[SampleId]) -> bool:
        """Whether the ranks of all of them live."""
        return not any(self._rank_of[id] in self._dead for id in ids)

    def those_living(self, ids: Iterable[SampleId]) -> tuple[SampleId, ...]:
        """Give the ids of samples whose rank lives."""
        return tuple(id for id in ids if self._rank_of[id] not in self._dead)

    def living(self, samples: Sequence[Sample], whole_groups: bool = False) -> list[Sample]:
        """Give the samples whose rank lives; with `whole_groups` those of all of their prompt."""
        gone = {id.prompt for id, rank in self._rank_of.items() if rank in self._dead}
        if whole_groups:
            return [sample for sample in samples if sample.id.prompt not in gone]
        return [sample for sample in samples if self._rank_of[sample.id] not in self._dead]


def by_rank(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Samples by the rank that has them, in their order."""
    ranks: dict[int, list[Sample]] = {}
    for sample in samples:
        ranks.setdefault(sample.rank, []).append(sample)
    return ranks


def once(references: Iterable[Any]) -> tuple[Any, ...]:
    """Each reference once: a parcel has many samples."""
    return tuple({id(reference): reference for reference in references}.values())
