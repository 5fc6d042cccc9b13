"""`python -m gpu_dry.vllm_sampler OUT`: what a draw in vLLM does on a fake GPU, by number of rows.

Without vLLM: of it the logits processor needs a few names, and a batch of which it reads numbers.
"""

from gpu_dry import fake_cuda

fake_cuda.load()  # before torch

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from types import ModuleType, SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

from gpu_dry import fake_device  # noqa: E402
from hybridrl.engines.rollout.interface import Request, SamplingParams  # noqa: E402

VOCAB = 151_936
ROWS = (8, 64, 256)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "min_new_tokens": {"min_new_tokens": 2, "stop_token_ids": (4,)},
}


class Group:
    """Tensor-parallel ranks that all are this one's."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size, self.num_broadcasts = rank, size, 0

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Nothing is sent."""
        assert tensor.device.type == "cuda"
        self.num_broadcasts += 1
        return tensor


GROUP = [Group(0, 1)]


def stand_in() -> Any:
    """The module with the logits processor, on stand-ins for vLLM's names."""
    names = {
        "vllm.config": {"VllmConfig": object},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: GROUP[0]},
        "vllm.inputs": {"tokens_input": None},
        "vllm.sampling_params": {"RequestOutputKind": None, "SamplingParams": None},
        "vllm.v1.sample.logits_processor": {
            "BatchUpdate": object, "LogitsProcessor": object, "MoveDirectionality": None,
        },
    }  # fmt: skip
    for name, values in names.items():
        for parent in (name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)):
            sys.modules.setdefault(parent, ModuleType(parent))
        vars(sys.modules[name]).update(values)
    from hybridrl.engines.rollout.vllm import sampling

    return sampling


def draws(module: Any, rows: int, way: dict[str, Any], device: fake_device.FakeDevice) -> Any:
    """Three steps of as many rows; the counts of the last, and whether its figures are there."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(hf_config=Qwen3Config()),
    )
    sampler = module.StreamSampler(config, torch.device("cuda", 0), True)
    batch = SimpleNamespace(
        num_tokens_no_spec=np.full(rows, 5, np.int32), num_prompt_tokens=np.full(rows, 5, np.int32)
    )
    sampler.follow(batch)
    added = []
    for row in range(rows):
        request = Request(row, [1] * 5, SamplingParams(900, **way), stream=row)
        extra = {module.DRAWS: module.Draws(request, 0)}
        added.append((row, SimpleNamespace(extra_args=extra), [], []))
    sampler.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
    counts: dict[str, Any] = {}
    for _ in range(3):
        logits = torch.empty(rows, VOCAB, device="cuda")
        with device.phase(counts, "draw"):
            marked = sampler.apply(logits)
        assert marked.shape == (rows, VOCAB)
        assert len(sampler.take().log_probs) == rows
        batch.num_tokens_no_spec += 1
    return counts["draw"].summary()


def main(out: Path) -> None:
    """Write what each way of sampling does."""
    device = fake_device.FakeDevice()
    fake_cuda.install(lambda name: device.sync("wait"))
    fake_device.install(device)
    module = stand_in()
    figures: dict[str, Any] = {}
    with device:
        for name, way in WAYS.items():
            figures[name] = {rows: draws(module, rows, way, device) for rows in ROWS}
        for rank in (0, 1):
            GROUP[0] = Group(rank, 2)
            figures[f"rank {rank} of 2"] = {rows: draws(module, rows, {}, device) for rows in ROWS}
            assert GROUP[0].num_broadcasts == (1 + 3) * len(ROWS)
    out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
