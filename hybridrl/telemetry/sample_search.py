"""Finds samples of a run, newest steps first, and gives one with all its tokens.

Where the run keeps every sample, those of steps come from RUN/samples/*.parquet. Else they come
from samples.jsonl, which has the first of each step. Those of evaluations are there in any case.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hybridrl.telemetry import sample_files
from hybridrl.telemetry.records import with_lost_texts
from hybridrl.telemetry.rundata import RunData, finite, is_number

PAGE = 50
_MOST_SECONDS = 2.0  # of one search; the next one continues from there
_MAX_TEXT = 300  # characters of a prompt or response in a list
_LISTED = (
    *("step", "phase", "id", "source", "task", "prompt", "response", "prompt_tokens"),
    *("response_tokens", "reward", "advantage", "finish", "status", "drop_reason", "drop_text"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleQuery:
    """What a sample must be like to be listed; an empty or absent setting lets all pass.

    `text` is in its prompt or response, in any case of letters. `kind` is `source/NAME` or
    `task/NAME`. `status` is `used`, `dropped` or `cut`, of a response that reached the limit of
    tokens. Bounds are inclusive.
    """

    text: str = ""
    step: int | None = None
    phase: str = ""
    kind: str = ""
    status: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def passes(self, row: Mapping[str, Any]) -> bool:
        """Whether a listed row is wanted."""
        texts = (str(row.get("prompt") or ""), str(row.get("response") or ""))
        kinds = (f"source/{row.get('source')}", f"task/{row.get('task')}")
        cut = "cut" if row.get("finish") == "length" else ""
        return (
            (not self.text or any(self.text.lower() in text.lower() for text in texts))
            and (not self.phase or row.get("phase") == self.phase)
            and (not self.kind or self.kind in kinds)
            and (not self.status or self.status in (row.get("status"), cut))
            and _within(row.get("reward"), self.min_reward, self.max_reward)
            and _within(row.get("response_tokens"), self.min_tokens, self.max_tokens)
        )


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """Where a list continues: in `step`, after `skip` of its rows."""

    step: int
    skip: int = 0


@dataclass(frozen=True, slots=True)
class SampleList:
    """Rows, and where the list continues; None at its end. `skipped` are files that are damaged."""

    rows: list[dict[str, Any]]
    more: SamplePosition | None
    skipped: tuple[str, ...] = ()


class SampleSearch:
    """The samples of the run in `run_dir`, whose other records are `run`."""

    def __init__(self, run_dir: Path, run: RunData) -> None:
        self._files = sample_files.files_by_step(run_dir)
        self._lines: dict[int, dict[str, dict[str, Any]]] = {}
        for line in run.samples:
            step = run.key(line).x
            if line.get("phase") == "evaluation" or step not in self._files:
                # After a resume a step may have been run again; the later record counts.
                row = {"at": step, **_of_line(line)}
                self._lines.setdefault(step, {})[row["key"]] = row

    @property
    def has_files(self) -> bool:
        """Whether the run keeps every sample."""
        return bool(self._files)

    def page(self, query: SampleQuery, begin: SamplePosition | None = None) -> SampleList:
        """The next samples that pass, at most 50 of them, in at most about two seconds.

        Of a step's samples all are read, or none; a search that begins at a step reads it.
        """
        end = time.monotonic() + _MOST_SECONDS
        listed: list[dict[str, Any]] = []
        skipped: list[str] = []
        until = math.inf  # of the first step, whose files may take longer than all there is
        for step in sorted({*self._files, *self._lines}, reverse=True):
            if (begin and step > begin.step) or query.step not in (None, step):
                continue
            rows = self._rows(step, until, skipped) if time.monotonic() <= end else None
            if rows is None:
                return SampleList(listed, SamplePosition(step), tuple(skipped))
            until = end
            skip = begin.skip if begin and begin.step == step else 0
            for number, row in enumerate(rows):
                if number < skip or not query.passes(row):
                    continue
                if len(listed) == PAGE:
                    return SampleList(listed, SamplePosition(step, number), tuple(skipped))
                listed.append(_shortened(row))
        return SampleList(listed, None, tuple(skipped))

    def sample(self, step: int, key: str) -> dict[str, Any] | None:
        """One sample with its tokens and all that is known of each; None if it is not there.

        A page may know it by its line, where the step's files have come since.
        """
        if line := self._lines.get(step, {}).get(key):
            return line
        if key.startswith("evaluation "):  # samples of evaluations are in no file
            return None
        id = key.rpartition(" ")[2]
        for path in self._files.get(step, ()):
            with contextlib.suppress(*sample_files.UNREADABLE):
                if row := sample_files.read_sample(path, id):
                    return _with_tokens(row)
        return None

    def _rows(self, step: int, until: float, skipped: list[str]) -> Iterable[dict[str, Any]] | None:
        """All samples of a step, or None at the time `until`; adds files that are damaged."""
        tables, damaged = [], []
        for path in self._files.get(step, ()):
            if time.monotonic() > until:
                return None
            try:
                tables.append(sample_files.read_file(path, _LISTED))
            except sample_files.UNREADABLE:
                damaged.append(path.name)
        skipped += damaged
        rows = sample_files.in_order(tables).to_pylist() if tables else []
        of_files = ({"key": row["id"], "at": step, **row} for row in rows)
        return chain(of_files, self._lines.get(step, {}).values())


def _of_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of samples.jsonl, whose `status` is the verifier's, as a row of a list."""
    phase, id = str(line.get("phase") or "rl"), str(line.get("id"))
    copied = ("prompt", "response", "reward", "source", "task", "drop_reason", "turns")
    known = {name: value for name, value in with_lost_texts(line).items() if name in copied}
    if "drop_reason" in line:
        known["status"] = "dropped" if line["drop_reason"] else "used"
    return {
        "key": f"{phase} {line.get('set', '')} {id}",
        "step": line.get("step"),
        "phase": phase,
        "id": id,
        **known,
        "response_tokens": line.get("tokens"),
        "advantage": line.get("advantage"),
        "finish": line.get("finish"),
        "set": line.get("set"),
        "scalars": [{"name": "reward_status", "value": None, "text": line.get("status")}],
    }


def _with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its tokens' values by name, each as long as the response."""
    tokens = row.pop("token_texts")
    del row["prompt_ids"], row["response_ids"]
    values = {"log_probs": row.pop("log_probs"), "advantages": row.pop("advantages")}
    values |= {field["name"]: field["values"] for field in row.pop("fields")}
    of_tokens = {name: x for name, x in values.items() if x is not None and len(x) == len(tokens)}
    turn_rewards = values.get("turn_rewards")  # of conversations: a value a turn
    earned = {} if turn_rewards is None else {"turn_rewards": list(turn_rewards)}
    of_tokens.pop("turn_rewards", None)  # of as many turns as tokens
    return {"key": row["id"], **row, "tokens": tokens, "values": of_tokens, **earned}


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: str(row.get(name) or "")[:_MAX_TEXT] for name in ("prompt", "response")}
    return row | texts


def _within(value: Any, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    number = finite(value) if is_number(value) else None
    if number is None:
        return False
    return (low is None or number >= low) and (high is None or number <= high)
