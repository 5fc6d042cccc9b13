"""Runs on an emulated device: the real driver, ranks without a model."""

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from script_modules import load_script

from hybridrl.config import Config, ConfigError, TinyModelConfig, compose
from hybridrl.costs.instance import Costs
from hybridrl.driver import train as runs
from hybridrl.flow.executor import Sampling, Submit
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model
from hybridrl.plan import schedule as what_if
from hybridrl.preflight.prepare import prepare
from hybridrl.replay.step import ReplayRequest, replay
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.rundata import load
from hybridrl.telemetry.tables import timelines
from hybridrl.telemetry.trace import read_timeline
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.data_plane import LocalDataPlane
from hybridrl.workers.dispatch import dispatched_methods, runs_concurrently
from hybridrl.workers.emulated import EmulatedWorker
from hybridrl.workers.emulated_ranks import EmulatedRanks
from hybridrl.workers.emulation import (
    emulated_conversations,
    emulated_costs,
    emulated_workload,
    scaled_costs,
)

HERE = (
    "cluster=emulated", "cluster.ranks=4",
    "cluster.time_scale=0.001", "trainer.steps=3", "trainer.prompts_per_step=6",
    "rollout.max_new_tokens=2000", "rollout.max_running=8", "data.size=200", "data.eval_size=8",
    "telemetry.progress=false", "telemetry.loggers=[]", "telemetry.report=false",
)  # fmt: skip
# Calls for what an emulated run refuses, or has none of: checkpoints, digests, profiles, Parquet,
# endpoints, stages that share a pipeline plan.
REFUSED = {
    "compute_together", "digest_samples", "digest_weights", "end_profile", "finish_save", "load",
    "load_pending", "load_tensors", "load_weights", "record_samples", "reward_inputs",
    "save_pending", "save_state", "save_tensors", "save_weights", "start_profile",
}  # fmt: skip


def configured(*settings: str) -> Config:
    compose.register()
    return compose.check([*HERE, *settings])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a run with these settings, made once."""

    @functools.cache
    def train(*settings: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        result = runs.train(configured(*settings, f"run.dir={folder}"))
        assert result == {"emulated": True, "run": str(folder)}
        return folder

    return train


def lengths_by_prompt(run: Path) -> dict[int, list[int]]:
    """Response tokens of all steps by the prompt's position, in order of dispatch."""
    by_prompt: dict[int, list[int]] = {}
    for line in read_lines(run / "lengths.jsonl"):
        for prompt, tokens in zip(line["prompts"], line["lengths"], strict=True):
            by_prompt.setdefault(prompt, []).append(tokens)
    return by_prompt


def rewards(run: Path) -> list[float]:
    return [line["reward_mean"] for line in read_lines(run / "metrics.jsonl")]


GRPO = ("recipe.group_size=4", "recipe.kl_coef=0.1")
PPO = (
    "recipe=ppo", "recipe.num_samples=4", "reward=model", "reward.model=none",
    'cluster.costs="gpu:model=8b,critic=8b"',
)  # fmt: skip


@pytest.mark.parametrize("recipe", [GRPO, PPO], ids=["grpo", "ppo"])
def test_fused_has_the_batch_of_serial(
    trained: Callable[..., Path], recipe: tuple[str, ...]
) -> None:
    serial, fused = (trained(f"schedule={name}", *recipe) for name in ("serial", "fused"))
    assert lengths_by_prompt(serial) == lengths_by_prompt(fused)
    assert rewards(serial) == rewards(fused)
    assert len(rewards(serial)) == 3


