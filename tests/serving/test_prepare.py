"""What cannot be served is one line with its key, before a process starts."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config import Config, ConfigError
from hybridrl.models.load import load_config
from hybridrl.preflight.memory_inputs import PackedRow
from hybridrl.preflight.memory_plan import local_room, plan_run
from hybridrl.preflight.served_copies import copy_bytes
from hybridrl.serving.prepare import prepare_server

REFUSED = {
    "model.vision=train": r"model\.vision=train: wanted frozen: clients send texts",
    "trainer.optim.name=muon": r"trainer\.optim\.name=muon: wanted adamw, as clients expect",
    "rollout.stop=[END]": r"rollout\.stop=\['END'\]: wanted \[\]: each request has stop texts",
    "cluster.restarts=1": r"cluster\.restarts=1: wanted 0, with hybridrl serve",
    "cluster=emulated": r"cluster=emulated: wanted a cluster whose ranks hold models",
    "cluster.pools.rollout=1 cluster.ranks=2": (
        r"cluster\.pools=actor, rollout: wanted one pool, whose ranks train and generate"
    ),
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_cannot_be_served_is_refused(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path, settings: str
) -> None:
    config = make_config(*tiny_run, f"run.dir={tmp_path / 'run'}", *settings.split())
    with pytest.raises(ConfigError, match=f"^{REFUSED[settings]}"):
        prepare_server(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 4])
def test_snapshots_and_a_model_fit_the_memory_of_a_node(
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
) -> None:
    """Or are refused with how many do; the fewer snapshots, the more models."""
    monkeypatch.setattr("hybridrl.system.node_info.usable_memory", lambda: 1 << 30)
    settings = [*tiny_run, "cluster=processes", "cluster.ranks=1", f"run.dir={tmp_path / 'run'}"]
    settings += ["data.max_prompt_tokens=24", f"actor.lora.rank={rank}"]
    line = (
        rf"^serve\.snapshots=999999: wanted at most (\d+) with actor\.lora\.rank={rank}: a node has"
        r" 1\.0 GiB, the server takes 0\.\d+ GiB, each snapshot \S+ GiB, and a client's model 4"
    )
    with pytest.raises(ConfigError, match=line) as refused:
        prepare_server(make_config(*settings, "serve.snapshots=999999"))
    match = re.match(line, str(refused.value))
    assert match is not None
    most = int(match[1])
    for fewer, models in {0: 1, 4: 2, 7: 2, 8: 3}.items():
        served = prepare_server(make_config(*settings, f"serve.snapshots={most - fewer}")).served
        assert served.most_models == models
    with pytest.raises(ConfigError, match=r"^serve\.snapshots="):
        prepare_server(make_config(*settings, f"serve.snapshots={most + 1}"))
    told = prepare_server(
        make_config(*settings, f"serve.snapshots={most + 1}", "cluster.memory_check=warn")
    )
    assert told.served.most_models is None
    monkeypatch.setattr("hybridrl.preflight.served_copies.copy_bytes", lambda *_: 1 << 29)
    with pytest.raises(
        ConfigError, match=r"^cluster\.memory_check=refuse: wanted warn: a node has"
    ):
        prepare_server(make_config(*settings, "serve.snapshots=1"))


def test_a_server_plans_for_data_that_are_scored_at_every_position(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    """Rows of training are full, and prompts are scored beside the cache of waiting samples."""
    settings = [*tiny_run, "cluster=processes", "cluster.ranks=1", f"run.dir={tmp_path / 'run'}"]
    config = make_config(*settings, "data.max_prompt_tokens=60", "rollout.max_new_tokens=4")
    config.trainer.max_tokens_per_micro_batch = 4096
    prepared = prepare_server(config)
    shape, room = load_config(prepared.model_path), local_room(config)
    graphs = prepared.graph, replace(prepared.graph, from_clients=False)
    plans = [plan_run(config, graph, shape, room).pools["actor"] for graph in graphs]
    served, run = ({one.name: one.sizes for one in plan.phases} for plan in plans)
    assert served["train actor"]["activations"] > 2 * run["train actor"]["activations"]
    assert served["score actor"]["KV cache"] == served["decode"]["KV cache"]
    assert "score actor" not in run
    layout = config.trainer.layout
    assert PackedRow.of(config, graphs[0], layout, 1) == PackedRow(4096, 4096)
    config.trainer.max_tokens_per_micro_batch = 32
    assert PackedRow.of(config, graphs[0], layout, 1) == PackedRow(64, 64)


def test_a_server_computes_what_its_cache_holds(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    """Prompt and response together, at most the longest of a run and the model's context."""
    settings = [*tiny_run, "cluster=processes", "cluster.ranks=1", f"run.dir={tmp_path / 'run'}"]
    sizes = {
        "model.tiny.max_positions=36": 35,
        "": 36,
        "rollout.kv_cache_tokens=32": 32,
        "rollout.kv_cache_tokens=4096": 36,
    }
    for own, expected in sizes.items():
        config = make_config(*settings, "data.max_prompt_tokens=24", *own.split())
        assert prepare_server(config).served.max_tokens == expected


def test_a_copy_of_adapters_counts_the_matrices_that_each_rank_has_whole(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    """All ranks of a tp group have one of an adapter's two; of FSDP's shards all are one copy."""
    alone = make_config(*tiny_run, "cluster.ranks=1", f"run.dir={tmp_path / 'run'}")
    shape = load_config(prepare_server(alone).model_path)

    def copy(*settings: str) -> int:
        return copy_bytes(make_config(*tiny_run, "actor.lora.rank=4", *settings), shape)

    one, two = copy("cluster.ranks=1"), copy("cluster.ranks=2")
    assert one <= two < 1.1 * one
    assert 1.2 * one < copy("cluster.ranks=2", "trainer.layout.tp=2") < 2 * one
