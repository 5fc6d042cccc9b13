"""Servers against `hybridrl train`, and several clients at once against each alone."""

import asyncio
import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from served_loops import ADAM, Client, folder_of, serving, shifted

from hybridrl.config import Config
from hybridrl.serving.loop import ServeLoop
from hybridrl.serving.requests import (
    ClientRequest,
    CreateModel,
    ForwardBackward,
    OptimStep,
    Save,
    ServerFailed,
    Unload,
)
from hybridrl.system.activity import file_of, read

ONE_RANK = ["cluster=processes", "cluster.ranks=1", "data.max_prompt_tokens=24"]
TOKENS = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.long
@pytest.mark.parametrize("rank", [4, 0])
def test_a_grpo_loop_equals_a_run(
    make_config: Callable[..., Config],
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    rank: int,
) -> None:
    """Three steps with `seed` the prompt's position: tokens, `grad_norm` and final weights.

    Then another run goes on from the client's files.
    """
    # A smaller epsilon would amplify how processors round gradients that are about as small.
    optim = ["trainer.optim.lr=1e-3", "trainer.optim.eps=1e-6"]
    settings = [*tiny_run, *ONE_RANK, f"actor.lora.rank={rank}"]
    run = train_here(
        tmp_path / "run", *settings, *optim, "cluster.rank_in_driver=true",
        "recipe=grpo", "trainer.steps=3", "telemetry.samples=all",
    )  # fmt: skip
    with serving(make_config(*settings, f"run.dir={tmp_path / 'served'}")) as loop:
        client = Client(loop)
        client.create()
        for step, metrics in enumerate(run.metrics, 1):
            files = (run.dir / "samples").glob(f"step-{step:06d}-*.parquet")
            rows = [row for file in files for row in pq.read_table(file).to_pylist()]
            norm = _grpo_step(client, rows, str(step), 1e-5 if rank else 1e-6)
            assert norm == pytest.approx(metrics["grad_norm"], abs=1e-6)
        if rank == 0:
            _check_prompts(client)
        folder = folder_of(loop, client.save("final", "weights", files=True))
        own, expected = (load_file(f / "model.safetensors") for f in (folder, run.dir / "final"))
        assert own.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-6, msg=name)
    settings[0 : len(tiny_run)] = [one for one in tiny_run if not one.startswith("model.tiny.")]
    on = train_here(
        tmp_path / "on", *settings, "cluster.rank_in_driver=true", "recipe=grpo", "trainer.steps=1",
        "model=pretrained", f"model.path={folder}", "model.compute_dtype=float32",
        "trainer.optim.lr=1e-12",
    )  # fmt: skip
    assert on.metrics[0]["grad_norm"] > 0
    for name, tensor in load_file(on.dir / "final" / "model.safetensors").items():
        torch.testing.assert_close(tensor, own[name], rtol=0, atol=1e-9, msg=name)


def _grpo_step(client: Client, rows: Sequence[dict[str, Any]], name: str, mismatch: float) -> float:
    """One step on a run's prompts, with its rewards for the same responses; `grad_norm`.

    Log-probabilities of sampling and training differ by at most `mismatch`.
    """
    path, data = client.save(name), []
    rows = sorted(rows, key=lambda row: (row["prompt_position"], row["k"]))
    trained = [row for row in rows if row["advantage"] is not None]
    total = sum(row["response_tokens"] for row in trained)
    requests, groups = [], []
    for position, group in groupby(rows, key=lambda row: row["prompt_position"]):
        groups.append(list(group))
        prompt, count = groups[-1][0]["prompt_ids"], len(groups[-1])
        requests.append(client.request(path, prompt, count, max_tokens=12, seed=position))
    answers: list[Any] = client.ask(*requests)
    for group, samples in zip(groups, answers, strict=True):
        for row, sequence in zip(group, samples.sequences, strict=True):
            assert sequence.tokens.tolist() == row["response_ids"]
            if row["advantage"] is None:
                continue
            before = [0.0] * (len(row["prompt_ids"]) - 1)
            advantages = [row["advantage"] / total] * row["response_tokens"]
            data.append(
                shifted(
                    [*row["prompt_ids"], *row["response_ids"]],
                    logprobs=[*before, *sequence.logprobs],
                    advantages=[*before, *advantages],
                )
            )
    outputs = client.gradient(data, "importance_sampling")
    for datum, own in zip(data, outputs.logprobs, strict=True):
        drawn = datum.inputs["logprobs"]
        np.testing.assert_allclose(own[drawn != 0], drawn[drawn != 0], rtol=0, atol=mismatch)
    return client.step(lr=1e-3, eps=1e-6)["grad_norm"]


