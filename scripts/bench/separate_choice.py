"""Whether `hybridrl plan auto` chooses ranks that generate alone where emulated steps say so.

The rule: where their step is shorter by 3 percent or more than that of shared ranks. Each case of
`separate_cases.py` is planned from its model, lengths and cluster, with layouts that `plan auto`
chooses itself. A line is a case and a staleness; its value is the planned step over the best on
shared ranks. `emulated_ratio` is the same ratio of the steps in `docs/figures/async.json`, which
`make bench-async` has kept: the quickest side of separate ranks whose batches are in order over
the quickest on shared ranks whose batches are those of `serial`.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lines import show
from separate_cases import CASES, Case

from hybridrl.costs.mapping import ACTOR
from hybridrl.costs.roofline import Roofline
from hybridrl.plan import mapping_command
from hybridrl.plan.mapping_split import GAIN
from hybridrl.workers.emulation import llama_config

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "async.json"
NODE = 8
SHARED = ("serial", "early")
SEPARATE = {
    0: ("periodic",),
    1: ("one_step", "flight_1", "flight_1_keep"),
    2: ("flight_2", "flight_2_keep"),
    4: ("flight_4", "flight_4_keep"),
}
"""Sides by the staleness that `plan auto` is asked for."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, and plan each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_name = {case.name: case for case in CASES if case.turns is None}  # it knows no waits
    parser.add_argument("--cases", nargs="*", choices=by_name, default=list(by_name))
    parser.add_argument("--seconds", type=int, default=60, help="of each search, at most")
    args = parser.parse_args(argv)
    figures = json.loads(FIGURES.read_text())["figures"]
    emulated = {line["name"]: line["value"] for line in figures if "value" in line}
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            compare(by_name[name], Path(folder), args.seconds, emulated)


def compare(case: Case, folder: Path, seconds: int, emulated: dict[str, float]) -> None:
    """The choice for each staleness that the case has emulated steps of."""
    steps = {side: emulated.get(f"async_{case.name}_{side}") for side in case.sides}
    shared_s = least(steps, SHARED)
    if shared_s is None:
        return
    quickest = {most: least(steps, sides) for most, sides in SEPARATE.items()}
    separate = {most: step_s for most, step_s in quickest.items() if step_s is not None}
    started = time.perf_counter()
    args = planned(case, folder)
    report = mapping_command.run([*args, f"--max-staleness={','.join(map(str, separate))}",
                                  "--number=1", f"--seconds={seconds}"])  # fmt: skip
    took_s = time.perf_counter() - started
    assert report.shared_s is not None
    for (most, step_s), why in zip(separate.items(), report.separate, strict=True):
        planned_s = report.separate_s.get(most)
        if planned_s is None:
            sys.exit(f"{case.name}: {why}")
        planned_ratio, ratio = planned_s / report.shared_s, step_s / shared_s
        chosen, wins = planned_ratio <= 1 - GAIN, ratio <= 1 - GAIN
        show({
            "name": f"async_choice_{case.name}_{most}",
            "value": round(planned_ratio, 3),
            "unit": "planned step over the best on shared ranks",
            "better": "lower",
            "emulated": False,
            "planned_s": round(planned_s, 2),
            "planned_shared_s": round(report.shared_s, 2),
            "emulated_ratio": round(ratio, 3),
            "chosen": chosen,
            "wins_emulated": wins,
            "agrees": chosen == wins,
            "took": round(took_s, 1),
        })  # fmt: skip


def least(steps: dict[str, float | None], sides: Sequence[str]) -> float | None:
    """The least emulated step of the sides that were run; None without any."""
    return min((s for side in sides if (s := steps.get(side)) is not None), default=None)


def planned(case: Case, folder: Path) -> list[str]:
    """The arguments of `plan auto` for a case. Updates that take longer are as many epochs."""
    named = Roofline.of(case.costs)
    config = llama_config(named.trained[ACTOR], case.limit + case.prompt_tokens)
    (folder / "config.json").write_text(json.dumps(config))
    settings = case.settings(folder)
    lengths = next(x for x in settings if x.startswith("cluster.lengths="))
    own = [x for x in settings if not x.startswith(("cluster.", "rollout.layout"))]
    return [
        "recipe=grpo",
        "cluster.device=cuda",
        "model.compute_dtype=bfloat16",
        f"model.path={folder}",
        f"data.max_prompt_tokens={case.prompt_tokens}",
        f"trainer.epochs={named.train_times}",
        *own,
        f"--lengths={lengths.partition('=')[2].strip(chr(34))}",
        f"--nodes={case.ranks // NODE}",
        f"--gpus-per-node={NODE}",
    ]


if __name__ == "__main__":
    main()
