"""A recipe as data: stages and the streams between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from hybridrl.config.loss import Loss

CopyUpdate = Literal["frozen", "ewma"]
"""What becomes of a copy of a role's weights: as at the start, or averaged after every update."""


class StageMethod(Enum):
    """The computation of a role that a per-sample stage runs."""

    LOG_PROBS = "log_probs"  # of the response's tokens
    TOP_LOG_PROBS = "top_log_probs"  # of the tokens that are most likely at each of them
    VALUES = "values"  # of the response's tokens
    SCORE = "score"  # by a judge of the config: a verifier, or a model that stays
    LEARNED_SCORE = "learned_score"  # by the reward model that the recipe trains


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One node of the graph. Its class is its kind: where it runs, and the samples it waits for.

    `inputs` are the fields that a sample must have before the stage may start on it, `outputs` the
    fields that it adds. `scalars` are the outputs whose values travel to the driver; the others are
    tensors that stay on the sample's rank. `role` is whose model or verifier runs, `method` which
    of a role's computations (`ComputeStage`). Logits are divided by `temperature` in its passes
    (`with_temperatures`). Stages that run on ranks are picklable, sent there
    once.
    """

    name: str
    upstream: tuple[str, ...] = ()
    role: str | None = None
    method: StageMethod | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    temperature: float = 1.0

    @property
    def makes_more(self) -> bool:
        """Whether it generates as many samples as others' scalars say."""
        return False


@dataclass(frozen=True, kw_only=True)
class PromptsStage(Stage):
    """The prompt stream; demand-driven."""


@dataclass(frozen=True, kw_only=True)
class SourceStage(Stage):
    """Makes `num_samples` samples from each prompt; `branch` is part of their ids."""

    branch: str = ""
    num_samples: int | None = 1


@dataclass(frozen=True, kw_only=True)
class AnswersStage(SourceStage):
    """The dataset's own targets as responses, made on the ranks (supervised).

    `column` is the dataset's; None is its answer. With `of_next` it is the next prompt's.
    """

    column: str | None = None
    of_next: bool = False


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """The values that differ from the schedule's `Sampling`, by its field names; None does not."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateStage(SourceStage):
    """One sample in, a finished sample out; runs on generation instances.

    If `num_samples` is None, their number is the scalar `count` of the prompt's first sample that
    comes to the stage.
    """

    sampling: SamplingOverrides = SamplingOverrides()
    count: str | None = None

    @property
    def makes_more(self) -> bool:
        """Whether it generates as many samples as others' scalars say."""
        return self.count is not None


@dataclass(frozen=True, kw_only=True)
class ComputeStage(Stage):
    """Per sample: a role's `method`.

    `parts` are those of `reward.kind=sum` whose scores are outputs, too. `num_top` is the number of
    `TOP_LOG_PROBS` a position. With `privileged` the role reads the response after the prompt of
    `data.privileged_template` instead of its own. With `whole_groups` it runs on all samples of a
    prompt together, once they are there.
    """

    parts: tuple[str, ...] = ()
    num_top: int = 0
    privileged: bool = False
    whole_groups: bool = False


@dataclass(frozen=True, kw_only=True)
class MapStage(ComputeStage):
    """Per sample, on the rank where its tensors are: the recipe's own `function`.

    Called with the `inputs` in order; `returns` names its results (one value, or a tuple).
    """

    function: Callable[..., Any]
    returns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BarrierStage(Stage):
    """In the driver: the recipe's own `function` of the scalars of several samples."""

    function: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ByGroupStage(BarrierStage):
    """New scalars from those of one prompt's samples."""


@dataclass(frozen=True, kw_only=True)
class ByBatchStage(BarrierStage):
    """New scalars from those of the whole batch; `grouped` as lists of groups."""

    grouped: bool = False


@dataclass(frozen=True, kw_only=True)
class FilterStage(BarrierStage):
    """Drops whole groups, in prompt order: those for which `function` is false."""


@dataclass(frozen=True, kw_only=True)
class JudgedStage(Stage):
    """Leaves out samples whose judge has failed, as the status fields `inputs` say.

    `roles` are the judges, one for each field; a failure of one that `stops` ends the run. Of
    `pairs` both sides leave.
    """

    roles: tuple[str, ...]
    stops: tuple[str, ...] = ()
    pairs: bool = False


@dataclass(frozen=True, kw_only=True)
class JoinStage(Stage):
    """Lends scalars of the second stream to the first's samples, under `prefix`.

    A partner is `shared` where the second stream has one for all samples of a prompt.
    """

    prefix: str
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class PairStage(Stage):
    """Samples of two streams side by side, matched by prompt and k; `sides` name them."""

    sides: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class MergeStage(Stage):
    """Samples of two streams in one, by prompt."""


@dataclass(frozen=True, kw_only=True)
class TakeStage(Stage):
    """The first `num_groups` groups in prompt order; asks upstream for `round_prompts` more.

    None for either: the schedule's prompts per step.
    """

    num_groups: int | None
    round_prompts: int | None
    max_rounds: int
    allow_fewer: bool


@dataclass(frozen=True, kw_only=True)
class UpdateStage(Stage):
    """An optimizer pass over the batch; the whole group takes part; the step's barrier.

    `epochs` and `mini_batches` None: the trainer config's. The run's first `after` steps leave it
    out. `fields` maps a loss's fields to the sample's. `samples_per_row` consecutive samples stay
    in one micro-batch.
    """

    loss: Loss[Any]
    epochs: int | None = None
    mini_batches: int | None = None
    after: int = 0
    fields: Mapping[str, str]
    samples_per_row: int = 1


