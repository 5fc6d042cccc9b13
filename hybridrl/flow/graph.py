"""A recipe as data: stages and the streams between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a stage is, which decides where it runs and what it waits for."""

    PROMPTS = "prompts"  # the prompt stream; demand-driven
    ANSWERS = "answers"  # the dataset's own targets as responses, made on the ranks (supervised)
    GENERATE = "generate"  # one sample in, finished sample out; runs on generation instances
    COMPUTE = "compute"  # per sample, on the rank where its tensors lie: a role's method or `map`
    BY_GROUP = "by_group"  # in the driver, on the scalars of one prompt's samples
    BY_BATCH = "by_batch"  # in the driver, on the scalars of the whole batch
    JOIN = "join"  # streams over the same prompts, matched by prompt
    FILTER = "filter"  # drops whole groups; in prompt order
    TAKE = "take"  # the first n groups in prompt order; asks upstream for more prompts
    UPDATE = "update"  # an optimizer pass over the batch; whole group, the step's barrier


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One node of the graph.

    `inputs` are the fields that a sample must have before the stage may start on it, `outputs` the
    fields that it adds. `role` and `method` say what runs on the rank (COMPUTE, GENERATE, UPDATE);
    `options` are the call's own settings, picklable, sent to the ranks once.
    """

    name: str
    kind: Kind
    upstream: tuple[str, ...] = ()
    role: str | None = None
    method: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """A second set of a role's weights: `frozen` at the start, or an `ewma` after every update."""

    name: str
    of: str
    update: str = "frozen"
    decay: float = 0.0


@dataclass
class Graph:
    """Stages in the order in which the recipe made them, which is a topological order."""

    stages: dict[str, Stage] = field(default_factory=dict)
    copies: dict[str, Copy] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role that some stage runs on, in order of first use."""
        return tuple(dict.fromkeys(s.role for s in self.stages.values() if s.role))
