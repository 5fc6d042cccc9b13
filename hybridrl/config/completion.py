"""Completion of `hybridrl` at TAB: commands, options, config groups, keys and their values.

The shell's script calls `hybridrl completion WORDS...` at each TAB. The answer comes from file
names and from the settings' dataclasses: Hydra, which would compose the config, takes a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hybridrl.config import CLUSTERS, ClusterConfig, Config, ConfigError, ScheduleConfig
from hybridrl.config.schedule import SCHEDULES

OPTIONS = {
    "train": ("--help", "--dry-run", "--cfg", "--config-dir", "--multirun"),
    "eval": ("--help", "--cfg", "--config-dir", "--checkpoints"),
    "plan": ("--help", "auto", "layout", "memory", "schedule"),
    "report": (),
    "serve": ("--help",),
    "watch": ("--help", "--port", "--host"),
    "compare": ("--help", "--out"),
    "replay": (
        "--help", "--step", "--stage", "--batch", "--dir", "--tolerance", "--from-start",
        "--recorded-rewards", "--save", "--force",
    ),
    "blame": ("--help", "--tolerance", "--no-replay", "--from-start", "--force"),
    "new-recipe": ("--help", "--from"),
    "submit": ("--help", "--dry-run", "--multirun", "--config-dir"),
    "status": (),
    "logs": ("-f",),
    "cancel": (),
    "doctor": ("--help", "--json"),
    "completion": ("bash", "zsh", "fish"),
}  # fmt: skip
"""Every command with its options and fixed words."""
_KINDS: dict[Any, list[Any]] = {
    ClusterConfig: list(CLUSTERS.values()),
    ScheduleConfig: [entry.settings for entry in SCHEDULES.values()],
}
"""The settings of each kind of a group, all of whose keys are completed."""
WITH_KEYS = ("train", "eval", "serve", "plan", "submit", "doctor", "replay")

SCRIPTS = {
    "bash": """_hybridrl() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    local before=${word%"${COMP_WORDS[COMP_CWORD]}"}
    [[ ${COMP_WORDS[COMP_CWORD]} == "=" ]] && before=$word
    local IFS=$'\\n' words
    IFS=$' \\t' read -ra words <<<"${line%"$word"}"
    COMPREPLY=($("${words[0]}" completion -- "${words[@]:1}" "$word" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$before"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o default -F _hybridrl hybridrl
""",
    "zsh": """#compdef hybridrl
_hybridrl() {
    local -a whole open
    local answer
    for answer in ${(f)"$($words[1] completion -- ${words[2,CURRENT]} 2>/dev/null)"}; do
        [[ $answer == *[=.] ]] && open+=($answer) || whole+=($answer)
    done
    compadd -S '' -a open
    compadd -a whole
    (( $#open + $#whole )) || _files
}
compdef _hybridrl hybridrl
""",
    "fish": """function __hybridrl
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion -- $words[2..-1] 2>/dev/null
end
complete -c hybridrl -a '(__hybridrl)'
""",
}


def script(shell: str) -> str:
    """What the shell has to source; raises `ConfigError` for a shell that is none of `SCRIPTS`."""
    if shell not in SCRIPTS:
        raise ConfigError("completion", shell, ", ".join(SCRIPTS))
    return SCRIPTS[shell]


def complete(words: Sequence[str]) -> list[str]:
    """Completions of the last of `words`, which follows the command and its arguments."""
    *before, word = words or [""]
    if not before:
        return [name for name in OPTIONS if name.startswith(word)]
    options = [name for name in OPTIONS.get(before[0], ()) if name.startswith(word)]
    if before[0] not in WITH_KEYS or word.startswith("-"):
        return options
    if "=" in word:
        key, _, value = word.partition("=")
        return [f"{key}={choice}" for choice in _values(key) if choice.startswith(value)]
    groups = [f"{name}=" for name in _groups() if name.startswith(word)]
    return options + sorted({*groups, *_keys(word)})


def _groups() -> dict[str, list[str]]:
    """The choices of every config group: names of files, and of the recipes' folders."""
    package = Path(__file__).parents[1]
    here = package.parent / "conf"
    conf = package / "conf" if (package / "conf").is_dir() else here
    recipes = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    groups: dict[str, list[str]] = {}
    for file in sorted(conf.glob("*/**/*.yaml")):
        groups.setdefault(file.parent.relative_to(conf).as_posix(), []).append(file.stem)
    groups["recipe"] = sorted(file.parent.name for file in recipes.glob("*/config.yaml"))
    groups["cost"] = sorted({*groups.get("cost", ()), *groups["reward"]})
    return groups


def _values(key: str) -> list[str]:
    """The choices of a group, the members of an Enum, true and false."""
    if key in (groups := _groups()):
        return groups[key]
    kind: Any = Config
    for name in key.split("."):
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    kinds = [kind, *get_args(kind)]
    if bool in kinds:
        return ["true", "false"]
    return [
        member.name
        for choice in kinds
        if isinstance(choice, type) and issubclass(choice, Enum)
        for member in choice
    ]


def _keys(word: str) -> Iterator[str]:
    """Keys one dot further than `word`: `trainer.st` becomes `trainer.steps=`."""
    path, _, start = word.rpartition(".")
    kind: Any = Config
    for name in filter(None, path.split(".")):
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    if not is_dataclass(kind):
        return
    for settings in {kind: None, **dict.fromkeys(_KINDS.get(kind, ()))}:
        hints = get_type_hints(settings)
        for field in fields(settings):
            if field.name.startswith(start):
                nested = is_dataclass(hints[field.name])
                yield f"{path}{'.' * bool(path)}{field.name}{'.' if nested else '='}"
