"""One rank of a run on fake GPUs, through the phases of a step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig

from gpu_dry.fake_device import Counts, FakeDevice
from gpu_dry.world import joined, kernels, weights_without_values, write_model
from hybridrl.algorithms.critic import ValueLoss
from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import (
    ActorConfig,
    ClusterConfig,
    Config,
    DataConfig,
    Device,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    TrainerConfig,
    TrainLayoutConfig,
    ValueModelConfig,
)
from hybridrl.data import Item
from hybridrl.flow.executor import Park, Parked, Resume, Sampling, Submit
from hybridrl.flow.graph import ComputeStage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor import Actor
from hybridrl.workers.device_residency import DeviceResidency
from hybridrl.workers.role_factory import ActorRoleFactory
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.training import UpdateShare

ROWS = 16
"""Samples that decode together."""
SAMPLES = 2
"""Samples that a rank scores and trains; with those of its replica they fill micro-batches."""
MICRO_BATCH_TOKENS = 4096
SAMPLE_TOKENS, PROMPT_TOKENS = 1024, 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on `ranks` ranks, seen from `rank`. `layers` None is its whole depth."""

    model: str
    ranks: int = 1
    rank: int = 0
    layers: int | None = None
    train: dict[str, Any] = field(default_factory=dict)
    gen: dict[str, Any] = field(default_factory=dict)
    lora: int = 0
    checkpointing: bool = False
    critic: bool = False
    """Whether a value model is trained, too."""
    flash: bool = True
    """Whether flash-attn is installed."""
    traced: bool = False
    """Whether the lines that it runs are noted, which doubles its time."""

    def config(self, path: Path) -> Config:
        """The settings of the run."""
        dropout = 0.0 if self.train.get("tp", 1) > 1 else 0.05  # tp refuses it
        return Config(
            model=ModelConfig(path=str(path)),
            actor=ActorConfig(lora=LoraConfig(rank=self.lora, dropout=dropout)),
            data=DataConfig(max_prompt_tokens=2048),
            reward=RewardConfig(model=str(path / "judge")),
            critic=ValueModelConfig(layout=TrainLayoutConfig(**self.train)),
            rollout=RolloutConfig(
                max_new_tokens=2048,
                max_running=ROWS,
                layout=RolloutLayoutConfig(**self.gen),
            ),
            trainer=TrainerConfig(
                max_tokens_per_micro_batch=MICRO_BATCH_TOKENS,
                activation_checkpointing=self.checkpointing,
                layout=TrainLayoutConfig(**self.train),
            ),
            cluster=ClusterConfig(ranks=self.ranks, device=Device.cuda),
        )


