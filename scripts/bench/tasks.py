"""The two tasks of the end-to-end benches: their settings, starting weights and prompts.

`short` is the demo's spell_backward. `longtail` is `hybridrl.data.tasks.work`, whose prompts carry
how much is to be written out. Every side starts from the same warm-started weights, which are made
once by `hybridrl train recipe=sft` and kept in the cache directory.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from hybridrl.config import Config
from hybridrl.config.compose import check, register
from hybridrl.data import Item, PromptStream, load_data

GROUP_SIZE = 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
# Small enough that no side's policy, and so no side's lengths, moves while the sides take turns.
LEARNING_RATE = 1e-6
THREADS = 2


@dataclass(frozen=True)
class Task:
    """What to answer, and how the starting weights are made."""

    name: str
    max_new_tokens: int
    warm_start_steps: int
    data: tuple[str, ...]  # Hydra overrides
    prompts_per_step: int = 32

    def config(self, model: Path, run_dir: Path, *more: str) -> Config:
        """The run of our side: GRPO on two ranks of one thread, every group trained on.

        Further overrides are `more`.
        """
        return make_config(
            *self.data,
            f"model.path={model}",
            f"run.dir={run_dir}",
            "recipe=grpo",
            f"recipe.group_size={GROUP_SIZE}",
            f"recipe.clip_low={CLIP_LOW}",
            f"recipe.clip_high={CLIP_HIGH}",
            "recipe.skip_equal_groups=false",
            "reward=exact",
            'reward.extract="#([a-z]*)"',
            f"rollout.max_new_tokens={self.max_new_tokens}",
            f"trainer.prompts_per_step={self.prompts_per_step}",
            "trainer.steps=1000000",
            f"trainer.optim.lr={LEARNING_RATE}",
            "eval.sets.main.every=null",
            f"cluster.ranks={THREADS}",
            "cluster.threads_per_rank=1",
            "telemetry.progress=false",
            "telemetry.report=false",
            *more,
        )

    def prompts(self, model: Path) -> Iterator[Item]:
        """The endless stream of items, in the order in which our side takes them."""
        config = self.config(model, Path("unused"))
        data = load_data(
            config.data,
            AutoTokenizer.from_pretrained(model),
            max_context=config.model.tiny.max_positions,
            max_new_tokens=self.max_new_tokens,
        )
        stream = PromptStream(data.train, config.run.seed, data.weights)
        return (item for _, item in stream)

    def model(self, cache: Path) -> Path:
        """The directory of the starting weights, trained now if it is not in `cache`."""
        path = (cache / f"{self.name}-{self.warm_start_steps}").resolve()
        if not path.is_dir():
            run_dir = cache / f"{self.name}-sft"
            shutil.rmtree(run_dir, ignore_errors=True)  # a run that was cut short
            overrides = (
                *self.data,
                "recipe=sft",
                f"run.dir={run_dir}",
                f"rollout.max_new_tokens={self.max_new_tokens}",
                f"trainer.steps={self.warm_start_steps}",
                "trainer.prompts_per_step=64",
                "trainer.optim.lr=2e-3",
                "trainer.optim.schedule=linear",
                "reward=exact",
                'reward.extract="#([a-z]*)"',
                "eval.sets.main.num_prompts=16",
                "eval.sets.main.every=null",
                "telemetry.report=false",
            )
            command = [sys.executable, "-m", "hybridrl.cli", "train", *overrides]
            subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ)
            shutil.move(run_dir / "final", path)
        return path


TASKS = {
    "short": Task(
        name="short", max_new_tokens=24, warm_start_steps=170, data=("data=spell_backward",)
    ),
    # Wanted answers have 26 tokens at the median, 254 at p99, 293 at most. The letters come first:
    # a tiny model learns to copy them from nearby within few steps, from afar within many.
    "longtail": Task(
        name="longtail",
        max_new_tokens=320,
        warm_start_steps=300,
        data=(
            "data=reasoning_gym",
            "data.sources.main.kind=function",
            "data.sources.main.name=hybridrl.data.tasks:work",
            'data.prompt_template="{question}:"',
            'data.answer_template="#{answer}>{steps}"',
            "data.max_prompt_tokens=16",
        ),
    ),
}


def side_arguments(description: str | None) -> tuple[Task, Path]:
    """The task and the directory of the starting weights, from a side's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    args = parser.parse_args()
    return replace(TASKS[args.task], prompts_per_step=args.prompts), args.model


def score(response: str, answer: str) -> float:
    """1 where the letters after the last `#` are the answer; the plain sides' verifier."""
    answers = re.findall("#([a-z]*)", response)
    return float(bool(answers) and answers[-1] == answer)


def make_config(*overrides: str) -> Config:
    """The configuration that these Hydra overrides make."""
    register()
    return check(overrides)
