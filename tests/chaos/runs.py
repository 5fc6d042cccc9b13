"""A case from its seed to what did not hold; the undisturbed run of each setting is made once."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.attempts import Attempt, left_behind
from chaos.cases import (
    ENDS_DRIVER,
    OF_DISK,
    OF_RANKS,
    RECIPES,
    SAVE_EVERY,
    SCHEDULES,
    STEPS,
    Case,
    Fault,
    Kind,
    Seen,
    SeenCalls,
    call_of,
    draw,
    num_ranks,
    setting_of,
)  # fmt: skip
from chaos.strikes import Disk, damage, is_stopped, strike
from resumed_runs import WHEN_MADE, check_same
from whole_runs import REPLAYED, TINY, USER_REWARDS

from hybridrl.telemetry.records import read_lines

BOUND_S = 150.0
"""Within so many seconds every process of the command must have ended by itself."""
WHEN_MOVED = ("samples/migrated", "samples/restarted", "samples/preempted")
"""Metrics that time or a death decides; the samples themselves are those of the undisturbed run."""


class Runs:
    """The undisturbed runs so far, in `folder`, and the cases that are held against them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rewards = folder / "rewards.py"
        self.rewards.write_text(USER_REWARDS)
        self._seen: dict[str, SeenCalls] = {}

    def settings(self, schedule: str, recipe: str) -> list[str]:
        """The overrides of the undisturbed run."""
        reward = [
            "reward=function", f"reward.function={self.rewards}:score", "reward.extract=null",
        ]  # fmt: skip
        own = [*SCHEDULES[schedule], *RECIPES[recipe], f"trainer.steps={STEPS}"]
        own += [f"trainer.save_every={SAVE_EVERY}", "cluster=processes", "run.dir=run"]
        own += [] if recipe == "talk" else reward
        changed = tuple(f"{setting.partition('=')[0]}=" for setting in own)
        rest = (*TINY, *REPLAYED)
        return [*(x for x in rest if not x.startswith((*changed, "recipe."))), *own]

    def whole(self, schedule: str, recipe: str) -> tuple[Path, SeenCalls]:
        """The undisturbed run, and the calls that its ranks were seen in."""
        setting = f"{schedule}-{recipe}"
        run_dir = self.folder / setting / "run"
        if setting not in self._seen:
            run_dir.parent.mkdir()
            args = [*self.settings(schedule, recipe), "trainer.resume=auto"]
            attempt = Attempt(run_dir, self.folder / setting / "log", args)
            calls = _Calls(attempt, num_ranks(schedule))
            code = attempt.watch(calls.look, BOUND_S)
            assert code == 0, attempt.said
            assert not left_behind()
            self._seen[setting] = calls.seen
        return run_dir, self._seen[setting]

    def run(self, seed: int) -> dict[str, Any]:
        """Run a case; gives its line of JSON."""
        whole, seen = self.whole(*setting_of(seed))
        case = draw(seed, seen)
        disk = Disk(self.folder / f"case_{seed}")
        temporary, begun = _temporary(), time.monotonic()
        under = _UnderFaults(case, disk, self.settings(case.schedule, case.recipe))
        try:
            under.run()
            if not under.wrong:
                under.wrong += differences(whole, disk.run_dir, case, self.folder)
            if left := _temporary() - temporary:
                under.wrong.append(f"left in the temporary folder: {', '.join(sorted(left))}")
            if under.wrong:
                shutil.copytree(disk.run_dir, self.folder / f"wrong_{seed}", dirs_exist_ok=True)
        finally:
            disk.close()
        return {
            "seed": seed, "setting": case.setting, "restarts": case.restarts,
            "background": case.background,
            "faults": [{**asdict(fault), "kind": fault.kind.name} for fault in case.faults],
            "struck": under.struck, "ends": under.ends, "wrong": under.wrong,
            "seconds": round(time.monotonic() - begun, 1),
        }  # fmt: skip


class _Calls:
    """Notes what ranks are seen in, and how long."""

    def __init__(self, attempt: Attempt, ranks: int) -> None:
        self.attempt = attempt
        self.seen: dict[int, dict[str, Seen]] = {rank: {} for rank in range(ranks)}

    def look(self) -> None:
        steps = self.attempt.records.steps()
        for rank, calls in self.seen.items():
            activity = self.attempt.activity(rank)
            call, now = call_of(activity), time.monotonic()
            seconds = now - self.attempt.begun if activity is None else activity.seconds
            if activity is not None or not steps:  # else it has ended
                seen = calls.get(call, Seen(steps, steps, 0.0))
                calls[call] = Seen(seen.first, steps, max(seen.seconds, seconds))


