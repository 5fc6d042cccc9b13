"""Judges in a recipe's graph: a stage for each part of a sum, and the leave of failed samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.config import Config, ConfigError, OnJudgeFailure, RewardCall, RewardKind
from hybridrl.flow.graph import (
    ComputeStage,
    Graph,
    JudgedStage,
    MapStage,
    PairStage,
    Stage,
    StageMethod,
)
from hybridrl.flow.sample import Sample

OK = "ok"
"""The status of a sample that its judge has scored."""


class JudgeFailed(RuntimeError):
    """A judge has failed where none may, or on too many responses."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of parts' scores, and `ok` or the status of the first part that is not, by its name.

    Called with every part's score and status in turn. A part that failed has scored 0. One of
    weight 0 is only recorded, so the status passes it over, unless the recipe `reads` its score.
    """

    weights: tuple[tuple[str, float], ...]
    reads: tuple[str, ...] = ()

    def __call__(self, *fields: float | str) -> tuple[float, str]:
        """Score and status of one sample."""
        scores, statuses = fields[0::2], fields[1::2]
        parts = list(zip(self.weights, scores, statuses, strict=True))
        total = sum(weight * float(score) for (_, weight), score, _ in parts)
        for (name, weight), _, status in parts:
            if status != OK and (weight or name in self.reads):
                kind, _, reason = str(status).partition(": ")
                return total, f"{kind}: {name}: {reason}" if reason else f"{kind}: {name}"
        return total, OK


def with_parts(graph: Graph, config: Config) -> Graph:
    """`graph` with the parts of `reward.kind=sum` and `cost.kind=sum` as separate stages.

    Stages of a judge with `call=group` wait for whole groups. Samples whose judge has failed leave
    (`leaving_failed`), but with `on_failure=zero`.

    So each part runs in its own way, a verifier on the sample's rank or a model on an instance. The
    sum keeps the name of the stage, so that the rest of the graph is as it was. Raises ConfigError
    where the recipe reads the judged text, which a sum has not, or a part that the config has not.
    """
    rules = {role: judge.on_failure for role, judge in config.whole_judges.items()}
    graph = leaving_failed(
        graph,
        {r: x is OnJudgeFailure.stop for r, x in rules.items() if x is not OnJudgeFailure.zero},
    )
    stages: dict[str, Stage] = {}
    for stage in graph.stages.values():
        for replacement in _stages(stage, config):
            stages[replacement.name] = replacement
    return Graph(stages, graph.copies, graph.states)


def _stages(stage: Stage, config: Config) -> list[Stage]:
    role = stage.role
    if stage.method is not StageMethod.SCORE or role is None:
        return [stage]
    assert isinstance(stage, ComputeStage)
    judges, judge_stages = config.judges_of(role), list[Stage]()
    _check_parts(stage, role, judges)
    if judges == (role,):
        return [replace(stage, whole_groups=_whole_groups(role, config))]
    # The total's own fields: those of the parts that the recipe reads are the parts' stages'.
    fields = stage.scalars[: len(stage.scalars) - len(stage.parts)]
    if len(fields) > 2:
        allowed = f"one verifier: the recipe reads the text that is judged ({fields[2]})"
        raise ConfigError(f"{role}.kind", RewardKind.sum.value, allowed)
    upstream, inputs = stage.upstream, tuple[str, ...]()
    for judge in judges:
        name = judge.rpartition(".")[2]
        field = f"{fields[0]}_{name}"
        outputs = (field, f"{field}_status")
        single = replace(stage, role=judge, upstream=upstream, outputs=outputs, scalars=outputs)
        whole = _whole_groups(judge, config)
        judge_stages.append(
            replace(single, name=f"{stage.name}.{name}", parts=(), whole_groups=whole)
        )
        upstream, inputs = (judge_stages[-1].name,), (*inputs, *outputs)
    weights = tuple((judge.rpartition(".")[2], config.weight_of(judge)) for judge in judges)
    total = MapStage(
        name=stage.name,
        upstream=upstream,
        inputs=inputs,
        outputs=fields,
        scalars=fields,
        function=WeightedSum(weights, stage.parts),
        returns=fields,
    )
    return [*judge_stages, total]


def _whole_groups(role: str, config: Config) -> bool:
    return config.judge_of(role).call is RewardCall.group


def _check_parts(stage: ComputeStage, role: str, judges: tuple[str, ...]) -> None:
    """Raise for a part whose score the recipe reads, and that the config does not have."""
    names = [] if judges == (role,) else [judge.rpartition(".")[2] for judge in judges]
    for name in stage.parts:
        if name not in names:
            allowed = f"{name} among them: the recipe reads its score"
            raise ConfigError(f"{role}.parts", names, allowed)


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
    scalars = sample.scalars
    for name in names:
        if name in scalars and (status := scalars[name]) != OK:
            return f"{name.removesuffix('_status')}: {status}"
    return None


def score_of(sample: Sample, name: str) -> float | None:
    """A judge's score of a sample; None where it is not judged, or in vain."""
    scalars, status = sample.scalars, f"{name}_status"
    if name not in scalars or (status in scalars and scalars[status] != OK):
        return None
    return float(scalars[name])  # type: ignore[arg-type]  # `number` is a call for each sample


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
