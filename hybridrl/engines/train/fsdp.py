"""The train engine: FSDP2 on a Hugging Face model, packed, normalised over all ranks.

Every method is collective: all ranks of the mesh call it in the same order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybridrl.algorithms.normalise import token_weights
from hybridrl.config import DType, ModelConfig, OptimConfig, TrainerConfig
from hybridrl.engines.train.balance import micro_batches
from hybridrl.engines.train.interface import Loss, TrainSequence
from hybridrl.engines.train.optim import make_optimizer
from hybridrl.engines.train.packed import (
    PackedBatch,
    PackedModel,
    pack,
    scored_fields,
    scored_positions,
)
from hybridrl.models.load import load_causal_lm
from hybridrl.models.packed_attention import NAME, choose_attention

ONE_GROUP_PARAMETERS = 32 * 2**20
"""Up to this size the whole model is one FSDP group: hooks per layer cost more than they hide."""

KEEP_UNSHARDED_PARAMETERS = 512 * 2**20
"""Up to this size weights and gradients stay unsharded from the first micro-batch to the last
(at most 4 GiB a rank): one all-gather and one reduce-scatter an update, not one a micro-batch."""

TORCH_DTYPES = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of one update over all ranks: what every rank needs to weight and to keep step."""

    micro_batches: int
    tokens: int
    sequences: int
    longest: int


