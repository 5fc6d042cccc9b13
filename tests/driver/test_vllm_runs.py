"""Whole runs that generate with vLLM: what they train on under each schedule, and how they end."""

import contextlib
import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from whole_runs import TINY

from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.vllm

HEADS = "model.tiny.head_dim=32"  # vLLM's CPU attention has no smaller ones
FUSED = ["schedule=fused", "schedule.migration_threshold=12"]
PARTIAL = ["schedule=partial", "schedule.over_provision=2"]
ADAPTERS = ["actor.lora.rank=4", "actor.lora.alpha=8"]
TALKING = [
    "environment=function", f"environment.path={Path(__file__).parents[1] / 'talking.py'}:talk",
    "environment.max_turn_tokens=12", "+environment.params={turns: 4, ends: 0.2, fails: 0}",
]  # fmt: skip
LONGER = [  # of which some are unfinished when a window of turns ends
    *TALKING[:2], "environment.max_turn_tokens=4", "schedule.max_staleness=2",
    "+environment.params={turns: 8, ends: 0.35, fails: 0}",
]  # fmt: skip
APART = ["cluster.pools.rollout=1"]
RUNS = {
    "native": [],
    "serial": ["rollout=vllm"],
    "fused": ["rollout=vllm", *FUSED],
    "fused, tp 2": ["rollout=vllm", "rollout.layout.tp=2", *FUSED],
    "split": ["rollout=vllm", "cluster.placement=split"],
    "native, adapters": ADAPTERS,
    "tp 2, adapters": ["rollout=vllm", "rollout.layout.tp=2", *ADAPTERS],
    "native, conversations": TALKING,
    "fused, conversations": ["rollout=vllm", *TALKING, *FUSED],
    "native, partial conversations": [*PARTIAL, *LONGER],
    "partial conversations": ["rollout=vllm", *PARTIAL, *LONGER],
    "native, one_step": ["schedule=one_step", *APART, *TALKING],
    "one_step": ["rollout=vllm", "schedule=one_step", *APART, *TALKING],
    "periodic": ["rollout=vllm", "schedule=periodic", *APART],
}
FIGURES = [f"mismatch/{name}" for name in ("mean", "max", "kl", "ess_token", "ess_sequence")]


