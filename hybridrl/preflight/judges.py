"""Checks of a run's judges before it starts a process."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.config import Config, ConfigError, JudgeConfig, RewardKind, SourceConfig
from hybridrl.config.row_fields import field_of, fill, names_in, text_of
from hybridrl.data import Item
from hybridrl.data.records import SourceRecord, answer_texts, form_of
from hybridrl.flow import Graph
from hybridrl.flow.graph import Stage, StageMethod
from hybridrl.preflight.models import judges_of

if TYPE_CHECKING:
    from hybridrl.rewards import RewardInput, RewardResult

Judged = tuple[Item, "RewardInput", "RewardResult"]
"""A row, the response of it that a judge was given, and what the judge said."""

log = logging.getLogger(__name__)

_TRIED = (RewardKind.exact, RewardKind.regex, RewardKind.math, RewardKind.dataset,
          RewardKind.function)  # fmt: skip
"""Judges that are tried on rows' own answers: an answer is no program, and no endpoint is asked."""
_TRIED_ROWS = 8

_KNOWN = {"prompt", "question", "answer", "response", "responses"}
"""Fields of a rubric that are no columns."""


IsRecorded = Callable[[Stage], bool]
"""Whether every score of a judge's stage is recorded, so that the judge is not asked."""


def try_judges(
    config: Config,
    graph: Graph,
    items: Sequence[Item] = (),
    is_recorded: IsRecorded | None = None,
) -> dict[str, list[Judged]]:
    """Start every judge once, and try it on some of `items`; fills in which of them wait.

    Answers with what each said of them, by role.

    A verifier or function is given rows' own answers, an endpoint or a model nothing. Raises
    ConfigError for a judge that cannot be built, or fails on one of them. A judge that gives its
    best value to none of them is named in a warning. So is an `extract` that finds nothing in them.
    With `is_recorded`, of a replay, only those are started that its steps ask: it evaluates
    nothing.
    """
    from hybridrl.rewards import validate_reward

    roles = judges_of(config, graph)
    if is_recorded is not None:
        scores = [stage for stage in graph.stages.values() if stage.method is StageMethod.SCORE]
        asked = {stage.role for stage in scores if not is_recorded(stage)}
        roles = [role for role in roles if role in asked]
    trials = {}
    for role in roles:
        judge, sources = config.judge_of(role), config.sources_of(role)
        _warn_of_extract(config, role, judge, [i for i in items if i.source in sources])
        tried = _own_answers(config, judge, [item for item in items if item.source in sources])
        trial = validate_reward(judge, sources, role, [reward_input for _, reward_input in tried])
        if judge.kind is RewardKind.function:
            judge.waits = trial.waits
        trials[role] = [(*pair, x) for pair, x in zip(tried, trial.results, strict=False)]
        _check_trial(role, judge, trials[role], graph.generates)
    return trials


