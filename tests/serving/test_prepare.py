"""What cannot be served is one line with its key, before a process starts."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import Config, ConfigError
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


def test_snapshots_of_all_weights_fit_the_memory_of_a_node(
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or are refused with how many do; with adapters they are small."""
    monkeypatch.setattr("hybridrl.serving.prepare.usable_memory", lambda: 5 << 20)
    settings = [*tiny_run, "cluster=processes", "cluster.ranks=1", f"run.dir={tmp_path / 'run'}"]
    settings += ["data.max_prompt_tokens=24"]
    line = r"^serve\.snapshots=9999: wanted at most (\d+) with actor\.lora\.rank=0: a node has 0\.0"
    with pytest.raises(ConfigError, match=line) as refused:
        prepare_server(make_config(*settings, "serve.snapshots=9999"))
    most = re.match(line, str(refused.value))
    assert most is not None
    prepare_server(make_config(*settings, f"serve.snapshots={most[1]}"))
    with pytest.raises(ConfigError, match=r"^serve\.snapshots="):
        prepare_server(make_config(*settings, f"serve.snapshots={int(most[1]) + 1}"))
    prepare_server(make_config(*settings, "serve.snapshots=9999", "actor.lora.rank=4"))


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
