"""The settings of `make bench-async`: devices, models, lengths, and the sides of each case."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tail_cases import EARLY, long_tailed

from hybridrl.flow.workload import Shape, read_workload

RARE, TIMES = 100, 15
_FILED = 32  # steps of such lengths

SHARED: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "early": ("schedule=fused", *EARLY),
    "partial": ("schedule=partial", "schedule.max_staleness=1"),
}


COMPLETE = "schedule.batches=as_complete"


def _flight(max_staleness: int, parked_kv: str) -> tuple[str, ...]:
    return (
        "schedule=async",
        f"schedule.max_staleness={max_staleness}",
        "schedule.new_weights=in_flight",
        f"schedule.parked_kv={parked_kv}",
    )


SEPARATE: dict[str, tuple[str, ...]] = {
    "periodic": ("schedule=periodic",),
    "one_step": ("schedule=one_step",),
    **{f"flight_{most}": _flight(most, "recompute") for most in (1, 2, 4)},
    **{f"flight_{most}_keep": _flight(most, "keep") for most in (1, 2, 4)},
    **{f"complete_{most}": (*_flight(most, "recompute"), COMPLETE) for most in (1, 2, 4)},
    "complete_2_free": ("schedule=async", "schedule.max_staleness=2", COMPLETE),
}
"""Sides whose instances have ranks of their own: a line is a side, with its best split."""
SIDES = {**SHARED, **SEPARATE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A device, a model and what a step generates.

    `costs` is a roofline's text, `wall_s` the wall time of a step of the quickest side, and
    `splits` are the numbers of instances that may have ranks of their own. With `rare` one group in
    `RARE` is `TIMES` as long. `turns` makes the responses conversations, as `cluster.turns` has it.
    The best split is that of at least `split_steps` planned steps: with few, chance chooses.
    """

    name: str
    costs: str
    ranks: int
    instance: int = 4
    prompts: int
    group: int
    limit: int
    lengths: str
    rare: bool = False
    prompt_tokens: int = 256
    turns: str | None = None
    sides: tuple[str, ...] = tuple(SIDES)
    steps: int = 6
    wall_s: float = 6.0
    splits: tuple[int, ...]
    split_steps: int = 20

    def settings(self, folder: Path) -> tuple[str, ...]:
        """The settings that all sides share. An instance makes at least 32 calls for a response.

        Lengths that no distribution has are in a file of the folder.
        """
        turns = () if self.turns is None else (f'cluster.turns="{self.turns}"',)
        lengths = self._write(folder / "lengths.jsonl") if self.rare else self.lengths
        return (
            *turns,
            "recipe.skip_equal_groups=false",
            f'cluster.costs="{self.costs}"',
            f'cluster.lengths="{lengths}"',
            f"cluster.prompt_tokens={self.prompt_tokens}",
            f"cluster.ranks={self.ranks}",
            f"rollout.layout.tp={self.instance}",
            f"rollout.max_new_tokens={self.limit}",
            f"rollout.decode_steps={max(16, self.limit // 32)}",
            f"trainer.prompts_per_step={self.prompts}",
            f"recipe.group_size={self.group}",
        )

    def _write(self, file: Path) -> str:
        """Write lengths of which one group in `RARE` is `TIMES` as long; gives the file's name."""
        shape = Shape(prompts_per_step=self.prompts, group_size=self.group, num_steps=_FILED)
        groups = read_workload(self.lengths, shape).groups[: _FILED * self.prompts]
        lengths = [
            [n * (TIMES if number % RARE == RARE // 2 else 1) for n in group.lengths]
            for number, group in enumerate(groups)
        ]
        steps = [lengths[k : k + self.prompts] for k in range(0, len(lengths), self.prompts)]
        rows = ({"lengths": [n for group in step for n in group]} for step in steps)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(file)


def _7b_32(name: str, costs: str) -> Case:
    """64 prompts of 8 samples, at most 16k tokens: the lengths of `make bench-tail`."""
    return Case(
        name=name,
        costs=costs,
        ranks=32,
        prompts=64,
        group=8,
        limit=16_384,
        lengths=long_tailed(16_384, 0.5),
        splits=tuple(range(1, 8)),
    )


CASES = (
    _7b_32("7b_32", "gpu:model=7b"),
    _7b_32("7b_32_train6", "gpu:model=7b,train_times=6"),
    Case(
        name="8b_32",
        costs="gpu:model=8b",
        ranks=32,
        prompts=128,
        group=16,
        limit=2048,
        lengths="lognormal:median=400,sigma=0.99,max=2048,alike=0.5",
        splits=(3, 4, 5, 6),
        split_steps=4,
        # The driver takes a fifth of a millisecond a sample, and here are four times as many.
        steps=3,
        wall_s=8.0,
    ),
    replace(
        _7b_32("7b_32_turns", "gpu:model=7b"),
        lengths=long_tailed(8192, 0.5),
        turns="turns=8,reply=128,wait=20",
        # Planning takes minutes: calls end with turns.
        sides=("serial", "partial", "one_step", "flight_1", "flight_2", "flight_4"),
        splits=(5, 6, 7),
        split_steps=1,
    ),
    replace(
        _7b_32("7b_32_rare", "gpu:model=7b"),
        lengths="lognormal:median=400,sigma=0.4,max=1024,alike=0.5",
        rare=True,
        steps=30,
        split_steps=40,
    ),
    Case(
        name="7b_256",
        costs="gpu:model=7b",
        ranks=256,
        prompts=256,
        group=8,
        limit=16_384,
        lengths=long_tailed(16_384, 0.5),
        sides=("serial", "one_step", "flight_1", "flight_2", "flight_4"),
        steps=4,
        wall_s=12.0,
        splits=(40, 48, 56),
        split_steps=5,
    ),
    # Steps of 100 s on 1,024 GPUs: what the driver adds.
    Case(
        name="7b_1024",
        costs="gpu:model=7b",
        ranks=1024,
        prompts=1024,
        group=8,
        limit=16_384,
        lengths=long_tailed(16_384, 0.5),
        sides=("one_step",),
        steps=2,
        wall_s=45.0,
        splits=(192, 224),
    ),
)