class DryRun:
    """The phases of a step of one case; `counts` has what each did."""

    def __init__(self, case: Case, path: Path, device: FakeDevice, cuda: torch.device) -> None:
        self.case, self.device, self.cuda = case, device, cuda
        self.config = case.config(path)
        self.path = str(path)
        self.counts: dict[str, Counts] = {}
        self.store = SampleStore()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.device.phase(self.counts, name):
            yield

    def run(self) -> None:
        """Every phase once, in the order of a step."""
        with self.phase("build"):
            actor = self.actor = Actor(
                self.config, self.path, self.tokenizer, self.store, self.cuda
            )
            self.residency = DeviceResidency(self.cuda, lambda reading: None, actor.rollout)
            self.roles = ActorRoleFactory(
                self.config, self.path, self.tokenizer, self.store, self.cuda, actor, self.residency
            )
        self._generate()
        ids = self._samples()
        self._score(ids)
        self._train(ids)
        if self.case.critic:
            self._train_critic(ids)

    def _generate(self) -> None:
        """Switch, prefill, two decode steps, a sample parked with its cache and resumed."""
        actor = self.actor
        with self.phase("switch"), self.residency.entering_generation(actor.train_engine) as woken:
            actor.switch_weights(woken)
        lengths = [256 * (1 + row % 4) for row in range(ROWS)]
        self.device.integer = 3  # a token that ends nothing
        prompts = [
            Submit((SampleId(i),), _item(length), Sampling(256)) for i, length in enumerate(lengths)
        ]
        with self.phase("prefill and first decode"):
            actor.advance(prompts, 1)
        with self.phase("decode"):
            actor.advance([], 1)
        ids = (SampleId(0), SampleId(1))
        with self.phase("park"):
            _, (parked,), _ = actor.advance([Park(ids, with_kv=True)], 0)
        assert isinstance(parked, Parked)
        with self.phase("resume"):
            actor.advance([Resume(ids, parked)], 1)
        everything = tuple(SampleId(i) for i in range(ROWS))
        actor.advance([Park(everything)], 0)
        narrow = Sampling(256, temperature=0.7, top_p=0.9, top_k=50)
        actor.advance([Submit((SampleId(ROWS),), _item(256), narrow)], 1)
        with self.phase("decode of top-k and top-p"):
            actor.advance([], 1)
        actor.advance([Park((SampleId(ROWS),))], 0)
        self.device.integer = 1

    def _score(self, ids: tuple[SampleId, ...]) -> None:
        """Log-probabilities of the weights that generated, and of a reference."""
        self.residency.release_idle_cache()
        stage = ComputeStage(name="old", outputs=("old_log_probs",))
        old_policy = self.roles.old_policy()
        assert old_policy is not None
        with self.phase("old policy"):
            old_policy.compute(stage, ids)
        with self.phase("build reference"):
            reference = self.roles.frozen_copy()
        stage = ComputeStage(name="reference", outputs=("reference_log_probs",))
        self.residency.activate(reference)
        with self.phase("reference"):
            reference.compute(stage, ids)
        self.residency.activate(None)
        with self.phase("judge"):
            judge = self.roles.neural_judge("reward", self.actor.parallel)
            self.residency.activate(judge)
            judge.compute(ComputeStage(name="judge", scalars=("reward", "status")), ids)

    def _train(self, ids: tuple[SampleId, ...]) -> None:
        """Two optimizer steps: the second is a run's usual one, which has moments."""
        self.residency.enter_training()
        with self.phase("onload"):
            self.residency.activate(self.actor.train_engine)
        stage = UpdateStage(name="update", loss=ClippedLoss(kl_coef=0.1), fields={}, role="actor")
        scalars = {id: {"advantages": 1.0} for id in ids}
        share = UpdateShare(
            (ids,), scalars, dict.fromkeys(ids, self.actor.train_engine.version), ()
        )
        for name in ("first update", "update"):
            with self.phase(name):
                self.actor.update(stage, share)
        with self.phase("offload"):
            self.residency.activate(None)
        tensors = list(self.actor.train_engine.trained_parameters())
        assert {x.device.type for x in tensors} == {"cpu"}, "offloaded weights are on the host"
        actor = self.actor
        with (
            self.phase("switch after updates"),
            self.residency.entering_generation(actor.train_engine) as woken,
        ):
            actor.switch_weights(woken)
        self.residency.enter_training()

    def _train_critic(self, ids: tuple[SampleId, ...]) -> None:
        """Values, and two optimizer steps of a value model that starts as the actor."""
        weights = self.actor.train_engine.weights()
        with self.phase("build critic"):
            critic = self.roles.value_model("critic", weights)
        self.residency.activate(critic.train_engine)
        with self.phase("values"):
            critic.compute(ComputeStage(name="values", outputs=("values",)), ids)
        for id in ids:
            self.store[id].tensors["returns"] = torch.ones(SAMPLE_TOKENS - PROMPT_TOKENS)
        stage = UpdateStage(
            name="update critic", loss=ValueLoss(), fields={"returns": "returns"}, role="critic"
        )
        share = UpdateShare((ids,), {id: {} for id in ids}, dict.fromkeys(ids, 0), ())
        for name in ("first update of the critic", "update of the critic"):
            with self.phase(name):
                critic.update(stage, share)
        self.residency.activate(None)

    def _samples(self) -> tuple[SampleId, ...]:
        """Finished samples in the store."""
        ids = tuple(SampleId(i, k=1) for i in range(SAMPLES))
        response = SAMPLE_TOKENS - PROMPT_TOKENS
        for id in ids:
            tensors = {"tokens": torch.full((SAMPLE_TOKENS,), 3)}
            tensors["log_probs"] = torch.zeros(response)
            self.store.add(id, StoredSample(response, _item(PROMPT_TOKENS), tensors))
        return ids


def _item(length: int) -> Item:
    return Item("", (3,) * length, "", (), "", {})


def run_case(
    case: Case, device: FakeDevice, folder: Path
) -> tuple[dict[str, Counts], Config, PretrainedConfig]:
    """What every phase did, the settings, and the model's config."""
    with ExitStack() as stack:
        path = write_model(folder, case.model, case.layers)
        cuda = stack.enter_context(joined(case.rank, case.ranks))
        for surroundings in (weights_without_values(device), kernels(device, case.flash)):
            stack.enter_context(surroundings)
        # Backward on this thread, which is the one that is traced.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(device)
        stack.enter_context(device.memory)
        run = DryRun(case, path, device, cuda)
        run.run()
        return run.counts, run.config, run.actor.train_engine.model.config
