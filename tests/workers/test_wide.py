"""Instances on real ranks decode their last samples as one, and part again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from test_parking import PROMPT, TINY, Files

from hybridrl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    Device,
    ModelConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    TinyModelConfig,
)
from hybridrl.flow.executor import Advanced, Command, Park, Parked, Phase, Resume, Sampling, Submit
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.actor_worker import ActorWorker

EACH = 4  # samples of an instance


def shared(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stored(worker: ActorWorker) -> dict[SampleId, Any]:
    """Tokens and log-probabilities of the samples on any rank, each on one."""
    mine = {
        id: (s.tensors["tokens"].tolist(), s.tensors["log_probs"].tolist())
        for id, s in worker.store._samples.items()
    }
    shares = shared(mine)
    assert sum(map(len, shares)) == len({id for share in shares for id in share}), "held twice"
    return {id: value for share in shares for id, value in share.items()}


def merged(worker: ActorWorker, parked: tuple[Parked, ...]) -> list[Parked]:
    """What each instance has parked, with the references of all its ranks."""
    of_instance: dict[int, list[Parked]] = {}
    for instance, events in shared((worker.actor.instance, parked)):
        of_instance.setdefault(instance, []).append(events[0])
    return [
        Parked(
            same[0].ids,
            same[0].tokens,
            same[0].version,
            {place: state for event in same for place, state in event.state.items()},
            same[0].width,
        )
        for same in of_instance.values()
    ]


def widen(
    model: str, folder: Path, layout: dict[str, int], width: int, with_kv: bool, **rollout: Any
) -> dict[str, Any]:
    """Each instance alone; then again, with the tail on a wide instance; then alone again."""
    size = dist.get_world_size()
    axes = RolloutLayoutConfig(**layout)
    config = Config(
        model=ModelConfig(path=model),
        cluster=ClusterConfig(ranks=size, device=Device.cpu),
        data=DataConfig(max_prompt_tokens=8),
        rollout=RolloutConfig(
            max_new_tokens=24, layout=axes, tail_tp=str(axes.tp * width), **rollout
        ),
    )
    worker = ActorWorker(dist.get_rank(), size, config, model, Files(folder))
    with (
        mock.patch.object(dist, "init_process_group"),  # the test has made it
        mock.patch.dict(os.environ, MASTER_ADDR="localhost"),
    ):
        worker.setup(*worker.listen().value)
    worker.enter(Phase.GENERATE)
    own, (number,) = worker.actor.instance, worker.actor.wide
    ids = tuple(SampleId(0, k=EACH * own + k) for k in range(EACH))
    submit: list[Command] = [Submit(ids, PROMPT, Sampling(24))]
    every = [SampleId(0, k=k) for k in range(EACH * width)]

    def advance(instance: int, commands: list[Command], steps: int) -> Advanced:
        return worker.advance(instance, commands, steps).value.event

    def alone() -> dict[SampleId, Any]:
        advance(own, submit, 1000)
        results = stored(worker)
        worker.release(every)
        return results

    wanted = alone()
    advance(own, submit, 5)
    before = stored(worker)
    parked = merged(worker, advance(own, [Park(ids, with_kv, width)], 1).parked)
    assert all(event.width == width for event in parked)
    worker.residency.release_idle_cache()
    first = advance(number, [Resume(event.ids, event) for event in parked], 2)
    share = worker.actor.wide[number]
    assert share.engine is not None
    # Weights received: none. They are where the rank's own are.
    wide, narrow = share.engine.parameters(), worker.actor.rollout.parameters()
    storage = {name: tensor.untyped_storage().data_ptr() for name, tensor in narrow.items()}
    kept = [wide[n].untyped_storage().data_ptr() == storage[n] for n in wide]
    shares = sum(tensor.numel() for tensor in wide.values())
    last = advance(number, [], 1000)
    assert last.running == 0
    assert not share.engine.joined
    again = stored(worker)
    worker.release(every)
    tokens = {id: num for event in parked for id, num in zip(event.ids, event.tokens, strict=True)}
    third = alone()
    worker.enter(Phase.TRAIN)
    return {
        "wanted": wanted, "again": again, "third": third, "before": before, "tokens": tokens,
        "parked": [event.ids for event in parked], "running": first.running, "views": all(kept),
        "share": shares / sum(tensor.numel() for tensor in narrow.values()),
        "kv_bytes": first.work.kv_bytes, "steps": last.work.decode_steps,
        "drafted": share.engine.stats().drafted_tokens,
    }  # fmt: skip


def check(results: list[dict[str, Any]], width: int, num_samples: int) -> None:
    """The same tokens as alone, some of them of samples that moved."""
    assert all(result["views"] for result in results)
    assert 0 < results[0]["running"] <= sum(map(len, results[0]["parked"]))
    for result in results:
        wanted = result["wanted"]
        assert len(wanted) == num_samples
        assert {*result["tokens"]} == wanted.keys() - result["before"].keys() != set()
        for run in ("again", "third"):
            assert result[run].keys() == wanted.keys()
            for id, (tokens, log_probs) in result[run].items():
                assert tokens == wanted[id][0]
                # Measured: 1e-6, between layouts, and between a prefill and decode steps.
                assert log_probs == pytest.approx(wanted[id][1], abs=1e-5)
        # The embedding is whole on a rank, everything else of size is cut.
        assert result["share"] < 1.3 / width


LAYOUTS = [
    ({"tp": 1}, 2),
    pytest.param({"tp": 2}, 2, marks=pytest.mark.layouts),
    pytest.param({"tp": 1, "pp": 2}, 2, marks=pytest.mark.layouts),
    pytest.param({"tp": 1}, 4, marks=pytest.mark.layouts),  # more ranks than key-value heads
]


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize(("layout", "width"), LAYOUTS, ids=["1to2", "2to4", "pp", "1to4"])
def test_a_wide_instance_goes_on(
    layout: dict[str, int], width: int, with_kv: bool, ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Every rank gets the keys and values of its heads from the other instances, and no more."""
    model, folder = tmp_path / "model", tmp_path / "plane"
    make_tiny_model(model, TINY, seed=0)
    folder.mkdir()
    size, tp = width * layout["tp"] * layout.get("pp", 1), layout["tp"]
    results = ranks(size, widen, str(model), folder, layout, width, with_kv)
    check(results, width, EACH * width)
    tokens = results[0]["tokens"]
    layers, heads = TINY.num_layers // layout.get("pp", 1), max(1, TINY.num_kv_heads // tp // width)
    unit = layers * 2 * heads * TINY.head_dim * 4
    for rank, result in enumerate(results):
        own = rank // (size // width)
        # All tokens but the pending last one, of the samples that others have made.
        moved = [num - 1 for id, num in tokens.items() if id.k // EACH != own]
        assert result["kv_bytes"] == (unit * sum(moved) if with_kv else 0)


def test_with_drafts(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """All ranks of a wide instance guess alike, though they have seen other texts."""
    model, folder = tmp_path / "model", tmp_path / "plane"
    make_tiny_model(model, TINY, seed=0)
    folder.mkdir()
    check(ranks(2, widen, str(model), folder, {"tp": 1}, 2, True, speculate="3"), 2, EACH * 2)


@pytest.mark.layouts
def test_a_vocabulary_that_does_not_divide(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """The last shard of the head is smaller."""
    odd = TinyModelConfig(**{f: getattr(TINY, f) for f in TINY.__slots__} | {"alphabet": "abcdefgh"})
    model, folder = tmp_path / "model", tmp_path / "plane"
    make_tiny_model(model, odd, seed=0)
    folder.mkdir()
    check(ranks(2, widen, str(model), folder, {"tp": 1}, 2, True), 2, EACH * 2)
