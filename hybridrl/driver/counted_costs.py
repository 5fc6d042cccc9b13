"""Seconds of a run's work by counted operations, before its calls have scaled them."""

import logging
from collections.abc import Sequence

from hybridrl.config import Config, Device
from hybridrl.costs.devices import ACCELERATORS, device_of
from hybridrl.costs.instance import Costs
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import ACTOR, SampleLength, cluster_of
from hybridrl.costs.mapping_overrides import mapping_of
from hybridrl.costs.model import CostModel
from hybridrl.flow import Graph
from hybridrl.flow.mapped_work import MappedWork
from hybridrl.models.load import load_config
from hybridrl.preflight.mapping_roles import planned_roles, role_shapes
from hybridrl.system.node_info import NodeInfo

logger = logging.getLogger(__name__)


def counted_device(config: Config, nodes: Sequence[NodeInfo]) -> str:
    """The name of the datasheet by which a run's seconds are counted: `cpu`, `h100`, ..."""
    names = [gpu.name for node in nodes for gpu in node.gpus]
    on_cpu = config.cluster.device is Device.cpu or not names
    return device_of("" if on_cpu else names[0])


def counted_costs(
    config: Config, graph: Graph, model_path: str, nodes: Sequence[NodeInfo]
) -> Costs | None:
    """Seconds of work on an instance by its operations, before the run has scaled them.

    None for a recipe that does not generate or does not train the actor, and for a model whose
    sizes have other names than a decoder's. A run works without them, so nothing that fails here
    may end it: the log has the traceback of what should not.
    """
    if not (graph.generates and graph.trains(ACTOR)):
        return None
    try:
        return _counted(config, graph, model_path, nodes)
    except ValueError as error:
        logger.info("seconds are learned without counted ones: %s", error)
    except Exception:
        logger.warning("seconds are learned without counted ones", exc_info=True)
    return None


def _counted(config: Config, graph: Graph, model_path: str, nodes: Sequence[NodeInfo]) -> Costs:
    """Raise ValueError for models that are not countable."""
    shape = load_config(model_path, vision=config.model.vision)
    roles = planned_roles(config, graph, role_shapes(config, graph, shape))
    accelerator = ACCELERATORS[counted_device(config, nodes)]
    layers = LayerCosts.of(accelerator, config.model.compute_dtype.itemsize, config.rollout.engine)
    per_node = -(-config.cluster.ranks // len(nodes))
    work = MappedWork(
        costs=CostModel(layers, cluster_of(accelerator, len(nodes), per_node)),
        mapping=mapping_of(config, roles),
        roles=roles,
        mini_batches=config.trainer.mini_batches,
        epochs=config.trainer.epochs,
    )
    lengths = SampleLength(config.data.max_prompt_tokens // 2, config.rollout.max_new_tokens // 2)
    samples = max(work.mapping.instances, config.trainer.prompts_per_step * graph.group_size)
    return work.flow_costs([lengths] * samples)
