"""Pushed weights: who has which version, while instances need it, on ranks that generate alone."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from hybridrl.driver.async_calls import Calling, EventCalls, answers_of
from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Command,
    FetchWeights,
    LoadWeights,
    WeightsPushed,
)
from hybridrl.flow.sample import NO_VERSION
from hybridrl.workers.base_worker import Published
from hybridrl.workers.pushed_weights import PushedShare
from hybridrl.workers.rank_calls import Reference

AdvanceCalls = dict[Reference[Published[Advanced]], int]


class Pushes:
    """References to arrays in the data plane, by version, training rank and place.

    Ranks pull the arrays. Whoever moves them otherwise, by one-sided writes into reserved memory
    say, gives a `LoadWeights` other references.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.record: Callable[..., None] = lambda kind, **facts: None
        """Called with what has moved: `push` or `load`, and its facts."""
        self._shares: dict[int, Sequence[PushedShare]] = {}
        self._newest = NO_VERSION
        self._wanted: Collection[int] = ()  # besides the newest
        self._loaded: dict[int, int] = {}  # by instance
        self._bytes_theory = 0  # of all places of an instance

    # -- the actor's ranks ---------------------------------------------------------------------

    def push(self) -> EventCalls:
        """One event for all training ranks, once their weights can be taken.

        The version before stays until the next push: loads of it may be on their way.
        """
        self.keep(self._wanted)
        try:
            shares = yield from answers_of(self.group.call_push(self._newest))
        except InstanceEnded as ended:  # what they had put: no instance makes it again
            raise RuntimeError("weights that a rank that trains had pushed are lost") from ended
        versions = {share.version for share in shares}
        assert len(versions) == 1, f"training ranks have pushed the versions {sorted(versions)}"
        (version,) = versions
        if version != self._newest:
            self._shares[version], self._newest = shares, version
            self._bytes_theory = shares[0].bytes_theory
            self.record(
                "push",
                version=version,
                bytes=sum(share.num_bytes for share in shares),
                bytes_theory=shares[0].bytes_theory,
                bytes_most=max(share.num_bytes for share in shares),
                seconds=max(share.seconds for share in shares),
                proof_s=max(share.proof_seconds for share in shares),
            )
        return [WeightsPushed(version)]

    def keep(self, versions: Collection[int]) -> None:
        """Forget all but these and the newest, now and when the next push begins.

        What nobody refers to leaves the data plane.
        """
        self._wanted = versions
        kept = {*versions, self._newest}
        self._shares = {version: x for version, x in self._shares.items() if version in kept}

    # -- instances -----------------------------------------------------------------------------

    def push_and_load(self, instances: Sequence[int]) -> Calling[int]:
        """Have all instances take the newest weights; gives their version."""
        yield from self.push()
        calls: AdvanceCalls = {}
        for instance in instances:
            if self._loaded.get(instance) != self._newest:
                load = LoadWeights(self._newest)
                calls |= self.call_advance(instance, [load], 0, ENOUGH_TURNS)
        answers = yield from answers_of(calls)
        self.loaded([answer.event for answer in answers])
        return self._newest

    def call_advance(
        self, instance: int, commands: Sequence[Command], steps: int, enough_turns: int
    ) -> AdvanceCalls:
        """Call every rank of an instance; one that loads weights gets those of its place."""
        first = commands[0] if commands else None
        if isinstance(first, LoadWeights) and first.version == self._loaded.get(instance):
            first, commands = None, commands[1:]  # an evaluation has had it loaded
        if not isinstance(first, LoadWeights):
            of_place = [[*own, *commands] for own in self._fetches(instance)]
            if not of_place:
                return self.group.call_advance(instance, commands, steps, enough_turns)
            return self.group.call_load(instance, of_place, steps, enough_turns)
        loads = self._loads(first, instance)
        self._loaded[instance] = first.version
        of_place = [[load, *commands[1:]] for load in loads]
        return self.group.call_load(instance, of_place, steps, enough_turns)

    def _fetches(self, instance: int) -> list[list[Command]]:
        """For each place of an instance that goes on with older weights: those that come next."""
        transfers = self.group.launcher.data_plane.has_transfers
        if not transfers or self._loaded.get(instance) in (None, self._newest):
            return []
        loads = self._loads(LoadWeights(self._newest), instance)
        return [
            [FetchWeights(tuple(y or x for x, y in zip(one.arrays, one.deltas, strict=True)))]
            for one in loads
        ]

    def loaded(self, answers: Sequence[Advanced]) -> None:
        """Record what ranks have loaded in a call."""
        if num_bytes := sum(answer.work.load_bytes for answer in answers):
            instances = sorted({answer.instance for answer in answers})
            self.record(
                "load",
                instances=instances,
                version=self._loaded[answers[0].instance],
                bytes=num_bytes,
                bytes_theory=self._bytes_theory * len(instances),
                seconds=max(answer.work.load_seconds for answer in answers),
                proof_s=max(answer.work.proof_seconds for answer in answers),
            )

    def _loads(self, command: LoadWeights, instance: int) -> list[LoadWeights]:
        """The command for each place of an instance.

        It has deltas where these begin with the weights that the instance has.
        """
        shares, has = self._shares[command.version], self._loaded.get(instance)
        biases = next((share.biases for share in shares if share.biases is not None), None)
        loads = []
        for place in range(len(self.group.places[instance])):
            senders = [share for share in shares if place in share.arrays]
            arrays = tuple(share.arrays[place] for share in senders)
            deltas = tuple(x.deltas.get(place) if x.base == has else None for x in senders)
            loads.append(replace(command, arrays=arrays, deltas=deltas, biases=biases))
        return loads

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, path: str, versions: Collection[int]) -> None:
        """Write pushed weights, from which samples of a checkpoint go on, into its folder."""
        self.group.save_pushed(path, {version: self._shares[version] for version in versions})

    def load(self, path: str) -> None:
        """Have the versions of `save` ready to be loaded."""
        self._shares |= self.group.load_pushed(path)
        self._wanted = [*self._shares]
