"""`hybridrl plan schedule`: its arguments and its output."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from hybridrl.config import SPECULATED, ConfigError, ScheduleConfig
from hybridrl.config.schedule import SCHEDULES
from hybridrl.costs.mapping import ACTOR
from hybridrl.costs.push import PushCosts, push_costs
from hybridrl.costs.roofline import Roofline
from hybridrl.flow.conversations import TURNS, read_conversations
from hybridrl.flow.workload import (
    LENGTHS,
    Shape,
    Workload,
    known_guesses,
    read_costs,
    read_workload,
)
from hybridrl.plan.options import option_name, read_options
from hybridrl.plan.schedule import (
    Outcome,
    Setting,
    lower_bound,
    what_if,
)
from hybridrl.plan.separate import best_splits

USAGE = f"""usage: hybridrl plan schedule --lengths=... [--costs=...] [OPTIONS]

Replays response lengths under every schedule, in virtual time.

  --lengths          {LENGTHS}
  --costs            a run's directory, FILE.json of its costs.json's form, or
                     gpu:model=13b,critic=33b,gpu=h100,gpus=8,total=64 (a roofline)
                     (default: those of the run; else gpu:model=8b)
  the step           --prompts, --group-size, --steps, --prompt-tokens, --max-tokens
  the machines       --instances, --max-held, --decode-steps, --chunk-tokens, --verifier-s
  conversations      --turns={TURNS}
                     lengths are then the model's own tokens
  separate ranks     --rollout=auto or a number of ranks that generate and do not train
  speculation        --speculate=auto or a number of tokens, with accept=P in --lengths
  schedule=partial   --over-provision, --max-staleness

  hybridrl plan schedule --lengths=outputs/run
  hybridrl plan schedule --lengths=lmsys --costs=gpu:model=33b,critic=13b,total=256"""

OnProgress = Callable[[int, int], None]
Printed = tuple[list[tuple[str, ...]], list[str], dict[str, Any]]

_NUMBERS = {
    "prompts": 1,
    "group_size": 1,
    "steps": 1,
    "prompt_tokens": 0,
    "max_tokens": 1,
    "instances": 1,
    "max_held": 1,
    "decode_steps": 1,
    "chunk_tokens": 1,
    "max_staleness": 1,
    "over_provision": 1.0,
    "verifier_s": 0.0,
}
_TEXTS = ("lengths", "costs", "turns", "speculate", "rollout")
_MACHINES = ("instances", "max_held", "decode_steps", "chunk_tokens", "verifier_s")
_SCHEDULE = ("over_provision", "max_staleness")  # settings of whichever schedule has them


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a recorded run: seconds of its median step, and the number of steps.

    The costs learned from a run are those of undisturbed calls, as the median is. A run of a few
    steps has learned none (`has_costs`). Those of `emulated` ranks are modeled.
    """

    step_s: float
    num_steps: int
    has_costs: bool
    emulated: bool


def run(args: Sequence[str], on_progress: OnProgress) -> Printed:
    """The table (a header, then lines), remarks below it, and all of it for a program.

    `on_progress` gets the replays done and their total. Raises `ConfigError`.
    """
    setting, measured = read_setting(args)
    outcomes = [*what_if(setting, on_progress), *best_splits(setting, on_progress)]
    results = setting, outcomes, measured
    return table(outcomes), remarks(*results), record(*results)


def read_setting(args: Sequence[str]) -> tuple[Setting, Measured | None]:
    """The setting of the arguments, and measurements of the run they name. Raises `ConfigError`."""
    options, unknown = read_options("schedule", args, _NUMBERS, _TEXTS, below=2**31)
    if unknown:
        allowed = ", ".join(map(option_name, (*_TEXTS, *_NUMBERS)))
        raise ConfigError("option", unknown[0], f"one of {allowed}")
    lengths, costs = options.get("lengths", ""), options.get("costs")
    shape = Shape(
        prompts_per_step=options.get("prompts"),
        group_size=options.get("group_size"),
        num_steps=options.get("steps"),
        prompt_tokens=options.get("prompt_tokens"),
        max_tokens=options.get("max_tokens"),
    )
    # workload and machines
    workload = read_workload(lengths, shape)
    run = Path(lengths)
    facts = _facts(costs, run, workload) | {
        "num_instances" if name == "instances" else name: options[name]
        for name in _MACHINES
        if name in options
    }
    if "num_instances" not in facts:
        raise ConfigError("--instances", "", "how many, since the costs do not say")
    settings = {name: options[name] for name in _SCHEDULE if name in options}
    shared = [entry for entry in SCHEDULES.values() if not entry.separate]
    schedules = tuple(_schedule(entry.settings, settings) for entry in shared)
    setting = Setting(
        **facts,
        schedules=schedules,
        workload=workload,
        group_size=options.get("group_size", workload.group_size),
        draft_tokens=_draft_tokens(options.get("speculate")),
        conversations=read_conversations(turns) if (turns := options.get("turns")) else None,
    )
    if "speculate" in options and setting.drafting is None:
        allowed = known_guesses("--lengths", "--costs")
        raise ConfigError("--speculate", options["speculate"], allowed)
    if "rollout" in options:
        setting = _with_splits(setting, options["rollout"], costs, run)
    pass_tokens = max(setting.max_held, SPECULATED)  # the engine's bound
    return replace(setting, pass_tokens=pass_tokens), _measured(run)


