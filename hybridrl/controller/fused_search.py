"""The search for the plan of a fused update, while its samples are generated and scored.

Ranks wait while the plan of the batch at hand is searched, so that search has little time. What it
begins with is searched before, by the driver, which waits for ranks meanwhile. The lengths that are
known by then are real, the others those of the step before. PipeWeaver and SEMU search the schedule
of each batch, too. Not the plan is handed on but its policies (`pipelines/policies.py`): they do
not depend on the number of micro-batches, which is known at the end only.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, Config, TrainLayoutConfig
from hybridrl.controller.load_balance import RankWork, joint_work
from hybridrl.controller.roles_together import roles_together
from hybridrl.flow import Graph
from hybridrl.flow.executor import Finished
from hybridrl.flow.sample import SampleId
from hybridrl.pipelines.balance import balance, equal_number, micro_batches
from hybridrl.pipelines.policies import Policy
from hybridrl.pipelines.problem import PassKind, PipelinedModel, PipelineProblem
from hybridrl.pipelines.search import search
from hybridrl.pipelines.standard import least_micro_batches
from hybridrl.planner.mapping import SampleLength

if TYPE_CHECKING:
    from hybridrl.models.flops import ForwardFlops

logger = logging.getLogger(__name__)

_SLICE_S, _DUTY = 0.1, 0.2
"""Seconds of a search, and the share of one core that all of them take."""


@dataclass(frozen=True, kw_only=True)
class FusedRole:
    """What a role's pipelines are made of."""

    layout: TrainLayoutConfig
    flops: "ForwardFlops"
    work: RankWork
    num_layers: int
    hidden_size: int
    reverse: bool
    """Whether it runs from the last rank to the first."""