class _UnderFaults:
    """A run whose faults strike one after the other; the command is given until it succeeds."""

    def __init__(self, case: Case, disk: Disk, settings: list[str]) -> None:
        self.case, self.disk = case, disk
        self.args = [*settings, *case.overrides]
        self.left = list(case.faults)
        self.struck: list[str] = []
        self.ends: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.stopped: list[int] = []

    def run(self) -> None:
        """Strike, and give the command again, until it has ended with success or something is
        wrong."""
        for number in range(len(self.case.faults) + 1):
            log = self.disk.place.with_suffix(f".{number}.log")
            attempt = Attempt(self.disk.run_dir, log, self.args)
            here: list[Fault] = []
            code = attempt.watch(self._striker(attempt, here), BOUND_S)
            said = attempt.said.strip().splitlines()
            self.ends.append({"code": code, "line": said[-1][:300] if said else ""})
            if code is None:
                states = attempt.states(num_ranks(self.case.schedule))
                self.wrong.append(f"has not ended: {states}")
                attempt.process.kill()
            elif code not in (allowed := _codes(here, self.case)):
                self.wrong.append(f"exit code {code}, wanted one of {sorted(allowed)}")
            if "Traceback" in attempt.said:
                self.wrong.append("a traceback")
            elif code == 1 and not said[-1].startswith("hybridrl: "):
                self.wrong.append("no line says why")
            self.wrong += [f"left behind: {line}" for line in left_behind()]
            self.disk.mend()
            for fault in here:
                if fault.kind in (Kind.CUT_FILE, Kind.FLIP_BIT):
                    self.struck.append(f"{fault.kind.value}: {damage(fault, self.disk.run_dir)}")
            if code == 0 or self.wrong:
                return

    def _striker(self, attempt: Attempt, here: list[Fault]) -> Callable[[], None]:
        """Strikes the next fault when it is due, within this process of the command."""

        def look() -> None:
            if not self.left or any(fault.kind in ENDS_DRIVER for fault in here):
                return
            if any(is_stopped(pid) for pid in self.stopped):
                return  # whoever is to end it must be there
            fault, steps = self.left[0], attempt.records.steps()
            activity = attempt.activity(fault.rank)
            if not fault.is_due(steps, activity):
                return
            time.sleep(fault.delay_s)
            if attempt.process.exitcode is not None:
                return
            whom = strike(fault, attempt.process.pid, self.disk)
            self.left.pop(0)
            if whom:
                here.append(fault)
                self.stopped += [activity.pid] * (fault.kind is Kind.STOP_RANK)
                where = f"rank {fault.rank} in {activity} after step {steps}"
                self.struck.append(f"{fault.kind.value}: {whom}, {where}")

        return look


def _codes(here: list[Fault], case: Case) -> set[int]:
    """The exit codes that a process of the command may have under the faults that struck it."""
    kinds = {fault.kind for fault in here}
    codes = {0}
    if kinds & {*ENDS_DRIVER}:
        codes = {-9}
    if kinds & {*OF_RANKS} and not case.restarts:
        codes |= {1}
    if kinds & {*OF_DISK}:
        codes |= {1, 2}
    if Kind.TERMINATE in kinds:
        codes |= {143}
    return codes


def differences(whole: Path, run_dir: Path, case: Case, folder: Path) -> list[str]:
    """What of a run that has ended is not as in the undisturbed one."""
    wrong = []
    timed = (*WHEN_MOVED, *(WHEN_MADE if case.schedule == "async" else ()))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            check_same(whole, run_dir, Path(temporary), timed)
        except AssertionError as error:
            wrong.append(f"differs: {' '.join(str(error).split())[:600]}")
    samples = [x for x in read_lines(run_dir / "samples.jsonl") if x["phase"] == "rl"]
    twice = [id for id, count in Counter(x["id"] for x in samples).items() if count > 1]
    if twice:
        wrong.append(f"samples that are there twice: {twice}")
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line.get("samples/staleness", 0) > 2:
            wrong.append(f"a staleness of {line['samples/staleness']} in step {line['step']}")
    names = [_names(path) for path in (whole, run_dir)]
    if names[0] != names[1]:
        wrong.append(f"files that only one of the runs has: {sorted(names[0] ^ names[1])}")
    restarts = [x for x in read_lines(run_dir / "events.jsonl") if x["kind"] == "restart"]
    if len(restarts) > case.restarts:
        wrong.append(f"{len(restarts)} restarts")
    return wrong


def _names(run_dir: Path) -> set[str]:
    """The paths of a run's directory, but for logs and what is of one process."""
    passed = ("logs/", ".ranks/", ".hydra/")
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}
    return {name for name in names if not f"{name}/".startswith(passed)}


def _temporary() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}
