"""Which model families the engines compute right: the table of docs/models.md, by running them.

Each family's own config is shrunk and gets random weights. One process compares training and
generation with transformers (`hybridrl.engines.probe`); two compare both again, divided by tensor,
pipeline or expert parallelism.

    python scripts/model_families.py                    print the table
    python scripts/model_families.py --only olmo2,DIR   some families, or the config of a directory
    python scripts/model_families.py --write            into docs/models.md
    python scripts/model_families.py --check            exit 1 where docs/models.md differs
    python scripts/model_families.py --vllm             what vLLM's CPU build computes, alone
"""

import argparse
import importlib.util
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
import transformers
from model_families_in_vllm import HEAD_DIM, VLLMProcess
from torch import multiprocessing as mp
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)
from transformers.utils import logging as transformers_logging

from hybridrl.algorithms import Loss
from hybridrl.config import ModelConfig, OptimConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.config.versions import release_of
from hybridrl.engines import probe
from hybridrl.engines.rollout.available import CPU_LACKS, vllm_obstacle
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import gen_layout
from hybridrl.models.load import check_supported
from hybridrl.models.local_weights import load_buffers
from hybridrl.models.parallel import model_parameters, num_experts
from hybridrl.models.shard import GenParallel
from hybridrl.models.shrink import shrink

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin: scripts/model_families.py -->", "<!-- end -->"
COLUMNS = ("family", "train", "native", "vLLM", "tp", "pp", "ep")

# Settings besides the defaults of a family's config: what published models of it have.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bailing_hybrid": {},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bitnet": {},
    "cohere": {},
    "cohere2": {},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "deepseek_v3": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon_h1": {
        "num_hidden_layers": 36, "hidden_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
        "mamba_d_head": 64, "mamba_d_state": 128, "key_multiplier": 0.39,
        "ssm_multipliers": [0.354, 0.25, 0.354, 0.5, 0.354], "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.236, "attention_out_multiplier": 0.9375,
        "mlp_multipliers": [0.884, 0.586], "embedding_multiplier": 5.66,
        "lm_head_multiplier": 0.125,
    },
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"head_dim": 128},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "granite": {
        "logits_scaling": 8.0, "attention_multiplier": 0.0625, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
    },
    "granitemoe": {"logits_scaling": 8.0, "num_local_experts": 32, "num_experts_per_tok": 8},
    "granitemoehybrid": {
        "num_hidden_layers": 40, "hidden_size": 1536, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6,
        "shared_intermediate_size": 1024, "mamba_n_heads": 48, "mamba_d_head": 64,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    },
    "helium": {},
    "hunyuan_v1_dense": {"head_dim": 128},
    "jamba": {},
    "kimi_linear": {},
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {
        "num_hidden_layers": 24, "layer_types": ["conv", "conv", "full_attention"] * 8,
    },
    "llama": {},
    "llama4_text": {},
    "mamba2": {},
    "minimax_m2": {"rotary_dim": 64},
    "ministral": {"head_dim": 128},
    "mistral": {},
    "mixtral": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {},
    "olmoe": {},
    "opt": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
}  # fmt: skip

FROM = dict.fromkeys(("bailing_hybrid", "falcon_h1", "kimi_linear", "olmo_hybrid"), (5, 20))
"""The oldest transformers that were tried and right, for families that need a newer one.

5.20.2 was tried in one process alone; the rows are computed with 5.24.
"""


def has_family(family: str) -> bool:
    """Whether the installed transformers is new enough for a family."""
    return release_of(transformers.__version__) >= FROM.get(family, (0,))


def config_of(family: str) -> PretrainedConfig:
    """The family's config at its usual size; that of a directory is its own."""
    transformers_logging.set_verbosity_error()
    if Path(family).is_dir():
        config: PretrainedConfig = AutoConfig.from_pretrained(family)
        return config
    return AutoConfig.for_model(family, **FAMILIES.get(family, {}))


class _Weighted(Loss):
    """The log-probabilities weighted by a field: every token has a separate gradient."""

    normalize = "token"
    fields = ("weight",)

    def __call__(self, log_probs: torch.Tensor, entropy: Any, fields: Any) -> Any:
        return log_probs * fields["weight"], {}


def one_process(config: PretrainedConfig) -> dict[str, str | None]:
    """Why training and generation in one process are wrong; None where they are right."""
    try:
        check_supported(config)
    except ValueError as error:
        reason = str(error).partition(": ")[2].partition(";")[0]
        return {"train": reason, "native": reason}
    verdict = probe.probe(config)
    return {"train": verdict.train, "native": verdict.native}


# Two processes

