"""The colocated ranks as the driver sees them: typed calls, one error for a dead worker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config import Config, ConfigError
from hybridrl.controller.launch import CallFailed, Launcher
from hybridrl.flow.executor import Command, Phase
from hybridrl.flow.graph import Graph, Stage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.machine import Machine
from hybridrl.workers.memory import Memory
from hybridrl.workers.rank import RankWorker, Reply, Span
from hybridrl.workers.training import Training, UpdateShare

OnSpan = Callable[[int, Span], None]
OnMemory = Callable[[int, Memory], None]
_UNKNOWN = ("?", "")  # node and log of a rank that has not answered yet


class WorkerError(RuntimeError):
    """A rank failed: which roles, which rank, which node, where its log is, and why."""


class WorkerGroup:
    """All ranks of the colocated pool.

    `call_*` start work and return references; `gather` waits for them. Any failure ends every
    rank at once: a rank that sits in a collective would otherwise wait for the dead one for ever.
    `instances` lists the ranks of each generation instance, known after `setup`.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        model_path: str,
        on_span: OnSpan,
        on_memory: OnMemory,
    ) -> None:
        self.launcher, self.config = launcher, config
        self.on_span, self.on_memory = on_span, on_memory
        self._group = launcher.start(
            RankWorker, RankWorker, config, model_path, launcher.data_plane
        )
        self._ranks = [launcher.subgroup(self._group, [rank]) for rank in range(self.size)]
        self._roles = ["actor", "reward"]
        self._place = [_UNKNOWN] * self.size
        self.instances: list[list[int]] = []
        self._logs = Path(config.run.dir) / "logs"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.config.cluster.ranks

    # -- waiting -------------------------------------------------------------------------------

    def take(self, rank: int, reference: Any) -> Any:
        """The value of a call that has ended; the rank's spans and memory go to telemetry."""
        try:
            reply: Reply = self.launcher.get(reference)
        except CallFailed as error:
            raise self._fail(rank, error) from error
        for span in reply.spans:
            self.on_span(rank, span)
        for memory in reply.memory:
            self.on_memory(rank, memory)
        return reply.value

    def gather(self, references: Sequence[Any]) -> list[Any]:
        """Values of one call per rank, in rank order; the first failure is raised at once."""
        pending = {reference: rank for rank, reference in enumerate(references)}
        values: dict[int, Any] = {}
        while pending:
            for reference in self.launcher.wait(list(pending)):
                rank = pending.pop(reference)
                values[rank] = self.take(rank, reference)
        return [values[rank] for rank in range(len(references))]

    def kill(self) -> None:
        """End every rank now."""
        self.launcher.kill(self._group)

    def _fail(self, rank: int, error: CallFailed) -> BaseException:
        """End every rank; the error to raise."""
        if isinstance(error.cause, RuntimeError):
            # A death makes the others' collectives fail, and their errors may arrive before it.
            rank, error = self.launcher.first_dead(self._group) or (rank, error)
        self.kill()
        if isinstance(error.cause, ConfigError | OSError):
            return error.cause
        if error.died:
            reason = "its process ended (killed, out of memory, or crashed)"
            if self._place[rank] == _UNKNOWN:
                reason = f"{reason}: {error}"
        else:
            reason = f"{type(error.cause).__name__}: {error.cause}" if error.cause else str(error)
        node, log = self._place[rank]
        return WorkerError(
            f"rank {rank} of {self.size} ({', '.join(self._roles)}) on node {node} failed:"
            f" {reason}; its log is {log or self._logs}"
        )

    # -- whole group, blocking -----------------------------------------------------------------

    def setup(self) -> list[dict[str, Any]]:
        """Process group and weights on every rank; answers with what each has to log."""
        (listening,) = self._ranks[0].listen()
        answers = self.gather(self._group.setup(*self.take(0, listening)))
        self._place = [
            (
                f"{answer['node']} (pid {answer['pid']})",
                self.launcher.log(answer["log"], self._logs),
            )
            for answer in answers
        ]
        number = 1 + max(answer["instance"] for answer in answers)
        self.instances = [
            [rank for rank, answer in enumerate(answers) if answer["instance"] == instance]
            for instance in range(number)
        ]
        return answers

    def machines(self) -> list[Machine]:
        """Every node once, as the first of its ranks sees it."""
        answers: list[Machine] = self.gather(self._group.machine())
        return list({machine.node: machine for machine in reversed(answers)}.values())[::-1]

    def begin(
        self, graph: Graph, training: Mapping[str, Training], publishes: bool
    ) -> dict[str, Any]:
        """Make a recipe's roles on every rank, with fresh optimizers for those of `training`.

        Answers with what is worth logging of new critics, by name. With `publishes` ranks put what
        they make into the data plane at once: samples may move.
        """
        self._roles = list(dict.fromkeys(["actor", "reward", *graph.roles]))
        answers = self.gather(self._group.begin(graph.on_ranks(), dict(training), publishes))
        made: dict[str, Any] = answers[0]
        return made

    def enter(self, phase: Phase) -> list[dict[str, Any]]:
        """Change phase everywhere; answers with each rank's weight-switch accounting."""
        return self.gather(self._group.enter(phase))

    def export(
        self, moves: list[tuple[tuple[SampleId, ...], ...]], fields: tuple[str, ...]
    ) -> list[list[Any]]:
        """`moves[source][destination]` lists ids; answers with references in the same shape."""
        return self.gather(self._group.export(moves, [fields] * self.size))

    def update(self, stage: Stage, shares: list[UpdateShare]) -> dict[str, float]:
        """One pass over an update's mini-batches; metrics are equal on all ranks."""
        return self.gather(self._group.update([stage] * self.size, shares))[0]

    def save(self, path: str) -> None:
        """Write the actor as a Hugging Face directory, every critic as one in it."""
        self.gather(self._group.save(path))

    def texts(self, by_rank: Mapping[int, Iterable[SampleId]]) -> dict[SampleId, tuple[str, str]]:
        """Prompt and response texts of samples, by the rank that holds them."""
        references = {rank: self._ranks[rank].texts(tuple(ids))[0] for rank, ids in by_rank.items()}
        found: dict[SampleId, tuple[str, str]] = {}
        for rank, reference in references.items():
            found |= self.take(rank, reference)
        return found

    def release(self, ids: tuple[SampleId, ...]) -> None:
        """Forget samples on every rank."""
        self.gather(self._group.release(ids))

    def close(self) -> None:
        """End child processes and the ranks."""
        self.gather(self._group.close())
        self.kill()

    # -- one rank, not blocking ----------------------------------------------------------------

    def call_advance(
        self, instance: int, commands: Sequence[Command], steps: int
    ) -> dict[Any, int]:
        """Start a bounded generation call on every rank of an instance; references and ranks."""
        return {
            self._ranks[rank].advance(instance, list(commands), steps)[0]: rank
            for rank in self.instances[instance]
        }

    def call_place(
        self, rank: int, stage: Stage, ids: tuple[SampleId, ...], items: tuple[Any, ...]
    ) -> Any:
        """Start making samples of the dataset's targets on one rank."""
        return self._ranks[rank].place(stage, ids, items)[0]

    def call_compute(
        self, rank: int, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[Any, ...]
    ) -> Any:
        """Start a stage that all ranks take part in on one of them."""
        return self._ranks[rank].compute(stage, ids, scalars)[0]

    def call_judge(
        self, rank: int, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[Any, ...]
    ) -> Any:
        """Start a verifier or a `map` on one rank, beside what else it does."""
        return self._ranks[rank].judge(stage, ids, scalars)[0]

    def call_send(self, rank: int, moves: Mapping[int, Sequence[SampleId]]) -> Any:
        """Have whole samples of one rank put into the data plane, by receiver."""
        return self._ranks[rank].send({to: tuple(ids) for to, ids in moves.items()})[0]

    def call_infer(
        self,
        rank: int,
        stage: Stage,
        instance: int,
        ids: Sequence[SampleId],
        arriving: Sequence[SampleId],
        parcels: Sequence[Any],
    ) -> Any:
        """Start a forward-only stage on one rank of an instance; all of its ranks are called."""
        infer = self._ranks[rank].infer
        return infer(stage, instance, tuple(ids), tuple(arriving), tuple(parcels))[0]