class TrainEngine:
    """One rank's part of a model in training.

    Invariant: between calls the master weights are sharded and in float32, no gradient is left,
    and all ranks hold the same `version` (optimizer steps done).

    Example: `engine.update(sequences, loss)` trains one step on this rank's sequences;
    `engine.log_probs(sequences)` scores; `engine.named_shards()` feeds the weight switch.
    """

    def __init__(
        self,
        model_path: str,
        *,
        model: ModelConfig,
        trainer: TrainerConfig,
        mesh: DeviceMesh,
        temperature: float = 1.0,
        trainable: bool = True,
    ) -> None:
        """Load `model_path` on every rank and shard it over the one-dimensional `mesh`.

        `temperature` is that of sampling: log-probabilities are those of the distribution that
        responses are drawn from. With `trainable` False the engine only scores (a reference), and
        has neither gradients nor an optimizer. Raises ConfigError for a model that cannot be used,
        ValueError for a temperature that is not above 0.
        """
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: training needs a number above 0")
        self.trainer = trainer
        self.mesh = mesh
        self.device = torch.device(mesh.device_type)
        self.group = mesh.get_group()
        self.attention = choose_attention(model.attention, self.device)
        self.causal_lm = load_causal_lm(model_path, NAME)
        if trainer.activation_checkpointing:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.causal_lm.requires_grad_(trainable)
        self.num_parameters = sum(p.numel() for p in self.causal_lm.parameters())
        self._keep_unsharded = self.num_parameters <= KEEP_UNSHARDED_PARAMETERS
        self.root = PackedModel(self.causal_lm, temperature)
        self._shard(TORCH_DTYPES[model.compute_dtype])
        self.version = 0
        if trainable:
            steps = trainer.steps * trainer.mini_batches * trainer.epochs
            self.reset_optimizer(trainer.optim, steps)

    def _shard(self, compute: torch.dtype) -> None:
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
            "reshard_after_forward": not self._keep_unsharded,
        }
        if self.num_parameters > ONE_GROUP_PARAMETERS:
            for layer in self.causal_lm.base_model.layers:
                fully_shard(layer, **settings)
        fully_shard(self.root, **settings)
        for module in self._fsdp_modules():
            # Token weights are already relative to all ranks: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows plain sums only

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.root.modules() if isinstance(module, FSDPModule)]

    def describe(self) -> dict[str, Any]:
        """What was chosen: model type, parameters, attention, FSDP groups, kept unsharded."""
        return {
            "model_type": self.causal_lm.config.model_type,
            "parameters": self.num_parameters,
            "attention": self.attention.value,
            "fsdp_groups": len(self._fsdp_modules()),
            "fsdp_keep_unsharded": self._keep_unsharded,
        }

    def reset_optimizer(self, optim: OptimConfig, total_steps: int) -> None:
        """Start anew with empty moments and the schedule at its beginning; weights stay."""
        self.optim = optim
        self.optimizer, self.lr_scheduler = make_optimizer(
            self.root.parameters(), optim, total_steps
        )

    # Scoring

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequence[TrainSequence], with_entropy: bool = False
    ) -> list[torch.Tensor] | tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probability of every response token, [response_tokens] a sequence, on CPU.

        With `with_entropy` a second list holds the entropies. Ranks may hold different numbers of
        sequences, or none.
        """
        parts = micro_batches(
            [len(sequence.ids) for sequence in sequences], self.trainer.max_tokens_per_micro_batch
        )
        (num_micro_batches,) = self._reduce([len(parts)], dist.ReduceOp.MAX)
        scores = [torch.zeros(0)] * len(sequences)
        entropies = list(scores)
        for part in parts + [[]] * (num_micro_batches - len(parts)):
            batch = pack([sequences[i] for i in part], self.attention, self.device)
            values, entropy = self._forward(batch, with_entropy)
            self._scatter(scores, part, batch, values)
            if entropy is not None:
                self._scatter(entropies, part, batch, entropy)
        self._reshard()
        return (scores, entropies) if with_entropy else scores

    @staticmethod
    def _scatter(
        out: list[torch.Tensor], part: list[int], batch: PackedBatch, values: torch.Tensor
    ) -> None:
        for place, value in zip(batch.order, values.cpu().split(batch.counts), strict=True):
            out[part[place]] = value.clone()

    def _forward(
        self, batch: PackedBatch, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.root(
            batch.ids,
            batch.position_ids,
            batch.predicting,
            batch.targets,
            batch.packing,
            with_entropy,
        )

    # Training

    def update(
        self, sequences: Sequence[TrainSequence], loss: Loss, *, max_response_tokens: int = 0
    ) -> dict[str, float]:
        """One optimizer step on the sequences of all ranks; this rank gives its share.

        The gradient is that of sum_i w_i loss_i over the trained tokens of all ranks, with w by
        `loss.normalise`, whatever the split into ranks and micro-batches. `max_response_tokens` is
        the constant of the normalisation `constant` (0: the longest response of this update).

        Returns the same metrics on all ranks: `loss`, `grad_norm` (before clipping), `lr`,
        `entropy`, `tokens`, and the loss's own, averaged with w. Where loss or gradient is not
        finite on any rank, no rank steps and `bad_step` is 1.0. Raises ValueError when no rank has
        a token to train.
        """
        parts = micro_batches(
            [len(sequence.ids) for sequence in sequences], self.trainer.max_tokens_per_micro_batch
        )
        totals = self._totals(sequences, len(parts))
        longest = max_response_tokens or totals.longest
        sums: dict[str, torch.Tensor] = {}
        for number in range(totals.micro_batches):
            part = parts[number] if number < len(parts) else []
            self._sync_gradients(last=number == totals.micro_batches - 1)
            for name, value in self._backward(
                [sequences[i] for i in part], loss, totals, longest
            ).items():
                sums[name] = sums[name] + value if name in sums else value
        metrics = self._step(sums)
        metrics["tokens"] = float(totals.tokens)
        return metrics

    def _totals(self, sequences: Sequence[TrainSequence], num_micro_batches: int) -> _Totals:
        counts = [len(scored_positions(sequence, trained_only=True)) for sequence in sequences]
        mine = torch.tensor(
            [num_micro_batches, sum(counts), len(counts), max(counts, default=0)],
            device=self.device,
        )
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, mine, group=self.group)
        ranks = torch.stack(gathered)
        most, total = ranks.max(0).values.tolist(), ranks.sum(0).tolist()
        if total[1] == 0:
            raise ValueError("update: no rank has a response token to train on")
        return _Totals(most[0], total[1], total[2], most[3])

    def _sync_gradients(self, last: bool) -> None:
        if self._keep_unsharded:
            assert isinstance(self.root, FSDPModule)
            self.root.set_requires_gradient_sync(last)
            self.root.set_reshard_after_backward(last)

    def _backward(
        self, sequences: Sequence[TrainSequence], loss: Loss, totals: _Totals, longest: int
    ) -> dict[str, torch.Tensor]:
        """Forward and backward of one micro-batch; weighted sums of the metrics."""
        batch = pack(sequences, self.attention, self.device, trained_only=True)
        fields = scored_fields(sequences, batch, loss.fields)
        log_probs, entropy = self._forward(batch, True)
        assert entropy is not None
        values, metrics = loss(log_probs, entropy if loss.needs_entropy else None, fields)
        weights = token_weights(
            batch.counts, loss.normalise, totals.tokens, totals.sequences, longest
        ).to(values)
        total = (weights * values).sum()
        total.backward()
        named = {**metrics, "entropy": entropy}
        sums = {name: (weights * value.detach()).sum() for name, value in named.items()}
        return {**sums, "loss": total.detach(), "weight": weights.sum()}

    def _step(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        """Clip by the global norm and step, or skip the step on all ranks alike."""
        gradients = [
            p.grad.to_local() for p in self.root.parameters() if isinstance(p.grad, DTensor)
        ]
        squares = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        names = sorted(sums)
        # What is not finite on one rank is not finite in the sum that all ranks get.
        values = torch.stack([squares, *(sums[name].double() for name in names)])
        dist.all_reduce(values, group=self.group)
        square, *rest = values.tolist()
        metrics = dict(zip(names, rest, strict=True))
        weight = metrics.pop("weight")
        metrics = {k: v if k == "loss" else v / weight for k, v in metrics.items()}
        metrics |= {"grad_norm": square**0.5, "lr": self.lr_scheduler.get_last_lr()[0]}
        finite = all(map(torch.isfinite, values[[0, 1 + names.index("loss")]]))
        if finite:
            limit = self.optim.clip_grad_norm
            if limit and metrics["grad_norm"] > limit:
                torch._foreach_mul_(gradients, limit / (metrics["grad_norm"] + 1e-6))
            self.optimizer.step()
            self.lr_scheduler.step()
            self.version += 1
        self.optimizer.zero_grad()
        metrics["bad_step"] = 0.0 if finite else 1.0
        return metrics

    def _reduce(self, values: list[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(values, device=self.device)
        dist.all_reduce(tensor, op, group=self.group)
        return tensor.tolist()

    # Weights

    def _reshard(self) -> None:
        for module in self._fsdp_modules():
            module.reshard()

    def named_shards(self) -> dict[str, DTensor]:
        """Every parameter's shard under its Hugging Face name; tied ones once. Not copies."""
        return {name: p.detach() for name, p in self.causal_lm.named_parameters()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, one after the other, in float32; all ranks iterate together."""
        for name, shard in self.named_shards().items():
            yield name, shard.full_tensor()

    # Phases

    def offload(self) -> None:
        """Move master weights and optimizer state to the CPU, if they are not there."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Bring master weights and optimizer state back to the accelerator."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        self._reshard()
        self.root.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[name] = value.to(device, non_blocking=False)
