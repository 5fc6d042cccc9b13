"""Checks of a run's judges before it starts a process."""

from collections.abc import Callable, Mapping, Sequence

from hybridrl.config import (
    Config,
    ConfigError,
    JudgeConfig,
    RewardCall,
    RewardKind,
    SourceConfig,
)
from hybridrl.config.row_fields import field_of, names_in, text_of
from hybridrl.controller.preflight_models import judges_of
from hybridrl.data import Item
from hybridrl.data.records import answer_texts
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
            told = ({**i.item, "answer": i.answer if i.expected is None else i.expected}
                    for i in judged)  # fmt: skip
            check_tests(
                role,
                (
                    (sources[item.source], item.source, item.place, row)
                    for item, row in zip(judged, told, strict=True)
                ),
            )
        if _reads_answers(judge):
            _check_answers(role, judge, sources, judged)
        if judge.kind is RewardKind.chat and judge.endpoint.template is not None:
            _check_rubric(role, judge.endpoint.template, judged)


def _reads_answers(judge: JudgeConfig) -> bool:
    """Whether the judge compares with the text of the row's answer."""
    pattern = judge.kind is RewardKind.regex and "{answer}" in (judge.pattern or "")
    return pattern or judge.kind in (RewardKind.exact, RewardKind.math)


def _check_answers(
    role: str, judge: JudgeConfig, sources: Mapping[str, SourceConfig], items: Sequence[Item]
) -> None:
    """Raise for a row without an answer that is text: no response to it could be right."""
    for item in items:
        if item.answers:
            continue
        problem = "there is none"
        try:
            answer_texts(item.expected)
        except (TypeError, ValueError) as error:
            problem = str(error)
        name = item.source
        place = f"{name}.source" if name.startswith("eval.sets.") else f"data.sources.{name}"
        allowed = (
            f"a column with a text, a number or a list of right answers in every row, for "
            f"{role}.kind={judge.kind.value} ({item.place}: {problem}; a dot leads into a field)"
        )
        raise ConfigError(f"{place}.answer_column", sources[name].answer_column, allowed)


def _check_rubric(role: str, template: str, items: Sequence[Item]) -> None:
    """Raise for a field of a rubric that a row lacks, or that is no text."""
    names = names_in(template) - _KNOWN
    for item in items:
        for name in sorted(names):
            try:
                text_of(field_of({**item.item, "row": item.item}, name))
            except KeyError:
                known = ", ".join(sorted({*item.item, "prompt", "response"}))
                problem = f"fields of the rows ({known}; {item.source} has no {name})"
            except TypeError as error:
                problem = f"fields that are text or numbers ({item.place}: {error})"
            else:
                continue
            raise ConfigError(f"{role}.endpoint.template", f"{{{name}}}", problem)
