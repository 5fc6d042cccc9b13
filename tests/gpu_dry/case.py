"""What a dry run runs: a model on some ranks, and how much of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config import (
    ActivationMode,
    ActorConfig,
    Attention,
    ClusterConfig,
    Config,
    DataConfig,
    Deterministic,
    Device,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OptimName,
    RewardConfig,
    RolesConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    TrainerConfig,
    TrainLayoutConfig,
    ValueModelConfig,
)

ROWS = 16
"""Samples that decode together."""
SAMPLES = 2
"""Samples that a rank scores and trains; with those of its replica they fill micro-batches."""
MICRO_BATCH_TOKENS = 4096
SAMPLE_TOKENS = 1024
MIXED = 832, 640, 384, 192
"""Lengths of samples, which fill the row of `SAMPLES` equal ones."""


def prompt_lengths(rows: int = ROWS) -> list[int]:
    """Tokens of the prompts that are generated from."""
    return [256 * (1 + row % 4) for row in range(rows)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on `ranks` ranks, seen from `rank`.

    It is cut to so many `layers`, twice: the difference gives the figures of the whole model. None
    is the whole depth.
    """

    model: str
    ranks: int = 1
    rank: int = 0
    layers: tuple[int, int] | None = None
    train: dict[str, Any] = field(default_factory=dict)
    gen: dict[str, Any] = field(default_factory=dict)
    lora: int = 0
    activations: ActivationMode = ActivationMode.keep
    optim: OptimName = OptimName.adamw
    critic: bool = False
    """Whether a value model is trained, too."""
    flash: bool = True
    """Whether flash-attn is installed."""
    attention: Attention = Attention.auto
    """`model.attention`."""
    strict: bool = False
    """Whether every sample decodes alone, and is replayed when it is resumed."""
    sample_tokens: int = SAMPLE_TOKENS
    """Tokens of a sample that is scored and trained."""
    mixed: bool = False
    """Whether as many tokens are those of `MIXED` samples, each of another length."""
    chunk_tokens: int = 0
    """`trainer.chunk_tokens`."""
    staying: tuple[str, ...] = ()
    """Trained roles that are never offloaded."""
    only_trains: bool = False
    """Whether the actor is built and trained at the first depth, and nothing else is run.

    The plan chooses its longest row, which is what the samples give.
    """

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt of a sample that is scored and trained, a quarter of it."""
        return self.sample_tokens // 4

    @property
    def samples(self) -> tuple[int, ...]:
        """The tokens of each sample that a rank scores and trains."""
        return MIXED if self.mixed else (self.sample_tokens,) * SAMPLES

    @property
    def chosen_attention(self) -> Attention:
        """What `model.attention` comes to on the fake GPU, in bfloat16."""
        if self.attention is not Attention.auto:
            return self.attention
        return Attention.flash if self.flash else Attention.varlen

    @property
    def answers(self) -> dict[str, int]:
        """What functions read from the device, by `fake_device.caller`."""
        answers = {"hybridrl/layout/proof.py compare": 0}  # no checksums differ
        if self.chunk_tokens:
            passes = self.sample_tokens // (self.chunk_tokens * self.train.get("cp", 1))
            answers["hybridrl/engines/train/replica.py _most"] = passes
        if "ep" in self.train:  # rows for each of its ranks, of which a token has eight
            rows = SAMPLES * self.sample_tokens * 8 // self.train["ep"]
            answers["hybridrl/models/expert_parallel.py __call__"] = rows
        return answers

    def config(self, path: Path) -> Config:
        """The settings of the run."""
        prompt, new = 2048, 2048
        if self.only_trains:  # its samples are the longest
            prompt, new = self.prompt_tokens, self.sample_tokens - self.prompt_tokens
        dropout = 0.0 if self.train.get("tp", 1) > 1 else 0.05  # tp refuses it
        return Config(
            model=ModelConfig(path=str(path), attention=self.attention),
            actor=ActorConfig(lora=LoraConfig(rank=self.lora, dropout=dropout)),
            data=DataConfig(max_prompt_tokens=prompt),
            reward=RewardConfig(model=str(path / "judge")),
            roles=RolesConfig(critic=ValueModelConfig(layout=TrainLayoutConfig(**self.train))),
            rollout=RolloutConfig(
                max_new_tokens=new,
                max_running=ROWS,
                layout=RolloutLayoutConfig(**self.gen),
            ),
            trainer=TrainerConfig(
                prompts_per_step=1,
                max_tokens_per_micro_batch=MICRO_BATCH_TOKENS,
                chunk_tokens=self.chunk_tokens,
                activations=self.activations,
                optim=OptimConfig(name=self.optim),
                layout=TrainLayoutConfig(**self.train),
            ),
            cluster=ClusterConfig(ranks=self.ranks, device=Device.cuda),
            deterministic=Deterministic.strict if self.strict else Deterministic.off,
        )
