"""`hybridrl plan schedule`: its arguments, and what it prints."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from hybridrl.config import ConfigError
from hybridrl.planner.accelerators import read_roofline, samples_held
from hybridrl.planner.schedule import Outcome, Setting, lower_bound, read_costs
from hybridrl.planner.workload import LENGTHS, Shape, Workload, read_workload

USAGE = f"""usage: hybridrl plan schedule --lengths=... [--costs=...] [OPTIONS]
       hybridrl plan schedule --paper

Replays response lengths under every schedule, in virtual time.

  --lengths          {LENGTHS}
  --costs            a run's directory, FILE.json of its costs.json's form, or
                     gpu:model=13b,critic=33b,gpu=h100,gpus=8,total=64 (a roofline)
                     (default: those of the run; else gpu:model=8b)
  the step           --prompts, --group-size, --steps, --prompt-tokens, --max-tokens
  the machines       --instances, --max-held, --decode-steps, --chunk-tokens, --verifier-s
  schedule=partial   --over-provision, --max-staleness
  --paper            RLHFuse's setting instead, beside its published figures

  hybridrl plan schedule --lengths=outputs/run
  hybridrl plan schedule --lengths=lmsys --costs=gpu:model=33b,critic=13b,total=256"""

_COUNTS = ("prompts", "group_size", "steps", "prompt_tokens", "max_tokens")
_MACHINES = ("instances", "max_held", "decode_steps", "chunk_tokens")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Argparse's own error is several lines."""
        raise ConfigError("plan schedule", message, "--lengths=..., see hybridrl plan --help")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a recorded run took: seconds a step, on average without the first, and how many."""

    step_s: float
    num_steps: int


def read_setting(args: Sequence[str]) -> tuple[Setting, Measured | None]:
    """What the arguments ask for, and what a run that they name took. Raises `ConfigError`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--costs")
    for name in (*_COUNTS, *_MACHINES, "max_staleness"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("verifier_s", "over_provision"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    given = vars(parser.parse_args(list(args)))
    _check(given)
    shape = Shape(
        prompts_per_step=given["prompts"],
        group_size=given["group_size"],
        num_steps=given["steps"],
        prompt_tokens=given["prompt_tokens"],
        max_tokens=given["max_tokens"],
    )
    workload = read_workload(given["lengths"], shape)
    run = Path(given["lengths"])
    facts = _facts(given["costs"], run, workload) | {
        "num_instances" if name == "instances" else name: given[name]
        for name in (*_MACHINES, "verifier_s", "over_provision", "max_staleness")
        if given[name] is not None
    }
    if "num_instances" not in facts:
        raise ConfigError("--instances", "", "how many, since the costs do not say")
    group_size = given["group_size"] or workload.group_size
    setting = Setting(**facts, workload=workload, group_size=group_size)
    if setting.over_provision > 1 + setting.max_staleness:
        allowed = f"1 to 1 + --max-staleness={setting.max_staleness}"
        raise ConfigError("--over-provision", setting.over_provision, allowed)
    return setting, _measured(run)


def _check(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is None or isinstance(value, str):
            continue
        least = 0 if name in ("verifier_s", "max_staleness", "prompt_tokens") else 1
        if not least <= value < 2**31:
            raise ConfigError(f"--{name.replace('_', '-')}", value, f"{least} or more")


def _facts(text: str | None, run: Path, workload: Workload) -> dict[str, Any]:
    """Costs and machines: those named, those of the run, or a roofline's."""
    if text is None and (run / "costs.json").is_file():
        return read_costs(run)
    text = text or "gpu:model=8b"
    if not text.startswith("gpu:"):
        return read_costs(Path(text))
    costs, num_instances, actor, accelerator, gpus = read_roofline(text)
    longest = max(g.prompt_tokens + max(g.lengths) for g in workload.groups)
    held = samples_held(actor, accelerator, gpus, longest)
    if held < 1:
        allowed = f"accelerators that hold the weights and {longest} tokens of cache"
        raise ConfigError("--costs", text, allowed)
    return {"costs": costs, "num_instances": num_instances, "max_held": min(256, held)}


def _measured(run: Path) -> Measured | None:
    """Seconds of the run's RL steps, the first one left out as in what is simulated."""
    try:
        found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    seconds = [row["step_s"] for row in found if row.get("phase") == "rl" and "step_s" in row]
    steady = seconds[1:] or seconds
    return Measured(fmean(steady), len(steady)) if steady else None


def table(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A header and a line a schedule; the first outcome is what the others are compared with."""
    head = ("schedule", "threshold", "step s", "generation and inference s", "of serial")
    lines: list[tuple[str, ...]] = [(*head, "bubbles", "migrated", "off-policy")]
    for one in outcomes:
        lines.append(
            (
                one.schedule,
                "" if one.threshold is None else str(one.threshold),
                f"{one.step_s:.4g}",
                f"{one.front_s:.4g}",
                f"{one.front_s / outcomes[0].front_s:.3f}",
                f"{one.bubbles:.1%}",
                f"{one.migrated:.4g}",
                f"{one.off_policy:.1%}",
            )
        )
    return lines


def remarks(setting: Setting, measured: Measured | None) -> list[str]:
    """What to read below the table."""
    lengths = sorted(n for group in setting.workload.groups for n in group.lengths)
    found = [lengths[min(len(lengths) - 1, len(lengths) * p // 100)] for p in (50, 90, 99)]
    lines = [
        f"{setting.workload.prompts_per_step} prompts x {setting.group_size} samples a step on "
        f"{setting.num_instances} instances; response tokens p50 / p90 / p99 / max = "
        f"{' / '.join(map(str, (*found, lengths[-1])))}",
        f"generation and inference take at least {lower_bound(setting):.4g} s",
    ]
    if measured:
        lines.append(f"the run took {measured.step_s:.4g} s a step over {measured.num_steps} steps")
    return lines


def record(
    setting: Setting, outcomes: Sequence[Outcome], measured: Measured | None
) -> dict[str, Any]:
    """All of it for a program."""
    best = min((o for o in outcomes if o.threshold is not None), key=lambda o: o.front_s)
    return {
        "num_instances": setting.num_instances,
        "prompts_per_step": setting.workload.prompts_per_step,
        "group_size": setting.group_size,
        "num_steps": setting.workload.num_steps,
        "costs": setting.costs.to_json(),
        "bound_s": lower_bound(setting),
        "best_threshold": best.threshold,
        "schedules": [asdict(outcome) for outcome in outcomes],
        "measured": asdict(measured) if measured else None,
    }
