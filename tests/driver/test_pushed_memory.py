"""What pushed weights take in a run, byte for byte beside the memory plan of its pools."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridrl.config import Config, Device, Push
from hybridrl.costs.push_memory import (
    ADAPTERS,
    BASE,
    DELTAS,
    KEPT,
    LOADED,
    PACKED,
    PUSHED,
    SentSizes,
)
from hybridrl.driver.pushes import Pushes
from hybridrl.layout.push import PushTarget
from hybridrl.models.load import TORCH_DTYPES, load_config
from hybridrl.preflight.memory_plan import Room, plan_run
from hybridrl.preflight.prepare import prepare
from hybridrl.preflight.pushed_sizes import sent_sizes
from hybridrl.telemetry.records import read_lines
from hybridrl.workers.pushed_weights import AdapterTarget, pushed_plan
from hybridrl.workers.sparse_pushes import DeltaSource

pytestmark = pytest.mark.long

STEPS = 6
ONE = ["cluster.ranks=2", "cluster.pools.rollout=1"]
FOUR = ["cluster.ranks=4", "cluster.pools.rollout=2", "rollout.layout.tp=2"]
SPARSE = ["rollout.dtype=bfloat16", "rollout.push=sparse", "trainer.optim.lr=1e-3"]
LORA = ["rollout.dtype=bfloat16", "actor.lora.rank=4"]
CASES = {
    "serial": [*ONE, "schedule=serial"],
    "periodic": [*ONE, "schedule=periodic"],
    "one_step": [*ONE, "schedule=one_step"],
    "three steps": [*ONE, "schedule=async", "schedule.max_staleness=3"],
    "in flight": [
        *ONE,
        "schedule=async",
        "schedule.max_staleness=3",
        "schedule.new_weights=in_flight",
    ],
    "adapters": [*ONE, "schedule=one_step", *LORA],
    "sparse": [*ONE, "schedule=one_step", *SPARSE],
    "fsdp 2, tp 2": [*FOUR, "schedule=one_step"],
    "fsdp 2, tp 2, sparse": [*FOUR, "schedule=one_step", *SPARSE],
}


class Held:
    """The arrays that the driver refers to, after each push: here a reference is the array."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions = self.of_rank = self.largest = self.deltas = 0
        self._arrays: set[int] = set()
        keep, deltas = Pushes.keep, DeltaSource.deltas

        def counted(pushes: Pushes, versions: Collection[int]) -> None:
            self._count(pushes)
            keep(pushes, versions)
            shares = [share for held in pushes._shares.values() for share in held]
            self._arrays = {id(array) for share in shares for array in share.arrays.values()}

        def from_held(source: DeltaSource, references: Mapping[int, Any]) -> Any:
            assert {id(array) for array in source._before.values()} <= self._arrays
            return deltas(source, references)

        monkeypatch.setattr(Pushes, "keep", counted)
        monkeypatch.setattr(DeltaSource, "deltas", from_held)

    def _count(self, pushes: Pushes) -> None:
        held = list(pushes._shares.values())
        self.versions = max(self.versions, len(held))
        for of_rank in zip(*held, strict=True):
            arrays = [array.data for share in of_rank for array in share.arrays.values()]
            assert all(isinstance(array, np.ndarray) for array in arrays)  # host memory
            self.of_rank = max(self.of_rank, sum(array.nbytes for array in arrays))
            self.largest = max(self.largest, *(array.nbytes for array in arrays))
            deltas = [delta.data for share in of_rank for delta in share.deltas.values()]
            self.deltas = max(self.deltas, sum(delta.nbytes for delta in deltas))


FURTHER = [pytest.mark.layouts, pytest.mark.wide]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(x, id=name, marks=FURTHER if "tp 2" in name else [])
        for name, x in CASES.items()
    ],
)
def test_a_run_holds_the_bytes_of_its_plan(
    train_here: Callable[..., Any],
    make_config: Callable[..., Config],
    long_tail: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
) -> None:
    held = Held(monkeypatch)
    ours = [*long_tail, f"trainer.steps={STEPS}", *settings]
    run = train_here(tmp_path / "run", *ours)
    events = read_lines(run.dir / "events.jsonl")
    pushed = {event["bytes_most"] for event in events if event["kind"] == "push"}
    loads = [event for event in events if event["kind"] == "load"]
    assert len(loads) >= 3  # of the first weights, of others, and of those that are evaluated

    config = make_config("cluster=processes", *ours, f"run.dir={tmp_path / 'planned'}")
    graph, shape = prepare(config).graph, load_config(str(run.dir / "start"))
    sent = sent_sizes(config, shape)
    is_sparse = config.rollout.push is Push.sparse
    if is_sparse:
        assert max(pushed) == sent.version == sent.deltas > held.deltas > 0
    else:
        assert pushed == {sent.version}
        assert sent.deltas == held.deltas == 0
    own = {"largest": held.largest, "versions": held.versions}
    assert sent == SentSizes(version=sent.version, deltas=sent.deltas, **own)

    pools = plan_run(config, graph, shape, Room(2**40, 0)).pools
    actor, rollout = (phases(pools[pool].phases) for pool in ("actor", "rollout"))
    for name, sizes in actor.items():
        is_empty = name.startswith("load")
        assert sizes.get(PUSHED, 0) == (0 if is_empty else held.of_rank), name
        assert sizes.get(DELTAS, 0) == (0 if is_empty else held.versions * sent.deltas), name
    assert actor["push actor"][PACKED] == sent.version
    push, dtype = pushed_plan(config, shape), TORCH_DTYPES[config.rollout.dtype]
    places = [PushTarget(push, place, dtype).bytes_theory for place in range(push.num_places)]
    assert rollout["load weights"][LOADED] == max(places)  # rows of a vocabulary may be odd
    assert all(phase.get(KEPT, 0) == is_sparse * max(places) for phase in rollout.values())
    taken = {event["bytes"] for event in loads}
    assert (max(taken) if is_sparse else taken) == (sum(places) if is_sparse else {sum(places)})

    config.cluster.device = Device.cuda
    pools = plan_run(config, graph, shape, Room(2**40, 0)).pools
    on_host = {PUSHED: held.of_rank, PACKED: sent.version}
    assert {name: pools["actor"].on_host[name] for name in on_host} == on_host
    assert phases(pools["actor"].phases)["push actor"][PACKED] == held.largest
    host = pools["rollout"].on_host
    assert host[LOADED] == rollout["load weights"][LOADED]
    assert host.get(KEPT, 0) == rollout["load weights"].get(KEPT, 0)


def test_weights_below_adapters_have_the_bytes_of_the_plan(
    make_config: Callable[..., Config], long_tail: list[str], tmp_path: Path
) -> None:
    settings = [*long_tail, *CASES["adapters"], f"run.dir={tmp_path}", "cluster=processes"]
    config = make_config(*settings)
    prepared = prepare(config)
    shape = load_config(prepared.model_path)
    pools = plan_run(config, prepared.graph, shape, Room(2**40, 0)).pools
    planned = phases(pools["rollout"].phases)["decode"]
    target = AdapterTarget(config, shape, prepared.model_path, 0, torch.device("cpu"))
    assert planned[BASE] == sum(tensor.nbytes for tensor in target._merged.base.values())
    assert planned[ADAPTERS] == sum(tensor.nbytes for tensor in target._buffers.values())


def phases(of_pool: Any) -> dict[str, dict[str, int]]:
    return {phase.name: dict(phase.sizes) for phase in of_pool}
