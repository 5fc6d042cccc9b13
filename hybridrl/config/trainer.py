"""The training loop and its optimizer."""

from dataclasses import dataclass, field
from enum import Enum

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError
from hybridrl.config.layout import TrainLayoutConfig
from hybridrl.config.versions import is_installed


class LRSchedule(Enum):
    """Learning rate over the steps, after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimName(Enum):
    """Optimizers, all on float32 master weights."""

    adamw = "adamw"
    adamw8bit = "adamw8bit"  # by torchao, with moments of 8 bits
    muon = "muon"  # for matrices of decoder layers; AdamW for the rest


class ActivationMode(Enum):
    """The activations of decoder layers between forward and backward."""

    auto = "auto"  # the first of the next three that the memory plan lets fit; on CPUs keep
    keep = "keep"
    selective = "selective"  # products and attention are kept, the rest is recomputed
    recompute = "recompute"  # from each layer's input
    offload = "offload"  # to host memory, while other layers compute

    @property
    def recomputes(self) -> bool:
        """Whether a layer has a second forward pass, of all or of a part of its operations."""
        return self in (ActivationMode.selective, ActivationMode.recompute)


class FuseUpdates(Enum):
    """Whether adjacent updates of roles on the same ranks are one pipeline plan."""

    auto = "auto"  # where both roles fit on the device, and the plan is predicted to be shorter
    always = "always"
    never = "never"


class FuseLayers(Enum):
    """Whether norms, rotations and gated activations of decoder layers are one kernel each."""

    auto = "auto"  # on GPUs
    always = "always"
    never = "never"


class SharePrompts(Enum):
    """Whether training and scoring compute the prompt of a group once for its responses."""

    auto = "auto"  # where a run can: decided before it starts
    always = "always"
    never = "never"


class RouterReplay(Enum):
    """The experts that the actor's tokens take in training."""

    off = "off"  # those that the routers choose
    trainer = "trainer"  # those of the old policy's pass (R2, arXiv 2507.18071)
    rollout = "rollout"  # those of generation (R3, arXiv 2510.11370)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, on float32 master weights."""

    name: OptimName = OptimName.adamw
    """Which one; `adamw8bit` needs the extra of that name."""
    lr: float = bounded(1e-5, above=0)
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the two moments."""
    eps: float = bounded(1e-8, least=0)
    """Added to the root of the second moment."""
    weight_decay: float = bounded(0.0, least=0)
    """Decoupled weight decay."""
    clip_grad_norm: float = bounded(1.0, least=0)
    """Largest norm of the whole gradient; 0 leaves it alone."""
    schedule: LRSchedule = LRSchedule.constant
    """Shape after the warm-up."""
    warmup_steps: int = bounded(0, least=0)
    """Optimizer steps of linear warm-up."""
    min_lr_ratio: float = bounded(0.0, least=0, most=1)
    """Where the decay ends, relative to the peak."""

    def check(self, key: str) -> None:
        """Raise ConfigError for impossible `betas`; `key` is the place of these settings."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"{key}.betas", self.betas, "two numbers from 0 to below 1")

    def check_installed(self, key: str) -> None:
        """Raise ConfigError for a name whose package is missing; a plan does not need it."""
        if self.name is OptimName.adamw8bit and not is_installed("torchao"):
            allowed = "adamw or muon; adamw8bit needs torchao: pip install 'hybridrl[adamw8bit]'"
            raise ConfigError(f"{key}.name", self.name.value, allowed)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """Steps, batches, checkpoints."""

    steps: int = bounded(100, least=0)
    """Iterations: generate, score, update."""
    prompts_per_step: int = bounded(32, least=1)
    """Prompts of one iteration."""
    mini_batches: int = bounded(1, least=1)
    """Optimizer steps per iteration; the samples are split in order."""
    epochs: int = bounded(1, least=1)
    """Passes over an iteration's samples."""
    max_tokens_per_micro_batch: int = bounded(8192, least=1)
    """Most tokens of one forward and backward pass on a rank."""
    chunk_tokens: int = bounded(0, least=0)
    """A sequence that is longer than a micro-batch is trained in chunks of so many tokens a rank,
    backward in reverse. 0 trains it whole."""
    share_prompts: SharePrompts = SharePrompts.auto
    """Whether training and scoring compute the prompt of a group once for its responses. `auto`:
    where the run can and prompts may be long, decided before it starts. Gradients differ by
    rounding."""
    fuse_updates: FuseUpdates = FuseUpdates.auto
    """Whether updates that follow each other on the same ranks are one pipeline plan, as those of
    critic and actor. `auto`: where memory allows, and the plan is predicted to be shorter."""
    activations: ActivationMode = ActivationMode.auto
    """What happens to the activations of decoder layers until the backward pass. `auto` is decided
    before a run starts: on GPUs by the memory plan, on CPUs it keeps them."""
    compile: bool = False
    """Train decoder layers as graphs of `torch.compile`: fewer kernels, after a minute or more at
    the start. For runs of hours on GPUs; on CPUs it gains little."""
    fuse_layers: FuseLayers = FuseLayers.auto
    """Whether norms, rotations and gated activations are one kernel each, in training and in frozen
    scorers, in the families whose formulas these have. `auto`: on GPUs, where `compile` is off.
    Results differ by rounding."""
    router_replay: RouterReplay = RouterReplay.off
    """The experts that tokens take in the actor's update. `rollout`: those of generation, also in
    the old policy's pass; `trainer`: those of the old policy's pass."""
    router_aux_loss_coef: float = bounded(0.0, least=0)
    """Weight of the loss that evens the load of a layer's experts, by sequence; 0 is none. Of the
    actor, and of value models with experts."""
    router_bias_update_rate: float = bounded(0.0, least=0)
    """How far the bias of each expert moves after an optimizer step, to even the load; 0 leaves
    biases alone. For routers that have one (DeepSeek-V3, GLM-4 MoE)."""
    max_bad_steps: int = bounded(3, least=1)
    """Steps in a row with a loss or gradient that is not finite before the run stops."""
    save_every: int = bounded(0, least=0)
    """Checkpoint every so many steps; 0 saves at the end only."""
    save_in_background: bool = False
    """Go on with training once a checkpoint's weights are copied to host memory, and write them
    meanwhile. It takes memory for the copies, which stays."""
    save_samples: bool = False
    """Write each sample of the step in progress as soon as it is finished, so that a run that
    resumes at that step takes it. With `schedule=serial` or `fused`, on the native engine."""
    keep_last: int = bounded(2, least=0)
    """Newest checkpoints that are kept, besides the best and the final one."""
    resume: str = "never"
    """`auto` resumes from the newest checkpoint in the run directory, and starts anew without one.
    A path resumes from that checkpoint, or run. Then a signal ends the run with a checkpoint."""
    resume_changed: bool = False
    """Resume although rows are gone, or code, models, tokenizer or template have changed since. So
    does a run follow another one (`schedule.follow`) whose data, code or models have changed."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    layout: TrainLayoutConfig = field(default_factory=TrainLayoutConfig)
    """Sharding of the weights in training."""

    def check(self) -> None:
        """Raise ConfigError where a run that resumes keeps no checkpoint, or for the optimizer.

        Also for chunks that are larger than a micro-batch.
        """
        if self.chunk_tokens > self.max_tokens_per_micro_batch:
            allowed = (
                f"at most trainer.max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}"
            )
            raise ConfigError("trainer.chunk_tokens", self.chunk_tokens, allowed)
        if self.compile and self.activations in (ActivationMode.selective, ActivationMode.offload):
            allowed = (
                f"false with trainer.activations={self.activations.value}, which need eager layers"
            )
            raise ConfigError("trainer.compile", True, allowed)
        if self.compile and self.fuse_layers is FuseLayers.always:
            allowed = "auto or never with trainer.compile=true, which fuses them"
            raise ConfigError("trainer.fuse_layers", "always", allowed)
        if self.save_in_background and not self.save_every:
            allowed = "false without trainer.save_every: the last checkpoint is waited for"
            raise ConfigError("trainer.save_in_background", True, allowed)
        if self.resumes and not self.keep_last:
            raise ConfigError("trainer.keep_last", 0, "1 or more, with trainer.resume")
        self.optim.check("trainer.optim")

    def fuses_layers_on(self, device: str) -> bool:
        """Whether decoder layers are fused on a device of type cpu or cuda."""
        if self.fuse_layers is FuseLayers.auto:
            return device == "cuda" and not self.compile
        return self.fuse_layers is FuseLayers.always

    @property
    def fuses(self) -> bool:
        """Whether roles on the same ranks train together; `auto` is decided before a run starts."""
        return self.fuse_updates is FuseUpdates.always

    @property
    def shares_prompts(self) -> bool:
        """Whether groups share prompts; `auto` is decided before a run starts."""
        return self.share_prompts is SharePrompts.always

    @property
    def of_experts(self) -> list[tuple[str, str | float, str]]:
        """The settings in use that only a mixture of experts can have: key, value, its default."""
        settings: list[tuple[str, str | float, str]] = [
            ("trainer.router_replay", self.router_replay.value, "off"),
            ("trainer.router_aux_loss_coef", self.router_aux_loss_coef, "0"),
            ("trainer.router_bias_update_rate", self.router_bias_update_rate, "0"),
        ]
        return [setting for setting in settings if setting[1] not in ("off", 0)]

    @property
    def resumes(self) -> bool:
        """Whether this run can end and be resumed."""
        return self.resume != "never"

    @property
    def saves(self) -> bool:
        """Whether the run leaves checkpoints to resume from."""
        return self.resumes or self.save_every > 0


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """A short supervised phase (`recipe=sft`) before the recipe, in the same job."""

    steps: int | None = bounded(None, least=0)
    """Optimizer steps; 0 goes straight to the recipe. Null: 120 for a model that is made on the
    spot, unless the recipe is sft itself; else 0."""
    prompts_per_step: int = bounded(32, least=1)
    """Items of one step."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The phase's own optimizer."""
