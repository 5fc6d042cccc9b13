"""On real ranks: instances train on whole groups while others decode, and learn as serial does."""

import functools
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config import Config, TinyModelConfig
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.run import Interrupted
from hybridrl.flow.executor import Phase, WeightsReady
from hybridrl.flow.sample import SampleId
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.switching import check_ascending
from hybridrl.models.load import load_config
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight.schedule_choice import early_settings, layout_obstacle
from hybridrl.schedule.tail import plan
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.system import signals
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.device_residency import DeviceStatus

EARLY = ["schedule=fused", "schedule.early_backward=auto"]
REPLICAS = ["trainer.layout.replicas=2"]
VLLM = ["rollout=vllm", "model.tiny.head_dim=32"]  # its CPU attention has no smaller heads
MOVED: dict[Path, list[SampleId]] = {}
"""By the run's directory, the samples that an instance trained early and another one generated."""
CACHES: dict[Path, list[tuple[bool, bool]]] = {}
"""By the run's directory, of each time that the driver's rank stopped generating to train early:
whether its engine had a cache before, and when the training shards came."""
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def tail(long_tail: list[str]) -> list[str]:
    """Groups of a long-tailed run that are whole before the longest sample ends."""
    changed = ("recipe", "reward", "trainer.prompts_per_step", "rollout.decode_steps")
    kept = [setting for setting in long_tail if not setting.startswith(changed)]
    return [*kept, "trainer.prompts_per_step=8", "rollout.decode_steps=1", *REPLICAS]


