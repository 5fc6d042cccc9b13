"""`python -m gpu_dry.on_cpu RANK SIZE PORT FOLDER OUT`: the phases on CPUs, for real.

The growth of the process's resident memory since its imports, at most in each phase, goes to OUT
beside the memory plan. The model has 100 M parameters, half of them in the embedding. A tiny one
goes through the phases before, since libraries import much when they are first called.
"""

import ctypes
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, PretrainedConfig

from gpu_dry import dry_run
from gpu_dry.case import Case, prompt_lengths
from gpu_dry.dry_run import DryRun
from hybridrl.config import ClusterConfig, Config, DataConfig, Device, DType, RewardConfig
from hybridrl.costs.memory import MemoryPhase
from hybridrl.flow.graph import ComputeStage
from hybridrl.flow.sample import SampleId
from hybridrl.preflight.memory_inputs import LongestInputs, PackedRow
from hybridrl.preflight.memory_plan import Room, plan_run
from hybridrl.preflight.prepare import build_recipe
from hybridrl.system.rendezvous import join_group

SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 65_536,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TINY = "tiny"
"""Within the model's folder, one of few parameters."""
ROWS, SAMPLE_TOKENS = 4, 512
COMPARED = {
    "load actor": "load actor",
    "switch after updates": "switch",
    "prefill and first decode": "prefill",
    "reference": "score reference",
    "update": "train actor",
}


def model_config(hidden_size: int = 768) -> PretrainedConfig:
    """The config of the model, or of a narrower one."""
    return AutoConfig.for_model("qwen3", **SHAPE | {"hidden_size": hidden_size})


class ResidentMemory:
    """In place of a fake device, and of its memory: measures the process in each phase.

    The system takes back pages of libraries when other processes need memory. So growth is that of
    the process's own memory, and of files since the beginning of a phase.
    """

    integer = 0

    def __init__(self) -> None:
        _give_back()
        self.memory, self._before, self._files = self, _status("RssAnon"), 0
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, counts: Any, name: str) -> Iterator[None]:
        """Note the most that the body has, under `name`, without what malloc keeps of before."""
        self.restart()
        yield
        self.peaks[name] = self.peak()

    def restart(self) -> None:
        """Begin to look for the most."""
        _give_back()
        self._files = _status("RssFile")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now

    def peak(self, device: str = "") -> int:
        """The most since then."""
        return _status("VmHWM") - self._files - self._before


def _give_back() -> None:
    """Give the system what malloc keeps of freed memory."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


@dataclass(frozen=True, kw_only=True)
class OnCpu(Case):
    """The model on CPUs, in float32."""

    def config(self, path: Path) -> Config:
        """The settings of the run."""
        config = super().config(path)
        config.cluster = ClusterConfig(ranks=self.ranks, device=Device.cpu)
        config.model.compute_dtype = config.rollout.dtype = DType.float32
        config.data = DataConfig(max_prompt_tokens=1024)
        config.rollout.max_new_tokens = SAMPLE_TOKENS
        config.reward = RewardConfig()
        return config


class CpuRun(DryRun):
    """Two steps, of which the second is measured; without a judge, which would need weights."""

    def run(self) -> None:
        """The phases of a step, then those of the next one but for its update."""
        self._build()
        self._generate()
        ids = self._samples()
        self._score(ids)
        self._train(ids)
        self._generate()
        stage = ComputeStage(name="reference", outputs=("reference_log_probs",))
        self.residency.release_idle_cache()
        self.residency.activate(self.reference)
        with self.phase("reference"):
            self.reference.compute(stage, ids)

    def _score(self, ids: tuple[SampleId, ...]) -> None:
        self.residency.release_idle_cache()
        stage = ComputeStage(name="old", outputs=("old_log_probs",))
        old_policy = self.roles.old_policy()
        assert old_policy is not None
        old_policy.compute(stage, ids)
        with self.phase("build reference"):
            reference = self.roles.frozen_copy()
        stage = ComputeStage(name="reference", outputs=("reference_log_probs",))
        self.residency.activate(reference)
        with self.phase("reference"):
            reference.compute(stage, ids)
        self.reference = reference  # a run's roles stay


def _untouched(phases: Sequence[MemoryPhase], cache_tokens: int | None) -> int:
    """Bytes of the KV cache that nothing is written to yet: such pages are not resident."""
    assert cache_tokens is not None
    (cache,) = (phase.sizes["KV cache"] for phase in phases if phase.name == "prefill")
    written = sum(prompt_lengths(ROWS)) + ROWS  # and the first step of decoding
    return cache * (cache_tokens - written) // cache_tokens


def _run(case: OnCpu, path: Path) -> tuple[CpuRun, ResidentMemory]:
    memory: Any = ResidentMemory()
    run = CpuRun(case, path, memory, torch.device("cpu"))
    with dry_run.noted_loads(memory, memory.peaks):
        run.run()
    return run, memory


def main() -> None:
    """See the module."""
    rank, size, port, folder, out = sys.argv[1:]
    case = OnCpu(model="", rank=int(rank), ranks=int(size), sample_tokens=SAMPLE_TOKENS)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), int(size), rank == "0")
    join_group(case.rank, case.ranks, store, "127.0.0.1", case.config(Path(folder)).cluster)
    with mock.patch.object(dry_run, "ROWS", ROWS):
        _run(case, Path(folder) / TINY)
        gc.collect()
        run, memory = _run(case, Path(folder))
    graph = build_recipe({"target": "hybridrl.recipes.grpo:grpo", "kl_coef": 0.1})
    tokens = sum(case.samples)
    row = PackedRow(tokens, tokens * 3 // 4, 1)
    inputs = LongestInputs(row=lambda layout, ranks: row, prompt=max(prompt_lengths(ROWS)))
    plan = plan_run(run.config, graph, model_config(), Room(2**40, 0), inputs)
    phases = plan.pools["actor"].phases
    planned = {phase.name: phase.total for phase in phases}
    planned["prefill"] -= _untouched(phases, plan.pools["actor"].cache_tokens)
    compared = {name: [memory.peaks[name], planned[of]] for name, of in COMPARED.items()}
    Path(out).write_text(json.dumps(compared))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
