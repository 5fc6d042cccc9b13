"""The sides of `make bench-serve`: a run of `recipe=grpo`, and the same loop by Tinker's SDK.

`make bench-serve-skyrl` has the same client in front of `hybridrl serve` and of SkyRL's server.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from blocks import Blocks
from our_side import take_turns
from tasks import CLIP_HIGH, CLIP_LOW, GROUP_SIZE, LEARNING_RATE, TASKS, Task, score
from transformers import AutoTokenizer

from hybridrl.algorithms.advantages import group_relative
from hybridrl.data import Item

HERE = Path(__file__).parent


def run(task: Task, model: Path, settings: Sequence[str]) -> None:
    """Let `hybridrl train` take blocks of steps."""
    take_turns(lambda run_dir: task.config(model, run_dir, *settings), Blocks())


@contextmanager
def server(task: Task, model: Path, settings: Sequence[str]) -> Iterator[dict[str, str]]:
    """Start `hybridrl serve` in a process; what its clients need to know, by name."""
    config = task.config(model, Path("unused"))
    own = [
        f"model.path={model}",
        f"data.max_prompt_tokens={config.data.max_prompt_tokens}",
        f"rollout.max_new_tokens={task.max_new_tokens}",
        "cluster.threads_per_rank=1",
        "serve.port=0",
    ]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hybridrl.cli", "serve", *own, *settings]
        process = subprocess.Popen(
            [*command, f"run.dir={folder}/run"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            _, exports = process.stdout.readline(), process.stdout.readline()
            yield dict(word.split("=", 1) for word in exports.split()[1:])
        finally:
            process.terminate()
            process.wait()


@contextmanager
def skyrl_server(python: str, model: Path, lora: int, rows: int) -> Iterator[dict[str, str]]:
    """Start SkyRL's server on its CPU backend by this Python; what its clients need, by name.

    It samples `rows` sequences at once, a number that XLA compiles for. Only so many adapters are
    held as are used here: the base model's and one.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    backend = {"max_lora_adapters": 2, "max_lora_rank": lora, "sample_max_num_sequences": rows}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            python, str(HERE / "skyrl_server.py"), f"--port={port}", f"--base-model={model}",
            "--backend=jax", f"--backend-config={json.dumps(backend)}",
            f"--checkpoints-base={folder}", f"--database-url=sqlite:///{folder}/tinker.db",
        ]  # fmt: skip
        process = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        try:
            while not answers(f"{url}/api/v1/healthz"):
                if process.poll() is not None:
                    raise RuntimeError(f"SkyRL's server ended with {process.returncode}")
                time.sleep(0.2)
            yield {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-skyrl"}
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    """Whether a GET of this address is answered."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:  # of urllib, too
        return False


def result(future: Any) -> Any:
    """What the SDK answers, of which some versions give futures."""
    return future.result() if hasattr(future, "result") else future


def client(
    blocks: Blocks, exports: dict[str, str], task: Task, model: Path, lora: int, work: str
) -> None:
    """Take blocks of steps by Tinker's SDK from the server that `exports` names.

    A step is one of GRPO (`work` is grpo), or its samples alone, of the starting weights (sample).
    """
    import tinker

    os.environ |= exports
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = enumerate(task.prompts(model))
    service = tinker.ServiceClient()
    training = result(service.create_lora_training_client(base_model=str(model), rank=lora or 8))
    sampler = result(training.save_weights_and_get_sampling_client()) if work == "sample" else None
    goes_on = blocks.begin()
    while goes_on:
        step = list(islice(prompts, task.prompts_per_step))
        if sampler:
            drawn = samples(sampler, task, step, tokenizer)
            lengths = [len(x.tokens) for group in drawn for x in group]
        else:
            lengths = grpo_step(training, task, step, tokenizer)
        goes_on = blocks.after_step(lengths)


def samples(
    sampler: Any, task: Task, prompts: Sequence[tuple[int, Item]], tokenizer: Any
) -> list[Any]:
    """Draw a group for each prompt.

    `seed` makes the draws those of the prompt in a run. Both servers are told where a response
    ends: SkyRL's knows no end of text by itself.
    """
    from tinker import types

    asked = [
        sampler.sample(
            types.ModelInput.from_ints(list(item.prompt_ids)),
            GROUP_SIZE,
            types.SamplingParams(
                max_tokens=task.max_new_tokens,
                temperature=1.0,
                seed=position,
                stop=[tokenizer.eos_token_id],
            ),
        )
        for position, item in prompts
    ]
    return [group.sequences for group in map(result, asked)]


def grpo_step(
    training: Any, task: Task, prompts: Sequence[tuple[int, Item]], tokenizer: Any
) -> list[int]:
    """One step of GRPO on prompts by their positions, as `recipe=grpo` makes it; the lengths."""
    from tinker import types

    # generate
    sampler = result(training.save_weights_and_get_sampling_client())
    drawn = samples(sampler, task, prompts, tokenizer)
    # score, compare within groups
    responses = []
    for (_, item), group in zip(prompts, drawn, strict=True):
        texts = tokenizer.batch_decode([x.tokens for x in group])
        advantages = group_relative([score(text, item.answer) for text in texts])
        responses += [
            (list(item.prompt_ids), x, advantage)
            for x, advantage in zip(group, advantages, strict=True)
        ]
    # update: a mean over tokens
    lengths = [len(sequence.tokens) for _, sequence, _ in responses]
    data = [
        datum(prompt, sequence, advantage / sum(lengths))
        for prompt, sequence, advantage in responses
    ]
    clip = {"clip_low_threshold": 1 - CLIP_LOW, "clip_high_threshold": 1 + CLIP_HIGH}
    adam = types.AdamParams(
        learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0
    )
    loss = training.forward_backward(data, "ppo", loss_fn_config=clip)
    stepped = training.optim_step(adam)
    result(loss)
    result(stepped)
    return lengths


def datum(prompt: list[int], sequence: Any, advantage: float) -> Any:
    """A response behind its prompt, with what it was drawn with and its tokens' advantage."""
    from tinker import types

    tokens = [*prompt, *sequence.tokens]
    before, inputs = len(prompt) - 1, np.zeros((2, len(tokens) - 1), np.float32)
    inputs[0, before:], inputs[1, before:] = sequence.logprobs, advantage
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:])),
            "logprobs": types.TensorData.from_numpy(inputs[0]),
            "advantages": types.TensorData.from_numpy(inputs[1]),
        },
    )


def main() -> None:
    """Parse and run blocks of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["run", "served", "skyrl"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--lora", type=int)
    parser.add_argument("--work", choices=["grpo", "sample"], default="grpo")
    parser.add_argument("--skyrl", help="a Python that has SkyRL")
    parser.add_argument("--rows", type=int, help="that SkyRL samples at once")
    args = parser.parse_args()
    task = replace(TASKS["short"], prompts_per_step=args.prompts)
    settings = [
        "cluster=processes", f"cluster.ranks={args.ranks}", f"actor.lora.rank={args.lora}",
    ]  # fmt: skip
    if args.side == "run":
        run(task, args.model, settings)
        return
    blocks = Blocks()  # before a server starts, which prints
    started = (
        skyrl_server(args.skyrl, args.model, args.lora, args.rows)
        if args.side == "skyrl"
        else server(task, args.model, settings)
    )
    with started as exports:
        client(blocks, exports, task, args.model, args.lora, args.work)


if __name__ == "__main__":
    main()
