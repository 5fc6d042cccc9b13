"""Generation on ranks of its own: which weights made each token, what is trained, and resumes."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.layout.push import WeightsDamaged
from hybridrl.telemetry.records import read_lines
from hybridrl.workers.trainer_worker import TrainerWorker

STEPS, PROMPTS, GROUP = 5, 4, 4
ASYNC = [
    f"trainer.steps={STEPS}", "trainer.save_every=1", f"trainer.keep_last={STEPS}",
    "cluster.ranks=2", "cluster.pools.rollout=1",
]  # fmt: skip
STALENESS = {"schedule=periodic": 0, "schedule=one_step": 1, "schedule=async": 2}
SCHEDULES = [[name] for name in STALENESS]
SCHEDULES[-1].append("schedule.max_staleness=2")


def start(train: Callable[..., Any], long_tail: list[str], folder: Path, *more: str) -> Any:
    ours = tuple(setting.partition("=")[0] + "=" for setting in ASYNC)
    kept = [setting for setting in long_tail if not setting.startswith(ours)]
    return train(folder, *kept, *ASYNC, *more)


def check_versions(run: Any, staleness: int, updates: int = 1) -> None:
    """Step k trains batch k, each once, in order; all tokens are of the table's version."""
    trained = [sample for step in run.steps for sample in step.samples]
    assert len({s.id for s in trained}) == len(trained) == STEPS * PROMPTS * GROUP
    for number, (step, line) in enumerate(zip(run.steps, run.metrics, strict=True)):
        assert [s.id for s in step.samples] == sorted(s.id for s in step.samples)
        batch = range(number * PROMPTS, (number + 1) * PROMPTS)
        assert {s.id.prompt for s in step.samples} == {*batch}
        behind = max(0, number - staleness)
        for sample in step.samples:
            (span,) = sample.spans
            assert (span.start, span.stop) == (0, sample.response_tokens)
            assert span.version == updates * behind, (number, sample.id)
        assert line["samples/staleness"] == number - behind
        stale = line["samples/off_policy_tokens"] > 0
        assert stale == (number > behind)
    assert run.stored == [0] * len(run.stored)


@torch.no_grad()
def check_log_probs(run: Any) -> None:
    """Against transformers in float64, under the version that made each sample."""
    folders = ["start", *(f"checkpoints/step_{step:06d}" for step in range(1, STEPS))]
    models = [AutoModelForCausalLM.from_pretrained(run.dir / f).double().eval() for f in folders]
    apart = 0.0
    for sample in (sample for step in run.steps for sample in step.samples):
        tokens, log_probs, _ = json.loads(sample.scalars["told"])
        recorded = torch.tensor(log_probs, dtype=torch.float64)
        version, drawn = sample.spans[0].version, torch.tensor(tokens[sample.prompt_tokens :])

        def under(model: Any, ids: list[int] = tokens, sample: Any = sample) -> torch.Tensor:
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            return scores[sample.prompt_tokens - 1 : -1]

        wanted = under(models[version]).gather(1, drawn[:, None])[:, 0]
        torch.testing.assert_close(recorded, wanted, atol=1e-5, rtol=0)
        if version:
            other = under(models[version - 1]).gather(1, drawn[:, None])[:, 0]
            apart = max(apart, float((wanted - other).abs().max()))
    assert apart > 1e-3  # so that one version cannot be mistaken for another


LAYOUTS = {
    "1 + 1": [],
    "fsdp 2, tp 2": ["cluster.ranks=4", "cluster.pools.rollout=2", "rollout.layout.tp=2"],
    "tp 2, two instances": [
        "cluster.ranks=4", "cluster.pools.rollout=2", "trainer.layout.tp=2",
        "cluster.pool_of={reward: reward}", "cluster.ranks=5", "cluster.pools.reward=1",
    ],
    "pp 2, one instance": ["cluster.ranks=3", "cluster.pools.rollout=1", "trainer.layout.pp=2"],
    "one trains, three generate": ["cluster.ranks=4", "cluster.pools.rollout=3"],
}  # fmt: skip
QUICK = [("schedule=one_step", "1 + 1")]
CASES = [
    pytest.param(
        schedule,
        LAYOUTS[layout],
        id=f"{schedule[0]}, {layout}",
        marks=[] if (schedule[0], layout) in QUICK else pytest.mark.layouts,
    )
    for schedule in SCHEDULES
    for layout in LAYOUTS
    if schedule[0] == "schedule=one_step" or layout in ("1 + 1", "fsdp 2, tp 2")
]


@pytest.mark.parametrize(("schedule", "layout"), CASES)
def test_every_token_is_of_the_version_that_its_batch_says(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    schedule: list[str],
    layout: list[str],
) -> None:
    run = start(train_here, long_tail, tmp_path / "run", *schedule, *layout)
    check_versions(run, STALENESS[schedule[0]])
    check_log_probs(run)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def weights(run: Any) -> dict[str, torch.Tensor]:
    return weights_of(run.dir / "final")


def different(one: Any, other: Any) -> list[str]:
    a, b = weights(one), weights(other)
    names = [name for name in a if not torch.equal(a[name], b[name])]
    for mine, others in zip(one.steps, other.steps, strict=True):
        for x, y in zip(mine.samples, others.samples, strict=True):
            names += [str(x.id)] * ((x.scalars, x.spans) != (y.scalars, y.spans))
    return names


