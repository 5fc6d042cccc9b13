"""Seconds of a run's work by counted operations, before its calls have scaled them."""

from collections.abc import Sequence

from hybridrl.config import Config, Device
from hybridrl.costs.devices import ACCELERATORS, device_of
from hybridrl.costs.instance import Costs
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import SampleLength, cluster_of
from hybridrl.costs.mapping_overrides import mapping_of
from hybridrl.costs.model import CostModel
from hybridrl.flow import Graph
from hybridrl.flow.graph import GenerateStage
from hybridrl.models.load import load_config
from hybridrl.planner.emulation import group_size_of
from hybridrl.preflight.mapping_roles import planned_roles, role_shapes
from hybridrl.system.node_info import NodeInfo


def counted_costs(
    config: Config, graph: Graph, model_path: str, nodes: Sequence[NodeInfo]
) -> Costs | None:
    """Seconds of work on an instance by its operations, before the run has scaled them.

    None for a recipe that does not generate, and for a model whose sizes have other names than a
    decoder's.
    """
    if not any(isinstance(stage, GenerateStage) for stage in graph.stages.values()):
        return None
    try:
        roles = planned_roles(config, graph, role_shapes(config, graph, load_config(model_path)))
    except ValueError:
        return None
    names = [gpu.name for node in nodes for gpu in node.gpus]
    on_cpu = config.cluster.device is Device.cpu or not names
    accelerator = ACCELERATORS[device_of("" if on_cpu else names[0])]
    layers = LayerCosts.of(
        accelerator, config.model.compute_dtype.itemsize, config.rollout.engine.value
    )
    per_node = -(-config.cluster.ranks // len(nodes))
    model = CostModel(layers, cluster_of(accelerator, len(nodes), per_node))
    mapping = mapping_of(config, roles)
    share = config.trainer.prompts_per_step * group_size_of(graph) // mapping.instances
    lengths = SampleLength(config.data.max_prompt_tokens // 2, config.rollout.max_new_tokens // 2)
    return model.costs(roles, mapping, [lengths] * max(1, share))
