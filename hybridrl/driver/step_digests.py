"""The digests of a step, from the driver's samples and the ranks' tensors."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridrl.driver.async_calls import Then
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow import Graph
from hybridrl.flow.graph import SourceStage, UpdateStage
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule import StepResult
from hybridrl.telemetry.digests import ShardDigest, StepRecord, joined
from hybridrl.telemetry.records import write_json
from hybridrl.workers.rank_calls import Reference

SAMPLES = "samples.json"

SampleDigests = Mapping[SampleId, Mapping[str, ShardDigest]]
"""Digests of the samples on a rank, by field."""
WeightDigests = Mapping[str, Mapping[str, ShardDigest]]
"""Digests of a rank's shards, by role and parameter."""


def read_step_digests(
    graph: Graph,
    result: StepResult,
    group: WorkerGroup,
    read: Callable[[Mapping[Reference[Any], int], Then], None],
    then: Callable[[dict[str, Any]], None],
) -> None:
    """Begin to `read` the digests of a step whose samples the ranks still hold.

    `then` gets the step's line of digests.jsonl, with the weights as they are now.
    """
    finished = [sample for sample in result.dispatched if sample.tensors]
    of_samples = group.call_digest_samples(by_rank(finished))
    of_weights = group.call_digest_weights()

    def complete(answers: list[Any]) -> None:
        # Ranks that train answer all, others if their instance lives.
        num_samples = len(answers) - len(of_weights)
        samples, weights = answers[:num_samples], answers[num_samples:]
        then(_line(graph, result, finished, samples, weights))

    read({**of_samples, **of_weights}, complete)


def _line(
    graph: Graph,
    result: StepResult,
    finished: Sequence[Sample],
    samples_of_ranks: Sequence[SampleDigests],
    weights_of_ranks: Sequence[WeightDigests],
) -> dict[str, Any]:
    """The line of a step from the ranks' answers."""
    digests = {id: fields for answer in samples_of_ranks for id, fields in answer.items()}
    weights: dict[str, dict[str, list[ShardDigest]]] = {}
    for answer in weights_of_ranks:
        for role, shards in answer.items():
            for name, shard in shards.items():
                weights.setdefault(role, {}).setdefault(name, []).append(shard)
    fields, updates = stages_of_fields(graph), updates_of_roles(graph)
    samples = {
        # A list would be a digest.
        str(sample.id): {k: str(x) if isinstance(x, list) else x for k, x in sample.scalars.items()}
        | {name: joined([shard]) for name, shard in digests[sample.id].items()}
        for sample in finished
        if sample.id in digests
    }
    numbers: dict[str, dict[str, float]] = {}
    for key, value in result.metrics.items():
        role, _, name = key.rpartition("/")
        if role in updates and name in ("loss", "grad_norm"):
            numbers.setdefault(role, {})[name] = value
    record = StepRecord(
        fields=fields,
        updates=updates,
        samples=samples,
        dropped={str(id): drop.text for id, drop in result.dropped.items()},
        numbers=numbers,
        weights={
            role: {name: joined(shards) for name, shards in of_role.items()}
            for role, of_role in weights.items()
            if role in updates
        },
    )
    return asdict(record)


def stages_of_fields(graph: Graph) -> dict[str, str]:
    """The stage that makes each field of a sample, in the recipe's order; `tokens` first."""
    fields: dict[str, str] = {}
    for stage in graph.stages.values():
        first = ("tokens",) if isinstance(stage, SourceStage) else ()
        for name in (*first, *(name for name in sorted(stage.outputs) if name not in first)):
            fields.setdefault(name, stage.name)
    return fields


def updates_of_roles(graph: Graph) -> dict[str, str]:
    """The stage that trains each role."""
    stages = graph.stages.values()
    return {s.role: s.name for s in stages if isinstance(s, UpdateStage) and s.role}


def by_rank(samples: Iterable[Sample]) -> dict[int, list[SampleId]]:
    """Ids of samples by the rank that holds them."""
    ranks: dict[int, list[SampleId]] = defaultdict(list)
    for sample in samples:
        ranks[sample.rank].append(sample.id)
    return ranks


def write_batch(folder: Path, samples: Sequence[Sample], group: WorkerGroup) -> None:
    """Write samples that the ranks hold: their metadata, and all of their tensors."""
    finished = [sample for sample in samples if sample.tensors]
    folder.mkdir()
    group.save_tensors(str(folder), by_rank(finished))
    write_json(folder / SAMPLES, {"samples": [sample.to_json() for sample in finished]})