@pytest.fixture(scope="module")
def run_of(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Three steps on two ranks: one of RUNS."""

    @functools.cache
    def run(name: str) -> Any:
        folder = tmp_path_factory.mktemp("run")
        return train_here(folder, *long_tail, HEADS, "cluster.ranks=2", *RUNS[name])

    return run


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("serial", "native"),
        ("fused", "serial"),
        ("fused, tp 2", "native"),
        ("fused, conversations", "native, conversations"),
        ("periodic", "native"),
        ("one_step", "native, one_step"),
        pytest.param(
            "partial conversations", "native, partial conversations", marks=pytest.mark.slow
        ),
        pytest.param("split", "native", marks=pytest.mark.slow),
        pytest.param("tp 2, adapters", "native, adapters", marks=pytest.mark.slow),
    ],
)
def test_runs_train_on_the_same(
    run_of: Callable[[str], Any], check_same: Callable[..., None], name: str, other: str
) -> None:
    """Tokens, rewards and gradients are equal with each engine, also where samples move."""
    run = run_of(name)
    check_same(run_of(other), run)
    if "pools" in " ".join(RUNS[name]):
        stale = [line["samples/off_policy_tokens"] > 0 for line in run.metrics]
        assert stale == [False] + 2 * [name == "one_step"]
        events = read_lines(run.dir / "events.jsonl")
        loads = {event["version"] for event in events if event["kind"] == "load"}
        assert loads == (
            {0, 1, 3} if name == "one_step" else {0, 1, 2, 3}
        )  # 3: the last evaluation
    elif "conversations" in name:  # whose tail follows their waits, too
        # A step of `partial` may train on pending samples alone.
        assert sum(line.get("environment/kept_kv_tokens", 0) for line in run.metrics) > 0
        if "partial" in name:
            for figure in ("samples/parked", "samples/resumed"):
                assert sum(line[figure] for line in run.metrics) > 0
    elif name == "fused":
        assert all(line["samples/migrated"] > 0 for line in run.metrics)
    else:  # with tp 2 there is one instance
        assert not any(line.get("samples/migrated") for line in run.metrics)


@pytest.mark.wide
def test_tools_on_ranks_that_generate_alone(train_here: Callable[..., Any], tmp_path: Path) -> None:
    """A model that has seen calls makes some under `one_step`: texts and answers are equal."""
    turns = {}
    for engine in ("native", "vllm"):
        run = train_here(
            tmp_path / engine, "experiment=tools_tiny", HEADS, "model.tiny.hidden_size=64",
            "model.tiny.intermediate_size=128", "model.tiny.num_layers=2", "model.tiny.num_heads=2",
            "model.tiny.num_kv_heads=2", "warm_start.steps=100", "warm_start.prompts_per_step=64",
            "trainer.steps=3", "trainer.prompts_per_step=4", "recipe.group_size=4",
            "recipe.skip_equal_groups=false", "data.eval_size=16", "eval.sets.main.every=null",
            "telemetry.loggers=[]", "telemetry.report=false", "telemetry.samples_per_step=1000",
            "cluster.ranks=2", *APART, "schedule=one_step", f"rollout={engine}",
        )  # fmt: skip
        stale = [line.get("samples/staleness") for line in run.metrics]
        assert stale[-3:] == [0, 1, 1]  # of the steps after the warm start
        records = [x for x in read_lines(run.dir / "samples.jsonl") if x["phase"] == "rl"]
        turns[engine] = {record["id"]: record["turns"] for record in records}
    assert len(turns["native"]) == 3 * 4 * 4
    replies = [first["reply"] for first, *_ in turns["native"].values()]
    assert sum(reply.isdecimal() for reply in replies) > 10  # products: calls that were right
    assert turns["native"] == turns["vllm"]


def test_the_mismatch_is_of_rounding(run_of: Callable[[str], Any]) -> None:
    """Measured: max 5e-7, mean 2e-7, effective sample size short of 1 by 1e-12."""
    for line in run_of("serial").metrics:
        assert line["mismatch/mean"] < 1e-6
        assert line["mismatch/max"] < 1e-5
        assert line["mismatch/ess_sequence"] > 1 - 1e-10


@pytest.mark.wide
def test_a_correction_of_bfloat16(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """With `schedule=fused` as it is where nothing more is said. Measured: max 1e-3 to 2e-3."""
    run = train_here(
        tmp_path / "run",
        *tiny_run,
        HEADS,
        "rollout=vllm",
        "schedule=fused",
        "cluster.ranks=2",
        "rollout.dtype=bfloat16",
        "trainer.steps=3",
        "recipe.correction.old_log_probs=trainer",
        "recipe.correction.weights=truncate",
        "recipe.correction.bound=1.0002",
    )
    for line in run.metrics:
        assert set(FIGURES) <= line.keys()
        assert 1e-4 < line["mismatch/mean"] < line["mismatch/max"] < 0.1
        assert 0 < line["correction_cut"] < 1
        assert 0.999 < line["correction_weight"] < 1
    assert run.stored == [0, 0]


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["serial", pytest.param("packed", marks=pytest.mark.slow)])
def test_a_demo_of_conversations(train: Callable[..., Any], tmp_path: Path, schedule: str) -> None:
    """Eight turns of a token, on Ray; the trainer computes the same log-probabilities."""
    run = train(
        tmp_path / "run",
        "experiment=grid_tiny",
        *(setting for setting in TINY if not setting.startswith("rollout")),
        HEADS,
        "rollout=vllm",
        f"schedule={schedule}",
        "trainer.steps=2",
        "recipe.correction.old_log_probs=trainer",
        "recipe.skip_equal_groups=false",
    )
    assert len(run.metrics) == 2
    assert any(line["grad_norm"] > 0 for line in run.metrics)
    for line in run.metrics:
        assert line["environment/turns"] > 2 * line["environment/episodes"] > 0
        assert line["environment/failed"] == 0
        assert line["mismatch/max"] < 1e-5  # measured: 5e-7


@pytest.mark.wide
def test_experts(train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path) -> None:
    """Trained and generated with as whole ones, replayed; every switch brings the new weights."""
    run = train_here(
        tmp_path / "run",
        *tiny_run,
        "model=tiny_moe",
        HEADS,
        "rollout=vllm",
        "cluster.ranks=2",
        "trainer.layout.ep=2",
        "rollout.layout.tp=2",
        "rollout.layout.ep=2",
        "trainer.router_replay=rollout",
        "recipe.correction.old_log_probs=trainer",
        "trainer.steps=3",
    )
    assert len(run.metrics) == 3
    for line in run.metrics:
        assert line["grad_norm"] > 0
        assert line["mismatch/max"] < 1e-5


def shared_memory(run_dir: Path) -> list[Path]:
    """What is left of a run's; names have the number of the process that chose them."""
    pids = {log.stem.rpartition("-")[2] for log in (run_dir / "logs").glob("worker-*")}
    assert len(pids) >= 2
    return [f for f in Path("/dev/shm").iterdir() if any(f"-{pid}-" in f.name for pid in pids)]


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout", [pytest.param([], marks=pytest.mark.slow), ["rollout.layout.tp=2"]]
)
def test_an_engine_that_raises_is_told(
    command: Callable[..., Any],
    tiny_run: list[str],
    user_code: Path,
    tmp_path: Path,
    layout: list[str],
) -> None:
    """In the middle of generation; the other rank may wait for it in a collective."""
    recipe = f"recipe={{target: '{user_code}:engineless'}}"
    settings = ["rollout=vllm", HEADS, "cluster.ranks=2", "trainer.steps=3", *layout, recipe]
    run = command(*(s for s in tiny_run if not s.startswith("recipe")), *settings, "run.dir=failed")
    code, out, err = run.end(timeout=150)
    assert (code, out, run.left) == (1, "", [])
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("hybridrl: rank 1 of 2 (actor, reward) on node ")
    assert "failed: MemoryError: in the engine's fifth step; its log is " in line
    log = Path(line.partition("its log is ")[2].partition(";")[0])
    assert 'raise MemoryError("in the engine\'s fifth step")' in log.read_text()
    assert json.loads((tmp_path / "failed" / "run.json").read_text())["state"] == "failed"
    assert shared_memory(tmp_path / "failed") == []


