"""Seconds of a unit of each kind of work on one accelerator, by its datasheet.

Kernels reach a share of the datasheet's figures: assumptions, in the range that systems report on
Hopper. The shares of floating-point operations contain what other kernels take. Training does six
operations a parameter and token at its share. Forward passes have their own, so a backward pass
takes the rest. A decode step reads the weights and every cached token once. It waits for the host,
which launches its kernels one by one or replays them (`HostStep`).
"""

from dataclasses import dataclass

from hybridrl.config.rollout import ENGINES, Engine, HostStep
from hybridrl.costs.devices import Accelerator
from hybridrl.costs.model_shape import ModelShape

MEMORY_SHARE, FORWARD_SHARE, TRAIN_SHARE = 0.7, 0.5, 0.4
_ROW_S = 1e-3  # a micro-batch on a pipeline chunk, whatever is in it
_CALL_S = 2e-3  # an update whatever is in it, and the driver's round trip to an instance


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Seconds of a unit of work on one accelerator; links are the cluster's."""

    forward_flop_s: float
    backward_flop_s: float
    """By operation of the forward pass."""
    byte_s: float
    """Reading or writing a byte of the device's memory."""
    launch_s: float
    host: HostStep
    replay: HostStep | None = None
    """As `host`, without pipeline stages, where steps are replayed."""
    row_s: float = _ROW_S
    update_s: float = _CALL_S
    round_trip_s: float = _CALL_S
    itemsize: int = 2
    """Bytes of an element in the compute format."""

    @classmethod
    def of(
        cls, accelerator: Accelerator, itemsize: int = 2, engine: Engine = Engine.native
    ) -> "LayerCosts":
        """By the datasheet; `engine` generates."""
        flop_s, features = 1 / (accelerator.flops * FORWARD_SHARE), ENGINES[engine]
        return cls(
            forward_flop_s=flop_s,
            backward_flop_s=3 / (accelerator.flops * TRAIN_SHARE) - flop_s,
            byte_s=1 / (accelerator.memory_bytes_per_s * MEMORY_SHARE),
            launch_s=accelerator.launch_s,
            host=features.host,
            replay=features.replay if accelerator.replays else None,
            itemsize=itemsize,
        )

    @property
    def gradient_element_s(self) -> float:
        """Weights cast and gradients cast, of an element that a rank computes with, an update."""
        return (4 + 2 * self.itemsize + 4) * self.byte_s

    @property
    def optimizer_element_s(self) -> float:
        """An optimizer step: AdamW reads four float32 of an element and writes three."""
        return 7 * 4 * self.byte_s

    @property
    def switch_byte_s(self) -> float:
        """Casting and copying a byte of a rank's generation weights."""
        return (4 + self.itemsize) / self.itemsize * self.byte_s


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of a layer, of one rank of `tp`: by token, and by pair of a query and a key."""

    flops: float
    trained_flops: float
    """The part of `flops` with weights that are trained."""
    pair_flops: float

    @classmethod
    def of(cls, shape: ModelShape, tp: int = 1, adapters: int = 0) -> "LayerWork":
        """The work of one of `tp` ranks; with `adapters` these parameters alone are trained.

        Of a hybrid it is that of a layer on average.
        """
        trained = adapters or shape.active_layer_parameters
        of_states = shape.recurrent.state_flops / shape.layers if shape.recurrent else 0
        return cls(
            flops=(2 * (shape.active_layer_parameters + adapters) + of_states) / tp,
            trained_flops=2 * trained / tp,
            pair_flops=4 * shape.heads * shape.features * shape.attending / shape.layers / tp,
        )


@dataclass(frozen=True, slots=True)
class LinearPass:
    """Seconds of a pass over a chunk: a call, tokens, scored tokens, pairs of a query and a key."""

    call_s: float = 0.0
    token_s: float = 0.0
    scored_s: float = 0.0
    pair_s: float = 0.0

    def __call__(self, tokens: float, scored: float, pairs: float) -> float:
        """Seconds of a micro-batch."""
        work = self.token_s * tokens + self.scored_s * scored + self.pair_s * pairs
        return self.call_s + work

    def __add__(self, other: "LinearPass") -> "LinearPass":
        return LinearPass(
            self.call_s + other.call_s,
            self.token_s + other.token_s,
            self.scored_s + other.scored_s,
            self.pair_s + other.pair_s,
        )

    def times(self, number: float) -> "LinearPass":
        """One after the other."""
        return LinearPass(
            number * self.call_s,
            number * self.token_s,
            number * self.scored_s,
            number * self.pair_s,
        )

    @classmethod
    def of_layer(cls, flop_s: float, work: LayerWork) -> "LinearPass":
        """Return the pass of one layer on one rank."""
        return cls(0.0, flop_s * work.flops, 0.0, flop_s * work.pair_flops)

    @classmethod
    def of_head(cls, flop_s: float, hidden: int, outputs: float) -> "LinearPass":
        """Return the pass of a head with so many `outputs` on one rank."""
        return cls(0.0, 0.0, flop_s * 2 * hidden * outputs, 0.0)
