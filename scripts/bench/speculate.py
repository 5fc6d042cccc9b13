"""Decode tokens/s with guessed tokens against without, on text whose siblings repeat.

The tail of a step: at most four responses to a prompt are left, the others have finished. They
count numbers: a tiny model learns it first; `--smollm2 DIR` takes SmolLM2-135M-Instruct in its
place (`make train-smollm2` makes DIR). Sides take turns on the same samples. Times are CPU seconds
of one thread, which other work on the machine disturbs less. The first lines say what a pass of n
tokens a row takes over that of one. No more can be won than n over that. Prints one JSON object per
line.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from lines import line, show, take_turns
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config

from hybridrl.engines.rollout.draft_lengths import FixedLength
from hybridrl.engines.rollout.drafts import SeenTexts
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.speculation import Speculation, make_speculation
from hybridrl.models.shard import GenParallel

TINY = {
    "vocab_size": 16, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
CHARACTERS = "0123456789 ,:+="
LONGEST = 384
ASKED = {
    "count": "Write the numbers from {1} to {2}, separated by commas.",
    "sums": "What is {3} + {4}? Explain every step, and write the sum at the end.",
}
WIDTHS = (1, 2, 4, 8, 16)


def counting(first: int, step: int) -> str:
    """ "3+2: 3, 5, 7, ..."; the prompt ends with the colon."""
    numbers = ", ".join(str(first + step * i) for i in range(100))
    return f"{first}+{step}: {numbers}"[:LONGEST]


def ids_of(text: str) -> list[int]:
    """A token for each character."""
    return [CHARACTERS.index(c) for c in text]


def tiny_model(steps: int) -> PreTrainedModel:
    """A model of 1.2 M parameters that has learned to count, more or less."""
    torch.manual_seed(0)
    config = Qwen3Config(**TINY, tie_word_embeddings=True, max_position_embeddings=1024)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loss = torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(0)
    for i in range(steps):
        texts = [counting(draw.randrange(50), draw.randint(1, 9))[:160] for _ in range(8)]
        ids = torch.tensor([ids_of(text) for text in texts])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (i + 1) / 20) * (1 - i / steps)
    show({"name": "speculate/trained", "loss": round(float(loss.detach()), 3), "steps": steps})
    return model.eval()


@dataclass(frozen=True)
class Group:
    """The responses to a prompt: those that are left, and those that have finished before."""

    running: list[Request]
    finished: list[Request]


def requests_of(
    number: int, prompt: list[int], num: int, new: int, temperature: float
) -> list[Request]:
    """`num` responses to prompt `number`."""
    sampling = SamplingParams(new, temperature=temperature)
    return [
        Request((number, k), prompt, sampling, stream_key(0, number, k=k), prefix=number)
        for k in range(num)
    ]


def groups_of(
    model: PreTrainedModel, prompts: Sequence[list[int]], rows: int, options: argparse.Namespace
) -> list[Group]:
    """The last `rows` responses of each group; the others are made here."""
    length = max(map(len, prompts)) + options.new
    groups = []
    for number, prompt in enumerate(prompts):
        num = rows + options.siblings
        requests = requests_of(number, prompt, num, options.new, options.temperature)
        engine = make_engine(model, None, length)
        engine.submit(requests[rows:])
        tokens = {output.id: output.token_ids for output in finish(engine)}
        finished = [replace(r, response_ids=tokens[r.id]) for r in requests[rows:]]
        groups.append(Group(requests[:rows], finished))
    return groups


class Side:
    """One setting of `rollout.speculate`; an engine is made anew for each round."""

    def __init__(self, model: PreTrainedModel, speculate: str, length: int) -> None:
        self.model, self.length = model, length
        self.drafts = None if speculate == "auto" else int(speculate.replace("off", "0"))
        self.outputs: dict[object, Output] = {}
        self.shares: list[float] = []

    def tokens_per_s(self, groups: Sequence[Group]) -> float:
        """Sampled tokens a CPU second of decode steps, one group after the other."""
        speculation = make_speculation(self.drafts, GenParallel())
        engine = make_engine(self.model, speculation, self.length)
        tokens, seconds = 0, 0.0
        for group in groups:
            if speculation is not None:
                for request in group.finished:
                    speculation.source.begin(request)
                    speculation.source.end(request)
            engine.submit(group.running)
            outputs = engine.step()  # prefills the prompt
            start = time.process_time()
            outputs += finish(engine)
            seconds += time.process_time() - start
            tokens += sum(len(output.token_ids) - 1 for output in outputs)
            self.outputs |= {output.id: output for output in outputs}
        stats = engine.stats()
        self.shares.append(stats.accepted_tokens / max(1, stats.drafted_tokens))
        return tokens / seconds


def finish(engine: NativeEngine) -> list[Output]:
    """Decode until nothing is left."""
    outputs: list[Output] = []
    while (stats := engine.stats()).running or stats.waiting:
        outputs += engine.step()
    return outputs


def make_engine(
    model: PreTrainedModel, speculation: Speculation | None, length: int
) -> NativeEngine:
    """An engine with the model's weights."""
    engine = NativeEngine(
        model.config,
        dtype=model.dtype,
        device=torch.device("cpu"),
        max_running=16,
        block_size=16,
        kv_cache_tokens=0,
        max_sequence=length,
        speculation=speculation,
    )
    engine.load_weights(model.state_dict().items())
    return engine


