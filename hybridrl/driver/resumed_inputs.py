"""What a run that resumes depends on, compared with what its checkpoint was made with."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config import Config, ConfigError
from hybridrl.data.known_rows import KnownRows, read_rows, rows_of
from hybridrl.driver.inputs import basis_of, changed_inputs
from hybridrl.driver.origin import Origin
from hybridrl.preflight.prepare import PreparedRun

logger = logging.getLogger(__name__)


def known_rows(origin: Origin) -> dict[str, KnownRows]:
    """The rows of the run that resumes, less those of evaluation sets that are set otherwise now.

    A run of an earlier version has none, which is said once.
    """
    point = origin.point
    if point is None:
        return {}
    if "inputs" not in point.state:
        logger.warning(
            "%s is of an earlier version, without digests of its data, models and code: "
            "whether they have changed since is not known", point.folder,
        )  # fmt: skip
        return {}
    before, rows = point.state["settings"], read_rows(point.run_dir)
    for name in {key.split(".")[2] for key in before if key.startswith("eval.sets.")}:
        of_set = f"eval.sets.{name}"
        if not any(key.startswith(f"{of_set}.") for key in origin.settings):
            rows.pop(of_set, None)
        elif _prompts_differ(before, origin.settings, of_set):
            rows.pop(of_set, None)
            logger.warning(
                "%s has other prompts than before step %d: its accuracies do not compare", of_set,
                point.state["step"],
            )  # fmt: skip
    return rows


def _prompts_differ(before: Mapping[str, Any], now: Mapping[str, Any], of_set: str) -> bool:
    """Whether the settings of an evaluation set's prompts differ, less those of one version."""
    own = f"{of_set}.source"
    if (own in before) != (own in now):  # there where it is null: prompts that are held out
        return True
    defines = (own, f"{of_set}.prompt_template", f"{of_set}.num_prompts")
    return any(before[x] != now[x] for x in before.keys() & now.keys() if x.startswith(defines))


def check_inputs(
    config: Config, origin: Origin, known: Mapping[str, KnownRows], prepared: PreparedRun
) -> None:
    """Raise where a run resumes and what it depends on has changed since, but for further rows.

    With `trainer.resume_changed` each change is a warning.
    """
    point = origin.point
    if point is None or "inputs" not in point.state:
        return
    changed = changed_inputs({"inputs": point.state["inputs"]}, basis_of(config), ())
    data = prepared.data
    now = rows_of(data.train, data.eval, prepared.eval_items)
    for name, rows in known.items():
        parts = point.state.get("rows", {}).get(name)
        num_trained = parts[-1][1] if parts else len(rows.trained)
        if gone := rows.gone(now.get(name, KnownRows()), num_trained):
            changed.append(f"{gone} rows of {name} are gone")
            schedule = point.state["schedule"]
            if parts and (schedule.get("open") or schedule.get("waiting")):
                allowed = f"a run without open samples, which may be of {changed[-1]}"
                raise ConfigError("trainer.resume", config.trainer.resume, allowed)
        elif new := len(now[name].trained) - num_trained:
            logger.warning("%s: %d rows are new; what was held out stays so", name, new)
    _refuse(config, changed, str(point.folder))


def check_basis(config: Config, before: Mapping[str, Mapping[str, str]]) -> None:
    """Raise where models or the user's code are others than `before` in this run (`basis_of`).

    With `trainer.resume_changed` each change is a warning.
    """
    _refuse(config, changed_inputs({"inputs": before}, basis_of(config), ()), "this run")


def _refuse(config: Config, changed: Sequence[str], before: str) -> None:
    if changed and not config.trainer.resume_changed:
        allowed = (
            f"what {before} was made with; changed since: {'; '.join(sorted(changed))} "
            "(trainer.resume_changed=true resumes nonetheless)"
        )
        raise ConfigError("trainer.resume", config.trainer.resume, allowed)
    for line in sorted(changed):
        logger.warning("changed since %s: %s", before, line)