@pytest.fixture(scope="module")
def run_of(
    train_here: Train, settings_of: Callable[..., list[str]], tmp_path_factory: Any
) -> Callable[..., Any]:
    """Three steps of a recipe on two ranks, serial or with early backward."""

    @functools.cache
    def run(name: str, *overrides: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            whatever_it_costs(patch)
            moved, caches = watch_moves(patch), watch_caches(patch)
            one = train_here(tmp_path_factory.mktemp(name), *settings_of(*overrides))
            MOVED[one.dir], CACHES[one.dir] = moved, caches
            return one

    return run


@pytest.fixture(scope="module")
def settings_of(tail: list[str], user_rewards: Path) -> Callable[..., list[str]]:
    """The settings of a run of `tail`, with these."""
    reward = ["reward=function", f"reward.function={user_rewards}:score", "reward.extract=null"]
    return lambda *overrides: [*tail, *reward, *overrides]


def whatever_it_costs(patch: pytest.MonkeyPatch) -> None:
    """Train early wherever it is possible: on a loaded machine it might be too dear."""
    patch.setattr(StreamedUpdate, "_affordable", lambda *_: None)
    patch.setattr(plan, "best_plan", lambda plans: max(plans, key=lambda p: p.trains_early))


def watch_moves(patch: pytest.MonkeyPatch) -> list[SampleId]:
    """See `MOVED`: they are entered while the run goes on."""
    moved: list[SampleId] = []
    train_early = RayExecutor.train_early

    def watched(self: RayExecutor, stage: Any, instance: int, samples: Any) -> None:
        own = self.group.instances[instance]
        moved.extend(sample.id for sample in samples if sample.rank not in own)
        train_early(self, stage, instance, samples)

    patch.setattr(RayExecutor, "train_early", watched)
    return moved


def watch_caches(patch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """See `CACHES`."""
    caches: list[tuple[bool, bool]] = []
    accumulate = ColocatedActor.accumulate

    def watched(self: ColocatedActor, *args: Any) -> float:
        rollout, engine = self.generator.rollout, self.trainer.train_engine
        if self.residency.status is DeviceStatus.GENERATING:
            before, onload = rollout.stats().has_cache, engine.onload

            def seen() -> None:
                caches.append((before, rollout.stats().has_cache))
                onload()

            with pytest.MonkeyPatch.context() as of_call:
                of_call.setattr(engine, "onload", seen)
                return accumulate(self, *args)
        return accumulate(self, *args)

    patch.setattr(ColocatedActor, "accumulate", watched)
    return caches


def check_same(serial: Any, early: Any) -> None:
    """Check that the batches are the same, and the weights after three steps.

    Weights are compared by how far they have moved.

    Measured: 6e-7 of the move, 1e-7 at most; losses and norms of gradients 1e-6.
    """
    assert len(serial.steps) == len(early.steps) == 3
    for one, other in zip(serial.steps, early.steps, strict=True):
        assert [(s.id, s.tokens) for s in one.samples] == [(s.id, s.tokens) for s in other.samples]
        assert len({s.response_tokens for s in one.samples}) > 5
    for one, other in zip(serial.metrics, early.metrics, strict=True):
        keys = ("loss", "grad_norm", "entropy", "tokens", "mismatch/kl", "reward_mean")
        of_critic = [key for key in ("critic/loss", "critic/grad_norm") if key in one]
        assert len(of_critic) == 2 * (serial.dir / "final" / "critic").exists()
        for key in (*keys, *of_critic):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
    start = load_file(serial.dir / "start" / "model.safetensors")
    for role in ("", "critic") if (serial.dir / "final" / "critic").exists() else ("",):
        moved, apart = 0.0, 0.0
        final, others = (
            load_file(run.dir / "final" / role / "model.safetensors") for run in (serial, early)
        )
        assert final.keys() == others.keys()
        for name, weights in final.items():
            # A critic starts from the actor's weights; its value head is its own.
            moved += (weights - start.get(name, weights)).double().square().sum().item()
            apart += (weights - others[name]).double().square().sum().item()
            torch.testing.assert_close(weights, others[name], atol=1e-5, rtol=0)
        assert moved**0.5 > (5e-3 if role else 1e-2), role
        assert apart**0.5 < 1e-5 * moved**0.5, role


def early_spans(run: Any) -> list[Any]:
    return [s for s in run.spans if s.name == "early backward" and s.lane.startswith("rank")]


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    [
        ("recipe=grpo", "recipe.group_size=2"),
        pytest.param(
            ("recipe=rloo", "recipe.group_size=2"), marks=[pytest.mark.layouts, pytest.mark.wide]
        ),
        pytest.param(("recipe=grpo", "recipe.group_size=2", *VLLM), marks=pytest.mark.vllm),
    ],
    ids=["grpo", "rloo", "vllm"],
)
def test_it_trains_as_serial_does(run_of: Callable[..., Any], recipe: tuple[str, ...]) -> None:
    serial, early = run_of("serial", *recipe), run_of("early", *recipe, *EARLY)
    check_same(serial, early)
    assert sum(line["samples/trained_early"] for line in early.metrics) > 0
    assert MOVED[early.dir]
    assert CACHES[early.dir]
    assert {*CACHES[early.dir]} == {(True, False)}
    assert early_spans(early)
    assert not early_spans(serial)


@pytest.mark.slow
@pytest.mark.layouts
def test_adapters(run_of: Callable[..., Any]) -> None:
    settings = ["recipe=gspo", "recipe.group_size=2", "actor.lora.rank=4"]
    serial, early = run_of("lora", *settings), run_of("lora_early", *settings, *EARLY)
    check_same(serial, early)
    assert sum(line["samples/trained_early"] for line in early.metrics) > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["trainer.layout.tp=2"], marks=pytest.mark.layouts),
        pytest.param(["trainer.layout.fsdp=2"], marks=[pytest.mark.layouts, pytest.mark.slow]),
        pytest.param(["trainer.layout.fsdp=2", *VLLM], marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
    ids=["tp", "fsdp", "vllm"],
)
def test_instances_of_two_ranks(run_of: Callable[..., Any], layout: list[str]) -> None:
    """Each is one replica of two ranks; with a reference, whose passes come first."""
    ranks = ["cluster.ranks=4", "rollout.layout.tp=2", *layout]
    settings = ["recipe=grpo", "recipe.group_size=2", "recipe.kl_coef=0.05", *ranks]
    serial, early = run_of("wide", *settings), run_of("wide_early", *settings, *EARLY)
    check_same(serial, early)
    assert sum(line["samples/trained_early"] for line in early.metrics) > 0


@pytest.mark.layouts
def test_instances_of_two_stages(run_of: Callable[..., Any]) -> None:
    """Each is one replica of a pipeline, in training as in generation."""
    ranks = ["cluster.ranks=4", "rollout.layout.pp=2", "trainer.layout.pp=2"]
    settings = ["recipe=grpo", "recipe.group_size=2", "rollout.layout.grouping=strided", *ranks]
    serial, early = run_of("staged", *settings), run_of("staged_early", *settings, *EARLY)
    check_same(serial, early)
    assert sum(line["samples/trained_early"] for line in early.metrics) > 0


