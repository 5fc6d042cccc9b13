"""`hybridrl plan calibrate`: what a layer costs on this machine, and its links between ranks."""

import json
import math
import pickle
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config import Config, ConfigError, Device
from hybridrl.doctor.measure import link_table
from hybridrl.flow.costs import Numbers
from hybridrl.planner.accelerators import Accelerator
from hybridrl.planner.layer_fit import fit_layers
from hybridrl.planner.links import LinkSpeed
from hybridrl.planner.mapping import (
    AT_ONCE,
    ClusterShape,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
)
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.model_shape import ModelShape
from hybridrl.planner.recorded_costs import with_halves
from hybridrl.system.rendezvous import open_store

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.doctor.calibration_rank import RankTimes

USAGE = """usage: hybridrl plan calibrate [OVERRIDES] [--run=RUN] [--costs=FILE] [--out=FILE]

Measures what a layer costs on this machine with the engines' own code, and the links between its
ranks, in two minutes. Writes costs.mapping.json, or FILE, for `hybridrl plan auto --costs=FILE`.

  the model   as for a run; its widths and its family are measured, with few layers
  the ranks   cluster.ranks of this machine, all at work at once
  --run       a run's directory: the costs are scaled to the micro-batches that it timed, by role,
              and to its decode steps. Its settings are those of the calibration
  --costs     with --run, earlier costs to scale, in place of a calibration

  hybridrl plan calibrate model=qwen3_8b --out=node.json
  hybridrl plan calibrate --run=runs/latest --costs=node.json --out=run.json"""

_HOST = "127.0.0.1"
OUT = "costs.mapping.json"


def run(args: Sequence[str]) -> tuple[list[str], MappingCosts]:
    """Measure as `args` say, and write the costs: lines to read, and all of them.

    Raises ConfigError.
    """
    from hybridrl.config import compose
    from hybridrl.models.shape import model_shape
    from hybridrl.system.devices import local_gpus
    from hybridrl.telemetry.log import command_log

    compose.register()
    texts = [arg.removeprefix("--out=") for arg in args if arg.startswith("--out=")]
    rest = [arg for arg in args if not arg.startswith("--out=")]
    if wrong := next((arg for arg in rest if arg.startswith("-")), None):
        raise ConfigError("option", wrong, "key=value, --out=FILE, or --run=RUN with --costs=FILE")
    out = Path(texts[-1] if texts else OUT)
    check_out(out)
    config = compose.check(rest)
    config.resolve_device(local_gpus(), "this machine")
    with command_log(config.log.level):
        shape = model_shape(config.model)
        costs = calibrate(config, shape)
    write(out, costs)
    return _lines(out, costs, ModelShape.of_config(shape.to_dict())), costs


def check_out(out: Path) -> None:
    """Raises ConfigError where no file can be written."""
    if not out.parent.is_dir():
        raise ConfigError("--out", str(out), "a file in a directory that is there")


def write(out: Path, costs: MappingCosts) -> None:
    """Write costs for `hybridrl plan auto --costs`."""
    out.write_text(json.dumps(costs.to_json(), indent=1) + "\n")


def calibrate(config: Config, shape: "PretrainedConfig") -> MappingCosts:
    """Costs of the ranks of `config`, all on this machine, and of models like that of `shape`.

    Raises ConfigError for a model whose work is not that of a dense decoder.
    """
    from torch.multiprocessing.spawn import spawn

    from hybridrl.doctor import calibration_rank

    try:
        ModelShape.of_config(shape.to_dict())
    except ValueError as error:
        kind = shape.model_type
        raise ConfigError("model", kind, f"a dense decoder: {error}") from None
    ranks = config.cluster.ranks
    with tempfile.TemporaryDirectory(prefix="hybridrl-calibrate") as folder_name:
        folder = Path(folder_name)
        models = calibration_rank.write_models(shape, folder)
        store = open_store(_HOST, 0, listens=True)
        results = folder / "times"
        results.mkdir()
        args = ranks, _HOST, store.port, config, models, results
        spawn(calibration_rank.measure_rank, args, nprocs=ranks)
        times = [pickle.loads((results / str(rank)).read_bytes()) for rank in range(ranks)]
    return costs_of(times, config)


