"""`hybridrl plan auto`: what it proposes passes the checks of a run, what is wrong is one line."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoConfig

from hybridrl import cli
from hybridrl.config import Config, ConfigError, Device, TinyModelConfig, compose
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.mapping import DeviceMapping, cluster_of
from hybridrl.costs.mapping_overrides import overrides
from hybridrl.costs.memory import GIB
from hybridrl.models.tiny import make_tiny_model
from hybridrl.plan import mapping_command
from hybridrl.plan.mapping_split import ROLLOUT
from hybridrl.plan.search_space import set_partitions
from hybridrl.preflight import prepare as preflight
from hybridrl.preflight.prepare import prepare
from hybridrl.rewards.model import make_reward_model

pytestmark = pytest.mark.long

LENGTHS = "--lengths=lognormal:median=60,sigma=0.8"
TINY = (
    *("cluster.device=cpu", "data.max_prompt_tokens=64", "rollout.max_new_tokens=192"),
    *("trainer.prompts_per_step=2", "cluster.memory_check=warn"),
    *("data.size=50", "data.eval_size=8"),
)


def _plan(*args: str, lengths: str = LENGTHS) -> mapping_command.MappingReport:
    return mapping_command.run([*args, lengths])


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny reward model of four heads."""
    folder = tmp_path_factory.mktemp("models")
    tiny = TinyModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    make_tiny_model(folder / "actor", tiny, seed=0)
    make_reward_model(folder / "reward", str(folder / "actor"), seed=1)
    return str(folder / "reward")


GPU_GIB = 4
"""The memory of a planned cluster's GPU; 2.8 GiB of it are left for others."""


def _random_problem(draw: random.Random, reward_model: str) -> list[str]:
    """A recipe, a tiny model, of experts or with adapters, a cluster; a reward model or a verifier.

    Over slow links pipelines pay. Half of the clusters have GPUs, and refuse what does not fit.
    """
    heads = draw.choice((2, 4, 8))
    problem = [
        f"recipe={draw.choice(('grpo', 'ppo', 'grpo', 'safe_rlhf'))}",
        f"model.tiny.num_layers={draw.choice((1, 2, 4, 5))}",
        f"model.tiny.num_heads={heads}",
        f"model.tiny.num_kv_heads={draw.choice([h for h in (1, 2, 4, 8) if h <= heads])}",
        f"model.tiny.hidden_size={16 * heads}",
        f"--nodes={draw.choice((1, 2, 3))}",
        f"--gpus-per-node={draw.choice((1, 2, 4))}",
        f"--gpu={draw.choice(('h100', 'a100'))}",
        "--number=12",
        "--seconds=2",
    ]
    if draw.random() < 0.5:
        problem += ["reward=model", f"reward.model={reward_model}"]
    if draw.random() < 0.5:
        problem += [*SLOW_LINKS]
    if draw.random() < 0.3:
        problem += ["model.tiny.num_experts=4", "model.tiny.experts_per_token=2"]
    if draw.random() < 0.3:
        problem += ["actor.lora.rank=4"]
    if draw.random() < 0.5:
        problem += ["cluster.device=cuda", "cluster.memory_check=refuse", f"--gpu-gib={GPU_GIB}"]
    if draw.random() < 0.5:
        problem += ["--max-staleness=1"]
    return problem


SLOW_LINKS = ("--node-gbs=0.01", "--network-gbs=0.01")
FILLED = (
    *("recipe=ppo", "model.tiny.num_layers=4", "model.tiny.num_heads=4"),
    *("model.tiny.num_kv_heads=4", "model.tiny.hidden_size=256", "trainer.prompts_per_step=8"),
    *("--nodes=1", "--gpus-per-node=2", "--number=12", "--seconds=20", *SLOW_LINKS),
)
"""Two models that fill each other's pipelines."""