def show_bound(model: PreTrainedModel, rows: int, length: int, rounds: int) -> None:
    """Seconds of a pass of n tokens a row over one of a token, interleaved; the least of n / that.

    The drafts are wrong, so each pass makes one token a row.
    """
    widths: list[int] = []

    class Wrong(SeenTexts):
        def draft(self, request: Request, most: int) -> list[int]:
            return [0] * most

    class Length(FixedLength):
        def choose(self, groups: Sequence[object]) -> list[int]:
            return [widths[-1] - 1] * len(groups)

    engine = make_engine(model, Speculation(Wrong(), Length(1)), length)
    prompt = [1 + i % 9 for i in range(64)]
    engine.submit(requests_of(0, prompt, rows, length - 64, 1.0))
    times: dict[int, list[float]] = {n: [] for n in WIDTHS}
    draw = random.Random(0)
    for _ in range(rounds):
        for n in draw.sample(WIDTHS, len(WIDTHS)):
            widths.append(n)
            engine.step()  # a batch that is kept begins with a copy of its cache
            start = time.process_time()
            for _ in range(3):
                engine.step()
            times[n].append((time.process_time() - start) / 3)
    ratios = {
        n: statistics.median(a / b for a, b in zip(times[n], times[1], strict=True)) for n in WIDTHS
    }
    show(
        {
            "name": f"speculate/bound/rows{rows}",
            "ms_of_one_token_a_row": round(statistics.median(times[1]) * 1e3, 2),
            "pass_over_that": {str(n): round(r, 2) for n, r in ratios.items()},
            "tokens_over_that": {str(n): round(n / r, 2) for n, r in ratios.items()},
            "rounds": rounds,
        }
    )


def main() -> None:
    """Measure, and print lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", metavar="DIR", help="a directory of the converted model")
    parser.add_argument("--ask", default="count", choices=list(ASKED), help="of SmolLM2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--new", type=int, default=256, help="tokens of a response")
    parser.add_argument("--siblings", type=int, default=8, help="responses that have finished")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--sides", nargs="+", default=["off", "auto", "4", "8"])
    parser.add_argument("--bound", action="store_true", help="only what a pass takes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts: list[list[int]]
    if options.smollm2:
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(options.smollm2, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.smollm2)
        asked = [ASKED[options.ask].format(i, 3 * i + 1, 3 * i + 100, 17 * i + 38, 29 * i + 46)
                 for i in range(options.prompts)]  # fmt: skip
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True
            )["input_ids"]
            for text in asked
        ]
        label = f"smollm2/{options.dtype}/{options.ask}"
    else:
        model = tiny_model(0 if options.bound else options.train_steps)
        prompts = [ids_of(counting(i + 1, 1 + i % 3).split(" ")[0]) for i in range(options.prompts)]
        label = "tiny"
    length = max(map(len, prompts)) + options.new + 64
    for rows in options.rows:
        show_bound(model, rows, 1024, 20 if not options.smollm2 else 5)
    if options.bound:
        return
    for rows in options.rows:
        measure(model, prompts, rows, length, label, options)


def measure(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    rows: int,
    length: int,
    label: str,
    options: argparse.Namespace,
) -> None:
    """All sides on the same samples, in turns."""
    groups = groups_of(model, prompts, rows, options)
    sides = {name: Side(model, name, length) for name in options.sides}
    turns: dict[str, Callable[[], float]] = {
        name: partial(side.tokens_per_s, groups) for name, side in sides.items()
    }
    measured = take_turns(turns, options.rounds)
    wanted = sides["off"].outputs
    for name, side in sides.items():
        if name == "off":
            continue
        equal = sum(side.outputs[id].token_ids == o.token_ids for id, o in wanted.items())
        show(
            line(
                f"speculate/{label}/rows{rows}/{name}",
                "tokens/CPU s",
                "higher",
                measured[name],
                measured["off"],
                acceptance=round(statistics.median(side.shares), 3),
                equal_responses=f"{equal} of {len(wanted)}",
            )
        )


if __name__ == "__main__":
    main()
