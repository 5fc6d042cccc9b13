"""Twenty pushes on real ranks: instances have what was trained, and bytes are the plan's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import Config
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.push import bytes_by_sender
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.local_weights import copy_boxes
from hybridrl.telemetry.records import read_lines
from hybridrl.workers.pushed_weights import instances_layout, pushed_plan

STEPS = 20
EMBEDDING = "model.embed_tokens.weight"
TELLING = """
import functools
import os

import torch

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
from hybridrl.workers.generator import Generator


def arm():
    if hasattr(Generator, "is_armed"):
        return
    Generator.is_armed, load = True, Generator.load

    @functools.wraps(load)
    def loading(self, fill, version, *more):
        result = load(self, fill, version, *more)
        weights = {n: p.detach().clone() for n, p in self.shared_model.named_parameters()}
        torch.save(weights, f"{os.environ['WEIGHTS']}/{self.rank}_{version}.pt")
        return result

    Generator.load = loading


def told():
    arm()
    return Told()


class Told:
    __name__ = "told"

    def __call__(self, log_probs):
        return len(log_probs)

    def __reduce__(self):  # whoever is sent one has its generator tell
        return told, ()


@recipe("telling")
def dataflow(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = samples.map(Told(), ("log_probs",), scalars=("told",))
    flow.actor.update(samples.by_group(advantages.group_relative), loss=losses.ClippedLoss())
"""
BFLOAT16 = "rollout.dtype=bfloat16"
APART = ["cluster.ranks=4", "cluster.pools.rollout=2", "schedule=one_step"]
Loaded = dict[int, dict[int, dict[str, torch.Tensor]]]
"""Weights by generation rank and version."""
CASES = {
    "1 + 1": ["cluster.ranks=2", "cluster.pools.rollout=1"],
    "one trains, three generate": ["cluster.pools.rollout=3"],
    "fsdp 2, two instances": [],
    "fsdp 2, two instances, bfloat16": [BFLOAT16],
    "tp 2, tp 2": ["trainer.layout.tp=2", "rollout.layout.tp=2"],
    "pp 2, tp 2, bfloat16": ["trainer.layout.pp=2", "rollout.layout.tp=2", BFLOAT16],
    "pp 2, two instances": ["trainer.layout.pp=2"],
    "experts": ["model=tiny_moe", "trainer.layout.ep=2", "rollout.layout.tp=2",
                "rollout.layout.ep=2"],
    "experts, bfloat16": ["model=tiny_moe", "trainer.layout.tp=2", "rollout.layout.tp=2",
                          "rollout.layout.ep=2", BFLOAT16],
}  # fmt: skip
SHORT = ("1 + 1", "pp 2, tp 2, bfloat16")
"""Cases of the short form of CI."""
SPARSE = ["fsdp 2, two instances, bfloat16", "experts, bfloat16"]


@pytest.fixture
def told_run(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Any, Loaded]]:
    """A run of twenty steps, and all weights that its generation ranks have had."""
    file = tmp_path / "telling.py"
    file.write_text(TELLING)

    def run(name: str, *more: str) -> tuple[Any, Loaded]:
        folder = tmp_path / f"{name}_weights"
        folder.mkdir()
        monkeypatch.setenv("WEIGHTS", str(folder))
        kept = [x for x in tiny_run if not x.startswith("recipe")]
        done = train_here(
            tmp_path / name, *kept, f"recipe={{target: '{file}:dataflow'}}",
            f"trainer.steps={STEPS}", "trainer.save_every=0", "trainer.optim.lr=1e-2",
            "model.tiny.num_layers=2", "eval.sets.main.num_prompts=2", "eval.sets.main.every=null",
            "rollout.max_new_tokens=4", *more,
        )  # fmt: skip
        loaded: Loaded = {}
        for saved in folder.iterdir():
            rank, version = map(int, saved.stem.split("_"))
            loaded.setdefault(rank, {})[version] = torch.load(saved)
        return done, loaded

    return run


@pytest.mark.layouts
@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.wide] * (x not in SHORT)) for x in CASES]
)
def test_instances_have_what_was_trained(
    told_run: Callable[..., tuple[Any, Loaded]],
    make_config: Callable[..., Config],
    case: str,
) -> None:
    """Bit for bit, rounded once; one model is sent in all, and a rank gets its shard."""
    run, by_rank = told_run("run", *APART, *CASES[case])
    config = make_config(*APART, *CASES[case])
    shape, dtype = AutoConfig.from_pretrained(run.dir / "start"), config.rollout.dtype
    kind = TORCH_DTYPES[dtype]
    model = AutoModelForCausalLM.from_pretrained(run.dir / "final", dtype=torch.float32)
    whole = {name: tensor.detach().to(kind) for name, tensor in model.named_parameters()}
    started = AutoModelForCausalLM.from_pretrained(run.dir / "start", dtype=torch.float32)
    assert all(
        not torch.equal(tensor.to(kind), whole[n]) for n, tensor in started.named_parameters()
    )
    layout = instances_layout(config, shape, config.cluster.pools.rollout)
    assert by_rank.keys() == {*range(config.cluster.pools.rollout)}
    for rank, by_version in by_rank.items():
        weights = by_version[STEPS]
        assert weights.keys() == whole.keys()
        for name, tensor in weights.items():
            wanted = tensor.clone()  # padding of the vocabulary is anything, NaN too
            copy_boxes(whole[name], wanted, LocalTensor(layout.local(name, rank)))
            assert tensor.dtype == kind
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)
    theory = sum(bytes_by_sender(pushed_plan(config, shape), kind.itemsize).values())
    events = read_lines(run.dir / "events.jsonl")
    pushes = [x for x in events if x["kind"] == "push"]
    assert [push["version"] for push in pushes] == [*range(STEPS + 1)]
    assert {push["bytes"] for push in pushes} == {push["bytes_theory"] for push in pushes}
    assert {push["bytes"] for push in pushes} == {theory}
    loads = [x for x in events if x["kind"] == "load"]
    assert len(loads) >= STEPS
    assert all(load["bytes"] == theory * len(load["instances"]) for load in loads)


@pytest.mark.layouts
@pytest.mark.parametrize("case", [SPARSE[0], pytest.param(SPARSE[1], marks=pytest.mark.wide)])
def test_sparse_pushes_are_full_ones(
    told_run: Callable[..., tuple[Any, Loaded]], make_config: Callable[..., Config], case: str
) -> None:
    """All versions, bit for bit, from fewer bytes; every delta leads to its version at once."""
    settings = [*APART, *CASES[case], "deterministic=strict", "trainer.optim.lr=1e-3"]
    _, full = told_run("full", *settings)
    run, sparse = told_run("sparse", *settings, "rollout.push=sparse")
    assert sparse.keys() == full.keys() == {0, 1}
    config, shape = make_config(*settings), AutoConfig.from_pretrained(run.dir / "start")
    layout = instances_layout(config, shape, 2)
    model = AutoModelForCausalLM.from_pretrained(run.dir / "final", dtype=torch.float32)
    whole = {name: torch.ones_like(tensor) for name, tensor in model.named_parameters()}
    for rank, by_version in full.items():
        assert sparse[rank].keys() == by_version.keys() >= {*range(STEPS - 1), STEPS}
        for version, weights in by_version.items():
            for name, tensor in weights.items():
                # padding of the vocabulary is anything
                is_sent = torch.zeros_like(tensor, dtype=torch.float32)
                copy_boxes(whole[name], is_sent, LocalTensor(layout.local(name, rank)))
                its, there = sparse[rank][version][name], is_sent.bool()
                assert torch.equal(its[there], tensor[there]), (name, version)
        assert not torch.equal(by_version[1][EMBEDDING], by_version[2][EMBEDDING])
    events = read_lines(run.dir / "events.jsonl")
    pushes = [x for x in events if x["kind"] == "push"]
    theory, *others = {push["bytes_theory"] for push in pushes}
    assert others == []
    sent = {push["version"]: push["bytes"] for push in pushes}
    assert sent.pop(0) == theory
    assert sent.keys() == {*range(1, STEPS + 1)}
    assert max(sent.values()) < 0.8 * theory
    has: dict[int, int] = {}
    for load in (x for x in events if x["kind"] == "load"):
        version, instances = load["version"], load["instances"]
        follows = all(has.get(x) == version - 1 for x in instances)  # the last evaluation's: no
        assert follows or version in (0, STEPS)
        assert load["bytes"] == len(instances) * (sent[version] if follows else theory)
        assert load["bytes_theory"] == len(instances) * theory
        has |= dict.fromkeys(instances, version)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_adapters_instances_have_what_a_switch_makes(
    told_run: Callable[..., tuple[Any, Loaded]], dtype: str
) -> None:
    """On ranks of tp 2; the first rank of shared ones is this process, and tells nothing."""
    tp = ["trainer.layout.tp=2", "rollout.layout.tp=2", "deterministic=strict"]
    adapters = ["actor.lora.rank=4", f"rollout.dtype={dtype}", *tp]
    _, switched = told_run("shared", *adapters, "cluster.ranks=2", "schedule=serial")
    apart = ["cluster.ranks=4", "cluster.pools.rollout=2", "schedule=periodic"]
    _, pushed = told_run("apart", *adapters, *apart)
    assert switched.keys() == {1} < pushed.keys() == {0, 1}
    weights, its_weights = switched[1][STEPS], pushed[1][STEPS]
    assert weights.keys() == its_weights.keys()
    assert [n for n in weights if not torch.equal(weights[n], its_weights[n])] == []
