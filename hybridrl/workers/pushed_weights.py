"""The push of the actor's weights to generation ranks: what both sides compute from the config."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from hybridrl.config import Config, Grouping
from hybridrl.flow.sample import NO_VERSION
from hybridrl.layout.adapters import MergedWeights
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.layerwise import Held, Load
from hybridrl.layout.layout import Layout, stages_of_layers
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import gen_mesh
from hybridrl.layout.parameters import Parameter, gen_layout, train_layout
from hybridrl.layout.push import PushPlan, PushTarget, WeightArray
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.models.adapters import adapter_parameters, add_adapters, pair_of
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.parallel import meta_model, model_parameters
from hybridrl.models.stored_weights import StoredWeights
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.pending_samples import write_records


@dataclass(frozen=True, slots=True)
class PushedShare:
    """What one training rank has put into the data plane of a version.

    `arrays` has a reference by place, where it sends something there (`layout.push.WeightArray`),
    and `deltas` one by place where what has changed since version `base` is smaller
    (`layout.push_deltas.WeightDelta`). `num_bytes` are its own, of deltas where it has them,
    `bytes_theory` those that all places of an instance have in all. `biases` refers to routing
    biases, where training moves them and this rank sends them. Of the
    `seconds`, `proof_seconds` went into comparing the arrays with the shards.
    """

    version: int
    arrays: Mapping[int, Any]
    num_bytes: int
    seconds: float
    bytes_theory: int = 0
    biases: Any = None
    base: int = NO_VERSION
    proof_seconds: float = 0.0
    deltas: Mapping[int, Any] = field(default_factory=dict)


def push_plan(
    config: Config, shape: PretrainedConfig, adapters: Sequence[Parameter] | None = None
) -> PushPlan:
    """The plan from the actor's training ranks to one instance, for all weights or `adapters`."""
    train, gen = config.trainer.layout, config.rollout.layout
    parameters = model_parameters(shape) if adapters is None else adapters
    stages = stages_of_layers(
        shape.num_hidden_layers,
        train.pp,
        train.num_chunks // train.pp,
        train.zigzag,
        train.chunk_layers,
    )
    ep = gen.ep if adapters is None else 1
    src = train_layout(parameters, TrainAxes.of(train), stages, gen.tp, ep)
    multiple = config.rollout.features.vocab_multiple if adapters is None else 1
    size = gen.pp, gen.tp, shape.num_hidden_layers
    return PushPlan.make(src, parameters, *size, multiple, ep)


def pushed_plan(config: Config, shape: PretrainedConfig) -> PushPlan:
    """The plan of what a push moves: of a model with adapters these alone."""
    lora = config.actor.lora
    if not lora.rank:
        return push_plan(config, shape)
    model = meta_model(shape)
    add_adapters(model, lora, 0, torch.float32)
    return push_plan(config, shape, adapter_parameters(model, model_parameters(shape)))


class AdapterTarget:
    """A place of a model with adapters: its weights are read from the model's files, once."""

    def __init__(
        self, config: Config, shape: PretrainedConfig, path: str, place: int, device: torch.device
    ) -> None:
        dtype = TORCH_DTYPES[config.rollout.dtype]
        whole, adapters = push_plan(config, shape).plan, pushed_plan(config, shape)
        self._adapters = PushTarget(adapters, place, dtype)
        rank, layout = whole.src.mesh.size + place, whole.dst
        base: dict[str, torch.Tensor] = {}
        with StoredWeights(path, shape) as weights:
            for name in layout.rules:
                held = LocalTensor(layout.local(name, rank))
                if held.shape is not None:
                    tensor = torch.empty(held.shape, dtype=dtype)
                    weights.fill(tensor, name, held)
                    base[name] = tensor if device.type == "cpu" else tensor.pin_memory()
        names = adapters.plan.dst.shapes
        pairs = {name: pair for name in base if (pair := pair_of(name))[0] in names}
        self._merged = MergedWeights(base, pairs, config.actor.lora.scaling)
        own, device_of = adapters.plan.dst, device
        shapes = {name: LocalTensor(own.local(name, rank)).shape for name in own.rules}
        self._buffers = {
            name: torch.empty(size, dtype=dtype, device=device_of)
            for name, size in shapes.items()
            if size is not None
        }

    def load(
        self,
        arrays: Iterable[WeightArray],
        version: int,
        load: Load,
        *,
        held: Held | None = None,
    ) -> SwitchStats:
        """See `PushTarget.load`; weights are those of the files with the adapters' product.

        Proven are the adapters, and not what an engine has `held`.
        """
        stats = self._adapters.load(arrays, version, lambda fill: fill(self._buffers))
        load(lambda tensors, names=None: self._merged.fill(tensors, self._buffers))
        return stats


def instances_layout(config: Config, shape: PretrainedConfig, ranks: int) -> Layout:
    """The generation layout of a pool of so many ranks that generate alone."""
    gen = config.rollout.layout
    positions = gen_positions(TrainAxes(fsdp=ranks), gen.pp, gen.tp, Grouping.vanilla)
    mesh = gen_mesh(positions, gen.pp, gen.tp)
    multiple = config.rollout.features.vocab_multiple
    parameters = model_parameters(shape)
    return gen_layout(parameters, mesh, shape.num_hidden_layers, multiple, gen.ep)


def save_pushed(
    folder: Path, rank: int, shares: Mapping[int, PushedShare], plane: DataPlane
) -> None:
    """Write a training rank's arrays of some versions; raises OSError with the file's path."""
    records = {}
    for version, share in shares.items():
        arrays = plane.get(list(share.arrays.values()))
        places = dict(zip(share.arrays, map(_array_record, arrays), strict=True))
        biases = None if share.biases is None else plane.get([share.biases])[0]
        records[version] = {"places": places, "biases": biases}
    write_records(folder / f"pushed_{rank}.pt", records)


def load_pushed(folder: Path, rank: int, plane: DataPlane) -> dict[int, PushedShare]:
    """What `save_pushed` has written, in the data plane again; nothing without a file."""
    file = folder / f"pushed_{rank}.pt"
    if not file.is_file():
        return {}
    shares = {}
    for version, record in torch.load(file, weights_only=True).items():
        arrays = {
            place: WeightArray(version, rank, x["data"].numpy(), x["checksum"])
            for place, x in record["places"].items()
        }
        biases = None if record["biases"] is None else plane.put(record["biases"])
        references = {place: plane.put(array) for place, array in arrays.items()}
        num_bytes = sum(array.data.nbytes for array in arrays.values())
        shares[version] = PushedShare(version, references, num_bytes, 0.0, biases=biases)
    return shares


def _array_record(array: WeightArray) -> dict[str, Any]:
    return {"data": torch.from_numpy(array.data.copy()), "checksum": array.checksum}