def _check_prompts(client: Client) -> None:
    """With all weights on one rank, a prompt's log-probabilities are training's bit for bit."""
    scored = client.sample(client.save("scored"), TOKENS, 0, prompt_logprobs=True)
    data = [shifted(TOKENS, weights=[1] * 6)]
    (own,) = client.gradient(data, "cross_entropy", backward=False).logprobs
    np.testing.assert_array_equal(own, scored.prompt_logprobs[1:])


@pytest.mark.layouts
def test_three_clients_at_once_are_each_as_alone(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    """On two ranks; then one of these dies, and every request fails with its line."""
    settings = [*tiny_run, *ONE_RANK, "cluster.ranks=2", "actor.lora.rank=4"]
    with serving(make_config(*settings, f"run.dir={tmp_path / 'two'}")) as loop:
        alone = [_two_steps(loop, number) for number in range(3)]
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(lambda number: _two_steps(loop, number), range(3)))
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
        for (_, norms), (_, others) in zip(together, alone, strict=True):
            assert norms == pytest.approx(others, rel=1e-6)
        client = Client(loop)
        client.create()
        rank = read(file_of(tmp_path / "two", 0))
        assert rank is not None
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(ServerFailed, match=r"^rank \d of 2 \(actor\) on node .* failed: "):
            client.gradient([shifted(TOKENS, weights=[1] * 6)], "cross_entropy")
        with pytest.raises(ServerFailed, match=r"^rank \d of 2"):
            client.sample(None, TOKENS, max_tokens=1)
        assert loop.failure.result(0).startswith("rank ")


Program = Generator[list[ClientRequest], list[Any], list[Any]]


