"""Commands for GPUs in README.md and docs/: the memory plan says that each fits its GPUs."""

import re
import shlex
from pathlib import Path

import pytest

from hybridrl.costs.memory import RunPlan
from hybridrl.plan import memory_command

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^hybridrl (?:train|submit|plan (?:memory|layout)) (.*)$", re.MULTILINE)
READERS_MODEL = re.compile(r"model\.path=(?:DIR|Qwen/Qwen3-8B)$")
SHAPE = "model=qwen3_8b"
"""The published shape in the place of a reader's directory, or of a model on the hub."""
LONG = {"rollout.max_new_tokens": "4096", "data.max_prompt_tokens": "1024"}
"""Real lengths, for commands that leave them out."""


def gpu_commands() -> dict[str, str]:
    """The arguments of commands for models of real size, and their pages."""
    arguments = {}
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        for block in BLOCK.findall(page.read_text().replace("\\\n", " ")):
            for text in COMMAND.findall(block):
                words = shlex.split(text, comments=True)
                of_real_size = any(
                    READERS_MODEL.match(word) or re.match(r"model=(?!tiny|pretrained)", word)
                    for word in words
                )
                if "..." not in words and (of_real_size or "cluster.gpus_per_node=8" in words):
                    arguments[" ".join(words)] = page.name
    return arguments


COMMANDS = gpu_commands()


def plan_of(command: str) -> RunPlan:
    """The plan of a run on GPUs of 80 GB: those of its Slurm job, those it names, else eight."""
    words = [word for word in command.split() if not word.startswith(("--", "-m", "run.seed="))]
    if any(map(READERS_MODEL.match, words)):
        words = [w for w in words if not READERS_MODEL.match(w) and w != "model=pretrained"]
        words.append(SHAPE)
    words = [word for word in words if word not in ("cluster=ray",) and "address=" not in word]
    keys = {word.partition("=")[0] for word in words}
    if "cluster=slurm" not in words:
        words.append("cluster.device=cuda")
        words += [] if "cluster.ranks" in keys else ["cluster.ranks=8"]
    words += [f"{key}={value}" for key, value in LONG.items() if key not in keys]
    plan = memory_command.run(["memory", *words, "--gpu-gib=79.6"])
    assert isinstance(plan, RunPlan)
    return plan


def test_the_pages_have_such_commands() -> None:
    pages = {*COMMANDS.values()}
    assert {"README.md", "gpu.md", "memory_plan.md", "layout.md", "lora.md"} <= pages, pages
    assert sum("Qwen/Qwen3-8B" in command for command in COMMANDS) == 1
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{COMMANDS[command]}: {command}")
def test_a_command_fits_its_gpus(command: str) -> None:
    plan = plan_of(command)
    assert plan.fits, plan.verdict()


def test_what_is_kept_on_eight_gpus_does_not_fit() -> None:
    """4,096 new tokens of Qwen3-8B: `keep` is refused, `auto` takes another."""
    command = f"{SHAPE} rollout=vllm rollout.layout.tp=2 model.attention=torch"
    command += " trainer.fuse_layers=never"
    kept = plan_of(f"{command} trainer.activations=keep")
    assert not kept.fits
    assert kept.pools["actor"].peak.name == "train actor"
    chosen = plan_of(command)
    assert chosen.fits
    assert chosen.activations == (
        "trainer.activations=auto: selective, since keep needs 89.6 of 76.4 GiB"
    )
