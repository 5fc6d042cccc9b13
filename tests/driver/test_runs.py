"""Whole jobs in this process, on a cluster that they join: what they train on, how they end."""

import functools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config import ClusterConfig, ConfigError
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.driver.run import TrainingDiverged
from hybridrl.runtime.ray_cluster import ranks_placement, ray_runtime
from hybridrl.schedule import StepResult
from hybridrl.telemetry import sample_files
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long


@pytest.fixture
def run(
    tiny_run: list[str], train: Callable[..., Any], tmp_path: Path
) -> Callable[..., list[StepResult]]:
    """Trains with overrides into `tmp_path / name`; the results of its steps."""
    return lambda name, *overrides: train(tmp_path / name, *tiny_run, *overrides).steps


@pytest.fixture
def run_here(
    tiny_run: list[str], train_here: Callable[..., Any], tmp_path: Path
) -> Callable[..., list[StepResult]]:
    """Train with overrides into `tmp_path / name` without Ray; gives the results of the steps."""
    return lambda name, *overrides: train_here(tmp_path / name, *tiny_run, *overrides).steps


def gradient(run_dir: Path) -> torch.Tensor:
    """The gradient of one step with a huge eps: AdamW is plain descent, p - g / (1 + |g| / eps)."""
    before, after = (load_file(run_dir / f / "model.safetensors") for f in ("start", "final"))
    return torch.cat([(before[name] - after[name]).double().flatten() for name in before])


PLAIN_DESCENT = [
    "trainer.steps=1",
    "trainer.optim.lr=1000",
    "trainer.optim.eps=1000",
    "trainer.optim.clip_grad_norm=0",
]


@pytest.mark.layouts
def test_one_rank_and_two_ranks_agree(
    run_here: Callable[..., list[StepResult]], user_code: Path, tmp_path: Path
) -> None:
    """Tokens at step one agree, gradients within 1e-5, and log-probabilities within 1e-4."""
    by_ranks = {}
    for ranks in (1, 2):
        name = f"ranks{ranks}"
        settings = [f"recipe={{target: '{user_code}:probe'}}"]
        (result,) = run_here(name, f"cluster.ranks={ranks}", *PLAIN_DESCENT, *settings)
        texts = {
            r["id"]: (r["response"], r["reward"])
            for r in read_lines(tmp_path / name / "samples.jsonl")
            if r["phase"] == "rl"
        }
        by_ranks[ranks] = (texts, gradient(tmp_path / name), result)
    texts, gradients, results = zip(*by_ranks.values(), strict=True)
    assert len(texts[0]) == 16
    assert texts[0] == texts[1]
    assert {s.rank for s in results[1].dispatched} == {0, 1}
    norm = gradients[0].norm()
    assert norm > 1e-3
    assert (gradients[0] - gradients[1]).norm() / norm < 1e-5
    assert math.isclose(results[0].metrics["actor/grad_norm"], float(norm), rel_tol=1e-3)
    for result in results:  # what the rollout engine sampled with, and what the trainer computes
        gaps = [float(sample.scalars["gap"]) for sample in result.dispatched]
        assert 0 <= max(gaps) < 1e-4


