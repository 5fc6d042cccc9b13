"""A model with a value head on one rank: a training shard without a rollout engine."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hybridrl.config import VALUE_MODELS, Config
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fused_update import ScoreInputs
from hybridrl.engines.train.interface import TrainSequence, ended
from hybridrl.flow.graph import Graph, Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.answers import ModelDescription
from hybridrl.workers.roles import Scalars
from hybridrl.workers.store import SampleStore
from hybridrl.workers.training import RoleScoring, UpdateShare, UpdateSteps


class ValueModel:
    """The value model `role` (`critic`, `cost_critic`, `reward`), under its own settings.

    It has one layout, that of its training: scoring and updates are collective over all ranks.
    """

    end_ids = ()  # it writes nothing

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
        self.config, self.store = config, store
        settings = config.value_model_of(role)
        self.train_engine = TrainEngine(
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

    def describe(self) -> ModelDescription:
        """Its size and its layout."""
        return ModelDescription(
            parameters=self.train_engine.num_parameters,
            trained_parameters=self.train_engine.num_trained,
            train_layout=self.train_engine.dims.axes,
        )

    def scoring(self, stage: Stage, ids: Sequence[SampleId]) -> RoleScoring:
        """A forward-only stage on this rank's samples."""
        raise NotImplementedError

    def update_steps(self, stage: UpdateStage, share: UpdateShare) -> UpdateSteps:
        """The steps of training on this rank's share."""
        return UpdateSteps(
            engine=self.train_engine,
            store=self.store,
            config=self.config,
            stage=stage,
            share=share,
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
        samples = [self.store[id] for id in ids]
        whole = [TrainSequence(s.tensors["tokens"], s.response_tokens) for s in samples]
        sequences = [ended(sequence, pad) for sequence in whole]

        def keep(values: Sequence[torch.Tensor]) -> tuple[Scalars, tuple[str, ...]]:
            return {name: tuple(value.item() for value in values)}, ()

        inputs = ScoreInputs(sequences=sequences, alone=self.config.strict)
        return RoleScoring(engine=engine, inputs=inputs, keep=keep)
