"""The loop of a server, straight against `Backend.submit`, on ranks of a tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from served_loops import Client, serving, shifted

from hybridrl.config import Config
from hybridrl.serve.loop import ServeLoop

ONE_RANK = [
    "cluster=processes", "cluster.ranks=1", "actor.lora.rank=4", "data.max_prompt_tokens=24",
    "rollout.max_running=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def loop(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeLoop]:
    """A server of adapters on one rank, which is this process."""
    folder = tmp_path_factory.mktemp("served") / "run"
    with serving(make_config(*tiny_run, *ONE_RANK, f"run.dir={folder}")) as loop:
        yield loop


def test_a_client_trains_samples_saves_and_loads(loop: ServeLoop) -> None:
    client = Client(loop, "first:train:0")
    client.create()
    data = [shifted([5, 6, 7, 8, 9], weights=[0, 1, 1, 1])]
    losses = []
    for _ in range(5):
        losses.append(client.gradient(data, "cross_entropy").metrics["loss:sum"])
        client.step()
    assert losses[-1] < losses[0]
    path = client.save("now")
    samples = client.sample(path, [5, 6], 3, max_tokens=6, prompt_logprobs=True)
    assert len(samples.sequences) == 3
    print(losses, samples)
