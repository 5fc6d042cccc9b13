"""Streams: the results of a recipe's calls, and the operations on them.

Nothing runs here. Each operation appends a `Stage` to the graph and returns the stream that the
stage would give; a schedule runs the graph later. Errors of a recipe are raised here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.flow.graph import (
    ByBatchStage,
    ByGroupStage,
    FilterStage,
    Graph,
    JoinStage,
    MapStage,
    MergeStage,
    PairStage,
    SourceStage,
    Stage,
    TakeStage,
)


@dataclass(frozen=True)
class Prompts:
    """The run's prompt stream; a role's `generate` makes samples from it."""

    graph: Graph
    stage: str = "prompts"


@dataclass(frozen=True)
class Stream:
    """Samples as they leave a stage.

    `scalars` (in the driver) and `tensors` (on the sample's rank) are the fields that every sample
    of the stream has. `sources` are the stages that made the samples, `num_samples` how many of
    them a prompt has (None: it differs). The stream's order is the training order: by prompt, then
    k; of a pair first one side, then the other. `samples_per_row` consecutive samples must train in
    one micro-batch.
    """

    graph: Graph
    stage: str
    scalars: frozenset[str]
    tensors: frozenset[str]
    sources: frozenset[str]
    num_samples: int | None
    branch: str = ""
    samples_per_row: int = 1

    @property
    def fields(self) -> frozenset[str]:
        """Names of everything that a sample of this stream has."""
        return self.scalars | self.tensors

    def then(self, stage: Stage) -> "Stream":
        """Append a stage that reads this stream; every operation ends here.

        Raises `ValueError` when a field of its inputs is missing, when an output exists already, or
        when its name is taken.
        """
        for wanted in stage.inputs:
            if wanted not in self.fields:
                raise ValueError(
                    f"stage {stage.name!r} wants the field {wanted!r}, which no stage before it "
                    f"makes; available are {sorted(self.fields)}"
                )
        for output in stage.outputs:
            maker = _maker(self, output)
            if maker:
                raise ValueError(
                    f"stage {stage.name!r} would make the field {output!r}, which stage {maker!r} "
                    "makes already; wanted another name (name=... or outputs=...)"
                )
        self.graph.add(stage)
        scalars = frozenset(stage.scalars)
        return replace(
            self,
            stage=stage.name,
            scalars=self.scalars | scalars,
            tensors=self.tensors | (frozenset(stage.outputs) - scalars),
        )

    def stage_name(self, name: str) -> str:
        """The name of a stage that the author did not name; other branches get a suffix."""
        return f"{name}@{self.branch}" if self.branch else name

    def map(
        self,
        function: Callable[..., Any],
        inputs: Sequence[str],
        outputs: Sequence[str] = (),
        *,
        scalars: Sequence[str] = (),
        name: str | None = None,
    ) -> "Stream":
        """Run `function` per sample on the rank that has its tensors.

        It is called with the fields `inputs` in order (tensors `[response_tokens]`, scalars as
        numbers). Of a conversation tensors have the model's own tokens alone. It returns first the
        tensors `outputs`, then the `scalars` that travel to the driver: one value, or a tuple of
        several. A scalar may be a list, with a number for each turn of a conversation. The function
        must be picklable.
        """
        if not (*outputs, *scalars):
            raise ValueError("map: got no outputs, wanted outputs=(...) or scalars=(...)")
        return self.then(
            MapStage(
                name=name or self.stage_name(function_name(function, "map")),
                upstream=(self.stage,),
                inputs=tuple(inputs),
                outputs=(*scalars, *outputs),
                scalars=tuple(scalars),
                function=function,
                returns=(*outputs, *scalars),
            )
        )

    def by_group(
        self,
        function: Callable[..., Any],
        inputs: Sequence[str] = ("reward",),
        outputs: Sequence[str] = ("advantage",),
        *,
        name: str | None = None,
    ) -> "Stream":
        """Scalars from the scalars of one prompt's samples; a barrier of the group.

        `function` gets one list per input, in the stream's order within the prompt, and returns one
        sequence of that length (several outputs: a tuple of them; no output: None). Items need
        only answer `float()`, or be lists of numbers.
        """
        return self.then(
            ByGroupStage(
                name=self._barrier_name("by_group", function, inputs, name),
                upstream=(self.stage,),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                scalars=tuple(outputs),
                function=function,
            )
        )

    def by_batch(
        self,
        function: Callable[..., Any],
        inputs: Sequence[str] = ("reward",),
        outputs: Sequence[str] = ("advantage",),
        *,
        grouped: bool = False,
        name: str | None = None,
    ) -> "Stream":
        """As `by_group` over the whole batch; `grouped` gives and takes lists of groups."""
        return self.then(
            ByBatchStage(
                name=self._barrier_name("by_batch", function, inputs, name),
                upstream=(self.stage,),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                scalars=tuple(outputs),
                function=function,
                grouped=grouped,
            )
        )

    def filter(
        self,
        function: Callable[..., bool],
        inputs: Sequence[str] = ("reward",),
        *,
        name: str | None = None,
    ) -> "Stream":
        """Keep the groups for which `function` (one list per input) is true; in prompt order."""
        return self.then(
            FilterStage(
                name=self._barrier_name("filter", function, inputs, name),
                upstream=(self.stage,),
                inputs=tuple(inputs),
                function=function,
            )
        )

    def take(
        self,
        num_groups: int | None = None,
        *,
        round_prompts: int | None = None,
        max_rounds: int = 10,
        allow_fewer: bool = False,
        name: str | None = None,
    ) -> "Stream":
        """The first `num_groups` groups in prompt order, whichever finish first.

        Asks upstream for `round_prompts` more prompts until there are enough (both None: the
        schedule's prompts per step), at most `max_rounds` times. Then the step fails, or with
        `allow_fewer` continues with the groups that there are. Groups past the number are dropped.
        A recipe has at most one.
        """
        stage_name = name or self.stage_name("take")
        for key, value in (
            ("num_groups", num_groups),
            ("round_prompts", round_prompts),
            ("max_rounds", max_rounds),
        ):
            if value is not None and value < 1:
                raise ValueError(f"take {stage_name!r}: got {key}={value}, wanted 1 or more")
        others = [s.name for s in self.graph.stages.values() if isinstance(s, TakeStage)]
        if others:
            raise ValueError(f"take {stage_name!r}: got a second take, wanted only {others[0]!r}")
        for stage in self._history():
            if isinstance(stage, ByBatchStage):
                raise ValueError(
                    f"take {stage_name!r} comes after by_batch {stage.name!r}, which would see one "
                    "round and not the batch; wanted by_batch after take"
                )
        return self.then(
            TakeStage(
                name=stage_name,
                upstream=(self.stage,),
                num_groups=num_groups,
                round_prompts=round_prompts,
                max_rounds=max_rounds,
                allow_fewer=allow_fewer,
            )
        )

    def join(self, other: "Stream", prefix: str, *, name: str | None = None) -> "Stream":
        """Give each sample the scalars of `other`'s sample of the same prompt, under `prefix`.

        `other` has one sample per prompt, which all share, or as many as this stream, matched by k.
        Its samples are not trained on here. A sample without a partner is dropped.
        """
        stage_name = name or f"join_{prefix.rstrip('_')}"
        self._check_related(other, stage_name)
        if not prefix:
            raise ValueError(
                f"join {stage_name!r}: got an empty prefix, wanted one, like 'greedy_'"
            )
        if other.num_samples is None or other.num_samples not in (1, self.num_samples):
            raise ValueError(
                f"join {stage_name!r}: got {_number(other)} samples a prompt, "
                f"wanted 1 or {_number(self)}"
            )
        scalars = tuple(prefix + field for field in sorted(other.scalars))
        return self.then(
            JoinStage(
                name=stage_name,
                upstream=(self.stage, other.stage),
                outputs=scalars,
                scalars=scalars,
                prefix=prefix,
                shared=other.num_samples == 1,
            )
        )

    def pair(
        self,
        other: "Stream",
        sides: tuple[str, str] = ("chosen", "rejected"),
        *,
        name: str | None = None,
    ) -> "Stream":
        """Put samples of two streams side by side in training order, matched by prompt and k.

        Partners stay in one micro-batch (`samples_per_row` is 2). The scalar `side` says which one
        a sample is. A sample without its partner is dropped.
        """
        stage_name = name or "pair"
        self._check_related(other, stage_name)
        num, others = self.num_samples, other.num_samples
        if num is None or num != others or self.samples_per_row * other.samples_per_row != 1:
            raise ValueError(
                f"pair {stage_name!r}: got {_number(self)} and {_number(other)} samples a "
                "prompt, wanted as many on both sides, none of them paired already"
            )
        both = replace(
            self,
            scalars=self.scalars & other.scalars,
            tensors=self.tensors & other.tensors,
            sources=self.sources | other.sources,
            num_samples=2 * num,
            branch="",
            samples_per_row=2,
        )
        return both.then(
            PairStage(
                name=stage_name,
                upstream=(self.stage, other.stage),
                outputs=("side",),
                scalars=("side",),
                sides=sides,
            )
        )

    def merge(self, other: "Stream", *, name: str | None = None) -> "Stream":
        """The samples of both streams, by prompt, those of this one first; one group a prompt.

        Of prompts that this stream does not have, the other's samples are dropped. The fields are
        those that both have.
        """
        stage_name = name or "merge"
        self._check_related(other, stage_name)
        if self.samples_per_row * other.samples_per_row != 1:
            raise ValueError(f"merge {stage_name!r}: got a stream of pairs, wanted none")
        both = replace(
            self,
            scalars=self.scalars & other.scalars,
            tensors=self.tensors & other.tensors,
            sources=self.sources | other.sources,
            num_samples=None,
            branch="",
        )
        return both.then(MergeStage(name=stage_name, upstream=(self.stage, other.stage)))

    def _barrier_name(
        self,
        operation: str,
        function: Callable[..., Any],
        inputs: Sequence[str],
        name: str | None,
    ) -> str:
        """The stage's name; raises `ValueError` where an input does not travel to the driver."""
        stage_name = name or self.stage_name(function_name(function, operation))
        on_rank = sorted(self.tensors.intersection(inputs))
        if on_rank:
            raise ValueError(
                f"{operation} {stage_name!r} wants {on_rank}, which are tensors and stay on their "
                f"ranks; available are the scalars {sorted(self.scalars)}; "
                "map(..., scalars=...) makes scalars of tensors"
            )
        return stage_name

    def _check_related(self, other: "Stream", stage_name: str) -> None:
        if other.graph is not self.graph:
            raise ValueError(
                f"{stage_name!r} joins unrelated streams: got {self.stage!r} and {other.stage!r} "
                "of two flows, wanted streams over the same prompts"
            )
        shared = sorted(self.sources & other.sources)
        if shared:
            raise ValueError(
                f"{stage_name!r} joins a stream with itself: both hold the samples of {shared}; "
                "wanted samples of another generate(...) or targets(...)"
            )

    def _history(self) -> list[Stage]:
        names = self.graph.ancestors(self.stage) | {self.stage}
        return [stage for stage in self.graph.stages.values() if stage.name in names]


def _number(stream: Stream) -> str:
    return "differing numbers of" if stream.num_samples is None else str(stream.num_samples)


def _maker(stream: Stream, output: str) -> str | None:
    """The stage that makes `output` on samples of this stream, on whatever branch; or None.

    A sample is one object whichever stream it is in, so two branches cannot make one field.
    """
    graph = stream.graph
    for stage in graph.stages.values():
        if output in stage.outputs:
            lineage = _sample_lineage(graph, stage.name)
            if lineage & stream.sources:
                return stage.name
    return None


def _sample_lineage(graph: Graph, name: str) -> frozenset[str]:
    """The source stages whose samples pass through stage `name`."""
    stage = graph.stages[name]
    if isinstance(stage, SourceStage):
        return frozenset((name,))
    # A join by prefix copies scalars: only samples of its first upstream remain.
    both = isinstance(stage, PairStage | MergeStage)
    upstream = stage.upstream if both else stage.upstream[:1]
    return frozenset().union(*(_sample_lineage(graph, parent) for parent in upstream))


def function_name(function: Callable[..., Any], default: str) -> str:
    """The name of a stage that runs `function`; `default` for a lambda."""
    function = getattr(function, "func", function)  # functools.partial
    name = getattr(function, "__name__", type(function).__name__)
    return default if name == "<lambda>" else name
