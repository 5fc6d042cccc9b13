"""Seconds of an update and of scoring on groups that share their prompts, against repeated prompts.

`make bench-shared-prompts`. One process of one thread, a random Qwen3 in float32. `ratio` is the
CPU seconds with shared prompts over those with repeated ones, taken in turn. `ratio_bound` is that
of the tokens: with P tokens of the prompt and G responses of R tokens it is
(P + G R) / (G (P + R)).
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ModelConfig, SharePrompts, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence

GROUP = 8
CASES = [(128, 128), (32, 256), (256, 32)]
"""Tokens of the prompt and of each response."""


def engine_of(path: str, share: SharePrompts, max_tokens: int) -> TrainEngine:
    """A new engine."""
    trainer = TrainerConfig(
        max_tokens_per_micro_batch=max_tokens, layout=TrainLayoutConfig(), share_prompts=share
    )
    return TrainEngine(path, model=ModelConfig(), trainer=trainer, device=torch.device("cpu"))


def groups(num: int, prompt: int, response: int) -> list[TrainSequence]:
    """Groups whose responses have `response` tokens on average, each another number."""
    random = torch.Generator().manual_seed(0)
    sequences = []
    for _ in range(num):
        ids = torch.randint(0, 500, (prompt,), generator=random)
        for k in range(GROUP):
            size = response + (2 * k - GROUP + 1) * response // 16
            answer = torch.randint(0, 500, (size,), generator=random)
            fields: dict[str, torch.Tensor | float] = {
                "advantages": 1.0 if k % 2 else -1.0,
                "old_log_probs": torch.full((size,), -6.0),
            }
            sequences.append(TrainSequence(torch.cat([ids, answer]), size, fields))
    return sequences


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(path: str, case: tuple[int, int], args: argparse.Namespace) -> None:
    """Show the lines of one case."""
    sequences = groups(args.groups, *case)
    sides = SharePrompts.always, SharePrompts.never
    engines = {side: engine_of(path, side, args.tokens) for side in sides}
    work: dict[str, Callable[[TrainEngine, Sequence[TrainSequence]], object]] = {
        "update": lambda engine, rows: engine.update(rows, ClippedLoss()),
        "scores": lambda engine, rows: engine.log_probs(rows),
    }
    repeated = sum(len(sequence.ids) for sequence in sequences)
    bound = 1 - args.groups * (GROUP - 1) * case[0] / repeated
    for name, run in work.items():
        calls = {side: partial(run, engine, sequences) for side, engine in engines.items()}
        measured = take_turns({k: partial(seconds, call) for k, call in calls.items()}, args.rounds)
        of_sides = (measured[side] for side in sides)
        case_name = f"shared_prompts_{name}_{case[0]}_{case[1]}"
        show(line(case_name, "s", "lower", *of_sides, ratio_bound=round(bound, 3)))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=4, help="prompts of an update")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens of a micro-batch")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'rendezvous'}", rank=0, world_size=1
        )
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32,
            num_key_value_heads=args.hidden // 64,
            head_dim=32,
            tie_word_embeddings=True,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/model")
        for case in CASES:
            compare(f"{folder}/model", case, args)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
