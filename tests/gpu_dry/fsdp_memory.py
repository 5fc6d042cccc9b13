"""`python -m gpu_dry.fsdp_memory`: what torch's FSDPMemTracker counts of Llama 3 8B on 64 ranks.

The train engine makes optimizer steps on a fake GPU, as ranks of a fake process group. Beside its
peak are the bytes of both models of memory, `hybridrl plan auto`'s and `hybridrl plan memory`'s.
"""

from gpu_dry import fake_cuda

fake_cuda.load()  # before torch

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from gpu_dry import fake_device  # noqa: E402
from gpu_dry.fake_device import FakeDevice  # noqa: E402
from gpu_dry.shortcuts import FakePeakMemory  # noqa: E402
from gpu_dry.world import (  # noqa: E402
    joined,
    kernels,
    mirrors_without_values,
    weights_without_values,
    write_model,
)
from hybridrl.algorithms.losses import ClippedLoss  # noqa: E402
from hybridrl.config import Config, compose  # noqa: E402
from hybridrl.costs.mapping_overrides import mapping_of  # noqa: E402
from hybridrl.costs.memory import MemoryPlan  # noqa: E402
from hybridrl.engines.train.engine import TrainEngine  # noqa: E402
from hybridrl.engines.train.interface import TrainSequence  # noqa: E402
from hybridrl.preflight.mapping_memory import MappingMemory  # noqa: E402
from hybridrl.preflight.mapping_roles import planned_roles, role_shapes  # noqa: E402
from hybridrl.preflight.memory_plan import gpu_room, plan_run  # noqa: E402
from hybridrl.preflight.prepare import build_recipe  # noqa: E402

MODEL, LAYERS, RANKS = "llama3_8b", 32, 64
PROMPT, RESPONSE, GROUP = 512, 1536, 8
"""Tokens of a prompt and of a response, responses of a prompt."""


@dataclass(frozen=True, kw_only=True)
class UpdateCase:
    """An update of the model under `layout`, which `held` samples of each rank make.

    The plans are of a rank whose replica has one more than its share of a step: so has this one.
    """

    prompts: int
    """Prompts of a step."""
    held: int
    micro_batch_tokens: int
    layout: dict[str, object] = field(default_factory=dict)
    activations: str = "keep"

    def config(self, layers: int) -> Config:
        """Return the config of a run that makes such updates of so many layers."""
        compose.register()
        settings = [
            f"model={MODEL}",
            f"model.shape.num_hidden_layers={layers}",
            "recipe=grpo",
            f"recipe.group_size={GROUP}",
            "cluster.device=cuda",
            f"cluster.ranks={RANKS}",
            "model.attention=flash",
            f"data.max_prompt_tokens={PROMPT}",
            f"rollout.max_new_tokens={RESPONSE}",
            f"trainer.prompts_per_step={self.prompts}",
            f"trainer.max_tokens_per_micro_batch={self.micro_batch_tokens}",
            f"trainer.activations={self.activations}",
            *(f"trainer.layout.{key}={value}" for key, value in self.layout.items()),
        ]
        config = compose.check(settings)
        config.resolve_device(RANKS, "the planned cluster")
        return config


CASES = {
    "fsdp 64": UpdateCase(prompts=16, held=3, micro_batch_tokens=8192),
    "fsdp 64, two micro-batches": UpdateCase(prompts=24, held=4, micro_batch_tokens=4096),
    "fsdp 64, recompute": UpdateCase(
        prompts=24, held=4, micro_batch_tokens=8192, activations="recompute"
    ),
    "replicas 4, fsdp 16": UpdateCase(
        prompts=16, held=3, micro_batch_tokens=8192, layout={"replicas": 4}
    ),
    "replicas 4, fsdp 16, two micro-batches": UpdateCase(
        prompts=24, held=4, micro_batch_tokens=4096, layout={"replicas": 4}
    ),
    "fsdp 16, tp 4": UpdateCase(prompts=6, held=1, micro_batch_tokens=8192, layout={"tp": 4}),
    "fsdp 32, pp 2": UpdateCase(prompts=28, held=4, micro_batch_tokens=4096, layout={"pp": 2}),
    "fsdp 16, pp 2, tp 2, recompute": UpdateCase(
        prompts=14,
        held=2,
        micro_batch_tokens=4096,
        layout={"pp": 2, "tp": 2},
        activations="recompute",
    ),
    "fsdp 16, tp 4, sequence parallel, recompute": UpdateCase(
        prompts=14,
        held=2,
        micro_batch_tokens=16384,
        layout={"tp": 4, "sequence_parallel": "true"},
        activations="recompute",
    ),
}