def costs_of(times: "Sequence[RankTimes]", config: Config) -> MappingCosts:
    """What the ranks have measured, as costs."""
    on_gpus = config.cluster.device is Device.cuda
    model = config.model.path or config.model.shape.get("model_type", "the tiny model")
    fitted = fit_layers(
        [timed for rank in times for timed in rank.passes],
        [timed for rank in times for timed in rank.decoding],
        [timed for rank in times for timed in rank.switches],
        [timed for rank in times for timed in rank.split],
        source=f"calibrated: {model}, {len(times)} rank{'s' * (len(times) > 1)}",
        itemsize=config.model.compute_dtype.itemsize,
        overlaps=on_gpus,
    )
    link = _link(times)
    host = statistics.median(rank.host_bytes_per_s for rank in times) or AT_ONCE.bytes_per_s
    accelerator = Accelerator(
        flops=statistics.median(rank.flops for rank in times),
        memory_bytes_per_s=statistics.median(rank.memory_bytes_per_s for rank in times),
        memory_bytes=_memory(config),
        network_bytes_per_s=link.bytes_per_s,
        node_bytes_per_s=link.bytes_per_s,
        host_bytes_per_s=host,
    )
    table = link_table([link for rank in times for link in rank.links], len(times))
    cluster = ClusterShape(
        1,
        len(times),
        accelerator,
        link,
        link,
        LinkSpeed(host),
        table if table is not None and table.is_uneven else None,
    )
    costs = MappingCosts(fitted, cluster, config.trainer.max_tokens_per_micro_batch)
    return with_halves(costs, [timed for rank in times for timed in rank.in_halves])


def _link(times: "Sequence[RankTimes]") -> LinkSpeed:
    """By all-reduces: the smallest one is a message's latency, the largest one the bandwidth."""
    reduces = sorted(
        (link for link in times[0].links if link.kind == "all_reduce"), key=lambda x: x.nbytes
    )
    if not reduces:
        return AT_ONCE
    latency = reduces[0].seconds / math.ceil(math.log2(len(times)))
    return LinkSpeed(reduces[-1].rate, latency)


def _memory(config: Config) -> float:
    """Bytes of a rank's device, or its share of this node."""
    from hybridrl.controller.memory_plan import local_room

    return float(local_room(config).capacity)


def _lines(out: Path, costs: MappingCosts, shape: ModelShape) -> list[str]:
    """What the costs say of the model, to read."""
    cluster, role = costs.cluster, PlannedRole(name="actor", shape=shape, trained=True)
    row = [SampleLength(128, 384)] * max(1, costs.row_tokens // 512)
    tokens = sum(sample.tokens for sample in row)
    (one,) = costs.passes(role, TrainLayout(), range(1), row)
    instance = costs.generation(role, GenLayout(), range(1))
    peak = f"{cluster.accelerator.flops / 1e9:.3g} Gflop/s in large products"
    return [
        f"{costs.layer_costs.source}; a rank: {peak}",
        f"a row of {tokens} tokens: {_ms(one.forward_s)} forward, {_ms(one.backward_s)} backward",
        f"a decode step: {_ms(instance.pass_s(1, 256))} of one row of 256 tokens, "
        f"{_ms(instance.pass_s(64, 256))} of 64",
        f"links: {cluster.within.message_s * 1e6:.0f} us a message, "
        f"{cluster.within.bytes_per_s / 1e9:.3g} GB/s"
        + "; they differ, each has its own in the file"
        * (cluster.table is not None),
        f"written to {out}",
    ]


def _ms(seconds: Numbers) -> str:
    return f"{float(seconds) * 1e3:.3g} ms"
