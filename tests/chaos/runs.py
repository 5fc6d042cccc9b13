"""A case from its seed to what did not hold; the undisturbed run of each setting is made once."""

import os
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.attempts import LEFT_OF_RAY_S, LEFT_S, Attempt, left_behind
from chaos.cases import (
    ENDED,
    ENDS_DRIVER,
    NOTHING,
    OF_DISK,
    OF_FILES,
    OF_RANKS,
    RECIPES,
    SAVE_EVERY,
    SCHEDULES,
    STEPS,
    Case,
    Fault,
    Kind,
    draw,
    num_ranks,
)
from chaos.differences import differences
from chaos.strikes import Damage, Disk, damage, is_stopped, strike
from whole_runs import REPLAYED, TINY, USER_REWARDS

from hybridrl.runtime.ray_cleanup import kill_marked
from hybridrl.system.owned_folder import remove_abandoned
from hybridrl.telemetry.records import read_lines

BOUND_S = {"processes": 150.0, "local": 300.0}
"""Within so many seconds every process of the command must have ended by itself, by its cluster; it
takes 5, and 30 on Ray.
"""


class Runs:
    """The undisturbed runs so far, in `folder`, and the cases that are held against them.

    Runs with which something is wrong are copied into the folder `keep`.
    """

    def __init__(self, folder: Path, keep: Path | None) -> None:
        self.folder, self.keep = folder, keep
        self.rewards = folder / "rewards.py"
        self.rewards.write_text(USER_REWARDS)
        self._seconds: dict[str, dict[str, float]] = {}

    def settings(self, schedule: str, recipe: str, cluster: str = "processes") -> list[str]:
        """The overrides of the undisturbed run, which has no Ray."""
        reward = [
            "reward=function", f"reward.function={self.rewards}:score", "reward.extract=null",
        ]  # fmt: skip
        own = [*SCHEDULES[schedule], *RECIPES[recipe], f"trainer.steps={STEPS}"]
        own += [f"trainer.save_every={SAVE_EVERY}", f"cluster={cluster}", "run.dir=run"]
        own += [] if recipe == "talk" else reward
        changed = tuple(f"{setting.partition('=')[0]}=" for setting in own)
        rest = (*TINY, *REPLAYED)
        return [*(x for x in rest if not x.startswith((*changed, "recipe."))), *own]

    def whole(self, schedule: str, recipe: str) -> tuple[Path, dict[str, float]]:
        """The undisturbed run, and the most seconds that its calls have taken."""
        setting = f"{schedule}-{recipe}"
        run_dir = self.folder / setting / "run"
        if setting not in self._seconds:
            run_dir.parent.mkdir()
            args = [*self.settings(schedule, recipe), "trainer.resume=auto"]
            attempt = Attempt(run_dir, self.folder / setting / "log", args)
            calls = _Calls(attempt, num_ranks(schedule))
            code = attempt.watch(calls.look, BOUND_S["processes"])
            assert code == 0, attempt.said
            assert not left_behind(LEFT_S)
            self._seconds[setting] = calls.seconds
        return run_dir, self._seconds[setting]

    def run(self, seed: int) -> dict[str, Any]:
        """Run a case; gives its line of JSON."""
        case = draw(seed)
        whole, seconds = self.whole(case.schedule, case.recipe)
        disk = Disk(self.folder / f"case_{seed}")
        temporary, begun = _temporary(), time.monotonic()
        settings = self.settings(case.schedule, case.recipe, case.cluster)
        under = _UnderFaults(case, disk, seconds, settings)
        try:
            under.run()
            if not under.wrong:
                under.wrong += differences(whole, disk.run_dir, case, self.folder)
            if under.killed:
                remove_later()
            if left := _temporary() - temporary:
                under.wrong.append(f"left in the temporary folder: {', '.join(sorted(left))}")
            if under.wrong and self.keep and disk.run_dir.exists():
                shutil.copytree(disk.run_dir, self.keep / f"{seed}", dirs_exist_ok=True)
            line = self._line(case, under, time.monotonic() - begun)
        finally:
            disk.close()
        return line

    @staticmethod
    def _line(case: Case, under: "_UnderFaults", seconds: float) -> dict[str, Any]:
        return {
            "seed": case.seed, "cluster": case.cluster, "setting": case.setting,
            "restarts": case.restarts, "background": case.background,
            "faults": [{**asdict(fault), "kind": fault.kind.name} for fault in case.faults],
            "struck": [struck.line() for struck in under.struck], "ends": under.ends,
            "wrong": under.wrong, "restarted": under.restarted, "seconds": round(seconds, 1),
        }  # fmt: skip


class _Calls:
    """Notes the most seconds that ranks are seen in a call, by its name."""

    def __init__(self, attempt: Attempt, ranks: int) -> None:
        self.attempt, self.ranks = attempt, range(ranks)
        self.seconds: dict[str, float] = {}

    def look(self) -> None:
        for rank in self.ranks:
            call, activity = self.attempt.call(rank), self.attempt.activity(rank)
            since = self.attempt.begun if activity is None else activity.since
            if call != ENDED:
                longest = self.seconds.get(call, 0.0)
                self.seconds[call] = max(longest, time.monotonic() - since)


@dataclass(slots=True)
class Struck:
    """A fault that has struck: what it hit, and what its rank was in, after how many steps."""

    fault: Fault
    hit: str
    call: str
    activity: str
    steps: int

    def line(self) -> dict[str, Any]:
        """Its part of a line of JSON."""
        return {**asdict(self), "fault": self.fault.kind.name, "rank": self.fault.rank}