KINDS: dict[str, Callable[[DeviceMapping], bool]] = {
    "pipeline": lambda mapping: any(layout.pp > 1 for layout in mapping.train.values()),
    "pools": lambda mapping: len(mapping.pools) > 1,
    "updates in one plan": lambda mapping: mapping.fuses,
    "ranks that generate alone": lambda mapping: ROLLOUT in mapping.pools,
}
"""What is to occur among the proposals."""


def _planned_gpus(config: Config, asks_memory: bool = False) -> int | None:
    """In place of `resolve_device`: a joined cluster that has what was planned."""
    on_gpus = config.cluster.device is Device.cuda
    config.resolve_device(config.cluster.ranks if on_gpus else 0, "the planned cluster")
    return GPU_GIB * GIB if on_gpus and asks_memory else None


def _pass_dry_run(
    problems: Iterable[Sequence[str]], directory: Path, capsys: pytest.CaptureFixture[str]
) -> set[str]:
    """What `train --dry-run` says of proposals; the kinds that they are of.

    Of each problem the two best are checked, and the best of each kind.
    """
    seen = set[str]()
    for index, args in enumerate(problems):
        report = _plan(*TINY, *args)
        own = [arg for arg in args if not arg.startswith("--")]
        mappings = [one.mapping for one in report.result.best]
        chosen = {*range(min(2, len(mappings)))}
        for kind, is_of in KINDS.items():
            first = next((n for n, mapping in enumerate(mappings) if is_of(mapping)), None)
            if first is not None:
                seen.add(kind)
                chosen.add(first)
        for number in sorted(chosen):
            run_dir = f"run.dir={directory / f'{index}-{number}'}"
            capsys.readouterr()
            with mock.patch.object(preflight, "resolve_device", _planned_gpus):
                cli.main(["train", "--dry-run", *TINY, *own, *report.overrides[number], run_dir])
            said, mapping = json.loads(capsys.readouterr().out), mappings[number]
            assert said["pools"] == {pool: mapping.ranks[pool] for pool in mapping.pools}
            assert said["schedule"] == mapping.schedule.kind.value
            assert said["fused_updates"] is mapping.fuses
    return seen


