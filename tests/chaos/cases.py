"""What a seed is: a small run with its settings, and the faults that strike it, each at a moment.

A moment is a call that a rank is in, after so many steps, and a part of the seconds that such a
call takes. So a seed strikes about the same place again, on machines of any speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random

CASES = 300
"""The seeds of a whole call, from 0 on."""
RAY_SEEDS = range(1000, 1030)
"""Seeds of a whole call whose runs each have a Ray cluster of their own, on this machine."""
STEPS, SAVE_EVERY, RESTARTS = 6, 2, 9
HANG_FLOOR_S = 5
STARTS, ENDED = "start", "ended"
"""The calls of a rank that has no record yet, and of one that has ended."""
PASSED = 2
"""Steps after which a fault strikes, though its moment was not seen."""
MOST = 2, 5
"""Faults that a case has at least and at most."""

SCHEDULES = {
    "serial": ["schedule=serial", "cluster.ranks=2"],
    "fused": ["schedule=fused", "schedule.migration_threshold=12", "cluster.ranks=2"],
    "partial": [
        "schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2",
        "cluster.ranks=2",
    ],
    "async": [
        "schedule=async", "schedule.max_staleness=2", "cluster.ranks=3", "cluster.pools.rollout=2",
    ],
}  # fmt: skip
TALK = Path(__file__).parents[1] / "talking.py"
RECIPES = {
    "grpo": ["recipe=grpo", "recipe.group_size=4", "recipe.kl_coef=0.05"],
    "ppo": [
        "recipe=ppo", "recipe.num_samples=4", "recipe.critic_warmup=4",
        "roles.critic.optim.lr=1e-2",
    ],
    "talk": [
        "recipe=grpo", "recipe.group_size=4", "recipe.skip_equal_groups=false",
        "environment=function", f"environment.path={TALK}:talk", "environment.max_turn_tokens=3",
        "environment.max_failed_share=1", "reward=environment",
    ],
}  # fmt: skip
"""`talk` is GRPO on conversations, some of which fail."""
SETTINGS = [
    *((schedule, recipe) for schedule in SCHEDULES for recipe in ("grpo", "ppo")),
    *((schedule, "talk") for schedule in ("serial", "fused")),
]


class Kind(Enum):
    """A fault."""

    KILL_RANK = "a rank is killed"
    STOP_RANK = "a rank is stopped"
    KILL_DRIVER = "the driver is killed"
    STOP_DRIVER = "the driver is stopped for 3 s"
    TERMINATE = "SIGTERM to the driver"
    KILL_SANDBOX = "a process of a judge or an environment is killed"
    KILL_RAYLET = "the raylet is killed"
    FULL_DISK = "the disk of the run directory is full"
    READ_ONLY = "the run directory becomes read-only"
    CUT_FILE = "the driver is killed, and a file of the newest checkpoint cut off"
    FLIP_BIT = "the driver is killed, and a bit of such a file flipped"
    TEAR_RECORD = "the driver is killed, and the last line of a record cut off"


OF_FILES = (Kind.CUT_FILE, Kind.FLIP_BIT, Kind.TEAR_RECORD)
NOTHING = "no checkpoint"
OF_RANKS = (Kind.KILL_RANK, Kind.STOP_RANK)
ENDS_DRIVER = (Kind.KILL_DRIVER, *OF_FILES)
OF_DISK = (Kind.FULL_DISK, Kind.READ_ONLY)
WEIGHTS = {
    Kind.KILL_RANK: 4, Kind.STOP_RANK: 1, Kind.KILL_DRIVER: 4, Kind.STOP_DRIVER: 1,
    Kind.TERMINATE: 1, Kind.KILL_SANDBOX: 2, Kind.FULL_DISK: 3, Kind.READ_ONLY: 2,
    Kind.CUT_FILE: 1, Kind.FLIP_BIT: 3, Kind.TEAR_RECORD: 2,
}  # fmt: skip
"""How often each is drawn: one that takes long is rare."""
RAY_WEIGHTS = {
    Kind.KILL_RANK: 4, Kind.STOP_RANK: 1, Kind.KILL_DRIVER: 3, Kind.TERMINATE: 1,
    Kind.KILL_SANDBOX: 2, Kind.KILL_RAYLET: 2,
}  # fmt: skip
"""What a case on Ray draws from; files and disks stay as they are without it."""

CALLS = {
    STARTS: (0, 0), "listen": (0, 0), "setup": (0, 0), "begin": (0, 0), "": (0, STEPS),
    "enter": (0, STEPS), "advance": (0, STEPS), "infer": (0, STEPS - 1), "compute": (0, STEPS - 1),
    "update": (0, STEPS - 1), "push": (0, STEPS - 1), "digest_weights": (0, STEPS),
    "digest_samples": (1, STEPS), "release": (0, STEPS), "save_weights": (1, STEPS),
    "save_state": (1, STEPS), "save_pending": (1, STEPS), "finish_save": (2, STEPS),
    "close": (STEPS, STEPS),
}  # fmt: skip
"""What ranks are in, "" between two calls, after how many steps at first and at last."""
NEVER = dict.fromkeys(SCHEDULES, ("push", "save_pending", "compute"))
NEVER |= {"partial": ("push", "compute"), "async": ("enter", "infer")}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and its moment: after `step` steps, when `rank` is in `call`, a while later.

    `delay` in [0, 1) is the part of the seconds that such a call takes at most. `share` in [0, 1)
    draws what else there is to draw: a file and a byte of it, bytes left free.
    """

    kind: Kind
    rank: int
    call: str
    step: int
    delay: float
    share: float

    def is_due(self, steps: int, since: int, call: str) -> bool:
        """Whether the rank, which is in `call`, is where the fault is to strike.

        A short call may be passed unseen: `PASSED` steps later than the moment, or than `since`,
        when the run was first looked at, it strikes wherever the rank is.
        """
        is_passed = steps >= max(self.step, since) + PASSED
        return steps >= self.step and (call == self.call or is_passed)


