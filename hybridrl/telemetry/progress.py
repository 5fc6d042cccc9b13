"""The display of a run in progress: a live bar on a terminal, plain lines elsewhere.

Everything goes to standard error, so that standard output holds a command's result alone.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_TITLES = {"warm_start": "warm start", "rl": "rl", "evaluation": "evaluation"}
_EVERY_S = 5.0
_WINDOW = 20  # steps that the time left is estimated from


class Display:
    """A display of progress; by itself it shows notes alone. Used from one thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def phase(self, name: str, num_steps: int) -> None:
        """Begin a phase of `num_steps` steps."""

    def stage(self, name: str) -> None:
        """Show that the ranks now do `name`."""

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        """Show that `done` steps of the phase are done; `metrics` are the last one's."""

    def note(self, text: str) -> None:
        """Show one line that stays: an evaluation's result, a warning, the run's directory."""
        visible = "".join(c if c.isprintable() else " " for c in text)
        self._stream.write(visible + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""


def make_display(enabled: bool) -> Display:
    """A live display if standard error is a terminal, else plain lines; notes if not `enabled`."""
    stream = sys.stderr
    if not enabled:
        return Display(stream)
    # rich takes FORCE_COLOR for a terminal; a log file must stay free of control characters.
    if stream.isatty() and not Console(file=stream).is_dumb_terminal:
        return Live(stream)
    return Lines(stream)


class Lines(Display):
    """A line per `_EVERY_S` seconds at most, and one at the end of each phase; no control codes."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._title, self._num_steps = "", 0
        self._shown = 0.0
        self._pace = _Pace()

    def phase(self, name: str, num_steps: int) -> None:
        self._title, self._num_steps = _TITLES.get(name, name), num_steps
        self._pace = _Pace()
        self._shown = 0.0

    def stage(self, name: str) -> None:
        """Until the first phase begins each stage is a line: starting may take minutes."""
        if not self._title:
            self.note(name)

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        left = self._pace.seconds_left(done, self._num_steps)
        now = time.monotonic()
        if done < self._num_steps and now - self._shown < _EVERY_S:
            return
        self._shown = now
        parts = [f"{self._title} {done}/{self._num_steps}", *_figures(metrics)]
        if done < self._num_steps and left:
            parts.append(left + " left")
        self.note("  ".join(filter(None, parts)))


class Live(Display):
    """A bar per phase, redrawn in place; other output of the process appears above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        columns = (
            TextColumn("{task.fields[title]:<10}", style="bold"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[stage]:<9}", style="cyan"),
            TextColumn("{task.fields[figures]}", style="green"),
            TextColumn("{task.fields[left]}", style="dim"),
        )
        self._progress = Progress(
            *columns,
            console=Console(file=stream),
            refresh_per_second=4,
            # Redirecting a piped standard output would move the result to standard error.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task: TaskID | None = None
        self._num_steps = 0
        self._pace = _Pace()
        self._progress.start()

    def phase(self, name: str, num_steps: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, stage="", left="")
        self._num_steps, self._pace = num_steps, _Pace()
        self._task = self._progress.add_task(
            "", total=num_steps, title=_TITLES.get(name, name), stage="", figures="", left=""
        )

    def stage(self, name: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, stage=name)

    def step(self, done: int, metrics: Mapping[str, float]) -> None:
        if self._task is None:
            return
        left = self._pace.seconds_left(done, self._num_steps)
        self._progress.update(
            self._task,
            completed=done,
            figures="  ".join(_figures(metrics)),
            left=f"{left} left" if left and done < self._num_steps else "",
        )

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _Pace:
    """Time left, from the last steps' mean duration."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque([(0, time.monotonic())], maxlen=_WINDOW + 1)

    def seconds_left(self, done: int, num_steps: int) -> str:
        """`m:ss` until `num_steps`, or nothing while it cannot be known."""
        first_step, first_time = self._ends[0]
        now = time.monotonic()
        self._ends.append((done, now))
        if done <= first_step:
            return ""
        seconds = round((now - first_time) / (done - first_step) * max(0, num_steps - done))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _figures(metrics: Mapping[str, float]) -> list[str]:
    """The few numbers worth a line; keys that are missing are left out."""
    figures = []
    if "tokens_per_s" in metrics:
        figures.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
    if "reward_mean" in metrics:
        figures.append(f"reward {metrics['reward_mean']:.3f}")
    elif "loss" in metrics:
        figures.append(f"loss {metrics['loss']:.3f}")
    return figures
