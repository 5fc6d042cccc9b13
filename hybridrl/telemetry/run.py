"""Everything that a run writes besides its checkpoints. Used by the driver alone.

docs/telemetry.md lists the files and their keys.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from hybridrl.config.run import TelemetryConfig
from hybridrl.telemetry.environment import capture
from hybridrl.telemetry.loggers.run_loggers import RunLoggers, logged_run
from hybridrl.telemetry.progress import make_display
from hybridrl.telemetry.records import JsonLines, parse, write_atomic, write_json
from hybridrl.telemetry.rundata import COSTS
from hybridrl.telemetry.trace import (
    Counter,
    ThreadSlice,
    TraceFile,
    TraceSpan,
    bubble_share,
    is_rank,
    rank_lane,
)


class Telemetry:
    """The record of one run, as a context manager.

    States, in `run.json`: `running` from entry; on exit `finished`, `interrupted`
    (KeyboardInterrupt) or `failed` (any other exception, whose text is the reason). A process that
    is killed leaves `running`, and its pid. A directory that holds an earlier run's records is
    continued: lines are appended, and where a step was logged twice readers take the later one.
    With `resume_sizes`, an earlier answer of `sizes()`, later records are cut off first.

        with Telemetry(Path("runs/latest"), config, total_steps=100) as telemetry:
            telemetry.phase("rl", 100)
            telemetry.span("rank 0", "generate", start, end, step=1)
            telemetry.log(1, {"loss": 0.3, "reward_mean": 0.5, "tokens_per_s": 4100.0})

    Every call leaves all files readable. Raises `OSError` when the disk is full.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TelemetryConfig,
        total_steps: int,
        resume_sizes: Mapping[str, int] | None = None,
        settings: Mapping[str, Any] | None = None,
        label: str = "",
    ) -> None:
        """Loggers show `settings`, by dotted key, with the run. `run.json`, `environment.json` and
        every line of metrics have its `label` as a mark, if it has one.
        """
        self._label = label
        self._marks = {label: True} if label else {}
        self.run_dir, self._resume_sizes = Path(run_dir), resume_sizes
        self._config = config
        self._total_steps = total_steps
        self._phase = ""
        self._offset = 0  # steps of the phases before this one, if steps count over all phases
        self._step_spans: list[TraceSpan] = []
        self.pools: Mapping[str, Sequence[int]] = {}
        """The ranks of each pool, where there are several: each has its own `bubble_share`."""
        self._since, self._spans_since = time.time(), list[TraceSpan]()  # the last step's record
        self.newest_step = 0
        """The newest step that has had metrics in this process."""
        self._status: dict[str, Any] = {}
        self._environment: dict[str, Any] = {}
        self._files: dict[str, JsonLines] = {}
        self._trace: TraceFile | None = None
        self._run = logged_run(self.run_dir, config.project, settings or {})
        self._loggers = RunLoggers([], self._run)
        self.display = make_display(False)

    def __enter__(self) -> Self:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self._resume_sizes is not None:
            cut(self.run_dir, self._resume_sizes)
        self._status = _begin(self.run_dir / "run.json", self._total_steps)
        self._status |= self._marks
        try:
            self._open()
        except BaseException as error:  # a signal, say, or a full disk
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _open(self) -> None:
        self._write_status()
        self._capture()
        self._trace = TraceFile(self.run_dir / "trace.json", self._label)
        self._loggers = RunLoggers(self._config.loggers, self._run)
        self.display = make_display(self._config.progress)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.display.close()  # first: whatever fails below is shown on a sane terminal
        state, reason = "finished", ""
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            state = "interrupted" if interrupted else "failed"
            reason = "" if interrupted else " ".join(f"{type(error).__name__}: {error}".split())
        self._status |= {"state": state, "ended": time.time(), "reason": reason}
        try:
            self._write_status()
            self._loggers.close(state)  # seconds, where a service is slow
            self._note_failures()
        except OSError:
            if error is None:
                raise  # else the disk is full, say, and `error` is shown
        finally:
            self._close()

    def rewind(self, sizes: Mapping[str, int]) -> None:
        """Go back to records of these `sizes`, an earlier answer of `sizes()`, within the process.

        What came later is made again. Services keep what they have, and are sent no step twice.
        """
        self._close()
        self._files.clear()
        with self._loggers.files_closed():
            cut(self.run_dir, sizes)
        self._trace = TraceFile(self.run_dir / "trace.json", self._label)
        self._phase, self._offset, self._step_spans = "", 0, []
        self._since, self._spans_since = time.time(), []

    def phase(self, name: str, num_steps: int, first_step: int = 0) -> None:
        """Begin a phase (`warm_start`, `rl`, `evaluation`) of `num_steps` steps.

        `first_step` is the number of steps before the phase, if steps count over all phases; the
        display then shows the step's number within its phase.
        """
        self._phase, self._offset = name, first_step
        self._step_spans = []
        self.display.phase(name, num_steps)
        self.event("phase", name=name, num_steps=num_steps, first_step=first_step)

    def stage(self, name: str) -> None:
        """Show the ranks' present work; nothing is recorded."""
        self.display.stage(name)

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Record the metrics of `step`: a line in metrics.jsonl, and for the loggers.

        A `phase` among them overrides the phase begun last. If spans of the step came before,
        `bubble_share` (mean over the ranks) is added. Several calls per step are merged by readers.
        """
        now = time.time()
        self.newest_step = max(self.newest_step, step)
        metrics = dict(metrics)
        phase = str(metrics.pop("phase", self._phase))
        assert not metrics.keys() & {"step", "time"}, "step and time are not metrics"
        metrics |= self._bubbles(step)
        metrics |= dict.fromkeys(self._marks, 1.0)
        self._append("metrics", {"step": step, "time": now, "phase": phase, **metrics})
        numbers = {key: float(value) for key, value in metrics.items()}
        self._loggers.log(step, phase, numbers)
        self._note_failures()
        if "tokens_per_s" in numbers and self._trace is not None:
            values = {"tokens/s": numbers["tokens_per_s"]}
            self._trace.counter(Counter("driver", "tokens/s", now, values))
        if estimates := _evaluated(numbers):
            shown = "  ".join(f"{key} {value:.3f}" for key, value in estimates.items())
            self.display.note(f"step {step}  {shown}")
        if "loss" in numbers or "reward_mean" in numbers:
            self.display.step(step - self._offset, numbers)

    def samples(
        self, step: int, records: Sequence[Mapping[str, Any]], phase: str | None = None
    ) -> None:
        """Record the first `telemetry.samples_per_step` of `records`, a line each.

        Keys: id, prompt, response, reward, status, tokens, finish, advantage. `phase` is the one
        begun last, or `evaluation` for held-out samples.
        """
        shown, phase = records[: self._config.samples_per_step], phase or self._phase
        for record in shown:
            self._append("samples", {"step": step, "phase": phase, **record})
        sets = {record["set"] for record in shown if "set" in record}  # each is a separate table
        self._loggers.samples(step, "/".join([phase, *sets]), shown)

    def lengths(self, step: int, response_lengths: Sequence[int], **others: Sequence[int]) -> None:
        """Record the response length, in tokens, of every sample of `step` in order of dispatch.

        `others` are as long: `prompts`, their positions in the run, and `prompt_tokens`.
        """
        line = {"step": step, "phase": self._phase, "lengths": list(response_lengths)}
        line |= self._marks
        self._append("lengths", {**line, **{key: list(value) for key, value in others.items()}})

    def versions(self, step: int, record: Mapping[str, Any]) -> None:
        """Record which weights have made the tokens of a step: `flow.versions.record_to_json`."""
        self._append("versions", {"step": step, "phase": self._phase, **record})

    def digests(self, step: int, record: Mapping[str, Any]) -> None:
        """Record the digests of a step: a `StepRecord` of `telemetry.digests`."""
        self._append("digests", {"step": step, "phase": self._phase, **record})

    def span(self, lane: str, name: str, start: float, end: float, step: int, **args: Any) -> None:
        """Record work of a lane (`driver`, `rank 0`, ...), in seconds since the epoch.

        Raises `ValueError` if it ends before it starts.
        """
        args = {"phase": self._phase, **args}
        span = TraceSpan(name, start, end, lane=lane, step=step, args=args)
        assert self._trace is not None, "span outside of the context"
        self._trace.span(span)
        if self.pools:
            self._spans_since.append(span)
        newest = self._step_spans[-1].step if self._step_spans else step
        if newest < step:
            self._step_spans = []
        if newest <= step:  # else it is of a call that nobody waited for in an earlier step
            self._step_spans.append(span)

    def profile(self, lane: str, slices: Sequence[ThreadSlice], step: int) -> None:
        """Record the operations of a lane's process in a step."""
        assert self._trace is not None, "profile outside of the context"
        self._trace.profile(lane, slices, step)

    def memory(self, lane: str, when: float, held: Mapping[str, int]) -> None:
        """Record the memory of a lane's process at `when` (Unix seconds): bytes by kind."""
        assert self._trace is not None, "memory outside of the context"
        self._trace.counter(Counter(lane, "memory", when, held))

    def nodes(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Record the facts of all nodes in environment.json; before the first step."""
        self._environment["nodes"] = list(infos)
        write_json(self.run_dir / "environment.json", self._environment)

    def inputs(self, digests: Mapping[str, Any]) -> None:
        """Record digests of the run's data and code in environment.json; before the first step."""
        self._environment["inputs"] = digests
        write_json(self.run_dir / "environment.json", self._environment)

    @property
    def has_inputs(self) -> bool:
        """Whether this process has recorded digests of data and code."""
        return "inputs" in self._environment

    def costs(self, costs: Mapping[str, Any]) -> None:
        """Record the measured costs of work, for `hybridrl plan schedule`; the newest counts."""
        write_json(self.run_dir / COSTS, {**costs, **self._marks})

    def event(self, kind: str, **fields: Any) -> None:
        """Record something that happened: `switch`, `bad_step`, `checkpoint`, `evaluation`, ..."""
        self._append("events", {"kind": kind, "time": time.time(), "phase": self._phase, **fields})

    def note(self, text: str, **fields: Any) -> None:
        """Show a line, and record it as an event `note`."""
        self.display.note(text)
        self.event("note", text=text, **fields)

    def sizes(self) -> dict[str, int]:
        """Bytes of every record so far, by file: to resume from, should the run end now."""
        return {
            str(file.relative_to(self.run_dir)): file.stat().st_size
            for file in records_of(self.run_dir)
        }

    def late_sizes(self) -> dict[str, int]:
        """Return the part of `sizes` that grows until ranks have answered for the last logged step.

        Nothing of the present step is in these files before it is logged.
        """
        sizes = self.sizes()
        return {name: size for name, size in sizes.items() if not name.startswith(_AT_ONCE)}

    def _bubbles(self, step: int) -> dict[str, float]:
        shares = bubble_share(span for span in self._step_spans if span.step == step)
        # An evaluation may be logged while a later step is under way.
        self._step_spans = [span for span in self._step_spans if span.step > step]
        ranks = [share for lane, share in shares.items() if is_rank(lane)]
        bubbles = {"bubble_share": fmean(ranks)} if ranks else {}
        if ranks and self.pools:  # which work across the ends of a step
            now = time.time()
            shares = bubble_share(self._spans_since, (self._since, now))
            self._since, self._spans_since = now, []
            for name, numbers in self.pools.items():
                mine = [shares.get(rank_lane(number), 1.0) for number in numbers]
                bubbles[f"bubble_share/{name}"] = fmean(mine)
        return bubbles

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = JsonLines(self.run_dir / f"{name}.jsonl")
        self._files[name].append(record)

    def _note_failures(self) -> None:
        for line in self._loggers.new_failures():
            self.note(line)

    def _write_status(self) -> None:
        write_json(self.run_dir / "run.json", self._status)

    def _capture(self) -> None:
        """Write environment.json; that of an earlier process is kept under another name."""
        for old in sorted(self.run_dir.glob("environment*")):
            old.rename(self.run_dir / f"earlier-{old.stat().st_mtime:.0f}-{old.name}")
        self._environment, patches = capture()
        self._environment |= self._marks
        for name, text in patches.items():
            write_atomic(self.run_dir / name, text)
        write_json(self.run_dir / "environment.json", self._environment)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._trace is not None:
            self._trace.close()


def append_metrics(run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add metrics to a step of a run that has ended; readers merge them with the step's others."""
    file = JsonLines(run_dir / "metrics.jsonl")
    try:
        file.append({"step": step, "time": time.time(), "phase": "rl", **metrics})
    finally:
        file.close()


def _evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an evaluation that are shown: its estimates, without their intervals.

    `eval_accuracy` is the first estimate of the set `main`, so that `avg@K` would repeat it.
    """
    shown = {key: value for key, value in metrics.items() if key.startswith("eval_")}
    estimates = [key for key in metrics if key.startswith("eval/") and "@" in key.split("/")[-1]]
    return shown | {k: metrics[k] for k in estimates if not (shown and "/avg@" in k)}


_AT_ONCE = ("metrics", "lengths", "events", "versions", "trace")
_GROWING = ("metrics", "samples", "lengths", "events", "digests", "versions")


def records_of(run_dir: Path) -> list[Path]:
    """The files that grow with a run."""
    files = [run_dir / f"{name}.jsonl" for name in _GROWING]
    files += [run_dir / "trace.json", *sorted((run_dir / "tensorboard").glob("*"))]
    return [file for file in files if file.is_file()]


def cut(run_dir: Path, sizes: Mapping[str, int]) -> None:
    """Cut the records of a run back to these `sizes`."""
    for file in records_of(run_dir):
        size = sizes.get(str(file.relative_to(run_dir)), 0)
        if not size:
            file.unlink()
        elif size < file.stat().st_size:
            os.truncate(file, size)


def _begin(path: Path, total_steps: int) -> dict[str, Any]:
    """The status of a run that starts, or that continues the run of an earlier process."""
    earlier = parse(path.read_text("utf-8")) if path.is_file() else None
    started = earlier.get("started") if isinstance(earlier, dict) else None
    return {
        "state": "running",
        "started": started or time.time(),
        "ended": None,
        "reason": "",
        "total_steps": total_steps,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