@pytest.mark.layouts
def test_programs_that_run_again_are_equal_bit_for_bit(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    """Strict, on two ranks, against a fresh server, each alone and then three at once.

    Tokens, log-probabilities, metrics and files are equal. Where clients are together their samples
    are parked every three steps.
    """
    settings = [
        *tiny_run,
        *ONE_RANK,
        "cluster.ranks=2",
        "actor.lora.rank=4",
        "deterministic=strict",
    ]
    with serving(make_config(*settings, f"run.dir={tmp_path / 'alone'}")) as loop:
        alone = {number: _in_rounds(loop, [number])[number] for number in range(3)}
    settings += ["serve.patience_s=0", "rollout.decode_steps=3"]
    with serving(make_config(*settings, f"run.dir={tmp_path / 'together'}")) as loop:
        together = _in_rounds(loop, [2, 0, 1])
    for number, bits in alone.items():
        same = [one == other for one, other in zip(together[number], bits, strict=True)]
        assert all(same), f"client {number}: {same}"


def _in_rounds(loop: ServeLoop, order: Sequence[int]) -> dict[int, list[Any]]:
    """What the programs of clients end with, who ask in this order in each round of calls."""
    programs = {number: _program(loop, number) for number in order}
    ended: dict[int, list[Any]] = {}

    async def rounds() -> None:
        answers: dict[int, list[Any]] = {}
        while len(ended) < len(programs):
            asked = {}
            for number in [n for n in programs if n not in ended]:
                try:
                    requests = programs[number].send(answers.get(number))
                except StopIteration as stopped:
                    ended[number] = stopped.value
                else:
                    asked[number] = asyncio.gather(*map(loop.submit, requests))
            answers = {number: await answer for number, answer in asked.items()}

    asyncio.run(rounds())
    return ended


def _program(loop: ServeLoop, number: int) -> Program:
    """Two steps on a client's own samples; every bit that it is answered with, and of its files.

    The base model draws for all clients in one batch.
    """
    client, bits = Client(loop, f"client-{number}:train:0", number), list[Any]()
    yield [CreateModel(client.model, seed=number)]
    prompts = [TOKENS[: 2 + number], TOKENS[3:]]
    for step in range(2):
        (saved,) = yield [Save(client.model, str(step), "sampler_weights", files=False)]
        answers = yield [
            client.request(path, prompt, 2, max_tokens=8, prompt_logprobs=True)
            for prompt in prompts
            for path in (saved.path, None)
        ]
        data = []
        for prompt, samples in zip([prompts[0]] * 2 + [prompts[1]] * 2, answers, strict=True):
            bits.append(samples.prompt_logprobs.tobytes())
            for sample in samples.sequences:
                bits += sample.tokens.tolist(), sample.logprobs.tobytes()
                whole = [*prompt, *sample.tokens.tolist()]
                data.append(shifted(whole, weights=[1] * (len(whole) - 1)))
        for batch in (data[:3], data[3:]):
            (loss,) = yield [ForwardBackward(client.model, tuple(batch), "cross_entropy", {}, True)]
            bits += [loss.metrics, *(scores.tobytes() for scores in loss.logprobs)]
        (stepped,) = yield [OptimStep(client.model, **ADAM)]
        bits.append(stepped.metrics)
    (saved,) = yield [Save(client.model, "final", "weights", overwrite=True)]
    folder = folder_of(loop, saved.path)
    bits += [(folder / name).read_bytes() for name in FILES]
    yield [Unload(client.model)]
    return bits


FILES = "model.safetensors", "adapter/adapter_model.safetensors"


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout",
    [
        "trainer.layout.pp=2 model.tiny.num_layers=2",
        "trainer.layout.tp=2 rollout.layout.tp=2",
        "trainer.layout.replicas=2 deterministic=strict",
    ],
)
def test_layouts_serve_alike(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path, layout: str
) -> None:
    """Tokens and gradient norms of three clients at once on two ranks are each's, alone on one."""
    runs = []
    for number, own in enumerate((["cluster.ranks=2", *layout.split()], _of_one_rank(layout))):
        settings = ["actor.lora.rank=4", *own, f"run.dir={tmp_path / str(number)}"]
        at_once = 3 if number == 0 else 1
        with (
            serving(make_config(*tiny_run, *ONE_RANK, *settings)) as loop,
            ThreadPoolExecutor(at_once) as clients,
        ):
            runs.append(list(clients.map(partial(_two_steps, loop), range(3))))
    for (tokens, norms), (others, expected) in zip(*runs, strict=True):
        assert tokens == others
        assert norms == pytest.approx(expected, rel=1e-5)


def _of_one_rank(layout: str) -> list[str]:
    return [setting for setting in layout.split() if ".layout." not in setting]


def _two_steps(loop: ServeLoop, number: int) -> tuple[list[list[int]], list[float]]:
    """Tokens and gradient norms of a client's short loop, which differs by its number."""
    client = Client(loop, f"client-{number}:train:0", number)
    client.create(seed=number)
    tokens, norms = [], []
    for step in range(2):
        path = client.save(str(step))
        drawn = client.sample(path, TOKENS[: 2 + number], 5, max_tokens=12)
        data = []
        for sample in drawn.sequences:
            tokens.append(sample.tokens.tolist())
            whole = [*TOKENS[: 2 + number], *tokens[-1]]
            data.append(shifted(whole, weights=[1] * (len(whole) - 1)))
        norms.append(client.step_of(data))
    client.unload()
    return tokens, norms
