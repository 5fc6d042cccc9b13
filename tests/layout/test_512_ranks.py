"""The switch of models on 64 and 512 ranks: rounds, messages and boxes of a rank, held exactly.

What planning takes is in docs/layout.md.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from nccl_recorder import fake_rank
from transformers import AutoConfig

from hybridrl.config.layout import RolloutLayoutConfig
from hybridrl.layout.exchange_rounds import MOST_MESSAGES, Message, first_contacts
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.plan import Plan
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.transfer_rounds import TransferRounds, exchanged_links, transfer_rounds
from hybridrl.layout.weight_switch import WeightSwitch
from hybridrl.models.parallel import model_parameters

ROOT = Path(__file__).parents[2]
BUCKET_BYTES = RolloutLayoutConfig().bucket_bytes("cuda")
LARGE = {
    "model_type": "qwen3_moe", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 129280, "num_experts": 256,
    "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
"""A Qwen3-MoE with the sizes of DeepSeek-V3: 671 B parameters and a few more."""


@dataclass(frozen=True)
class Case:
    """A model, its layouts, and what one rank has to do."""

    shape: str
    axes: TrainAxes
    tp: int
    ep: int
    counts: dict[str, int]


CASES = {
    "8b on 8": Case(
        "qwen3_8b",
        TrainAxes(fsdp=8),
        1,
        1,
        {"gathers": 140, "exchanges": 0, "messages": 0, "boxes": 4296, "copies": 3579},
    ),
    "32b on 16": Case(
        "qwen3_32b",
        TrainAxes(fsdp=16),
        8,
        1,
        {"gathers": 1, "exchanges": 62, "messages": 124, "boxes": 5132, "copies": 2498},
    ),
    "70b on 64": Case(
        "llama3_70b",
        TrainAxes(fsdp=64),
        8,
        1,
        {"gathers": 152, "exchanges": 0, "messages": 0, "boxes": 15992, "copies": 4826},
    ),
    "70b on 64, pipeline": Case(
        "llama3_70b",
        TrainAxes(pp=4, fsdp=4, tp=4),
        8,
        1,
        {"gathers": 0, "exchanges": 242, "messages": 3404, "boxes": 6528, "copies": 3505},
    ),
    "671b on 512": Case(
        "",
        TrainAxes(pp=8, fsdp=64, ep=64),
        32,
        32,
        {"gathers": 0, "exchanges": 668, "messages": 21140, "boxes": 64266, "copies": 13257},
    ),
}


def plan_of(case: Case) -> Plan:
    shape: dict[str, Any] = dict(LARGE)
    if case.shape:
        text = (ROOT / f"conf/model/{case.shape}.yaml").read_text()
        shape = dict(yaml.safe_load(text)["model"]["shape"])
    parameters = model_parameters(AutoConfig.for_model(shape.pop("model_type"), **shape))
    return plan_switch(parameters, case.axes, 1, case.tp, gen_ep=case.ep).plan


def counts(plan: Plan, rank: int, rounds: TransferRounds) -> dict[str, int]:
    """Rounds, messages and their boxes, and copies after boxes were joined."""
    messages = [m for e in rounds.exchanges for m in (*e.sends, *e.receives)]
    with fake_rank(rank, plan.num_ranks):
        switch = WeightSwitch(plan, rank, torch.bfloat16, BUCKET_BYTES)
    return {
        "gathers": len(rounds.gathers),
        "exchanges": len(rounds.exchanges),
        "messages": len(messages),
        "boxes": sum(len(m.pieces) for m in messages)
        + sum(len(pieces) for gather in rounds.gathers for pieces in gather.pieces),
        "copies": len(switch._copies)
        + sum(len(round.packed) + len(round.unpacked) for round in switch._rounds),
    }


def sizes(messages: list[Message]) -> Counter[int]:
    """Elements by peer."""
    total: Counter[int] = Counter()
    for message in messages:
        total[message.peer] += message.size
    return total


@pytest.mark.parametrize("name", CASES)
def test_a_rank_plans_its_rounds(name: str) -> None:
    """Within the bucket and NCCL's limit, to and from all whom the plan names, in the counts."""
    case = CASES[name]
    plan, bucket = plan_of(case), BUCKET_BYTES // torch.bfloat16.itemsize
    rank = plan.num_ranks // 3
    rounds = transfer_rounds(plan, rank, bucket)
    sends = [message for exchange in rounds.exchanges for message in exchange.sends]
    receives = [message for exchange in rounds.exchanges for message in exchange.receives]
    gathered = sum(gather.size * (len(gather.ranks) - 1) for gather in rounds.gathers)
    # Every element, and no more.
    traffic = plan.traffic
    assert sum(message.size for message in receives) + gathered == traffic.received[rank]
    assert traffic.received[rank] == plan.least[rank]
    assert sum(piece.box.size for piece in rounds.copies) == traffic.kept[rank]
    if not rounds.gathers:
        assert sizes(sends) == {d: n for (s, d), n in traffic.links.items() if s == rank}
        assert sizes(receives) == {s: n for (s, d), n in traffic.links.items() if d == rank}
    # In rounds that fit.
    for exchange in rounds.exchanges:
        assert sum(message.size for message in exchange.sends) <= bucket // 2
        assert sum(message.size for message in exchange.receives) <= bucket // 2
        assert len(exchange.sends) + len(exchange.receives) <= MOST_MESSAGES
    # The other end of the largest link has the same.
    if receives:
        ((peer, _),) = sizes(receives).most_common(1)
        others = transfer_rounds(plan, peer, bucket)
        sent = [m.pieces for e in others.exchanges for m in e.sends if m.peer == rank]
        assert sent == [message.pieces for message in receives if message.peer == peer]
    assert counts(plan, rank, rounds) == case.counts


def test_all_ranks_meet_at_the_start() -> None:
    """512 ranks of which each sends to all others are connected in four rounds."""
    plan = plan_of(CASES["671b on 512"])
    classes = exchanged_links(plan)
    contacts = {rank: first_contacts(classes, 512, rank) for rank in (0, 170, 511)}
    for rank, rounds in contacts.items():
        assert [len(receivers) for receivers, _ in rounds] == [127, 128, 128, 128]
        assert [len(senders) for _, senders in rounds] == [127, 128, 128, 128]
        peers = sorted(peer for receivers, _ in rounds for peer in receivers)
        assert peers == [peer for peer in range(512) if peer != rank]
    one, other = contacts[170], contacts[511]
    assert [511 in receivers for receivers, _ in one] == [170 in senders for _, senders in other]
