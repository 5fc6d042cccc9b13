"""A run that ends in the middle and goes on is the run that does not end."""

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import WHEN_MADE, check_same, ended, lines, state, tensors

from hybridrl.driver.checkpoints import Checkpoints
from hybridrl.telemetry.records import read_lines

STRICT = [
    "deterministic=strict", "trainer.steps=6", "trainer.save_every=3", "trainer.optim.lr=1e-2",
    "trainer.optim.schedule=linear", "eval.sets.main.every=2", "eval.sets.main.num_prompts=2",
    "cluster.ranks=2",
]  # fmt: skip
# As users train: AdamW divides by gradients near zero, so a last bit somewhere reaches everything.
ADAM = ["trainer.optim.eps=1e-8", "trainer.optim.clip_grad_norm=1.0", "trainer.mini_batches=2"]
PARTIAL = ["schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2"]
PACKED = ["schedule=packed", "schedule.limit_tokens=24"]
PPO = ["recipe=ppo", "recipe.num_samples=4", "recipe.critic_warmup=4", "roles.critic.optim.lr=1e-2"]
ADAPTERS = [
    "actor.lora.rank=2", "actor.lora.dropout=0.1", "roles.critic.lora.rank=2", "warm_start.steps=2",
]  # fmt: skip
SAFE = [
    "recipe=safe_rlhf", "recipe.multiplier=0.5", "recipe.multiplier_lr=0.8", "recipe.num_samples=4",
    "cost=regex", "cost.pattern='(?s)[a-m].*'", "cost.extract=null", "recipe.threshold=-0.25",
]  # fmt: skip
AVERAGED = """
from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
@recipe("averaged")
def averaged(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = flow.copy(flow.actor, update="ewma", decay=0.7).log_probs(samples, name="slow")
    samples = flow.copy(flow.actor).log_probs(samples, name="old_log_probs")
    samples = flow.reference.log_probs(samples)
    samples = samples.map(close, ("slow", "reference_log_probs"), scalars=("close",))
    samples = samples.by_group(advantages.group_relative, ("close",))
    flow.actor.update(samples, loss=losses.ClippedLoss(kl_coef=0.2))
def close(slow, reference):
    return float((slow - reference).abs().sum())
"""


