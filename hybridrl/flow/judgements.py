"""Samples whose judge has failed: where they leave a recipe's graph, and how many may."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.flow.graph import (
    ComputeStage,
    Graph,
    JudgedStage,
    PairStage,
    Stage,
    StageMethod,
)
from hybridrl.flow.sample import Sample

OK = "ok"
"""The status of a sample that its judge has scored."""


class JudgeFailed(RuntimeError):
    """A judge has failed where none may, or on too many responses."""


def leaving_failed(graph: Graph, stops: Mapping[str, bool]) -> Graph:
    """`graph` with stages that leave out samples whose judge has failed; one that `stops` raises.

    `stops` has the roles of the judges that are meant. A sample leaves as late as can be: after
    the last per-sample stage before it would be compared with others, trained on, or collected. So
    no statistic sees it, and no forward pass waits for a judge because of it.
    """
    unread: dict[str, dict[str, str]] = {}  # by stage: roles by status field, of what leaves it
    leaving: dict[str, JudgedStage] = {}  # by the stage that they follow
    paired: set[str] = set()  # stages whose samples are pairs
    for stage in graph.stages.values():
        judges = {
            s: role for name in stage.upstream[:1] for s, role in unread.get(name, {}).items()
        }
        if isinstance(stage, PairStage) or paired.intersection(stage.upstream[:1]):
            paired.add(stage.name)
        if isinstance(stage, ComputeStage):
            if stage.method is StageMethod.SCORE and stage.role and stage.role in stops:
                judges[stage.scalars[1]] = stage.role
            unread[stage.name] = judges
            continue
        for name in stage.upstream:
            if roles := unread.get(name):
                leaving[name] = JudgedStage(
                    name=f"{name}_judged",
                    upstream=(name,),
                    inputs=tuple(roles),
                    roles=tuple(roles.values()),
                    stops=tuple(role for role in roles.values() if stops[role]),
                    pairs=name in paired,
                )
    stages: dict[str, Stage] = {}
    for name, stage in graph.stages.items():
        if not isinstance(stage, ComputeStage):
            came = (leaving[x].name if x in leaving else x for x in stage.upstream)
            stage = replace(stage, upstream=tuple(came))
        stages[name] = stage
        if name in leaving:
            stages[leaving[name].name] = leaving[name]
    return Graph(stages, graph.copies, graph.states)


def failed_status(sample: Sample, names: Sequence[str]) -> str | None:
    """The first of these statuses that is not ok, with its score's name; None where all are ok."""
    for name in names:
        if (status := str(sample.scalars.get(name, OK))) != OK:
            return f"{name.removesuffix('_status')}: {status}"
    return None


def score_of(sample: Sample, name: str) -> float | None:
    """A judge's score of a sample; None where it is not judged, or in vain."""
    if name not in sample.scalars or failed_status(sample, (f"{name}_status",)):
        return None
    return sample.number(name)


def check_failed_share(
    graph: Graph, samples: Sequence[Sample], most: Mapping[str, float], which: str
) -> None:
    """Raise JudgeFailed where a judge whose failures leave has failed on more than its share.

    `most` has the share by role, `which` says in the error what the samples are of.
    """
    judges = {
        status: role
        for stage in graph.stages.values()
        if isinstance(stage, JudgedStage)
        for status, role in zip(stage.inputs, stage.roles, strict=True)
    }
    for status, role in judges.items():
        judged = [sample for sample in samples if status in sample.scalars]
        failed = [reason for sample in judged if (reason := failed_status(sample, (status,)))]
        if len(failed) > most[role] * len(judged):
            raise JudgeFailed(
                f"{role} has judged {len(failed)} of {len(judged)} responses of {which} in vain"
                f" ({role}.max_failed_share={most[role]:g}); the first: {failed[0]}"
            )
