"""Where a run begins: the checkpoint to resume, and the settings that may differ from its own."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import folder
from hybridrl.checkpoint.folder import Point
from hybridrl.config import VALUE_MODELS, Config, ConfigError, OptimName, ScheduleKind, Vision
from hybridrl.config.renamed_keys import REMOVED_KEYS, with_new_names
from hybridrl.config.schedule import entry_of
from hybridrl.telemetry.records import parse, plain

MAY_CHANGE = (
    "cluster", "eval", "telemetry", "log", "run.dir",
    "trainer.steps", "trainer.save_every", "trainer.keep_last", "trainer.resume",
    "trainer.save_in_background", "trainer.save_samples",
    "trainer.resume_changed",
    "trainer.max_bad_steps", "trainer.max_tokens_per_micro_batch", "trainer.chunk_tokens",
    "trainer.activations", "trainer.attention_cost", "trainer.compile",
    "trainer.fuse_layers", "trainer.fuse_updates", "trainer.share_prompts", "trainer.layout",
    *(f"{key}.layout" for key in VALUE_MODELS.values()), "model.attention",
    "rollout.layout", "rollout.max_running", "rollout.block_size", "rollout.kv_cache_tokens",
    "rollout.decode_steps", "rollout.speculate", "rollout.tail_tp", "rollout.push",
    "schedule.migration_threshold", "schedule.migration", "schedule.early_backward",
    "environment.num_processes", "environment.memory_mb", "environment.port",
    "environment.turn_timeout_s", "environment.episode_timeout_s", "environment.max_failed_share",
)  # fmt: skip
"""Settings that a resumed run may change: how long, where and how fast, not what it learns from.

`trainer.attention_cost` is a key of earlier versions, whose checkpoints may have any value."""

MAY_CHANGE_OF_JUDGES = (
    ".max_failed_share", ".max_in_flight", ".endpoint.url", ".endpoint.key_env",
    ".endpoint.timeout_s", ".endpoint.retries", ".endpoint.backoff_s", ".endpoint.budget",
    ".endpoint.cache",
)  # fmt: skip
"""Ends of the keys of judges' settings that a resumed run may change."""

OF_PUSHES = (
    "cluster.ranks", "cluster.pools.", "cluster.placement", "cluster.pool_of.", "trainer.layout.",
    "rollout.layout.",
)  # fmt: skip
"""Settings that stay while a checkpoint has pushed weights, which are in a layout."""

OF_SWITCHES = "rollout.layout.bucket_mb", "rollout.layout.grouping"
"""No push asks for these, of which earlier versions took values without effect."""

FORMER_ONLY_CHOICE = {
    **{
        f"{role}.optim.name": OptimName.adamw.value
        for role in ("trainer", "warm_start", *VALUE_MODELS.values())
    },
    "model.vision": Vision.frozen.value,
}
"""Settings of checkpoints that are older than the choice."""


