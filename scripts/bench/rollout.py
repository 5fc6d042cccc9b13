"""Rollout tokens/s of the native engine against a hand-written static-batch decode loop.

Same weights, prompts, lengths and one thread for both, alternating in one process. The baseline is
plain torch: contiguous KV cache, fused qkv and gate-up products, SDPA, the same sampling with
log-probabilities. It pads every row to the longest response. `bound` is what its kernels alone
allow: its prefill, and its steps as traced graphs, which run no Python. Prints one JSON object per
line.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from qwen3_weights import layer_weights
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from hybridrl.engines.rollout.interface import Request, RolloutEngine, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key

SHAPES = {
    "1m": {
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    },
    "3m": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    },
}  # fmt: skip


class HandWrittenLoop:
    """Qwen3 with a static batch: `generate` decodes all rows to the longest wanted length."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int) -> None:
        config, body = model.config, model.model
        self.config = config
        self.embed, self.norm, self.head = body.embed_tokens.weight, body.norm.weight, model.lm_head
        self.layers = layer_weights(body)
        cos, sin = body.rotary_emb(self.embed[:1], torch.arange(length)[None])
        self.cos, self.sin = cos[0], sin[0]
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, length)
        self.cache = torch.zeros(*shape, config.head_dim, dtype=self.embed.dtype)

    def forward(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Logits [rows, vocab] of the last of `ids` [rows, tokens], which begin at `start`."""
        config, eps = self.config, self.config.rms_norm_eps
        rows, tokens = ids.shape
        heads, kv_heads, dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        stop = start + tokens
        cos, sin = self.cos[start:stop], self.sin[start:stop]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
            return x * cos + half * sin

        x = functional.embedding(ids, self.embed)
        for w, cache in zip(self.layers, self.cache, strict=True):
            h = functional.rms_norm(x, x.shape[-1:], w["norm1"], eps)
            qkv = functional.linear(h, w["qkv"]).view(rows, tokens, -1, dim).transpose(1, 2)
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            q = rotate(functional.rms_norm(q, (dim,), w["q_norm"], eps))
            cache[0, :, :, start:stop] = rotate(functional.rms_norm(k, (dim,), w["k_norm"], eps))
            cache[1, :, :, start:stop] = v
            keys, values = cache[:, :, :, :stop]
            if tokens == 1:  # query heads of a kv head as its query rows: nothing is repeated
                q = q.reshape(rows, kv_heads, heads // kv_heads, dim)
                a = functional.scaled_dot_product_attention(q, keys, values)
                a = a.reshape(rows, 1, heads * dim)
            else:
                a = functional.scaled_dot_product_attention(
                    q, keys, values, is_causal=True, enable_gqa=True
                )
                a = a.transpose(1, 2).reshape(rows, tokens, heads * dim)
            x = x + functional.linear(a, w["out"])
            h = functional.rms_norm(x, x.shape[-1:], w["norm2"], eps)
            gate, up = functional.linear(h, w["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w["down"])
        x = functional.rms_norm(x[:, -1], x.shape[-1:], self.norm, eps)
        return self.head(x)

    @torch.inference_mode()
    def generate(self, prompts: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probabilities [rows, new] at temperature 1."""
        logits = self.forward(prompts, 0)
        tokens, log_probs = [], []
        for i in range(new):
            token, log_prob = self.draw(logits)
            tokens.append(token)
            log_probs.append(log_prob)
            if i + 1 < new:
                logits = self.forward(token, prompts.shape[1] + i)
        return torch.cat(tokens, 1), torch.cat(log_probs, 1)

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each row and its log-probability, both [rows, 1]."""
        log_p = logits.float().log_softmax(-1)
        ends = log_p.exp().cumsum(-1, dtype=torch.float64)
        drawn = torch.rand(len(logits), 1, dtype=torch.float64) * ends[:, -1:]
        token = torch.searchsorted(ends, drawn, right=True)
        return token, log_p.gather(-1, token)


class TracedRollout:
    """The kernels of the loop's rollout: a prefill, then decode steps as graphs without Python.

    Steps are traced at a few of the lengths that a sequence has, each of which runs for its share.
    """

    @torch.inference_mode()
    def __init__(self, loop: HandWrittenLoop, prompts: torch.Tensor, new: int) -> None:
        self._loop, self._prompts, self._new = loop, prompts, new
        self._logits = torch.randn(len(prompts), loop.config.vocab_size)
        self._steps = []
        first = prompts.shape[1]
        for length in np.linspace(first, first + new - 2, 5).astype(int).tolist():

            def step(logits: torch.Tensor, at: int = length) -> tuple[torch.Tensor, torch.Tensor]:
                token, log_prob = loop.draw(logits)
                return loop.forward(token, at), log_prob

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each length is a trace of its own
                self._steps.append(torch.jit.trace(step, (self._logits,), check_trace=False))

    @torch.inference_mode()
    def run(self) -> int:
        """Run the prefill, a step for each token but the last, and its draw; the tokens' number."""
        logits = self._loop.forward(self._prompts, 0)
        for i in range(self._new - 1):
            self._steps[i * len(self._steps) // self._new](self._logits)
        self._loop.draw(logits)
        return len(self._prompts) * self._new


def tiny(shape: str, dtype: torch.dtype, vocab_size: int = 64) -> PreTrainedModel:
    """A Qwen3 of random weights, by default with a character-sized vocabulary."""
    config = Qwen3Config(vocab_size=vocab_size, max_position_embeddings=4096,
                         tie_word_embeddings=True, **SHAPES[shape])  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def make_engine(
    model: PreTrainedModel, rows: int, length: int, deterministic: bool = False
) -> NativeEngine:
    """The engine with the model's weights."""
    engine = NativeEngine(
        model.config, dtype=model.dtype, device=torch.device("cpu"), max_running=rows,
        block_size=16, kv_cache_tokens=0, max_sequence=length, deterministic=deterministic,
    )  # fmt: skip
    engine.load_weights(model.state_dict().items())
    return engine


def run_engine(
    engine: RolloutEngine, prompts: list[list[int]], lengths: list[int], **sampling: Any
) -> int:
    """Generate all; the number of tokens."""
    requests = [
        Request((i,), prompt, SamplingParams(length, **sampling), stream_key(0, i))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine.submit(requests)
    tokens = left = 0
    left = len(requests)
    while left:
        outputs = engine.step()
        left -= len(outputs)
        tokens += sum(len(output.token_ids) for output in outputs)
    return tokens


Rates = list[list[float]]
"""Tokens/s by round: of ours, the baseline and, if there is one, the bound."""


def alternate(*runs: Callable[[], int], repeats: int) -> Rates:
    """The rates of all sides, which take turns after one warm-up each."""
    for run in runs:
        run()
    rounds = []
    for _ in range(repeats):
        rates = []
        for run in runs:
            start = time.perf_counter()
            tokens = run()
            rates.append(tokens / (time.perf_counter() - start))
        rounds.append(rates)
    return rounds


def report(name: str, rates: Rates) -> None:
    """One JSON line: medians, and medians of the ratios by round."""
    value, baseline, *bound = (statistics.median(side) for side in zip(*rates, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs, *_ in rates)
    more: dict[str, float] = {}
    if bound:
        more["bound"] = round(bound[0])
        more["of_bound"] = round(statistics.median(r[0] / r[2] for r in rates), 3)
    print(
        json.dumps(
            {
                "name": name,
                "value": round(value),
                "unit": "tokens/s",
                "baseline": round(baseline),
                "ratio": round(ratio, 3),
                "better": "higher",
                **more,
            }
        ),
        flush=True,
    )


def against_loop(
    name: str, shape: str, lengths: list[int], args: argparse.Namespace, prompt: int
) -> None:
    """The engine against the loop: prompts of `prompt` tokens, `lengths` new tokens per sample."""
    model = tiny(shape, args.dtype)
    rows, longest = len(lengths), max(lengths)
    prompts = torch.randint(0, 64, (rows, prompt))
    engine = make_engine(model, rows, prompt + longest)
    loop = HandWrittenLoop(model, rows, prompt + longest)

    def baseline() -> int:
        loop.generate(prompts, longest)
        return sum(lengths)

    rows_of = prompts.tolist()
    ours = partial(run_engine, engine, rows_of, lengths)
    # The kernels' bound is that of rows which all go on to the end.
    bound = [TracedRollout(loop, prompts, longest).run] * (min(lengths) == longest)
    report(name, alternate(ours, baseline, *bound, repeats=args.repeats))


def deterministic_against_default(args: argparse.Namespace) -> None:
    """Cost of the deterministic engine."""
    model, length = tiny("3m", args.dtype), args.prompt + args.new
    prompts = torch.randint(0, 64, (args.samples, args.prompt)).tolist()
    strict, fast = (make_engine(model, args.samples, length, choice) for choice in (True, False))
    lengths = [args.new] * args.samples
    report(
        "rollout_tokens_per_s_deterministic",
        alternate(
            lambda: run_engine(strict, prompts, lengths),
            lambda: run_engine(fast, prompts, lengths),
            repeats=args.repeats,
        ),
    )


WAYS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.5},
    "min_new_tokens": {"min_new_tokens": 10_000, "stop_token_ids": (2,)},
    "logit_bias": {"logit_bias": tuple((i, -1.0) for i in range(20))},
    "bad_words": {"bad_words": tuple((i, i + 1) for i in range(20))},
}


def sampling_against_plain(args: argparse.Namespace) -> None:
    """Cost of each setting of sampling, at a vocabulary of 32,768."""
    model, length = tiny("1m", args.dtype, 32768), args.prompt + args.new
    prompts = torch.randint(0, 32768, (args.samples, args.prompt)).tolist()
    engine = make_engine(model, args.samples, length)
    run = partial(run_engine, engine, prompts, [args.new] * args.samples)
    for name, way in WAYS.items():
        rates = alternate(partial(run, **way), run, repeats=args.repeats)
        report(f"rollout_tokens_per_s_{name}", rates)


def against_generate(args: argparse.Namespace) -> None:
    """The engine against transformers' generate on SmolLM2-135M's shape, random weights, bf16."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=8192, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompts = torch.randint(1, 49152, (args.samples, 40))
    engine = make_engine(model, args.samples, 64)

    def baseline() -> int:
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=True,
            top_k=0, eos_token_id=None,
        )  # fmt: skip
        return args.samples * 24

    rows = prompts.tolist()
    name = "rollout_tokens_per_s_smollm2_vs_generate"
    ours = partial(run_engine, engine, rows, [24] * len(rows))
    report(name, alternate(ours, baseline, repeats=2))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of a response")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    parser.add_argument("--all", action="store_true", help="also the other shapes")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2's shape against generate")
    parser.add_argument("--deterministic", action="store_true", help="against the default engine")
    parser.add_argument("--sampling", action="store_true", help="each setting against none")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.sampling:
        return sampling_against_plain(args)
    if args.deterministic:
        return deterministic_against_default(args)
    if args.smollm2:
        return against_generate(args)
    of_loop = partial(against_loop, args=args, prompt=args.prompt)
    equal = [args.new] * args.samples
    of_loop("rollout_tokens_per_s_vs_loop", "3m", equal)
    of_loop("rollout_tokens_per_s_1_row_vs_loop", "3m", [args.new])
    of_loop("rollout_tokens_per_s_8_rows_vs_loop", "3m", [args.new] * 8)
    few = max(args.new // 4, 1)  # many rows take long
    of_loop("rollout_tokens_per_s_256_rows_vs_loop", "3m", [few] * 256)
    of_loop("rollout_tokens_per_s_prompt_2048_vs_loop", "3m", [args.new] * 8, prompt=2048)
    if args.all:
        of_loop("rollout_tokens_per_s_vs_loop_1m", "1m", equal)
        tail = np.full(args.samples, max(args.new // 8, 1))
        tail[: max(args.samples // 16, 1)] = args.new
        of_loop("rollout_tokens_per_s_vs_loop_longtail", "1m", tail.tolist())


if __name__ == "__main__":
    main()
