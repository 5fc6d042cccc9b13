"""Measure this machine's GPUs with hybridrl: one table and one JSON, within ten minutes.

    python scripts/gpu_report.py [--device auto|cpu|cuda] [--model tiny|1.5b] [--out DIRECTORY]
                                 [--steps a,b] [--fresh] [--minutes 10] [--limit SECONDS]
                                 [--scratch DIRECTORY]

It needs torch, triton and transformers, no installation and no network. Every step runs in a
separate process with a time limit, and the JSON has its figures as soon as it ends. A second call
runs the steps that are not done yet; --fresh forgets those that are. docs/gpu.md says what the
lines mean.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gpu_steps import ROOT
from gpu_steps.estimates import compared
from gpu_steps.figures import replace_file
from gpu_steps.report_shape import MEASURED, are_steps
from gpu_steps.steps import DEVICES, MODELS, STEPS, Settings
from gpu_steps.table import table

from hybridrl.config import ConfigError

FOLDER = ROOT / ".cache" / "gpu_report"
_PROBE_S = 120.0
_KILL_S = 10.0
_LEAST_S = 5.0  # a step that has less time is left for the next call


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    device: str
    model: str
    out: Path
    scratch: Path
    """For the model: 3 GB of random weights, which the next call uses again."""
    steps: tuple[str, ...]
    fresh: bool
    minutes: float
    limit: float


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for any other wrong input."""
        self.exit(2, f"{message}\n")


def parse(arguments: Sequence[str]) -> Options:
    """The options; raises ConfigError for a value that cannot work."""
    words = _parser().parse_args(arguments)
    steps = tuple(STEPS) if words.steps is None else tuple(words.steps.split(","))
    for key, value, allowed in (
        ("--device", words.device, ("auto", *DEVICES)),
        ("--model", words.model, (None, *MODELS)),
        *(("--steps", step, tuple(STEPS)) for step in steps),
    ):
        if value not in allowed:
            raise ConfigError(key, value, filter(None, allowed))
    return Options(
        device=words.device,
        model=words.model or "",
        out=_folder("--out", words.out),
        scratch=_folder("--scratch", words.scratch),
        steps=steps,
        fresh=words.fresh,
        minutes=_positive("--minutes", words.minutes),
        limit=math.inf if words.limit is None else _positive("--limit", words.limit),
    )


def _parser() -> _Parser:
    """The options, with what `--help` says of each."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--device",
        default="auto",
        help=f"what to measure: auto, {', '.join(DEVICES)} (default auto: cuda with a GPU, or cpu)",
    )
    add(
        "--model",
        help=f"shape of the model: {', '.join(MODELS)} (default 1.5b on cuda, tiny on cpu)",
    )
    add(
        "--out",
        metavar="DIRECTORY",
        default=str(FOLDER),
        help="for report.json, report.txt and logs (default .cache/gpu_report of the repository)",
    )
    add(
        "--scratch",
        metavar="DIRECTORY",
        default=str(FOLDER),
        help="for 3 GB of random weights (default .cache/gpu_report of the repository)",
    )
    add("--steps", metavar="A,B", help=f"some of {', '.join(STEPS)} (default all)")
    add("--fresh", action="store_true", help="measure the steps anew that are done (default no)")
    add(
        "--minutes",
        default="10",
        help="limit of the whole call, a finite number above 0 (default 10)",
    )
    add(
        "--limit",
        metavar="SECONDS",
        help="limit of each step, a finite number above 0 (default that of the step)",
    )
    return parser


def _folder(key: str, text: str) -> Path:
    if not text:
        raise ConfigError(key, text, "a directory")
    return Path(text).absolute()


def _positive(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(key, text, "a finite number above 0")
    return number


def run_limited(module: str, arguments: Sequence[str], log: Path, limit_s: float) -> str:
    """Run `python -m MODULE` with its output in `log`; why it failed, "" if it did not.

    What it has started ends with it.
    """
    folders = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )  # fmt: skip
        reason = ""
        try:
            code = process.wait(limit_s)
            if code < 0:
                reason = f"ended by {signal.Signals(-code).name}"
            elif code:
                lines = log.read_text(errors="replace").strip().splitlines()
                reason = lines[-1].strip()[:300] if lines else f"exit code {code}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {limit_s:.3g} s"
        finally:
            _end(process)
    return reason


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step's process and those that it has started, which are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:  # in the driver; the next step may still run
        print(f"process {process.pid} does not end", file=sys.stderr)


def probe(out: Path) -> dict[str, Any]:
    """The machine, as torch sees it. Raises ConfigError where torch cannot be imported."""
    file = out / "machine.json"
    file.unlink(missing_ok=True)
    reason = run_limited("gpu_steps.machine", [str(file)], out / "logs" / "machine.log", _PROBE_S)
    if reason:
        raise ConfigError("python", sys.executable, f"one that imports torch ({reason})")
    machine: dict[str, Any] = json.loads(file.read_text())
    return machine


def settle(options: Options, machine: dict[str, Any]) -> Settings:
    """Device and model by what the machine has; raises ConfigError for a GPU that is not there."""
    gpus = len(machine["gpus"])
    if options.device == "cuda" and not gpus:
        torch = machine["versions"]["torch"]
        allowed = f"auto or cpu: torch {torch} finds no GPU here ({machine['problem']})"
        raise ConfigError("--device", options.device, allowed)
    device = options.device if options.device != "auto" else "cuda" if gpus else "cpu"
    model = options.model or ("1.5b" if device == "cuda" else "tiny")
    memory = min((gpu["memory"] for gpu in machine["gpus"]), default=0)
    return Settings(
        device=device,
        model=model,
        gpus=gpus,
        gpu_memory=memory if device == "cuda" else 0,
        folder=str(options.out),
        scratch=str(options.scratch),
    )


def source_digest() -> str:
    """A digest of the Python files that are measured, committed or not."""
    digest = hashlib.sha256()
    for folder in ("hybridrl", "kernels", "scripts/gpu_steps"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """The tree's commit, where git knows it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def open_report(options: Options, settings: Settings, machine: dict[str, Any]) -> dict[str, Any]:
    """The report so far: that of the same source and kind of machine, else a new one.

    Another one is kept under a name with its time, and so is a damaged one.
    """
    kind = {name: value for name, value in machine.items() if name != "host"}
    head = {
        "source": source_digest(),
        "device": settings.device,
        "model": settings.model,
        "machine": kind,
    }
    file = options.out / "report.json"
    report: Any = _read_json(file) if file.is_file() else head | {"steps": {}}
    if obstacle := _obstacle(report, head):
        print(f"{_set_aside(file)} {obstacle}")
        report = {"steps": {}}
    forgotten = options.steps if options.fresh else ()
    kept_steps = {name: step for name, step in report["steps"].items() if name not in forgotten}
    return head | {"commit": commit(), "steps": kept_steps}