TRAINED: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"fsdp": 2, "ep": 2}}
"""Training layouts by the axis that is tried."""
GENERATING = {"tp": (1, 2, 1), "pp": (2, 1, 1), "ep": (1, 2, 2)}
"""(pp, tp, ep) of a rollout instance."""


def _train_problem(path: str, axis: str) -> str | None:
    """Why an update divided along `axis` differs from transformers' in one process."""
    torch.manual_seed(1)
    model = _oracle(path)
    ids = [torch.randint(1, model.config.vocab_size, (length,)) for length in (5, 13, 13, 20)]
    weights = [torch.randn(len(row) - 1) for row in ids]
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            optim=OptimConfig(clip_grad_norm=0.0),
            layout=TrainLayoutConfig(**({"fsdp": 1} | TRAINED[axis])),
        ),
        device=torch.device("cpu"),
    )
    gradients: dict[str, torch.Tensor] = {}

    def before_step(*_: Any) -> None:
        for chunk in engine.chunks:
            for name, parameter in chunk.named_parameters():
                if isinstance(parameter.grad, DTensor):  # what routers balance by has none
                    gradients[name] = parameter.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    rows = zip(ids, weights, strict=True)
    own = [TrainSequence(row, len(row) - 1, {"weight": weight}) for row, weight in rows]
    own = own[dist.get_rank() :: 2]  # those of a replica's ranks are pooled
    engine.update(own, _Weighted())
    wanted = torch.cat([probe.eager_log_probs(model, row) for row in ids])
    (wanted * torch.cat(weights)).mean().backward()
    named = {
        n: p.grad for n, p in model.named_parameters() if n in gradients and p.grad is not None
    }
    cut = {name: gradients[name][tuple(map(slice, g.shape))] for name, g in named.items()}
    return probe.compare_gradients(cut, named, probe.tolerance(model))


def _generation_problem(path: str, axis: str) -> str | None:
    """Why greedy responses of an instance divided along `axis` differ from transformers'."""
    torch.manual_seed(2)
    model = _oracle(path)
    pp, tp, ep = GENERATING[axis]
    mesh = Mesh((("instance", 1), ("pp", pp), ("tp", tp)))
    engine = probe.make_engine(model.config, GenParallel.make(mesh, "cpu", ep))
    load_buffers(engine.model, path, model.config)
    weights, parameters = model.state_dict(), engine.parameters()
    of_model = model_parameters(model.config)
    layout = gen_layout(of_model, mesh, model.config.num_hidden_layers, ep=ep)
    for name, parameter in parameters.items():
        if name not in layout.rules:
            parameter.copy_(weights[name])
            continue
        padded = torch.zeros(layout.rules[name].padded or weights[name].shape)
        padded[tuple(map(slice, weights[name].shape))] = weights[name]
        held = LocalTensor(layout.local(name, dist.get_rank()))
        parameter.copy_(torch.cat([padded[box.slices()] for box in held.boxes], held.dim))
    return probe.compare_responses(model, engine)


def _oracle(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def _attempt(problem: Callable[[str, str], str | None], path: str, axis: str) -> str | None:
    try:
        return problem(path, axis)
    except Exception as error:  # a refusal, or whatever a family's code runs into
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        allowed = text.partition("wanted ")[2]
        if allowed.startswith("1 ("):
            allowed = allowed.removeprefix("1 (").removesuffix(")")
        return allowed or text


def _rank(rank: int, rendezvous: str, path: str, axes: Sequence[str], results: Any) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", timedelta(seconds=60), rank=rank, world_size=2
    )
    for axis in axes:
        for problem in (_train_problem, _generation_problem):
            answers: list[Any] = [None, None]
            dist.all_gather_object(answers, _attempt(problem, path, axis))
            # Where one rank fails the other waits for it in vain.
            reasons = sorted((a for a in answers if a), key=lambda a: "Timed out" in a)
            results[axis, problem.__name__] = reasons[0] if reasons else None
    dist.destroy_process_group()


def axes_of(config: PretrainedConfig) -> tuple[str, ...]:
    """The axes that a family is tried with."""
    return ("tp", "pp", "ep") if num_experts(config) else ("tp", "pp")


