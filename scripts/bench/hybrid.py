"""A hybrid against a dense model, its chunks on a CPU, and its states when a sample is parked.

`tiny_hybrid` is a Qwen3.5 in small: three layers of Gated DeltaNet and one that attends. All sides
alternate in one process, on one thread, with random weights. Times are CPU seconds.

- `decode`, `train`: tokens a second of `tiny_hybrid` over those of `tiny`, which is dense: decode
  steps of the native engine; forward and backward of a packed row;
- `chunks`: a layer of Gated DeltaNet over 64 sequences of 12 tokens, forward and backward, with our
  chunks over that with transformers' own, in tokens a second;
- `park_N`: a sample of N tokens that is parked with keys, values and states, and goes on, over one
  whose tokens are computed again. `bytes` are what is copied, `state_bytes` those of states among
  them. A ratio below 1 says that the copy pays.

Prints one JSON object per line.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from lines import line, show, take_turns
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hybridrl.config import Attention, TinyModelConfig
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedModel, pack
from hybridrl.models import packed_attention
from hybridrl.models.mixers import recurrent_modules
from hybridrl.models.recurrent import mixers_of, use_batches
from hybridrl.models.stages import prepare_training, whole
from hybridrl.models.tiny import make_tiny_model

CPU = torch.device("cpu")


def model_of(attention: str, longest: int, hybrid: bool) -> PreTrainedModel:
    """`model=tiny_hybrid` or `model=tiny`, with random weights."""
    config = TinyModelConfig(max_positions=longest)
    if hybrid:
        config.num_layers = config.attention_interval = 4
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, config, seed=0)
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)


def engine_of(model: PreTrainedModel, rows: int, longest: int) -> NativeEngine:
    """An engine with the model's weights."""
    engine = NativeEngine(
        model.config, dtype=torch.float32, device=CPU, max_running=rows, block_size=16,
        kv_cache_tokens=0, max_sequence=longest,
    )  # fmt: skip
    engine.load_weights(model.state_dict().items())
    return engine


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of `work`."""
    start = time.process_time()
    work()
    return time.process_time() - start


class Decoding:
    """Tokens a second of decode steps, once prompts of 16 tokens have been read."""

    def __init__(self, model: PreTrainedModel, rows: int, new: int) -> None:
        self.engine, self.rows, self.new = engine_of(model, rows, 32 + new), rows, new

    def tokens_per_s(self) -> float:
        """All rows decode together."""
        limits = SamplingParams(self.new + 2)
        requests = [
            Request(row, [*range(3, 19)], limits, stream_key(0, row)) for row in range(self.rows)
        ]
        self.engine.submit(requests)
        self.engine.step()

        def steps() -> None:
            for _ in range(self.new):
                self.engine.step()

        spent = seconds(steps)
        self.engine.park([request.id for request in requests])
        return self.rows * self.new / spent


class Training:
    """Tokens a second of forward and backward over a packed row of sequences of 12 to 48 tokens."""

    def __init__(self, model: PreTrainedModel, sequences: int) -> None:
        use_batches(model)
        self.packed = PackedModel(whole(prepare_training(model)))
        draw = torch.Generator().manual_seed(0)
        lengths = [12 + 12 * (number % 4) for number in range(sequences)]
        ids = [torch.randint(3, 60, (length,), generator=draw) for length in lengths]
        self.row = pack([TrainSequence(x, len(x) - 4) for x in ids], Attention.torch, CPU)
        self.tokens = sum(lengths)

    def _step(self) -> None:
        log_probs, _ = self.packed(self.row.ids, self.row)
        log_probs.mean().backward()
        self.packed.zero_grad()

    def tokens_per_s(self) -> float:
        """Measure one row."""
        return self.tokens / seconds(self._step)


class Chunks:
    """Tokens a second of a layer over equal sequences, with our chunks or with transformers'."""

    def __init__(self, model: PreTrainedModel, ours: bool, sequences: int, length: int) -> None:
        if ours:
            use_batches(model)
            self.compute = lambda x: mixers_of(model)[0].compute(x, None)
        else:
            self.compute = recurrent_modules(model)[0]
        self.shape = sequences, length, model.config.hidden_size
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(self.shape, generator=draw)

    def _step(self) -> None:
        x = self.x.clone().requires_grad_()
        self.compute(x).square().mean().backward()

    def tokens_per_s(self) -> float:
        """Measure one batch."""
        return self.shape[0] * self.shape[1] / seconds(self._step)


Side = Decoding | Training | Chunks


class Parking:
    """A sample of some tokens that leaves an engine and goes on in it."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self.engine, self.tokens = engine_of(model, 2, tokens + 16), tokens
        self.bytes = self.state_bytes = 0

    def run(self, with_kv: bool) -> float:
        """Milliseconds from leaving to the next token."""
        engine = self.engine
        prompt = [3 + number % 50 for number in range(self.tokens)]
        request = Request("sample", prompt, SamplingParams(8), stream_key(0, 0))
        engine.submit([request])
        engine.step()

        def move() -> None:
            (parked,) = engine.park(["sample"], with_kv=with_kv)
            if parked.kv is not None and parked.kv.states is not None:
                self.state_bytes = parked.kv.states.nbytes
                self.bytes = parked.kv.blocks.nbytes + self.state_bytes
            engine.submit([parked])
            engine.step()

        spent = seconds(move)
        engine.park(["sample"])
        return 1e3 * spent


def compare(name: str, ours: Side, theirs: Side, rounds: int) -> None:
    """Show the line of two sides, in tokens a second."""
    sides = {"ours": ours.tokens_per_s, "theirs": theirs.tokens_per_s}
    measured = take_turns(sides, rounds)
    show(line(f"hybrid/{name}", "tokens/s", "higher", measured["ours"], measured["theirs"]))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=64, help="sequences of a batch")
    parser.add_argument("--new", type=int, default=24, help="decode steps of a measurement")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 1000, 4000])
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    longest = max(args.tokens) + 64
    hybrid = model_of("eager", longest, hybrid=True)
    dense = model_of("eager", longest, hybrid=False)
    sizes = args.rows, args.new
    compare("decode", Decoding(hybrid, *sizes), Decoding(dense, *sizes), args.rounds)
    trained = model_of(packed_attention.NAME, longest, hybrid=True)
    attending = model_of(packed_attention.NAME, longest, hybrid=False)
    compare("train", Training(trained, args.rows), Training(attending, args.rows), args.rounds)
    ours, theirs = (Chunks(copy.deepcopy(hybrid), own, args.rows, 12) for own in (True, False))
    compare("chunks", ours, theirs, args.rounds)
    for tokens in args.tokens:
        parking = Parking(hybrid, tokens)
        measured = take_turns(
            {"ours": partial(parking.run, True), "theirs": partial(parking.run, False)},
            args.rounds,
        )
        record = line(
            f"hybrid/park_{tokens}", "ms", "lower", measured["ours"], measured["theirs"],
            bytes=parking.bytes, state_bytes=parking.state_bytes,
        )  # fmt: skip
        show(record)


if __name__ == "__main__":
    main()