@dataclass(frozen=True, slots=True)
class Case:
    """A run and its faults, drawn from a seed."""

    seed: int
    cluster: str
    schedule: str
    recipe: str
    restarts: int
    background: bool
    faults: Sequence[Fault]

    @property
    def setting(self) -> str:
        """The name of the undisturbed run that this is to be equal to."""
        return f"{self.schedule}-{self.recipe}"

    @property
    def overrides(self) -> list[str]:
        """What differs from the undisturbed run."""
        return [
            f"cluster.restarts={self.restarts}", "trainer.resume=auto",
            f"cluster.hang_floor_s={HANG_FLOOR_S}",
            f"trainer.save_in_background={str(self.background).lower()}",
        ]  # fmt: skip


def num_ranks(schedule: str) -> int:
    """How many ranks its runs have."""
    (ranks,) = (x for x in SCHEDULES[schedule] if x.startswith("cluster.ranks="))
    return int(ranks.partition("=")[2])


def draw(seed: int) -> Case:
    """The case of a seed."""
    random, (schedule, recipe) = Random(seed), SETTINGS[seed % len(SETTINGS)]
    on_ray = seed >= RAY_SEEDS.start
    cluster, weights = ("local", RAY_WEIGHTS) if on_ray else ("processes", WEIGHTS)
    restarts, background = random.choice((0, RESTARTS)), random.random() < 0.5
    faults = [draw_fault(random, schedule, weights) for _ in range(random.randint(*MOST))]
    return Case(seed, cluster, schedule, recipe, restarts, background, faults)


def draw_fault(random: Random, schedule: str, weights: Mapping[Kind, int]) -> Fault:
    """A fault of a random kind, at any call of any rank, at any of its steps."""
    (kind,) = random.choices([*weights], [*weights.values()])
    rank = random.randrange(num_ranks(schedule))
    call = random.choice([call for call in CALLS if call not in NEVER[schedule]])
    step = random.randint(*CALLS[call])
    return Fault(kind, rank, call, step, random.random(), random.random())
