"""The options of `hybridrl plan auto`: numbers, files, and the cluster that they describe."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.links import LinkTable
from hybridrl.costs.mapping import ClusterShape, cluster_of
from hybridrl.costs.scales import CostScales
from hybridrl.plan.options import option_name, read_number, read_options
from hybridrl.telemetry.rundata import COSTS

_NUMBERS = {
    "nodes": 1,
    "gpus_per_node": 1,
    "prompt_tokens": 1,
    "number": 1,
    "seconds": 1.0,
    "gpu_gib": 1.0,
    "node_gbs": 0.001,
    "network_gbs": 0.001,
    "host_gbs": 0.001,
}
_TEXTS = ("lengths", "costs", "gpu", "links", "max_staleness")
FLAGS = ("--price",)


def auto_options(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options by name, and the other arguments. Raises ConfigError."""
    options, rest = read_options("auto", args, _NUMBERS, _TEXTS)
    if wrong := next((arg for arg in rest if arg.startswith("-") and arg not in FLAGS), None):
        known = ", ".join([*map(option_name, (*_NUMBERS, *_TEXTS)), *FLAGS])
        raise ConfigError("option", wrong, f"key=value, or one of {known}")
    if "max_staleness" in options:
        texts = options["max_staleness"].split(",")
        numbers = [read_number("--max-staleness", text, 0) for text in texts]
        options["max_staleness"] = list(dict.fromkeys(numbers))
    return options, rest


def read_cluster(options: Mapping[str, Any]) -> ClusterShape:
    """The cluster that the options describe. Raises ConfigError."""
    gpu = options.get("gpu", "h100")
    if gpu not in ACCELERATORS:
        raise ConfigError("--gpu", gpu, f"one of {', '.join(ACCELERATORS)}")
    if "nodes" not in options:
        raise ConfigError("--nodes", "", "how many nodes the planned cluster has")
    cluster = cluster_of(ACCELERATORS[gpu], options["nodes"], options.get("gpus_per_node", 8))
    links = {"within": "node_gbs", "between": "network_gbs", "host": "host_gbs"}
    speeds: dict[str, Any] = {
        link: replace(getattr(cluster, link), bytes_per_s=options[name] * 1e9)
        for link, name in links.items()
        if name in options
    }
    if "links" in options:
        speeds["table"] = _links(options["links"], cluster.ranks)
    return replace(cluster, **speeds)


def _links(file: str, ranks: int) -> LinkTable:
    try:
        table = LinkTable.from_json(json.loads(Path(file).read_text()))
        if table.size != ranks:
            raise ValueError(f"{table.size} workers, not --nodes x --gpus-per-node = {ranks}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"a file with bytes_per_s (and message_s) from each worker to each ({reason})"
        raise ConfigError("--links", file, allowed) from None
    return table


def read_scales(run_dir: str, device: str, engine: str) -> CostScales:
    """The scales that a run has learned on such a device, with such a rollout engine.

    Raises ConfigError, for another device or engine too.
    """
    try:
        record = json.loads((Path(run_dir) / COSTS).read_text())
        ran_on = record["device"], record["engine"]
        scales = CostScales.from_json(record["scales"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"a run's directory whose {COSTS} has scales, device and engine ({reason})"
        raise ConfigError("--costs", run_dir, allowed) from None
    if ran_on != (device, engine):
        allowed = f"a run on {device} with rollout.engine={engine}; this one was on {ran_on[0]}"
        raise ConfigError("--costs", run_dir, f"{allowed} with {ran_on[1]}")
    return scales
