"""The weight switch from training to generation against three other ways to make it.

Every layout runs on real gloo processes with a Qwen3 of 54 M random parameters, trained in float32
(FSDP2, tensor-parallel DTensors below it), generated with in bfloat16. Sides take turns:

- `ours`: `WeightSwitch` under the order of ranks that `auto` takes;
- `full_tensor`: `full_tensor()` of every parameter on every rank, of which it keeps its part. With
  pipeline stages a parameter is then broadcast from its stage to the others;
- `vanilla`: `WeightSwitch` under the order of ranks of HybridFlow-V;
- `verl`: as verl 0.9.1's FSDP engine and bucketed transfer do it, with no process in between.
  `full_tensor()` of every parameter in float32 is copied into a bucket of 2 GiB (here, of the
  model's size), and from the bucket the engine's part. That engine has no pipeline stages, so the
  side is left out where training has them;
- `exchange`: ours without all-gathers, where ours has them.

A layout reads pp x fsdp x tp in training, pp x tp in generation. With ep the model is a Qwen3-MoE
of eight experts, which `ep` of training and generation follow. Lines named for a layout are
followed by the worst of them all. Time is that of the slowest rank; bytes are all ranks' together.
"""

import argparse
import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig

from hybridrl.config import Grouping
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.parameters import Parameter, expert_mesh, fsdp_dim
from hybridrl.layout.process_groups import device_mesh
from hybridrl.layout.switching import Switch, plan_switch
from hybridrl.layout.weight_switch import SwitchStats, WeightSwitch
from hybridrl.models.parallel import model_parameters

Case = tuple[TrainAxes, int, int, int]
"""Training axes; pp, tp and ep of generation."""
CASES: list[Case] = [
    (TrainAxes(fsdp=4), 1, 1, 1),
    (TrainAxes(fsdp=4), 1, 2, 1),
    (TrainAxes(fsdp=2, tp=2), 1, 2, 1),
    (TrainAxes(fsdp=4, ep=2), 1, 2, 2),
    (TrainAxes(fsdp=4, ep=2), 1, 2, 1),
    (TrainAxes(pp=2, fsdp=2, tp=2), 1, 4, 1),
    (TrainAxes(pp=2, fsdp=2, tp=2), 2, 1, 1),
    (TrainAxes(fsdp=8, ep=4), 1, 4, 4),
]
SHAPES = {  # hidden size, width of the feed-forward layer, layers, vocabulary
    "54m": (512, 1536, 12, 16000),
    "tiny": (64, 96, 4, 500),
}


def model(shape: str, mixture: bool) -> list[Parameter]:
    """The parameters of a Qwen3, or Qwen3-MoE, with 8 heads of 64 and 4 key heads."""
    hidden, inner, layers, vocabulary = SHAPES[shape]
    experts = {"num_experts": 8, "moe_intermediate_size": inner // 8} if mixture else {}
    config = AutoConfig.for_model(
        "qwen3_moe" if mixture else "qwen3",
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        vocab_size=vocabulary, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        tie_word_embeddings=False, **experts,
    )  # fmt: skip
    return model_parameters(config)


def label(case: Case) -> str:
    """`2x2x2_to_1x4`, and `1x4x1ep2_to_1x2ep1` of a mixture of experts."""
    axes, pp, tp, ep = case
    train, gen = (f"ep{axes.ep}", f"ep{ep}") if axes.ep > 1 else ("", "")
    return f"{axes.pp}x{axes.fsdp}x{axes.tp}{train}_to_{pp}x{tp}{gen}"


def planned(parameters: list[Parameter], case: Case, order: Grouping) -> Switch:
    """The switch of a layout."""
    axes, pp, tp, ep = case
    return plan_switch(parameters, axes, pp, tp, order, gen_ep=ep)


class Weights:
    """The model in both layouts on this rank."""

    def __init__(self, parameters: list[Parameter], case: Case) -> None:
        self.axes, _, self.gen_tp, self.gen_ep = case
        self.parameters = {parameter.name: parameter for parameter in parameters}
        sizes = (self.axes.pp, self.axes.fsdp, self.axes.tp)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "fsdp", "tp"))
        self.rank = dist.get_rank()
        self.layout = planned(parameters, case, Grouping.auto).plan.src
        held = [name for name in self.parameters if self.layout.local(name, self.rank)]
        self.sharded = _fsdp(self, held)
        self.largest = 4 * max(math.prod(parameter.shape) for parameter in parameters)

    def destination(self, switch: Switch) -> dict[str, torch.Tensor]:
        """The engine's own tensors."""
        local = {n: self.engine_tensor(switch, n).shape for n in self.parameters}
        return {n: torch.empty(s, dtype=torch.bfloat16) for n, s in local.items() if s is not None}

    def engine_tensor(self, switch: Switch, name: str) -> LocalTensor:
        """The engine's shard of a parameter."""
        return LocalTensor(switch.plan.dst.local(name, self.rank))

    def full_tensor(self, name: str) -> torch.Tensor:
        """The parameter, the same on every rank."""
        shape = self.parameters[name].shape
        seed = list(self.parameters).index(name)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _fsdp(weights: Weights, held: list[str]) -> dict[str, torch.Tensor]:
    """The parameters of this stage as FSDP2 shards them, with tensor parallelism below."""
    axes, mesh, experts, own = weights.axes, weights.mesh, None, None
    if axes.ep > 1:
        experts = device_mesh(expert_mesh(axes), "cpu")
        own = FSDPMeshInfo(experts["efsdp"], shard_mesh_dim=0)
    root, layers = nn.Module(), {-1: nn.Module()}
    parameter_of = {}
    for name in held:
        parameter = weights.parameters[name]
        tensor = weights.full_tensor(name)
        if parameter.experts and experts is not None:
            tensor = _sharded(tensor, 0, experts["ep"])
        elif axes.tp > 1:
            tensor = _tensor_parallel(tensor, parameter.tp_dim, mesh["tp"])
        module = layers.setdefault(max(parameter.layer, -1), nn.Module())
        module.register_parameter(name.replace(".", "|"), nn.Parameter(tensor))
        parameter_of[id(module.get_parameter(name.replace(".", "|")))] = parameter

    def placement(tensor: nn.Parameter) -> Shard | ShardPlacementResult:
        parameter = parameter_of[id(tensor)]
        shard = Shard(fsdp_dim(parameter, axes, weights.gen_tp, weights.gen_ep))
        return ShardPlacementResult(shard, own) if parameter.experts and own else shard

    for number, module in layers.items():
        root.register_module(f"layer{number}", module)
        fully_shard(module, mesh=mesh["fsdp"], shard_placement_fn=placement)
    named = root.named_parameters()
    return {n.partition(".")[2].replace("|", "."): p.detach() for n, p in named}


