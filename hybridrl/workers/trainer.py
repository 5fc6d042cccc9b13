"""What trains on one rank: a role's shards and optimizer, which score samples and are updated."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.config import Config, RouterReplay
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fused_update import ScoreInputs
from hybridrl.engines.train.update_sums import response_distances
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.copies import CopiesCheck
from hybridrl.workers.answers import ActorDescription
from hybridrl.workers.ema import MovingAverage
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.training import (
    RoleScoring,
    SampleFields,
    UpdateShare,
    UpdateSteps,
    log_probs_stage,
    sequence_of,
)


class Trainer:
    """A role with an optimizer. It knows of no rollout engine, and of no other role.

    Its weights go out as `train_engine.named_shards()`, the source of every plan that moves them.
    After each update `copies` compares those that several ranks hold.
    """

    end_ids: tuple[int, ...] = ()
    """The tokens that end what the role writes, if it writes."""

    def __init__(self, config: Config, train_engine: TrainEngine, store: SampleStore) -> None:
        self.config, self.train_engine, self.store = config, train_engine, store
        self.copies = CopiesCheck(train_engine.layout, dist.get_rank(), config.strict)

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
            more_metrics=self.check_copies,
        )

    def check_copies(self) -> dict[str, float]:
        """Compare what several ranks hold of the weights; the seconds that it took. Collective."""
        if not self.copies.kinds:
            return {}
        self.copies.check(self.train_engine.named_shards())
        return {"copies_check_s": self.copies.seconds}


class ActorTrainer(Trainer):
    """The actor's training shards, and the moving averages that follow them."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        end_ids: tuple[int, ...],
        store: SampleStore,
        device: torch.device,
    ) -> None:
        """Load the weights at `model_path`; responses end with `end_ids`."""
        layout = config.rollout.layout
        engine = TrainEngine(
            model_path,
            model=config.model,
            trainer=config.trainer,
            device=device,
            gen_tp=layout.tp,
            gen_ep=layout.ep,
            lora=config.actor.lora,
            seed=config.run.seed,
        )
        super().__init__(config, engine, store)
        self.end_ids, self.device = end_ids, device
        self.averages: dict[str, MovingAverage] = {}

    def describe(self, device: torch.device) -> ActorDescription:
        """The actor on this rank."""
        engine = self.train_engine
        return ActorDescription(
            parameters=engine.num_parameters,
            trained_parameters=engine.num_trained,
            attention=engine.attention.value,
            device=str(device),
            train_layout=engine.dims.axes,
        )

    def scoring(self, stage: Stage, ids: Sequence[SampleId]) -> RoleScoring:
        """Log-probabilities of the responses under the training weights."""
        replay = self.config.trainer.router_replay
        self.train_engine.temperature = stage.temperature
        return log_probs_stage(self.train_engine, self.store, stage, ids, replay)

    def compare(self, stage: UpdateStage, ids: Sequence[SampleId]) -> dict[str, float]:
        """`mismatch/*` of samples that the present weights have made. Collective.

        Nothing is stored, and the update computes as without it.
        """
        self.train_engine.temperature = stage.temperature
        samples = [self.store[id] for id in ids]
        replays = self.config.trainer.router_replay is RouterReplay.rollout
        sequences = [sequence_of(sample, replays=replays) for sample in samples]
        scored = ScoreInputs(sequences=sequences).score(self.train_engine)
        pairs = []
        for sample, own in zip(samples, scored, strict=True):
            of_rollout, own = sample.tensors["log_probs"], own.cpu()
            is_trained = slice(None) if sample.mask is None else sample.mask
            pairs.append((own[is_trained], of_rollout[is_trained]))
        return response_distances(pairs, "mismatch", self.device)

    def update_steps(self, stage: UpdateStage, share: UpdateShare) -> UpdateSteps:
        """The steps of training on this rank's share.

        Before the first optimizer step the trainer's weights are those that have generated, so
        there its log-probabilities are compared with the rollout engine's: `ENGINE_GAPS`.
        """
        self.train_engine.temperature = stage.temperature
        version = self.train_engine.version
        steps = super().update_steps(stage, share)
        steps.compare = ENGINE_GAPS
        steps.compared = lambda id: _sampled(self.store[id], share.versions[id], version)
        steps.stepped = self._stepped
        steps.replays = self.config.trainer.router_replay is not RouterReplay.off
        return steps

    def _stepped(self) -> None:
        for average in self.averages.values():
            average.follow()


ENGINE_GAPS = {"rollout_log_probs": "mismatch", "stale_log_probs": "staleness"}
"""Reserved fields of an update's sequences, and the metrics that they are compared under.

A sample that the present weights made alone shows how far the two engines are apart. A sample with
older tokens (schedule=partial) is counted apart, whole: its weights differ, too, and later tokens
may read the older weights' KV cache.
"""


def _sampled(sample: StoredSample, version: int, present: int) -> SampleFields:
    """Log-probabilities of the rollout engine, if it made the sample.

    `version` is the policy version of the oldest token, `present` that of the weights now.
    """
    if "log_probs" not in sample.tensors:
        return {}
    name = "rollout_log_probs" if version == present else "stale_log_probs"
    return {name: sample.tensors["log_probs"]}
