"""From a command line to a `Config`: Hydra composes, dataclasses check, errors are one line."""

import functools
import importlib.resources
import itertools
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import (
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from hybridrl.config import CLUSTERS, ClusterConfig, Config, ConfigError
from hybridrl.config.bounds import check_finite
from hybridrl.config.composition import CONFIG_MODULE, compose_train
from hybridrl.config.errors import RenamedKeyError, names
from hybridrl.config.recipe_folder import recipe_by_path
from hybridrl.config.recipe_source import add_recipe
from hybridrl.config.renamed_keys import (
    NEEDLESS_KEYS,
    REMOVED_KEYS,
    RENAMED_GROUPS,
    new_name,
)
from hybridrl.config.schedule import (
    SCHEDULES,
    AutoScheduleConfig,
    ScheduleConfig,
    ScheduleKind,
)

KINDS: dict[str, dict[str, Any]] = {
    "schedule": {ScheduleKind.auto.value: AutoScheduleConfig}
    | {kind.value: entry.settings for kind, entry in SCHEDULES.items()},
    "cluster": {kind.value: settings for kind, settings in CLUSTERS.items()},
}
"""The settings of each kind of a group, whose keys are accepted with that kind alone."""

_BELOW_SET = re.compile(r"(?P<set>\+{0,2}eval\.sets\.\w+)\.(?P<names>(reward|source)(\.\w+)*)")

_TEXTS = {
    "answer_template", "bad_words", "privileged_template", "prompt_template", "stop",
    "system_prompt", "template",
}  # fmt: skip
"""Names of the keys whose texts a model reads or writes; others, as paths and expressions, have
backslashes with another meaning."""
_IN_MAPPING = re.compile(
    rf"""\b({"|".join(sorted(_TEXTS))})\s*:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\[[^\]]*\])"""
)
"""One of these keys within a mapping, and its text or list of texts."""
_ESCAPE = re.compile(r"\\(\\[nrt])|\\([nrt])")
_LATEX = re.compile(
    r"(?<!\\)\\(text(?:bf|it|rm|tt)?|tt|tiny|times|theta|tau|triangle|tanh?|tilde|tfrac|tag|top?"
    r"|right|rm|rho|rangle|rceil|rfloor|nabla|neq?|not|notin|newline|nu|neg)\b"
)
"""Commands that begin as an escape does; nobody means a tab before `ext`."""
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


@functools.cache
def register() -> None:
    """Make known to Hydra, once in a process, the options that have no file in the tree.

    These are the typed schema, the recipes, and `cost=NAME`: each is `reward=NAME` under another
    key. A recipe is imported when it is chosen.
    """
    store = ConfigStore.instance()
    # Hydra copies what it reads from, the whole store too, for each composition and for each group
    # that `--help` lists. The store gives copies of what is in it, so that nothing changes that.
    store.__deepcopy__ = lambda _: store  # type: ignore[attr-defined]
    schema: Any = OmegaConf.structured(Config)
    schema.schedule = ScheduleConfig  # the group's choice says which one of them
    store.store(name="schema", node=schema, provider="hybridrl")
    for group, kinds in KINDS.items():
        for name, settings in kinds.items():
            store.store(group=f"{group}/schema", name=name, node=settings, provider="hybridrl")
    for file in sorted((importlib.resources.files(CONFIG_MODULE) / "reward").iterdir(), key=str):
        node = OmegaConf.create(file.read_text())
        store.store(group="cost", name=Path(file.name).stem, node=node, provider=CONFIG_MODULE)
    for folder in sorted(importlib.resources.files("hybridrl.recipes").iterdir(), key=str):
        config = folder / "config.yaml"
        if config.is_file():
            recipe = OmegaConf.create(config.read_text())
            assert isinstance(recipe, DictConfig)
            add_recipe(folder.name, recipe)


def resolve_arguments(args: Sequence[str]) -> list[str]:
    r"""The arguments in the form that Hydra takes.

    `recipe=PATH` becomes `recipe=NAME`, after the folder has been made known. A key of an
    evaluation set's own judge or source becomes a mapping of the set. Hydra cannot set a key below
    one that is null. In a text for the model, `\n`, `\r` and `\t` become what they stand for; `\\n`
    stays a backslash and an n.
    """
    arguments = []
    for arg in args:
        recipe = recipe_by_path(arg)
        if recipe is not None:
            name, node = recipe
            add_recipe(name, node)
            arg = f"recipe={name}"
        key, assigns, value = arg.partition("=")
        if assigns and key.rpartition(".")[2] in _TEXTS:
            value = _with_breaks(key, value)
            arg = f"{key}={value}"
        elif assigns and value[:1] == "{":
            value = _IN_MAPPING.sub(functools.partial(_inner_breaks, key), value)
            arg = f"{key}={value}"
        if assigns and value != "null" and (below := _BELOW_SET.fullmatch(key)):
            names = below["names"].split(".")
            arg = f"{below['set']}={'{' + ': {'.join(names)}: {value}{'}' * len(names)}"
        arguments.append(arg)
    return arguments


def _inner_breaks(key: str, match: re.Match[str]) -> str:
    """A key of a mapping with the characters that the escapes of its text stand for."""
    return match[0].removesuffix(match[2]) + _with_breaks(f"{key}.{match[1]}", match[2])


def _with_breaks(key: str, value: str) -> str:
    """An argument's value with the characters that its escapes stand for.

    Hydra takes a line break within quotes alone. Raises ConfigError for a command of LaTeX.
    """
    if command := _LATEX.search(value):
        told = f"\\{command[0]} for the command, since \\{command[1][0]} is an escape"
        raise ConfigError(key, command[0], told)
    text = _ESCAPE.sub(lambda match: match[1] or _ESCAPED[match[2]], value)
    if text != value and text[:1] not in ("'", '"', "[", "{"):
        return "'" + text.replace("'", "\\'") + "'"
    return text


def check_command_line(args: Sequence[str]) -> Config | None:
    """Raise `ConfigError` for the first error in the arguments of `hybridrl train`.

    Runs before Hydra's entry, whose messages take a screen. Arguments that only ask for information
    (`--help`) pass. Of a sweep each run is composed. Returns the config of `check`, or None where
    nothing will run.
    """
    options = parse_arguments(args)
    if options.help or options.hydra_help or options.info or options.shell_completion:
        return None
    config = check(options.overrides, options.config_dir, sweep=options.multirun)
    if options.multirun:  # a later run's error would come hours after the start
        for overrides in choices(options.overrides):
            check(overrides, options.config_dir)
    return None if options.cfg else config


def runs_of(args: Sequence[str]) -> list[Config]:
    """The config of every run of a command line, each choice of a sweep (`-m`) one."""
    options = parse_arguments(args)
    runs = choices(options.overrides) if options.multirun else [options.overrides]
    return [check(overrides, options.config_dir) for overrides in runs]


def parse_arguments(args: Sequence[str]) -> Namespace:
    """Hydra's options and `overrides` of a command line; raises `ConfigError` for an unknown one.

    A `config_dir` among them exists.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options, unknown = parser.parse_known_args(list(args))
    if unknown:
        raise ConfigError("option", unknown[0], "key=value, or an option that --hydra-help lists")
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        raise ConfigError("--config-dir", options.config_dir, "a directory that exists")
    checked: Namespace = options
    return checked


def _refuse(message: str) -> NoReturn:
    raise ConfigError("option", message, "an option as --hydra-help lists it")


def check(overrides: Sequence[str], config_dir: str | None = None, sweep: bool = False) -> Config:
    """Compose `overrides` once and raise `ConfigError` for the first error; see `composed`."""
    return to_config(composed(overrides, config_dir, sweep))


def composed(
    overrides: Sequence[str], config_dir: str | None = None, sweep: bool = False
) -> DictConfig:
    """The settings that `overrides` compose; raises `ConfigError` for the first error.

    With `sweep`, the first choice of every `key=a,b` is composed, and `run.dir` is the directory of
    the sweep: `hydra.sweep.dir`, unless `run.dir` is among the overrides.
    """
    parsed = [_parse(override) for override in overrides]
    flat = [_first_choice(override, sweep) for override in parsed]
    for override in parsed:
        _check_key(override, overrides)
    try:
        node = compose_train([*flat, *_searchpath(config_dir)])
        HydraConfig.instance().set_config(node)  # the directory's name is built from it
        swept = sweep and not any(line.partition("=")[0] == "run.dir" for line in flat)
        node.run.dir = node.hydra.sweep.dir if swept else node.run.dir
        with open_dict(node):
            del node["hydra"]
        return node
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, config_dir) from None


def _check_key(override: Override, overrides: Sequence[str]) -> None:
    """Raise for `group.wrong=value` without composing: that imports the recipe, and torch with it.

    It passes keys of a dict, as those of a recipe, and those that depend on a kind: see `KINDS`.
    """
    key = override.get_key_element().lstrip("+")
    if key.partition(".")[0] in RENAMED_GROUPS and (now := new_name(key)):
        raise RenamedKeyError(key, _value_of(key, overrides), now)
    groups, _, name = key.rpartition(".")
    kind: Any = Config
    for group in filter(None, groups.split(".")):
        kind = get_type_hints(kind).get(group)
        if kind in (ScheduleConfig, ClusterConfig) or not is_dataclass(kind):
            return
    known = [field.name for field in fields(kind)]
    if groups and name not in known and not override.is_delete():
        raise unknown_key(key, _value_of(key, overrides), known)


def choices(overrides: Sequence[str]) -> list[list[str]]:
    """The runs of a sweep: `overrides` with one choice of each `key=a,b`, in Hydra's order."""
    parsed = [_parse(override) for override in overrides]
    lists = [
        [f"{o.get_key_element()}={choice}" for choice in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [str(o.input_line)]
        for o in parsed
    ]
    return [list(choice) for choice in itertools.product(*lists)]


def _searchpath(config_dir: str | None) -> list[str]:
    if config_dir is None:
        return []
    return [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]


def to_config(composed: DictConfig) -> Config:
    """The typed configuration; raises `ConfigError` for a value of the wrong type or range."""
    _check_keys(composed)
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        check_finite(values)
        _check_unicode(values)
        config = OmegaConf.to_object(composed)
    except (MissingMandatoryValue, InterpolationToMissingValueError) as error:
        key = min(OmegaConf.missing_keys(composed), default=str(error.full_key))
        raise ConfigError(key, "???", f"a value ({key}=...)") from None
    except OmegaConfBaseException as error:
        raise explain(error, ()) from None
    assert isinstance(config, Config)
    return config


def _check_unicode(value: Any, key: str = "") -> None:
    """Raise for a text that the model would read, with bytes in it that are no UTF-8."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_unicode(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            _check_unicode(inner, key)
    elif isinstance(value, str) and key.rpartition(".")[2] in {*_TEXTS, "chat_template"}:
        text = value.encode("utf-8", "replace").decode()
        if text != value:
            raise ConfigError(key, text, "text in Unicode: the command line's is UTF-8")


def _check_keys(node: DictConfig, path: str = "") -> None:
    """Raise for a key that `+key=value` has put where a dataclass has no field."""
    kind = OmegaConf.get_type(node)
    known = [field.name for field in fields(kind)] if kind and is_dataclass(kind) else None
    for name in node:
        child, key = node._get_node(name), str(name)
        if known is not None and key not in known:
            raise unknown_key(f"{path}{key}", child, known)
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing()):
            _check_keys(child, f"{path}{key}.")


def explain(
    error: Exception, overrides: Sequence[str], config_dir: str | None = None
) -> ConfigError:
    """One line for an error of Hydra or OmegaConf: the key, its value, the allowed values."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and isinstance(cause, Exception):
        chain.append(cause)
    for link in chain:
        if isinstance(link, ConfigError):
            return link
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            group, _, option = str(link.missing_cfg_file).rpartition("/")
            options = link.options or _files(group)
            return ConfigError(group or "config", option, names(option, options))
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_key(link, overrides, config_dir)
    text = " ".join(str(error).split())
    return ConfigError("override", " ".join(overrides), text)


def _files(group: str) -> list[str]:
    """The options of a group that has files alone; Hydra lists none where several are chosen."""
    folder = importlib.resources.files(CONFIG_MODULE)
    for name in group.split("/"):
        folder /= name
    return sorted(Path(f.name).stem for f in folder.iterdir()) if folder.is_dir() else []


def _explain_key(
    error: OmegaConfBaseException, overrides: Sequence[str], config_dir: str | None
) -> ConfigError:
    key = re.sub(r"\[\d+\]$", "", str(error.full_key))  # a list is given as a whole
    message = str(error.msg or error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(key, "???", f"a value ({key}=...)")
    if entry := _new_entry(error, overrides):
        return entry
    value = _value_of(key, overrides)
    if isinstance(error, ValidationError | InterpolationResolutionError):
        return ConfigError(key, value, _allowed(message))
    parent = key.rpartition(".")[0]
    kind = error.object_type
    known = [f.name for f in fields(kind)] if is_dataclass(kind) else None
    if known is None:
        known = _keys_of(parent, key, [*overrides, *_searchpath(config_dir)])
    if parent == "recipe":
        known = [name for name in known if name != "target"]
        if not known:
            allowed = "no key but target: this recipe's yaml lists no settings"
            return ConfigError(key, value, allowed)
    if not known:
        own = [line for line in overrides if line.partition("=")[0] in (parent, key)]
        new = own[-1] if own else f"{key}={value}"
        return ConfigError(key, value, f"a key that {parent} has (none), or '+{new}' for a new one")
    return unknown_key(key, value, known)


def unknown_key(key: str, value: object, known: Sequence[str]) -> ConfigError:
    """The error for a key that is not among those `known` in its place."""
    parent, _, name = key.rpartition(".")
    now = new_name(key) or ""
    below = now.removeprefix(f"{parent}.").partition(".")[0]
    if now and (not now.startswith(f"{parent}.") or below in known):  # else another recipe had it
        return RenamedKeyError(key, value, now)
    if key in NEEDLESS_KEYS:
        return ConfigError(key, value, f"no such key: it is gone, {NEEDLESS_KEYS[key]}")
    if key in REMOVED_KEYS:
        return ConfigError(key, value, f"no such key: it is gone, and {REMOVED_KEYS[key]} always")
    kinds = KINDS.get(parent, {})
    if others := [kind for kind, own in kinds.items() if name in {f.name for f in fields(own)}]:
        return ConfigError(key, value, f"{parent}={' or '.join(others)} with it")
    return ConfigError(key, value, f"a known key: {names(name, known)}")


def _new_entry(error: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError | None:
    """The answer to `reward.parts.NAME.kind=exact`, where no NAME is there yet."""
    unknown = not isinstance(error, ValidationError)
    if not (unknown and any(map(is_dataclass, get_args(error.ref_type)))) and (
        "dict is not a subclass of" not in str(error.msg)
    ):
        return None
    entry = path = str(error.full_key)  # `+reward.parts.NAME.kind` has it without its parents
    value = _value_of(entry, overrides)
    for override in overrides:
        name, _, text = override.lstrip("+~").partition("=")
        before, inside, _ = f".{name}.".partition(f".{entry}.")
        if inside:
            entry, path, value = f"{before}.{entry}".strip("."), name, text
            break
    parent, _, name = entry.rpartition(".")
    allowed = f"a name that {parent} has, or '+{parent}={{{name}: {{...}}}}' for a new one"
    return ConfigError(path, value, allowed)


def _allowed(message: str) -> str:
    """The allowed values in a message of OmegaConf, without the rest."""
    if match := re.search(r"expected one of \[(.*)\]", message):
        return f"one of {match[1]}"
    if match := re.search(r"Interpolation key '(.*)' not found", message):
        return f"keys in ${{}} that are there; {match[1]} is not"
    if match := re.search(r"could not be converted to (\w+)", message):
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return kinds.get(match[1], match[1])
    for words, allowed in (
        ("is not a ListConfig", "a list: [a,b]"),
        ("is not a subclass of", "settings, each as key.name=value"),
        ("is not Optional", "a value, which null is not"),
        ("is not a valid bool", "true or false"),
        ("Cannot convert", "one text, neither a list nor settings"),
    ):
        if words in message:
            return allowed
    return f"a value of the key's type ({message})"


def _keys_of(path: str, wrong: str, overrides: Sequence[str]) -> list[str]:
    """Keys below `path` in the composition of the other overrides; a recipe's without any of it."""

    def matters(override: str) -> bool:
        key = override.lstrip("+~").partition("=")[0]
        return key != wrong and not (path == "recipe" and key.startswith("recipe."))

    others = [override for override in overrides if matters(override)]
    try:
        node: Any = compose_train(others)
    except (HydraException, OmegaConfBaseException):
        return []
    for name in filter(None, path.split(".")):
        node = OmegaConf.select(node, name, throw_on_missing=False)
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _value_of(key: str, overrides: Sequence[str]) -> str:
    for override in reversed(overrides):
        name, sign, value = override.partition("=")
        name = name.lstrip("+~")
        if sign and name == key:
            return value
        if sign and key.startswith(f"{name}.") and value.startswith("{"):
            inner: Any = _parse(override).value()
            for step in key.removeprefix(f"{name}.").split("."):
                inner = inner.get(step, "") if isinstance(inner, dict) else ""
            return str(inner)
    return ""


def _parse(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        key, sign, value = override.partition("=")
        allowed = "key=value, quoted as Hydra wants it: 'key=\"...\"' for a text with {}[](),:#="
        raise ConfigError(key, value if sign else "", allowed) from None


def _first_choice(override: Override, sweep: bool) -> str:
    line = str(override.input_line)
    if not override.is_sweep_override():
        return line
    key, _, value = line.partition("=")
    if not sweep:
        raise ConfigError(key, value, "one value, a list [a,b], or -m for a sweep")
    first = next(iter(override.sweep_string_iterator()))
    return f"{key}={first}"