STRICT = [
    "deterministic=strict", "trainer.mini_batches=2", "trainer.optim.lr=1e-2",
    "trainer.optim.eps=1e-8", "trainer.optim.clip_grad_norm=1.0",
]  # fmt: skip


@pytest.mark.layouts
def test_periodic_is_serial_bit_for_bit_whoever_generates(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    shared = start(
        train_here, long_tail, tmp_path / "shared", *STRICT, "schedule=serial",
        "cluster.ranks=1", "cluster.pools.rollout=0",
    )  # fmt: skip
    for schedule in ("serial", "periodic"):
        apart = start(train_here, long_tail, tmp_path / schedule, *STRICT, f"schedule={schedule}")
        assert different(shared, apart) == []
        if schedule == "periodic":
            check_versions(apart, 0, updates=2)


@pytest.mark.layouts
def test_adapters_alone_are_pushed(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """What generates is bit for bit what a switch makes; bytes are those of the adapters."""
    adapters = ["actor.lora.rank=4", *STRICT]
    shared = start(
        train_here, long_tail, tmp_path / "shared", *adapters, "schedule=serial",
        "cluster.ranks=1", "cluster.pools.rollout=0",
    )  # fmt: skip
    apart = start(train_here, long_tail, tmp_path / "apart", *adapters, "schedule=periodic")
    assert different(shared, apart) == []
    pushes = [x for x in read_lines(apart.dir / "events.jsonl") if x["kind"] == "push"]
    sizes = {name: tensor.nbytes for name, tensor in weights(apart).items()}
    assert len(pushes) >= STEPS
    assert all(push["bytes"] == push["bytes_theory"] < sum(sizes.values()) / 4 for push in pushes)


@pytest.mark.layouts
@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda names: names[0])
def test_a_run_repeats_and_resumes_bit_for_bit(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, schedule: list[str]
) -> None:
    """From a checkpoint with samples that are to be made by older weights than its own."""
    once = start(train_here, long_tail, tmp_path / "once", *STRICT, *schedule)
    check_versions(once, STALENESS[schedule[0]], updates=2)
    point = once.dir / "checkpoints" / "step_000002"
    state = json.loads((point / "resume" / "state.json").read_text())
    assert state["schedule"]["batches"]
    resumed = start(
        train_here, long_tail, tmp_path / "resumed", *STRICT, *schedule, f"trainer.resume={point}"
    )
    a, b = weights(once), weights(resumed)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert len(resumed.steps) == STEPS - 2


TRAINING = {
    "one rank": [],
    "fsdp 2": ["cluster.ranks=3"],
    "replicas 2": ["cluster.ranks=3", "trainer.layout.replicas=2"],
    "tp 2": ["cluster.ranks=3", "trainer.layout.tp=2"],
    "pp 2": ["cluster.ranks=3", "trainer.layout.pp=2"],
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[] if not layout else pytest.mark.layouts)
        for name, layout in TRAINING.items()
    ],
)
def test_groups_that_are_trained_as_they_come_have_the_gradient_of_the_batch(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, layout: list[str]
) -> None:
    """Plain descent, so that what differs in the weights is what differs in the gradients."""
    few = ["trainer.max_tokens_per_micro_batch=64", "trainer.mini_batches=1", *layout]
    runs = {
        name: start(train_here, long_tail, tmp_path / name, f"schedule={name}", *few)
        for name in ("serial", "periodic")
    }
    before, after = (weights_of(runs["serial"].dir / f) for f in ("start", "final"))
    for name, tensor in weights(runs["periodic"]).items():
        largest = float((after[name] - before[name]).abs().max())
        assert float((tensor - after[name]).abs().max()) < 1e-5 * max(1.0, largest), name
    for line, other in zip(runs["periodic"].metrics, runs["serial"].metrics, strict=True):
        assert line["samples/trained_early"] > 0
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert line["tokens"] == other["tokens"]


def test_instances_generate_while_the_others_train(
    train: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """The trace shows it; weights come as loads, of the bytes that a push has sent."""
    run = start(train, long_tail, tmp_path / "run", "schedule=one_step")
    by_name: dict[str, list[tuple[float, float]]] = {}
    for span in run.spans:
        by_name.setdefault(span.name, []).append((span.start, span.end))
    assert "switch" not in by_name
    assert len(by_name["load weights"]) >= STEPS - 1

    def overlaps() -> Iterator[float]:
        for begin, end in by_name["update"]:
            for first, last in by_name["generate"]:
                yield min(end, last) - max(begin, first)

    assert max(overlaps()) > 0


def test_weights_that_were_damaged_on_their_way_end_the_run(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = TrainerWorker.push

    @functools.wraps(put)
    def flipped(self: TrainerWorker, version: int | None = None) -> Any:
        reply = put(self, version)
        if reply.value.version == 2:  # rank 0 is this process, and a reference is the value
            for array in reply.value.arrays.values():
                array.data[7] ^= 4
        return reply

    monkeypatch.setattr(TrainerWorker, "push", flipped)
    text = "weights of version 2 from training rank 0: the bytes are not those that were sent"
    with pytest.raises((RuntimeError, WeightsDamaged), match=text):
        start(train_here, long_tail, tmp_path / "run", "schedule=periodic")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(line["step"] for line in lines) == 2
