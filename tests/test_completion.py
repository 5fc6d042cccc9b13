"""TAB after `hybridrl`, pressed in a real bash."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridrl import cli
from hybridrl.config import ScheduleConfig, completion

HYBRIDRL = Path(sys.executable).parent / "hybridrl"
PRESS = """
eval "$({command} completion bash)"
complete -p hybridrl >/dev/null || exit 3
hybridrl() {{ {command} "$@"; }}
COMP_LINE={line!r}
COMP_POINT=${{#COMP_LINE}}
# Readline's own split: = and : are words, too.
read -ra COMP_WORDS <<<"${{COMP_LINE//=/ = }}"
[[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_hybridrl hybridrl 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def press_tab(line: str) -> list[str]:
    """What bash offers at the end of `line`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", PRESS.format(command=HYBRIDRL, line=line)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("hybridrl tr", "train"),
        ("hybridrl train rec", "recipe="),
        ("hybridrl train recipe=", "grpo"),
        ("hybridrl train recipe=gr", "grpo"),
        ("hybridrl train recipe=grpo eval/se", "eval/sets="),
        ("hybridrl train experiment=spell", "spell_tiny"),
        ("hybridrl train trainer.step", "trainer.steps="),
        ("hybridrl submit actor.lo", "actor.lora."),
        ("hybridrl train schedule=fu", "fused"),
        ("hybridrl train schedule=fused schedule.early", "schedule.early_backward="),
        ("hybridrl submit cluster=slurm cluster.part", "cluster.partition="),
        ("hybridrl watch --po", "--port"),
        ("hybridrl completion z", "zsh"),
    ],
)
def test_bash_offers(line: str, wanted: str) -> None:
    assert wanted in press_tab(line)


@pytest.mark.parametrize("command", ["watch", "compare", "replay", "blame"])
def test_every_option_is_offered(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    assert options == set(completion.OPTIONS[command])


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_offers_the_same() -> None:
    line = f'{HYBRIDRL} completion fish | source; complete -C "{HYBRIDRL} train recipe=gr"'
    done = subprocess.run(["fish", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["recipe=grpo"]


def test_nothing_is_offered_for_what_is_none() -> None:
    assert press_tab("hybridrl train no_such_key.x") == []


def test_keys_are_those_of_registered_kinds() -> None:
    """A subclass that is no kind of schedule, say in a plugin, has none."""

    @dataclass(kw_only=True)
    class Unregistered(ScheduleConfig):
        early_mine: int = 0

    assert completion.complete(["train", "schedule.early_"]) == ["schedule.early_backward="]
    assert completion.complete(["train", "cluster.rank_in"]) == ["cluster.rank_in_driver="]


def test_every_command_completes() -> None:
    usage = subprocess.run([HYBRIDRL, "wrong"], capture_output=True, text=True, check=False).stderr
    commands = usage.partition("one of ")[2].strip().split(", ")
    assert sorted(commands) == sorted(completion.OPTIONS)


def test_neither_torch_nor_hydra_is_imported() -> None:
    code = (
        "import sys; from hybridrl.config import completion; completion.complete(['train', 'tr'])\n"
        "print({'torch', 'hydra', 'omegaconf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_shell_that_is_none_is_refused() -> None:
    done = subprocess.run(
        [HYBRIDRL, "completion", "tcsh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip() == "hybridrl: completion=tcsh: wanted bash, zsh, fish"
