"""The executor of real runs: worker groups and wall time behind the schedules' seam."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.config import TrainerConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.engines.train.balance import balance
from hybridrl.flow.clock import Clock, WallClock
from hybridrl.flow.executor import Advanced, Command, Event, Phase
from hybridrl.flow.graph import Stage
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.workers.rank import UpdateShare

# Moving samples costs a few milliseconds a step; below this surplus of the fullest rank's tokens
# over the mean they train where they were made.
_TOLERATED_IMBALANCE = 0.02


class RayExecutor:
    """`hybridrl.flow.executor.Executor` over a `WorkerGroup`.

    `on_switch` hears of every weight switch: one accounting per rank. An instance of several ranks
    gets every call on all of them; their answers become one event.
    """

    def __init__(
        self,
        group: WorkerGroup,
        trainer: TrainerConfig,
        on_switch: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self.group, self.trainer, self.on_switch = group, trainer, on_switch
        self.clock: Clock = WallClock()
        self._pending: dict[Any, int] = {}
        self._answers: dict[int, list[Advanced]] = defaultdict(list)

    @property
    def num_instances(self) -> int:
        """Generation instances."""
        return len(self.group.instances)

    def enter(self, phase: Phase) -> None:
        """Bring every rank into `phase`."""
        reports = self.group.enter(phase)
        if any(reports):
            self.on_switch(reports)

    def advance(self, instance: int, commands: Sequence[Command], num_decode_steps: int) -> None:
        """Start a bounded generation call on an instance."""
        self._pending |= self.group.call_advance(instance, commands, num_decode_steps)

    def place(self, stage: Stage, ids: Sequence[SampleId], prompts: Sequence[Any]) -> None:
        """Deal the dataset's targets to the ranks."""
        for rank in range(self.group.size):
            mine = slice(rank, None, self.group.size)
            if ids[mine]:
                call = self.group.call_place(rank, stage, tuple(ids[mine]), tuple(prompts[mine]))
                self._pending[call] = rank

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Start a per-sample stage on every rank that holds some of `samples`.

        A forward pass of a sharded role is collective, so its ranks without samples take part.
        """
        by_rank: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_rank[sample.rank].append(sample)
        collective = stage.method != "map" and stage.role not in ("reward", "cost")
        ranks = range(self.group.size) if collective else sorted(by_rank)
        for rank in ranks:
            ids = tuple(sample.id for sample in by_rank[rank])
            fields = tuple(
                {x: sample.scalars[x] for x in stage.inputs if x in sample.scalars}
                for sample in by_rank[rank]
            )
            self._pending[self.group.call_compute(rank, stage, ids, fields)] = rank

    def wait(self) -> list[Event]:
        """Events of the calls that have ended, at least one, in the order they were started."""
        if not self._pending:
            raise RuntimeError("nothing is in flight")
        events: list[Event] = []
        while not events:
            ready, _ = self.group.ray.wait(list(self._pending), num_returns=1)
            for reference in ready:
                event = self.group.take(self._pending.pop(reference), reference)
                if isinstance(event, Advanced):
                    events += self._joined(event)
                else:
                    events.append(event)
        return events

    def _joined(self, answer: Advanced) -> list[Event]:
        """One event for an instance, once all its ranks have answered."""
        answers = self._answers[answer.instance]
        answers.append(answer)
        if len(answers) < len(self.group.instances[answer.instance]):
            return []
        del self._answers[answer.instance]
        finished = sorted((f for a in answers for f in a.finished), key=lambda f: f.id)
        parked = tuple(p for a in answers for p in a.parked)
        return [replace(answer, finished=tuple(finished), parked=parked)]

    def update(self, stage: Stage, samples: Sequence[Sample]) -> dict[str, float]:
        """Spread the samples by tokens, move those that must move, and train."""
        fields = dict(stage.options["fields"])
        atom = stage.options.get("atom", 1)
        ranks = assign_ranks(samples, self.group.size, atom)
        parcels = self._move(samples, ranks, ("tokens", *fields.values()))
        wanted = {
            sample.id: {
                field: float(sample.scalars[field])
                for field in fields.values()
                if field in sample.scalars
            }
            for sample in samples
        }
        num = stage.options["mini_batches"] or self.trainer.mini_batches
        atoms = -(-len(samples) // atom)
        bounds = [atoms * i // num * atom for i in range(num)] + [len(samples)]
        shares = []
        for rank in range(self.group.size):
            mini_batches = tuple(
                tuple(samples[i].id for i in range(a, b) if ranks[i] == rank)
                for a, b in itertools.pairwise(bounds)
                if a < b
            )
            scalars = {id: wanted[id] for ids in mini_batches for id in ids}
            shares.append(UpdateShare(mini_batches, scalars, tuple(parcels[rank])))
        return self.group.update(stage, shares)

    def release(self, ids: Sequence[SampleId]) -> None:
        """Let the ranks forget samples."""
        self.group.release(tuple(ids))

    def _move(
        self, samples: Sequence[Sample], ranks: Sequence[int], fields: tuple[str, ...]
    ) -> list[list[Any]]:
        """Have samples sent to the ranks that train them; returns references by receiver."""
        size = self.group.size
        moves: list[list[list[SampleId]]] = [[[] for _ in range(size)] for _ in range(size)]
        for sample, rank in zip(samples, ranks, strict=True):
            if sample.rank != rank:
                moves[sample.rank][rank].append(sample.id)
        incoming: list[list[Any]] = [[] for _ in range(size)]
        if any(ids for row in moves for ids in row):
            tensors = tuple(f for f in dict.fromkeys(fields) if f in samples[0].tensors)
            sent = self.group.export([tuple(map(tuple, row)) for row in moves], tensors)
            for row in sent:
                for rank, parcel in enumerate(row):
                    if parcel is not None:
                        incoming[rank].append(parcel)
            for sample, rank in zip(samples, ranks, strict=True):
                sample.rank = rank
        return incoming


def assign_ranks(samples: Sequence[Sample], num_ranks: int, atom: int = 1) -> list[int]:
    """Which rank trains which sample: where it was made if that is balanced, else by tokens.

    `atom` consecutive samples stay together. Depends on lengths and places only, never on time.
    """
    here = [sample.rank for sample in samples]
    loads = [0] * num_ranks
    for sample in samples:
        loads[sample.rank] += sample.tokens
    together = all(len(set(here[i : i + atom])) == 1 for i in range(0, len(here), atom))
    if together and max(loads) <= (1 + _TOLERATED_IMBALANCE) * sum(loads) / num_ranks:
        return here
    atoms = [samples[i : i + atom] for i in range(0, len(samples), atom)]
    parts = balance([sum(s.tokens for s in group) for group in atoms], num_ranks)
    ranks = [0] * len(samples)
    for rank, part in enumerate(parts):
        for index in part:
            for i in range(index * atom, min((index + 1) * atom, len(samples))):
                ranks[i] = rank
    return ranks
