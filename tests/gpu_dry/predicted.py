"""Settings whose phases are predicted by the roofline of their operators (`roofline.py`)."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_dry.case import Case
from gpu_dry.dry_run import DryRun, _item, run_phases
from gpu_dry.fake_device import Counts
from gpu_dry.roofline import Operation, Prediction, RooflineDevice, Shares, predict
from gpu_dry.world import write_model
from hybridrl.config import Config
from hybridrl.costs.devices import Accelerator
from hybridrl.flow.executor import Park, Sampling, Submit
from hybridrl.flow.graph import ComputeStage
from hybridrl.flow.sample import SampleId

QWEN_1_5B = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen2.5-1.5B."""
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 3.1 8B."""
DEPTHS = 2, 3
"""Layers of the cut models."""


@dataclass(frozen=True, kw_only=True)
class Setting(Case):
    """A case of other sizes; `layers` is the whole depth's cut."""

    model: str = ""
    layers: tuple[int, int] | None = DEPTHS
    shape: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 16
    """Samples that decode together, `group` of a prompt."""
    group: int = 1
    lengths: tuple[int, ...] = ()
    """Tokens of the samples that a rank scores and trains at once."""
    row_tokens: int = 8192
    """Tokens of a micro-batch."""
    context: int = 1024
    """Cached tokens of each row that decodes."""
    prompt: int = 256

    @property
    def samples(self) -> tuple[int, ...]:
        """The tokens of each sample that a rank scores and trains."""
        return self.lengths

    def config(self, path: Path) -> Config:
        """The settings of the run."""
        config = super().config(path)
        config.rollout.max_running = self.rows
        config.trainer.max_tokens_per_micro_batch = self.row_tokens
        return config


@dataclass(frozen=True, slots=True)
class Noted:
    """What the phases of a dry run did."""

    operations: Mapping[str, list[Operation]]
    counts: Mapping[str, Counts]

    def launches(self, phase: str) -> int:
        """Launches of the host: kernels one by one, graphs and collectives."""
        counts = self.counts[phase]
        return counts.kernels - counts.replayed + counts.replays + counts.collectives


def generate(run: DryRun) -> None:
    """The prompts' prefill with a first step, and one step of all rows, which leave then."""
    case = run.case
    assert isinstance(case, Setting)
    generator = run.actor.generator
    run.actor.enter_generation()
    run.device.integer = 3  # a token that ends nothing
    starts = range(0, case.rows, case.group)
    groups = [tuple(SampleId(i, k=k) for k in range(case.group)) for i in starts]
    prompts = [Submit(ids, _item(case.prompt), Sampling(64)) for ids in groups]
    with run.phase("prefill"):
        generator.advance(prompts, 1)
    with run.phase("decode"):
        generator.advance([], 1)
    generator.advance([Park(tuple(id for ids in groups for id in ids))], 0)
    run.device.integer = 1


def decode(run: DryRun) -> None:
    """Generation alone."""
    run._build()
    generate(run)


def grpo_step(run: DryRun) -> None:
    """A step of GRPO but for its judge: generation, both log-probabilities, update and switch."""
    run._build()
    generate(run)
    ids = run._samples()
    run.residency.release_idle_cache()
    old_policy = run.roles.old_policy()
    assert old_policy is not None
    with run.phase("old policy"):
        old_policy.compute(ComputeStage(name="old", outputs=("old_log_probs",)), ids)
    reference = run.roles.frozen_copy()
    run.residency.activate(reference)
    with run.phase("reference"):
        stage = ComputeStage(name="reference", outputs=("reference_log_probs",))
        reference.compute(stage, ids)
    run.residency.activate(None)
    run._update(ids)
    with run.phase("switch"):
        run.actor.enter_generation()


class Roofline:
    """Predictions of a setting's phases at the model's whole depth."""

    def __init__(
        self, setting: Setting, phases: Callable[[DryRun], None], make: Callable[..., Any]
    ) -> None:
        """`make(context, sequence)` is a device that is installed."""
        assert setting.layers is not None
        self._nodes = -(-setting.ranks // 8)
        whole = int(setting.shape["num_hidden_layers"])
        shallow, deep = setting.layers
        self._steps = (whole - shallow) / (deep - shallow)
        self.noted = [_noted(setting, depth, phases, make) for depth in setting.layers]

    def of(self, phase: str, gpu: Accelerator, shares: Shares) -> Prediction:
        """Seconds of a phase, on the line through those of two depths."""
        first, second = (
            predict(noted.operations[phase], noted.launches(phase), gpu, shares, self._nodes)
            for noted in self.noted
        )
        return first.at_depth(second, self._steps)


def _noted(
    setting: Setting,
    depth: int,
    phases: Callable[[DryRun], None],
    make: Callable[[int, int], RooflineDevice],
) -> Noted:
    device = make(setting.context, setting.lengths[0] if setting.lengths else 0)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), "roofline", depth, setting.shape)
        run = run_phases(setting, path, device, False, phases)
    return Noted(device.operations, run.counts)