@pytest.mark.wide
@pytest.mark.layouts
def test_a_run_that_resumes_in_between(
    run_of: Callable[..., Any], train_here: Train, tail: list[str], tmp_path: Path
) -> None:
    """A checkpoint is taken between steps, where no gradient is left over."""
    settings = ["recipe=grpo", "recipe.group_size=2", *EARLY]
    whole = run_of("whole", *settings, "trainer.save_every=1", "trainer.keep_last=9")
    (second,) = whole.dir.glob("checkpoints/step_*2")
    rest = run_of("rest", *settings, f"trainer.resume={second}")
    for name, weights in load_file(whole.dir / "final" / "model.safetensors").items():
        other = load_file(rest.dir / "final" / "model.safetensors")[name]
        torch.testing.assert_close(weights, other, atol=1e-5, rtol=0)
    assert len(rest.steps) == 1
    for run in (whole, rest):
        assert sum(line["samples/trained_early"] for line in run.metrics) > 0


def test_a_step_that_fails_leaves_no_rank_behind() -> None:
    """Its early instances train, the others generate: all leave, so that all switch together."""
    entered: list[Phase] = []

    def call_enter(instances: Sequence[int], phase: Phase) -> dict[object, int]:
        entered.append(phase)
        return {object(): 0}

    group = SimpleNamespace(
        instances=[[0]],
        home=None,
        actor_pool=None,
        failures=SimpleNamespace(dead=set(), ended=[]),
        call_enter=call_enter,
        launcher=SimpleNamespace(),
        wait=lambda calls, timeout: list(calls),
        value_of=lambda rank, call: SimpleNamespace(version=3, switch=None),
    )
    executor = RayExecutor(cast(Any, group), Config(), lambda _: None)
    executor._training.early = defaultdict(set, {"update_actor": {SampleId(0)}})
    for _ in range(2):
        executor.sync_weights()
        assert executor.wait() == [WeightsReady(3)]
    assert entered == [Phase.TRAIN, Phase.GENERATE, Phase.GENERATE]


# -- which runs can ------------------------------------------------------------------------------


def instances_of(config: Config) -> list[list[int]]:
    """The ranks of each generation instance, by the order that the config names."""
    axes, layout = TrainAxes.of(config.trainer.layout), config.rollout.layout
    positions = gen_positions(axes, layout.pp, layout.tp, layout.grouping)
    numbers = [position[0] for position in positions]
    return [[r for r, n in enumerate(numbers) if n == i] for i in range(1 + max(numbers))]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ("cluster.ranks=2 trainer.layout.replicas=2", None),
        ("cluster.ranks=4 trainer.layout.replicas=4", None),
        # two replicas an instance, or one of two ranks
        ("cluster.ranks=4 trainer.layout.replicas=4 rollout.layout.tp=2 G=vanilla", None),
        ("cluster.ranks=4 trainer.layout.replicas=2 rollout.layout.tp=2", None),
        ("cluster.ranks=4 trainer.layout.tp=2 trainer.layout.replicas=2 rollout.layout.tp=2", None),
        ("cluster.ranks=2", "trainer.layout.replicas=2 trainer.layout.fsdp=1"),
        ("cluster.ranks=8 rollout.layout.tp=2", "trainer.layout.replicas=4 trainer.layout.fsdp=2"),
        (
            "cluster.ranks=2 trainer.layout.tp=2",
            "trainer.layout.replicas=2 trainer.layout.fsdp=1 trainer.layout.tp=1",
        ),
        ("cluster.ranks=2 rollout.layout.tp=2", "more cluster.ranks"),
        ("cluster.ranks=4 trainer.layout.pp=2 trainer.layout.replicas=2 rollout.layout.pp=2", None),
        (
            "cluster.ranks=4 trainer.layout.pp=2 trainer.layout.replicas=2",
            "rollout.layout.pp=2 rollout.layout.grouping=strided",
        ),
    ],
)
def test_an_instance_is_whole_replicas(
    make_config: Callable[..., Config], overrides: str, wanted: str | None
) -> None:
    named = overrides.replace("G=", "rollout.layout.grouping=")
    if "G=" not in overrides:
        named += " rollout.layout.grouping=strided"
    config = make_config("run.dir=x", *named.split())
    reason = layout_obstacle(config, instances_of(config))
    assert (reason is None) == (wanted is None), reason
    assert wanted is None or wanted in (reason or "")