@pytest.mark.layouts
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in (1, 2))])
def test_overrides_pass_the_dry_run(
    seed: int, tmp_path: Path, reward_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random models and clusters are planned."""
    _pass_dry_run([_random_problem(random.Random(seed), reward_model)], tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_overrides_of_many_pass_the_dry_run(
    first: int, tmp_path: Path, reward_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan 200 random models and clusters; each twenty, and one by hand, have every kind."""
    seeds = range(first, first + 20)
    problems = [_random_problem(random.Random(seed), reward_model) for seed in seeds]
    assert _pass_dry_run([*problems, FILLED], tmp_path, capsys) == {*KINDS}


def test_the_preflight_refuses_what_does_not_fit_the_planned_gpus(tmp_path: Path) -> None:
    """So that it says something that proposals pass it: here GPUs have a MiB."""
    compose.register()
    gpus = ("cluster.device=cuda", "cluster.memory_check=refuse", "cluster.ranks=1")
    config = compose.check([*TINY, *gpus, f"run.dir={tmp_path / 'run'}"])

    def smaller(config: Config, asks_memory: bool = False) -> int:
        _planned_gpus(config)
        return 2**20

    with (
        mock.patch.object(preflight, "resolve_device", smaller),
        pytest.raises(ConfigError) as error,
    ):
        prepare(config)
    assert error.value.key == "cluster.memory_check"


def test_ppo_has_fifteen_partitions(reward_model: str) -> None:
    """Actor, critic, reference and a reward model can run in every partition on four ranks."""
    reward = ("reward=model", f"reward.model={reward_model}", "recipe.kl_coef=0.1")
    compose.register()
    config = compose.check([*TINY, "recipe=ppo", *reward, "cluster.ranks=4"])
    cluster = cluster_of(ACCELERATORS["a100"], 1, 4)
    options = {"lengths": LENGTHS.removeprefix("--lengths=")}
    problem = mapping_command._problem(config, cluster, options, [])
    pools = mapping_command._space(problem).pools
    tried = [pools(partition) for partition in set_partitions([r.name for r in problem.roles])]
    assert len(tried) == 15
    assert all(tried)


def test_the_best_comes_first_and_is_not_below_its_bound() -> None:
    """Seconds ascend, none is below what no mapping of its kind could take."""
    report = _plan(*TINY, "recipe=ppo", "--nodes=1", "--gpus-per-node=4", "--number=6")
    seconds = [one.seconds.step_s for one in report.result.best]
    assert len(seconds) >= 4
    assert seconds == sorted(seconds)
    assert all(one.bound_s <= one.seconds.step_s * (1 + 1e-9) for one in report.result.best)
    assert report.result.is_complete
    kinds = [
        (one.mapping.pools, one.mapping.ranks, one.mapping.gen, one.mapping.schedule.kind)
        for one in report.result.best
    ]
    assert all(one != other for one, other in itertools.combinations(kinds, 2))
    assert len({len(pools) for pools, *_ in kinds}) > 1


def test_the_table_has_the_memory_of_each_pool() -> None:
    """The largest phase of a rank of it."""
    apart = ("cluster.placement=split", "cluster.pools.actor=1", "cluster.pools.critic=1")
    cluster = ("cluster.ranks=2", "--nodes=1", "--gpus-per-node=2", "--price")
    report = _plan(*TINY, "recipe=ppo", *apart, *cluster)
    (memory,) = (line[5] for line in report.table()[1:])
    of_actor, of_critic = memory.split("; ")
    assert re.fullmatch(r"actor: [\d.e-]+ GiB, \w+( \w+)*", of_actor)
    assert re.fullmatch(r"critic: [\d.e-]+ GiB, \w+ critic", of_critic)


def test_a_mapping_by_hand_costs_what_the_search_says() -> None:
    """The overrides of a result, priced."""
    cluster = ("--nodes=1", "--gpus-per-node=2")
    report = _plan(*TINY, "recipe=ppo", *cluster, "--number=1")
    (best,) = report.result.best
    again = _plan(*TINY, "recipe=ppo", *report.overrides[0], *cluster, "--price")
    (priced,) = again.result.best
    assert priced.mapping.train == best.mapping.train
    assert priced.seconds.step_s == pytest.approx(best.seconds.step_s, rel=1e-9)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_gpus_a_role_is_brought_for_its_update(device: str) -> None:
    """So a slow link to the host makes updates longer; on CPUs all roles stay."""

    def updates_s(host_gbs: float) -> float:
        cluster = ("--nodes=1", "--gpus-per-node=2", f"--host-gbs={host_gbs}", "--number=1")
        report = _plan(*TINY, f"cluster.device={device}", "recipe=ppo", *cluster)
        (best,) = report.result.best
        return sum(best.seconds.train.values())

    assert (updates_s(0.01) > 2 * updates_s(50)) is (device == "cuda")


def test_a_slower_network_makes_the_same_mapping_dearer() -> None:
    """The mapping is that of two nodes, so its gradients and weights cross it."""

    def step_s(network_gbs: float) -> float:
        layout = ("cluster.ranks=4", "trainer.layout.fsdp=4", "--nodes=2", "--gpus-per-node=2")
        (one,) = _plan(*TINY, *layout, f"--network-gbs={network_gbs}", "--price").result.best
        return one.seconds.step_s

    assert step_s(0.1) > step_s(10)


BIG = ("model=llama3_70b", "cluster.device=cuda")


@pytest.mark.each
@pytest.mark.parametrize(
    ("args", "key", "message"),
    [
        ((*BIG, "--nodes=1", "--gpus-per-node=2"), "--nodes", "actor trained on 2 ranks needs"),
        ((*TINY, "--nodes=1", "--gpu=tpu"), "--gpu", "h100, h800"),
        ((*TINY,), "--nodes", "how many nodes"),
        ((*TINY, "--nodes=0"), "--nodes", "1 or more"),
        (("--nodes=1", "--lengths", "recipe=ppo"), "--lengths", "--lengths=VALUE"),
        ((*TINY, "--nodes=1", "--gpus=8"), "option", "--gpus-per-node"),
        ((*TINY, "--nodes=1", "trainer.layout.tp=2"), "trainer.layout.tp", "--price prices it"),
        (
            (
                *TINY,
                "--nodes=1",
                "cluster=emulated",
                "cluster.device=auto",
                "cluster.memory_check=refuse",
            ),
            "cluster",
            "local or slurm: a mapping is of",
        ),
    ],
)
def test_wrong_input_is_one_line(args: tuple[str, ...], key: str, message: str) -> None:
    """Key, value, what is allowed."""
    with pytest.raises(ConfigError) as error:
        _plan(*args)
    assert error.value.key == key
    assert message in error.value.allowed
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("limit", "told"), [(192, False), (24, True)])
def test_lengths_that_the_limit_cuts_are_told(limit: int, told: bool) -> None:
    """A tenth of the responses and more: half of them have more than 60 tokens."""
    few = (*TINY, f"rollout.max_new_tokens={limit}", "--nodes=1", "--gpus-per-node=1", "--number=1")
    remarks = _plan("recipe=grpo", *few).remarks()
    cut = [line for line in remarks if line.startswith(f"assumed: rollout.max_new_tokens={limit}:")]
    assert len(cut) == told
    assert all(line.endswith("% of the responses end there") for line in cut)


