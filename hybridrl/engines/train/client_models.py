"""Several models that train on one engine in turn: adapters of one base, or all weights of one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from hybridrl.engines.train.adamw import local_shard
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.models.adapters import add_adapters
from hybridrl.models.load import empty_causal_lm
from hybridrl.models.packed_attention import NAME
from hybridrl.models.stages import plain_name

Shards = dict[str, torch.Tensor]
"""This rank's trained shards by name, in host memory."""
_READ_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def error_of_any(read: Callable[[], None]) -> str:
    """Read files on all ranks; the line of the first rank that cannot, on all of them; or ""."""
    error = ""
    try:
        read()
    except _READ_ERRORS as caught:
        error = f"{type(caught).__name__}: {' '.join(str(caught).split())}"
    errors = [error] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next(filter(None, errors), "")


@dataclass(slots=True)
class ModelState:
    """What a model has on this rank while another is in the engine, in host memory.

    The lists are in the order of `TrainEngine.trained_parameters`. `moments` is empty before the
    first step, and `gradients` has None where nothing has been added since the last one.
    """

    weights: list[torch.Tensor] = field(default_factory=list)
    moments: list[dict[str, torch.Tensor]] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    version: int = 0


class ClientModels:
    """The models of an engine, by name: one of them is `in_use`, all others are on the host.

    A model is made by `create`, which uses it, and is gone after `drop`. What is asked of the
    engine concerns the one in use. All methods but `snapshot` and `drop` may be collective.
    """

    def __init__(self, engine: TrainEngine, model_path: str, seed: int) -> None:
        """The engine as it is has the weights of `model_path`; `seed` draws adapters."""
        self.engine, self.model_path, self.seed = engine, model_path, seed
        self.in_use: str | None = None
        self._states: dict[str, ModelState] = {}

    def use(self, name: str | None) -> None:
        """Have the engine hold this model; None: no client's, so that its contents may change."""
        if name == self.in_use:
            return
        self.engine.memory.settle()
        if self.in_use is not None:
            self._states[self.in_use] = self._taken()
        if name is not None:
            self._put(self._states.pop(name))
        self.in_use = name

    def create(self, name: str, seed: int | None) -> None:
        """Make a model and use it: the base, or new adapters that `seed` draws; None: the run's."""
        self.use(None)
        self._clear()
        self._begin(self.seed if seed is None else seed)
        self.in_use = name

    def drop(self, name: str) -> None:
        """Forget a model."""
        self._states.pop(name, None)
        if name == self.in_use:
            self._clear()
            self.in_use = None

    def snapshot(self) -> Shards:
        """A copy of the trained shards of the model in use."""
        self.engine.memory.settle()
        return {name: shard.to("cpu", copy=True) for name, shard in self._trained()}

    def base(self) -> Shards:
        """The shards of the weights that no client has trained, as `snapshot` gives them."""
        if self.engine.lora is not None:
            return {name: torch.zeros_like(x, device="cpu") for name, x in self._trained()}
        with self._aside():
            self.engine.load_weights(self.model_path)
            return self.snapshot()

    @contextmanager
    def holding(self, shards: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Lend the engine weights that `snapshot` has given, for forward passes in this context."""
        with self._aside():
            self.engine.memory.changed()
            for name, shard in self._trained():
                shard.copy_(shards[name])
            yield

    def stored(self, folder: Path) -> Shards:
        """The shards of a model that `checkpoint.hf` has written, as `snapshot` gives them."""
        with self._aside():
            self.read(folder)
            return self.snapshot()

    def read(self, folder: Path) -> None:
        """Take the weights that `checkpoint.hf` has written into the model in use.

        Raises ValueError for adapters of other names or shapes, before a tensor is changed.
        """
        if self.engine.lora is None:
            version = self.engine.version
            self.engine.load_weights(str(folder))
            self.engine.version = version
            return
        file = folder / "adapter" / "adapter_model.safetensors"
        stored, shapes = load_file(file), self.engine.layout.shapes
        names = {f"base_model.model.{name}": name for name in self.engine.adapter_names()}
        for key in sorted(stored.keys() ^ names.keys()):
            raise ValueError(f"{file}: {key} is in {'it' if key in stored else 'the model'} alone")
        for key, tensor in stored.items():
            own, wanted = list(tensor.shape), list(shapes[names[key]])
            if own != wanted:
                raise ValueError(f"{file}: {key} has the shape {own}, wanted {wanted}")
        self.engine.take_weights((names[key], tensor) for key, tensor in stored.items())

    def replace(self, read: Callable[[], None]) -> str:
        """Have `read` fill the engine anew for the model in use; the error of a rank, if any.

        With an error the model is as it was on all ranks, but has no gradient.
        """
        name = self.in_use
        assert name is not None
        self.engine.optimizer.zero_grad()
        self.use(None)
        error = error_of_any(read)
        if error:
            self.use(name)
        else:
            del self._states[name]
            self.in_use = name
        return error

    def forget_optimizer(self) -> None:
        """Begin the optimizer of the model in use anew; its weights stay."""
        self.engine.reset_optimizer(self.engine.optim, self.engine.total_steps)
        self.engine.version = 0

    # -- one model out, another in -------------------------------------------------------------

    def _trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        trained = self.engine.trained()
        for name, shard in self.engine.named_shards().items():
            if name in trained:
                yield name, local_shard(shard)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Within, the engine may hold other weights; then it holds the model in use again."""
        name = self.in_use
        self.use(None)
        try:
            yield
        finally:
            self.use(name)

    def _taken(self) -> ModelState:
        """What the engine holds, copied to the host; it keeps no gradient."""
        engine, state = self.engine, ModelState(version=self.engine.version)
        for parameter in engine.trained_parameters():
            state.weights.append(local_shard(parameter.detach()).to("cpu", copy=True))
            moments = engine.optimizer.state.get(parameter, {})
            if moments:
                own = {key: local_shard(x).to("cpu", copy=True) for key, x in moments.items()}
                state.moments.append(own)
            gradient, parameter.grad = parameter.grad, None
            state.gradients.append(None if gradient is None else gradient.to("cpu"))
        return state

    @torch.no_grad()
    def _put(self, state: ModelState) -> None:
        """Have the engine hold a model that was taken."""
        engine, parameters = self.engine, self.engine.trained_parameters()
        engine.memory.changed()
        for parameter, weights in zip(parameters, state.weights, strict=True):
            local_shard(parameter.detach()).copy_(weights)
        if state.moments and not engine.optimizer.state:
            engine.memory.allocate_moments(engine.optimizer, steps=0)
        if engine.optimizer.state:
            self._put_moments(parameters, state)
        for parameter, gradient in zip(parameters, state.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        engine.version = state.version

    def _put_moments(self, parameters: list[torch.nn.Parameter], state: ModelState) -> None:
        """Fill the optimizer's state, with zeros for a model that has made no step."""
        moments = state.moments or [{}] * len(parameters)
        for parameter, own in zip(parameters, moments, strict=True):
            for key, tensor in self.engine.optimizer.state[parameter].items():
                if own:
                    local_shard(tensor).copy_(own[key])
                else:
                    local_shard(tensor).zero_()

    def _clear(self) -> None:
        """Leave the engine no gradient and no steps."""
        self.engine.optimizer.zero_grad()
        self.forget_optimizer()

    def _begin(self, seed: int) -> None:
        """Fill the engine with the weights that a new model begins with."""
        engine = self.engine
        if engine.lora is None:
            engine.load_weights(self.model_path)
            engine.version = 0
            return
        model = empty_causal_lm(self.model_path, NAME)
        frozen, cpu = engine.compute_dtype, torch.device("cpu")
        add_adapters(model, engine.lora, seed, frozen=frozen, device=cpu)
        named = model.named_parameters()
        engine.take_weights((plain_name(name), p) for name, p in named if p.requires_grad)
