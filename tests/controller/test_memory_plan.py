"""A run that no rank can hold is refused before a process starts, or gets a warning."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from hybridrl import cli
from hybridrl.config import (
    Attention,
    ClusterConfig,
    Config,
    ConfigError,
    DataConfig,
    Device,
    LoraConfig,
    MemoryCheck,
    OptimName,
    RolloutConfig,
)
from hybridrl.controller import memory_plan
from hybridrl.controller.memory_plan import check_memory, local_room, plan_run
from hybridrl.controller.memory_sizes import PackedRow
from hybridrl.controller.preflight import build_recipe, prepare
from hybridrl.flow import Graph
from hybridrl.models.activations import layer_activations
from hybridrl.models.parallel import model_parameters
from hybridrl.models.tiny import make_tiny_model
from hybridrl.planner.memory import MemoryPhase
from hybridrl.system import node_info

GIB = 2**30


def _graph(recipe: str = "grpo") -> Graph:
    return build_recipe({"target": f"hybridrl.recipes.{recipe}:{recipe}", "kl_coef": 0.1})


def _shape() -> PretrainedConfig:
    return AutoConfig.for_model(
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=5000,
    )


def _config(device: Device = Device.cuda, ranks: int = 4) -> Config:
    config = Config(
        cluster=ClusterConfig(device=device, ranks=ranks),
        data=DataConfig(max_prompt_tokens=100),
        rollout=RolloutConfig(max_new_tokens=100, max_running=8),
    )
    config.resolve_device(ranks, "this test")
    return config


def _train_actor(config: Config) -> MemoryPhase:
    (train,) = (
        phase
        for phase in plan_run(config, _graph(), _shape(), 80 * GIB, 0).phases
        if phase.name == "train actor"
    )
    return train


def test_the_state_of_training_is_twelve_bytes_a_parameter() -> None:
    shape, train = _shape(), _train_actor(_config())
    parameters = sum(torch.Size(p.shape).numel() for p in model_parameters(shape))
    state = train.sizes["float32 weights"] + train.sizes["moments"]
    assert state == pytest.approx(12 * parameters / 4, rel=1e-3)


def test_muon_has_one_moment_of_the_matrices_of_layers() -> None:
    config, shape = _config(), _shape()
    before = _train_actor(config).sizes["moments"]
    config.trainer.optim.name = OptimName.muon
    parameters = model_parameters(shape)
    matrices = sum(torch.Size(p.shape).numel() for p in parameters if "_proj" in p.name)
    assert before - _train_actor(config).sizes["moments"] == 4 * matrices // 4


def test_roles_of_the_recipe_have_their_phases() -> None:
    names = [p.name for p in plan_run(_config(), _graph("ppo"), _shape(), 80 * GIB, 0).phases]
    assert names == [
        "load actor",
        "load critic",
        "load rollout engine",
        "switch",
        "prefill",
        "decode",
        "score reference",
        "train actor",
        "train critic",
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "olmo2"])
def test_activations_are_counted_in_every_family(family: str) -> None:
    shape = AutoConfig.for_model(
        family, **{k: v for k, v in _shape().to_dict().items() if k in KEYS}, pad_token_id=0
    )
    sizes = {"dtype": torch.bfloat16, "attention": Attention.torch}
    short, long = (layer_activations(shape, n, **sizes) for n in (256, 512))
    hidden = 512 * 256 * 2
    assert long.kept > 10 * hidden, "inputs of the products, of both norms and of attention"
    assert long.kept == pytest.approx(2 * short.kept, rel=0.01)
    checkpointed = layer_activations(shape, 512, checkpointing=True, **sizes)
    assert checkpointed.kept == hidden, "its input alone"
    more = 0 if family == "olmo2" else hidden  # whose products need the input, too
    assert checkpointed.backward == pytest.approx(long.backward + more, rel=0.01)
    lora = layer_activations(shape, 512, lora=LoraConfig(rank=4), **sizes)
    assert lora.kept < long.kept, "frozen weights need no inputs for their gradients"
    halves = layer_activations(shape, 512, tp=2, **sizes)
    assert halves.kept < long.kept


def test_a_row_is_no_longer_than_the_samples_of_a_step() -> None:
    """4 prompts x 8 samples of 200 tokens on 4 ranks: 8 samples a rank, and one more at most."""
    config = _config()
    config.trainer.prompts_per_step = 4
    config.trainer.max_tokens_per_micro_batch = 10**6
    row = PackedRow.of(config, _graph())
    assert (row.tokens, row.scored, row.number) == (1800, 900, 1)
    config.trainer.max_tokens_per_micro_batch = 1000
    row = PackedRow.of(config, _graph())
    assert (row.tokens, row.number) == (1000, 0)
    config.trainer.max_tokens_per_micro_batch = 1
    assert PackedRow.of(config, _graph()).tokens == 200, "a full sample"
    config.trainer.layout.cp = 2
    assert PackedRow.of(config, _graph()).tokens == 100, "half of one"
    config.trainer.max_tokens_per_micro_batch = config.trainer.chunk_tokens = 60
    assert PackedRow.of(config, _graph()).tokens == 60, "a chunk"


KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    config = _config(Device.cpu, 2)
    make_tiny_model(tmp_path / "tiny", config.model.tiny, seed=0)
    return str(tmp_path / "tiny")


def test_a_run_that_cannot_fit_is_refused(tiny: str) -> None:
    config = _config(Device.cpu, 2)
    with (
        mock.patch.object(memory_plan, "local_room", return_value=(2**20, 0)),
        pytest.raises(ConfigError) as error,
    ):
        check_memory(config, _graph(), tiny)
    line = str(error.value)
    assert line.startswith(
        "cluster.memory_check=refuse: wanted warn, or a run that fits: it does not fit: a rank has "
        "1.0 MiB of 1.0 MiB for it, and the largest phase, train actor, needs "
    )
    assert "trainer.max_tokens_per_micro_batch" in line


def test_train_asks_the_plan_before_ranks_start(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    config = make_config(*tiny_run, "cluster=processes", f"run.dir={tmp_path / 'run'}")
    with (
        mock.patch.object(memory_plan, "local_room", return_value=(2**20, 0)),
        pytest.raises(ConfigError, match=r"cluster\.memory_check=refuse"),
    ):
        prepare(config)


def test_or_gets_a_warning(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    config = _config(Device.cpu, 2)
    config.cluster.memory_check = MemoryCheck.warn
    with (
        mock.patch.object(memory_plan, "local_room", return_value=(2**20, 0)),
        caplog.at_level(logging.WARNING),
    ):
        check_memory(config, _graph(), tiny)
    assert "memory plan: does not fit" in caplog.text


def test_a_run_that_leaves_others_too_little_gets_a_warning(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(Device.cpu, 2)
    with (
        mock.patch.object(memory_plan, "local_room", return_value=(2 * GIB, 2 * GIB - 1)),
        caplog.at_level(logging.WARNING),
    ):
        check_memory(config, _graph(), tiny)
    assert "memory plan: does not fit" in caplog.text


def test_a_rank_on_cpus_has_its_share_of_the_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control group's limit counts, where it is below the machine's memory."""
    (tmp_path / "memory.max").write_text(str(3 * GIB))
    groups = tmp_path / "groups"
    groups.write_text("0::/\n")
    monkeypatch.setattr(node_info, "_CGROUP", tmp_path)
    monkeypatch.setattr(node_info, "_OWN_GROUPS", groups)
    room = local_room(_config(Device.cpu, 2))
    assert room is not None
    assert room[0] == 3 * GIB // 2


def test_memory_of_nodes_elsewhere_is_unknown() -> None:
    config = _config(Device.cpu, 2)
    config.cluster.address = "10.0.0.1:6379"
    assert local_room(config) is None


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    """Qwen3 8B on eight GPUs of 80 GiB: 12 bytes a parameter over eight ranks, 2 in generation."""
    plan = ["plan", "memory", "model=qwen3_8b", "cluster.ranks=8", "--gpu-gib=80"]
    plan.append("rollout.max_new_tokens=4096")
    cli.main(plan)
    *table, last = capfd.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["phases"]["train actor"]["moments"] == pytest.approx(8.19e9, rel=0.01)
    assert record["phases"]["decode"]["generation weights"] == pytest.approx(16.38e9, rel=0.01)
    assert record["capacity"] == 80 * GIB
    assert record["peak"] == "train actor"
    assert record["totals"]["train actor"] > record["capacity"]
    assert record["fits"] is False
    assert "does not fit" in "".join(table)
    cli.main([*plan, "trainer.activations=recompute"])
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["fits"] is True
