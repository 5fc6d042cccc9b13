"""One rank that generates and does not train: weights come to it through the data plane."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridrl.config import Push
from hybridrl.costs.memory import PoolSizes
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Command,
    FetchWeights,
    LoadWeights,
)
from hybridrl.flow.graph import Graph
from hybridrl.layout.layerwise import Fill
from hybridrl.layout.push import PushTarget
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.models.buffers import copy_buffers
from hybridrl.models.load import TORCH_DTYPES, end_token_ids, load_config
from hybridrl.workers.answers import RankDescription
from hybridrl.workers.base_worker import Published, Reply
from hybridrl.workers.device_residency import DeviceResidency
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.generator import Generator
from hybridrl.workers.pushed_weights import AdapterTarget, instances_layout, push_plan
from hybridrl.workers.sample_worker import SampleWorker
from hybridrl.workers.sampling import SamplingTexts
from hybridrl.workers.sparse_pushes import DeltaTarget

logger = logging.getLogger(__name__)


class RolloutWorker(SampleWorker):
    """One rank of the pool `rollout`: a place of an instance, samples and verifiers.

    An instance takes weights (`LoadWeights`) as the first command of a call. The rollout engine is
    awake all the time.
    """

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None = None) -> Reply[RankDescription]:
        """Join the process group, whose first rank listens on `port` of `host`; make the engine."""
        process = self._join(host, port, sizes)
        config, path = self.config, self.model_path
        with self._span("load"):
            shape = load_config(path, vision=config.model.vision)
            ends = end_token_ids(path, shape)
            texts = SamplingTexts(self.tokenizer, config.data.chat, config.stop_texts, ends)
            layout = instances_layout(config, shape, self.size)
            model = config, path, shape, self.tokenizer, texts
            reserved = self.staying.reserved_bytes  # of images: no role trains here
            self._generator = Generator(*model, self.store, self.device, layout, reserved)
            self.residency = DeviceResidency(self.device, self._on_reading)
            dtype = TORCH_DTYPES[config.rollout.dtype]
            place = self.generator.parallel.instance_rank
            self._target: PushTarget | AdapterTarget
            self._deltas: DeltaTarget | None = None
            if config.actor.lora.rank:
                self._target = AdapterTarget(config, shape, path, place, self.device)
            else:
                self._target = PushTarget(push_plan(config, shape), place, dtype)
                if config.rollout.push is Push.sparse:
                    self._deltas = DeltaTarget(self._target, self.data_plane)
            for name in config.eval_judges:  # in every recipe
                self._add_judge(name)
        self._begin_records()
        instance = self.generator.describe("vanilla")
        return self._reply(RankDescription(process=process, instance=instance))

    @property
    def generator(self) -> Generator:
        """The rank's place in a rollout instance."""
        return self._generator

    def _add_scorers(self, graph: Graph, weights: Sequence[Any]) -> None:
        """Models that score are elsewhere."""

    @dispatch(Dispatch.SAME)
    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> Reply[Published[Advanced]]:
        """See `SampleWorker`. A `LoadWeights` comes first, with the arrays of this rank's place.

        Or a `FetchWeights`: they come while the rank decodes.
        """
        for command in commands:
            if isinstance(command, FetchWeights):
                self.data_plane.prefetch(list(command.arrays))
        loads = [command for command in commands if isinstance(command, LoadWeights)]
        others = [c for c in commands if not isinstance(c, LoadWeights | FetchWeights)]
        stats, num_again = None, 0
        for command in loads:
            stats, num_going = self._load(command)
            num_again += 0 if command.keeps_kv else num_going
        reply = super().advance(instance, others, num_decode_steps, enough_turns)
        if stats is None:
            return reply
        event = reply.value.event
        work = replace(
            event.work,
            admitted=event.work.admitted + num_again,
            load_seconds=stats.seconds + stats.proof_seconds,
            proof_seconds=stats.proof_seconds,
            load_bytes=stats.bytes_received,
        )
        published = replace(reply.value, event=replace(event, work=work))
        return replace(reply, value=published)

    def _load(self, command: LoadWeights) -> tuple[SwitchStats, int]:
        """Take the weights of a version; gives what that took, and the samples that go on."""
        num_going = 0
        with self._span("load weights"):

            def load(fill: Fill) -> None:
                nonlocal num_going
                num_going = self.generator.load(fill, command.version, command.keeps_kv)

            held = self.generator.held_weights
            if self._deltas is not None:
                stats = self._deltas.load(command, load, held)
            else:
                arrays = self.data_plane.get(list(command.arrays))
                stats = self._target.load(arrays, command.version, load, held=held)
            if command.biases is not None and self.generator.shared_model is not None:
                (biases,) = self.data_plane.get([command.biases])
                copy_buffers(self.generator.shared_model, biases)
        logger.debug("weights of version %d are loaded, %.3f s", command.version, stats.seconds)
        return stats, num_going
