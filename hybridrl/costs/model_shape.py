"""The sizes of a decoder that determine seconds and bytes, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hybridrl.layout.parameters import BOTH, FIRST, LAST, Parameter


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The layers of a hybrid that have a state, all of them together.

    `attending` of them have keys and values besides (Falcon-H1), the others in their place. Their
    mixers have `parameters`. A sequence's states have `state_bytes`, and a token takes
    `state_flops` operations on them.
    """

    layers: int
    parameters: int
    state_bytes: int
    state_flops: int
    attending: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated feed-forward layers, dense or of experts, as Llama's and Qwen's are.

    Example: of `ModelShape(32, 4096, 14_336, 32, 8, 128_256)` (Llama 3 8B) a layer has 218 million
    parameters, and a token's keys and values have 131,072 bytes in bfloat16.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int = 32_000
    head_size: int = 0
    """Features of a head; 0: hidden / heads."""
    tied: bool = False
    """Whether embedding and head are one matrix."""
    experts: int = 0
    """Feed-forward layers of `ffn` features that a token may go to; 0: one, dense."""
    experts_per_token: int = 0
    shared: int = 0
    """Features of the feed-forward layer beside the experts to which every token goes."""
    recurrent: RecurrentShape | None = None
    """The recurrent layers among `layers`; None: all attend."""

    @property
    def attending(self) -> int:
        """Layers that attend."""
        if self.recurrent is None:
            return self.layers
        return self.layers - self.recurrent.layers + self.recurrent.attending

    @property
    def features(self) -> int:
        """Features of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer, without norms and routers; of a hybrid on average."""
        return self.dense_parameters + self.expert_parameters

    @property
    def active_layer_parameters(self) -> int:
        """Weights of a layer that a token is multiplied with."""
        return self.dense_parameters + self.experts_per_token * 3 * self.hidden * self.ffn

    @property
    def dense_parameters(self) -> int:
        """Weights of a layer with which every token is multiplied."""
        mixed = 2 * self.features * (self.heads + self.kv_heads) * self.hidden
        if self.recurrent:
            mixed = (self.attending * mixed + self.recurrent.parameters) // self.layers
        return mixed + self.hidden * 3 * (self.shared if self.experts else self.ffn)

    @property
    def expert_parameters(self) -> int:
        """Weights of a layer's experts."""
        return self.experts * 3 * self.hidden * self.ffn

    @property
    def head_parameters(self) -> int:
        """Weights of the vocabulary's head, and of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Weights, embedding and head included."""
        ends = self.head_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + ends

    @property
    def kv_elements(self) -> int:
        """Keys and values of a token."""
        return 2 * self.attending * self.kv_heads * self.features

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token in bfloat16."""
        return 2 * self.kv_elements

    @classmethod
    def of_config(
        cls, config: Mapping[str, Any], recurrent: RecurrentShape | None = None
    ) -> "ModelShape":
        """Return the sizes in a Hugging Face `config.json`, which does not say those `recurrent`.

        Raises ValueError for sizes that are missing, or that differ between layers.
        """
        experts = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
        ffn = config.get("moe_intermediate_size") if experts else None
        shared = config.get("shared_expert_intermediate_size") or 0
        shared = shared or int(config.get("n_shared_experts") or 0) * int(ffn or 0)
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                ffn=int(ffn or config.get("intermediate_size") or 4 * config["hidden_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                vocabulary=int(config["vocab_size"]),
                head_size=int(config.get("head_dim") or 0),
                tied=bool(config.get("tie_word_embeddings")),
                experts=experts,
                experts_per_token=int(config.get("num_experts_per_tok") or 1) if experts else 0,
                shared=int(shared) if experts else 0,
                recurrent=recurrent,
            )
        except KeyError as error:
            raise ValueError(f"a config without {error.args[0]}") from None
        except TypeError:  # layers that differ, each with its own number
            raise ValueError("a config whose layers have sizes of their own") from None


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@cache
def matrices(shape: ModelShape, *tps: int) -> tuple[Parameter, ...]:
    """Return the matrices of the model as layouts see them, without norms.

    Heads are kept whole where the tensor-parallel sizes `tps` and their number divide each other;
    other models do not cut attention by heads.
    """
    hidden, features = shape.hidden, shape.features
    queries, keys = (
        0 if any(tp > number and tp % number for tp in tps) else number
        for number in (shape.heads, shape.kv_heads)
    )
    attention: list[tuple[str, tuple[int, ...], int, int]] = [
        ("q", (shape.heads * features, hidden), 0, queries),
        ("k", (shape.kv_heads * features, hidden), 0, keys),
        ("v", (shape.kv_heads * features, hidden), 0, keys),
        ("o", (hidden, shape.heads * features), 1, queries),
    ]
    mixers: list[tuple[str, tuple[int, ...], int, int]] = []
    if shape.recurrent:
        rows = shape.recurrent.parameters // (shape.recurrent.layers * hidden)
        mixers = [("mixer", (rows, hidden), 0, 0)]
    sizes: list[tuple[str, tuple[int, ...], int, int]] = []
    if ffn := shape.shared if shape.experts else shape.ffn:
        sizes += [
            ("gate", (ffn, hidden), 0, 0),
            ("up", (ffn, hidden), 0, 0),
            ("down", (hidden, ffn), 1, 0),
        ]
    experts = shape.experts
    parameters = []
    for layer in range(shape.layers):
        name = f"layers.{layer}"
        own = [*(attention if layer < shape.attending else []), *sizes]
        if shape.recurrent and layer >= shape.layers - shape.recurrent.layers:
            own = [*mixers, *own]
        parameters += [
            Parameter(f"{name}.{n}", size, layer, dim, units) for n, size, dim, units in own
        ]
        if experts:
            both, back = (experts, 2 * shape.ffn, hidden), (experts, hidden, shape.ffn)
            parameters += [
                Parameter(f"{name}.experts.both", both, layer, 1, blocks=2, experts=experts),
                Parameter(f"{name}.experts.down", back, layer, 2, experts=experts),
            ]
    ends = (shape.vocabulary, hidden)
    parameters.append(Parameter("embedding", ends, BOTH if shape.tied else FIRST, 0))
    if not shape.tied:
        parameters.append(Parameter("head", ends, LAST, 0))
    return tuple(parameters)
