"""RUN/first_samples.txt: some rows of a run as its model, its training and its judges see them."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config import Config
from hybridrl.data import Item
from hybridrl.data.turns import TurnTemplate
from hybridrl.flow import Graph
from hybridrl.models.control_tokens import ControlTokens, special_tokens
from hybridrl.preflight.judges import Judged, tokens_of
from hybridrl.preflight.models import judges_of

FILE = "first_samples.txt"
_MOST_ROWS = 4
_MOST_CHARACTERS = 20_000
_HEAD = """\
The first samples of this run. [[...]] marks what is trained; line breaks are the model's.
A backslash before a control token says that a text only spells it: it is encoded as characters.
"""


class FirstSamples:
    """Writes rows of a run as text, from what its preflight has found."""

    def __init__(
        self,
        config: Config,
        graph: Graph,
        tokenizer: Any,
        ends: Sequence[int],
        trials: Mapping[str, Sequence[Judged]],
        turns: TurnTemplate | None = None,
    ) -> None:
        """`ends` are the tokens that end a turn, `trials` what judges said of rows, by role.

        `turns` knows in which form calls of tools are read.
        """
        self.config, self.graph, self.tokenizer = config, graph, tokenizer
        self.ends, self.trials, self.turns = ends, trials, turns
        self._special, self._control = special_tokens(tokenizer), ControlTokens(tokenizer)

    def text(self, items: Sequence[Item]) -> str:
        """The file's text: the first rows of each source."""
        by_source: dict[str, list[Item]] = {}
        for item in items:
            by_source.setdefault(item.source, []).append(item)
        each = max(1, _MOST_ROWS // max(1, len(by_source)))
        shown = (item for of_source in by_source.values() for item in of_source[:each])
        return "\n".join([_HEAD, *itertools.chain.from_iterable(map(self._lines, shown))])

    def _lines(self, item: Item) -> Iterator[str]:
        yield f"======== {item.source}, {item.place} ========"
        yield f"---- the model sees ({len(item.prompt_ids)} tokens)"
        yield self._decoded(item.prompt_ids)
        if item.privileged_ids:
            yield "---- in place of it, a role that is told more sees (data.privileged_template)"
            yield self._decoded(item.privileged_ids)
        if self.graph.generates:
            yield from self._generated()
        if item.target_ids:
            warms = not self.graph.trains_targets
            yield from self._trained(item, None, "warm start" if warms else "the row's response")
        for column in self.graph.columns:
            yield from self._trained(item, column, f"the column {column!r}")
        for role in judges_of(self.config, self.graph):
            yield from self._judged(role, item)
        yield ""

    def _generated(self) -> Iterator[str]:
        """What ends a turn that the model writes."""
        rollout, environment = self.config.rollout, self.config.environment
        ends = "" if rollout.ignore_eos else self._names_of(self.ends)
        stops = ", ".join(repr(text) for text in self.config.stop_texts)
        where = " or ".join(filter(None, [ends, stops])) or "nothing"
        yield "---- the model writes: what it writes is trained"
        yield f"a turn ends at {where}; a response at {rollout.max_new_tokens} tokens at the latest"
        if environment.is_on:
            yield (
                f"environment.kind={environment.kind.value} answers up to {environment.max_turns} "
                "turns; its answers are not trained"
            )
        if self.turns and self.turns.tools:
            form = self.turns.call_form
            read = form.name or form.parser or "any form"
            setting = f"environment.tool_calls={environment.tool_calls}"
            yield f"calls of tools are read in {read} ({setting})"

    def _trained(self, item: Item, column: str | None, name: str) -> Iterator[str]:
        """A response of the dataset, with the stretches marked that are trained."""
        ids, mask = item.response(column)
        yield f"---- trained: {name} ({sum(mask)} of {len(ids)} tokens)"
        marked, last = "", False
        for own, pairs in itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1]):
            stretch = [id for id, _ in pairs]
            text, last = self._decoded(stretch), own and stretch[-1] in self.ends
            marked += f"[[{text}]]" if own else text
        yield marked
        end = self._names_of(ids[-1:]) if last else "no end: the model does not learn to stop"
        yield f"its turn ends with {end}"

    def _judged(self, role: str, item: Item) -> Iterator[str]:
        """What a judge is given, and what it says of the row's own answer."""
        judge = self.config.judge_of(role)
        yield f"---- {role}.kind={judge.kind.value}"
        answers = ", ".join(map(repr, item.answers)) or repr(item.expected)
        if item.source not in self.config.sources_of(role):
            yield "does not judge this source"
            return
        yield f"is given the text of the response, and the answer: {answers}"
        trials = [(asked, result) for own, asked, result in self.trials.get(role, ())
                  if own is item]  # fmt: skip
        if not trials:
            yield "is not asked before the run"
        for asked, result in trials:
            picked = "" if result.text == asked.response else f" (it judges {result.text!r})"
            value = f"{result.reward:g}" if result.status == "ok" else result.recorded_status
            tokens = tokens_of(self.tokenizer, asked.response)
            response = f"{_shown(asked.response)!r} ({tokens} tokens)"
            yield f"of the response {response}{picked} it says {value}"

    def _names_of(self, ids: Sequence[int]) -> str:
        return ", ".join(repr(self._decoded([id])) for id in ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of tokens, in which a control token that is only spelled is marked."""
        parts = [
            (is_special, self._text(list(same)))
            for is_special, same in itertools.groupby(ids, self._special.__contains__)
        ]
        if not any(self._control.spelled(text) for is_special, text in parts if not is_special):
            return _shown(self._text(list(ids)))
        return _shown("".join(x if special else self._control.escaped(x) for special, x in parts))

    def _text(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(ids, **options)
        return text


def write_first_samples(run_dir: Path, text: str) -> None:
    """Write the text of a run's first samples into its directory."""
    (run_dir / FILE).write_text(text, encoding="utf-8", errors="replace")


def _shown(text: str) -> str:
    """A text, a very long one without its middle."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
