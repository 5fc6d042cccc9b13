"""Costs of a Llama-like model on other accelerators, by roofline.

A decode step reads the weights and every cached token once. A prefill or a forward pass does two
floating-point operations a parameter and token, training six. Each runs at a stated share of the
datasheet's figure. Only the order of magnitude and the scaling are claimed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.config import ConfigError
from hybridrl.costs.instance import Costs
from hybridrl.costs.layers import DecodeRates, LayerCosts, PassRates
from hybridrl.costs.model_shape import ModelShape

_BYTES = 2  # bfloat16 weights and cache

# Kernels' share of the datasheet: assumptions, in the range that systems report on Hopper.
_MEMORY_SHARE, _FORWARD_SHARE, _TRAIN_SHARE, _NETWORK_SHARE = 0.7, 0.5, 0.4, 0.7
_ALL_REDUCE_S = 15e-6  # a small all-reduce within a node, two a layer under tensor parallelism
_STEP_S = 1e-3  # the host's part of a decode step
_CALL_S = 2e-3  # the driver's round trip to an instance


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator, by its datasheet."""

    flops: float
    """Dense bfloat16 operations per second."""
    memory_bytes_per_s: float
    memory_bytes: float
    network_bytes_per_s: float
    """To other nodes, one accelerator's share."""
    node_bytes_per_s: float
    """To accelerators of the same node, each way."""
    host_bytes_per_s: float
    """To the host's memory, each way."""


ACCELERATORS = {
    # NVIDIA H100 SXM5 datasheet: NVLink 900 GB/s and PCIe 128 GB/s in both directions together;
    # 400 Gb/s a GPU.
    "h100": Accelerator(989e12, 3.35e12, 80e9, 50e9, 450e9, 64e9),
    # An H100 SXM5 with NVLink of 400 GB/s; 400 Gb/s a GPU.
    "h800": Accelerator(989e12, 3.35e12, 80e9, 50e9, 200e9, 64e9),
    # The Hopper of RLHFuse's testbed is not named further; its network is 8 x 200 Gb/s a node.
    "hopper-200g": Accelerator(989e12, 3.35e12, 80e9, 25e9, 450e9, 64e9),
    # NVIDIA A100 SXM4 80 GB datasheet: NVLink 600 GB/s, PCIe 64 GB/s; 200 Gb/s a GPU.
    "a100": Accelerator(312e12, 2.04e12, 80e9, 25e9, 300e9, 32e9),
}


# LLaMA (arXiv 2302.13971, table 2); 8b and 70b are Llama 3 (arXiv 2407.21783, table 3). Qwen2.5:
# arXiv 2412.15115, table 1, and the models' config.json.
MODELS = {
    "7b": ModelShape(32, 4096, 11_008, 32, 32),
    "13b": ModelShape(40, 5120, 13_824, 40, 40),
    "33b": ModelShape(60, 6656, 17_920, 52, 52),
    "65b": ModelShape(80, 8192, 22_016, 64, 64),
    "8b": ModelShape(32, 4096, 14_336, 32, 8, 128_256),
    "70b": ModelShape(80, 8192, 28_672, 64, 8, 128_256),
    "qwen2.5-7b": ModelShape(28, 3584, 18_944, 28, 4, 152_064),
    "qwen2.5-14b": ModelShape(48, 5120, 13_824, 40, 8, 152_064),
    "qwen2.5-32b": ModelShape(64, 5120, 27_648, 40, 8, 152_064),
}


def roofline(
    actor: ModelShape,
    forward: Mapping[str, ModelShape],
    trained: Mapping[str, ModelShape],
    accelerator: Accelerator,
    gpus: int,
    total_gpus: int,
) -> Costs:
    """Costs of instances of `gpus` accelerators each (tensor parallel), `total_gpus` in all.

    `forward` are the forward-only stages by name, with a replica on every instance. `trained` are
    the models that are trained one after the other on all accelerators. Pipeline bubbles, the
    optimizer and loading a role's weights are not counted.
    """
    read = accelerator.memory_bytes_per_s * _MEMORY_SHARE * gpus
    work = accelerator.flops * _FORWARD_SHARE * gpus
    train = accelerator.flops * _TRAIN_SHARE * total_gpus
    send = accelerator.network_bytes_per_s * _NETWORK_SHARE * gpus
    reduce = 2 * actor.layers * _ALL_REDUCE_S * (gpus > 1)
    return Costs(
        step_s=actor.parameters * _BYTES / read + reduce + _STEP_S,
        row_s=2 * actor.parameters / work,
        cached_token_s=actor.kv_bytes / read,
        prefill_token_s=2 * actor.parameters / work,
        token_s={name: 2 * model.parameters / work for name, model in forward.items()},
        kv_token_s=actor.kv_bytes / send,
        train_token_s=sum(6 * model.parameters / train for model in trained.values()),
        switch_s=actor.parameters * _BYTES / send,
        round_trip_s=_CALL_S,
    )


