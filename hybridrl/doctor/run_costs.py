"""`hybridrl plan calibrate --run=RUN`: costs scaled to the micro-batches that a run has timed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config import ActivationMode, Config, ConfigError, compose
from hybridrl.config.stored_run import composed_run, overrides_of
from hybridrl.controller.composite_reward import with_parts
from hybridrl.controller.mapping_command import read_mapping_costs
from hybridrl.controller.mapping_overrides import mapping_of
from hybridrl.controller.preflight import build_recipe
from hybridrl.doctor import calibrate
from hybridrl.pipelines.problem import PassKind
from hybridrl.pipelines.recorded import RecordedPass
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.recorded_costs import CostScales, RecordedDecoding, scaled, scales_of
from hybridrl.planner.schedule import read_costs
from hybridrl.telemetry.records import read_lines

PASSES = "passes.jsonl"


def run(args: Sequence[str]) -> tuple[list[str], MappingCosts]:
    """Scale the costs of `--costs=FILE`, or of a calibration with the run's settings.

    `args` are its options, and overrides of the calibration. Returns lines to read and the costs,
    which are written to `--out`. Raises ConfigError.
    """
    options = {"out": calibrate.OUT}
    rest: list[str] = []
    lines: list[str] = []
    for arg in args:
        name, _, value = arg.removeprefix("--").partition("=")
        if arg.startswith(("--run=", "--costs=", "--out=")):
            options[name] = value
        else:
            rest.append(arg)
    run_dir, out = Path(options["run"]), Path(options["out"])
    calibrate.check_out(out)
    compose.register()
    config = composed_run(overrides_of(run_dir), writes=False)
    passes = read_passes(run_dir)
    if "costs" in options:
        if rest:
            allowed = "nothing beside --costs: overrides are those of a calibration"
            raise ConfigError("option", rest[0], allowed)
        costs = read_mapping_costs(options["costs"])
    else:
        lines, costs = calibrate.run([*overrides_of(run_dir, rest), *rest, f"--out={out}"])
    if costs.cluster.ranks < config.cluster.ranks:
        allowed = f"costs of at least the run's {config.cluster.ranks} ranks"
        raise ConfigError("--costs", f"of {costs.cluster.ranks}", allowed)
    result, scales = costs_of_run(config, run_dir, passes, costs)
    calibrate.write(out, result)
    number = sum(map(len, passes.values()))
    return [*lines, *_lines(number, scales, out)], result


def costs_of_run(
    config: Config, run_dir: Path, passes: Mapping[str, Sequence[RecordedPass]], costs: MappingCosts
) -> tuple[MappingCosts, CostScales]:
    """The costs scaled to the passes, and to the decode steps, of the run of `config`."""
    from hybridrl.controller.mapping_roles import planned_roles, role_shapes
    from hybridrl.models.shape import model_shape

    config.trainer.activations = _activations_of(config, run_dir)
    graph = with_parts(build_recipe(config.recipe), config)
    roles = planned_roles(config, graph, role_shapes(config, graph, model_shape(config.model)))
    mapping = mapping_of(config, roles)
    decoding = recorded_decoding(run_dir)
    scales = scales_of(passes, decoding, costs, roles, mapping)
    source = f"{costs.layer_costs.source}; scaled to the run {run_dir.name}"
    own = scaled(costs.layer_costs, scales, decoding, source)
    return MappingCosts(own, costs.cluster, costs.row_tokens), scales


def read_passes(run_dir: Path) -> dict[str, list[RecordedPass]]:
    """The timed micro-batches of a run by role, without those of its first step.

    Raises ConfigError for a run that has none.
    """
    try:
        rows = read_lines(run_dir / PASSES)
        first = (rows[0]["phase"], rows[0]["step"]) if rows else None
        later = [row for row in rows if (row["phase"], row["step"]) != first]
        passes: defaultdict[str, list[RecordedPass]] = defaultdict(list)
        for row in later or rows:
            passes[str(row["role"])] += [
                RecordedPass(PassKind(kind), int(chunk), int(n), int(scored), int(pairs), float(s))
                for kind, chunk, n, scored, pairs, s in row["passes"]
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError("--run", run_dir, f"a run's directory ({PASSES}: {error})") from None
    if not any(passes.values()):
        raise ConfigError("--run", run_dir, f"a run that has trained, and so has {PASSES}")
    return passes


def recorded_decoding(run_dir: Path) -> RecordedDecoding | None:
    """What the run has learned of its instances, of the last step's lengths; None without it."""
    steps: list[dict[str, Any]] = read_lines(run_dir / "lengths.jsonl")
    if not steps or not (run_dir / "costs.json").is_file():
        return None
    facts = read_costs(run_dir)
    lengths, prompts = steps[-1]["lengths"], steps[-1].get("prompt_tokens", ())
    tokens, instances = sum(lengths), facts.get("num_instances", 1)
    if not tokens or not facts["costs"].step_s + facts["costs"].row_s:
        return None
    # Of a token the row holds what came before it.
    held = sum(n * n / 2 for n in lengths) / tokens + sum(prompts) / max(1, len(prompts))
    rows = tokens / (max(lengths) * instances)
    return RecordedDecoding(facts["costs"], max(1.0, rows), held)


def _lines(number: int, scales: CostScales, out: Path) -> list[str]:
    parts = {
        "forward passes": scales.forward,
        "backward passes": scales.backward,
        "decode steps": scales.decode,
        "prompts": scales.prefill,
    }
    took = ", ".join(f"{name} {scale:.2f}" for name, scale in parts.items())
    return [
        f"{number} timed passes; the run took, of what these costs say: {took}",
        f"written to {out}",
    ]


def is_asked(args: Sequence[str]) -> bool:
    """Whether the arguments of `plan calibrate` name a run."""
    return any(arg.startswith("--run=") for arg in args)


def _activations_of(config: Config, run_dir: Path) -> ActivationMode:
    """The mode that the run took, where its settings leave it open."""
    mode = config.trainer.activations
    for event in read_lines(run_dir / "events.jsonl"):
        if mode is ActivationMode.auto and "activations" in event:
            return ActivationMode(event["activations"])
    return mode
