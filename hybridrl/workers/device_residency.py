"""The weights on a rank's device: the schedule chooses, one owner moves and records."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from hybridrl.engines.rollout.interface import RolloutEngine
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.system.memory import MemoryReading, free_cached_memory, measure_memory

logger = logging.getLogger(__name__)


class DeviceResident(Protocol):
    """A role whose weights can be on the device, a trained one's optimizer with them."""

    def onload(self) -> None:
        """Bring the weights to the device."""
        ...

    def offload(self) -> None:
        """Free the device of the weights."""
        ...


@dataclass(frozen=True, slots=True)
class ResidentGroup:
    """Roles that train together, all of them on the device at once."""

    roles: tuple[DeviceResident, ...]

    def onload(self) -> None:
        """Bring the weights of all to the device."""
        for role in self.roles:
            role.onload()

    def offload(self) -> None:
        """Free the device of the weights of all."""
        for role in self.roles:
            role.offload()


class DeviceStatus(Enum):
    """The phase of a rank's device."""

    TRAINING = "training"  # the rollout engine sleeps
    SWITCHING = "switching"  # trained shards and the awake rollout engine; weights move
    GENERATING = "generating"  # the rollout engine is awake


class DeviceResidency:
    """The weights on this rank's device: of at most one role, and of an awake rollout engine.

    Roles that train together count as one (`ResidentGroup`). A role that the memory plan lets stay
    on the device (`workers.staying_roles`) is called like any other, and does not move.

    Status      | call                        | next       | what moves, in order
    ------------|-----------------------------|------------|---------------------------------------
    TRAINING    | activate(role or None)      | TRAINING   | active.offload, role.onload
    TRAINING    | enter_training              | TRAINING   | active.offload
    TRAINING    | entering_generation(actor)  | SWITCHING  | if the actor is active, its copy to the
                |                             |            | host begins, else active.offload;
                |                             |            | actor.onload_weights
    SWITCHING   | the end of that `with` body | GENERATING | actor.offload, cached memory freed
    GENERATING  | activate(role or None)      | GENERATING | active.offload, role.onload
    GENERATING  | release_idle_cache          | GENERATING | the KV cache, if no sample uses it
    GENERATING  | entering_generation(actor)  | GENERATING | active.offload
    GENERATING  | enter_training              | TRAINING   | active.offload, sleep, cached memory
                |                             |            | freed

    A role that is active already does not move. Any other call in SWITCHING is a bug.

    Invariant: `active` alone of all roles has its weights on the device. The rollout engine is
    awake in GENERATING and asleep in TRAINING: the weights that come in SWITCHING wake it. The
    owner starts in TRAINING with no role active: new models are offloaded and a new rollout engine
    sleeps before their first call here.

    A phase lasts over many calls of the driver, so a call enters it and the next phase ends it.
    Nothing here is collective. So the ranks of one instance may enter training while others
    generate, for early backward. They stay in it when the others come.

    Example: GRPO's step with a reference. `entering_generation(actor)`: weights and moments begin
    to leave for the host, and the weight switch wakes the engine meanwhile. Samples are
    decoded with `activate(None)`. `release_idle_cache()` and `activate(reference)` score while the
    engine's weights stay. `enter_training()`: the reference leaves, the engine sleeps.
    `activate(actor)` trains: its moments come while the first passes run.

    `on_reading` gets the rank's memory before and after every change.
    """

    def __init__(
        self,
        device: torch.device,
        on_reading: Callable[[MemoryReading], None],
        rollout: RolloutEngine | None = None,
    ) -> None:
        """`rollout` is None on a rank that never generates, which stays in TRAINING."""
        self.device, self.rollout = device, rollout
        self.status = DeviceStatus.TRAINING
        self.active: DeviceResident | None = None
        self._on_reading = on_reading

    def activate(self, role: DeviceResident | None) -> None:
        """Have the weights of `role` on the device and of no other role, or of none."""
        assert self.status is not DeviceStatus.SWITCHING, "a role is activated within a switch"
        if role == self.active:
            return
        with self._measured():
            if self.active is not None:
                self.active.offload()
            if role is not None:
                role.onload()
            self.active = role
        logger.debug("active on the device: %s", type(role).__name__ if role else "no role")

    @contextmanager
    def entering_generation(self, trained: TrainEngine) -> Iterator[bool]:
        """Enter GENERATING; within the body the weights of `trained` can move to the engine.

        Yields whether the engine sleeps, so that it wakes with the weights that the body brings.
        """
        assert self.rollout is not None, "no rollout engine to enter generation with"
        assert self.status is not DeviceStatus.SWITCHING, "a role is activated within a switch"
        wakes = self.status is DeviceStatus.TRAINING
        if not (wakes and self.active is trained):
            self.activate(None)
        with self._measured():
            if wakes:
                if self.active is trained:
                    trained.start_offload()
                # Also where it was active: a forward pass may have left its shards gathered.
                trained.onload_weights()
                self.active = trained
                self.status = DeviceStatus.SWITCHING
            yield wakes
            if wakes:
                trained.offload()
                free_cached_memory(self.device)
                self.active = None
            self.status = DeviceStatus.GENERATING
        logger.debug("phase: generating")

    def enter_training(self) -> None:
        """Enter TRAINING with an empty device: the role that computes first is activated then."""
        self.activate(None)
        with self._measured():
            if self.rollout is not None and self.status is DeviceStatus.GENERATING:
                self.rollout.sleep()
                free_cached_memory(self.device)
            self.status = DeviceStatus.TRAINING
        logger.debug("phase: training")

    def release_idle_cache(self) -> None:
        """Give the KV cache up, where no sample uses it, for the next work of this instance."""
        if self.rollout is None or self.status is not DeviceStatus.GENERATING:
            return
        stats = self.rollout.stats()
        if not (stats.running or stats.waiting) and stats.has_cache:
            self.rollout.sleep(keep_weights=True)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Read the rank's memory before and after a change."""
        self._on_reading(measure_memory(self.device))
        yield
        self._on_reading(measure_memory(self.device))
