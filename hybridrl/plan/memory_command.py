"""`hybridrl plan layout` and `hybridrl plan memory`: their arguments and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridrl.config import ActivationMode, ClusterKind, Config, ConfigError, Device
from hybridrl.plan.options import read_options
from hybridrl.preflight import memory_plan
from hybridrl.preflight.activation_choice import choose_activations, line_of
from hybridrl.preflight.node_crossing import crossing_warnings
from hybridrl.preflight.placement import check_placement
from hybridrl.preflight.prepare import build_recipe, check_attention
from hybridrl.telemetry.log import command_log

if TYPE_CHECKING:
    from hybridrl.costs.memory import RunPlan
    from hybridrl.plan.layout import LayoutReport

USAGE = """usage: hybridrl plan layout [OVERRIDES] [--gpus-per-node=N] [--gpu-gib=N]
       hybridrl plan memory [OVERRIDES] [--gpus-per-node=N] [--gpu-gib=N]
       hybridrl plan schedule --lengths=... [OPTIONS]     see hybridrl plan schedule --help
       hybridrl plan auto [OVERRIDES] --nodes=N --lengths=... [OPTIONS]   see --help

`memory` prints what a rank of each pool holds in each phase of a step, and whether it fits a GPU of
N GiB (80, or 79.6; that of this node, else 80), or with cluster.device=cpu this node's memory.
`layout` prints before that what each rank holds, receives and sends at the switch from training to
generation.

  the model      model=llama3_8b | llama3_70b | qwen3_1.7b | qwen3_8b | qwen3_32b | qwen3_30b_a3b,
                 model.path=DIR (where a config.json is enough), or
                 '+model.shape={model_type: ..., ...}'
  the ranks      cluster.ranks=128
  in training    trainer.layout.pp, .replicas, .fsdp, .tp, .ep, .ep_grouping, .cp, .schedule;
                 trainer.activations, .chunk_tokens, .optim.name
  in generation  rollout.layout.pp, .tp, .ep, .grouping, .bucket_mb; rollout=vllm
  attention      model.attention=flash or varlen plans with FlashAttention, =torch without (auto: as
                 on this node)

  hybridrl plan layout model=llama3_70b cluster.ranks=128 trainer.layout.pp=8 \\
      trainer.layout.fsdp=8 trainer.layout.tp=2 rollout.layout.tp=8
  hybridrl plan memory model=qwen3_8b cluster.ranks=8 recipe=ppo rollout.max_new_tokens=8192"""

_GPUS, _GIB = "--gpus-per-node", "--gpu-gib"
_USUAL_GPUS, _USUAL_GIB = 8, 80  # of a node, and of its GPUs, where this one has none


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The switch between two layouts, and the memory of a rank under them, or why it is unknown."""

    switch: "LayoutReport"
    memory: "RunPlan | str"
    warnings: Sequence[str] = ()
    """Which groups span several nodes, and what avoids it."""

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values to read: of the switch, then a line for each phase of a step."""
        switch = [*self.switch.rows(), *(("across nodes", line) for line in self.warnings)]
        if isinstance(self.memory, str):
            return [*switch, ("memory of a rank", f"not known: {self.memory}")]
        phases = [
            (f"  {name}" if name else "", f"{total}  {sizes}".strip())
            for name, total, sizes in self.memory.rows()
        ]
        return [*switch, ("memory of a rank", ""), *phases]

    def record(self) -> dict[str, object]:
        """Return switch and memory as JSON data; null for memory that is not known."""
        memory = None if isinstance(self.memory, str) else self.memory.record()
        return self.switch.record() | {"warnings": [*self.warnings], "memory": memory}


def run(args: list[str]) -> "LayoutPlan | RunPlan":
    """The plan that `args` ask for: `layout` or `memory`, then options and overrides.

    Raises ConfigError.
    """
    from hybridrl.config import compose
    from hybridrl.system.devices import local_gpus

    what = args[0] if args else ""
    if what not in ("layout", "memory"):
        raise ConfigError("plan", what, "auto, layout, memory or schedule, then its options")
    compose.register()
    options, rest = read_options(what, args[1:], {"gpus_per_node": 1, "gpu_gib": 1.0})
    gpus_per_node = options.get("gpus_per_node") or local_gpus() or _USUAL_GPUS
    gpu_gib = options.get("gpu_gib", 0)
    if wrong := next((arg for arg in rest if arg.startswith("-")), None):
        raise ConfigError("option", wrong, f"key=value, or {_GPUS}=N or {_GIB}=N")
    config = compose.check(rest)
    with command_log(config.log.level):
        if config.cluster.kind is not ClusterKind.slurm:
            config.resolve_device(config.cluster.ranks or gpus_per_node, "the planned cluster")
        if what == "layout":
            switch, warnings = _plan_layout(config, gpus_per_node)
            return LayoutPlan(switch, _memory(config, gpu_gib), warnings)
        memory = _memory(config, gpu_gib)
        if isinstance(memory, str):
            raise ConfigError("plan", "memory", f"a model whose memory can be counted ({memory})")
        return memory


def _memory(config: Config, gpu_gib: float) -> "RunPlan | str":
    """The plan, or why a family has none."""
    try:
        return _plan_memory(config, gpu_gib)
    except ConfigError:
        raise
    except Exception as error:  # whatever a family's code runs into on tensors without memory
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _plan_layout(config: Config, gpus_per_node: int) -> "tuple[LayoutReport, list[str]]":
    """The switch in numbers, and a line for each layout whose groups span nodes."""
    from hybridrl.layout.grouping import TrainAxes
    from hybridrl.layout.layout import stages_of_layers
    from hybridrl.layout.switching import plan_switch
    from hybridrl.models.parallel import model_parameters
    from hybridrl.plan.layout import report
    from hybridrl.preflight.memory_inputs import checked_shape

    train, gen = config.trainer.layout, config.rollout.layout
    train.place_experts(config.ranks_of("actor"), gpus_per_node)
    shape = checked_shape(config)
    parameters = model_parameters(shape)
    per_rank = train.num_chunks // train.pp
    workers = config.cluster.worker_of_rank[: config.ranks_of("actor")]
    nodes = [worker // gpus_per_node for worker in workers]
    switch = plan_switch(
        parameters,
        TrainAxes.of(train),
        gen.pp,
        gen.tp,
        gen.grouping,
        stages_of_layers(
            shape.num_hidden_layers, train.pp, per_rank, train.zigzag, train.chunk_layers
        ),
        gen_ep=gen.ep,
        ascending=config.rollout.features.ascending,
        nodes=nodes,
    )
    itemsize = config.rollout.dtype.itemsize
    instances = switch.plan.dst.mesh.grid().reshape(-1, gen.ranks).tolist()
    bucket = gen.bucket_bytes(config.cluster.device.value)
    return (
        report(switch, itemsize, bucket, gpus_per_node),
        crossing_warnings(config, nodes, range(len(nodes)), instances),
    )


def _plan_memory(config: Config, gpu_gib: float) -> "RunPlan":
    """Plan the memory of the planned cluster's ranks, whose GPUs have `gpu_gib` GiB.

    0 takes the memory of the GPUs here, else 80 GiB.
    """
    from hybridrl.preflight.memory_inputs import checked_shape
    from hybridrl.preflight.prompt_sharing import decide_prompt_sharing
    from hybridrl.preflight.schedule_choice import decide_schedule
    from hybridrl.system.devices import local_gpus

    graph, shape = build_recipe(config.recipe), checked_shape(config)
    check_placement(config, graph)
    decide_schedule(config, graph, shape)
    decide_prompt_sharing(config, graph, shape)
    check_attention(config, shape)
    on_gpus = config.cluster.device is Device.cuda
    if gpu_gib and not on_gpus:
        raise ConfigError(_GIB, f"{gpu_gib:g}", "cluster.device=cuda with it")
    if on_gpus and (gpu_gib or not local_gpus()):
        room = memory_plan.gpu_room(round((gpu_gib or _USUAL_GIB) * 2**30))
        if room.capacity <= room.reserved:
            allowed = f"more than the {room.reserved / 2**30:.1f} GiB that are left for others"
            raise ConfigError(_GIB, f"{gpu_gib:g}", allowed)
    else:
        room = memory_plan.local_room(config)
    if config.trainer.activations is not ActivationMode.auto:
        return memory_plan.plan_run(config, graph, shape, room)
    mode, reason = choose_activations(config, graph, shape, room)
    config.trainer.activations = mode
    plan = memory_plan.plan_run(config, graph, shape, room)
    return replace(plan, activations=line_of(mode, reason))
