"""What a layer costs, whatever the model's size: the one format of all sources of seconds.

A pass of n tokens over a layer takes

    call_s + flop_s F + element_s E + pair_s P

with F the floating-point operations of its matrices, E the elements that its other kernels touch (n
times hidden and feed-forward sizes), P the operations of attention (quadratic in lengths). So what
was measured for one layout and size predicts another. The head has costs of its own.

Sources: a roofline (`accelerators.py`), `hybridrl plan calibrate`, and a run that scales the costs
of either (`recorded_costs.py`).
"""

from dataclasses import dataclass, field

from hybridrl.costs.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRates:
    """Seconds of a pass over one layer, or over the head, on one accelerator.

    Operations of a backward pass are counted as those of forward, so its rates are larger.
    """

    call_s: float = 0.0
    flop_s: float = 0.0
    element_s: float = 0.0
    pair_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """Seconds of a decode step of an instance."""

    step_s: float = 0.0
    """The host's part, and that of sampling."""
    layer_s: float = 0.0
    """A layer's launches."""
    weight_byte_s: float = 0.0
    """Reading weights, a rank's share of them."""
    cached_byte_s: float = 0.0
    """Reading keys and values."""
    row_s: float = 0.0
    """A row, whatever the model."""
    flop_s: float = 0.0
    """An operation of a row."""
    logit_s: float = 0.0
    """An element of a row's logits."""
    tp_reduce_s: float = 0.0
    """An all-reduce of hidden states of two tp ranks, within a step."""
    tp_byte_s: float = 0.0
    """A byte of it. Where neither was measured, the cluster's links say what it takes."""
    tp_step_s: float = 0.0
    """What a step under tensor parallelism takes besides: its logits are gathered."""
    pp_send_s: float = 0.0
    """A message from a pipeline stage to the next one, within a step; 0: as links say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Costs of one accelerator; links are the cluster's."""

    source: str
    """`roofline` or `calibrated`, and of what."""
    forward: PassRates
    backward: PassRates
    """A whole backward pass."""
    head_forward: PassRates
    head_backward: PassRates
    """Elements are logits."""
    decode: DecodeRates
    prefill: PassRates = field(default_factory=PassRates)
    row_s: float = 0.0
    """A micro-batch on a chunk, whatever is in it."""
    pass_s: float = 0.0
    """A forward-only call, whatever is in it."""
    update_s: float = 0.0
    """An update, whatever is in it."""
    gradient_element_s: float = 0.0
    """Weights cast and gradients cast, of an element that a rank computes with, once an update."""
    optimizer_element_s: float = 0.0
    """An optimizer step, of a trained element of a rank."""
    input_half: float = 1.0
    """Of a backward pass in halves, seconds of that for the input over its share of a whole one."""
    weights_half: float = 1.0
    """The same of that for the weights."""
    tp_reduce_s: float = 0.0
    """An all-reduce of hidden states of two tp ranks, within a training step or a forward pass."""
    tp_byte_s: float = 0.0
    """A byte of it. Where neither was measured, the cluster's links say what it takes."""
    tp_update_s: float = 0.0
    """What an update under tensor parallelism takes besides, whatever is in it."""
    switch_s: float = 0.0
    """A weight switch, whatever moves."""
    switch_byte_s: float = 0.0
    """Casting and copying a byte of a rank's generation weights."""
    call_s: float = 0.0
    """A call of an instance."""
    round_trip_s: float = 0.0
    itemsize: int = 2
    """Bytes of an element in the compute format."""
    overlaps: bool = True
    """Whether gathering weights by layer takes place while other layers compute."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Work of a layer, of one rank of `tp`: by token, and by pair of a query and a key."""

    flops: float
    elements: float
    pair_flops: float

    @classmethod
    def of(cls, shape: ModelShape, tp: int = 1, sequence_parallel: bool = False) -> "LayerWork":
        """Without sequence parallelism every tp rank has all hidden states.

        Elements are those that norms, residuals, rotations and the gated activation read or write;
        their rate is fitted, so only their proportions count.
        """
        split = 3 * shape.ffn + 2 * (shape.heads + 2 * shape.kv_heads) * shape.features
        whole = 10 * shape.hidden / (tp if sequence_parallel else 1)
        return cls(
            flops=2 * shape.layer_parameters / tp,
            elements=whole + split / tp,
            pair_flops=4 * shape.heads * shape.features / tp,
        )


@dataclass(frozen=True, slots=True)
class LinearPass:
    """Seconds of a pass over a chunk: a call, tokens, scored tokens, pairs of a query and a key."""

    call_s: float = 0.0
    token_s: float = 0.0
    scored_s: float = 0.0
    pair_s: float = 0.0

    def __call__(self, tokens: float, scored: float, pairs: float) -> float:
        """Of a micro-batch."""
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
    def of_layer(cls, rates: PassRates, work: LayerWork) -> "LinearPass":
        """Of one layer on one rank."""
        token_s = rates.flop_s * work.flops + rates.element_s * work.elements
        return cls(rates.call_s, token_s, 0.0, rates.pair_s * work.pair_flops)

    @classmethod
    def of_head(cls, rates: PassRates, hidden: int, outputs: float) -> "LinearPass":
        """Of a head with so many `outputs` on one rank."""
        scored_s = rates.flop_s * 2 * hidden * outputs + rates.element_s * outputs
        return cls(rates.call_s, 0.0, scored_s, 0.0)
