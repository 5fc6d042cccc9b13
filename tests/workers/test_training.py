"""The steps of updates that train together: which are one plan, and whose metrics are whose."""

from typing import Any, cast

import pytest
import torch

from hybridrl.config import Config, RolloutConfig
from hybridrl.config.loss import Loss
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.training import UpdateShare, UpdateSteps, train


class RowLoss(Loss):
    fields = ("weight",)

    def __call__(self, log_probs: Any, entropy: Any, fields: Any) -> Any:
        raise AssertionError("no model is here")


class Engine:
    """Answers with what it was asked about."""

    def __init__(self, name: str, calls: list[list[str]]) -> None:
        self.name, self.calls = name, calls

    def answer(self, sequences: Any) -> dict[str, float]:
        weights = [sequence.fields["weight"] for sequence in sequences]
        return {"loss": sum(weights) / len(weights), "flops": float(len(weights))}

    def update(self, sequences: Any, loss: Any, **_: Any) -> dict[str, float]:
        self.calls.append([self.name])
        return self.answer(sequences)


class Together:
    """In place of `FusedUpdate`."""

    def __init__(self, calls: list[list[str]]) -> None:
        self.calls = calls

    def update(self, updates: Any, even: bool) -> list[dict[str, float]]:
        assert not even
        self.calls.append([engine.name for engine, _ in updates])
        return [engine.answer(inputs.sequences) for engine, inputs in updates]


def steps_of(engine: Engine, mini_batches: int, epochs: int, scale: float) -> UpdateSteps:
    """Six samples of weights 1 to 6, times `scale`."""
    ids = tuple(SampleId(i, "", 0) for i in range(6))
    store = SampleStore()
    for id in ids:
        store.add(id, StoredSample(1, None))
        store[id].tensors["tokens"] = torch.zeros(2, dtype=torch.long)
    size = 6 // mini_batches
    share = UpdateShare(
        tuple(ids[i : i + size] for i in range(0, 6, size)),
        {id: {"weight": scale * (1 + id.prompt)} for id in ids},
        dict.fromkeys(ids, 0),
        (),
    )
    return UpdateSteps(
        engine=cast(Any, engine),
        store=store,
        config=Config(rollout=RolloutConfig(max_new_tokens=4)),
        stage=UpdateStage(name="update", loss=RowLoss(), epochs=epochs, fields={}),
        share=share,
    )


@pytest.mark.parametrize("sizes", [(3, 1, 2), (1, 3, 2), (2, 2, 2)])
def test_the_kth_mini_batches_are_one_plan_and_the_rest_is_alone(sizes: tuple[int, ...]) -> None:
    """In two epochs; metrics are those of a role that trains alone."""
    calls: list[list[str]] = []
    names = ["actor", "critic", "cost_critic"]
    updates = [steps_of(Engine(names[i], calls), sizes[i], 2, 10.0**i) for i in range(3)]
    numbers = [2 * size for size in sizes]
    assert [len(update) for update in updates] == numbers
    metrics = train(updates, cast(Any, Together(calls)))
    assert calls == [
        [name for name, number in zip(names, numbers, strict=True) if k < number]
        for k in range(max(numbers))
    ]
    for i, of_role in enumerate(metrics):
        (alone,) = train([steps_of(Engine("", []), sizes[i], 2, 10.0**i)], None)
        assert of_role == alone
        assert of_role["loss"] == pytest.approx(3.5 * 10**i)
        assert of_role["optimizer_steps"] == numbers[i]


def test_more_metrics_are_asked_once_at_the_end() -> None:
    calls: list[list[str]] = []
    update = steps_of(Engine("critic", calls), 3, 1, 1.0)
    stepped: list[int] = []
    update.stepped = lambda: stepped.append(len(calls))
    update.more_metrics = lambda: {"explained_variance": float(len(stepped))}
    (metrics,) = train([update], None)
    assert stepped == [1, 2, 3]
    assert metrics["explained_variance"] == 3


def test_comparisons_are_those_of_the_first_step() -> None:
    update = steps_of(Engine("actor", []), 3, 1, 1.0)
    update.compare, update.compared = {"_sampled": "engines"}, lambda id: {"_sampled": 0.5}
    first = update.inputs()
    assert dict(first.compare) == {"_sampled": "engines"}
    assert first.sequences[0].fields["_sampled"] == 0.5
    update.record({"loss": 1.0, "engines/kl": 0.1, "flops": 1.0})
    second = update.inputs()
    assert not second.compare
    assert "_sampled" not in second.sequences[0].fields
    update.record({"loss": 3.0, "engines/kl": 0.3, "flops": 1.0})
    metrics = update.metrics()
    assert (metrics["loss"], metrics["engines/kl"], metrics["flops"]) == (2.0, 0.1, 2.0)