def _draft_tokens(text: str | None) -> int | None:
    """Guessed tokens a row and pass; None: as many as pay. Raises `ConfigError`."""
    if text is None or text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError("--speculate", text, "auto, or a number of tokens, 1 or more")
    return int(text)


_MOST_SPLITS = 16  # that `--rollout=auto` tries


def _with_splits(setting: Setting, text: str, costs: str | None, run: Path) -> Setting:
    """With the splits that `--rollout` asks for, in whole instances. Raises `ConfigError`."""
    measured = costs is None and (run / "costs.json").is_file()
    named = None
    if not measured and (costs is None or costs.startswith("gpu:")):
        named = Roofline.of(costs or "gpu:model=8b")
    size = 1 if named is None else named.gpus
    ranks, most = setting.num_instances * size, setting.num_instances - 1
    allowed = f"auto, or a multiple of {size} from {size} to {most * size}, of {ranks} ranks"
    if most < 1:
        raise ConfigError("--rollout", text, "two instances or more, of which one can train")
    if text == "auto":
        tried = sorted({max(1, round(most * i / _MOST_SPLITS)) for i in range(1, _MOST_SPLITS + 1)})
    elif text.isascii() and text.isdigit() and not int(text) % size:
        tried = [int(text) // size]
    else:
        raise ConfigError("--rollout", text, allowed)
    if not 1 <= tried[0] <= most:
        raise ConfigError("--rollout", text, allowed)
    if named is None:  # a switch moves about as much as a load
        splits = dict.fromkeys(tried, PushCosts(load_s=setting.costs.switch_s))
    else:
        splits = {
            instances: push_costs(
                named.weight_bytes,
                named.accelerator,
                train_ranks=ranks - instances * size,
                instance_ranks=size,
                instances=instances,
            )
            for instances in tried
        }
    return replace(setting, instance_ranks=size, splits=splits)


def _schedule(kind: type[ScheduleConfig], settings: dict[str, Any]) -> ScheduleConfig:
    """The schedule with those of the settings that it has. Raises `ConfigError` by the option."""
    own = {field.name for field in fields(kind)}
    schedule = kind(**{name: value for name, value in settings.items() if name in own})
    try:
        schedule.check()
    except ConfigError as error:
        option = option_name(error.key.removeprefix("schedule."))
        allowed = re.sub(r"schedule\.(\w+)", lambda key: option_name(key[1]), error.allowed)
        raise ConfigError(option, error.value, allowed) from None
    return schedule


def _facts(text: str | None, run: Path, workload: Workload) -> dict[str, Any]:
    """Costs and machines: those named, those of the run, or a roofline's.

    Widths of the tail are those that a run has measured, of a roofline the doublings that divide
    the actor's heads.
    """
    own = text is None and (run / "costs.json").is_file()
    text = text or "gpu:model=8b"
    if own or not text.startswith("gpu:"):
        facts = read_costs(run if own else Path(text))
        return facts | {"widths": tuple(sorted(facts["costs"].wide_step_s))}
    named = Roofline.of(text)
    num_instances, heads = named.instances, named.trained[ACTOR].heads
    doublings = [2**n for n in range(1, num_instances.bit_length()) if 2**n <= num_instances]
    widths = tuple(width for width in doublings if heads % (width * named.gpus) == 0)
    longest = max(g.prompt_tokens + max(g.lengths) for g in workload.groups)
    held = named.samples_held(longest)
    if held < 1:
        allowed = f"accelerators that hold the weights and {longest} tokens of cache"
        raise ConfigError("--costs", text, allowed)
    return {
        "costs": named.costs(widths),
        "num_instances": num_instances,
        "max_held": min(256, held),
        "widths": widths,
    }


def _measured(run: Path) -> Measured | None:
    """Seconds of the run's RL steps without the first, as in the simulation."""
    try:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    seconds = [row["step_s"] for row in rows if row.get("phase") == "rl" and "step_s" in row]
    steady = seconds[1:] or seconds
    has_costs = (run / "costs.json").is_file()
    emulated = any(row.get("emulated") for row in rows)
    return Measured(median(steady), len(steady), has_costs, emulated) if steady else None


def table(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A header and a line for each outcome: its step beside those of the plain schedules."""
    head = ("schedule", "step s", "x serial", "x fused", "front s", "idle", "off-policy")
    lines: list[tuple[str, ...]] = [head]
    serial = outcomes[0].step_s
    fused = next((o.step_s for o in outcomes if o.schedule == "fused" and not o.mechanisms), serial)
    for one in outcomes:
        lines.append(
            (
                one.schedule + f" + {one.mechanisms}" * bool(one.mechanisms),
                f"{one.step_s:.4g}",
                f"{serial / one.step_s:.2f}",
                f"{fused / one.step_s:.2f}",
                f"{one.front_s:.4g}",
                f"{one.bubbles:.1%}",
                f"{one.off_policy:.1%}",
            )
        )
    return lines


def _bound(setting: Setting) -> float:
    """A lower bound of the front's seconds, without guesses."""
    return lower_bound(replace(setting, costs=replace(setting.costs, drafting=None)))


def remarks(setting: Setting, outcomes: Sequence[Outcome], measured: Measured | None) -> list[str]:
    """Notes below the table."""
    lengths = sorted(n for group in setting.workload.groups for n in group.lengths)
    percentiles = [lengths[min(len(lengths) - 1, len(lengths) * p // 100)] for p in (50, 90, 99)]
    lines = [
        f"{setting.workload.prompts_per_step} prompts x {setting.group_size} samples a step on "
        f"{setting.num_instances} instances; response tokens p50 / p90 / p99 / max = "
        f"{' / '.join(map(str, (*percentiles, lengths[-1])))}",
        "front: generation and inference; on the prompts of serial it takes at least "
        f"{_bound(setting):.4g} s where nothing is guessed and no tail is wide",
        "x serial, x fused: how many times as fast a step is",
    ]
    if (model := setting.conversations) is not None:
        lines.append(
            f"conversations: up to {model.turns} turns; a reply has {model.reply_tokens:g} tokens "
            f"after {model.wait_s:g} s, on average"
        )
        plain = [outcome for outcome in outcomes if not outcome.mechanisms]
        shares = ", ".join(f"{one.schedule} {one.hidden:.0%}" for one in plain)
        lines.append(f"forward passes hidden behind decoding and waits: {shares}")
    if setting.drafting is None:
        lines.append("speculation: not shown; accept=P in --lengths is the share of right guesses")
    else:
        tokens = setting.drafting.tokens
        each = "as many tokens as pay" if tokens is None else f"{tokens} tokens"
        right = f"{setting.drafting.accept:.3g} of them right"
        lines.append(f"speculation: {each} a row and pass, {right}")
    if not setting.widths:
        unknown = "no run of these costs has decoded a tail on several instances as one"
        of_roofline = "no doubling of its tp divides the heads and is within a node"
        lines.append(f"wide tail: not shown; {unknown}, or, of a roofline, {of_roofline}")
    if measured:
        lines.append(
            f"the run took {measured.step_s:.4g} s a step, the median of {measured.num_steps}"
            + ", on emulated ranks" * measured.emulated
        )
        if not measured.has_costs:
            lines.append(
                "the run was too short to measure costs: these are of --costs, or of an 8b"
            )
    return lines


def record(
    setting: Setting, outcomes: Sequence[Outcome], measured: Measured | None
) -> dict[str, Any]:
    """The results as JSON data."""
    return {
        "num_instances": setting.num_instances,
        "prompts_per_step": setting.workload.prompts_per_step,
        "group_size": setting.group_size,
        "num_steps": setting.workload.num_steps,
        "costs": setting.costs.to_json(),
        "bound_s": _bound(setting),
        "schedules": [asdict(outcome) for outcome in outcomes],
        "measured": asdict(measured) if measured else None,
    }
