"""`python -m gpu_dry.report_steps FILE`: the steps of the GPU report on a fake GPU of this process.

No figure means anything but bytes, which torch's tracker counts. The file has each step's figures,
of which there must be as many as on a real GPU. It also has the results of one rank of the weight
switch between ranks.
"""

from gpu_dry import fake_cuda

fake_cuda.load()  # before torch

import json  # noqa: E402
import pkgutil  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from unittest import mock  # noqa: E402

import torch  # noqa: E402
from gpu_steps import ranks, sizes  # noqa: E402
from gpu_steps.figures import Figures  # noqa: E402
from gpu_steps.steps import STEPS, Settings  # noqa: E402
from gpu_steps.switch import switches_on_ranks  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from gpu_dry import fake_device  # noqa: E402
from gpu_dry.fake_device import FakeDevice  # noqa: E402
from gpu_dry.world import joined, kernels, mirrors_without_values, weights_without_values  # noqa: E402
from hybridrl.config import TinyModelConfig  # noqa: E402
from hybridrl.models.tiny import make_char_tokenizer  # noqa: E402

RUN = (
    "bandwidth",
    "flops",
    "attention",
    "decode",
    "decode_without_graphs",
    "switch",
    "train",
    "activations",
    "offload",
)
"""Steps of one process without vLLM, with a tiny model.

`mismatch` compares values, and there are none. `memory` has a model of its own.
"""
LAYERS = 4
"""Layers of the model of `memory`, which is compared with the plan.

In a tiny model the buckets outweigh all else.
"""
RANK, RANKS = 3, 8
"""The weight switch is also seen by this rank of several."""


@contextmanager
def surroundings(device: FakeDevice) -> Iterator[None]:
    """What the steps ask a GPU, besides what a dry run's engines do."""
    answers = {
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "max_memory_allocated": lambda _=None: device.memory.peak("cuda"),
        "max_memory_reserved": lambda _=None: 2**30,
        "reset_peak_memory_stats": lambda _=None: device.memory.restart(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for manager in (
            mock.patch.object(ranks, "_joined", lambda rank, size, *_: joined(rank, size, False)),
            weights_without_values(device),
            mirrors_without_values(device),
            kernels(device, flash=True),
            torch.autograd.set_multithreading_enabled(False),
            device,
            device.memory,
        ):
            stack.enter_context(manager)
        yield


@contextmanager
def large_model(folder: Path) -> Iterator[None]:
    """In place of the tiny model a few layers of the one that GPUs measure, without weights."""
    whole = sizes._SIZES["1.5b"]
    cut = replace(whole, shape=whole.shape | {"num_hidden_layers": LAYERS})
    shape = dict(cut.shape)
    AutoConfig.for_model(shape.pop("model_type"), **shape).save_pretrained(folder)
    tokenizer = make_char_tokenizer(TinyModelConfig().alphabet, shape["max_position_embeddings"])
    tokenizer.save_pretrained(folder)
    with (
        mock.patch.dict(sizes._SIZES, {"tiny": cut}),
        mock.patch.object(ranks, "model_directory", return_value=str(folder)),
    ):
        yield


def main() -> None:
    """Run every step; the first that fails ends this."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            device="cpu", model="tiny", gpus=1, gpu_memory=0, folder=folder, scratch=folder
        )
        ranks.model_directory(settings)  # with values, on the host
        settings = replace(settings, device="cuda")
        device = FakeDevice()
        fake_cuda.install(lambda name: device.sync("wait"))
        fake_device.install(device)
        device.integer = 3  # a token that ends nothing
        device.answers = {"hybridrl/layout/proof.py compare": 0}  # no checksums differ

        def run(name: str) -> None:
            file = Path(folder) / f"{name}.json"
            with surroundings(device):
                pkgutil.resolve_name(STEPS[name].target)(settings, Figures(file, "cuda"))
            results[name] = json.loads(file.read_text())["figures"]

        for name in RUN:
            run(name)
        with large_model(Path(folder) / "large"):
            run("memory")
        with surroundings(device), joined(RANK, RANKS, False) as cuda:
            results["between ranks"] = switches_on_ranks(cuda, settings, RANKS)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
