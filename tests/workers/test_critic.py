"""A value model beside the actor on real ranks: made, trained, saved, and who has the device."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.algorithms.critic import ValueLoss
from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import (
    ClusterConfig,
    Config,
    Device,
    ModelConfig,
    OptimConfig,
    RolesConfig,
    TinyModelConfig,
    TrainLayoutConfig,
    ValueModelConfig,
)
from hybridrl.data import Item
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.flow import Flow
from hybridrl.flow.executor import Phase
from hybridrl.flow.graph import Graph
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.training import Training, UpdateShare
from hybridrl.workers.value_model import explained_variance

TINY = TinyModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=64, alphabet="abcdefghij",
)  # fmt: skip
PROMPT = Item("abc", (3, 4, 5), "", (6, 7, 8, 1), "main", {})
OPTIM = OptimConfig(lr=0.01)


def graph() -> Graph:
    """Values twice, one for the critic of the cost, then both and the actor learn."""
    flow = Flow()
    samples = flow.critic.values(flow.cost_critic.values(flow.answers))
    samples = samples.map(torch.ones_like, ("values",), ("returns",))
    flow.critic.update(samples, loss=ValueLoss(clip=None))
    flow.cost_critic.update(samples, loss=ValueLoss(), fields={"values": "cost_values"})
    flow.actor.update(samples, loss=CrossEntropyLoss())
    return flow.graph


@contextlib.contextmanager
def holders(worker: ActorWorker) -> Iterator[list[set[str]]]:
    """Which roles' training state is on the device after every move."""
    there: set[str] = set()
    seen: list[set[str]] = []

    def note(change: Callable[..., None]) -> Callable[..., None]:
        def moved(self: TrainEngine) -> None:
            change(there, {n for n, role in worker.trained.items() if role.train_engine is self})
            seen.append(set(there))

        return moved

    with (
        mock.patch.object(TrainEngine, "onload", note(set.update)),
        mock.patch.object(TrainEngine, "onload_weights", note(set.update)),
        mock.patch.object(TrainEngine, "offload", note(set.difference_update)),
    ):
        yield seen


def live(model: str, folder: Path, layout: dict[str, int]) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    config = Config(
        model=ModelConfig(tiny=TINY),
        cluster=ClusterConfig(ranks=size, device=Device.cpu),
        roles=RolesConfig(critic=ValueModelConfig(layout=TrainLayoutConfig(**layout))),
    )
    worker = ActorWorker(rank, size, config, model, mock.Mock(get=list))
    with (
        mock.patch.object(dist, "init_process_group"),  # the test has made it
        mock.patch.dict(os.environ, MASTER_ADDR="localhost"),
    ):
        worker.setup(*worker.listen().value)
    stages = graph().stages
    trainings = {name: Training(OPTIM, 3) for name in ("actor", "critic", "cost_critic")}
    ids = (SampleId(rank),)
    worker.load_targets(stages["answers"], ids, (PROMPT,))
    share = UpdateShare((ids,), {ids[0]: {}}, {ids[0]: 0}, ())
    warm = Flow()
    warm.actor.update(warm.answers, loss=CrossEntropyLoss())
    worker.begin(warm.graph, {"actor": Training(OPTIM, 1)}, False)
    worker.update((warm.graph.stages["update_actor"],), (share,))
    results: dict[str, Any] = {}
    with holders(worker) as results["held"]:
        results["made"] = worker.begin(graph().on_ranks(), trainings, False).value
        worker.save_weights(str(folder / "warm"))
        worker.enter(Phase.GENERATE)
        worker.enter(Phase.TRAIN)
        for name in ("cost_values", "values"):
            worker.compute(stages[name], ids)
        results["values"] = worker.store[ids[0]].tensors["values"]
        worker.run_local_stage(stages["ones_like"], ids, ({},))
        for name in ("critic", "cost_critic", "actor"):
            (results[name],) = worker.update((stages[f"update_{name}"],), (share,)).value
        worker.enter(Phase.GENERATE)
    worker.enter(Phase.TRAIN)
    worker.compute(stages["values"], ids)
    results["learned"] = worker.store[ids[0]].tensors["values"]
    worker.save_weights(str(folder / "trained"))
    return results


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_critics_beside_the_actor(
    layout: dict[str, int], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """They start as the warmed-up actor with a head of zero, and learn; one has the device."""
    make_tiny_model(tmp_path / "model", TINY, seed=0)
    first, second = ranks(2, live, str(tmp_path / "model"), tmp_path, layout)
    assert first["made"]["critic"].train_layout.tp == layout.get("tp", 1)
    assert first["made"].keys() == {"critic", "cost_critic"}
    for result in (first, second):
        assert result["values"].tolist() == [0.0] * 4
        assert result["critic"]["loss"] == pytest.approx(0.5)
        assert result["critic"]["explained_variance"] == 0.0  # returns that are all equal
        assert result["cost_critic"]["value_clip_fraction"] == 0.0
        assert all(result[name]["grad_norm"] > 0 for name in ("critic", "cost_critic", "actor"))
        assert 0 < result["learned"].mean() < 1
        # Every move leaves one role there at most, and the switch begins with the actor's.
        assert all(len(held) <= 1 for held in result["held"])
        order = [*dict.fromkeys(x for held in result["held"] for x in held)]
        assert order == ["actor", "cost_critic", "critic"]
        assert result["held"][-1] == set()
    warm = AutoModelForCausalLM.from_pretrained(tmp_path / "warm").state_dict()
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "warm" / "critic")
    for name, tensor in critic.state_dict().items():
        wanted = torch.zeros(1, 32) if name == "score.weight" else warm[name]
        assert torch.equal(tensor, wanted), name
    for name in ("critic", "cost_critic"):
        path = tmp_path / "trained" / name
        head = AutoModelForSequenceClassification.from_pretrained(path).score.weight
        assert head.abs().max() > 1e-3


def spread(pairs: list[Any]) -> float:
    return explained_variance(pairs[dist.get_rank()], torch.device("cpu"))


def test_explained_variance(ranks: Callable[..., list[Any]]) -> None:
    """Over the tokens of all ranks, of which one has none."""
    random = torch.Generator().manual_seed(0)
    returns = [5 + torch.randn(n, generator=random) for n in (3, 1, 4)]
    values = [r + 0.5 * torch.randn(len(r), generator=random) for r in returns]
    pairs = list(zip(returns, values, strict=True))
    r, v = torch.cat(returns).double(), torch.cat(values).double()
    wanted = 1 - (r - v).var() / r.var()
    assert ranks(2, spread, [pairs, []]) == [pytest.approx(wanted.item(), abs=1e-9)] * 2
    assert ranks(1, spread, [[]]) == [0.0]