def test_a_reward_model_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Not the actor, which does."""
    compose.register()
    shape = compose.check(["model=llama3_70b"]).model.shape
    AutoConfig.for_model(**shape).save_pretrained(tmp_path)
    reward = ("reward=model", f"reward.model={tmp_path}", "model=qwen3_1.7b")
    with pytest.raises(ConfigError, match=r"reward that scores .* needs [\d.]+ GiB on a rank"):
        _plan("cluster.device=cuda", *reward, "--nodes=1", "--gpus-per-node=1")


QWEN = ("model=qwen3_8b", "cluster.ranks=8", "rollout.max_new_tokens=4096", "--nodes=1", "--price")


def test_what_the_closed_form_does_not_know_is_priced_by_the_plan() -> None:
    """Offloaded activations fit by the memory plan; what their seconds assume is a remark."""
    args = (*QWEN, "cluster.device=cuda", "trainer.activations=offload")
    report = _plan(*args, lengths="--lengths=lmsys")
    (one,) = report.result.best
    assert one.seconds.step_s > 0
    assert all(plan.fits for plan in one.memory.values())
    assert any(line.startswith("assumed: trainer.activations=offload") for line in report.remarks())


SHORT, LONG = (f"--lengths=lognormal:median={x}" for x in ("60,sigma=0.1", "2000,sigma=0.5"))
ROWS = ("cluster.device=cuda", "trainer.max_tokens_per_micro_batch=1024")


def test_samples_in_chunks_are_refused() -> None:
    """They have no price; shorter ones have one."""
    args = (*QWEN, *ROWS, "trainer.chunk_tokens=512")
    _plan(*args, lengths=SHORT)
    with pytest.raises(ConfigError, match=r"for samples of \d+ tokens") as error:
        _plan(*args, lengths=LONG)
    assert (error.value.key, error.value.value) == ("trainer.chunk_tokens", 512)


def test_ranks_that_share_long_samples_send_their_heads() -> None:
    """Over a slow link that costs seconds; short samples are shared by nobody."""

    def update_s(lengths: str, cp: int) -> float:
        args = (*QWEN, *ROWS, f"trainer.layout.cp={cp}", "--node-gbs=2")
        (one,) = _plan(*args, lengths=lengths).result.best
        return one.seconds.train["actor"]

    assert update_s(SHORT, 4) == update_s(SHORT, 1)
    assert update_s(LONG, 4) > update_s(LONG, 2) > 1.01 * update_s(LONG, 1)


OTHERS = {
    "experts": ("model=tiny_moe", "--nodes=2", "--gpus-per-node=2"),
    "adapters": ("actor.lora.rank=8", "roles.critic.lora.rank=4", "--nodes=1", "--gpus-per-node=4"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_experts_and_adapters_are_planned(
    kind: str, tmp_path: Path, reward_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is proposed passes the checks of a run."""
    args = ("recipe=ppo", *OTHERS[kind], "--number=3", "--seconds=2")
    _pass_dry_run([args], tmp_path, capsys)


