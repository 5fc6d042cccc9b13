"""`python -m layout.large_switches`: what one rank of a large cluster computes for its switch.

Prints a row for each. The plan knows the nodes, of eight ranks each, as in a run.
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from nccl_recorder import fake_rank
from transformers import AutoConfig

from hybridrl.config.layout import RolloutLayoutConfig
from hybridrl.layout import weight_switch as module
from hybridrl.layout.exchange_rounds import first_contacts
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.plan import Plan
from hybridrl.layout.switching import Switch, plan_switch
from hybridrl.layout.transfer_rounds import TransferRounds, exchanged_links, transfer_rounds
from hybridrl.layout.weight_switch import WeightSwitch
from hybridrl.models.parallel import model_parameters

ROOT = Path(__file__).parents[2]
RANKS_OF_A_NODE = 8
BUCKET_BYTES = RolloutLayoutConfig().bucket_bytes("cuda")
LARGE = {
    "model_type": "qwen3_moe", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 129280, "num_experts": 256,
    "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
"""A Qwen3-MoE with the sizes of DeepSeek-V3: 671 B parameters and a few more."""


@dataclass(frozen=True)
class LargeSwitch:
    """A model and its layouts; `shape` names a file of conf/model, and empty it is `LARGE`."""

    shape: str
    axes: TrainAxes
    tp: int
    ep: int = 1


CASES = {
    "8b on 8": LargeSwitch("qwen3_8b", TrainAxes(fsdp=8), 1),
    "32b on 16": LargeSwitch("qwen3_32b", TrainAxes(fsdp=16), 8),
    "70b on 64": LargeSwitch("llama3_70b", TrainAxes(fsdp=64), 8),
    "70b on 64, pipeline": LargeSwitch("llama3_70b", TrainAxes(pp=4, fsdp=4, tp=4), 8),
    "671b on 512": LargeSwitch("", TrainAxes(pp=8, fsdp=64, ep=64), 32, 32),
    "671b on 512, fsdp": LargeSwitch("", TrainAxes(fsdp=512), 16, 16),
}


@cache
def switch_of(case: LargeSwitch) -> Switch:
    """Plan as the actor does: with the node of each rank."""
    shape: dict[str, Any] = dict(LARGE)
    if case.shape:
        text = (ROOT / f"conf/model/{case.shape}.yaml").read_text()
        shape = dict(yaml.safe_load(text)["model"]["shape"])
    parameters = model_parameters(AutoConfig.for_model(shape.pop("model_type"), **shape))
    nodes = [rank // RANKS_OF_A_NODE for rank in range(case.axes.ranks)]
    return plan_switch(parameters, case.axes, 1, case.tp, gen_ep=case.ep, nodes=nodes)


def weight_switch(plan: Plan, rank: int) -> WeightSwitch:
    """The switch of one rank, ready to run."""
    with fake_rank(rank, plan.num_ranks):
        return WeightSwitch(plan, rank, torch.bfloat16, BUCKET_BYTES)


def counts(plan: Plan, rank: int, rounds: TransferRounds) -> dict[str, int]:
    """Rounds, messages and their boxes, and copies after boxes were joined."""
    messages = [m for e in rounds.exchanges for m in (*e.sends, *e.receives)]
    with mock.patch.object(module, "transfer_rounds", return_value=rounds) as computed:
        switch = weight_switch(plan, rank)
    computed.assert_called_once_with(plan, rank, BUCKET_BYTES // torch.bfloat16.itemsize, 3)
    return {
        "gathers": len(rounds.gathers),
        "exchanges": len(rounds.exchanges),
        "messages": len(messages),
        "boxes": sum(len(m.pieces) for m in messages)
        + sum(len(pieces) for gather in rounds.gathers for pieces in gather.pieces),
        "copies": len(switch._copies)
        + sum(len(round.packed) + len(round.unpacked) for round in switch._rounds),
    }


def main() -> None:
    """Print a row for each case."""
    torch.set_num_threads(1)
    for name, case in CASES.items():
        begun = time.thread_time()
        switch = switch_of(case)
        planned = time.thread_time()
        plan, rank = switch.plan, switch.plan.num_ranks // 3
        weight_switch(plan, rank)
        ready = time.thread_time()
        figures = counts(plan, rank, transfer_rounds(plan, rank, BUCKET_BYTES // 2))
        row = " | ".join(f"{figure:,}" for figure in figures.values())
        seconds = f"{planned - begun:.1f} | {ready - planned:.1f}"
        print(f"| {name} | {switch.grouping.value} | {row} | {seconds} |", flush=True)
    begun = time.thread_time()
    first_contacts(exchanged_links(plan), plan.num_ranks, rank)
    print(f"first contacts of the last: {time.thread_time() - begun:.1f} s")


if __name__ == "__main__":
    main()
