"""Judges in the graph: a stage for each part of a sum, and one after which failures have left."""

from dataclasses import dataclass, replace

from hybridrl.config import Config, ConfigError, OnJudgeFailure, RewardCall, RewardKind
from hybridrl.flow.graph import ComputeStage, Graph, MapStage, Stage, StageMethod
from hybridrl.flow.judgements import OK, leaving_failed


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
