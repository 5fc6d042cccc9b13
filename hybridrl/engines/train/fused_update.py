"""Updates of several models on the same ranks as one pipeline plan: intra-stage fusion.

RLHFuse (arXiv 2409.13221, section 5): what one model's pipeline leaves idle, another one fills. The
gradients are those of separate updates. Each model keeps its loss, clipping and optimizer. Forward
passes of several models share a plan, too, as Optimus schedules those of several modules in one
pipeline (arXiv 2408.03505).

    actor on 4 stages, a reversed critic on 2 stages and 2 replicas, 4 ranks
    rank 0    F0.0 of the actor, F1.0 of the first critic, ...
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.config import PipelineSchedule
from hybridrl.config.loss import Loss
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.gathering import gathered
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch
from hybridrl.engines.train.pipeline import StageModel
from hybridrl.engines.train.pipeline_executor import (
    ChunkForward,
    LocalPipeline,
    PipelineExecutor,
    PipelineGroups,
)
from hybridrl.engines.train.row_costs import HALVES, kept_under_1f1b, row_costs
from hybridrl.engines.train.rows import ScoredRows
from hybridrl.engines.train.update_sums import PreparedUpdate
from hybridrl.layout.layout import chunk_bounds
from hybridrl.pipelines.policies import Policy
from hybridrl.pipelines.problem import (
    PassKind,
    PipelineAction,
    PipelinedModel,
    PipelinePlan,
    PipelineProblem,
)
from hybridrl.pipelines.search import search

logger = logging.getLogger(__name__)

SEARCH_SHARE, LEAST_SEARCH_S = 0.02, 0.02
"""A share of an update's time, and the least seconds: a search may take the larger of the two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInputs:
    """The arguments of `TrainEngine.update` for one model."""

    sequences: Sequence[TrainSequence]
    loss: Loss[torch.Tensor]
    max_response_tokens: int = 0
    compare: Mapping[str, str] = field(default_factory=dict)
    continues: bool = False

    def train(self, engine: TrainEngine) -> dict[str, float]:
        """One optimizer step of the engine alone."""
        return engine.update(self.sequences, self.loss, **self.others)

    @property
    def others(self) -> dict[str, Any]:
        """The arguments that have a name."""
        return {
            "max_response_tokens": self.max_response_tokens,
            "compare": self.compare,
            "continues": self.continues,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreInputs:
    """What one model scores: the arguments of `TrainEngine.prepare_scores`."""

    sequences: Sequence[TrainSequence]
    alone: bool = False
    records_experts: bool = False

    def score(self, engine: TrainEngine) -> list[torch.Tensor]:
        """The scores by the engine alone."""
        if engine.gives_values:
            return engine.values(self.sequences, self.alone)
        return engine.log_probs(self.sequences, self.records_experts)


@dataclass(frozen=True, slots=True)
class _PipelineRows:
    """A pipeline of one engine: the places of its chunks, and its rows."""

    engine: int
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    """The lengths of each row's sequences, and of what fills it up."""
    before: tuple[tuple[int, ...], ...]
    """The tokens of shared prompts that they attend to."""
    scored: tuple[int, ...]


Planner = Callable[[PipelineProblem], PipelinePlan]
_Prepared = PreparedUpdate | ScoredRows


def pipeline_name(engine: int) -> str:
    """The name of an engine's pipelines in problems, which policies are by."""
    return f"engine {engine}"


class FusedUpdate:
    """Engines on the same ranks that train, or score, together. All methods are collective.

    Example: `FusedUpdate([actor, critic]).update([(actor, own), (critic, others)])` gives the
    metrics of both. Costs of the plan are operations (`row_costs`). `plan` makes it, on the first
    rank alone. No rank keeps more activations than all models under 1F1B, each at its most.
    """

    def __init__(self, engines: Sequence[TrainEngine], plan: Planner | None = None) -> None:
        """Raises ValueError for engines that cannot share a plan."""
        for engine in engines:
            _check(engine, engines[0])
        self.engines, self.width = engines, engines[0].dims.axes.tp
        self.device = engines[0].device
        self._plan = plan or self._search
        self._groups = PipelineGroups(self.device)
        self._last_s = 0.0
        self._policies: tuple[Policy, ...] = ()

    def update(
        self, updates: Sequence[tuple[TrainEngine, UpdateInputs]], even: bool = False
    ) -> list[dict[str, float]]:
        """One optimizer step of some of the engines, on this rank's sequences; metrics of each.

        If `even`, the rows are those of separate updates, equally many on all ranks.
        """
        began = time.perf_counter()
        engines = [engine for engine, _ in updates]
        numbers = [self.engines.index(engine) for engine in engines]
        prepared = {
            number: engine.prepare_update(own.sequences, own.loss, **own.others, even=even)
            for number, (engine, own) in zip(numbers, updates, strict=True)
        }
        rows = self._all_rows(prepared)
        plan = self._planned(rows)
        with ExitStack() as stack:
            for engine, update in zip(engines, prepared.values(), strict=True):
                stack.enter_context(engine.training(update))
            roots = [root for engine in engines for root in engine.roots]
            stack.enter_context(gathered(roots, trains=True))
            self._run(plan, rows, prepared, trains=True)
        pairs = zip(engines, prepared.values(), strict=True)
        metrics = [engine.finish_update(update) for engine, update in pairs]
        self._last_s = time.perf_counter() - began
        return metrics

    @torch.no_grad()
    def score(self, inputs: Sequence[tuple[TrainEngine, ScoreInputs]]) -> list[list[torch.Tensor]]:
        """Scores of this rank's sequences by each engine, bit for bit those of it alone.

        Rows are those of separate passes. No gradient is kept, so no rank's memory bounds the plan.
        """
        began = time.perf_counter()
        engines = [engine for engine, _ in inputs]
        prepared = {
            self.engines.index(engine): engine.prepare_scores(
                own.sequences, own.alone, own.records_experts
            )
            for engine, own in inputs
        }
        rows = self._all_rows(prepared)
        plan = self._planned(rows, trains=False)
        with gathered([root for engine in engines for root in engine.roots], trains=False):
            self._run(plan, rows, prepared, trains=False)
        pairs = zip(engines, prepared.values(), strict=True)
        scores = [engine.finish_scores(own) for engine, own in pairs]
        self._last_s = time.perf_counter() - began
        return scores

    def _run(
        self,
        plan: PipelinePlan,
        rows: Sequence[_PipelineRows],
        prepared: Mapping[int, _Prepared],
        trains: bool,
    ) -> None:
        """This rank's part of a plan for all `rows`, of which `prepared` has its own."""
        with ExitStack() as stack:
            pipelines = [
                stack.enter_context(self._local(pipeline, prepared[pipeline.engine], trains))
                for pipeline in rows
            ]
            PipelineExecutor(plan, pipelines, self._groups, self.device, self._ranks).run()

    @property
    def _ranks(self) -> list[int]:
        """The global ranks at the places of a plan, each of which has `width` ranks, those of tp.

        A place's rank in this rank's pipelines has this rank's place in tp.
        """
        return list(range(dist.get_rank() % self.width, dist.get_world_size(), self.width))

    def _chunk_places(self, engine: TrainEngine) -> tuple[int, ...]:
        """The places of the chunks of this rank's pipeline."""
        ranks = dist.get_process_group_ranks(engine.dims.mesh.get_group("pp"))
        return tuple(ranks[rank] // self.width for rank in engine.dims.chunk_ranks)

    def _all_rows(self, prepared: Mapping[int, _Prepared]) -> list[_PipelineRows]:
        """The pipelines of all ranks, in the same order on all of them."""
        own = [
            _PipelineRows(
                number,
                self._chunk_places(self.engines[number]),
                tuple(batch.ids.shape[1] for batch in own_rows.batches),
                tuple(batch.packing.lengths for batch in own_rows.batches),
                tuple(batch.packing.before for batch in own_rows.batches),
                tuple(len(batch.targets) for batch in own_rows.batches),
            )
            for number, own_rows in prepared.items()
        ]
        gathered_rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered_rows, own)
        by_ranks = {(x.engine, x.ranks): x for of_rank in gathered_rows for x in of_rank}
        return [by_ranks[key] for key in sorted(by_ranks)]

    def _planned(self, rows: Sequence[_PipelineRows], trains: bool = True) -> PipelinePlan:
        """The plan of the first rank: a search that is bounded by time differs between ranks."""
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            places = dist.get_world_size() // self.width
            models = [self._model(pipeline, trains) for pipeline in rows]
            limit = math.inf
            if trains:
                limit = kept_under_1f1b(models, [pipeline.engine for pipeline in rows])
            plan = self._plan(PipelineProblem(models=models, num_ranks=places, limit_bytes=limit))
            message = [[[tuple(action) for action in actions] for actions in plan]]
        dist.broadcast_object_list(message)
        return [
            [PipelineAction(model, PassKind(kind), *rest) for model, kind, *rest in actions]
            for actions in message[0]
        ]

    def _search(self, problem: PipelineProblem) -> PipelinePlan:
        """What a small share of the last update's time finds; ranks wait meanwhile."""
        budget_s = max(LEAST_SEARCH_S, SEARCH_SHARE * self._last_s)
        result = search(problem, budget_s=budget_s, policies=self._policies)
        self._policies = result.policies
        logger.debug(
            "a plan of %d models: %.3g, bound %.3g",
            len(problem.models),
            result.times.seconds,
            result.bound_s,
        )
        return result.plan

    def _model(self, pipeline: _PipelineRows, trains: bool) -> PipelinedModel:
        engine = self.engines[pipeline.engine]
        config, num_chunks = engine.model.config, len(pipeline.ranks)
        halves = engine.dims.config.schedule is PipelineSchedule.zero_bubble and num_chunks > 1
        sizes = engine.dims.config.chunk_layers
        bounds = chunk_bounds(config.num_hidden_layers, num_chunks, sizes)
        layers = [stop - start for start, stop in bounds]
        costs = [
            row_costs(engine.flops, lengths, scored, layers, config.hidden_size, halves, before)
            for lengths, before, scored in zip(
                pipeline.lengths, pipeline.before, pipeline.scored, strict=True
            )
        ]
        backward = HALVES if halves else (PassKind.backward,)
        return PipelinedModel(
            name=pipeline_name(pipeline.engine),
            ranks=pipeline.ranks,
            costs=costs,
            backward=backward if trains else (),
        )

    @contextmanager
    def _local(
        self, pipeline: _PipelineRows, rows: _Prepared, trains: bool
    ) -> Iterator[LocalPipeline]:
        """A pipeline as this rank runs it; of other ranks' pipelines without chunks."""
        engine = self.engines[pipeline.engine]
        parts = engine.dims.token_parts
        features = engine.model.config.hidden_size
        chunks: dict[int, ChunkForward] = {}
        modules: dict[int, nn.Module] = {}
        with ExitStack() as stack:
            if pipeline.ranks == self._chunk_places(engine):
                modules = dict(zip(engine.dims.chunk_numbers, engine.roots, strict=True))
                chunks = {n: _forward(root, rows, trains) for n, root in modules.items()}
                if engine.pipeline is not None:
                    stack.enter_context(
                        engine.pipeline.prepared(rows.batches, rows.finish, with_entropy=trains)
                    )
            yield LocalPipeline(
                ranks=pipeline.ranks,
                hidden_shapes=[(1, tokens // parts, features) for tokens in pipeline.tokens],
                dtype=engine.compute_dtype,
                ids=[batch.ids for batch in rows.batches],
                chunks=chunks,
                modules=modules,
                trains=trains,
            )


def _forward(root: nn.Module, rows: _Prepared, with_entropy: bool) -> ChunkForward:
    """What a chunk computes of a micro-batch; a model that is not cut gives the loss."""
    if isinstance(root, StageModel):
        return root

    def whole(x: torch.Tensor, number: int) -> torch.Tensor:
        batch: PackedBatch = rows.batches[number]
        return torch.stack([rows.finish(number, *root(x, batch, with_entropy))])

    return whole


def _check(engine: TrainEngine, first: TrainEngine) -> None:
    """Collectives within the lists would deadlock, but for those of tp: its ranks run one list.

    `preflight.fused_updates` has said so to the user.
    """
    axes = engine.dims.axes
    assert axes.tp == first.dims.axes.tp, "models train together with one tp"
    assert engine.dims.config.cp == axes.ep == 1, "a plan has no messages of cp and ep"
    assert engine.keep_unsharded, "FSDP would gather layers one by one"
    assert not engine.trainer.chunk_tokens, "chunks of a sequence are trained alone"
