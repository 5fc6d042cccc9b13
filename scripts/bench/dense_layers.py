"""Activations of Llama-like layers by a formula, where counting them on torch's layers is too much.

`hybridrl plan auto` counts (`CountedLayerBytes`).
"""

from dataclasses import dataclass

from hybridrl.config import ActivationMode
from hybridrl.costs.mapping import PlannedRole
from hybridrl.costs.train_memory import ActivationSizes


@dataclass(frozen=True, slots=True)
class DenseLayerBytes:
    """Bytes of a Llama-like layer with flash-attn in bfloat16: the tensors that autograd keeps.

    A token keeps 16 hidden sizes in norms and residuals (the input, and each norm's input in
    float32 and its result), 8 of the feed-forward size (gate, up, activation, product), 4 of the
    queries' and 4 of the keys' features. `hybridrl plan memory` counts the same on Llama and Qwen2
    (tests/plan/test_mapping_memory.py). The head's kernel works in chunks of logits.
    """

    head_chunk: int = 2**24
    """Logits of such a chunk, at most."""

    def layer(
        self,
        role: PlannedRole,
        tokens: int,
        tp: int,
        sequence_parallel: bool,
        mode: ActivationMode,
    ) -> ActivationSizes:
        """See `LayerBytes`."""
        shape = role.shape
        features = (shape.heads + shape.kv_heads) * shape.features
        whole = 16 * shape.hidden
        if sequence_parallel:  # norms have their tokens only, the layer's input is whole
            whole -= 12 * shape.hidden * (tp - 1) // tp
        kept = whole + (8 * shape.ffn + 4 * features + 4 * shape.heads) // tp
        # Two moments of a backward pass: at the activation with one gradient, at the layer's input.
        matrix = 2 * shape.hidden * shape.ffn // tp
        within = tokens * (4 * shape.ffn // tp + 2 * shape.hidden) + matrix
        parts = tp if sequence_parallel else 1
        peak = tokens * kept + max(within, tokens * 11 * shape.hidden // parts + 3 * matrix)
        if not mode.recomputes:
            return ActivationSizes(tokens * kept, peak)
        own = 2 * shape.hidden // parts
        peak += tokens * own
        if mode is ActivationMode.selective:  # products and attention; o's and down's are whole
            own += 4 * shape.hidden + 4 * (shape.ffn + features + shape.heads) // tp
            peak += tokens * 2 * shape.hidden  # backward needs no result of down
        return ActivationSizes(tokens * own, peak)

    def head(self, role: PlannedRole, scored: int, tp: int) -> ActivationSizes:
        """See `LayerBytes`."""
        hidden, rows = role.shape.hidden, -(-role.shape.vocabulary // tp)
        products = 2 * (self.head_chunk + self.head_chunk // max(1, scored) * hidden)
        return ActivationSizes(0, 2 * rows * hidden + 6 * scored * hidden + products)

    def scoring(self, role: PlannedRole, tokens: int, scored: int, tp: int) -> int:
        """See `LayerBytes`."""
        shape = role.shape
        return tokens * max(4 * shape.hidden + 6 * shape.ffn // tp, 10 * shape.hidden)

    def prefill(self, role: PlannedRole, tokens: int, tp: int) -> int:
        """See `LayerBytes`: a mask of prompts besides."""
        return self.scoring(role, tokens, 0, tp) + tokens * tokens
