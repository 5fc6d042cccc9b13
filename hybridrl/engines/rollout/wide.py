"""The rollout engine of a wide instance: views of another engine's weights and cache memory."""

from collections.abc import Mapping

import torch

from hybridrl.config import RouterReplay
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.speculation import make_speculation
from hybridrl.engines.rollout.stage import RolloutStage
from hybridrl.layout.parameters import Parameter
from hybridrl.layout.wide import wide_slices
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.shard import GenParallel


class WideEngine(NativeEngine):
    """One rank of a wide instance (`layout.wide`), on the weights of the rank's own `engine`.

    States: apart (no weights, no cache) -> `join` -> joined -> `leave`. While it is joined,
    `engine` runs nothing: its KV cache is memory of this one. Nothing is copied: weights are views.
    The embedding is the other engine's, with its collectives, since it needs no other ranks.

    Example: two instances of tp 1 with a [8, 4] matrix that tp cuts by rows have joined. The first
    rank computes with rows 0 to 3 of its own matrix, the second with rows 4 to 7 of its own.
    """

    def __init__(
        self,
        engine: NativeEngine,
        parameters: Mapping[str, Parameter],
        parallel: GenParallel,
    ) -> None:
        """The `engine` is awake, and has been built; `parameters` are the model's by name."""
        parts = engine.parts
        own = parts.parallel.tp
        width, member = parallel.tp // own, parallel.tp_rank % (parallel.tp // own)
        self._engine = engine
        weights = {
            name: tensor[wide_slices(parameters[name], tensor.shape, own, width, member)]
            for name, tensor in engine.parameters().items()
        }
        stage = RolloutStage(
            parts.model_config,
            parallel,
            dtype=parts.dtype,
            device=parts.device,
            max_sequence=parts.max_sequence,
            takes_routing=parts.router_replay is not RouterReplay.off,
            weights=weights,
        )
        cache = engine.take_cache()
        super().__init__(
            parts.model_config,
            dtype=parts.dtype,
            device=parts.device,
            max_running=parts.rollout.max_running,
            block_size=parts.rollout.block_size,
            kv_cache_tokens=stage.num_blocks(cache) * parts.rollout.block_size,
            max_sequence=parts.max_sequence,
            parallel=parallel,
            stops=parts.stops,
            router_replay=parts.router_replay,
            speculation=make_speculation(parts.rollout.draft_length, parallel),
            stage=stage,
        )
        self._cuts = {
            name: (parameter, wide_slices(parameters[name], shape, own, width, member))
            for name, parameter in stage.model.named_parameters()
            for shape in [engine.parameters()[name].shape]
        }
        # From here on the names of the module's parameters are not its own alone.
        stage.share_vocabulary(engine.model, width)
        self.leave()

    @property
    def joined(self) -> bool:
        """Whether the engine has weights and a cache."""
        return self._cache is not None

    @torch.no_grad()
    def join(self) -> None:
        """Take views of the other engine's weights and cache, which runs nothing meanwhile."""
        assert not self.joined, "it has joined already"
        own = self._engine.parameters()
        for name, (parameter, slices) in self._cuts.items():
            parameter.data = own[name][slices]
        for name, buffer in persistent_buffers(self._engine.model).items():
            module, _, leaf = name.rpartition(".")
            self.model.get_submodule(module)._buffers[leaf] = buffer
        self._cache = self._stage.make_cache(
            self._num_blocks, self._block_size, self._engine.take_cache()
        )

    def leave(self) -> None:
        """Let go of weights and cache; nothing may run."""
        assert not self.unfinished + self._admission.num_held, "samples are left"
        self._admission.forget()
        for parameter, _ in self._cuts.values():
            parameter.data = parameter.new_empty(0)
        self._free_cache()