GUESSES = (
    "rollout.speculate=auto",
    'cluster.lengths="lognormal:median=200,sigma=0.9899,accept=0.6"',
)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["serial", "fused", "packed"])
def test_guesses_change_no_batch(trained: Callable[..., Path], schedule: str) -> None:
    """Their calls are named by what they verified, and as many are right as the lengths say."""
    without = trained(f"schedule={schedule}", *GRPO, GUESSES[1])
    run = trained(f"schedule={schedule}", *GRPO, *GUESSES)
    assert lengths_by_prompt(run) == lengths_by_prompt(without)
    assert rewards(run) == rewards(without)
    spans, _ = read_timeline(run / "trace.json")
    names = {span.name for span in spans if span.name.startswith("verify ")}
    assert names
    assert not {s.name for s in read_timeline(without / "trace.json")[0]} & names
    lines = read_lines(run / "metrics.jsonl")
    counts = [[int(n) for n in name.removeprefix("verify ").split("/")] for name in names]
    assert all(0 <= right <= drafted for right, drafted in counts)
    assert sum(line["samples/accepted_tokens"] for line in lines) > 0
    costs = json.loads((run / "costs.json").read_text())["costs"]
    assert costs["drafting"]["accept"] == pytest.approx(0.6, rel=0.02)
    legend = timelines(load(run))[0]["stages"]
    assert "verify" in legend
    assert not names & set(legend)


def test_lengths_are_those_of_the_workload(trained: Callable[..., Path]) -> None:
    workload = emulated_workload(configured(*GRPO), 4)
    for prompt, tokens in lengths_by_prompt(trained("schedule=serial", *GRPO)).items():
        wanted = [min(2000, workload.length_of(SampleId(prompt, k=k))) for k in range(4)]
        assert tokens == wanted