class _UnderFaults:
    """A run whose faults strike one after the other; the command is given until it succeeds."""

    def __init__(
        self, case: Case, disk: Disk, seconds: dict[str, float], settings: list[str]
    ) -> None:
        self.case, self.disk, self.seconds = case, disk, seconds
        self.args = [*settings, *case.overrides]
        self.left = list(case.faults)
        self.struck: list[Struck] = []
        self.ends: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.killed = False  # the driver or the raylet, either of which removes what they made
        self._stopped: list[int] = []
        self._since: dict[Fault, int] = {}

    def run(self) -> None:
        """Give the command until it has ended with success, or something is wrong.

        Where the only checkpoint is damaged, a run is refused; then the damage is undone.
        """
        damaged: Damage | None = None
        for number in range(2 * len(self.case.faults) + 1):
            log = self.disk.place.with_suffix(f".{number}.log")
            attempt = Attempt(self.disk.run_dir, log, self.args)
            here: list[Struck] = []
            bound_s = BOUND_S[self.case.cluster]
            code = attempt.watch(lambda of=attempt, here=here: self._look(of, here), bound_s)
            if code != -signal.SIGKILL:  # it had ended before it could be killed
                here = [struck for struck in here if struck.fault.kind not in ENDS_DRIVER]
            self.struck += here
            refused = damaged is not None and damaged.is_only
            self._check_end(attempt, code, {struck.fault.kind for struck in here}, refused)
            self.disk.mend()
            if code == 0 or self.wrong:
                return
            if damaged is not None and refused:
                damaged.undo()
            damaged = None
            for struck in (x for x in here if x.fault.kind in OF_FILES):
                damaged = damage(struck.fault, self.disk.run_dir)
                struck.hit = NOTHING if damaged is None else f"{damaged.file}, {damaged.at}"
        self.wrong.append("did not succeed")

    def _check_end(
        self, attempt: Attempt, code: int | None, kinds: set[Kind], refused: bool
    ) -> None:
        """Note what is wrong with how a process of the command has ended under such faults."""
        said = attempt.said.strip().splitlines() or [""]
        self.ends.append({"code": code, "line": said[-1][:300]})
        wrong = []
        if code is None:
            states = attempt.states(num_ranks(self.case.schedule))
            wrong.append(f"has not ended: {states}")
            attempt.process.kill()
        elif code not in (allowed := _codes(kinds, self.case, refused)):
            wrong.append(f"exit code {code}, wanted one of {sorted(allowed)}")
        if "Traceback" in attempt.said:
            wrong.append("a traceback")
        elif code in (1, 2) and not said[-1].startswith("hybridrl: "):
            wrong.append("no line says why")
        killed = code == -signal.SIGKILL or Kind.KILL_RAYLET in kinds
        self.killed |= killed
        within_s = LEFT_OF_RAY_S if killed and self.case.cluster == "local" else LEFT_S
        wrong += [f"left behind: {line}" for line in left_behind(within_s)]
        if wrong:
            self.wrong += [*wrong, attempt.said[-4000:]]

    @property
    def restarted(self) -> int:
        """The restarts within the run that its last records have."""
        file = self.disk.run_dir / "events.jsonl"
        return sum(x["kind"] == "restart" for x in read_lines(file)) if file.exists() else 0

    def _look(self, attempt: Attempt, here: list[Struck]) -> None:
        """Strike a fault that is due, if there is one, within this process of the command.

        Nothing strikes whoever is to end a stopped rank, nor a driver that has been killed.
        """
        over = not self.left or any(struck.fault.kind in ENDS_DRIVER for struck in here)
        if over or any(map(is_stopped, self._stopped)):
            return
        steps = attempt.records.steps()
        for fault in self.left:
            since = self._since.setdefault(fault, steps)
            if fault.is_due(steps, since, attempt.call(fault.rank)):
                return self._strike(fault, attempt, here, steps)

    def _strike(self, fault: Fault, attempt: Attempt, here: list[Struck], steps: int) -> None:
        """Strike, once the part of the call's time that the fault has drawn is over."""
        time.sleep(fault.delay * self.seconds.get(fault.call, 0.0))
        call, activity = attempt.call(fault.rank), attempt.activity(fault.rank)
        if attempt.process.exitcode is not None:
            return
        self.left.remove(fault)
        if hit := strike(fault, attempt.process.pid, self.disk):
            here.append(Struck(fault, hit, call, str(activity or call), steps))
            if fault.kind is Kind.STOP_RANK and activity is not None:
                self._stopped.append(activity.pid)


def _codes(kinds: set[Kind], case: Case, refused: bool) -> set[int]:
    """The exit codes that a process of the command may have under the faults that struck it."""
    codes = {2} if refused else {0}
    if kinds & {*ENDS_DRIVER}:
        codes |= {-9}
    ends = not case.restarts or Kind.TERMINATE in kinds  # no rank starts anew once a run is to end
    if kinds & {*OF_RANKS} and ends:
        codes |= {1}
    if Kind.KILL_RAYLET in kinds:
        codes |= {1}
    if kinds & {*OF_DISK}:
        codes |= {1, 2}
    if Kind.TERMINATE in kinds:
        codes |= {143}
    return codes


def remove_later() -> None:
    """Remove what a run that starts a minute later would: the folders that killed ones have left.

    A driver that starts Ray has one, for Ray's sockets and logs.
    """
    place = Path(tempfile.gettempdir())
    for folder in place.glob("hrl*"):
        os.utime(folder, (0, 0))
    remove_abandoned(place, "hrl", lambda left: kill_marked(str(left)))


def _temporary() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}