def layer_roofline(accelerator: Accelerator, itemsize: int = 2) -> LayerCosts:
    """What a layer costs on an accelerator, by the same shares as `roofline`.

    The shares of floating-point operations contain what other kernels take. Training does six
    operations a parameter and token at its share. Forward passes have their own, so a backward pass
    takes the rest.
    """
    flop_s = 1 / (accelerator.flops * _FORWARD_SHARE)
    train_s = 3 / (accelerator.flops * _TRAIN_SHARE)  # by operation of the forward pass
    byte_s = 1 / (accelerator.memory_bytes_per_s * _MEMORY_SHARE)
    forward = PassRates(flop_s=flop_s, pair_s=flop_s)
    backward = PassRates(flop_s=train_s - flop_s, pair_s=train_s - flop_s)
    return LayerCosts(
        source="roofline",
        forward=forward,
        backward=backward,
        head_forward=forward,
        head_backward=backward,
        decode=DecodeRates(
            step_s=_STEP_S, weight_byte_s=byte_s, cached_byte_s=byte_s, flop_s=flop_s
        ),
        prefill=forward,
        row_s=_STEP_S,
        update_s=_CALL_S,
        # AdamW reads four float32 of an element and writes three; weights are cast, gradients too.
        gradient_element_s=(4 + 2 * itemsize + 4) * byte_s,
        optimizer_element_s=7 * 4 * byte_s,
        switch_byte_s=(4 + itemsize) / itemsize * byte_s,
        round_trip_s=_CALL_S,
        itemsize=itemsize,
    )


def samples_held(
    actor: ModelShape, accelerator: Accelerator, gpus: int, tokens_per_sample: int
) -> int:
    """Samples whose cache fits an instance with the weights, in nine tenths of its memory."""
    free = 0.9 * accelerator.memory_bytes * gpus - actor.parameters * _BYTES
    return int(free // (actor.kv_bytes * tokens_per_sample))


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a text of `read_roofline` names."""

    trained: Mapping[str, ModelShape]
    """The actor, and the critic if there is one."""
    accelerator: Accelerator
    gpus: int
    """Of an instance."""
    total: int
    pp: Mapping[str, int]
    """Pipeline stages of each trained role, where the text has them."""
    tp: int
    """Of the trained roles."""
    mini_batches: int

    @classmethod
    def of(cls, text: str, gpus: int = 8, total: int = 64) -> "Roofline":
        """Raises `ConfigError`; `gpus` and `total` hold where the text has none."""
        allowed = (
            f"gpu:model=MODEL[,critic=MODEL][,gpu=GPU][,gpus=N][,total=N] with MODEL one of "
            f"{', '.join(MODELS)}, GPU one of {', '.join(ACCELERATORS)}; with a critic also "
            "[,pp=N][,critic_pp=N][,tp=N][,mini_batches=N]"
        )
        settings = dict(
            item.split("=", 1) for item in text.removeprefix("gpu:").split(",") if "=" in item
        )
        name, critic = settings.pop("model", ""), settings.pop("critic", None)
        gpu = settings.pop("gpu", "h100")
        numbers = {"gpus": str(gpus), "total": str(total)}
        if critic is not None:
            pp = settings.get("pp", "1")
            numbers |= {"pp": pp, "critic_pp": pp, "tp": "1", "mini_batches": "1"}
        has_pipelines = not {"pp", "critic_pp"}.isdisjoint(settings)
        numbers = {key: settings.pop(key, default) for key, default in numbers.items()}
        known = name in MODELS and gpu in ACCELERATORS and (critic is None or critic in MODELS)
        if not known or settings or not all(n.isdecimal() and int(n) for n in numbers.values()):
            raise ConfigError("--costs", text, allowed)
        sizes = {key: int(number) for key, number in numbers.items()}
        if sizes["total"] % sizes["gpus"]:
            raise ConfigError("--costs", text, "a total that is a multiple of gpus")
        trained = {"actor": MODELS[name]} | ({"critic": MODELS[critic]} if critic else {})
        return cls(
            trained=trained,
            accelerator=ACCELERATORS[gpu],
            gpus=sizes["gpus"],
            total=sizes["total"],
            pp={"actor": sizes["pp"], "critic": sizes["critic_pp"]} if has_pipelines else {},
            tp=sizes.get("tp", 1),
            mini_batches=sizes.get("mini_batches", 1),
        )


def read_roofline(
    text: str, gpus: int = 8, total: int = 64, widths: Sequence[int] = ()
) -> tuple[Costs, int, ModelShape, Accelerator, int]:
    """`gpu:model=13b[,critic=33b][,gpu=h100][,gpus=8][,total=256]`: costs and instances of it.

    `gpus` and `total` hold where the text has none. With `widths` also costs of so many instances
    as one.

    Also the actor, the accelerator and the number of them in an instance. With a critic there is a
    reward model of its size too (PPO), else only the reference. Pipelines that the text has change
    nothing here: see `roofline_updates`. Raises `ConfigError`.
    """
    named = Roofline.of(text, gpus, total)
    actor, critic = named.trained["actor"], named.trained.get("critic")
    forward = {"reference": actor} | ({"reward": critic, "critic": critic} if critic else {})
    sizes = actor, forward, named.trained, named.accelerator
    costs = roofline(*sizes, named.gpus, named.total)
    # A step of a wide instance is that of one with as much tensor parallelism.
    tp = {width: roofline(*sizes, width * named.gpus, named.total) for width in widths}
    costs = replace(costs, wide_step_s={width: wide.step_s for width, wide in tp.items()})
    return costs, named.total // named.gpus, actor, named.accelerator, named.gpus