@pytest.mark.long
def test_what_it_says_would_do(make_config: Callable[..., Config]) -> None:
    """All small layouts are tried.

    Where no instance can train alone, the settings that the reason names let one do so, in an order
    of ranks that the engine can have.
    """
    checked = set()
    small = product((2, 4, 8), (1, 2), (1, 2, 4), (1, 2), (1, 2), ("native",))
    large = product((16,), (2,), (1,), (4,), (2,), ("native", "vllm"))
    for ranks, tp, replicas, gen_tp, pp, engine in (*small, *large):
        if ranks % (tp * replicas * pp) or ranks % (gen_tp * pp) or ranks == gen_tp * pp:
            continue
        layout = f"trainer.layout.tp={tp} trainer.layout.replicas={replicas}".split()
        layout.append(f"trainer.layout.pp={pp}")
        settings = ["run.dir=x", f"cluster.ranks={ranks}", f"rollout.layout.tp={gen_tp}"]
        settings += [f"rollout={engine}", "rollout.layout.grouping=strided"]
        config = make_config(*settings, *layout)
        reason = layout_obstacle(config, instances_of(config))
        if reason is None:
            continue
        checked.add((pp, engine))
        named = reason.partition("wanted ")[2].split()
        better = make_config(*settings, *layout, *named)
        assert layout_obstacle(better, instances_of(better)) is None, (settings, layout, reason)
        if better.rollout.features.ascending and pp > 1:
            axes, gen = TrainAxes.of(better.trainer.layout), better.rollout.layout
            check_ascending(axes, gen.pp, gen.tp, gen.grouping)
    assert checked == {(1, "native"), (2, "native"), (2, "vllm")}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("deterministic=strict", "deterministic=strict sums gradients in the order of"),
        ("trainer.layout.cp=2", "wanted trainer.layout.cp=1 (2)"),
        ("actor.lora.dropout=0.1", "wanted actor.lora.dropout=0 (0.1)"),
        ("trainer.epochs=1", "more cluster.ranks"),
        ("rollout=vllm", "more cluster.ranks"),
    ],
)
def test_other_settings(
    make_config: Callable[..., Config], tmp_path: Path, override: str, reason: str
) -> None:
    lora = ["actor.lora.rank=2"] if "lora" in override else []
    config = make_config("run.dir=x", "cluster.ranks=2", override, *lora)
    make_tiny_model(tmp_path, TinyModelConfig(), seed=0)
    assert reason in (early_settings(config, [[0, 1]], load_config(str(tmp_path))).obstacle or "")


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.usefixtures("command_line_signals")
def test_sigterm_while_an_instance_trains_early(
    run_of: Callable[..., Any],
    settings_of: Callable[..., list[str]],
    train_here: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is given up, the one before saved. The rest is as if nothing had happened."""
    settings = ["recipe=grpo", "recipe.group_size=2", *EARLY]
    whole = run_of("early", *settings)
    train_early, sent = RayExecutor.train_early, []

    def interrupted(self: RayExecutor, *call: Any) -> None:
        train_early(self, *call)
        if self.version == 1 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    monkeypatch.setattr(RayExecutor, "train_early", interrupted)
    whatever_it_costs(monkeypatch)
    again = [*settings_of(*settings), "trainer.resume=auto"]
    processes = set(psutil.Process().children(recursive=True))
    with pytest.raises(Interrupted, match="stopped after step 1;"):
        train_here(tmp_path, *again)
    assert sent
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000001"]
    left = set(psutil.Process().children(recursive=True)) - processes
    _, alive = psutil.wait_procs(left, timeout=10)
    # A verifier of the driver's own ends with it, which is this process.
    assert not [process.cmdline() for process in alive if process.ppid() != os.getpid()]
    monkeypatch.setattr(signals, "_requested_at", None)
    rest = train_here(tmp_path, *again)
    assert len(rest.steps) == 2
    assert sum(line["samples/trained_early"] for line in rest.metrics) > 0
    for name, weights in load_file(whole.dir / "final" / "model.safetensors").items():
        other = load_file(tmp_path / "final" / "model.safetensors")[name]
        torch.testing.assert_close(weights, other, atol=1e-5, rtol=0)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (("recipe=ppo", "recipe.num_samples=2"), "update_actor shares its ranks with the update"),
        pytest.param(
            ("recipe=dapo", "recipe.group_size=2"),
            "take may ask for another round",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ppo", "dapo"],
)
def test_what_needs_the_whole_batch_is_trained_late(
    run_of: Callable[..., Any], recipe: tuple[str, ...], reason: str
) -> None:
    """A critic on the same ranks, and groups that may be left out: three steps as serial has."""
    serial, early = run_of("serial", *recipe), run_of("early", *recipe, *EARLY)
    check_same(serial, early)
    assert (early.dir / "final" / "critic").exists() == ("recipe=ppo" in recipe)
    assert not early_spans(early)
    assert not any(line.get("samples/trained_early") for line in early.metrics)
    log = (early.dir / "logs" / "driver.log").read_text()
    assert f"schedule.early_backward has no effect: {reason}" in log
