"""Models with a value head on one rank: critics, and reward models in training."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridrl.config import VALUE_MODELS, Config
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fused_update import ScoreInputs
from hybridrl.engines.train.interface import ended
from hybridrl.flow.graph import Graph, Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.answers import ModelDescription
from hybridrl.workers.roles import Scalars
from hybridrl.workers.store import SampleStore
from hybridrl.workers.trainer import Trainer
from hybridrl.workers.training import RoleScoring, UpdateShare, UpdateSteps, sequence_of


class ValueModel(Trainer):
    """The value model `role` (`critic`, `cost_critic`, `reward`), under its own settings.

    It has one layout, that of its training: scoring and updates are collective over all ranks.
    """

    def __init__(
        self,
        role: str,
        config: Config,
        model_path: str,
        store: SampleStore,
        device: torch.device,
        reverse: bool = False,
    ) -> None:
        """Load its own weights, or those of the actor at `model_path`.

        With `reverse` its pipeline runs from the last rank to the first.
        """
        settings = config.value_model_of(role)
        engine = TrainEngine(
            settings.path or model_path,
            model=config.model,
            trainer=replace(config.trainer, optim=settings.optim, layout=settings.layout),
            device=device,
            gives_values=True,
            lora=settings.lora,
            seed=config.run.seed,
            key=f"{VALUE_MODELS[role]}.path",
            reverse=reverse,
        )
        super().__init__(config, engine, store)

    def describe(self) -> ModelDescription:
        """Its size and its layout."""
        return ModelDescription(
            parameters=self.train_engine.num_parameters,
            trained_parameters=self.train_engine.num_trained,
            train_layout=self.train_engine.dims.axes,
        )


def runs_reversed(role: str, graph: Graph) -> bool:
    """Whether a value model's pipeline runs from the last rank to the first; `graph` is its pool's.

    Trained together, every other model does, where the actor and then each value model count. So
    the last ranks, which one model leaves idle at first, begin with another one. Example: of actor,
    critic and cost critic the critic does.
    """
    models = [name for name in graph.learned if name != "actor"]
    return (models.index(role) + ("actor" in graph.roles)) % 2 == 1


class LearnedReward(ValueModel):
    """A reward model in training: one score a sequence, read as `rewards.model` reads it."""

    def scoring(self, stage: Stage, ids: Sequence[SampleId]) -> RoleScoring:
        """The score of prompt and response, at the last token that is not padding."""
        (name,) = stage.scalars
        engine = self.train_engine
        pad = getattr(engine.model.config, "pad_token_id", None)
        sequences = [ended(sequence_of(self.store[id]), pad) for id in ids]

        def keep(values: Sequence[torch.Tensor]) -> tuple[Scalars, tuple[str, ...]]:
            return {name: tuple(value.item() for value in values)}, ()

        inputs = ScoreInputs(sequences=sequences, alone=self.config.strict)
        return RoleScoring(engine=engine, inputs=inputs, keep=keep)


class Critic(ValueModel):
    """A value of the state before every response token."""

    _values = "values"  # the field that it fills

    def scoring(self, stage: Stage, ids: Sequence[SampleId]) -> RoleScoring:
        """Values of the states before every response token, stored as the stage's output field."""
        (self._values,) = stage.outputs
        samples = [self.store[id] for id in ids]
        sequences = [sequence_of(sample) for sample in samples]

        def keep(values: Sequence[torch.Tensor]) -> tuple[Scalars, tuple[str, ...]]:
            for sample, value in zip(samples, values, strict=True):
                sample.tensors[self._values] = value
            return {}, (self._values,)

        inputs = ScoreInputs(sequences=sequences, alone=self.config.strict)
        return RoleScoring(engine=self.train_engine, inputs=inputs, keep=keep)

    def update_steps(self, stage: UpdateStage, share: UpdateShare) -> UpdateSteps:
        """The steps of training on this rank's share.

        `explained_variance` is that of the values before the update.
        """
        steps = super().update_steps(stage, share)
        steps.more_metrics = lambda: self._explained(stage, share) | self.check_copies()
        return steps

    def _explained(self, stage: UpdateStage, share: UpdateShare) -> dict[str, float]:
        """`explained_variance`, where the returns and values are there."""
        returns = stage.fields.get("returns")
        samples = [self.store[id] for id in share.ids]
        read = {returns, self._values}
        if returns is None or not all(read <= sample.tensors.keys() for sample in samples):
            return {}
        pairs = [(s.of_model(returns), s.of_model(self._values)) for s in samples]
        return {"explained_variance": explained_variance(pairs, self.train_engine.device)}


def explained_variance(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> float:
    """1 - Var(returns - values) / Var(returns) over all tokens of all ranks; collective.

    `pairs` are this rank's returns and values [the model's tokens], perhaps none. 1 is a perfect
    critic, 0 is as good as a constant. If all returns are equal it is 0, too. In float64.
    """
    empty = torch.zeros(0, dtype=torch.float64)
    returns = torch.cat([empty, *(returns.double() for returns, _ in pairs)])
    errors = returns - torch.cat([empty, *(values.double() for _, values in pairs)])
    sums = [x for y in (returns, errors) for x in (y.sum(), y.square().sum())]
    totals = torch.stack([torch.tensor(float(len(returns))).double(), *sums]).to(device)
    dist.all_reduce(totals)
    n, *sums = totals.tolist()
    if not n:
        return 0.0
    r, rr, e, ee = (x / n for x in sums)
    variance = rr - r**2
    return 1 - (ee - e**2) / variance if variance > 0 else 0.0
