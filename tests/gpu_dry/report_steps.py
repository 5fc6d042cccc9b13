"""`python -m gpu_dry.report_steps FILE`: the steps of the GPU report on a fake GPU of this process.

No figure means anything. The file has each step's figures, of which there must be as many as on a
real GPU. It also has the results of one rank of the weight switch between ranks.
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
from gpu_steps import ranks  # noqa: E402
from gpu_steps.figures import Figures  # noqa: E402
from gpu_steps.steps import STEPS, Settings  # noqa: E402
from gpu_steps.switch import switches_on_ranks  # noqa: E402

from gpu_dry import fake_device  # noqa: E402
from gpu_dry.fake_device import FakeDevice  # noqa: E402
from gpu_dry.world import joined, kernels, weights_without_values  # noqa: E402

RUN = (
    "bandwidth",
    "flops",
    "attention",
    "decode",
    "switch",
    "train",
    "activations",
    "offload",
    "memory",
)
"""Steps of one process without vLLM; `mismatch` compares values, and there are none."""
RANK, RANKS = 3, 8
"""The weight switch is also seen by this rank of several."""


@contextmanager
def surroundings(device: FakeDevice) -> Iterator[None]:
    """What the steps ask a GPU, besides what a dry run's engines do."""
    answers = {
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
        "max_memory_allocated": lambda device=None: 2**30,
        "max_memory_reserved": lambda device=None: 2**30,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for manager in (
            mock.patch.object(ranks, "_joined", lambda rank, size, *_: joined(rank, size, False)),
            weights_without_values(device),
            kernels(device, flash=True),
            torch.autograd.set_multithreading_enabled(False),
            device,
        ):
            stack.enter_context(manager)
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
        for name in RUN:
            file = Path(folder) / f"{name}.json"
            with surroundings(device):
                pkgutil.resolve_name(STEPS[name].target)(settings, Figures(file, "cuda"))
            results[name] = json.loads(file.read_text())["figures"]
        with surroundings(device), joined(RANK, RANKS, False) as cuda:
            results["between ranks"] = switches_on_ranks(cuda, settings, RANKS)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
