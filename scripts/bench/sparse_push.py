"""What a sparse push sends of SmolLM2-135M's shape, against the whole weights, as JSON lines.

A model is trained by AdamW on random tokens, with float32 weights of which ranks that generate get
bfloat16. Its weights are first spread over their bfloat16 cells: those of a bfloat16 file stand at
the centers, which the first steps do not leave. `--model` takes the weights of a directory in place
of random ones. Nanoseconds are of one core's time, a value: to pack the whole array with its
checksum, to code what has changed, and to load it with the check of the result.
"""

import argparse
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from lines import show
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.parameters import train_layout
from hybridrl.layout.push import PushPlan, PushSource, PushTarget, WeightArray
from hybridrl.layout.push_deltas import KeptArrays, WeightDelta, deltas
from hybridrl.layout.sparse_bytes import BLOCK
from hybridrl.models.parallel import model_parameters

Result = TypeVar("Result")
SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    max_position_embeddings=8192, initializer_range=0.041666666666666664,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pushed:
    """One push of the whole model from one rank to one: bytes, and CPU seconds."""

    whole: int
    sparse: int
    changed: float
    """The share of values."""
    plain: int
    """Bytes without zlib."""
    searched: int
    """Bytes of zlib that looks for repeats, level 1."""
    pack_s: float
    code_s: float
    load_s: float
    whole_load_s: float


class Wire:
    """Pushes a model whole and sparse, and holds what comes out against what went in."""

    def __init__(self, model: PreTrainedModel) -> None:
        parameters, layers = model_parameters(model.config), model.config.num_hidden_layers
        src = train_layout(parameters, TrainAxes(), stages_of_layers(layers, 1), 1)
        push = PushPlan.make(src, parameters, 1, 1, layers)
        self._source = PushSource(push, 0, torch.bfloat16)
        self._target = PushTarget(push, 0, torch.bfloat16)
        self._weights = dict(model.named_parameters())
        self._loaded = {n: torch.empty_like(x, dtype=torch.bfloat16) for n, x in self._named()}
        self._kept, self._before = KeptArrays(), self._packed(0)
        self._load(self._kept.keep(self._before))

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._weights[name]) for name in self._source_names()]

    def _source_names(self) -> list[str]:
        return [name for name in self._source.names if name in self._weights]

    def _packed(self, version: int) -> WeightArray:
        (array,) = self._source.pack(dict(self._named()), version)
        assert array is not None
        return array

    def _load(self, array: WeightArray) -> None:
        self._target.load([array], array.version, lambda fill: fill(self._loaded))

    def push(self, version: int) -> Pushed:
        """Push the present weights; the version before is what was pushed last."""
        pack_s, after = timed(lambda: self._packed(version))
        before, self._before = self._before, after
        code_s, changes = timed(lambda: deltas({0: before}, {0: after}))
        delta = changes[0]
        whole_load_s, _ = timed(lambda: self._load(after))
        for tensor in self._loaded.values():
            tensor.zero_()
        load_s, _ = timed(lambda: self._load_delta(delta))
        assert all(torch.equal(self._loaded[n], x.bfloat16()) for n, x in self._named())
        blocks = raw_blocks(delta.data, after.data.size // 2)
        return Pushed(
            whole=after.data.nbytes,
            sparse=delta.data.nbytes,
            changed=float((before.data.view(np.uint16) != after.data.view(np.uint16)).mean()),
            plain=sum(map(len, blocks)),
            searched=sum(len(zlib.compress(block, 1)) for block in blocks),
            pack_s=pack_s,
            code_s=code_s,
            load_s=load_s,
            whole_load_s=whole_load_s,
        )

    def _load_delta(self, delta: WeightDelta) -> None:
        array = self._kept.apply(delta)
        assert array is not None
        self._load(array)


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds of work, and its result."""
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def raw_blocks(data: np.ndarray, num_values: int) -> list[bytes]:
    """The blocks of a delta as they are before zlib."""
    head = 4 * -(-num_values // BLOCK)
    ends = np.cumsum(np.frombuffer(data[:head].tobytes(), "<u4"))
    return [zlib.decompress(block.tobytes()) for block in np.split(data[head:], ends[:-1])]


@torch.no_grad()
def spread_over_cells(model: PreTrainedModel) -> None:
    """Draw every weight uniformly from those that bfloat16 rounds to the same value."""
    for tensor in model.parameters():
        center = tensor.bfloat16()
        bits = center.view(torch.int16)
        below, above = ((bits + step).view(torch.bfloat16).float() for step in (-1, 1))
        edges = (center.float() + below) / 2, (center.float() + above) / 2
        drawn = torch.lerp(*edges, torch.rand_like(tensor))
        tensor.copy_(torch.where(drawn.bfloat16() == center, drawn, center.float()))


def trained(lr: float, args: argparse.Namespace) -> list[Pushed]:
    """The pushes after each step."""
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(SMOLLM2, dtype=torch.float32)
    spread_over_cells(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    wire, pushes = Wire(model), []
    for step in range(args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (2, args.tokens))
        logits = model(tokens).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        pushes.append(wire.push(step + 1))
    return pushes


def compare(lr: float, args: argparse.Namespace) -> None:
    """One learning rate, as a line: the median of the last half of the steps."""
    pushes = trained(lr, args)
    last = pushes[len(pushes) // 2 :]
    values = pushes[0].whole // 2

    def median(of: Callable[[Pushed], float]) -> float:
        return statistics.median(map(of, last))

    def ns(of: Callable[[Pushed], float]) -> float:
        return round(median(of) / values * 1e9, 2)

    sparse, whole = median(lambda push: push.sparse), pushes[0].whole
    show(
        {
            "name": f"sparse_push_bytes_lr_{lr:g}",
            "value": sparse,
            "unit": "bytes",
            "baseline": whole,
            "ratio": round(sparse / whole, 5),
            "better": "lower",
            "rounds": len(last),
            "full_over_sparse": round(whole / sparse, 1),
            "full_over_sparse_first_step": round(whole / pushes[0].sparse, 1),
            "full_over_sparse_without_zlib": round(whole / median(lambda x: x.plain), 1),
            "full_over_sparse_zlib_1": round(whole / median(lambda x: x.searched), 1),
            "changed": round(median(lambda x: x.changed), 5),
            "pack_ns": ns(lambda x: x.pack_s),
            "code_ns": ns(lambda x: x.code_s),
            "load_ns": ns(lambda x: x.load_s),
            "load_full_ns": ns(lambda x: x.whole_load_s),
        }
    )


def main() -> None:
    """Every learning rate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a directory of a Hugging Face model")
    parser.add_argument("--lrs", default="1e-6,1e-5", help="learning rates")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="of each of two rows")
    args = parser.parse_args()
    torch.set_num_threads(1)  # times are a core's
    for lr in map(float, args.lrs.split(",")):
        compare(lr, args)


if __name__ == "__main__":
    main()
