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
from hybridrl.plan.options import option_name, read_number
from hybridrl.telemetry.rundata import COSTS

_NUMBERS = {
    "nodes": 1.0,
    "gpus_per_node": 1.0,
    "prompt_tokens": 1.0,
    "max_staleness": 0.0,
    "number": 1.0,
    "seconds": 1.0,
    "gpu_gib": 1.0,
    "node_gbs": 0.001,
    "network_gbs": 0.001,
    "host_gbs": 0.001,
}
"""Options that are numbers, and the least of each."""
_WHOLE = ("nodes", "gpus_per_node", "prompt_tokens", "max_staleness", "number")
_LISTS = ("max_staleness",)
_TEXTS = ("lengths", "costs", "gpu", "out", "links")
FLAGS = ("--price",)


def read_options(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options by name, and the other arguments. Raises ConfigError."""
    options: dict[str, Any] = {}
    rest = []
    known = {option_name(name): name for name in (*_NUMBERS, *_TEXTS)}
    for arg in args:
        option, _, value = arg.partition("=")
        if option in known:
            name = known[option]
            options[name] = value
            if name in _NUMBERS:
                whole, least = name in _WHOLE, _NUMBERS[name]
                texts = value.split(",") if name in _LISTS else [value]
                numbers = [
                    read_number(option, text, least, whole=whole, below=2**20) for text in texts
                ]
                options[name] = list(dict.fromkeys(numbers)) if name in _LISTS else numbers[0]
        elif arg.startswith("-") and arg not in FLAGS:
            allowed = f"key=value, or one of {', '.join([*known, *FLAGS])}"
            raise ConfigError("option", arg, allowed)
        else:
            rest.append(arg)
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
