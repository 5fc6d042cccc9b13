"""A run that no rank can hold is refused before a process starts, or gets a warning."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from hybridrl import cli
from hybridrl.config import (
    ActivationMode,
    Attention,
    ClusterConfig,
    ClusterKind,
    Config,
    ConfigError,
    DataConfig,
    Deterministic,
    Device,
    DType,
    EarlyBackward,
    FusedScheduleConfig,
    LoraConfig,
    MemoryCheck,
    OptimName,
    PipelineSchedule,
    Placement,
    PoolName,
    PoolOfConfig,
    PoolsConfig,
    RewardConfig,
    RewardKind,
    RolesConfig,
    RolloutConfig,
    SharePrompts,
    SlurmClusterConfig,
    TrainLayoutConfig,
    ValueModelConfig,
)
from hybridrl.costs.memory import MemoryPhase, MemoryPlan, plan_memory
from hybridrl.costs.train_memory import CHUNK_KEYS
from hybridrl.flow import Graph
from hybridrl.flow.graph import Copy
from hybridrl.models.activations import layer_activations, prefill_activations
from hybridrl.models.parallel import model_parameters
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight import memory_plan
from hybridrl.preflight.memory_advice import advice
from hybridrl.preflight.memory_inputs import PackedRow
from hybridrl.preflight.memory_plan import (
    Room,
    assumed_attention,
    check_memory,
    local_room,
    plan_run,
    sizes_of_run,
    unknown_room,
)
from hybridrl.preflight.prepare import build_recipe, check_attention, prepare
from hybridrl.runtime.ray_cluster import check_ranks
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


ROOM = Room(80 * GIB, 0)


def _plan(config: Config, graph: Graph) -> MemoryPlan:
    (plan,) = plan_run(config, graph, _shape(), ROOM).pools.values()
    return plan


def _train_actor(config: Config) -> MemoryPhase:
    (train,) = (phase for phase in _plan(config, _graph()).phases if phase.name == "train actor")
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


def test_early_backward_keeps_a_rank_s_share_of_gradients_between_calls() -> None:
    """On two replicas of two ranks: float32, of half of the parameters."""
    config, shape = _config(), _shape()
    config.trainer.layout = TrainLayoutConfig(replicas=2, fsdp=2)
    config.schedule = FusedScheduleConfig()
    assert "early gradients" not in _train_actor(config).sizes
    config.schedule = FusedScheduleConfig(early_backward=EarlyBackward.auto)
    parameters = sum(torch.Size(p.shape).numel() for p in model_parameters(shape))
    early = _train_actor(config).sizes["early gradients"]
    assert early == pytest.approx(4 * parameters / 2, rel=1e-3)


def test_roles_of_the_recipe_have_their_phases() -> None:
    names = [p.name for p in _plan(_config(), _graph("ppo")).phases]
    assert names == [
        "load actor",
        "load critic",
        "load rollout engine",
        "switch",
        "prefill",
        "decode",
        "score reference",
        "train actor",
        "save actor",
        "train critic",
        "save critic",
    ]


@pytest.mark.long
def test_states_of_recurrent_layers_are_in_the_plan() -> None:
    """Running sequences and as many prefixes have states; a layer of four has keys and values."""
    kept = {key: value for key, value in _shape().to_dict().items() if key in KEYS}
    shape = AutoConfig.for_model("qwen3_5_text", **kept | {"num_hidden_layers": 4})
    config = _config()
    (plan,) = plan_run(config, _graph(), shape, ROOM).pools.values()
    sizes = {phase.name: phase.sizes for phase in plan.phases}
    heads, keys, values = 32, 16 * 128, 32 * 128
    state = 2 * 4 * (2 * keys + values) + 4 * heads * 128 * 128  # 4 inputs in bfloat16, a matrix
    assert sizes["prefill"]["recurrent states"] == (2 * 8 + 2) * 3 * state
    assert sizes["decode"]["recurrent states"] == (2 * 8 + 2) * 3 * state
    assert sizes["decode"]["KV cache"] == 8 * 200 * 2 * 2 * 4 * 32


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
    checkpointed = layer_activations(shape, 512, mode=ActivationMode.recompute, **sizes)
    assert checkpointed.kept == hidden, "its input alone"
    more = 0 if family == "olmo2" else hidden  # whose products need the input, too
    assert checkpointed.backward == pytest.approx(long.backward + more, rel=0.01)
    selective = layer_activations(shape, 512, mode=ActivationMode.selective, **sizes)
    assert checkpointed.kept < selective.kept < 0.6 * long.kept
    lora = layer_activations(shape, 512, lora=LoraConfig(rank=4), **sizes)
    assert lora.kept < long.kept, "frozen weights need no inputs for their gradients"
    halves = layer_activations(shape, 512, tp=2, **sizes)
    assert halves.kept < long.kept
    fused = layer_activations(shape, 512, fused=True, **sizes)
    assert fused.kept < 0.75 * long.kept, "norms and activations keep their inputs alone"
    assert fused.backward < 0.8 * long.backward


def test_a_row_is_no_longer_than_the_samples_of_a_step() -> None:
    """4 prompts x 8 samples of 200 tokens on 4 ranks: 8 samples a rank, and one more at most."""
    config = _config()
    config.trainer.prompts_per_step = 4
    config.trainer.max_tokens_per_micro_batch = 10**6
    layout, graph = config.trainer.layout, _graph()
    row = PackedRow.of(config, graph, layout, 4)
    assert (row.tokens, row.scored, row.number) == (1800, 900, 1)
    assert PackedRow.of(config, graph, layout, 2).tokens == 3400, "of half as many ranks"
    config.trainer.max_tokens_per_micro_batch = 1000
    row = PackedRow.of(config, graph, layout, 4)
    assert (row.tokens, row.number) == (1000, 0)
    layout.pp = 2
    assert PackedRow.of(config, graph, layout, 4).number == 4, "3,400 tokens, by two stages"
    layout.pp = 1
    config.trainer.max_tokens_per_micro_batch = 1
    assert PackedRow.of(config, graph, layout, 4).tokens == 200, "a full sample"
    layout.cp = 2
    assert PackedRow.of(config, graph, layout, 4).tokens == 100, "half of one"
    config.trainer.max_tokens_per_micro_batch = config.trainer.chunk_tokens = 60
    assert PackedRow.of(config, graph, layout, 4).tokens == 60, "a chunk"


def test_a_chunk_of_the_longest_sample_is_planned() -> None:
    """The chunk is the last 60 of 200 tokens; where ranks share them, the last 60 of each rank."""
    config = _config()
    layout = config.trainer.layout
    assert PackedRow.chunk_of(config, layout) is None
    config.trainer.max_tokens_per_micro_batch = 80
    config.trainer.chunk_tokens = 60
    assert PackedRow.chunk_of(config, layout) == PackedRow(60, 60, earlier=140)
    layout.cp = 2
    assert PackedRow.chunk_of(config, layout) == PackedRow(60, 60, earlier=80, ranks=2)
    layout.cp = 4
    assert PackedRow.chunk_of(config, layout) is None, "a micro-batch holds a quarter"


def test_keys_and_values_of_chunks_are_those_of_a_sample() -> None:
    """In 3 layers, 4 heads of 32, of keys and of values, and their gradients, in bfloat16."""
    config = _config()
    config.rollout.max_new_tokens = 100_000
    config.trainer.max_tokens_per_micro_batch = 80
    assert CHUNK_KEYS not in _train_actor(config).sizes
    config.trainer.chunk_tokens = 80
    tokens = config.longest_sample
    assert _train_actor(config).sizes[CHUNK_KEYS] == tokens * 3 * 4 * 32 * 2 * 2 * 2


def test_a_strict_run_scores_one_sample_at_a_time() -> None:
    config = _config()
    config.trainer.max_tokens_per_micro_batch = 1000
    config.deterministic = Deterministic.strict
    assert PackedRow.of(config, _graph(), config.rollout.layout, 4).tokens == 200
    assert PackedRow.of(config, _graph(), config.trainer.layout, 4).tokens == 1000


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
        mock.patch.object(memory_plan, "local_room", return_value=Room(2**20, 0)),
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
        mock.patch.object(memory_plan, "local_room", return_value=Room(2**20, 0)),
        pytest.raises(ConfigError, match=r"cluster\.memory_check=refuse"),
    ):
        prepare(config)


def test_or_gets_a_warning(tiny: str, caplog: pytest.LogCaptureFixture) -> None:
    config = _config(Device.cpu, 2)
    config.cluster.memory_check = MemoryCheck.warn
    with (
        mock.patch.object(memory_plan, "local_room", return_value=Room(2**20, 0)),
        caplog.at_level(logging.WARNING),
    ):
        check_memory(config, _graph(), tiny)
    assert "memory plan: does not fit" in caplog.text


def test_a_run_that_leaves_others_too_little_gets_a_warning(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(Device.cpu, 2)
    with (
        mock.patch.object(memory_plan, "local_room", return_value=Room(2 * GIB, 2 * GIB - 1)),
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
    assert local_room(_config(Device.cpu, 2)).capacity == 3 * GIB // 2
    with pytest.raises(ConfigError, match=r"at most 5 .* this machine's 3 GiB"):
        check_ranks(ClusterConfig(device=Device.cpu, ranks=6))


@pytest.mark.parametrize(
    ("device", "kind", "address", "reason"),
    [
        (Device.cpu, ClusterKind.local, "10.0.0.1:6379", "cluster.address=10.0.0.1:6379"),
        (Device.cpu, ClusterKind.ray, "http://head:8265", "nodes of cluster=ray"),
        (Device.cuda, ClusterKind.local, None, "the driver's node has no GPU"),
    ],
)
def test_memory_of_nodes_elsewhere_is_unknown_and_the_log_says_so(
    tiny: str,
    caplog: pytest.LogCaptureFixture,
    device: Device,
    kind: ClusterKind,
    address: str | None,
    reason: str,
) -> None:
    config = _config(device, 2)
    config.cluster.kind, config.cluster.address = kind, address
    with caplog.at_level(logging.INFO):
        check_memory(config, _graph(), tiny)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("memory plan: not checked, since the ")
    assert reason in line


def test_memory_of_this_node_is_known() -> None:
    assert unknown_room(_config(Device.cpu, 2)) is None
    with mock.patch("hybridrl.system.devices.local_gpus", return_value=1):
        assert unknown_room(_config(Device.cuda, 1)) is None


def _split(reward_model: str | None = None, reference: PoolName | None = None) -> Config:
    """Four ranks for the actor, two for its critics, whose layout is tp 2.

    Two more where the `reference` has a pool.
    """
    ranks = 8 if reference else 6
    config = Config(
        cluster=ClusterConfig(
            device=Device.cuda,
            ranks=ranks,
            placement=Placement.split,
            pool_of=PoolOfConfig(reference=reference),
            pools=PoolsConfig(actor=4, critic=2),
        ),
        roles=RolesConfig(critic=ValueModelConfig(layout=TrainLayoutConfig(tp=2))),
        reward=RewardConfig(kind=RewardKind.model, model=reward_model)
        if reward_model
        else RewardConfig(),
        data=DataConfig(max_prompt_tokens=100),
        rollout=RolloutConfig(max_new_tokens=100, max_running=8),
    )
    config.resolve_device(ranks, "this test")
    return config


def test_a_reference_apart_is_counted_in_its_pool(tmp_path: Path) -> None:
    _shape().save_pretrained(tmp_path)
    config, graph = _split(str(tmp_path), PoolName.reference), _graph("ppo")
    plan = plan_run(config, graph, _shape(), ROOM)
    names = {pool: [p.name for p in plan.pools[pool].phases] for pool in plan.pools}
    assert names["reference"] == ["score reference"]
    assert "score reference" not in names["actor"]
    assert names["critic"] == ["load critic", "score reward", "train critic", "save critic"]


def test_each_pool_has_its_own_roles(tmp_path: Path) -> None:
    """A critic and a judge on two ranks, the rest on four."""
    _shape().save_pretrained(tmp_path)
    config, graph = _split(str(tmp_path)), _graph("ppo")
    plan = plan_run(config, graph, _shape(), ROOM)
    names = {pool: [p.name for p in plan.pools[pool].phases] for pool in plan.pools}
    assert names["actor"] == [
        "load actor",
        "load rollout engine",
        "switch",
        "prefill",
        "decode",
        "score reference",
        "train actor",
        "save actor",
    ]
    assert names["critic"] == ["load critic", "score reward", "train critic", "save critic"]
    (train,) = (p for p in plan.pools["critic"].phases if p.name == "train critic")
    parameters = sum(
        torch.Size(p.shape).numel() for p in model_parameters(_shape(), classifier=True)
    )
    state = train.sizes["float32 weights"] + train.sizes["moments"]
    assert state == pytest.approx(12 * parameters / 2, rel=0.01)


def test_a_pool_that_is_too_small_is_named(tmp_path: Path) -> None:
    """For a critic of eight times the layers, say."""
    config, graph = _split(), _graph("ppo")
    deep = _shape()
    deep.update({"num_hidden_layers": 24, "layer_types": ["full_attention"] * 24})
    deep.save_pretrained(tmp_path / "critic")
    config.roles.critic.path = str(tmp_path / "critic")
    plan = plan_run(config, graph, _shape(), ROOM)
    needs = {pool: p.peak.total for pool, p in plan.pools.items()}
    assert needs["actor"] < needs["critic"]
    _shape().save_pretrained(tmp_path)
    between = Room((needs["actor"] + needs["critic"]) // 2, 0)
    with (
        mock.patch.object(memory_plan, "unknown_room", return_value=None),
        mock.patch.object(memory_plan, "local_room", return_value=between),
        pytest.raises(ConfigError) as error,
    ):
        check_memory(config, graph, str(tmp_path))
    line = str(error.value)
    assert line.startswith(
        "cluster.memory_check=refuse: wanted warn, or a run that fits: in pool critic it does not"
    )
    assert "pool actor" not in line
    assert "the largest phase, train critic, needs " in line


@pytest.mark.parametrize(
    ("attention", "importable", "chosen", "reason"),
    [
        (Attention.flash, False, Attention.flash, "by model.attention=flash"),
        (Attention.varlen, True, Attention.varlen, "by model.attention=varlen"),
        (Attention.torch, True, Attention.torch, "by model.attention=torch"),
        (Attention.auto, True, Attention.flash, "which this node has"),
        (Attention.auto, False, Attention.varlen, "flash-attn cannot be imported"),
    ],
)
def test_the_plan_says_which_attention_it_assumes(
    attention: Attention,
    importable: bool,
    chosen: Attention,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _config()
    config.model.attention = attention
    module = mock.Mock(flash_attn_varlen_func=None) if importable else None
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assumed, why = assumed_attention(config, _shape())
    assert (assumed, reason in why) == (chosen, True), why
    plan = plan_run(config, _graph(), _shape(), ROOM)
    assert plan.record()["attention"] == chosen.value
    assert plan.rows()[-1][2] == f"attention: {chosen.value}, {why}"
    assert config.model.attention is attention, "the config is the caller's"


def test_flash_attn_by_name_is_refused_where_this_node_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or has it with an older GPU; a plan for other machines takes it."""
    monkeypatch.setattr("hybridrl.system.devices.local_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    config = _config()
    config.model.attention = Attention.flash
    check_attention(config, _shape())
    with pytest.raises(ConfigError, match=r"^model\.attention=flash: wanted .* cannot be imported"):
        check_attention(config, _shape(), local=True)
    monkeypatch.setitem(sys.modules, "flash_attn", mock.Mock())
    check_attention(config, _shape(), local=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"compute capability 8\.0 and above, not 7\.5"):
        check_attention(config, _shape(), local=True)


def test_varlen_attn_by_name_is_refused_where_it_lacks_what_the_model_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or where this node's torch has no such kernel; a plan for other machines takes it."""
    config = _config()
    config.model.attention = Attention.varlen
    capped = AutoConfig.for_model("gemma2")
    with pytest.raises(ConfigError, match=r"^model\.attention=varlen: .* no capped scores"):
        check_attention(config, capped)
    check_attention(config, _shape())
    monkeypatch.setattr("hybridrl.system.devices.local_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="which this torch is built without"):
        check_attention(config, _shape(), local=True)
    config.cluster.device = Device.cpu
    with pytest.raises(ConfigError, match="varlen needs a GPU, and the ranks are on CPUs"):
        check_attention(config, _shape())


@pytest.mark.parametrize(
    ("model", "dtype", "reason"),
    [("llama", DType.float32, "not float32"), ("gemma2", DType.bfloat16, "no capped scores")],
)
def test_what_the_kernels_lack_is_planned_with_torch(
    model: str, dtype: DType, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    config = _config()
    config.model.compute_dtype = dtype
    assumed, why = assumed_attention(config, AutoConfig.for_model(model))
    assert assumed is Attention.torch
    assert reason in why


def test_attention_of_torch_keeps_more() -> None:
    """It repeats the heads of keys and values that query heads share."""
    totals = {}
    for attention in (Attention.flash, Attention.varlen, Attention.torch):
        config = _config()
        config.model.attention = attention
        totals[attention] = _train_actor(config).sizes["activations"]
    assert totals[Attention.torch] > totals[Attention.varlen]
    assert totals[Attention.varlen] == totals[Attention.flash], "their kernels are the same"


def test_the_masks_of_long_prompts_count() -> None:
    """Two query heads share a kv head: a mask of 2 x 8192 x 8192 numbers, for all layers."""
    sizes = {"dtype": torch.bfloat16}
    short = prefill_activations(_shape(), 8192, 1024, **sizes)
    long = prefill_activations(_shape(), 8192, 8192, **sizes)
    assert long - short >= 2 * 2 * (8192 * 8192 - 8 * 1024 * 1024)


def _advice(phase: str, *sizes: str, **settings: object) -> str:
    config = _config()
    for key, value in settings.items():
        *path, last = key.split("__")
        target = config
        for name in path:
            target = getattr(target, name)
        setattr(target, last, value)
    largest = {size: GIB * (len(sizes) - i) for i, size in enumerate(sizes)}
    return advice(config, MemoryPhase(phase, largest), "actor")


def test_advice_names_a_setting_once() -> None:
    text = _advice("train actor", "float32 weights", "gradients")
    assert (
        text == "adapters (actor.lora.rank); more cluster.ranks; a larger trainer.layout.tp or .pp"
    )


ROWS = (
    "a smaller trainer.max_tokens_per_micro_batch; "
    "a smaller rollout.max_new_tokens or data.max_prompt_tokens"
)


def test_advice_leaves_out_what_is_set() -> None:
    long = "a larger trainer.layout.cp or trainer.chunk_tokens, for long samples"
    assert _advice("train actor", "activations") == (
        f"trainer.activations=selective, recompute or offload; {ROWS}; {long}"
    )
    recomputing = {"trainer__activations": ActivationMode.recompute}
    assert _advice("train actor", "activations", **recomputing) == f"{ROWS}; {long}"
    halves = {"trainer__layout__pp": 2, "trainer__layout__schedule": PipelineSchedule.zero_bubble}
    assert _advice("train actor", "activations", **halves).startswith(
        "trainer.activations=offload; "
    )
    assert _advice("score reference", "activations") == ROWS
    assert "adamw8bit" in _advice("train actor", "moments")
    eight = {"trainer__optim__name": OptimName.adamw8bit, "actor__lora__rank": 8}
    assert _advice("train actor", "moments", **eight) == (
        "more cluster.ranks; a larger trainer.layout.tp or .pp"
    )
    assert "rollout.dtype=bfloat16" not in _advice("switch", "generation weights")
    wide = {"rollout__dtype": DType.float32}
    assert "rollout.dtype=bfloat16" in _advice("switch", "generation weights", **wide)


@pytest.mark.parametrize(
    ("settings", "long"),
    [
        ({"trainer__chunk_tokens": 64}, "; a larger trainer.layout.cp, for long samples"),
        ({"trainer__layout__cp": 4}, "; trainer.chunk_tokens, for long samples"),
        ({"trainer__layout__fsdp": 1}, "; trainer.chunk_tokens, for long samples"),
        ({"trainer__layout__cp": 4, "trainer__chunk_tokens": 64}, ""),
        (
            {"trainer__layout__pp": 2, "trainer__layout__schedule": PipelineSchedule.zero_bubble},
            "; a larger trainer.layout.cp, for long samples",
        ),
        (
            {"actor__lora__rank": 2, "actor__lora__dropout": 0.1},
            "; a larger trainer.layout.cp, for long samples",
        ),
    ],
)
def test_advice_for_long_samples_is_what_a_run_may_have(
    settings: dict[str, object], long: str
) -> None:
    offloading = {"trainer__activations": ActivationMode.offload}
    assert _advice("train actor", "activations", **offloading, **settings) == ROWS + long
    keys = "a smaller rollout.max_new_tokens or data.max_prompt_tokens"
    cp = "; a larger trainer.layout.cp" * ("layout.cp" in long)
    assert _advice("train actor", CHUNK_KEYS, **settings) == keys + cp


def test_chunks_of_a_micro_batch_shrink_with_it() -> None:
    most = _config().trainer.max_tokens_per_micro_batch
    text = _advice("train actor", "activations", trainer__chunk_tokens=most)
    assert "; a smaller trainer.max_tokens_per_micro_batch and trainer.chunk_tokens; " in text


def test_advice_is_what_makes_the_size_smaller() -> None:
    """More ranks gather as much, and a whole parameter is cut by tp alone; one row is the least."""
    cut = "a larger trainer.layout.tp or .pp; more cluster.ranks"
    assert _advice("train actor", "gathered weights") == cut
    assert _advice("train actor", "frozen weights") == cut
    assert _advice("load critic", "whole parameters") == "a larger roles.critic.layout.tp"
    assert _advice("decode", "logits") == "a smaller rollout.max_running"
    one = {"rollout__max_running": 1}
    ranks = "a larger rollout.layout.tp or .pp, with more cluster.ranks where there are too few"
    shorter = "a smaller rollout.max_new_tokens or data.max_prompt_tokens"
    assert _advice("decode", "logits", **one) == ranks
    assert _advice("decode", "KV cache", **one) == f"{shorter}; {ranks}"
    assert _advice("decode", "copied keys and values", **one) == shorter
    assert _advice("score reference", "activations", deterministic=Deterministic.strict) == shorter


def test_advice_for_a_pool_names_its_key() -> None:
    text = advice(_split(), MemoryPhase("train critic", {"gradients": GIB}), "critic")
    assert text.startswith("adapters (roles.critic.lora.rank); more cluster.pools.critic")


def test_advice_is_about_what_is_large() -> None:
    phase = MemoryPhase("train actor", {"activations": 9 * GIB, "moments": GIB})
    assert "moments" not in advice(_config(), phase, "actor")
    assert "adamw8bit" not in advice(_config(), phase, "actor")


def test_advice_for_a_critic_names_its_keys() -> None:
    assert _advice("train critic", "moments", "float32 weights") == (
        "adapters (roles.critic.lora.rank); roles.critic.optim.name=adamw8bit; more cluster.ranks; "
        "a larger roles.critic.layout.tp or .pp"
    )


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    """Qwen3 8B on eight GPUs of 79 GiB: 12 bytes a parameter over eight ranks, 2 in generation."""
    plan = ["plan", "memory", "model=qwen3_8b", "cluster.ranks=8", "--gpu-gib=79"]
    plan += ["rollout.max_new_tokens=4096", "model.attention=flash", "trainer.fuse_layers=never"]
    cli.main([*plan, "trainer.activations=keep"])
    *table, last = capfd.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["phases"]["train actor"]["moments"] == pytest.approx(8.19e9, rel=0.01)
    assert record["phases"]["decode"]["generation weights"] == pytest.approx(16.38e9, rel=0.01)
    assert record["capacity"] == 79 * GIB
    assert record["peak"] == "train actor"
    assert record["totals"]["train actor"] > record["capacity"]
    assert record["fits"] is False
    assert "does not fit" in "".join(table)
    needed = record["totals"]["train actor"] / GIB
    cli.main(plan)
    *table, last = capfd.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["fits"] is True
    line = f"trainer.activations=auto: selective, since keep needs {needed:.1f} of 75.8 GiB"
    assert record["activations"] == line
    assert line in " ".join(" ".join(table).split())


def test_the_command_takes_the_gib_of_a_gpu_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """An H100 has 79.6."""
    cli.main(["plan", "memory", "cluster.ranks=1", "cluster.device=cuda", "--gpu-gib=79.6"])
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["capacity"] == round(79.6 * GIB)


def test_the_command_plans_the_engine_that_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM fills the GPU but for what is reserved, and two buckets."""
    cluster = ["model=qwen3_8b", "cluster.ranks=8", "--gpu-gib=80", "rollout.layout.tp=2"]
    cli.main(["plan", "memory", *cluster, "rollout=vllm"])
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert "decode" not in record["phases"]
    left = record["capacity"] - record["reserved"] - 2 * 128 * 2**20
    # And a parameter that is saved meanwhile: the actor stays, its moments come with an update.
    left -= record["phases"]["save actor"]["parameter being saved"]
    assert record["totals"]["generate"] == left
    moments = record["phases"]["train actor"]["moments"]
    assert record["totals"]["load rollout engine"] == left - moments
    cli.main(["plan", "memory", *cluster, "rollout=vllm", "rollout.kv_cache_tokens=100000"])
    tokens = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert tokens["phases"]["generate"]["KV cache"] == 100_000 * 36 * 2 * 4 * 128 * 2
    assert tokens["cache_tokens"] == 100_000


@pytest.mark.parametrize(
    ("settings", "step_tokens"),
    [
        (["--gpu-gib=80"], 16384),
        (["--gpu-gib=40"], 8192),
        (["--gpu-gib=80", "+rollout.vllm.max_num_batched_tokens=2048"], 2048),
    ],
)
def test_vllm_computes_a_step_of_many_tokens(
    capfd: pytest.CaptureFixture[str], settings: list[str], step_tokens: int
) -> None:
    """Its activations count, and the cache has what they leave. Few samples, so logits are less."""
    cli.main([
        "plan", "memory", "model=qwen3_8b", "cluster.ranks=8", "rollout=vllm",
        "rollout.layout.tp=2", "rollout.max_running=4", *settings,
    ])  # fmt: skip
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    share = record["phases"]["generate"]["KV cache and arrays of vLLM"]
    activations = share - record["cache_tokens"] * 36 * 2 * 4 * 128 * 2
    # Of a layer's arrays gate, up and their products are the largest; then there is its input.
    largest = (4 * 12288 // 2 + 2 * 4096) * 2
    assert 0.9 < activations / (step_tokens * largest) < 1.3


@pytest.mark.long
def test_the_command_shows_each_pool(capfd: pytest.CaptureFixture[str]) -> None:
    split = ["cluster.placement=split", "cluster.pools.critic=1", "recipe=ppo"]
    cli.main(["plan", "memory", "model=qwen3_8b", "cluster.ranks=8", "--gpu-gib=80", *split])
    *table, last = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in table if line.startswith("pool ")] == ["actor", "critic"]
    record = json.loads(last)
    assert "train critic" in record["pools"]["critic"]["phases"]
    assert record["fits"] is False, "one rank is too few for twelve bytes a parameter"


def test_a_node_has_frozen_weights_once_for_each_shard() -> None:
    """Instances of two ranks: a node of eight has four, and one copy of each half."""

    def node_host(ranks: int, nodes: int, tp: int, update: str = "frozen") -> int:
        config, graph = _config(ranks=ranks), _graph()
        config.cluster = SlurmClusterConfig(device=Device.cuda, ranks=ranks, nodes=nodes)
        config.rollout.layout.tp = tp
        if update != "frozen":
            graph.copies["average"] = Copy("average", "actor", "ewma", 0.9)
        run = plan_run(config, graph, _shape(), ROOM)
        (plan,) = run.pools.values()
        frozen = plan.on_host["scoring weights"]
        per_node = ranks // nodes
        others = run.node_host - (sum(plan.on_host.values()) - frozen) * per_node
        assert others % frozen == 0
        return others // frozen

    assert node_host(8, 1, 2) == 2
    assert node_host(16, 2, 2) == 2
    assert node_host(8, 1, 1) == 1
    assert node_host(8, 4, 4) == 2, "two ranks a node hold two of the four shards"
    assert node_host(8, 1, 2, "ewma") == 8, "averages change, and are not shared"


def test_ranks_on_gpus_get_the_sizes_of_the_plan(tmp_path: Path) -> None:
    """By which they decide as it does; ranks on CPUs, and models without a plan, need none."""
    config, graph = _config(), _graph("ppo")
    path = str(tmp_path / "model")
    _shape().save_pretrained(path)
    sizes = sizes_of_run(config, graph, path)
    assert sizes.keys() == {"actor"}
    planned = plan_memory(sizes["actor"], "cuda", ROOM.capacity, ROOM.reserved)
    assert planned.phases == _plan(config, graph).phases
    assert planned.staying.keys() == {"actor", "critic"}
    with mock.patch.object(memory_plan, "_sizes", side_effect=RuntimeError("no meta kernel")):
        assert sizes_of_run(config, graph, path) == {}
    assert sizes_of_run(_config(Device.cpu), graph, path) == {}


@pytest.mark.parametrize("new_tokens", [2048, 4096])
@pytest.mark.parametrize(
    ("model", "ranks", "gib"), [("qwen3_1.7b", 1, 19.2), ("qwen3_8b", 8, 11.4)]
)
def test_usual_runs_offload_nothing(
    capfd: pytest.CaptureFixture[str], model: str, ranks: int, gib: float, new_tokens: int
) -> None:
    """On GPUs of 80 GiB: the state stays, and the KV cache has more than half of it alone."""
    command = ["plan", "memory", f"model={model}", f"cluster.ranks={ranks}", "--gpu-gib=80"]
    command += [f"rollout.max_new_tokens={new_tokens}", "trainer.activations=recompute"]
    cli.main(command)
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["staying"]["actor"] / GIB == pytest.approx(gib, rel=0.01)
    assert record["fits"]
    assert record["on_host"] == {}
    sizes = record["phases"]["decode"]
    alone = record["capacity"] - record["reserved"] - sizes["generation weights"]
    assert sizes["KV cache"] > alone / 2


def test_a_row_with_shared_prompts_scores_more_of_its_tokens() -> None:
    """8 samples of 100 + 100 tokens: 900 in place of 1,600, of which 800 are scored."""
    config, graph = _config(), _graph()
    config.trainer.prompts_per_step = 64
    config.trainer.max_tokens_per_micro_batch = 900
    layout = config.trainer.layout
    assert PackedRow.of(config, graph, layout, 4).scored == 450
    config.trainer.share_prompts = SharePrompts.always
    row = PackedRow.of(config, graph, layout, 4)
    assert (row.tokens, row.scored, row.keys) == (900, 800, 2 * 900)
    config.trainer.max_tokens_per_micro_batch = 200  # one of full length, or several short ones
    row = PackedRow.of(config, graph, layout, 4)
    assert (row.tokens, row.scored, row.keys) == (200, 100, 2 * 200)
