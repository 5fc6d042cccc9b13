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
    COLLECT = "collect"  # the end of a stream that is looked at and not trained on (evaluation)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One node of the graph.

    `inputs` are the fields that a sample must have before the stage may start on it, `outputs` the
    fields that it adds. `role` and `method` say what runs on the rank (COMPUTE, GENERATE, UPDATE);
    `options` are the call's own settings; on the ranks' kinds they are picklable, sent there once.
    `scalars` are the outputs whose values travel to the driver; the others are tensors that stay on
    the sample's rank.

    Options by kind and method:

    - GENERATE: `num_samples`, or `count`, the scalar that says how many of a prompt (of the first
      of the samples that come to the stage); `branch` (of the samples' ids), `sampling` (what
      differs from the schedule's `Sampling`, by its field names).
    - ANSWERS: `column` (None: the dataset's answer), `branch`.
    - COMPUTE `map`: `function`, called per sample with the `inputs` in order; `returns`, the names
      of what it gives (one value, or a tuple of several).
    - BY_GROUP, BY_BATCH, FILTER: `function`; BY_BATCH also `grouped`.
    - JOIN: `prefix`, or `sides` for a pair, or `merge`.
    - TAKE: `num_groups`, `round_prompts` (None for both: the schedule's prompts per step),
      `max_rounds`, `allow_fewer`.
    - UPDATE: `loss`, `epochs` and `mini_batches` (None: the trainer config's), `after` (so many
      steps of the run go before the first), `fields` (loss field -> sample field),
      `samples_per_row` (so many consecutive samples stay in one micro-batch).
    """

    name: str
    kind: Kind
    upstream: tuple[str, ...] = ()
    role: str | None = None
    method: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def makes_more(self) -> bool:
        """Whether it generates as many samples as others' scalars say."""
        return "count" in self.options


@dataclass(frozen=True)
class Copy:
    """A second set of a role's weights: `frozen` at the start, or an `ewma` after every update."""

    name: str
    of: str
    update: str = "frozen"
    decay: float = 0.0


@dataclass
class Graph:
    """Stages in the order in which the recipe made them, which is a topological order.

    `states` holds the recipe's own numbers at their present values (`Flow.state`).
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    copies: dict[str, Copy] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role that some stage runs on, in order of first use."""
        return tuple(dict.fromkeys(s.role for s in self.stages.values() if s.role))

    @property
    def learned(self) -> tuple[str, ...]:
        """Every role that is trained, or whose weights are read where training has them."""
        methods = ("update", "values", "learned_score")
        found = (s.role for s in self.stages.values() if s.role and s.method in methods)
        return tuple(dict.fromkeys(found))

    @property
    def judges(self) -> tuple[str, ...]:
        """Every role that judges responses, in order of first use."""
        found = (s.role for s in self.stages.values() if s.role and s.method == "score")
        return tuple(dict.fromkeys(found))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the dataset that are responses, in order of first use."""
        named = (stage.options.get("column") for stage in self.stages.values())
        return tuple(dict.fromkeys(column for column in named if column))

    def add(self, stage: Stage) -> None:
        """Append a stage; raises `ValueError` when its name is taken."""
        if stage.name in self.stages:
            raise ValueError(
                f"two stages are named {stage.name!r}: wanted a name of its own (name=...), "
                f"taken are {sorted(self.stages)}"
            )
        assert all(name in self.stages for name in stage.upstream), stage
        self.stages[stage.name] = stage

    def on_ranks(self) -> "Graph":
        """The part that the ranks need, picklable: without the driver's stages and states."""
        kinds = (Kind.GENERATE, Kind.ANSWERS, Kind.COMPUTE, Kind.UPDATE)
        stages = {name: stage for name, stage in self.stages.items() if stage.kind in kinds}
        return Graph(stages, dict(self.copies))

    def ancestors(self, name: str) -> frozenset[str]:
        """Names of all stages that `name` waits for, itself left out."""
        found: set[str] = set()
        todo = list(self.stages[name].upstream)
        while todo:
            current = todo.pop()
            if current not in found:
                found.add(current)
                todo.extend(self.stages[current].upstream)
        return frozenset(found)

    def check(self) -> None:
        """Raise `ValueError` when nothing would come of the graph."""
        if not any(s.kind in (Kind.UPDATE, Kind.COLLECT) for s in self.stages.values()):
            raise ValueError(
                f"the recipe trains nothing: got the stages {list(self.stages)}, "
                "wanted an update(...) of some role, or flow.collect(...) to evaluate"
            )

    def state_dict(self) -> dict[str, float]:
        """The recipe state, to be checkpointed."""
        return dict(self.states)

    def load_state_dict(self, values: Mapping[str, float]) -> None:
        """Take checkpointed recipe state; raises `ValueError` when the names differ."""
        if set(values) != set(self.states):
            raise ValueError(
                f"recipe state: got {sorted(values)}, wanted {sorted(self.states)}; "
                "the checkpoint is another recipe's"
            )
        self.states.update(values)
