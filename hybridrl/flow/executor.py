"""What a schedule asks of the machinery below it: commands in, events out.

The controller implements `Executor` with worker groups and wall time; the planner and the tests
implement it with a cost model and virtual time. A schedule cannot tell them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hybridrl.flow.clock import Clock
from hybridrl.flow.graph import Stage
from hybridrl.flow.sample import Sample, SampleId


class Phase(Enum):
    """What the ranks' memory is laid out for."""

    GENERATE = "generate"  # generation weights and KV cache are in place
    TRAIN = "train"  # training shards and optimizer are in place


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is drawn.

    `temperature` 0 is greedy; `top_p` in (0, 1]; `top_k` 0 is all tokens; `max_new_tokens` in
    tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    """Start these samples of one prompt on an instance; they share the prompt's KV blocks.

    `prompt` is opaque to schedules (token ids and the item to be judged).
    """

    ids: tuple[SampleId, ...]
    prompt: Any
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Park:
    """Stop these samples, keeping their tokens, so that they can resume later or elsewhere.

    Those that finish before the command arrives are passed over.
    """

    ids: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Parked:
    """What a `Park` has stopped: samples, and the weights' version that made their tokens.

    `state` is opaque to schedules: a reference to the tokens, which go from rank to rank.
    """

    ids: tuple[SampleId, ...]
    version: int
    state: Any


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with some of the samples of `parked`, on any instance with the same weights.

    Another version than the instance's is a bug. Each parked sample is resumed once.
    """

    ids: tuple[SampleId, ...]
    parked: Parked


Command = Submit | Park | Resume


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample has its last token; its tensors (`tokens`, `log_probs`) lie on `rank`.

    `finish` is `stop` or `length`; `version` the actor's version that made it.
    """

    id: SampleId
    rank: int
    prompt_tokens: int
    response_tokens: int
    finish: str
    version: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """One bounded call of an instance has returned, with `running` samples still unfinished."""

    instance: int
    running: int
    decode_steps: int
    finished: tuple[Finished, ...]
    parked: tuple[Parked, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """A per-sample stage has run on these samples: new scalars by sample, new tensor fields."""

    stage: str
    ids: tuple[SampleId, ...]
    scalars: dict[str, tuple[float | int | str, ...]]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Answers of the dataset have become responses: `tokens` of each lies on its rank."""

    stage: str
    finished: tuple[Finished, ...]


Event = Advanced | Computed | Placed


class Executor(Protocol):
    """The seam between a schedule and what runs it.

    `advance`, `compute` and `place` start work and return at once; `wait` blocks until at least one
    piece has ended. `enter`, `update` and `release` are whole-group and block. At most one
    `advance` is in flight per instance; a `compute` that is started meanwhile runs after it, since
    a rank does one thing at a time. Events of one call keep their order; schedules must not depend
    on the order of different calls for anything that reaches the training batch.
    """

    clock: Clock

    @property
    def num_instances(self) -> int:
        """Generation instances, numbered from 0."""
        ...

    def enter(self, phase: Phase) -> None:
        """Bring every rank into `phase`; into GENERATE this is the weight switch."""
        ...

    def advance(self, instance: int, commands: Sequence[Command], num_decode_steps: int) -> None:
        """Hand `commands` to an instance and let it run at most `num_decode_steps` steps."""
        ...

    def place(self, stage: Stage, ids: Sequence[SampleId], prompts: Sequence[Any]) -> None:
        """Make the dataset's target of each prompt the response of a sample (Kind.ANSWERS).

        In any phase, without a generation engine. Sample number i goes to rank i modulo the ranks.
        Ends with `Placed` (one for all ranks or one each).
        """
        ...

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Run a per-sample stage where the samples' tensors lie.

        Ends with `Computed` (one for all samples, or one per rank).
        """
        ...

    def wait(self) -> list[Event]:
        """Events of at least one call in flight; raises `RuntimeError` when there is none."""
        ...

    def update(self, stage: Stage, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on `samples`, which are in training order; returns the step's metrics."""
        ...

    def release(self, ids: Sequence[SampleId]) -> None:
        """These samples have left, trained or dropped: the ranks may forget their tensors."""
        ...