def test_ranks_share_samples_of_32k_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, one fills a GPU of 40 GB. A run takes such a mapping of a tiny model, too."""
    model = ("model=qwen3_1.7b", "cluster.device=cuda", "trainer.prompts_per_step=2")
    lengths = ("data.max_prompt_tokens=1024", "rollout.max_new_tokens=31744")
    cluster = ("--nodes=1", "--gpus-per-node=4", "--gpu-gib=40", "--number=1")
    (best,) = _plan(*model, *lengths, "rollout.max_running=8", *cluster, lengths=LONG).result.best
    own = best.mapping.train["actor"]
    assert own.cp > 1
    assert own.micro_batch_tokens * own.cp >= 32_768
    tokens = f"trainer.max_tokens_per_micro_batch={own.micro_batch_tokens // 256}"
    others = [x for x in overrides(best.mapping) if "max_tokens_per_micro_batch" not in x]
    with mock.patch.object(preflight, "resolve_device", _planned_gpus):
        cli.main(["train", "--dry-run", *TINY, *others, tokens, f"run.dir={tmp_path / 'run'}"])
    assert json.loads(capsys.readouterr().out)["pools"] == {"actor": 4}


def test_adapters_have_quicker_updates_and_small_moments() -> None:
    """The mapping is the same."""
    args = (*QWEN, "cluster.device=cuda")
    plain, own = (
        _plan(*args, f"actor.lora.rank={rank}", lengths=LONG).result.best[0] for rank in (0, 8)
    )
    assert own.seconds.train["actor"] < 0.75 * plain.seconds.train["actor"]
    of_update = [
        {phase.name: phase.sizes for phase in one.memory["actor"].phases}["train actor"]
        for one in (plain, own)
    ]
    assert of_update[1]["moments"] < 0.02 * of_update[0]["moments"]


EXPERTS = (
    *("model=qwen3_30b_a3b", "cluster.device=cuda", "cluster.ranks=16", "rollout.layout.tp=2"),
    "--price",
)


def test_experts_on_their_ranks_exchange_tokens_in_place_of_weights() -> None:
    """FSDP gathers 30 B parameters for each micro-batch; ep 8 an eighth, and tokens move.

    Over slow links between nodes, ep in a node is quicker than over both.
    """

    def update_s(*layout: str) -> float:
        nodes = ("--nodes=2", "--gpus-per-node=8", "--network-gbs=5")
        (one,) = _plan(*EXPERTS, *layout, *nodes, lengths=LONG).result.best
        return one.seconds.train["actor"]

    of_node = update_s("trainer.layout.ep=8")
    assert of_node < 0.7 * update_s("trainer.layout.ep=1")
    assert of_node < update_s("trainer.layout.ep=16")


PIPELINES = (
    *("recipe=ppo", "cluster.ranks=2", "trainer.layout.pp=2", "roles.critic.layout.pp=2"),
    *("model.tiny.num_layers=4", "--nodes=1", "--gpus-per-node=2", "--price"),
)


@pytest.mark.each
@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        ((*PIPELINES, "trainer.fuse_updates=always", "roles.critic.layout={pp: 1, tp: 2}"),
         "trainer.fuse_updates", "always"),
        ((*PIPELINES, "recipe=rloo", "trainer.mini_batches=2"), "trainer.mini_batches", "2"),
        (("recipe=rloo", "trainer.mini_batches=2", "--nodes=1"), "trainer.mini_batches", "2"),
        (("recipe=rm", "--nodes=1"), "recipe", "rm"),
        (("recipe=sft", "--nodes=1"), "recipe", "sft"),
        (("recipe=dpo", "--nodes=1"), "recipe", "dpo"),
        (("recipe=orpo", "cluster.ranks=8", "--nodes=1", "--price"), "recipe", "orpo"),
    ],
)  # fmt: skip
def test_what_train_refuses_has_no_price(args: tuple[str, ...], key: str, value: str) -> None:
    """Nor does a recipe that does not generate, or does not train the actor."""
    with pytest.raises(ConfigError) as error:
        _plan(*TINY, *args)
    assert (error.value.key, str(error.value.value)) == (key, value)


@pytest.mark.parametrize(
    "settings",
    [
        ("recipe=rloo", "schedule=partial"),
        ("recipe=dapo", "schedule=packed"),
        ("recipe=grpo", "recipe.correction.old_log_probs=trainer", "schedule=partial"),
        ("recipe=grpo", "schedule=packed", "schedule.limit_tokens=192"),
    ],
)
def test_a_schedule_that_train_refuses_has_no_price(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    """With the same line."""
    args = (*TINY, *settings, "cluster.ranks=2", f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"^schedule[.=]") as refused:
        prepare(compose.check(args))
    with pytest.raises(ConfigError) as error:
        _plan(*args, "--nodes=1", "--gpus-per-node=2", "--price")
    assert str(error.value) == str(refused.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("tokens", "decided"), [(16_384, "always"), (256, "never")])
def test_a_price_has_the_updates_that_a_run_has(tokens: int, decided: str) -> None:
    """With many rows one plan saves less than a run asks for; the command says it."""
    batch = ("trainer.prompts_per_step=64", f"trainer.max_tokens_per_micro_batch={tokens}")
    report = _plan(*TINY, *PIPELINES, *batch)
    (one,) = report.result.best
    assert one.mapping.fuses is (decided == "always")
    kept = "trainer.activations=keep"  # of CPUs
    assert report.overrides == [[kept, f"trainer.fuse_updates={decided}"]]
    again = _plan(*TINY, *PIPELINES, *batch, *report.overrides[0])
    assert again.result.best[0].seconds.step_s == pytest.approx(one.seconds.step_s)


def test_a_role_fits_with_micro_batches_of_the_longest_sample() -> None:
    """The longest sample has 5,120 tokens.

    With the next power of two its activations would not fit 32 GiB.
    """
    model = ("model=qwen3_1.7b", "recipe=grpo", "cluster.device=cuda", "trainer.fuse_layers=never")
    lengths = ("data.max_prompt_tokens=1024", "rollout.max_new_tokens=4096")
    cluster = ("--nodes=1", "--gpus-per-node=1", "--gpu-gib=32", "--number=1")
    (best,) = _plan(*model, *lengths, *cluster).result.best
    assert best.mapping.train["actor"].micro_batch_tokens == 5120


def test_rows_that_tp_does_not_divide_are_planned() -> None:
    """A row has 1,503 tokens: the engine fills it up under sequence parallelism."""
    model = ("model=qwen3_1.7b", "recipe=ppo", "cluster.device=cuda")
    lengths = ("data.max_prompt_tokens=255", "rollout.max_new_tokens=246")
    batch = ("trainer.prompts_per_step=32", "recipe.num_samples=1")
    report = _plan(*model, *lengths, *batch, "--nodes=2", "--number=1", "--seconds=5")
    assert report.result.best


def test_a_workload_without_lengths_says_where_they_come_from() -> None:
    """A run, a file, or a distribution."""
    with pytest.raises(ConfigError, match="lognormal"):
        mapping_command.run([*TINY, "--nodes=1"])


def test_a_mapping_by_hand_that_does_not_fit_names_the_largest_size() -> None:
    """Without FSDP, 70B parameters have too large moments."""
    layout = ("trainer.layout.replicas=8", "trainer.layout.fsdp=1", "rollout.layout.tp=8")
    with pytest.raises(ConfigError, match=r"most of it.*moments"):
        _plan(*BIG, *layout, "--nodes=1", "--price")


def test_the_command_prints_what_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The table, the command, JSON."""
    cluster = ("--nodes=1", "--gpus-per-node=2", "--number=2")
    cli.main(["plan", "auto", *TINY, LENGTHS, *cluster])
    lines = capsys.readouterr().out.splitlines()
    record: dict[str, Any] = json.loads(lines[-1])
    overrides = record["mappings"][0]["overrides"]
    assert lines[-2] == " ".join(["hybridrl train", *TINY, *overrides])
    config = compose.check([*TINY, *overrides])
    assert config.cluster.ranks == 2