def _tensor_parallel(tensor: torch.Tensor, dim: int | None, mesh: DeviceMesh) -> DTensor:
    if dim is None:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return _sharded(tensor, dim, mesh)


def _sharded(tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    shard = tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False)


def everything(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, whole, on every rank."""
    group, stages = weights.mesh["pp"].get_group(), weights.layout.rules
    here = weights.mesh["pp"].get_local_rank()
    for name, parameter in weights.parameters.items():
        held = stages[name].stages
        if here in held:
            shard = weights.sharded[name]
            assert isinstance(shard, DTensor)
            full = shard.full_tensor()
        else:
            full = torch.empty(parameter.shape)
        if len(held) < weights.axes.pp:
            dist.broadcast(full, dist.get_global_rank(group, held[0]), group=group)
        yield name, full


def load(
    weights: Weights, switch: Switch, destination: Mapping[str, torch.Tensor], name: str,
    full: torch.Tensor,
) -> None:  # fmt: skip
    """The engine's part of a whole parameter."""
    local = weights.engine_tensor(switch, name)
    for box in local.boxes:
        destination[name][local.slices(box)] = full[box.slices()].bfloat16()


def full_tensor(weights: Weights, switch: Switch, destination: dict[str, torch.Tensor]) -> None:
    """Side (a)."""
    for name, full in everything(weights):
        load(weights, switch, destination, name, full)


def verl_way(
    weights: Weights, switch: Switch, destination: dict[str, torch.Tensor], bucket: torch.Tensor
) -> None:
    """Side (c): the bucket is filled, handed over, and each of its tensors loaded."""
    waiting: list[tuple[str, torch.Tensor]] = []
    offset = 0
    for name, full in everything(weights):
        if offset + full.numel() > len(bucket):
            for ready in waiting:
                load(weights, switch, destination, *ready)
            waiting, offset = [], 0
        room = bucket[offset : offset + full.numel()].view(full.shape)
        waiting.append((name, room.copy_(full)))
        offset += full.numel()
    for ready in waiting:
        load(weights, switch, destination, *ready)


def timed(run: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def check(weights: Weights, switch: Switch, destination: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit what the whole parameters say."""
    for name in destination:
        local, full = weights.engine_tensor(switch, name), weights.full_tensor(name).bfloat16()
        for box in local.boxes:
            assert torch.equal(destination[name][local.slices(box)], full[box.slices()]), name


def compare(case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All sides of one layout; the lines, on rank 0."""
    parameters = model(args.shape, mixture=case[0].ep > 1)
    weights = Weights(parameters, case)
    orders = {"ours": Grouping.auto, "vanilla": Grouping.vanilla}
    switches = {side: planned(parameters, case, order) for side, order in orders.items()}
    bucket_bytes = round(args.bucket_mb * 2**20)

    def ready(side: str, least_gather: int) -> WeightSwitch:
        return WeightSwitch(
            switches[side].plan, weights.rank, torch.bfloat16, bucket_bytes,
            least_gather=least_gather,
        )  # fmt: skip

    engines = {side: ready(side, 3) for side in orders}
    engines["exchange"] = ready("ours", weights.axes.ranks + 1)
    last: dict[str, SwitchStats] = {}
    destination = weights.destination(switches["ours"])
    elsewhere = weights.destination(switches["vanilla"])

    def run(side: str) -> None:
        into = elsewhere if side == "vanilla" else destination
        last[side] = engines[side].switch(weights.sharded, into)

    sides = {"ours": partial(run, "ours"), "vanilla": partial(run, "vanilla")}
    if "gather" in engines["ours"].path:
        sides["exchange"] = partial(run, "exchange")
    sides["full_tensor"] = partial(full_tensor, weights, switches["ours"], destination)
    if weights.axes.pp == 1:
        room = torch.empty(sum(math.prod(parameter.shape) for parameter in parameters))
        sides["verl"] = partial(verl_way, weights, switches["ours"], destination, room)
    for side in sides:  # every side fills the same tensors with the same values
        filled = elsewhere if side == "vanilla" else destination
        for tensor in filled.values():
            tensor.fill_(torch.nan)
        sides[side]()
        check(weights, switches["vanilla" if side == "vanilla" else "ours"], filled)
    measured = take_turns({side: partial(timed, way) for side, way in sides.items()}, args.rounds)
    return [*lines(case, weights, switches["ours"], last, measured, bucket_bytes)]


def lines(
    case: Case,
    weights: Weights,
    switch: Switch,
    last: Mapping[str, SwitchStats],
    measured: Mapping[str, list[float]],
    bucket_bytes: int,
) -> Iterator[dict[str, Any]]:
    """Records of one layout."""
    received, scratch = {}, {}
    for side, stats in last.items():
        counts = torch.tensor([stats.bytes_received, stats.scratch_bytes])
        received[side] = float(dist_reduce(counts[0], dist.ReduceOp.SUM))
        scratch[side] = float(dist_reduce(counts[1], dist.ReduceOp.MAX))
    where = {"ranks": weights.axes.ranks, "path": last["ours"].path}
    theory, low = 2.0 * switch.theory, "lower"
    yield line(
        f"reshard_bytes_over_theory_{label(case)}", "bytes", low, [received["ours"]], [theory],
        order=switch.grouping.value, **where,
        least_at_their_places=2 * int(switch.plan.least.sum()),
    )  # fmt: skip
    yield line(
        f"reshard_bytes_vs_vanilla_{label(case)}", "bytes", low, [received["ours"]],
        [received["vanilla"]], **where,
    )  # fmt: skip
    for side, name in (
        ("full_tensor", "time_vs_full_tensor"),
        ("vanilla", "time_vs_vanilla"),
        ("verl", "time_vs_verl_way"),
        ("exchange", "gather_vs_exchange_time"),
    ):
        if side in measured:
            yield line(
                f"reshard_{name}_{label(case)}", "s", low, measured["ours"], measured[side],
                **where,
            )  # fmt: skip
    yield line(
        f"reshard_scratch_in_buckets_{label(case)}", "buckets", low,
        [scratch["ours"] / bucket_bytes], [weights.largest / bucket_bytes],
        baseline_is="the largest parameter, whole, in float32", **where,
    )  # fmt: skip


def dist_reduce(value: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """A number over all ranks."""
    value = value.clone()
    dist.all_reduce(value, how)
    return value


def work(rank: int, size: int, file: str, cases: list[Case], args: argparse.Namespace) -> None:
    """One process."""
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # two gathers, not one
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    records = [record for case in cases for record in compare(case, args)]
    if rank == 0:
        torch.save(records, f"{file}.records")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="54m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mb", type=float, default=16.0)
    parser.add_argument("--only", default="", help="layouts that begin so, 1x4x1_to_1x2 for one")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = [case for case in CASES if label(case).startswith(args.only)]
    worst: dict[str, dict[str, Any]] = {}
    for size, cases in itertools.groupby(chosen, lambda case: case[0].ranks):
        with tempfile.TemporaryDirectory() as directory:
            file = f"{directory}/rendezvous"
            spawn(work, (size, file, list(cases), args), nprocs=size)
            records = torch.load(f"{file}.records", weights_only=False)
        for record in records:
            show(record)
            name, _, layout = record["name"].rpartition("_to_")
            name, _, before = name.rpartition("_")
            if name not in worst or record["ratio"] > worst[name]["ratio"]:
                worst[name] = record | {"name": name, "worst": f"{before}_to_{layout}"}
    for record in worst.values():
        show(record)


if __name__ == "__main__":
    main()
