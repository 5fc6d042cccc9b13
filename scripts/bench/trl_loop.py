"""TRL's GRPOTrainer as a side of the end-to-end benches, two threads."""

import tempfile
from itertools import islice
from typing import Any

import torch
from blocks import Blocks
from datasets import Dataset
from tasks import (
    CLIP_HIGH,
    CLIP_LOW,
    GROUP_SIZE,
    LEARNING_RATE,
    THREADS,
    Task,
    score,
    side_arguments,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_STEPS = 2000  # more than any bench runs


class TurnTaking(TrainerCallback):
    """Lets the other sides have their turn between blocks of steps."""

    def __init__(self, blocks: Blocks, lengths: list[int]) -> None:
        self.blocks, self.lengths = blocks, lengths

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first block."""
        control.should_training_stop = not self.blocks.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended."""
        control.should_training_stop = not self.blocks.after_step(self.lengths)
        self.lengths.clear()


def settings(task: Task, output: str, continuous_batching: bool) -> GRPOConfig:
    """The other sides' algorithm; one forward and backward pass over the whole batch."""
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        seed=0,
        shuffle_dataset=False,
        max_steps=_STEPS,
        per_device_train_batch_size=task.prompts_per_step * GROUP_SIZE,
        gradient_checkpointing=False,  # TRL's default trades time for memory
        num_generations=GROUP_SIZE,
        use_transformers_continuous_batching=continuous_batching,  # else transformers' `generate`
        max_completion_length=task.max_new_tokens,
        temperature=1.0,
        top_k=0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(continuous_batching: bool = False) -> None:
    """Parse and run blocks of steps."""
    task, model_path = side_arguments(__doc__)
    blocks = Blocks()
    torch.set_num_threads(THREADS)
    lengths: list[int] = []

    def reward(
        completions: list[str], completion_ids: list[Any], answer: list[str], **_: Any
    ) -> Any:
        lengths.extend(map(len, completion_ids))
        return [score(text, wanted) for text, wanted in zip(completions, answer, strict=True)]

    items = islice(task.prompts(model_path), 100 * task.prompts_per_step)
    rows = [{"prompt": item.prompt, "answer": item.answer} for item in items]
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model_path),
            reward_funcs=reward,
            args=settings(task, output, continuous_batching),
            train_dataset=Dataset.from_list(rows),
            callbacks=[TurnTaking(blocks, lengths)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