def test_the_command_of_a_mapping_by_hand_has_what_was_decided() -> None:
    mapping = ["cluster.ranks=2", "trainer.layout.pp=2", "roles.critic.layout.pp=2"]
    ppo = [*TINY, "recipe=ppo", "model.tiny.num_layers=4"]
    options = ("--price", "--nodes=1", "--gpus-per-node=2")
    report = _plan(*ppo, *mapping, *options)
    command = report.remarks()[-1].split()
    kept, fuses = command[-2:]
    assert kept == "trainer.activations=keep"  # of CPUs
    assert fuses.startswith("trainer.fuse_updates=")
    assert all(command.count(setting) == 1 for setting in (*mapping, kept, fuses))


def test_what_the_seconds_leave_out_is_said() -> None:
    settings = ("rollout.speculate=4", "schedule=partial", "cluster.ranks=2")
    lines = _plan(*TINY, *settings, "--price", "--nodes=1", "--gpus-per-node=2").remarks()
    assumed = [line for line in lines if line.startswith("assumed: ")]
    assert [line.split()[1] for line in assumed] == ["rollout.speculate=4:", "schedule=partial:"]


def test_the_scales_of_a_run_are_factors_of_their_kinds(tmp_path: Path) -> None:
    """Updates that took three times as long as was counted do so under another mapping, too."""
    cluster = ("cluster.ranks=2", "--price", "--nodes=1", "--gpus-per-node=2")
    (plain,) = _plan(*TINY, *cluster).result.best
    record = {"scales": {"train": 3.0}, "device": "cpu", "engine": "native"}
    (tmp_path / "costs.json").write_text(json.dumps(record))
    (own,) = _plan(*TINY, *cluster, f"--costs={tmp_path}").result.best
    update = sum(plain.seconds.train.values())
    assert own.seconds.step_s - plain.seconds.step_s == pytest.approx(2 * update, rel=0.05)


@pytest.mark.parametrize(
    ("device", "engine", "args"),
    [("h100", "native", ()), ("cpu", "vllm", ()), ("cpu", "native", ("--gpu=h100",))],
)
def test_scales_of_another_device_or_engine_are_refused(
    device: str, engine: str, args: Sequence[str], tmp_path: Path
) -> None:
    record = {"scales": {"train": 3.0}, "device": device, "engine": engine}
    (tmp_path / "costs.json").write_text(json.dumps(record))
    cluster = ("cluster.ranks=2", "--price", "--nodes=1", "--gpus-per-node=2")
    with pytest.raises(ConfigError, match=f"this one was on {device} with {engine}$"):
        _plan(*TINY, *cluster, *args, f"--costs={tmp_path}")


@pytest.mark.parametrize(
    "text", [None, "{", "{}", '{"scales": {"train": -1}}', '{"scales": {"train": 1}}']
)
def test_a_run_without_scales_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^--costs=.*whose costs\.json has scales"):
        _plan(
            *TINY, "cluster.ranks=2", "--price", "--nodes=1", "--gpus-per-node=2",
            f"--costs={tmp_path}",
        )  # fmt: skip