@dataclass(frozen=True, kw_only=True)
class CollectStage(Stage):
    """The end of a stream that is looked at and not trained on (evaluation)."""


@dataclass(frozen=True)
class Copy:
    """A second set of a role's weights: `frozen` at the start, or an `ewma` after every update."""

    name: str
    of: str
    update: CopyUpdate = "frozen"
    decay: float = 0.0


@dataclass
class Graph:
    """Stages in the order in which the recipe made them, which is a topological order.

    `states` holds the recipe's own numbers at their present values (`Flow.state`). A graph that is
    `from_clients` has no data of its own: clients send as many rows as they like, and training
    scores every position of them.
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    copies: dict[str, Copy] = field(default_factory=dict)
    states: dict[str, float] = field(default_factory=dict)
    from_clients: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role that some stage runs on, in order of first use."""
        return tuple(dict.fromkeys(s.role for s in self.stages.values() if s.role))

    def trains(self, role: str) -> bool:
        """Whether an update trains the role."""
        stages = self.stages.values()
        return any(isinstance(stage, UpdateStage) and stage.role == role for stage in stages)

    @property
    def learned(self) -> tuple[str, ...]:
        """Every role that is trained, or whose weights are read where training has them."""
        methods = (StageMethod.VALUES, StageMethod.LEARNED_SCORE)
        stages = self.stages.values()
        learned = (s for s in stages if isinstance(s, UpdateStage) or s.method in methods)
        return tuple(dict.fromkeys(s.role for s in learned if s.role))

    @property
    def judges(self) -> tuple[str, ...]:
        """Every role that judges responses, in order of first use."""
        judges = (s.role for s in self.stages.values() if s.role and s.method is StageMethod.SCORE)
        return tuple(dict.fromkeys(judges))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the dataset that are responses, in order of first use."""
        answers = (s for s in self.stages.values() if isinstance(s, AnswersStage))
        return tuple(dict.fromkeys(s.column for s in answers if s.column))

    @property
    def trains_targets(self) -> bool:
        """Whether the dataset's own targets, its filled answer template, are responses."""
        return any(isinstance(s, AnswersStage) and not s.column for s in self.stages.values())

    @property
    def generates(self) -> bool:
        """Whether any sample is generated."""
        return any(isinstance(stage, GenerateStage) for stage in self.stages.values())

    @property
    def group_size(self) -> int:
        """Samples that are made of a prompt; a stage whose number scalars decide counts as one."""
        makers = [stage for stage in self.stages.values() if isinstance(stage, SourceStage)]
        return sum(stage.num_samples or 1 for stage in makers)

    def add(self, stage: Stage) -> None:
        """Append a stage; raises `ValueError` when its name is taken."""
        if stage.name in self.stages:
            raise ValueError(
                f"two stages are named {stage.name!r}: wanted another name (name=...), "
                f"taken are {sorted(self.stages)}"
            )
        assert all(name in self.stages for name in stage.upstream), stage
        self.stages[stage.name] = stage

    def on_ranks(self) -> "Graph":
        """The part that the ranks need, picklable: without the driver's stages and states."""
        classes = (SourceStage, ComputeStage, UpdateStage)
        driver = [stage.name for stage in self.stages.values() if not isinstance(stage, classes)]
        stages = {name: stage for name, stage in self.stages.items() if name not in driver}
        return Graph(stages, dict(self.copies))

    def ancestors(self, name: str) -> frozenset[str]:
        """Names of all stages that `name` waits for, itself left out."""
        ancestors: set[str] = set()
        todo = list(self.stages[name].upstream)
        while todo:
            current = todo.pop()
            if current not in ancestors:
                ancestors.add(current)
                todo.extend(self.stages[current].upstream)
        return frozenset(ancestors)

    def check(self) -> None:
        """Raise `ValueError` when nothing would come of the graph."""
        if not any(isinstance(s, UpdateStage | CollectStage) for s in self.stages.values()):
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


def with_temperatures(graph: Graph, temperature: float) -> Graph:
    """`graph` with the `temperature` of rollouts in the stages that read what was drawn with it.

    A stage of its own temperature has that one, a greedy one 1. Responses of the dataset were not
    drawn: there it is 1, and a loss is the model's cross-entropy. Raises ValueError for a stage
    that would read samples of several temperatures in one pass.
    """
    drawn_with: dict[str, frozenset[float]] = {}
    stages: dict[str, Stage] = {}
    for name, stage in graph.stages.items():
        # A join lends scalars to the first stream, whose samples stay what they are.
        upstream = stage.upstream[:1] if isinstance(stage, JoinStage) else stage.upstream
        own = frozenset[float]().union(*(drawn_with[other] for other in upstream))
        if isinstance(stage, GenerateStage):
            drawn = stage.sampling.temperature
            own = frozenset({(temperature if drawn is None else drawn) or 1.0})
        elif isinstance(stage, AnswersStage):
            own = frozenset({1.0})
        if len(own) > 1 and stage.role is not None:
            told = " and ".join(f"{value:g}" for value in sorted(own))
            raise ValueError(f"stage {name!r} reads samples of temperatures {told} in one pass")
        drawn_with[name] = own
        stages[name] = replace(stage, temperature=next(iter(own))) if len(own) == 1 else stage
    return Graph(stages, graph.copies, graph.states)


CHOOSERS = (FilterStage, JudgedStage, JoinStage, PairStage, MergeStage)
"""They take groups of one prompt and may leave some out."""


def gate_of(graph: Graph, stage: Stage) -> str:
    """The last maker, filter, join or take up to `stage`, itself included."""
    while not isinstance(stage, (SourceStage, *CHOOSERS, TakeStage)):
        stage = graph.stages[stage.upstream[0]]
    return stage.name