def fused_problem(
    roles: Sequence[FusedRole], lengths: Sequence[SampleLength], max_tokens: int
) -> PipelineProblem:
    """The pipelines of an optimizer step of all roles on samples of these lengths.

    Samples are dealt to ranks by the work of all roles. The ranks of a replica pool theirs and cut
    them into rows of at most `max_tokens`, as `engines.train.fused_update` does.
    """
    from hybridrl.engines.train.fused_update import pipeline_name
    from hybridrl.engines.train.row_costs import HALVES, kept_under_1f1b, row_costs
    from hybridrl.layout.layout import chunk_bounds, rank_of_chunk

    first = roles[0].layout
    num_ranks = first.pp * first.replicas * first.fsdp * first.tp
    cost = joint_work([role.work for role in roles]).cost
    dealt = balance([cost(sample.tokens) for sample in lengths], num_ranks)
    models: list[PipelinedModel] = []
    owners: list[int] = []
    for number, role in enumerate(roles):
        layout, width = role.layout, role.layout.replicas * role.layout.fsdp
        chunks = range(layout.num_chunks)
        stages = [rank_of_chunk(chunk, layout.pp, layout.zigzag) for chunk in chunks]
        if role.reverse:
            stages = [layout.pp - 1 - stage for stage in stages]
        bounds = chunk_bounds(role.num_layers, layout.num_chunks, layout.chunk_layers)
        layers = [stop - start for start, stop in bounds]
        halves = layout.splits_backward
        for place in range(width):
            ranks = (r for r in range(num_ranks) if r // layout.tp % width == place)
            own = [lengths[i] for rank in ranks for i in dealt[rank]]
            tokens = [sample.tokens for sample in own]
            rows = micro_batches(tokens, max_tokens, cost=role.work.cost)
            least = least_micro_batches(layout.schedule.value, layout.pp, len(rows))
            if layout.pp > 1 and least > len(rows):  # as the engine does
                rows = equal_number(tokens, least, max_tokens, cost=role.work.cost)
                rows = [row for row in rows if row]
            costs = [
                row_costs(
                    role.flops,
                    [own[i].tokens for i in row],
                    sum(own[i].response for i in row),
                    layers,
                    role.hidden_size,
                    halves,
                )
                for row in rows
            ]
            if not rows:
                continue
            models.append(
                PipelinedModel(
                    name=pipeline_name(number),
                    ranks=tuple(stage * width + place for stage in stages),
                    costs=costs,
                    backward=HALVES if halves else (PassKind.backward,),
                )
            )
            owners.append(number)
    limit = kept_under_1f1b(models, owners)
    return PipelineProblem(models=models, num_ranks=num_ranks // first.tp, limit_bytes=limit)


def fused_roles(
    config: Config, graph: Graph, works: Mapping[str, RankWork], model_path: str
) -> list[tuple[str, list[FusedRole]]]:
    """Of each run of updates that are one call: its first role's name, and all of its roles."""
    from hybridrl.models.flops import ForwardFlops
    from hybridrl.models.load import load_config
    from hybridrl.workers.value_model import runs_reversed

    calls = []
    for pool in config.cluster.pool_ranks if config.trainer.fuses else ():
        for names in roles_together(config, graph, pool):
            roles = []
            for name in names:
                is_actor = name == "actor"
                path = None if is_actor else config.value_model_of(name).path
                shape = load_config(path or model_path)
                flops = ForwardFlops.of(shape)
                if not is_actor:
                    flops = replace(flops, per_scored=2 * shape.hidden_size)
                own = config.trainer if is_actor else config.value_model_of(name)
                role = FusedRole(
                    layout=own.layout,
                    flops=flops,
                    work=works[name],
                    num_layers=shape.num_hidden_layers,
                    hidden_size=shape.hidden_size,
                    reverse=name in VALUE_MODELS and runs_reversed(name, graph),
                )
                roles.append(role)
            calls.append((names[0], roles))
    return calls


class FusedSearch:
    """Searches policies for the fused updates of a step, in a thread, until they begin.

    `begin` at the start of generation, `saw` what finishes, `policies` for the update, which ends
    the search. It takes a fifth of a core, so that the driver answers its ranks; a search has
    a tenth of a second. Nothing waits for the thread, and nothing that it finds changes a gradient.
    """

    def __init__(
        self, calls: Sequence[tuple[str, Sequence[FusedRole]]], max_tokens: int, mini_batches: int
    ) -> None:
        self._calls, self._max_tokens, self._every = calls, max_tokens, mini_batches
        self._policies: dict[str, tuple[Policy, ...]] = {}
        self._known: dict[SampleId, SampleLength] = {}
        self._last: list[SampleLength] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.num_searches = 0

    @classmethod
    def of(
        cls, config: Config, graph: Graph, works: Mapping[str, RankWork], model_path: str
    ) -> "FusedSearch":
        """That of a run; it searches nothing where no updates are fused."""
        calls, trainer = fused_roles(config, graph, works, model_path), config.trainer
        return cls(calls, trainer.max_tokens_per_micro_batch, trainer.mini_batches)

    def begin(self) -> None:
        """Begin with a step's samples: none of them has finished."""
        if not self._calls:
            return
        self._ended.set()
        with self._lock:
            self._last = list(self._known.values()) or self._last
            self._known = {}
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=[self._ended], daemon=True).start()

    def saw(self, finished: Sequence[Finished]) -> None:
        """Samples have finished: from now on with their own lengths."""
        if self._calls:
            with self._lock:
                for one in finished:
                    length = SampleLength(one.prompt_tokens, one.response_tokens)
                    self._known[one.id] = length

    def policies(self, role: str) -> tuple[Policy, ...]:
        """The best until now for the update whose first role this is; ends the search."""
        self._ended.set()
        return self._policies.get(role, ())

    def lengths(self) -> list[SampleLength]:
        """Of a mini-batch: samples that have finished, and the longest of the last step's others.

        What is still generated is longer than what has finished.
        """
        with self._lock:
            known = list(self._known.values())
        missing = max(0, len(self._last) - len(known))
        longest = sorted(self._last, key=lambda sample: -sample.tokens)[:missing]
        return [*known, *longest][:: self._every]

    def _run(self, ended: threading.Event) -> None:
        while not ended.is_set():
            began = time.perf_counter()
            lengths = self.lengths()
            for role, roles in self._calls:
                if lengths:
                    problem = fused_problem(roles, lengths, self._max_tokens)
                    result = search(
                        problem, budget_s=_SLICE_S, policies=self._policies.get(role, ())
                    )
                    self._policies[role] = result.policies
                    self.num_searches += 1
            ended.wait(max(0.05, (time.perf_counter() - began) * (1 / _DUTY - 1)))


NO_SEARCH = FusedSearch([], 1, 1)
"""Of a run without fused updates."""