def _own_answers(
    config: Config, judge: JudgeConfig, items: Sequence[Item]
) -> list[tuple[Item, "RewardInput"]]:
    """Responses to try a judge on: rows' own answers, and for a function an empty one to each."""
    from hybridrl.rewards import RewardInput

    if judge.kind not in _TRIED:
        return []
    by_source: dict[str, list[Item]] = {}
    for item in items:
        by_source.setdefault(item.source, []).append(item)
    each = -(-_TRIED_ROWS // max(1, len(by_source)))
    tried = []
    for item in (item for of_source in by_source.values() for item in of_source[:each]):
        texts = [_target_of(config, item)] if item.answers else []
        if judge.kind is RewardKind.function:
            texts.append("")
        for text in texts:
            row = dict(item.item)
            if config.environment.is_on:
                row["conversation"] = [{"role": "assistant", "content": text}]
            reward_input = RewardInput(
                item.prompt, text, item.answer, row, item.source,
                answers=item.answers, expected=item.expected, question=item.question,
            )  # fmt: skip
            tried.append((item, reward_input))
    return tried


def _warn_of_extract(config: Config, role: str, judge: JudgeConfig, items: Sequence[Item]) -> None:
    """Say where `extract` finds nothing in rows' own answers: no judge is asked of them then."""
    from hybridrl.rewards.worker import make_selector

    select = make_selector(judge, role)
    own = [(item, _target_of(config, item)) for item in items if any(item.answers)][:_TRIED_ROWS]
    if judge.extract is None or not own or any(select(text) for _, text in own):
        return
    log.warning(
        "%s.extract=%s finds nothing in %d rows' own answers (%s, %r): does data.answer_template "
        "write them as the model is to write its own?",
        role, judge.extract, len(own), own[0][0].place, own[0][1][:60],
    )  # fmt: skip


def _target_of(config: Config, item: Item) -> str:
    """The text of an item's own answer, as `data.answer_template` writes it."""
    record = SourceRecord(item.item, item.question, item.answer, item.place)
    try:
        return fill(config.data.answer_template, record.fields())
    except (KeyError, TypeError, ValueError):  # a template of another source's columns
        return item.answer


def _check_trial(
    role: str,
    judge: JudgeConfig,
    tried: Sequence[Judged],
    generates: bool,
) -> None:
    """Raise for a judge that failed on all responses of its trial; warn of one that failed on some,
    or can tell nothing apart. Where nothing `generates`, a function may judge the row alone.
    """
    from hybridrl.rewards.results import WRONG_RETURNS
    from hybridrl.rewards.worker import make_selector

    own: list[float] = []
    empty: list[float] = []
    failed: list[str] = []
    rows: set[tuple[str, str]] = set()
    for item, reward_input, result in tried:
        if result.status != "ok":
            text = f"the response {reward_input.response[:60]!r} to {item.source}, {item.place}"
            failed.append(f"{text} ({result.message})")
            rows.add((item.source, item.place))
        elif not reward_input.response:
            empty.append(result.reward)
        elif make_selector(judge, role)(reward_input.response) is not None:
            own.append(result.reward)
    if failed:
        is_function = judge.kind is RewardKind.function
        key, value = ("function", judge.function) if is_function else ("kind", judge.kind.value)
        # One that raises on some responses costs those alone; what it returns must be a reward.
        wrong = [text for text in failed if any(said in text for said in WRONG_RETURNS)]
        if wrong or len(failed) == len(tried):
            allowed = f"a judge of the rows: it failed on {(wrong or failed)[0]}"
            raise ConfigError(f"{role}.{key}", value, allowed)
        log.warning(
            "%s.%s=%s failed on %d of %d rows that it was tried on. The run starts nevertheless. "
            "The first failure: %s",
            role, key, value, len(rows), len({(item.source, item.place) for item, _, _ in tried}),
            failed[0],
        )  # fmt: skip
    if judge.kind is RewardKind.function:
        blind = generates and bool(own) and own == empty[: len(own)]
    else:
        blind = bool(own) and max(own) < 1.0
    if blind:
        log.warning(
            "%s.kind=%s gives none of %d rows' own answers its best value (%s, %s got %g): do the "
            "answers' column, data.answer_template and the judge fit each other?",
            role, judge.kind.value, len(own), tried[0][0].place,
            repr(tried[0][1].response[:60]), own[0],
        )  # fmt: skip


def warn_of_long_answers(
    config: Config, trials: Mapping[str, Sequence[Judged]], tokenizer: Any
) -> None:
    """Say where judges compare with answers that no response is long enough for.

    What a judge reads of the row's own answer counts, or a shorter one of its right answers.
    """
    for role, tried in trials.items():
        judge = config.judge_of(role)
        own = [(item, result.text) for item, _, result in tried if result.text]
        too_long = []
        for item, text in own if _reads_answers(judge) else ():
            key, longest = "rollout", config.rollout.max_new_tokens
            of_set = config.eval.sets.get(item.source.removeprefix("eval.sets."))
            if item.source.startswith("eval.sets.") and of_set and of_set.max_new_tokens:
                key, longest = item.source, of_set.max_new_tokens
            texts = filter(None, (text, *item.answers))
            if (tokens := min(tokens_of(tokenizer, text) for text in texts)) > longest:
                too_long.append(
                    f"{key}.max_new_tokens={longest}, e.g. {item.source}, {item.place}, of {tokens}"
                )
        if too_long:
            log.warning(
                "of %d answers that %s.kind=%s was tried on, %d have more tokens than %s: no "
                "response can be as long",
                len(own), role, judge.kind.value, len(too_long), too_long[0],
            )  # fmt: skip


def tokens_of(tokenizer: Any, text: str) -> int:
    """The number of tokens of a response."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check_rows(config: Config, graph: Graph, items: Sequence[Item]) -> None:
    """Raise where a judge needs something of the rows that one of them lacks.

    Also where responses are trained, all alike, of which some are labeled as wrong.
    """
    from hybridrl.rewards.code import check_tests

    if graph.trains_targets and not graph.judges:
        for item in items:
            source = config.data.sources.get(item.source)  # none: a set for evaluation
            wrong = item.item.get("label") is False and form_of(item.item)
            if source and wrong:
                allowed = f"rows whose label is true ({item.place}){wrong}"
                raise ConfigError(f"data.sources.{item.source}.name", source.name, allowed)
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
        if any(item.answers):
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
                problem = f"fields of the rows ({known}; {item.source}, {item.place} has no {name})"
            except TypeError as error:
                problem = f"fields that are text or numbers ({item.place}: {error})"
            else:
                continue
            raise ConfigError(f"{role}.endpoint.template", f"{{{name}}}", problem)