def decoding(run: Any) -> list[psutil.Process]:
    """Ranks in a generating call: Ray renames them meanwhile."""
    generating = []
    for process in run.alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("ray::ClusterWorker.advance"):
                generating.append(process)
    return generating


def test_a_rank_that_is_killed_while_it_decodes(
    command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """The killed rank's instance has two ranks; the other one waits in a collective."""
    settings = [
        "rollout=vllm",
        HEADS,
        "cluster.ranks=2",
        "rollout.layout.tp=2",
        "eval.sets.main.every=null",
    ]
    endless = ["trainer.steps=2000", "rollout.max_new_tokens=64"]
    run = command(*tiny_run, *settings, *endless, "run.dir=killed")
    metrics = tmp_path / "killed" / "metrics.jsonl"
    run.wait_for(lambda: len(read_lines(metrics)) > 2)
    victims: list[psutil.Process] = []

    def decodes() -> bool:
        victims.extend(decoding(run)[:1])
        return bool(victims)

    run.wait_for(decodes)
    victims[0].send_signal(signal.SIGKILL)
    code, out, err = run.end(timeout=20)
    assert (code, out, run.left) == (1, "", [])
    assert "Traceback" not in err
    line = err.splitlines()[-1]
    assert line.startswith("hybridrl: rank ")
    assert f"(pid {victims[0].pid}) failed: its process ended" in line
    assert json.loads((tmp_path / "killed" / "run.json").read_text())["state"] == "failed"
    assert shared_memory(tmp_path / "killed") == []