LAYOUTS = {
    "one rank": ["cluster.ranks=1"],
    "train 1x2x2, generate tp 4": [
        "cluster.ranks=4", "trainer.layout.fsdp=2", "trainer.layout.tp=2", "rollout.layout.tp=4",
    ],
    "train 2x2x1, generate two of tp 2": [
        "cluster.ranks=4", "trainer.layout.pp=2", "trainer.layout.fsdp=2", "rollout.layout.tp=2",
    ],
    "train 1x1x2 twice, generate two of pp 2": [
        "cluster.ranks=4", "trainer.layout.replicas=2", "trainer.layout.tp=2",
        "rollout.layout.pp=2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def in_layout(
    tiny_run: list[str],
    train_here: Callable[..., Any],
    user_code: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    """What a run under a layout of `LAYOUTS` gives: first texts, the gradient, results."""
    shape = ["model.tiny.num_layers=2", "model.tiny.num_heads=4", "model.tiny.num_kv_heads=2"]
    recipe = [f"recipe={{target: '{user_code}:probe'}}"]

    @functools.cache
    def run(name: str) -> Any:
        settings = [*tiny_run, *shape, *recipe, *LAYOUTS[name], *PLAIN_DESCENT]
        run = train_here(tmp_path_factory.mktemp("layout"), *settings)
        texts = {
            (r["phase"], r["id"]): (r["response"], r["reward"])
            for r in read_lines(run.dir / "samples.jsonl")
            if (r["phase"], r["step"]) in (("evaluation", 0), ("rl", 1))
        }
        return texts, gradient(run.dir), run.steps

    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("train 1x2x2, generate tp 4", marks=pytest.mark.layouts),
        pytest.param(
            "train 2x2x1, generate two of tp 2", marks=[pytest.mark.layouts, pytest.mark.wide]
        ),
        pytest.param("train 1x1x2 twice, generate two of pp 2", marks=pytest.mark.slow),
    ],
)
def test_layouts_reproduce_one_rank(in_layout: Callable[[str], Any], name: str) -> None:
    """Tokens at step one agree, gradients within 1e-5, and log-probabilities within 1e-4."""
    texts, gradients, results = in_layout("one rank")
    assert len(texts) == 8 + 16
    others, other_gradients, other_results = in_layout(name)
    assert others == texts
    assert (gradients - other_gradients).norm() / gradients.norm() < 1e-5
    for one, other in zip(results, other_results, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            figures = one.metrics[f"actor/{key}"], other.metrics[f"actor/{key}"]
            assert math.isclose(*figures, abs_tol=1e-5), key
    gaps = [float(s.scalars["gap"]) for r in other_results for s in r.dispatched]
    assert 0 <= max(gaps) < 1e-4
    ranks = {sample.rank for sample in other_results[0].dispatched}
    assert len(ranks) > 1, "one rank holds all samples"


@pytest.mark.layouts
def test_a_loss_that_is_not_finite_stops_the_run(
    run_here: Callable[..., list[StepResult]],
    user_code: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all samples of its last step, however slow the disk is."""
    write = sample_files.write

    def write_slowly(*args: Any) -> Path:
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(sample_files, "write", write_slowly)  # rank 0 is this process
    settings = [f"recipe={{target: '{user_code}:poison'}}", "trainer.save_every=1"]
    settings.append("telemetry.samples=all")
    with pytest.raises(TrainingDiverged, match=r"2 steps in a row .*max_bad_steps=2"):
        run_here("nan", "trainer.steps=5", "trainer.max_bad_steps=2", *settings)
    run_dir = tmp_path / "nan"
    events = read_lines(run_dir / "events.jsonl")
    assert [e["step"] for e in events if e["kind"] == "bad_step"] == [1, 2]
    assert [r["bad_steps"] for r in read_lines(run_dir / "metrics.jsonl") if "loss" in r] == [1, 1]
    before, after = (
        load_file(run_dir / path / "model.safetensors")
        for path in ("start", "checkpoints/step_000001")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    status = json.loads((run_dir / "run.json").read_text())
    assert status["state"] == "failed"
    assert "not finite" in status["reason"]
    assert list(sample_files.files_by_step(run_dir)) == [1, 2]


@pytest.mark.layouts
def test_a_reward_function_that_raises_or_hangs_costs_its_samples_only(
    run_here: Callable[..., list[StepResult]], user_rewards: Path, tmp_path: Path
) -> None:
    run_here(
        "troubled",
        "trainer.steps=1",
        f"reward.function={user_rewards}:troubled",
        "reward.timeout_s=0.5",
        "reward.max_failed_share=1",
    )
    recorded = read_lines(tmp_path / "troubled" / "samples.jsonl")
    samples = [s for s in recorded if s["phase"] == "rl"]
    held_out = [s for s in recorded if s["phase"] == "evaluation"]
    assert [s["step"] for s in held_out] == [0] * 8 + [1] * 8
    metrics = [r for r in read_lines(tmp_path / "troubled" / "metrics.jsonl") if "reward_mean" in r]
    assert len(samples) == 16
    for sample in samples:
        kind = sum(map(ord, sample["response"])) % 8
        reasons = {0: "error: ValueError: no such word", 1: "timeout: no reward within 0.5 s"}
        assert sample["status"] == reasons.get(kind, "ok")
        assert sample["reward"] == (kind / 7 if kind > 1 else None)
    for status in ("error", "timeout"):
        counted = sum(m[f"reward_{status}"] for m in metrics)
        assert counted == sum(s["status"].startswith(status) for s in samples) > 0


@pytest.mark.layouts
def test_programs_are_judged_in_a_run(
    run_here: Callable[..., list[StepResult]], tmp_path: Path
) -> None:
    """A model that knows one program by heart; other responses are programs by accident, if any."""
    row = {"answer": {"inputs": [""], "outputs": ["7"]}}
    rows = [json.dumps({"prompt": f"{a}{b}", **row}) for a in "abcdefgh" for b in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    overrides = [
        "reward=code",
        "reward.jail=off",  # what is judged does not depend on it
        "data=jsonl",
        f"data.sources.main.name={tmp_path}/rows.jsonl",
        "data.sources.main.answer_column=answer",
        "data.answer_template='print(7)'",
        "model.tiny.alphabet='abcdefghijklmnoprst()7'",
        "warm_start.steps=40",
        "warm_start.optim.lr=1e-2",
        "trainer.steps=1",
        "rollout.temperature=3",  # so that some are wrong
    ]
    run_here("programs", *overrides)
    samples = read_lines(tmp_path / "programs" / "samples.jsonl")
    samples = [sample for sample in samples if sample["phase"] in ("rl", "evaluation")]
    rewards = {sample["response"]: sample["reward"] for sample in samples}
    assert rewards.pop("print(7)") == 1.0
    assert set(rewards.values()) == {0.0}
    assert {sample["status"] for sample in samples if sample["phase"] == "rl"} == {"ok"}


@pytest.mark.layouts
def test_a_step_without_samples_is_said_once(
    run_here: Callable[..., list[StepResult]], tmp_path: Path
) -> None:
    """The rewards of a model that knows nothing are all zero."""
    run_here("idle", "recipe=grpo", "reward=exact", "trainer.steps=3")
    run_dir = tmp_path / "idle"
    assert "---- the model sees (" in (run_dir / "first_samples.txt").read_text()
    assert not [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]
    (note,) = [e for e in read_lines(run_dir / "events.jsonl") if e["kind"] == "note"]
    assert note["step"] == 1
    assert note["text"].startswith("step 1: nothing to train on, 16 samples left out; where")


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    path.mkdir()
    options = f"size={megabytes}m"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_named_and_earlier_records_stay(
    run_here: Callable[..., list[StepResult]], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "full", 1) as disk:
        with pytest.raises(OSError, match=r"'[^']*/full/[^']+'"):  # a record or a checkpoint
            run_here("full", "trainer.steps=20", "trainer.save_every=1", "trainer.keep_last=20")
        steps = [r["step"] for r in read_lines(disk / "metrics.jsonl") if "reward_mean" in r]
        assert steps[0] == 1
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.ray
def test_more_ranks_than_the_pool(run: Callable[..., list[StepResult]]) -> None:
    with pytest.raises(ConfigError, match=r"cluster.ranks=100: wanted at most the pool's 4 CPU"):
        run("many", "cluster.ranks=100")


@pytest.mark.ray
def test_a_rank_that_raises_is_told_while_the_other_waits_in_a_collective(
    run: Callable[..., list[StepResult]], user_code: Path
) -> None:
    wanted = r"rank 1 of 2 \(actor, reward\) on node .* failed: ZeroDivisionError: on one rank"
    with pytest.raises(WorkerError, match=wanted) as raised:
        run("lonely", "trainer.steps=1", f"recipe={{target: '{user_code}:lonely'}}")
    log = Path(str(raised.value).partition("its log is ")[2])
    assert 'raise ZeroDivisionError("on one rank")' in log.read_text()  # the rank's traceback


@pytest.mark.wide
@pytest.mark.ray
def test_ranks_that_find_no_place_in_time(cluster: str) -> None:
    import ray

    config = ClusterConfig(ranks=2, address=cluster, start_timeout_s=1.0)
    with ray_runtime(config, {}, Path("unused")):
        others = ray.util.placement_group([{"CPU": 3}])
        ray.get(others.ready())
        with pytest.raises(ConfigError, match=r"cluster.ranks=2: .* \(free now: 1 of 4\)"):
            ranks_placement(ray, config)
