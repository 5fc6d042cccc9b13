"""Checks of a run's settings alone: before its directory is made, and before any heavy import."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hybridrl.config import VALUE_MODELS, Config, ConfigError
from hybridrl.system.owned_folder import FolderInUse, check_free, owned


def check_config_files(args: Sequence[str]) -> None:
    """Raise ConfigError for a model on the command line that its `config.json` alone rules out.

    It comes before any heavy import; models that are named elsewhere are refused later.
    """
    from hybridrl.models.config_json import check_config_json

    for key, _, value in (arg.partition("=") for arg in args):
        if key.endswith((".path", ".model")):
            check_config_json(value.strip("'\""), key)


def check_startable(config: Config) -> None:
    """Raise ConfigError for a model that has no weights, or that its `config.json` rules out."""
    if config.model.shape and config.model.path is None:
        raise ConfigError("model.path", "null", "weights; model.shape is enough for plan")
    check_model_settings(config)


def check_model_settings(config: Config) -> None:
    """Raise ConfigError for settings that a model's `config.json` alone rules out."""
    from hybridrl.models.config_json import check_has_experts, check_layouts, check_value_layout

    check_has_experts(config.model.path, config.trainer)
    check_layouts(config.model, config.trainer.layout, config.rollout.layout)
    for role, name in VALUE_MODELS.items():
        settings = config.value_model_of(role)
        check_value_layout(settings.path, config.model, settings.layout, name)


def composed_run(overrides: Sequence[str], *, new: bool = True) -> Config:
    """The config of overrides, whose settings are in `run.dir` then, as the command line has them.

    Raises ConfigError for settings that cannot work, and where a `new` run would join another.
    """
    from hybridrl.config import compose, stored_run

    def check(config: Config) -> None:
        check_startable(config)
        if new:
            check_run_dir(config)

    compose.register()
    return stored_run.composed_run(overrides, check=check)


def check_command(config: Config, command: str) -> None:
    """Raise ConfigError for settings of other commands than this one."""
    config.serve.check_unused(command)
    if command != "train":
        config.cluster.check_starts_once(command)


def check_run_dir(config: Config) -> None:
    """Raise ConfigError where a training run would add its metrics to those of another."""
    metrics = Path(config.run.dir) / "metrics.jsonl"
    there = metrics.is_file() and metrics.stat().st_size > 0  # a run that did not get far has none
    if there and not config.trainer.resumes:
        allowed = "a directory without a run"
        if config.cluster.holds_models:
            allowed += ", or trainer.resume=auto to continue it"
        raise ConfigError("run.dir", config.run.dir, allowed)
    with _not_in_use(config):
        check_free(Path(config.run.dir))


@contextmanager
def own_run_dir(config: Config) -> Iterator[None]:
    """Keep other runs from `run.dir`; raises ConfigError where one writes to it."""
    with ExitStack() as stack:
        with _not_in_use(config):
            stack.enter_context(owned(Path(config.run.dir)))
        yield


@contextmanager
def _not_in_use(config: Config) -> Iterator[None]:
    try:
        yield
    except FolderInUse as owner:
        allowed = f"a directory to which no other run writes ({owner} does)"
        raise ConfigError("run.dir", config.run.dir, allowed) from owner