@dataclass(frozen=True)
class Origin:
    """The origin of a run: its settings as they were given, and the point that it resumes from.

    Without a point it starts anew. `damaged` has the errors of newer checkpoints. One that
    `goes_back` begins anew from an earlier point of the same run: everything after it is deleted.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    point: Point | None = None
    damaged: tuple[str, ...] = ()
    goes_back: bool = False

    def continues(self, run_dir: Path) -> bool:
        """Whether the point is of the run in this directory."""
        return self.point is not None and self.point.run_dir.resolve() == run_dir.resolve()

    def records(self, config: Config) -> dict[str, int] | None:
        """The records in the run directory that stand, in bytes by file; None for all."""
        if self.point is not None and self.continues(Path(config.run.dir)):
            records: dict[str, int] = self.point.state["records"]
            return records
        return {} if config.trainer.resumes else None


def find_origin(config: Config, reads: bool = False) -> Origin:
    """The origin that `trainer.resume` asks for; before anything else has touched `config`.

    With `reads` the bytes of the checkpoint are compared with their checksums, which takes as long
    as it takes to read them. Raises ConfigError where it names nothing to resume from, or another
    run than the one in the directory. Also where all checkpoints are damaged, where a setting
    differs that must not, and where the directory has a finished run and no checkpoint.
    """
    settings = settings_of(config)
    wanted, own = config.trainer.resume, Path(config.run.dir)
    if not config.trainer.resumes:
        return Origin(settings)
    if run_status(own).get("emulated"):
        allowed = f"another run.dir: {own} has a run of emulated ranks, which leaves no checkpoint"
        raise ConfigError("trainer.resume", wanted, allowed)
    started_again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    points, damaged = _written_since(wanted, own, started_again)
    goes_back = wanted != "auto" and not points
    if goes_back:
        points, damaged = _named(wanted)
    if reads:
        points, damaged = _unchanged(points, damaged)
    if points:
        _check_same(points[0], settings)
        _check_warm_start(points[0], config, reads)
        origin = Origin(settings, points[0], tuple(damaged))
        return replace(origin, goes_back=goes_back and origin.continues(own))
    if damaged:
        raise _none_is_whole(config, damaged)
    _check_unfinished(own, wanted)
    return Origin(settings)


def origin_again(config: Config, origin: Origin) -> Origin:
    """The origin of a run, begun from `origin`, that begins again in the same process.

    It is the newest checkpoint that the run has written, and whose bytes are those that were
    written; without one `origin`. Raises ConfigError where all are damaged, or what `origin` is.
    """
    written = _written_since(config.trainer.resume, Path(config.run.dir), begun=True)
    points, damaged = _unchanged(*written)
    if points:
        origin = replace(origin, point=points[0], damaged=tuple(damaged), goes_back=False)
    elif damaged:
        raise _none_is_whole(config, damaged)
    elif origin.point is not None and (wrong := _fault_of(origin.point)):
        raise _none_is_whole(config, [wrong])
    if origin.point is not None:
        _check_warm_start(origin.point, config, reads=True)
    return origin


def _fault_of(point: Point) -> str:
    """What has become wrong with the files of `point`, or ""; reads all of them."""
    try:
        return folder.changed(folder.read(point.folder))
    except ValueError as error:
        return str(error)


def _none_is_whole(config: Config, damaged: Sequence[str]) -> ConfigError:
    allowed = f"a checkpoint that is whole; damaged: {'; '.join(damaged)}"
    return ConfigError("trainer.resume", config.trainer.resume, allowed)


def _unchanged(points: list[Point], damaged: Sequence[str]) -> tuple[list[Point], list[str]]:
    """Checkpoints, the newest first, without newer ones whose bytes have changed; all errors."""
    while points and (wrong := folder.changed(points[0])):
        points, damaged = points[1:], [*damaged, wrong]
    return points, [*damaged]


def _written_since(wanted: str, own: Path, begun: bool) -> tuple[list[Point], list[str]]:
    """The checkpoints in `own`, the run's directory, of the run that began from `wanted`.

    None where it begins with this command: in a directory without any, or by going back in its own
    directory. If it has `begun` already, since Slurm has started its job again, say, it goes on.
    """
    points, damaged = folder.search(own)
    if wanted == "auto":
        return points, damaged
    since = [p for p in points if p.state["settings"].get("trainer.resume") == wanted]
    if own.resolve() in Path(wanted).resolve().parents:
        return (since, damaged) if since and begun else ([], [])
    if points and not since and own.resolve() != Path(wanted).resolve():
        _named(wanted)
        allowed = f"auto, or another run.dir: {own} has checkpoints of a run that began elsewhere"
        raise ConfigError("trainer.resume", wanted, allowed)
    return points, damaged


def _named(path: str) -> tuple[list[Point], list[str]]:
    """The checkpoint, or the newest of the run, at `path`."""
    if (Path(path) / folder.RESUME).is_dir():
        try:
            return [folder.read(Path(path).resolve())], []
        except ValueError as error:
            return [], [str(error)]
    points, damaged = folder.search(Path(path))
    if not points and not damaged:
        allowed = "never, auto, a checkpoint with resume/ in it, or the directory of a run with one"
        if run_status(Path(path)).get("emulated"):
            allowed += " (this is of emulated ranks, which leave none)"
        raise ConfigError("trainer.resume", path, allowed)
    return points, damaged


def _check_unfinished(run_dir: Path, wanted: str) -> None:
    """A run that was cut short before its first checkpoint may start anew; a whole one stays."""
    if run_status(run_dir).get("state") == "finished":
        allowed = f"another run.dir: {run_dir} has a finished run without a checkpoint to continue"
        raise ConfigError("trainer.resume", wanted, allowed)


def run_status(run_dir: Path) -> dict[str, Any]:
    """What `run.json` says of the run in a directory; empty without one."""
    file = run_dir / "run.json"
    status = parse(file.read_text()) if file.is_file() else None
    return status if isinstance(status, dict) else {}


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, in plain JSON types."""
    return dict(_flat(plain(asdict(config)), ""))


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _check_same(point: Point, now: Mapping[str, Any]) -> None:
    before, now = stored_settings(point, now), REMOVED_KEYS | dict(now)
    if point.state.get("pushed"):
        for key in (key for key in now if key in before and key not in OF_SWITCHES):
            if key.startswith(OF_PUSHES) and now[key] != before[key]:
                allowed = f"{before[key]}: samples of {point.folder} go on with older weights"
                raise ConfigError(key, now[key], f"{allowed}, which were pushed in this layout")
    for key in changed_settings(before, now):
        if key in REMOVED_KEYS:
            allowed = f"{REMOVED_KEYS[key]}, as every run has it now"
            raise ConfigError(key, before[key], f"{allowed}: {point.folder} was made with another")
        allowed = f"{before[key]}, with which {point.folder} was made"
        named = "schedule" if key == "schedule.kind" else key  # as on the command line
        raise ConfigError(named, now[key], allowed)


def stored_settings(point: Point, now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint was written with, under the names of those of `now`."""
    return FORMER_ONLY_CHOICE | with_new_names(point.state["settings"], now)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ, of those that a resumed run must not change."""
    same_batches = _has_serial_batches(before) and _has_serial_batches(now)
    # What is gone said when samples are made, or which are made together.
    may_change = (*MAY_CHANGE, "schedule.kind", *REMOVED_KEYS) if same_batches else MAY_CHANGE
    return [
        key
        for key in now.keys() & before.keys()
        if now[key] != before[key]
        and not any(key == name or key.startswith(f"{name}.") for name in may_change)
        and not key.endswith(MAY_CHANGE_OF_JUDGES)
    ]


def _has_serial_batches(settings: Mapping[str, Any]) -> bool:
    """Whether each step trains on the batch that it has under `serial`."""
    kind = ScheduleKind(settings["schedule.kind"])
    if kind is ScheduleKind.asynchronous:
        return settings["schedule.max_staleness"] == 0
    return entry_of(kind).serial_batches


def _check_warm_start(point: Point, config: Config, reads: bool) -> None:
    """The weights that the recipe's roles began as must be there, once the recipe has begun."""
    if config.warm_start_steps and point.state["phase"] == "rl":
        try:
            ended = folder.read(point.run_dir / "warm_start")
            if wrong := folder.changed(ended) if reads else "":
                raise ValueError(wrong)
        except ValueError as error:
            allowed = f"a run with the checkpoint of its warm start ({error})"
            raise ConfigError("trainer.resume", config.trainer.resume, allowed) from None
