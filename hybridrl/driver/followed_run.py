"""The run that another one follows (`schedule.follow`): its record, and whether that is of it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config import (
    AsyncScheduleConfig,
    Config,
    ConfigError,
    DType,
    EmulatedClusterConfig,
)
from hybridrl.config.stored_run import composed_run, overrides_of
from hybridrl.data import Data
from hybridrl.driver.inputs import basis_of, changed_inputs, data_digests
from hybridrl.driver.origin import changed_settings, settings_of
from hybridrl.flow.versions import RunRecord, record_from_json
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.rundata import environments_of

logger = logging.getLogger(__name__)

FILE = "versions.jsonl"
_KEY = "schedule.follow"
_ROUNDED = (
    f"{_KEY}: rollout.dtype=%s rounds otherwise in other batches, and the run ends at the first"
    " token that differs from the record; deterministic=strict, in both runs, has the same bits"
)
_MAY_DIFFER = ("schedule.follow", "schedule.new_weights")


def followed_run(config: Config) -> Path | None:
    """The directory of the run that `schedule.follow` names; None where it names none."""
    schedule = config.schedule
    if not isinstance(schedule, AsyncScheduleConfig) or schedule.follow is None:
        return None
    return Path(schedule.follow)


def recorded_run(config: Config) -> RunRecord | None:
    """The record of the run that `schedule.follow` names; None where it names none."""
    lines = _lines(config)
    return None if lines is None else record_from_json(lines, config.warm_start_steps + 1)


def recorded_steps(config: Config) -> int | None:
    """The recipe's steps in that record, from the first on; None where no run is followed."""
    lines = _lines(config)
    return None if lines is None else _last_step(lines) - config.warm_start_steps


def check_followed(config: Config) -> None:
    """Raise ConfigError for a record that is not there, ends too early, or is of another run."""
    lines, folder = _lines(config), followed_run(config)
    if lines is None or folder is None:
        return
    if config.environment.is_on and not config.environment.replay:
        raise ConfigError("environment.replay", False, f"true with {_KEY}")
    if isinstance(config.cluster, EmulatedClusterConfig):
        raise ConfigError(_KEY, folder, "null with cluster=emulated")
    _check_record(config, lines, folder)
    recorded = composed_run(overrides_of(folder), writes=False)
    recorded.cluster = config.cluster  # which may be another one
    recorded.resolve_dtypes()
    before, now = settings_of(recorded), settings_of(config)
    changed = [key for key in changed_settings(before, now) if key not in _MAY_DIFFER]
    if changed:
        # Of all that another recipe or data set brings, its code says best which it is.
        key, *others = sorted(changed, key=lambda key: (not key.endswith(".target"), key))
        more = f"; {', '.join(others)} differ, too" if others else ""
        raise ConfigError(key, now[key], f"{before[key]}, as in {folder} ({_KEY}){more}")
    if not config.strict and config.rollout.dtype is not DType.float32:
        logger.warning(_ROUNDED, config.rollout.dtype.value)


def _check_record(config: Config, lines: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raise ConfigError for a record that is damaged, or has not every step that is to be made."""
    try:
        record_from_json(lines, 0)
    except (KeyError, TypeError, ValueError) as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(_KEY, folder, f"{FILE} as a run writes it ({told})") from error
    first = config.warm_start_steps + 1
    wanted = range(first, first + config.trainer.steps)
    missing = sorted({*wanted} - {int(line["step"]) for line in lines})
    if missing:
        last = _last_step(lines)
        lacks = f"ends with step {last}" if missing[0] > last else f"lacks step {missing[0]}"
        allowed = f"a record of steps {first} to {wanted[-1]}: this one {lacks}"
        raise ConfigError(_KEY, folder, allowed)


def check_followed_inputs(config: Config, data: Data) -> None:
    """Raise ConfigError where data, models or the user's code are not those of the followed run.

    They are those of its last process that recorded them; one that ended early may not have. A run
    of an earlier version has no digests of them, and is followed. What judges evaluation sets may
    change. With `trainer.resume_changed` each change is a warning.
    """
    folder = followed_run(config)
    if folder is None:
        return
    environments = reversed(environments_of(folder))
    recorded: dict[str, Any] = next((x for x in environments if "inputs" in x), {})
    now = {"data": data_digests(data), **basis_of(config)}
    changed = changed_inputs({"inputs": recorded.get("inputs", {})}, now, ("eval",))
    if changed and not config.trainer.resume_changed:
        allowed = (
            f"what that run was made with; changed since: {'; '.join(changed)} "
            "(trainer.resume_changed=true follows nonetheless)"
        )
        raise ConfigError(_KEY, folder, allowed)
    for line in changed:
        logger.warning("changed since %s: %s", folder, line)


def _last_step(lines: Sequence[Mapping[str, Any]]) -> int:
    return max(int(line["step"]) for line in lines)


def _lines(config: Config) -> list[dict[str, Any]] | None:
    folder = followed_run(config)
    if folder is None:
        return None
    path = folder / FILE
    lines = [*read_lines(path)] if path.is_file() else []
    if not lines:
        allowed = f"the directory of a run with {FILE}, which schedule=async writes"
        raise ConfigError(_KEY, folder, allowed)
    return lines