def planned(config: Config) -> dict[str, int]:
    """Bytes of a rank in an update of the actor, by both plans."""
    graph = build_recipe(config.recipe)
    shape = AutoConfig.for_model(**config.model.shape)
    room = gpu_room(80 * 2**30)
    shapes = role_shapes(config, graph, shape)
    roles = planned_roles(config, graph, shapes)
    memory = MappingMemory(config, graph, shapes, room)
    plans = {
        "plan auto": memory.plans(roles, mapping_of(config, roles))["actor"],
        "plan memory": plan_run(config, graph, shape, room).pools["actor"],
    }
    return {name: _of_update(plan) for name, plan in plans.items()}


def _of_update(plan: MemoryPlan) -> int:
    return next(phase.total for phase in plan.phases if phase.name == "train actor")


def counted(case: UpdateCase, config: Config, device: FakeDevice) -> dict[str, int]:
    """The peaks of an update, in bytes, of the first rank of the pipeline stage that has most.

    They are of torch's tracker and of the dry runs'. With them are the update's rows.
    """
    pp = config.trainer.layout.pp
    stages = [of_rank(stage * RANKS // pp, case, config, device) for stage in range(pp)]
    return max(stages, key=lambda figures: figures["counted"])


def of_rank(rank: int, case: UpdateCase, config: Config, device: FakeDevice) -> dict[str, int]:
    """Return the peaks of an update, in bytes, on one rank."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = write_model(Path(folder), MODEL, config.model.shape["num_hidden_layers"])
        cuda = stack.enter_context(joined(rank, RANKS, strict=False))
        stack.enter_context(weights_without_values(device))
        stack.enter_context(mirrors_without_values(device))
        stack.enter_context(kernels(device, flash=True))
        # Backward on this thread, as the fake device has no thread of its own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(device)
        memory = stack.enter_context(FakePeakMemory())
        engine = TrainEngine(str(path), model=config.model, trainer=config.trainer, device=cuda)
        sequences, loss = _sequences(case.held), ClippedLoss(kl_coef=0.1)
        engine.update(sequences, loss)  # the next one is a usual one, which has moments
        (root,) = engine.roots
        memory.restart()
        tracker = FSDPMemTracker(root, engine.optimizer)
        with tracker, micro_batches_apart(root, tracker) as rows:
            engine.update(sequences, loss)
        by_device = tracker.get_tracker_snapshot("peak").items()
        (peak,) = (sizes["Total"] for place, sizes in by_device if place.type == "cuda")
        return {"counted": peak, "dry run": memory.peak("cuda"), "rows": len(rows)}


@contextmanager
def micro_batches_apart(root: torch.nn.Module, tracker: FSDPMemTracker) -> Iterator[list[None]]:
    """Reset the tracker's accounts by module before each row: it refuses a second one else.

    Its peak stays. The list gets an entry a row.
    """
    rows: list[None] = []

    def forget(*_: object) -> None:
        rows.append(None)
        tracker.reset_mod_stats()

    handle = root.register_forward_pre_hook(forget, prepend=True)
    yield rows
    handle.remove()


def _sequences(number: int) -> list[TrainSequence]:
    names = ("old_log_probs", "reference_log_probs")
    fields: dict[str, torch.Tensor | float] = {name: torch.zeros(RESPONSE) for name in names}
    fields["advantages"] = 1.0
    ids = torch.full((PROMPT + RESPONSE,), 3)
    return [TrainSequence(ids, RESPONSE, fields) for _ in range(number)]


def main() -> None:
    """Run the cases that the command line names; write a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m gpu_dry.fsdp_memory")
    parser.add_argument("--case", action="append", help="a case by its name; all if left out")
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="of the model: it is cut to them"
    )
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    device = FakeDevice()
    fake_cuda.install(lambda name: device.sync("wait"))
    fake_device.install(device)
    results = {}
    for name in options.case or CASES:
        begun, case = time.process_time(), CASES[name]
        config = case.config(options.layers)
        results[name] = counted(case, config, device) | planned(config)
        print(f"{name}: {time.process_time() - begun:.1f} s of CPU", file=sys.stderr, flush=True)
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
