"""What conversations cost the driver, what their waits hide, and what a hung environment costs.

- `driver_s`: CPU seconds of the driver's process a turn, in emulated runs (docs/emulated.md) with
  conversations and without, and in a pool of real environments. The emulated ranks are in the same
  process: what they take counts, too.
- `hidden_planned`, `hidden_emulated`: the share of the forward passes' seconds that no step is
  longer for, since others decode or all wait. In virtual time (`hybridrl plan schedule`), and in an
  emulated run, whose driver is the real one.
- `hung_s`: seconds that all episodes of a process take where one of them hangs for ever. It is
  ended at its limit, and a new process starts.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridrl.config import Config, EnvironmentConfig, ScheduleKind, compose
from hybridrl.config.environment import EnvironmentKind
from hybridrl.driver import train as runs
from hybridrl.environments import EpisodePool, EpisodeTask, ModelTurn
from hybridrl.plan import schedule, schedule_command
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.trace import TraceSpan, is_rank, read_timeline

EMULATED = (
    "cluster=emulated", "cluster.ranks=4",
    "cluster.time_scale=0.001", "trainer.steps=4", "trainer.prompts_per_step=16",
    "recipe.group_size=4", "rollout.max_new_tokens=1000", "rollout.max_running=64",
    "telemetry.progress=false", "telemetry.loggers=[]", "telemetry.report=false",
)  # fmt: skip
LENGTHS = "lognormal:median=128,sigma=0.5"
"""Lengths of responses whose passes are to be hidden."""
LIMIT_S = 2.0
"""Time limit of a turn."""
WALK = Path(__file__).with_name("walk.py")


def driver_s(turns: int) -> float:
    """CPU seconds a turn: of schedule and executor, and of environments that answer at once."""
    return _executor_s(turns) + _pool_s(turns)


def _executor_s(turns: int) -> float:
    """CPU seconds a turn of runs with so many turns, eight at least, over those of one turn.

    The quicker one of two runs each counts.
    """
    turns = max(turns, 8)  # else the noise of two runs is all that there is
    spent, num_turns = {1: math.inf, turns: math.inf}, {}
    for index, number in enumerate((1, turns, 1, turns, 1)):
        with tempfile.TemporaryDirectory() as folder:
            setting = f'cluster.turns="turns={number},reply=16,wait=0.2"'
            config: Config = compose.check([*EMULATED, setting, f"run.dir={folder}"])
            start = time.process_time()
            runs.train(config)
            if index:  # the first one pays for imports
                spent[number] = min(spent[number], time.process_time() - start)
            lines = list(read_lines(Path(folder) / "metrics.jsonl"))
            num_turns[number] = sum(line["environment/turns"] for line in lines)
    return (spent[turns] - spent[1]) / (num_turns[turns] - num_turns[1])


def _waits(turns: int) -> str:
    return f"turns={turns},reply=16,wait=0.5,sigma=1"


def hidden_planned(turns: int) -> float:
    """In virtual time: 64 conversations a step on four instances, under `fused`."""
    shape = ("--instances=4", "--prompts=16", "--group-size=4", "--steps=4")
    arguments = [f"--lengths={LENGTHS}", f"--turns={_waits(turns)}", *shape]
    setting, _ = schedule_command.read_setting(arguments)
    (fused,) = (one for one in setting.schedules if one.kind is ScheduleKind.fused)
    return schedule.replay(setting, fused).hidden


def hidden_emulated(turns: int, scale: float = 0.1) -> float:
    """The hidden share in an emulated run, whose times are `scale` of those planned."""
    settings = (
        "schedule=fused", "recipe.kl_coef=0.1", f"cluster.time_scale={scale}",
        f'cluster.lengths="{LENGTHS}"', f'cluster.turns="{_waits(turns)}"',
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config: Config = compose.check([*EMULATED, *settings, f"run.dir={folder}"])
        runs.train(config)
        spans, _ = read_timeline(Path(folder) / "trace.json")
    steps = {span.step for span in spans if span.step > 1}
    of_steps = [[s for s in spans if s.step == step and is_rank(s.lane)] for step in steps]
    passes, hidden = map(sum, zip(*map(_passes_s, of_steps), strict=True))
    return hidden / passes


def _passes_s(spans: Sequence[TraceSpan]) -> tuple[float, float]:
    """Seconds of a step's forward passes, and those of them before all have decoded."""
    decoded = max(s.end for s in spans if s.name == "generate")
    passes = [s for s in spans if s.name == "reference_log_probs"]
    hidden = (max(0.0, min(s.end, decoded) - s.start) for s in passes)
    return sum(s.end - s.start for s in passes), sum(hidden)


def start_s() -> float:
    """Wall seconds until a process of environments answers."""
    start = time.perf_counter()
    pool = _pool(1)
    try:
        pool.start((-1,), _task()).result()
        return time.perf_counter() - start
    finally:
        pool.close()


def _pool_s(turns: int, episodes: int = 64) -> float:
    pool = _pool(turns)
    try:
        pool.start((-1,), _task()).result()  # the processes are there
        start = time.process_time()
        for number in range(episodes):
            pool.start((number,), _task()).result()
            for _ in range(turns):
                pool.turn((number,), ModelTurn("go")).result()
        return (time.process_time() - start) / (episodes * turns)
    finally:
        pool.close()


def hung_s(hangs: bool, episodes: int = 32, turns: int = 4) -> float:
    """Wall seconds of episodes in one process, whose first one hangs in its second turn."""
    pool = _pool(turns)
    try:
        pool.start((-1,), _task()).result()
        start = time.perf_counter()
        starts = [pool.start((number,), _task()) for number in range(episodes)]
        for started in starts:
            started.result()
        for turn in range(turns):
            texts = ["hang" if hangs and turn == 1 and n == 0 else "go" for n in range(episodes)]
            alive = [n for n in range(episodes) if n or turn < 2 or not hangs]
            for step in [pool.turn((n,), ModelTurn(texts[n])) for n in alive]:
                step.result()
        return time.perf_counter() - start
    finally:
        pool.close()


def _pool(turns: int) -> EpisodePool:
    config = EnvironmentConfig(
        kind=EnvironmentKind.function,
        path=f"{WALK}:walk",
        max_turns=turns + 1,
        turn_timeout_s=LIMIT_S,
        num_processes=1,
    )
    config.resolve(1000)
    return EpisodePool(config)


def _task() -> EpisodeTask:
    return EpisodeTask(({"role": "user", "content": "?"},), {"question": "?"}, source="s")