def two_processes(config: PretrainedConfig) -> dict[str, str | None]:
    """Why training and generation over an axis are wrong: keys `tp train`, `pp native`, ..."""
    axes = axes_of(config)
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        torch.manual_seed(0)
        probe.random_model(shrink(config)).save_pretrained(f"{folder}/model")
        results = manager.dict()
        try:
            arguments = (f"{folder}/rendezvous", f"{folder}/model", axes, results)
            mp.start_processes(  # type: ignore[attr-defined]
                _rank, arguments, nprocs=2, start_method="fork"
            )
        except Exception as error:
            return dict.fromkeys(
                (f"{a} {e}" for a in axes for e in ("train", "native")),
                str(error).strip().splitlines()[-1][-80:],
            )
        names = {"_train_problem": "train", "_generation_problem": "native"}
        return {f"{axis} {names[name]}": answer for (axis, name), answer in results.items()}


# The table


def row_of(family: str) -> tuple[tuple[str, ...], list[str]]:
    """A row of the table, and the reasons of what is not computed.

    Where the family needs a newer transformers, the row is read from docs/models.md.
    """
    if not has_family(family):
        return documented().get(family, (family, *["not tried"] * (len(COLUMNS) - 1))), []
    config = config_of(family)
    answers = one_process(config)
    if answers["train"] is None:
        answers |= two_processes(config)
    cells = {engine: "no" if answers[engine] else "yes" for engine in ("train", "native")}
    cells["ep"] = "dense"
    for axis in axes_of(config):
        right = [
            engine
            for engine in ("train", "native")
            if answers[engine] is None and answers.get(f"{axis} {engine}", "") is None
        ]
        cells[axis] = "yes" if len(right) == 2 else right[0] if right else "no"
    lacking: dict[str, list[str]] = {}
    for what, answer in answers.items():
        if answer and not answers.get(what.partition(" ")[2]):
            lacking.setdefault(answer.rstrip("."), []).append(what)
    reasons = [f"- {family}, {', '.join(what)}: {answer}." for answer, what in lacking.items()]
    cells |= {"family": family, "vLLM": "no" if answers["train"] else _vllm(config)}
    return tuple(cells[column] for column in COLUMNS), reasons


def documented() -> dict[str, tuple[str, ...]]:
    """The rows of docs/models.md, by family."""
    lines = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines()]
    return {
        family: (family, *answers)
        for families, *answers in lines
        if len(answers) == len(COLUMNS) - 1
        for family in families.split(", ")
    }


def find_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def _vllm(config: PretrainedConfig) -> str:
    """Whether a run may generate with vLLM; `GPU` where its CPU build alone cannot.

    Where vLLM is not installed, what docs/models.md says.
    """
    if not find_vllm():
        row = documented().get(config.model_type)
        return row[COLUMNS.index("vLLM")] if row else "not tried"
    if config.model_type in CPU_LACKS:
        return "GPU"
    return "no" if vllm_obstacle(config) else "yes"


def print_vllm(families: Sequence[str]) -> None:
    """Print why vLLM's responses to shrunk models' prompts differ from transformers', if so."""
    with VLLMProcess() as vllm, tempfile.TemporaryDirectory() as folder:
        for family in families:
            torch.manual_seed(0)
            path = f"{folder}/{family}"
            probe.random_model(shrink(config_of(family), HEAD_DIM)).save_pretrained(path)
            print(f"{family}: {vllm.problem(path) or 'yes'}", flush=True)


def render(rows: Sequence[tuple[tuple[str, ...], list[str]]]) -> str:
    """The table in Markdown: families of equal answers share a row."""
    families: dict[tuple[str, ...], list[str]] = {}
    for (family, *answers), _ in rows:
        families.setdefault(tuple(answers), []).append(family)
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {', '.join(f)} | {' | '.join(answers)} |" for answers, f in families.items()]
    return "\n".join(lines)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default=",".join(FAMILIES), help="families or directories, by comma"
    )
    parser.add_argument(
        "--newer", action="store_true", help="those alone that older transformers do not compute"
    )
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    parser.add_argument("--check", action="store_true", help="compare with docs/models.md")
    parser.add_argument("--vllm", action="store_true", help="try them in vLLM's CPU build alone")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that the process can be forked
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if options.vllm:
        print_vllm(options.only.split(","))
        return
    rows = []
    for family in FROM if options.newer else options.only.split(","):
        rows.append(row_of(family))
        print("  ".join(rows[-1][0]), file=sys.stderr, flush=True)
    text = DOCS.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    if options.write:
        DOCS.write_text(f"{head}\n{render(rows)}\n{tail}")
    elif options.check:
        known = documented()
        different = [cells for cells, _ in rows if known.get(cells[0]) != cells]
        for cells in different:
            print(f"docs/models.md differs: {' | '.join(cells)}")
        sys.exit(bool(different))
    else:
        reasons = [reason for _, of_family in rows for reason in of_family]
        print(render(rows), *(["", *reasons] if reasons else []), sep="\n")


if __name__ == "__main__":
    main()
