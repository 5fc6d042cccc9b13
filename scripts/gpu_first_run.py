"""What `gpu_first_run.sh` does beside the shell: its data, its reward, and what it keeps.

    python gpu_first_run.py words FILE
    python gpu_first_run.py keep WORK OUT

It needs Python alone. `keep` may run at any moment of the script, and once more at its end.
"""

import fcntl
import itertools
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTS = ("report", "demo", "large")
_WORDS = 2000
SHOWN = (
    "step", "step_s", "tokens_per_s", "generate_s", "update_actor_s", "to_generate_s", "to_train_s",
    "response_tokens_mean", "reward_mean", "grad_norm",
)  # fmt: skip


def varied(prompt: str, response: str, answer: str, item: dict[str, Any]) -> float:
    """Return the share of different characters: samples of an untrained model differ in it."""
    return len(set(response)) / max(1, len(response))


def write_words(file: Path) -> None:
    """Write prompts as those of the demo: `abc:` wants `#cba`."""
    orders = itertools.islice(itertools.permutations("adeilnorst", 4), _WORDS)
    words = ("".join(letters) for letters in orders)
    lines = (json.dumps({"prompt": f"{word}:", "answer": f"#{word[::-1]}"}) for word in words)
    file.write_text("\n".join(lines) + "\n")


def keep(work: Path, out: Path) -> None:
    """Bring `out` up to date with what the parts have written, each file as a whole.

    `report.json`, `report.txt`; of each training `NAME.jsonl`, its metrics; `first_run.json` and
    `first_run.txt`, all parts; `logs.tgz`.
    """
    with (work / "keep.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the last call and one of every five seconds may meet
        _keep(work, out)


def _keep(work: Path, out: Path) -> None:
    for name in ("report.json", "report.txt"):
        _copy(work / "report" / name, out / name)
    outcomes = {name: _outcome(work, name) for name in PARTS}
    for name in PARTS[1:]:
        _copy(work / "runs" / name / "metrics.jsonl", out / f"{name}.jsonl")
    _replace(out / "first_run.json", json.dumps(outcomes, indent=1) + "\n")
    _replace(out / "first_run.txt", "\n".join(_lines(outcomes)) + "\n")
    new = out / "logs.tgz.new"
    with tarfile.open(new, "w:gz") as archive:
        for path in _logs(work):
            archive.add(path, path.relative_to(work))
    os.replace(new, out / "logs.tgz")


def _outcome(work: Path, name: str) -> dict[str, Any]:
    """The state of a part, its seconds, and the metrics of its steps."""
    ended, log = work / "parts" / f"{name}.ended", work / "parts" / f"{name}.log"
    if not log.is_file():
        return {"state": "not begun"}
    outcome: dict[str, Any] = {"state": "running"}
    if ended.is_file():
        code, seconds = map(int, ended.read_text().split())
        state = "done" if code == 0 else "out of time" if code in (124, 137) else "failed"
        outcome = {"state": state, "seconds": seconds}
        if code:
            lines = log.read_text(errors="replace").strip().splitlines()
            outcome["reason"] = lines[-1] if lines else f"exit code {code}"
    if name != "report":
        outcome["steps"] = list(_steps(work / "runs" / name / "metrics.jsonl"))
    return outcome


def _steps(metrics: Path) -> Iterator[dict[str, Any]]:
    """The figures of each step of reinforcement learning: several lines of a step are joined."""
    steps: dict[int, dict[str, Any]] = {}
    for line in metrics.read_text().splitlines() if metrics.is_file() else ():
        record = _json(line)
        if isinstance(record, dict) and record.get("phase") == "rl":
            steps.setdefault(record["step"], {}).update(record)
    for step in steps.values():
        yield {name: step[name] for name in SHOWN if name in step}


def _json(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:  # it is being written
        return None


def _lines(outcomes: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, outcome in outcomes.items():
        seconds = f" in {outcome['seconds']} s" if "seconds" in outcome else ""
        reason = f": {outcome['reason']}" if "reason" in outcome else ""
        yield f"{name}: {outcome['state']}{seconds}{reason}"
        for step in outcome.get("steps", ()):
            yield "  " + "  ".join(f"{key} {_short(value)}" for key, value in step.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _logs(work: Path) -> Iterator[Path]:
    """Logs of the parts, and small files of the runs: no weights."""
    yield from sorted((work / "parts").glob("*.log"))
    yield from sorted((work / "report" / "logs").glob("*"))
    for path in sorted((work / "runs").rglob("*")):
        weights = {"start", "final", "checkpoints"} & {*path.relative_to(work).parts}
        if path.is_file() and not weights and path.stat().st_size < 4 * 2**20:
            yield path


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        new = target.with_name(f"{target.name}.new")
        shutil.copyfile(source, new)
        os.replace(new, target)


def _replace(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    os.replace(new, file)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    commands: dict[str, Callable[..., None]] = {"words": write_words, "keep": keep}
    commands[command](*map(Path, paths))
