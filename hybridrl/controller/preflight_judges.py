"""Checks of a run's judges before it starts a process."""

from collections.abc import Callable, Sequence

from hybridrl.config import Config, ConfigError, RewardCall, RewardKind
from hybridrl.config.endpoint import template_fields
from hybridrl.controller.preflight_models import judges_of
from hybridrl.data import Item
from hybridrl.flow import Graph
from hybridrl.flow.graph import ComputeStage, SourceStage, Stage, StageMethod

_KNOWN = {"prompt", "question", "answer", "response", "responses"}
"""Fields of a rubric that are no columns."""


IsRecorded = Callable[[Stage], bool]
"""Whether every score of a judge's stage is recorded, so that the judge is not asked."""


def try_judges(config: Config, graph: Graph, is_recorded: IsRecorded | None = None) -> None:
    """Start every judge once; fills in which of them wait. Raises ConfigError.

    With `is_recorded`, of a replay, only those that its steps ask: it evaluates nothing.
    """
    from hybridrl.rewards import validate_reward

    roles = judges_of(config, graph)
    if is_recorded is not None:
        scores = [stage for stage in graph.stages.values() if stage.method is StageMethod.SCORE]
        asked = {stage.role for stage in scores if not is_recorded(stage)}
        roles = [role for role in roles if role in asked]
    for role in roles:
        judge = config.judge_of(role)
        waits = validate_reward(judge, config.sources_of(role), role)
        if judge.kind is RewardKind.function:
            judge.waits = waits


def check_groups(graph: Graph) -> None:
    """Raise for a judge of whole groups that would see one response at a time in training."""
    for stage in graph.stages.values():
        if isinstance(stage, ComputeStage) and stage.whole_groups:
            maker: Stage = stage
            while not isinstance(maker, SourceStage):
                maker = graph.stages[maker.upstream[0]]
            if maker.num_samples == 1:
                allowed = f"sample: the recipe has one response a prompt in stage {maker.name!r}"
                raise ConfigError(f"{stage.role}.call", RewardCall.group.value, allowed)


def check_rows(config: Config, graph: Graph, items: Sequence[Item]) -> None:
    """Raise where a judge needs something of the rows that one of them lacks."""
    from hybridrl.rewards.code import check_tests

    for role in judges_of(config, graph):
        sources, judge = config.sources_of(role), config.judge_of(role)
        judged = [item for item in items if item.source in sources]
        if judge.kind is RewardKind.code:
            check_tests(role, ((sources[i.source], i.source, i.item) for i in judged))
        if judge.kind is RewardKind.chat and judge.endpoint.template is not None:
            columns = template_fields(judge.endpoint.template) - _KNOWN
            for item in judged:
                for missing in sorted(columns - set(item.item)):
                    names = ", ".join(sorted({*item.item, "prompt", "response"}))
                    allowed = f"fields of the rows ({names}; {item.source} has no {missing})"
                    raise ConfigError(f"{role}.endpoint.template", f"{{{missing}}}", allowed)
