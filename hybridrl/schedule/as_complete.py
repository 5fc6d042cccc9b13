"""The asynchronous schedule whose steps train groups as they complete, for rare stragglers."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hybridrl.flow.graph import TakeStage
from hybridrl.flow.ledger import SampleStatus
from hybridrl.flow.sample import SampleId
from hybridrl.schedule.asynchronous import Async
from hybridrl.schedule.dealing import Dealer, Dealt
from hybridrl.schedule.groups import GenerationTask, tasks_of
from hybridrl.schedule.instances import Instance, InstanceStatus
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.slots import Slots

_FEW = 4  # an instance gives its samples away if they have at most a fourth of its rows


@dataclass(kw_only=True, eq=False)
class AsComplete(Async):
    """Step k trains the first P groups that are complete and that the rule of slots lets it train.

    Prompts begin in their order, whenever a place is free (`Slots.num_places`), on instances whose
    weights the rule allows. An instance without samples loads the newest weights first. With
    `in_flight` all load them at their next call, else a response is of one version: where an
    instance may begin no group it gives its last few samples to others of their version, or makes
    them, and then loads.

    A group that has its slot runs the passes of models of its step, and is trained, early where it
    may be. Where a `take` counts groups, one that filters leave out gives its slot back. A round of
    a step has as many groups as the recipe asks for, those left out among them.

    Samples that begin again after a death have the births of their new tokens, and obey the rule.
    """

    _slots: Slots = field(init=False)
    _births: dict[SampleId, int] = field(default_factory=dict)
    """Steps behind the weights by which a sample of an open group has begun."""
    _freed: set[int] = field(default_factory=set)
    """Instances that have given their last samples to others, and begun no group since."""
    _moving: set[SampleId] = field(default_factory=set)
    """The samples that they have given, until others have them."""
    _positions: list[int] = field(default_factory=list)
    """The prompts of the present round, in the order in which they have taken their slots."""

    def bind(self, schedule: LoopSchedule) -> None:
        """Belong to a schedule, of which no step has run."""
        super().bind(schedule)
        takes = [s for s in schedule.graph.stages.values() if isinstance(s, TakeStage)]
        self._counts_groups = bool(takes)
        self._per_step, self._most_seen = (per_step := schedule.settings.prompts_per_step), math.inf
        if takes:
            (take,) = takes
            self._most_seen = take.max_rounds * (take.round_prompts or per_step)
            self._per_step = min(take.num_groups or per_step, self._most_seen)
        self._slots = Slots(self.max_staleness, self._per_step)

    # -- between steps -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The open prompts and their samples, with the weights that these have begun by."""
        births = [[list(id), steps] for id, steps in self._births.items()]
        return super().state_dict() | {"births": births}

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue with the open prompts' samples, of which some begin anew."""
        super().load_state_dict(state, prompt_at, ranks)
        self._slots = Slots(self.max_staleness, self._per_step, self._batch)
        births = {SampleId.read(id): int(steps) for id, steps in state.get("births", ())}
        ledger = self.schedule.groups.ledger
        for task in self.schedule.groups.tasks:
            id = task.sample.id
            if id in births and ledger.status(id) is not SampleStatus.QUEUED:
                self._begin_sample(id, births[id])

    def needs_versions(self) -> Collection[int]:
        """The versions of unfinished samples; the newest is pushed again."""
        if self.in_flight:
            return ()
        steps = {self._births[id] for id in self._unfinished() if id in self._births}
        return {self._versions[s] for s in steps if s < self._batch}

    def _end_batch(self, after: int) -> Collection[int]:
        """The step's prompts are trained; gives the steps behind weights that are of use yet."""
        self._slots.end_step()
        groups = self.schedule.groups.open
        self._births = {id: steps for id, steps in self._births.items() if id.prompt in groups}
        self._moving &= self._births.keys()
        return range(after - self.max_staleness, after)

    def _kept_versions(self) -> Collection[int]:
        """The versions that instances may load, besides the newest."""
        if self.in_flight:
            return []
        steps = {self._births[id] for id in self._unfinished() if id in self._births}
        return {self._versions[s] for s in steps}

    def _unfinished(self) -> list[SampleId]:
        groups = self.schedule.groups
        ids = (task.sample.id for task in tasks_of(groups.open))
        return [id for id in ids if not groups.ledger.is_finished(id)]

    # -- a round -------------------------------------------------------------------------------

    def begin(self) -> list[GenerationTask]:
        """The unfinished samples of a checkpoint go on; `make` has prompts begin."""
        schedule = self.schedule
        for position, group in schedule.groups.taken.items():
            left = map(schedule.groups.ledger.has_left, group.tasks)
            if self._counts_groups and self._slots.has_slot(position) and all(left):
                self._slots.leave(position)  # a filter that waits for the batch
        # What rounds before have seen, and might have seen, is gone.
        self._num_rounds += 1
        self._slots.unseen = self._most_seen - (self._num_rounds - 1) * self._wanted
        self._positions = []
        unfinished = [] if schedule.loop.has_begun else self._unfinished()
        return [schedule.groups.task(id) for id in unfinished] + self._fill()

    def begin_step(self) -> None:
        """No round yet."""
        super().begin_step()
        self._num_rounds = 0

    def take(self) -> list[int]:
        """The round's groups are trained on."""
        self._slots.unseen = self._most_seen - self._num_rounds * self._wanted
        return super().take()

    def _fill(self) -> list[GenerationTask]:
        """Prompts begin where places are free, and steps come that train them."""
        slots, schedule = self._slots, self.schedule
        places = slots.num_places
        if self.num_steps is not None:
            steps_left = self.num_steps - 1 - slots.step
            places = min(places, slots.left + steps_left * slots.per_step)
        free = places - sum(not slots.of_step(p) for p in schedule.groups.open)
        pulled = list(islice(schedule.prompts, max(0, free)))
        return schedule.begin(pulled) if pulled else []

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Let samples be made until the round has its groups; others go on."""
        loop = self.schedule.loop
        loop.make(tasks)
        restored, self._restored = self._restored, []
        with self._training_waits():
            self._run_until_there(restored)

    def _run_until_there(self, restored: Sequence[int]) -> None:
        """Give slots to groups, and let prompts begin, after each event until the round ends."""
        loop = self.schedule.loop
        while True:
            touched = [*dict.fromkeys([*restored, *self._take_slots()])]
            if begun := self._fill():
                loop.make(begun)
            if self._is_there():
                break
            loop.run_on(iter((False, True)).__next__, touched)  # until something has happened
            restored = []

    def _take_slots(self) -> list[int]:
        """Complete groups take slots, and give them back where filters leave them out."""
        slots, groups, taken = self._slots, self.schedule.groups, list[int]()
        while wanted := self._wanted - len(self._positions):
            for position in self._positions:
                if slots.has_slot(position) and self._is_left_out(position):
                    slots.leave(position)
            complete = [p for p in groups.complete() if not slots.of_step(p)]
            for position in complete:
                if slots.limit(position) is None:  # the dataset's own answers
                    slots.begin(position, slots.step)
            new = slots.take(complete, wanted)
            if not new:
                break
            self._positions += new
            taken += new
        return taken

    def _is_left_out(self, position: int) -> bool:
        """Whether nothing is left of a group that would count: by filters, or given up."""
        tracker, groups = self.schedule.loop.stages.tracker, self.schedule.groups
        if not self._counts_groups or tracker.open_stages([position]):
            return False
        samples = [task.sample for task in groups[position].tasks.values()]
        return all(
            groups.ledger.has_left(sample.id) or sample.scalars["finish"] == "abort"
            for sample in samples
        )

    def _is_there(self) -> bool:
        """Whether the round has its groups, and their early stages have run."""
        loop = self.schedule.loop
        if loop.tail.is_training or loop.stages.tracker.open_stages(self._positions):
            return False
        if not all(map(self.schedule.groups.is_complete, self._positions)):
            return False
        if self._slots.left and len(self._positions) < self._wanted:
            if all(map(self._slots.of_step, self.schedule.groups.open)):
                got = len(self._positions)
                raise ValueError(f"the prompts have ended: got {got}, wanted {self._wanted}")
            return False
        return True

    @property
    def _round(self) -> list[int]:
        """The prompts of the step's present round."""
        return sorted(self._positions)

    def of_step(self, position: int) -> bool:
        """Whether the present step trains on a prompt."""
        return self._slots.has_slot(position)

    # -- instances -----------------------------------------------------------------------------

    def deal(
        self, dealer: Dealer, queue: Sequence[SampleId], able: Sequence[Instance]
    ) -> tuple[list[Dealt], list[SampleId]]:
        """Samples that have begun come first, then groups by their limits, then by their prompts.

        Each goes to the instance with least to do that may have it.
        """
        self._forget_lost(queue)
        if self.schedule.loop.newest is None:
            return [], [*queue]
        newest = max(self._versions)
        steps_of = {version: steps for steps, version in sorted(self._versions.items())}
        # By which weights instances make their next samples, in so far as that is decided.
        decided = not self.in_flight
        has = {i.number: steps_of.get(i.version or 0, -1) for i in able if i.held and decided}

        def begins(instance: Instance, ids: Sequence[SampleId]) -> bool:
            """Whether an instance may be given these samples of a group; then it will be."""
            fixed = None if self.in_flight else self._births.get(ids[0])
            steps = has.get(instance.number, newest if fixed is None else fixed)
            if fixed is not None and (steps != fixed or self._gave_away(instance, fixed)):
                return False
            moving = self._moving.intersection(ids)
            self.schedule.metrics["samples/migrated"] += len(moving)
            self._moving -= moving
            if ids[0] not in self._births:
                if not self._slots.may_begin(ids[0].prompt, steps):
                    return False
                for id in ids:
                    self._begin_sample(id, steps)
                self._freed.discard(instance.number)
            has[instance.number] = steps
            return True

        dealt, left = dealer.deal_in_order(self._in_order(queue), able, begins)
        if not self.in_flight and any(self._slots.may_begin(id.prompt, newest) for id in left):
            self._free([i for i in able if i.held and i.number not in dealt], newest)
        return [
            Dealt(i, ids, None if self.in_flight else self._versions[has[i.number]])
            for i in able
            if (ids := dealt.get(i.number))
        ], left

    def _free(self, able: Sequence[Instance], newest: int) -> None:
        """Instances that may begin no group give their last samples to others of their version.

        Laminar's repacking (arXiv 2510.12633): those with the fewest go first, into free rows.
        """
        late = [i for i in able if i.version != self._versions[newest] and not i.inbox]
        late.sort(key=lambda instance: len(instance.held))
        rows, takers = self.schedule.limits.max_held, set[int]()
        for index, instance in enumerate(late):
            if instance.number in takers or _FEW * len(instance.held) > rows:
                continue
            for other in late[index + 1 :]:
                has_rows = len(instance.held) + len(other.held) <= rows
                if has_rows and other.number not in takers and other.version == instance.version:
                    takers.add(other.number)
                    self._freed.add(instance.number)
                    self._moving.update(instance.held)
                    instance.become(InstanceStatus.LEAVING)
                    break

    def _gave_away(self, instance: Instance, steps: int) -> bool:
        """Whether an instance has given samples of these weights to others, which have some yet."""
        if instance.number not in self._freed:
            return False
        version, leaving = self._versions[steps], InstanceStatus.LEAVING
        alive = self.schedule.loop.instances.alive
        return any(i.held and i.version == version and i.status is not leaving for i in alive)

    def _in_order(self, queue: Sequence[SampleId]) -> list[list[SampleId]]:
        """The samples of a queue by group, and by the weights that have begun them."""
        groups: dict[tuple[int, int, int], list[SampleId]] = defaultdict(list)
        for id in queue:
            limit = self._slots.limit(id.prompt)
            last = self._batch + self.max_staleness + 1  # no group that has begun
            key = self._births.get(id, last), last if limit is None else limit, id.prompt
            groups[key].append(id)
        return [groups[key] for key in sorted(groups)]

    def _begin_sample(self, id: SampleId, steps: int) -> None:
        """A sample begins by the weights after so many steps."""
        self._slots.begin(id.prompt, steps)
        self._births[id] = steps

    def _forget_lost(self, queue: Sequence[SampleId]) -> None:
        """Samples that are queued again have no tokens: a death has taken them, or no call came."""
        ledger, slots = self.schedule.groups.ledger, self._slots
        lost = [
            id for id in queue if id in self._births and ledger.status(id) is SampleStatus.QUEUED
        ]
        self._moving.difference_update(lost)
        for id in lost:
            del self._births[id]
        for prompt in {id.prompt for id in lost}:
            births = [self._births.get(id) for id in self.schedule.groups[prompt].tasks]
            left = [steps + self.max_staleness for steps in births if steps is not None]
            if not slots.of_step(prompt):
                slots.set_limit(prompt, min(left, default=None))