@pytest.mark.long
def test_the_plan_packs_the_same_prompts(
    trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step: what a length ranker knows of prompts is the same."""
    lengths = 'cluster.lengths="lognormal:median=200,sigma=0.9899,alike=0.5"'
    settings = ("schedule=packed", *GRPO, lengths, "trainer.steps=12")
    trains = [
        sorted({*line["prompts"]}) for line in read_lines(trained(*settings) / "lengths.jsonl")
    ]
    planned = list[list[int]]()

    def note(setting: Any, executor: Any, result: Any, seconds: float) -> dict[str, float]:
        planned.append(sorted({sample.id.prompt for sample in result.samples}))
        return {}

    monkeypatch.setattr(what_if, "_measure", note)
    config = configured(*settings)
    config.resolve_device(0, "this machine")
    steps = load_script("bench/emulated_steps.py")
    what_if.replay_steps(steps.setting_of(config, ("reference",)), config.schedule)
    assert trains == planned
    in_order = [[*range(6 * step, 6 * step + 6)] for step in range(12)]
    assert trains != in_order  # some were put off


RECORDED = Path(__file__).parents[1] / "plan" / "recorded_run"


def test_a_recorded_run_gives_costs_and_lengths(trained: Callable[..., Path]) -> None:
    """Prompts come in its order, eight samples each; decode steps take what they took there."""
    of_run = (f"cluster.costs={RECORDED}", f"cluster.lengths={RECORDED}", "recipe.group_size=8")
    run = trained("schedule=fused", *of_run, "recipe.kl_coef=0.1", "cluster.time_scale=0.1")
    recorded = [n for line in read_lines(RECORDED / "lengths.jsonl") for n in line["lengths"]]
    by_prompt = lengths_by_prompt(run)
    assert len(by_prompt) == 18
    for prompt, tokens in by_prompt.items():
        assert tokens == recorded[8 * prompt : 8 * prompt + 8]
    config = configured(*of_run, "recipe.kl_coef=0.1")
    costs = emulated_costs(config)
    measured = json.loads((RECORDED / "costs.json").read_text())["costs"]
    assert (costs.step_s, costs.row_s) == (measured["step_s"], measured["row_s"])
    lines = read_lines(run / "metrics.jsonl")
    decoding = sum(line["generate_s"] for line in lines)
    longest = sum(max(line["lengths"]) for line in read_lines(run / "lengths.jsonl"))
    assert decoding >= 0.1 * longest * measured["step_s"]


TURNS = ('cluster.turns="turns=4,reply=32,wait=2"',)


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_responses_have_the_turns_of_the_plan(trained: Callable[..., Path], schedule: str) -> None:
    """Turns, replies and lengths are those of `plan schedule --turns`, under both schedules."""
    config = configured(*GRPO, *TURNS)
    workload, model = emulated_workload(config, 4), emulated_conversations(config)
    assert model is not None
    run = trained(f"schedule={schedule}", *GRPO, *TURNS)
    num_turns = num_replied = 0
    for prompt, tokens in lengths_by_prompt(run).items():
        for k, got in enumerate(tokens):
            id = SampleId(prompt, k=k)
            turns, _ = model.of(id, workload.length_of(id)).cut_at(2000)
            replies = sum(turn.reply_tokens or 0 for turn in turns)
            assert got == sum(turn.tokens for turn in turns) + replies
            num_turns, num_replied = num_turns + len(turns), num_replied + replies
    lines = read_lines(run / "metrics.jsonl")
    assert sum(line["environment/turns"] for line in lines) == num_turns
    assert sum(line["environment/reply_tokens"] for line in lines) == num_replied
    assert all(line["environment/wait_p99_s"] > 0 for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "waited"),
    [
        (("schedule=packed", "schedule.limit_tokens=500"), "samples/put_off"),
        (("schedule=partial",), "samples/parked"),
    ],
    ids=["packed", "partial"],
)
def test_prompts_wait_by_tokens_alone(
    trained: Callable[..., Path], schedule: tuple[str, ...], waited: str
) -> None:
    """Steps that take three times as long have the same prompts, whichever had to wait."""
    quick, slow = (
        trained(*schedule, f"cluster.time_scale={scale}", "recipe.group_size=4")
        for scale in (0.001, 0.003)
    )
    steps = [
        [(line["step"], line["prompts"], line["lengths"]) for line in read_lines(f)]
        for f in (quick / "lengths.jsonl", slow / "lengths.jsonl")
    ]
    assert len(steps[0]) == 3
    assert steps[0] == steps[1]
    assert sum(line[waited] for line in read_lines(quick / "metrics.jsonl")) > 0


@pytest.mark.long
def test_all_that_is_written_says_emulated(trained: Callable[..., Path], tmp_path: Path) -> None:
    from hybridrl.plan import schedule_command
    from hybridrl.telemetry.compare import grouped
    from hybridrl.telemetry.report import render
    from hybridrl.telemetry.rundata import load
    from hybridrl.telemetry.trace import read_trace

    run = trained("schedule=serial", *GRPO)
    for file in ("run.json", "environment.json", "costs.json"):
        assert json.loads((run / file).read_text())["emulated"] is True
    assert all(line["emulated"] == 1.0 for line in read_lines(run / "metrics.jsonl"))
    assert "emulated: 4 ranks" in (run / "events.jsonl").read_text()
    assert {line["prompt"] for line in read_lines(run / "samples.jsonl")} == {"[emulated]"}
    assert "(emulated) · hybridrl</title>" in render(run).read_text()
    assert all(line["emulated"] for line in read_lines(run / "lengths.jsonl"))
    labels = [e["args"] for e in read_trace(run / "trace.json") if e["name"] == "process_labels"]
    assert len(labels) >= 5  # the driver and four ranks
    assert all(args == {"labels": "emulated"} for args in labels)
    _, told, _ = schedule_command.run([f"--lengths={run}"], lambda done, total: None)
    assert any("the run took" in line and line.endswith("on emulated ranks") for line in told)
    for groups in (grouped([load(run)]), grouped([load(run), load(trained("schedule=fused"))])):
        assert all(group.label.endswith(" (emulated)") for group in groups)
    assert not (run / "final").exists()


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("eval.sets.main.num_prompts=8", "eval.sets=main: wanted none"),
        ("trainer.resume=auto", "trainer.resume=auto: wanted never"),
        ("trainer.save_every=2", "trainer.save_every=2: wanted 0"),
        ("warm_start.steps=2", "warm_start.steps=2: wanted 0"),
        ("deterministic=strict", "deterministic=strict: wanted off"),
        ("telemetry.digests=true", "telemetry.digests=true: wanted false"),
        ("telemetry.profile.steps=[1]", "telemetry.profile.steps=[1]: wanted none"),
        ("rollout=vllm", "rollout.engine=vllm: wanted native"),
        ("telemetry.samples=all", "telemetry.samples=all: wanted first"),
        ("cluster.device=cpu", "cluster.device=cpu: wanted cuda"),
        ("cluster.memory_check=warn", "cluster.memory_check=warn: wanted refuse"),
        ("cluster.address=auto", "cluster.address=auto: wanted null"),
        ("cluster.rank_order=[3,2,1,0]", "cluster.rank_order=[3, 2, 1, 0]: wanted none"),
        ("trainer.fuse_updates=always", "trainer.fuse_updates=always: wanted never"),
        ("reward=http", "reward"),
        ("cluster.ranks_per_process=2", "no such key: it is gone, all emulated ranks are in"),
        ("cluster.time_scale=0", "cluster.time_scale=0"),
        ("cluster=local", "cluster.time_scale=0.001: wanted cluster=emulated with it"),
        ("environment=grid", "environment.kind=grid: wanted none"),
    ],
)
def test_what_asks_for_a_model_is_refused(setting: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(*setting.split(" "))
    assert allowed in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("rollout.layout.tp=3", "rollout.layout=1 x 3: wanted pp x tp that divides cluster.ranks"),
        ("rollout.layout.pp=3", "rollout.layout=3 x 1: wanted pp x tp that divides cluster.ranks"),
        ("rollout.layout.tp=2 rollout.tail_tp=3", "rollout.tail_tp=3: wanted off, auto, or a mult"),
        ("rollout.tail_tp=8", "rollout.tail_tp=8: wanted off, auto, or at most 4: cluster.ranks=4"),
        ("rollout.tail_tp=3 schedule=serial", "rollout.tail_tp=3: wanted off with schedule=serial"),
        ("trainer.layout.tp=3", "trainer.layout=1 x 1 x ? x 3: wanted pp x replicas x fsdp x tp"),
    ],
)
def test_a_wrong_layout_is_named_before_the_ranks(setting: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured("schedule=fused", *setting.split(" "))
    assert str(refused.value).startswith(allowed)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ("rollout.tail_tp=3", "rollout.tail_tp=3: wanted off, 2, 4, 8, 16, 32 (it must divide the"),
        ("rollout.layout.tp=3", "rollout.layout.tp=3: wanted one of 1, 2, 4, 8, 16, 32 (it must"),
        ("rollout.layout.pp=48", "rollout.layout.pp=48: wanted at most 32 (32 layers)"),
        ("trainer.layout.tp=3", "trainer.layout.tp=3: wanted one of 1, 2, 4, 8 (it must"),
        ("roles.critic.layout.tp=3", "roles.critic.layout.tp=3: wanted one of 1, 2, 4, 8 (it must"),
        (
            "roles.critic.layout.pp=48 roles.critic.layout.fsdp=1",
            "roles.critic.layout.pp=48: wanted at most 32 (32 layers)",
        ),
    ],
)
def test_axes_split_the_model_of_the_costs(settings: str, allowed: str, tmp_path: Path) -> None:
    own = ["cluster.ranks=48", "schedule=fused", *PPO, f"run.dir={tmp_path}"]
    with pytest.raises(ConfigError) as refused:
        prepare(configured(*own, *settings.split()))
    assert str(refused.value).startswith(allowed)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("cluster.costs=nowhere", "cluster.costs=nowhere"),
        ("cluster.lengths=nowhere", "cluster.lengths=nowhere"),
        ("cluster.turns=4", "cluster.turns=4: wanted turns=N,reply=TOKENS"),
        ('cluster.costs="gpu:model=8b,total=64"', "a roofline of 4 instances of 1"),
        ("recipe=ppo", "costs of stage values, or of its role critic"),
        (
            "schedule=packed schedule.limit_tokens=9 "
            'cluster.lengths="lognormal:median=90,sigma=0.04"',
            "the longest responses of prompts of cluster.lengths",
        ),
        (
            "schedule=packed schedule.limit_tokens=99 "
            'cluster.lengths="lognormal:median=9,sigma=1,max=99"',
            "below 99, the longest responses of prompts of cluster.lengths",
        ),
        ("rollout.speculate=4", "rollout.speculate=4: wanted off, or accept=P in cluster.lengths"),
    ],
)
def test_costs_and_lengths_are_read_before_ranks_start(
    setting: str, allowed: str, tmp_path: Path
) -> None:
    own = [] if setting.startswith("recipe") else ["recipe.group_size=4"]
    with pytest.raises(ConfigError) as refused:
        runs.train(configured(*setting.split(), *own, f"run.dir={tmp_path}"))
    assert allowed in str(refused.value)


def test_a_replay_is_refused(trained: Callable[..., Path]) -> None:
    run = trained("schedule=serial", *GRPO)
    with pytest.raises(ConfigError, match=f"^run={run}: wanted a run of ranks with a model"):
        replay(ReplayRequest(run_dir=run, step=1))


def test_evaluation_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster=emulated: wanted another cluster"):
        runs.evaluate_only(configured())


def test_an_emulated_rank_takes_the_calls_of_a_rank() -> None:
    for real in (ActorWorker, CriticWorker):
        for name, mode in dispatched_methods(real).items():
            if name in REFUSED:
                continue
            own, theirs = getattr(EmulatedWorker, name), getattr(real, name)
            assert dispatched_methods(EmulatedWorker)[name] is mode
            assert runs_concurrently(EmulatedWorker, name) == runs_concurrently(real, name)
            assert [*inspect.signature(own).parameters] == [*inspect.signature(theirs).parameters]


class Clocked:
    """The ranks of one process, at times that the test sets."""

    def __init__(self, *settings: str) -> None:
        self.config = configured(*settings)
        self.config.resolve_device(0, "this machine")
        self.costs: Costs = scaled_costs(self.config)
        self.ranks = EmulatedRanks(range(4), self.config, LocalDataPlane())
        self.replies: dict[str, Any] = {}

    def call(self, key: str, rank: int, name: str, *args: Any, now: float) -> None:
        def done(reply: Any, error: Exception | None) -> None:
            self.replies[key] = reply if error is None else error

        self.ranks.call(rank, name, args, {}, now, done)


def submit(*ids: SampleId) -> Submit:
    return Submit(ids, None, Sampling(max_new_tokens=10))


def test_an_instance_begins_when_all_its_ranks_are_called_and_ends_when_the_model_says() -> None:
    from hybridrl.flow import Flow

    clocked = Clocked("rollout.layout.tp=2", "cluster.time_scale=1")
    flow = Flow()
    flow.collect(flow.actor.generate(flow.prompts, num_samples=2))
    for rank in range(4):
        clocked.call(f"begin {rank}", rank, "begin", flow.graph, {}, False, now=0.0)
    clocked.ranks.end_due(0.0)
    command = submit(SampleId(0, k=0), SampleId(0, k=1))
    clocked.call("first", 0, "advance", 0, [command], 64, now=1.0)
    assert clocked.ranks.next_end is None
    clocked.call("second", 1, "advance", 0, [command], 64, now=3.0)
    end = clocked.ranks.next_end
    assert end is not None
    clocked.call("after", 0, "release", (), now=3.5)
    clocked.ranks.end_due(end + 100)  # someone looks late
    spans = {key: clocked.replies[key].spans[0] for key in ("first", "second")}
    work = clocked.replies["first"].value.event.work
    assert spans["first"].start == spans["second"].start == 3.0
    assert work.decode_steps == 10
    assert work.rows == 20
    assert end == pytest.approx(3.0 + work.seconds)
    # Each finished sample is on one of the ranks: (prompt + k) modulo their number.
    finished = [clocked.replies[k].value.event.finished for k in ("first", "second")]
    assert [[f.id.k for f in mine] for mine in finished] == [[0], [1]]
    assert clocked.replies["after"].value == 1


def test_concurrent_calls_do_not_wait_for_a_busy_rank() -> None:
    from hybridrl.flow.executor import Phase

    clocked = Clocked("cluster.time_scale=1")
    clocked.call("switch", 0, "enter", Phase.GENERATE, now=0.0)
    clocked.call("fetch", 0, "import_samples", (), (), now=0.0)
    clocked.call("next", 0, "enter", Phase.TRAIN, now=0.0)
    clocked.ranks.end_due(0.0)
    assert [*clocked.replies] == ["fetch"]
    clocked.ranks.end_due(clocked.costs.switch_s)
    assert [*clocked.replies] == ["fetch", "switch", "next"]


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        (GRPO, ("reference",)),
        pytest.param(
            (*PPO, "trainer.fuse_updates=never"),
            ("reference", "reward", "critic"),
            marks=pytest.mark.layouts,
        ),
    ],
    ids=["grpo", "ppo, updates one by one"],
)
def test_a_step_takes_what_the_plan_says(
    trained: Callable[..., Path], settings: tuple[str, ...], stages: Sequence[str]
) -> None:
    """Measured, of the second step: 1.00 and 1.02 of the plan, on two cores at a load of eight."""
    steps = load_script("bench/emulated_steps.py")
    settings = (*settings, "cluster.time_scale=0.2", "schedule=serial", "trainer.steps=2")
    seconds = [line["step_s"] for line in read_lines(trained(*settings) / "metrics.jsonl")]
    config = configured(*settings)
    config.resolve_device(0, "this machine")
    assert fmean(seconds[1:]) == pytest.approx(steps.predict(config, stages), rel=0.05)


# -- the device that is imitated ------------------------------------------------------------------

LARGE = (
    'cluster.costs="gpu:model=qwen2.5-32b"', "cluster.ranks=32", "rollout.layout.tp=4",
    "rollout.max_new_tokens=16384", "recipe.group_size=8", "schedule=fused",
)  # fmt: skip


@pytest.mark.long
def test_a_layout_larger_than_the_gpu_is_refused(tmp_path: Path) -> None:
    """A whole training replica of 32 billion parameters takes more than four GPUs of 80 GB."""
    prepare(configured(*LARGE, f"run.dir={tmp_path / 'fits'}"))
    early = ("schedule.early_backward=auto", "trainer.layout.replicas=8")
    with pytest.raises(ConfigError) as refused:
        runs.train(configured(*LARGE, *early, f"run.dir={tmp_path / 'own'}"))
    line = str(refused.value)
    assert line.startswith("cluster.memory_check=refuse: wanted")
    assert "the largest phase, train actor, needs" in line
    assert not (tmp_path / "own" / "run.json").exists()  # no rank has started


def test_the_critic_of_the_costs_is_counted(tmp_path: Path) -> None:
    own = ("cluster.ranks=4", *PPO[:-1], f"run.dir={tmp_path}")
    prepare(configured(*own, 'cluster.costs="gpu:model=7b,critic=7b"'))
    with pytest.raises(ConfigError, match=r"^cluster.memory_check=refuse: .*critic"):
        prepare(configured(*own, 'cluster.costs="gpu:model=7b,critic=65b"'))


def test_a_model_of_ones_own_gives_the_tokenizer(tmp_path: Path) -> None:
    """Sizes are those of the costs: `RUN/start` has both, and no weights."""
    make_tiny_model(tmp_path / "model", TinyModelConfig(), 0)
    own = (f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}")
    path = Path(prepare(configured(*own, *GRPO)).model_path)
    assert path == tmp_path / "run" / "start"
    assert json.loads((path / "config.json").read_text())["num_attention_heads"] == 32
    assert (path / "tokenizer.json").is_file()
    assert not [*path.glob("*.safetensors")]