@pytest.mark.layouts
def test_it_goes_on_as_if_it_had_not_ended(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    kept = [x for x in STRICT if not x.startswith(("trainer.steps=", "trainer.save_every="))]
    settings = [*tiny_run, *kept, *ADAM, "trainer.steps=4", "trainer.save_every=2"]
    train_here(tmp_path / "run", *settings, "trainer.save_in_background=true")
    copy = ended(tmp_path / "run", tmp_path / "copy", 2)
    assert {line["step"] for line in lines(copy, "metrics")} == {0, 1, 2, 3, 4}
    rest = train_here(copy, *settings, "trainer.resume=auto")
    assert len(rest.steps) == 2
    check_same(tmp_path / "run", copy, tmp_path)


@pytest.mark.slow
def test_going_back_holds(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run goes back, and is killed before it has written anything; then it goes on from there.

    While it went on the first time, someone deleted a checkpoint that it would have let go of.
    """
    kept = [x for x in STRICT if not x.startswith(("trainer.steps=", "trainer.save_every=", "ev"))]
    settings = [*tiny_run, *kept, *ADAM, "cluster.ranks=1", "eval.sets.main.num_prompts=2"]
    settings += ["trainer.steps=5", "trainer.save_every=1", "trainer.keep_last=2"]
    run = tmp_path / "run"
    save = Checkpoints.save

    def save_with_one_deleted(self: Checkpoints, step: int, *args: Any) -> None:
        if step == 3:
            shutil.rmtree(run / "checkpoints" / "step_000001")
        save(self, step, *args)

    def killed(self: Checkpoints, step: int, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", save_with_one_deleted)
    train_here(run, *settings)
    points = ["step_000003", "step_000004"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == points
    written = state(run / "final")
    assert (
        written["sums"].keys()
        == written["files"].keys()
        == {"actor/__0_0.distcp", "actor/.metadata"}
    )
    shutil.copytree(run, tmp_path / "whole")
    monkeypatch.setattr(Checkpoints, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train_here(run, *settings, f"trainer.resume={run / 'checkpoints' / points[0]}")
    assert [path.name for path in run.glob("**/step_*")] == points[:1]
    assert not (run / "final").exists()
    monkeypatch.undo()
    assert "continuing after step 3, from " in capsys.readouterr().err
    rest = train_here(run, *settings, "trainer.resume=auto")
    assert len(rest.steps) == 2
    check_same(tmp_path / "whole", run, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["schedule=fused", "schedule.migration_threshold=12"],
        PARTIAL,
        PACKED,
        PPO,
        [*PPO, "cluster.placement=split"],
        SAFE,
        ["averaged"],
        ["averaged", "schedule=periodic", "cluster.pools.rollout=1"],
        [*PPO, *ADAPTERS],
    ],
    ids=[
        "fused",
        "partial",
        "packed",
        "ppo",
        "split",
        "safe_rlhf",
        "averaged",
        "averaged, apart",
        "adapters",
    ],
)
def test_so_does_every_kind_of_run(
    train: Callable[..., Any],
    long_tail: list[str],
    user_code: Path,
    tmp_path: Path,
    more: list[str],
) -> None:
    """Whatever there is to go on from: schedules' samples, critics, averages, adapters, ..."""
    changed = tuple(setting.partition("=")[0] + "=" for setting in [*STRICT, *ADAM])
    if more[0].startswith(("recipe", "averaged")):
        changed += ("recipe=",)
    if more[0] == "averaged":
        file = tmp_path / "averaged.py"
        file.write_text(AVERAGED)
        more = [f"recipe={{target: '{file}:averaged'}}", "warm_start.steps=2", *more[1:]]
    kept = [setting for setting in long_tail if not setting.startswith(changed)]
    settings = [*kept, *STRICT, *ADAM, *more]
    train(tmp_path / "run", *settings)
    first = 3 + 2 * ("warm_start.steps=2" in more)
    copy = ended(tmp_path / "run", tmp_path / "copy", first)
    train(copy, *settings, "trainer.resume=auto")
    check_same(tmp_path / "run", copy, tmp_path)
    # And as a run of its own, from the other's checkpoint.
    point = tmp_path / "run" / "checkpoints" / f"step_{first:06d}"
    train(tmp_path / "other", *settings, f"trainer.resume={point}")
    a, b = (tensors(tmp_path / name / "final", tmp_path) for name in ("run", "other"))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    metrics = lines(tmp_path / "run", "metrics")
    assert lines(tmp_path / "other", "metrics") == [x for x in metrics if x["step"] > first]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [[], PARTIAL], ids=["serial", "partial"])
def test_on_other_ranks(
    train: Callable[..., Any], long_tail: list[str], tmp_path: Path, schedule: list[str]
) -> None:
    """Two ranks of FSDP, then tp 2, then one rank; losses within rounding of the whole run's."""
    changed = ("trainer.steps=", "cluster.ranks=")
    kept = [setting for setting in long_tail if not setting.startswith(changed)]
    settings = [*kept, *schedule, "trainer.save_every=2", "trainer.keep_last=9"]
    train(tmp_path / "run", *settings, "trainer.steps=6")
    copy = ended(tmp_path / "run", tmp_path / "copy", 2)
    tp = ["cluster.ranks=2", "trainer.layout.tp=2", "trainer.layout.fsdp=1", "rollout.layout.tp=2"]
    train(copy, *settings, *tp, "trainer.steps=4", "trainer.resume=auto")
    train(copy, *settings, "cluster.ranks=1", "trainer.steps=6", "trainer.resume=auto")
    whole, parts = (
        [line for line in lines(tmp_path / name, "metrics") if "loss" in line]
        for name in ("run", "copy")
    )
    assert [line["step"] for line in parts] == [1, 2, 3, 4, 5, 6]
    for one, other in zip(whole, parts, strict=True):
        # Measured: losses 1e-7, norms of gradients 1e-7, of order 1.
        for key in ("loss", "grad_norm", "reward_mean"):
            assert other[key] == pytest.approx(one[key], abs=1e-6, rel=1e-6), (one["step"], key)


def final_of(run: Any) -> None:
    code, _, err = run.end(timeout=200)
    assert code == 0, err
    assert run.left == []


@pytest.fixture
def settings(tiny_run: list[str]) -> list[str]:
    """Runs of a dozen steps that leave a checkpoint after every second one."""
    changed = ("trainer.steps=", "trainer.save_every=", "eval.sets.main.every=")
    strict = [setting for setting in STRICT if not setting.startswith(changed)]
    return [*tiny_run , *strict, *ADAM, "trainer.steps=12", "trainer.save_every=2",
            "eval.sets.main.every=5",
            "trainer.resume=auto"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["driver", "rank"])
def test_killed_at_random_moments(
    command: Callable[..., Any], settings: list[str], tmp_path: Path, victim: str
) -> None:
    slow = [*settings, "rollout.max_new_tokens=60"]
    final_of(command(*slow, "run.dir=whole"))
    draw, killed = random.Random(victim), 0
    for _ in range(3):
        run = command(*slow, "run.dir=killed")
        record = tmp_path / "killed" / "metrics.jsonl"
        before = len(read_lines(record))
        run.wait_for(lambda r=record, n=before: len(read_lines(r)) not in (0, n))
        time.sleep(draw.uniform(0.0, 1.5))
        if run.popen.poll() is not None:
            break
        if victim == "driver":
            run.popen.send_signal(signal.SIGKILL)
            killed += run.popen.wait() == -signal.SIGKILL
            for process in run.alive():
                process.kill()
        else:
            ranks = [p for p in run.alive() if p.name().startswith("ray::ClusterWorker")]
            for process in ranks[:1]:  # none where the run is about to end
                process.send_signal(signal.SIGKILL)
                killed += 1
        run.end(timeout=60)
    assert killed
    final_of(command(*slow, "run.dir=killed"))
    check_same(tmp_path / "whole", tmp_path / "killed", tmp_path)


APART = ["schedule=one_step", "cluster=processes", "cluster.ranks=2", "cluster.pools.rollout=1"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "more"),
    [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, APART)],
    ids=["SIGINT", "SIGTERM", "SIGTERM, one_step, 1 + 1"],
)
def test_a_signal_leaves_a_checkpoint(
    command: Callable[..., Any],
    settings: list[str],
    tmp_path: Path,
    number: signal.Signals,
    more: list[str],
) -> None:
    """The checkpoint is that of the last whole step, though none was due."""
    rare = [*settings, "trainer.save_every=100", "rollout.max_new_tokens=60", *more]
    final_of(command(*rare, "run.dir=whole"))
    for _ in range(2):
        run = command(*rare, "run.dir=stopped")
        record = tmp_path / "stopped" / "metrics.jsonl"
        before = len(read_lines(record))
        run.wait_for(lambda r=record, n=before: len(read_lines(r)) > n + 1)
        run.popen.send_signal(number)
        code, _, err = run.end(timeout=60)
        step = max(line["step"] for line in read_lines(record))
        assert (code, run.left) == (128 + number, []), err
        line = err.splitlines()[-1]
        said = f"hybridrl: stopped after step {step}; trainer.resume=auto continues from there"
        assert line.startswith(said)
        assert (tmp_path / "stopped" / "checkpoints" / f"step_{step:06d}").is_dir()
    final_of(command(*rare, "run.dir=stopped"))
    check_same(tmp_path / "whole", tmp_path / "stopped", tmp_path, WHEN_MADE if more else ())


@pytest.mark.slow
def test_a_second_signal_ends_at_once(
    command: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    run = command(*settings, "run.dir=stopped", "eval.sets.main.every=1", "data.eval_size=400",
                  "eval.sets.main.num_prompts=0", "data.size=400")  # fmt: skip
    run.wait_for(lambda: (tmp_path / "stopped" / "events.jsonl").is_file())
    for _ in range(2):
        run.popen.send_signal(signal.SIGINT)
        time.sleep(1.2)
    code, _, err = run.end(timeout=20)
    assert (code, run.left) == (128 + signal.SIGINT, [])
    assert err.splitlines()[-1].startswith("hybridrl: ")
