"""A device and models by a text, `gpu:model=13b,gpu=h100,gpus=8,total=64`: the costs of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from hybridrl.config import ConfigError
from hybridrl.costs.devices import ACCELERATORS, MODELS, Accelerator
from hybridrl.costs.instance import Costs
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    ACTOR,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel
from hybridrl.costs.model_shape import ModelShape

_PER_NODE = 8
_BYTES = 2  # bfloat16 weights and cache
_USUAL = SampleLength(256, 768)  # of forward passes and updates


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device and the models on it.

    With a critic there is a reward model of its size too (PPO), else only the reference.
    """

    trained: Mapping[str, ModelShape]
    """The actor, and the critic if there is one."""
    accelerator: Accelerator
    gpus: int
    """GPUs of an instance."""
    total: int
    train_times: int = 1
    """Updates take so many times what their roofline says."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the actor's weights in generation."""
        return self.trained[ACTOR].parameters * _BYTES

    @property
    def instances(self) -> int:
        """Rollout instances."""
        return self.total // self.gpus

    def samples_held(self, tokens_per_sample: int) -> int:
        """Samples whose cache fits an instance with the weights, in nine tenths of its memory."""
        free = 0.9 * self.accelerator.memory_bytes * self.gpus - self.weight_bytes
        return int(free // (self.trained[ACTOR].kv_bytes * tokens_per_sample))

    def costs(self, widths: Sequence[int] = ()) -> Costs:
        """The costs of an instance, with `widths` also of so many instances as one."""
        actor, critic = self.trained[ACTOR], self.trained.get("critic")
        model, ranks = _model_of(self.accelerator, self.total), range(self.total)
        home = PlannedRole(name=ACTOR, shape=actor, trained=True)
        gen, train = GenLayout(tp=self.gpus), TrainLayout(fsdp=self.total)
        forward = {"reference": actor} | ({"reward": critic, "critic": critic} if critic else {})
        # A step of a wide instance is that of one with as much tensor parallelism.
        wide = {
            width: model.generation(home, GenLayout(tp=width * self.gpus), ranks).step_s
            for width in widths
        }
        return replace(
            model.generation(home, gen, ranks),
            token_s={name: _token_s(model, shape, gen, ranks) for name, shape in forward.items()},
            train_token_s=self._train_token_s(model, train),
            switch_s=model.switch_s(home, train, gen, ranks),
            wide_step_s=wide,
        )

    def _train_token_s(self, model: CostModel, layout: TrainLayout) -> float:
        """Seconds a token of the updates of all trained models, one after the other."""
        samples, seconds = [_USUAL] * 8 * self.total, 0.0
        for name, shape in self.trained.items():
            role = PlannedRole(name=name, shape=shape, trained=True, value_head=name != ACTOR)
            seconds += model.update_s(role, layout, range(self.total), samples)
        return self.train_times * seconds / sum(sample.tokens for sample in samples)

    @classmethod
    def of(cls, text: str, gpus: int = 8, total: int = 64) -> "Roofline":
        """Read `gpu:model=13b[,critic=33b][,gpu=h100][,gpus=8][,total=256]`.

        `gpus` and `total` hold where the text has none. `train_times=6` makes updates six times as
        long. Raises `ConfigError`.
        """
        allowed = (
            "gpu:model=MODEL[,critic=MODEL][,gpu=GPU][,gpus=N][,total=N][,train_times=N] with "
            f"MODEL one of {', '.join(MODELS)}, GPU one of {', '.join(ACCELERATORS)}"
        )
        settings = dict(
            item.split("=", 1) for item in text.removeprefix("gpu:").split(",") if "=" in item
        )
        name, critic = settings.pop("model", ""), settings.pop("critic", None)
        gpu = settings.pop("gpu", "h100")
        numbers = {"gpus": str(gpus), "total": str(total), "train_times": "1"}
        numbers = {key: settings.pop(key, default) for key, default in numbers.items()}
        known = name in MODELS and gpu in ACCELERATORS and (critic is None or critic in MODELS)
        if gone := settings.keys() & {"pp", "critic_pp", "tp", "mini_batches"}:
            named = ", ".join(sorted(gone))
            moved = f"no {named}: hybridrl plan auto --price has updates of a layout ({allowed})"
            raise ConfigError("--costs", text, moved)
        if not known or settings or not all(n.isdecimal() and int(n) for n in numbers.values()):
            raise ConfigError("--costs", text, allowed)
        sizes = {key: int(number) for key, number in numbers.items()}
        if sizes["total"] % sizes["gpus"]:
            raise ConfigError("--costs", text, "a total that is a multiple of gpus")
        for heads in (MODELS[name].heads, MODELS[name].kv_heads):
            if sizes["gpus"] > heads and sizes["gpus"] % heads:
                allowed = f"at most {heads} gpus, or a multiple: the heads of the model"
                raise ConfigError("--costs", text, allowed)
        trained = {"actor": MODELS[name]} | ({"critic": MODELS[critic]} if critic else {})
        return cls(
            trained=trained,
            accelerator=ACCELERATORS[gpu],
            gpus=sizes["gpus"],
            total=sizes["total"],
            train_times=sizes["train_times"],
        )


@lru_cache(16)
def _model_of(accelerator: Accelerator, ranks: int) -> CostModel:
    """The cost model of so many accelerators, eight in a node where they fill nodes."""
    per_node = gcd(ranks, _PER_NODE)
    cluster = cluster_of(accelerator, ranks // per_node, per_node)
    return CostModel(LayerCosts.of(accelerator), cluster)


def _token_s(model: CostModel, shape: ModelShape, gen: GenLayout, ranks: range) -> float:
    """Seconds a token of a forward pass of a copy that has generation's layout."""
    role = PlannedRole(name="scorer", shape=shape)
    return model.score_s(role, gen, ranks, [_USUAL] * 8) / (8 * _USUAL.tokens)
