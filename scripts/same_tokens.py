"""Compare what the native engine of two checkouts generates: tokens, ends, experts, last bits.

    python scripts/same_tokens.py OLD NEW

Tiny random models of several families generate under each setting that changes how a token is made,
once with the package of each folder. Tokens must be equal, and log-probabilities of a deterministic
engine bit for bit. Exits with 1, and names the first difference of a case, where they are not.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB = 52
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SHAPE,
    "mistral": {**SHAPE, "sliding_window": 11},
    "gemma3_text": {**SHAPE, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "qwen3_moe": {**SHAPE, **EXPERTS},
}
# By name: arguments of the engine, sampling parameters, and how the requests are driven.
Setting = tuple[dict[str, Any], dict[str, Any], set[str]]
EDITS = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    "min_new_tokens": 4, "logit_bias": ((3, 1.5),), "bad_words": ((5,), (6, 7)),
}  # fmt: skip
STRICT = {"deterministic": True}
FEW_BLOCKS = {"kv_cache_tokens": 120}
SETTINGS: dict[str, Setting] = {
    "plain": ({}, {}, set()),
    "narrow": ({}, {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.8}, {"greedy"}),
    "edits": ({}, EDITS, {"parks"}),
    "drafts": ({"draft_length": 4}, {}, set()),
    "drafts of turns": ({"draft_length": 4}, {"max_turn_tokens": 9}, {"parks"}),
    "turns": ({}, {"max_turn_tokens": 6}, {"parks"}),
    "texts": ({"texts": ["ab", "xyz", "q"]}, {"min_new_tokens": 2}, set()),
    "few blocks": (FEW_BLOCKS, {}, set()),
    "few rows": ({"max_running": 3}, {}, {"parks"}),
    "records": ({"router_replay": "rollout", **FEW_BLOCKS}, {}, {"parks"}),
    "strict": (STRICT, {}, {"parks"}),
    "strict, few blocks": ({**STRICT, **FEW_BLOCKS}, {"max_turn_tokens": 8}, {"parks"}),
    "strict records": ({**STRICT, "router_replay": "rollout", **FEW_BLOCKS}, {}, {"parks"}),
}


def record(path: Path) -> None:
    """Generate every case with the package that is found first, and keep the outputs."""
    # Here, since the package is that of PYTHONPATH: the other half of this script has none.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridrl.config import RouterReplay
    from hybridrl.engines.rollout.native import NativeEngine
    from hybridrl.engines.rollout.speculation import make_speculation
    from hybridrl.engines.rollout.stops import StopStrings
    from hybridrl.models.shard import GenParallel

    def text(ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + id % 26) for id in ids)

    torch.set_num_threads(1)
    outputs: dict[tuple[str, str], Any] = {}
    for family, shape in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # peaked distributions
            for parameter in model.parameters():
                parameter.mul_(5 if parameter.dim() > 1 else 1)
        for name, (options, sampling, ways) in SETTINGS.items():
            options, sizes = dict(options), {"max_running": 32, "block_size": 4}
            if "router_replay" in options:
                if family != "qwen3_moe":
                    continue
                options["router_replay"] = RouterReplay(options["router_replay"])
            texts = options.pop("texts", None)
            drafts = make_speculation(options.pop("draft_length", 0), GenParallel())
            engine = NativeEngine(
                config,
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_sequence=96,
                stops=StopStrings(text, texts) if texts else None,
                speculation=drafts,
                **{**sizes, "kv_cache_tokens": 0, **options},
            )
            engine.load_weights(model.state_dict().items())
            outputs[family, name] = generated(engine, sampling, ways)
    path.write_bytes(pickle.dumps(outputs))


def generated(engine: Any, sampling: dict[str, Any], ways: set[str]) -> dict[int, tuple[Any, ...]]:
    """The outputs of 24 requests of four prompts, some of which are parked and resumed."""
    import random

    from hybridrl.engines.rollout.interface import Request, SamplingParams

    draw = random.Random(0)
    requests = []
    for number in range(24):
        if number % 6 == 0:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        own = {**sampling, "temperature": 0.0} if "greedy" in ways and number % 5 == 0 else sampling
        params = SamplingParams(draw.randint(5, 40), stop_token_ids=(1, 2), **own)
        requests.append(Request(number, prompt, params, 1000 + number, number // 6))
    outputs = {}
    engine.submit(requests[:16])
    for step in range(2000):
        if step == 5:
            engine.submit(requests[16:])
        if "parks" in ways and step % 7 == 3:
            engine.submit(engine.park(range(step % 5, 24, 5), with_kv=step % 2 == 0))
        for output in engine.step():
            outputs[output.id] = output
        for turn in engine.take_turns():
            room = requests[turn.id].sampling.max_new_tokens - turn.response_tokens
            reply = [turn.response_tokens % VOCAB, 7] if room > 3 else None
            output = engine.answer(turn.id, reply)
            if output is not None:
                outputs[output.id] = output
        if len(outputs) == len(requests):
            break
    return {
        id: (
            output.token_ids,
            output.log_probs,
            (output.finish, output.turns and [(t.start, t.stop, t.finish) for t in output.turns]),
            None if output.routed_experts is None else output.routed_experts.whole().tobytes(),
        )
        for id, output in sorted(outputs.items())
    }


def compare(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    """Print a line a case; whether all is as it must be."""
    good = old.keys() == new.keys()
    for case, before in old.items():
        after = new[case]
        strict = "strict" in case[1]
        differ = [id for id in before if id not in after or before[id][0] != after[id][0]]
        ends = [id for id in before if id not in differ and before[id][2:] != after[id][2:]]
        same_bits = all(before[id][1] == after[id][1] for id in before if id in after)
        same = not differ and not ends and len(before) == 24 and (same_bits or not strict)
        good = good and same
        tokens = sum(len(output[0]) for output in before.values())
        line = f"{case[0]:12} {case[1]:20} {len(before)} responses, {tokens} tokens: "
        line += "equal" if not differ and not ends else f"DIFFERENT: {(differ or ends)[0]}"
        print(line, "bit for bit" if same_bits else "LAST BITS DIFFER" if strict else "")
        for id in differ[:1]:
            print(f"    before {before[id][0]}\n    after  {after.get(id, [None])[0]}")
    return good


def main() -> None:
    """Record with both checkouts, each in a process of its own, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, checkout in enumerate((arguments.old, arguments.new)):
            path = Path(folder) / str(number)
            code = f"import same_tokens, pathlib; same_tokens.record(pathlib.Path({str(path)!r}))"
            paths = f"{checkout.resolve()}:{Path(__file__).resolve().parent}"
            environment = {**os.environ, "PYTHONPATH": paths}
            command = [sys.executable, "-c", code]
            subprocess.run(command, env=environment, cwd=folder, check=True)
            results.append(pickle.loads(path.read_bytes()))
    sys.exit(not compare(*results))


if __name__ == "__main__":
    main()
