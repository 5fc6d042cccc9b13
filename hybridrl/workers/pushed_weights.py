"""The push of the actor's weights to generation ranks: what both sides compute from the config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hybridrl.config import Config
from hybridrl.layout.grouping import Grouping, TrainAxes, gen_positions
from hybridrl.layout.layout import Layout, stages_of_layers
from hybridrl.layout.mesh import gen_mesh
from hybridrl.layout.parameters import gen_layout, train_layout
from hybridrl.layout.push import PushPlan
from hybridrl.models.parallel import model_parameters


@dataclass(frozen=True, slots=True)
class PushedShare:
    """What one training rank has put into the data plane of a version.

    `arrays` has a reference by place, where it sends something there (`layout.push.WeightArray`).
    `biases` refers to routing biases, where training moves them and this rank sends them.
    """

    version: int
    arrays: Mapping[int, Any]
    num_bytes: int
    seconds: float
    biases: Any = None


def push_plan(config: Config, shape: PretrainedConfig) -> PushPlan:
    """The plan from the actor's training ranks to one instance."""
    train, gen = config.trainer.layout, config.rollout.layout
    parameters = model_parameters(shape)
    stages = stages_of_layers(
        shape.num_hidden_layers,
        train.pp,
        train.num_chunks // train.pp,
        train.zigzag,
        train.chunk_layers,
    )
    src = train_layout(parameters, TrainAxes.of(train), stages, gen.tp, gen.ep)
    multiple = config.rollout.features.vocab_multiple
    size = gen.pp, gen.tp, shape.num_hidden_layers
    return PushPlan.make(src, parameters, *size, multiple, gen.ep)


def instances_layout(config: Config, shape: PretrainedConfig, ranks: int) -> Layout:
    """The generation layout of a pool of so many ranks that generate alone."""
    gen = config.rollout.layout
    positions = gen_positions(TrainAxes(fsdp=ranks), gen.pp, gen.tp, Grouping.vanilla)
    mesh = gen_mesh(positions, gen.pp, gen.tp)
    multiple = config.rollout.features.vocab_multiple
    parameters = model_parameters(shape)
    return gen_layout(parameters, mesh, shape.num_hidden_layers, multiple, gen.ep)
