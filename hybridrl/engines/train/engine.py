"""The train engine: a Hugging Face model under pp x FSDP2 x tp, packed, normalized over all ranks.

Every method is collective: all ranks call it in the same order, `accumulate` those of a replica.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.algorithms.normalize import factor_of_totals
from hybridrl.config import (
    LoraConfig,
    ModelConfig,
    RouterReplay,
    TrainerConfig,
)
from hybridrl.config.loss import Loss
from hybridrl.engines.train.build import TrainDims, build, load
from hybridrl.engines.train.expert_load import ExpertLoad
from hybridrl.engines.train.interface import TrainSequence, ended
from hybridrl.engines.train.optimizer_steps import SteppedShards
from hybridrl.engines.train.packed import Candidates, PackedBatch, keep_experts
from hybridrl.engines.train.pipeline import Pipeline, StageModel
from hybridrl.engines.train.pipeline_executor import PipelineGroups
from hybridrl.engines.train.replica import MicroBatches, Replica
from hybridrl.engines.train.rows import ScoredRows, score_rows, train_rows
from hybridrl.engines.train.update_sums import (
    PreparedUpdate,
    UpdateSums,
    averages,
    distance_metrics,
    forget_early_gradients,
    local_gradients,
    row_loss,
    sum_tied,
)
from hybridrl.layout.fsdp_groups import is_one_group, stays_unsharded
from hybridrl.layout.process_groups import warm_up
from hybridrl.models.adapters import add_adapters, enabled_dropout
from hybridrl.models.attention_choice import choose_attention
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.buffers import routing_biases
from hybridrl.models.flops import ForwardFlops, forward_flops
from hybridrl.models.image_text import has_tower, image_pads
from hybridrl.models.load import (
    TORCH_DTYPES,
    absent_parameters,
    empty_causal_lm,
    empty_value_model,
)
from hybridrl.models.packed_attention import NAME
from hybridrl.models.router_replay import ExpertShape, enable_replay
from hybridrl.models.stored_weights import StoredWeights
from hybridrl.models.vision import tower_of
from hybridrl.pipelines.balance import SequenceCost
from hybridrl.system.activity import mark

logger = logging.getLogger(__name__)


class TrainEngine(SteppedShards):
    """One rank's shard of a model in training.

    Invariant: between calls trained parameters are sharded and in float32, and all ranks hold the
    same `version` (optimizer steps done). There is no gradient but that of `accumulate`.

    Example: `engine.update(sequences, loss)` trains one step on this rank's sequences;
    `engine.log_probs(sequences)` scores; `engine.named_shards()` feeds the weight switch.
    """

    def __init__(
        self,
        model_path: str,
        *,
        model: ModelConfig,
        trainer: TrainerConfig,
        device: torch.device,
        temperature: float = 1.0,
        gen_tp: int = 1,
        gen_ep: int = 1,
        gives_values: bool = False,
        lora: LoraConfig | None = None,
        seed: int = 0,
        key: str = "model.path",
        reverse: bool = False,
    ) -> None:
        """Read this rank's part of `model_path`, as `trainer.layout` says; all ranks call it.

        `temperature` is that of sampling: log-probabilities are those of the distribution that
        responses are drawn from. `gen_tp` and `gen_ep` are generation's, which decide along which
        dimension FSDP shards (`layout.parameters.fsdp_dim`). With `gives_values` the model
        has a value head (`models.load.empty_value_model`) and `values`, not `log_probs`; losses are
        called with values. With `lora` of a rank above 0 adapters are trained, which `seed` draws,
        and the value head; the weights are frozen, in the compute format. With `reverse` its
        pipeline runs from the last rank to the first. Raises ConfigError for a
        model that cannot be used, naming `key`, and for axes that it cannot take. Raises ValueError
        for a temperature that is not above 0.
        """
        self.trainer, self.device, self.gives_values = trainer, device, gives_values
        compute = self.compute_dtype = TORCH_DTYPES[model.compute_dtype.on(self.device.type)]
        self.dims = TrainDims.make(trainer.layout, dist.get_world_size(), device.type, reverse)
        warm_up(self.dims.groups(), device)
        # Before weights are read, which takes some ranks longer.
        messages = PipelineGroups(device) if self.dims.config.num_chunks > 1 else None

        # The whole model without its weights, and its adapters.
        if gives_values:
            self.model = empty_value_model(model_path, NAME, key)
        else:
            self.model = empty_causal_lm(model_path, NAME, key, model.vision)
        shape = attention_shape(self.model.config)
        self.attention = choose_attention(model.attention, device, compute, shape)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.keep_unsharded = stays_unsharded(self.num_parameters, self.dims.axes.pp)
        """Whether weights stay gathered from the first micro-batch of an update to the last."""
        self.lora = lora if lora is not None and lora.rank else None
        self.adapter_config: Any = None
        """peft's, of a model with adapters."""
        logger.debug("loading %s", model_path)
        with self._stored(model_path, key) as weights:
            weights.fill_buffers(self.model)
            if self.lora is not None:
                self.adapter_config = add_adapters(
                    self.model, self.lora, seed, frozen=compute, device=torch.device("cpu")
                )
            self.num_trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)

            # This rank's part: pipeline chunks, tensor parallel, activations, FSDP.
            parts = build(
                self.model,
                self.dims,
                compute=compute,
                activations=trainer.activations,
                compiled=trainer.compile,
                fused=trainer.fuses_layers_on(device.type),
                keep_unsharded=self.keep_unsharded,
                one_group=is_one_group(self.num_parameters),
                gen_tp=gen_tp,
                gen_ep=gen_ep,
            )
            memory = load(parts, weights, device)
        super().__init__(parts, self.dims, device, self.lora, memory)
        self.temperature = temperature
        # All dropouts are off; an update turns them on.
        modules = [module for root in self.roots for module in root.modules()]
        self._dropouts = [m.eval() for m in modules if isinstance(m, nn.Dropout)]
        self._experts: ExpertShape | None = None
        if trainer.router_replay is not RouterReplay.off and not gives_values:
            self._experts = self._enable_replay()
        self._expert_load = ExpertLoad(
            self.chunks, self.model.config, trainer, self.dims.axes.tp, device
        )

        # What trains it: the pipeline, the ranks that share its sequences, the optimizer.
        self.pipeline = self._make_pipeline(compute, messages)
        self._replica = self._make_replica()
        self.flops = ForwardFlops.of(self.model.config)
        if gives_values:  # in place of the vocabulary's head
            self.flops = replace(self.flops, per_scored=2 * self.model.config.hidden_size)
        self._early: UpdateSums | None = None
        steps = trainer.steps * trainer.mini_batches * trainer.epochs
        self.reset_optimizer(trainer.optim, steps)

    def _stored(self, path: str, key: str) -> StoredWeights:
        config, values = self.model.config, self.gives_values
        zeros = absent_parameters(config) if values else ()
        return StoredWeights(path, config, classifier=values, zeros=zeros, key=key)

    def _enable_replay(self) -> ExpertShape:
        """Let this rank's layers take the experts of sequences, or record them."""
        shape = ExpertShape.of(self.model.config)
        for chunk in self.chunks:
            enable_replay(enumerate(decoder_layers(chunk.model), chunk.offset), shape)
        return shape

    def _make_pipeline(
        self, compute: torch.dtype, groups: PipelineGroups | None
    ) -> Pipeline | None:
        """The schedule of this rank's chunks; None for a model that is not cut into chunks."""
        stages = [root for root in self.roots if isinstance(root, StageModel)]
        if groups is None:
            return None
        return Pipeline(
            stages,
            self.dims.chunk_ranks,
            self.dims.config.schedule,
            self.dims.mesh.get_group("pp"),
            self.device,
            compute,
            groups,
            self.dims.token_parts,
        )

    def _make_replica(self) -> Replica:
        """The ranks that compute the same sequences."""
        trainer, config = self.trainer, self.model.config
        return Replica(
            self.dims,
            self.pipeline,
            self.attention,
            self.device,
            trainer.max_tokens_per_micro_batch,
            config.num_hidden_layers,
            trainer.chunk_tokens,
            SequenceCost(*forward_flops(config)),
            trainer.shares_prompts,
            tower_of(config, self.compute_dtype, self.device, any(x.first for x in self.chunks)),
            image_pads(config),
        )

    @property
    def temperature(self) -> float:
        """What divides the logits, from the next pass on."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if value <= 0:
            raise ValueError(f"temperature={value}: training needs a number above 0")
        self._temperature = value
        for root in self.roots:
            root.set_temperature(value)

    def describe(self) -> dict[str, Any]:
        """The choices made: model type, parameters, attention, FSDP groups, kept unsharded."""
        return {
            "model_type": self.model.config.model_type,
            "parameters": self.num_parameters,
            "trained_parameters": self.num_trained,
            "attention": self.attention.value,
            "compiled": self.trainer.compile,
            "fused_modules": self.num_fused,
            "fsdp_groups": len(self.fsdp_modules),
            "fsdp_keep_unsharded": self.keep_unsharded,
        }

    def moving_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of this rank's layers that updates change, by name; not copies."""
        moves = self.trainer.router_bias_update_rate > 0
        return routing_biases(self.local_buffers()) if moves else {}

    # Scoring

    @torch.no_grad()
    def log_probs(
        self, sequences: Sequence[TrainSequence], records_experts: bool = False
    ) -> list[torch.Tensor]:
        """Log-probability of every response token, [response_tokens] a sequence, on CPU.

        Ranks may hold different numbers of sequences, or none. With `records_experts` it fills
        `routed_experts` of the sequences; without, it replays those that they have.
        """
        assert not self.gives_values, "a model with a value head has no vocabulary"
        return self._score(sequences, records_experts=records_experts)

    @torch.no_grad()
    def values(self, sequences: Sequence[TrainSequence], alone: bool = False) -> list[torch.Tensor]:
        """Value of the state before every response token, [response_tokens] a sequence, on CPU.

        That is the head at the position that predicts the token. Ranks may hold different numbers
        of sequences, or none. With `alone` each sequence is a separate row, so that a rank's other
        sequences do not change the last bits.
        """
        assert self.gives_values, "only a model with a value head has values"
        return self._score(sequences, alone)

    def _score(
        self, sequences: Sequence[TrainSequence], alone: bool = False, records_experts: bool = False
    ) -> list[torch.Tensor]:
        """The model's score of every response token."""
        rows = self.prepare_scores(sequences, alone, records_experts)
        self._score_rows(rows.batches, rows.finish)
        return self.finish_scores(rows)

    def prepare_scores(
        self, sequences: Sequence[TrainSequence], alone: bool = False, records_experts: bool = False
    ) -> ScoredRows:
        """The rows of `values` or `log_probs`; once they are computed `finish_scores` follows."""
        pooled, own = self._replica.gather(sequences)
        micros = self._replica.split(pooled, alone=alone)
        (num_micro_batches,) = self._reduce([len(micros.parts)], dist.ReduceOp.MAX)
        micros = self._replica.same_number(micros, num_micro_batches)
        batches = self._replica.pack(micros, records_experts=records_experts)
        logger.debug("scoring %d sequences, %d micro-batches", len(pooled), len(batches))
        return ScoredRows(
            sequences=sequences,
            pooled=pooled,
            own=own,
            micros=micros,
            batches=batches,
            records_experts=records_experts,
        )

    def finish_scores(self, rows: ScoredRows) -> list[torch.Tensor]:
        """Scores of this rank's sequences, [response_tokens] each, on CPU."""
        scores = rows.scores
        if self.pipeline is not None:
            scores = self._replica.from_last_stage(scores, torch.device("cpu"))
        self._reshard()
        if rows.records_experts:
            assert self._experts is not None, "trainer.router_replay is off"
            micros = rows.micros
            sequences = [[micros.sequences[i] for i in indices] for indices in micros.parts]
            group = None if self.pipeline is None else self.dims.mesh.get_group("pp")
            keep_experts(sequences, rows.batches, self._experts.dtype, group)
            for sequence, scored in zip(rows.sequences, rows.pooled[rows.own], strict=True):
                sequence.routed_experts = scored.routed_experts
        return scores[rows.own]

    # Training

    def accumulate(
        self,
        sequences: Sequence[TrainSequence],
        loss: Loss[torch.Tensor],
        *,
        compare: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Forward and backward on a few sequences of an update that others are not ready for.

        Collective over the ranks of one training replica (pp x fsdp x tp) alone, which may have no
        sequence; replicas, if there are several, do not wait for each other. The totals by which an
        update normalizes are not known yet, so tokens have the weights of totals 1. `update` with
        `continues` applies the factor, before clipping; it has the same `loss` and `compare`. The
        gradient stays here, in
        float32, sharded and not summed over replicas. `discard` throws it away.
        """
        assert not self._expert_load.experts, "experts are balanced over all ranks"
        assert not any(module.p for module in self._dropouts), "its seed is the update's"
        early = self._early or UpdateSums()
        with self._replica.apart():
            pooled, _, micros = self._rows(sequences, loss)
            (number,) = self._replica.most([len(micros.parts)])
            early.counts = early.joined(self._replica.count(pooled, 0, self.flops))
            if number:
                micros = self._replica.same_number(micros, number, loss.samples_per_row)
            batches = self._pack(micros, loss) if number else []
        logger.debug("early backward on %d sequences, %d micro-batches", len(pooled), len(batches))
        finish = row_loss(micros, batches, loss, (1, 1, 1), compare, early)
        if batches:
            self._train_rows(batches, finish, all_reduce=False)
        early.add_padding(pooled, batches)
        self._early = early

    @property
    def has_early_gradient(self) -> bool:
        """Whether this rank has a gradient of `accumulate`."""
        return self._early is not None

    def discard(self) -> None:
        """Throw away what `accumulate` has computed; not collective."""
        if self._early is not None:
            forget_early_gradients(self.roots)
            self.optimizer.zero_grad()  # of one replica nothing is left to be summed
            self._early = None

    def update(
        self,
        sequences: Sequence[TrainSequence],
        loss: Loss[torch.Tensor],
        *,
        max_response_tokens: int = 0,
        compare: Mapping[str, str] = MappingProxyType({}),
        continues: bool = False,
    ) -> dict[str, float]:
        """One optimizer step on the sequences of all ranks; `sequences` are this rank's.

        With a value head the loss gets values in place of log-probabilities, and no entropy.
        Sequences of one row of the loss are consecutive and on one rank.

        The gradient is that of sum_i w_i loss_i over the trained tokens of all ranks, with w by
        `loss.normalize`. `trainer.router_aux_loss_coef` adds the routers' balance loss
        (`models.router_balance`). The split into ranks and micro-batches does not change it.
        `max_response_tokens` is the constant of the normalization `constant` (0: the longest
        response of this update). `compare` names fields with another engine's log-probabilities of
        the responses, which sequences may lack, and a prefix for metrics. These are the distance
        from the log-probabilities before the step (`hybridrl.algorithms.corrections.describe`).
        `effective_share` is the effective sample size of the responses of all fields together. The
        loss may reduce this step's learning rate by it. The update `continues` where some rank has
        accumulated gradients for it; their sequences are not among `sequences`, and count as if
        they were.

        Returns the same metrics on all ranks: `loss`, `grad_norm` (before clipping), `lr`,
        `entropy`, `tokens`, `flops` (the model's, of forward and backward; the same under every
        layout), and the loss's own, averaged with w. Of experts those of `ExpertLoad`,
        and where they are replayed the `routed_experts_bytes` of all sequences.
        If loss or gradient is not finite on any rank, no rank steps and `bad_step` is 1.0. Raises
        ValueError if no rank has a token to train, or this rank an incomplete row.
        """
        prepared = self.prepare_update(
            sequences,
            loss,
            max_response_tokens=max_response_tokens,
            compare=compare,
            continues=continues,
        )
        with self.training(prepared):
            self._train_rows(prepared.batches, prepared.finish)
        return self.finish_update(prepared)

    def accumulate_gradient(
        self, sequences: Sequence[TrainSequence], loss: Loss[torch.Tensor], backward: bool = True
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Add the gradient of `loss`, summed over all ranks' sequences, to what is there.

        `step` follows, after one call or several. Tokens have the weights of totals 1: those of
        `normalize=token` are 1. Without `backward` nothing is added.

        Returns the log-probabilities of this rank's sequences, on the CPU: [response_tokens] each,
        with candidates [response_tokens, 1 + k]. Also metrics, the same on all ranks: `loss`, the
        sum, and means over tokens of the loss's own. Raises ValueError as `update`.
        """
        update = self.prepare_update(sequences, loss, continues=True, keeps_scores=True)
        if backward:
            with self.training(update):
                self._train_rows(update.batches, update.finish)
        else:
            with torch.no_grad():
                self._score_rows(update.batches, update.finish)
        assert update.scored is not None
        log_probs, sums = self.finish_scores(update.scored), update.sums.sums
        if self.pipeline is not None:
            sums = self._replica.from_last_stage(sums, self.device)
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        _, metrics = averages(nothing, sums, 1.0, self._replica.size)
        return log_probs, metrics

    def prepare_update(
        self,
        sequences: Sequence[TrainSequence],
        loss: Loss[torch.Tensor],
        *,
        max_response_tokens: int = 0,
        compare: Mapping[str, str] = MappingProxyType({}),
        continues: bool = False,
        even: bool = True,
        keeps_scores: bool = False,
    ) -> PreparedUpdate:
        """The rows of an `update` and the totals of all ranks; `finish_update` follows.

        All ranks have equally many rows, unless `even` is false. With `keeps_scores` the scores of
        all response tokens are kept.
        """
        assert continues or self._early is None, "an update that knows of no early gradient"
        sums, self._early = self._early or UpdateSums(), None
        pooled, own, micros = self._rows(sequences, loss)
        counts = self._replica.count(pooled, len(micros.parts), self.flops)
        totals = self._replica.totals(sums.joined(counts))
        number = totals.micro_batches if even else max(1, len(micros.parts))
        micros = self._replica.same_number(micros, number, loss.samples_per_row)
        if not even:
            micros = replace(micros, parts=[own for own in micros.parts if own] or [[]])
        batches = self._pack(micros, loss)
        logger.debug("update on %d sequences, %d micro-batches", len(pooled), len(batches))
        known = totals.tokens, totals.sequences, max_response_tokens or totals.longest
        weighed = (1, 1, 1) if continues else known
        finish = row_loss(micros, batches, loss, weighed, compare, sums)
        factor = factor_of_totals(loss.normalize, *known) if continues else 1.0
        scored = None
        if keeps_scores:
            scored = ScoredRows(
                sequences=sequences, pooled=pooled, own=own, micros=micros, batches=batches
            )
            finish = scored.keeping(finish)
        return PreparedUpdate(pooled, batches, loss, totals, compare, sums, finish, factor, scored)

    @contextmanager
    def training(self, update: PreparedUpdate) -> Iterator[None]:
        """Around forward and backward of an update: counts of experts, dropout of adapters."""
        self._expert_load.start(update.totals.sequences)
        with enabled_dropout(self._dropouts, self.device, self.version):
            yield

    def finish_update(self, update: PreparedUpdate) -> dict[str, float]:
        """The optimizer step of gradients that are there; returns the metrics of `update`."""
        sums, totals, compare = update.sums, update.totals, update.compare
        if self.pipeline is not None:
            sum_tied(self.chunks, self.dims)
            sums.sums, sums.compared = self._replica.from_last_stage(
                (sums.sums, sums.compared), self.device
            )
        sums.add_padding(update.sequences, update.batches)
        figures = (
            distance_metrics(sums.compared, tuple(compare.values()), self.device) if compare else {}
        )
        lr_scale = update.loss.lr_scale(figures.get("effective_share", 1.0))
        metrics = self._step(sums.sums, 1.0 if lr_scale is None else lr_scale, update.factor)
        metrics |= figures if lr_scale is None else {**figures, "lr_scale": lr_scale}
        logger.debug("update ended, version %d", self.version)
        metrics["tokens"] = float(totals.tokens)
        # Backward has twice as many, but for the gradients of frozen weights; a frozen tower none.
        of_tower = totals.tower_flops * (3 if has_tower(self.model.config) else 1)
        metrics["flops"] = totals.flops * (3 if self.lora is None else 2) + of_tower
        load = self._expert_load.metrics()
        if not metrics["bad_step"]:
            self._expert_load.move_biases()
        return metrics | load | self._of_sequences(update.sequences, sums)

    def _rows(
        self, sequences: Sequence[TrainSequence], loss: Loss[torch.Tensor]
    ) -> tuple[Sequence[TrainSequence], slice, MicroBatches]:
        """The sequences that this rank's pp x tp ranks compute, its own, and micro-batches."""
        samples_per_row = loss.samples_per_row
        if len(sequences) % samples_per_row:
            raise ValueError(
                f"update: {len(sequences)} sequences, wanted a multiple of {samples_per_row=}"
            )
        if loss.needs_last_token_only:
            assert self.gives_values, "only a model with a value head is read at the end"
            pad = getattr(self.model.config, "pad_token_id", None)
            sequences = [ended(sequence, pad) for sequence in sequences]
        pooled, own = self._replica.gather(sequences)
        return pooled, own, self._replica.split(pooled, samples_per_row)

    def _pack(self, micros: MicroBatches, loss: Loss[torch.Tensor]) -> list[PackedBatch]:
        return self._replica.pack(
            micros,
            trained_only=True,
            counts_experts=self._expert_load.experts > 0,
            candidates=Candidates.of(loss),
        )

    def _of_sequences(self, pooled: Sequence[TrainSequence], sums: UpdateSums) -> dict[str, float]:
        """Metrics of what an update gets: recorded experts, padding of rows, shared prompts."""
        metrics = {}
        if self._experts is not None:
            records = (s.routed_experts for s in pooled if s.routed_experts is not None)
            (total,) = self._reduce([sum(r.nbytes for r in records)], dist.ReduceOp.SUM)
            metrics["routed_experts_bytes"] = total / self._replica.size
        if self.pipeline is not None or self.dims.axes.tp > 1:
            real, computed = self._reduce([sums.real, sums.computed], dist.ReduceOp.SUM)
            metrics["padding_share"] = 1 - real / computed
        if self.trainer.shares_prompts:
            real, shared = self._reduce([sums.real, sums.shared], dist.ReduceOp.SUM)
            metrics["shared_prompt_share"] = shared / (real + shared)
        return metrics

    def _score_rows(self, batches: Sequence[PackedBatch], finish: Callable[..., Any]) -> None:
        if self.pipeline is not None:
            self.pipeline.score(batches, finish)
            return
        (root,) = self.roots
        score_rows(root, batches, finish)

    def _train_rows(
        self, batches: Sequence[PackedBatch], finish: Callable[..., Any], all_reduce: bool = True
    ) -> None:
        if self.pipeline is not None:
            self.pipeline.train(batches, finish, all_reduce)
            return
        (root,) = self.roots
        train_rows(root, batches, finish, self.keep_unsharded, all_reduce)

    def _step(
        self, sums: dict[str, torch.Tensor], lr_scale: float, factor: float
    ) -> dict[str, float]:
        """Clip by the global norm and step, or skip the step on all ranks alike.

        Gradients and `sums` are to be multiplied by `factor`.
        """
        mark("optimizer")
        gradients, own_square = local_gradients(self.chunks, self.dims, factor)
        square, metrics = averages(own_square, sums, factor, self._replica.size)
        metrics |= {
            "grad_norm": square**0.5,
            "lr": lr_scale * float(self.lr_scheduler.get_last_lr()[0]),
        }
        finite = math.isfinite(square) and math.isfinite(metrics["loss"])
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] *= lr_scale  # for this step: the scheduler resets it
            self._apply(gradients, metrics["grad_norm"], self.optim.clip_grad_norm)
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        metrics["bad_step"] = 0.0 if finite else 1.0
        return metrics

    def _reduce(self, values: list[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        tensor = torch.tensor(values, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def load_weights(self, path: str) -> None:
        """Replace the weights by those of another checkpoint of the model, which has no adapters.

        Every rank reads its own boxes. They are a new version.
        """
        assert self.lora is None, "weights below adapters"
        with self._stored(path, "--checkpoints") as weights:
            self.fill(weights)
        self.version += 1