def _read_json(file: Path) -> object:
    """The content of a file; None where it is not JSON."""
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError):  # half a file, other bytes, brackets without end
        return None


def _obstacle(report: object, head: dict[str, Any]) -> str:
    """Why no call can continue a report; "" if one can.

    Another source may have had another shape, so only a report of this one is held to it.
    """
    damaged = "is damaged: the report begins anew"
    if not isinstance(report, dict) or not head.keys() <= report.keys():
        return damaged
    if any(report[name] != value for name, value in head.items()):
        return "has the report of another source, model or machine"
    return "" if are_steps(report.get("steps")) else damaged


def _set_aside(file: Path) -> Path:
    """Give a file a name with its time, and a number where that is taken."""
    written = time.strftime("%Y%m%d-%H%M%S", time.localtime(file.stat().st_mtime))
    names = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
    paths = (file.with_name(f"{file.stem}-{written}{name}.json") for name in names)
    kept = next(path for path in paths if not path.exists())
    os.replace(file, kept)
    return kept


def measure(
    name: str, settings: Settings, options: Options, limit_s: float, host: str
) -> dict[str, Any]:
    """One step: its status, figures, details and seconds."""
    result, settings_file = options.out / "step.json", options.out / "settings.json"
    result.unlink(missing_ok=True)
    settings.write(settings_file)
    log = options.out / "logs" / f"{name}.log"
    begun = time.monotonic()
    reason = run_limited("gpu_steps", [name, str(settings_file), str(result)], log, limit_s)
    step = json.loads(result.read_text()) if result.is_file() else {}
    skipped = step.get("skipped", "")
    return {
        "status": "failed" if reason else "skipped" if skipped else "done",
        "reason": reason or skipped,
        "seconds": round(time.monotonic() - begun, 1),
        "host": host,
        "device": settings.device,
        "figures": step.get("figures", []),
        "details": step.get("details", {}),
    }


def run_steps(
    options: Options, settings: Settings, report: dict[str, Any], host: str
) -> Iterator[str]:
    """Run the steps that are wanted and not done, one line about each; the report grows."""
    ends = time.monotonic() + 60 * options.minutes
    for name in options.steps:
        if report["steps"].get(name, {}).get("status") == "done":
            yield f"{name}: done before"
            continue
        left = ends - time.monotonic()
        if left < _LEAST_S:
            yield f"{name}: no time left of {options.minutes:g} minutes; call again for it"
            continue
        limit = min(STEPS[name].limit_s, options.limit, left)
        step = measure(name, settings, options, limit, host)
        report["steps"][name] = step
        report["measured"] = time.strftime(MEASURED, time.gmtime())
        report["estimates"] = compared(report)
        replace_file(options.out / "report.json", json.dumps(report, indent=1))
        replace_file(options.out / "report.txt", table(report))
        reason = f": {step['reason']}" if step["reason"] else ""
        yield f"{name}: {step['status']} in {step['seconds']} s{reason}"


def main() -> None:
    """Measure, print the table; exit code 1 where a step failed, 2 for wrong input."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the end of a reservation: the step ends, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        options = parse(sys.argv[1:])
        for key, folder in (("--out", options.out / "logs"), ("--scratch", options.scratch)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                allowed = f"a writable directory ({error.strerror})"
                raise ConfigError(key, getattr(options, key.strip("-")), allowed) from None
        machine = probe(options.out)
        settings = settle(options, machine)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    report = open_report(options, settings, machine)
    for line in run_steps(options, settings, report, machine["host"]):
        print(line, flush=True)
    text = table(report)
    replace_file(options.out / "report.txt", text)
    print(f"\n{text}\n{options.out / 'report.json'}")
    sys.exit(any(step["status"] == "failed" for step in report["steps"].values()))


if __name__ == "__main__":
    main()
