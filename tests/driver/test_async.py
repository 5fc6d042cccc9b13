"""Generation on ranks of its own: which weights made each token, what is trained, and resumes."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, Glm4MoeConfig, Glm4MoeForCausalLM
from whole_runs import USER_CODE, goes_on

from hybridrl.config import TinyModelConfig
from hybridrl.config.stored_run import composed_run
from hybridrl.layout.push import WeightsDamaged
from hybridrl.models.buffers import persistent_buffers, routing_biases
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.telemetry.records import read_lines
from hybridrl.workers import base_worker
from hybridrl.workers.trainer_worker import TrainerWorker

pytestmark = pytest.mark.long

STEPS, PROMPTS, GROUP = 5, 4, 4
ASYNC = [
    f"trainer.steps={STEPS}", "trainer.save_every=1", f"trainer.keep_last={STEPS}",
    "cluster.ranks=2", "cluster.pools.rollout=1",
]  # fmt: skip
STALENESS = {"schedule=periodic": 0, "schedule=one_step": 1, "schedule=async": 2}
SCHEDULES = [[name] for name in STALENESS]
SCHEDULES[-1].append("schedule.max_staleness=2")


def settings_of(long_tail: list[str], *more: str) -> list[str]:
    ours = tuple(setting.partition("=")[0] + "=" for setting in ASYNC)
    return [setting for setting in long_tail if not setting.startswith(ours)] + [*ASYNC, *more]


def start(train: Callable[..., Any], long_tail: list[str], folder: Path, *more: str) -> Any:
    return train(folder, *settings_of(long_tail, *more))


def write_settings(run: Any, long_tail: list[str], *more: str) -> None:
    """Have the settings that a run was started with in its directory, as the command line does."""
    composed_run([*settings_of(long_tail, *more), "cluster=processes", f"run.dir={run.dir}"])


def version_of(sample: Any) -> int:
    """The one version of all spans, which are turns of the model and replies between them."""
    (version,) = {span.version for span in sample.spans}
    return int(version)


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
            spans = sample.spans
            assert (spans[0].start, spans[-1].stop) == (0, sample.response_tokens)
            assert version_of(sample) == updates * behind, (number, sample.id)
        assert line["samples/staleness"] == number - behind
        stale = line["samples/off_policy_tokens"] > 0
        assert stale == (number > behind)
    assert run.stored == [0] * len(run.stored)


def models_of(run: Any) -> list[Any]:
    """The weights of every version, in float64; grouped products of experts have no such kernel."""
    folders = ["start", *(f"checkpoints/step_{step:06d}" for step in range(1, STEPS))]
    load = functools.partial(AutoModelForCausalLM.from_pretrained, experts_implementation="eager")
    return [load(run.dir / folder).double().eval() for folder in folders]


@torch.no_grad()
def check_log_probs(run: Any) -> None:
    """Against transformers in float64, under the version that made each sample."""
    models, apart = models_of(run), 0.0
    for sample in (sample for step in run.steps for sample in step.samples):
        tokens, log_probs, _ = json.loads(sample.scalars["told"])
        recorded = torch.tensor(log_probs, dtype=torch.float64)
        drawn = torch.tensor(tokens[sample.prompt_tokens :])

        def under(model: Any, ids: list[int] = tokens, sample: Any = sample) -> torch.Tensor:
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            return scores[sample.prompt_tokens - 1 : -1]

        told = 0  # replies have no log-probability
        for span in (span for span in sample.spans if span.trained):
            own = slice(span.start, span.stop)
            wanted = under(models[span.version]).gather(1, drawn[:, None])[own, 0]
            of_span = recorded[told : told + len(wanted)]
            torch.testing.assert_close(of_span, wanted, atol=1e-5, rtol=0)
            told += len(wanted)
            if span.version:
                other = under(models[span.version - 1]).gather(1, drawn[:, None])[own, 0]
                apart = max(apart, float((wanted - other).abs().max()))
        assert told == len(recorded)
    assert apart > 1e-3  # so that one version cannot be mistaken for another


TALKING = [
    "environment=function", f"environment.path={Path(__file__).parents[1] / 'talking.py'}:talk",
    "environment.max_turn_tokens=8", "+environment.params={turns: 4, ends: 0.2, fails: 0}",
]  # fmt: skip
LAYOUTS = {
    "1 + 1": [],
    "conversations": TALKING,
    "conversations, two instances": [
        *TALKING, "+environment.params.sleep=0.02", "cluster.ranks=4", "cluster.pools.rollout=2",
    ],
    "2 + 2": ["cluster.ranks=4", "cluster.pools.rollout=2"],
    "fsdp 2, tp 2": ["cluster.ranks=4", "cluster.pools.rollout=2", "rollout.layout.tp=2"],
    "tp 2, two instances": [
        "cluster.ranks=4", "cluster.pools.rollout=2", "trainer.layout.tp=2",
        "cluster.pool_of={reward: reward}", "cluster.ranks=5", "cluster.pools.reward=1",
    ],
    "pp 2, one instance": ["cluster.ranks=3", "cluster.pools.rollout=1", "trainer.layout.pp=2"],
    "one trains, three generate": ["cluster.ranks=4", "cluster.pools.rollout=3"],
    "experts": [
        "model=tiny_moe", "cluster.ranks=4", "cluster.pools.rollout=2", "trainer.layout.ep=2",
        "rollout.layout.tp=2", "rollout.layout.ep=2",
    ],
    "adapters": ["actor.lora.rank=8", "actor.lora.alpha=64", "trainer.optim.lr=20000"],
}  # fmt: skip
ADAPTERS_TALK = [*LAYOUTS["adapters"], *LAYOUTS["conversations, two instances"]]
SPLITS = {
    "2 + 2, adapters, conversations": ADAPTERS_TALK,
    "1 + 3, adapters, conversations": [*ADAPTERS_TALK, "cluster.pools.rollout=3"],
}
"""Splits of four ranks, each with adapters and conversations at once."""
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


def make_biased_model(folder: Path) -> Path:
    """A model whose routers have a bias that chooses experts, and is no parameter."""
    tokenizer = make_char_tokenizer(TinyModelConfig().alphabet, 128)
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1,
        first_k_dense_replace=0, max_position_embeddings=128, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )  # fmt: skip
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_routing_biases_go_along_with_a_push(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """A checkpoint has those of its version, with which transformers chooses experts."""
    path = make_biased_model(tmp_path / "model")
    biased = [f"model.path={path}", "trainer.router_bias_update_rate=0.25"]
    run = start(train_here, long_tail, tmp_path / "run", "schedule=one_step", *biased)
    check_versions(run, 1)
    (run.dir / "start").symlink_to(path)
    check_log_probs(run)
    biases = [routing_biases(persistent_buffers(model)) for model in models_of(run)]
    assert len(biases[0]) == 2
    for name, first in biases[0].items():
        assert max(float((other[name] - first).abs().max()) for other in biases) >= 0.25


IN_FLIGHT = [
    "schedule=async", "schedule.max_staleness=2", "schedule.new_weights=in_flight",
    "rollout.decode_steps=2",
]  # fmt: skip


def check_in_flight(run: Any, staleness: int, updates: int = 1) -> None:
    """No token is older than allowed, and some responses are of several versions."""
    reached = 0
    for number, (step, line) in enumerate(zip(run.steps, run.metrics, strict=True)):
        batch = range(number * PROMPTS, (number + 1) * PROMPTS)
        assert {s.id.prompt for s in step.samples} == {*batch}
        spans = [span for sample in step.samples for span in sample.spans]
        ages = [number - span.version // updates for span in spans]
        assert 0 <= min(ages) <= max(ages) <= staleness
        assert line["samples/staleness"] == max(ages)
        sizes = [(span.stop - span.start) * span.trained for span in spans]
        mean = sum(age * size for age, size in zip(ages, sizes, strict=True)) / sum(sizes)
        assert line["samples/mean_staleness"] == pytest.approx(mean)
        reached = max(reached, *ages)
    assert reached > 0
    assert any(len(sample.spans) > 1 for step in run.steps for sample in step.samples)
    num_tokens = sum(sample.model_tokens for step in run.steps for sample in step.samples)
    assert sum(line["samples/generated_tokens"] for line in run.metrics) == num_tokens
    assert all(line["tokens_per_s/rollout"] >= 0 <= line["training_wait_s"] for line in run.metrics)
    assert max(line["training_wait_s"] for line in run.metrics) > 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[] if not layout else pytest.mark.layouts)
        for name, layout in (LAYOUTS | SPLITS).items()
        if name not in ("adapters", "conversations, two instances")  # of `SPLITS`
    ],
)
def test_weights_change_under_samples(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, layout: list[str]
) -> None:
    run = start(train_here, long_tail, tmp_path / "run", *IN_FLIGHT, *layout)
    check_in_flight(run, 2)
    check_log_probs(run)


@torch.no_grad()
def check_kept(run: Any, updates: int = 1, block: int = 1) -> None:
    """Against transformers in float64, on a cache of which each version has made its part.

    The last token of a version has no keys and values before the next version computes them, nor
    has a reply. A version that `recomputed` a lost cache has made all of it. Of a conversation that
    waits for a reply whole blocks of so many tokens stay.
    """
    models, apart = models_of(run), 0.0
    for sample in (sample for step in run.steps for sample in step.samples):
        tokens, log_probs, _ = json.loads(sample.scalars["told"])
        recorded = torch.tensor(log_probs, dtype=torch.float64)
        drawn = torch.tensor(tokens[sample.prompt_tokens :])
        cache, done, told, last_stop = DynamicCache(), 0, 0, 0
        for span in (span for span in sample.spans if span.trained):
            stop, own = sample.prompt_tokens + span.stop - 1, slice(span.start, span.stop)

            def of_own(logits: torch.Tensor, drawn: torch.Tensor = drawn[own]) -> torch.Tensor:
                scores = logits[0, -len(drawn) :].log_softmax(-1)
                return scores.gather(1, drawn[:, None])[:, 0]

            model = models[span.version // updates]
            if span.recomputed:
                cache, done = DynamicCache(), 0
            elif span.start > last_stop:
                done -= done % block
                cache.crop(done)
            last_stop = span.stop
            wanted = of_own(model(torch.tensor([tokens[done:stop]]), past_key_values=cache).logits)
            of_span = recorded[told : told + len(wanted)]
            torch.testing.assert_close(of_span, wanted, atol=1e-5, rtol=0)
            again = of_own(model(torch.tensor([tokens[:stop]])).logits)
            apart = max(apart, float((again - wanted).abs().max()))
            done, told = stop, told + len(wanted)
        assert told == len(recorded)
    assert apart > 1e-3  # so that a cache that was computed again cannot be mistaken for a kept one


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["1 + 1", "fsdp 2, tp 2", *SPLITS])
def test_weights_change_and_caches_stay(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, layout: str
) -> None:
    kept = [*IN_FLIGHT, "schedule.parked_kv=keep", *(LAYOUTS | SPLITS)[layout]]
    run = start(train_here, long_tail, tmp_path / "run", *kept)
    check_in_flight(run, 2)
    check_kept(run)


VLLM = ["rollout=vllm", "model.tiny.head_dim=32"]  # its attention has no smaller ones
VLLM_BLOCK = 32


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kv", "layout"),
    [
        ("recompute", "1 + 1"),
        ("keep", "1 + 1"),
        pytest.param("recompute", "2 + 2", marks=pytest.mark.wide),
        ("keep", "2 + 2"),
    ],
)
def test_weights_of_vllm_change_under_samples(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, kv: str, layout: str
) -> None:
    settings = [*IN_FLIGHT, *VLLM, f"schedule.parked_kv={kv}", "eval.sets.main.every=2"]
    settings += LAYOUTS[layout]
    run = start(train_here, long_tail, tmp_path / "run", *settings)
    check_in_flight(run, 2)
    {"recompute": check_log_probs, "keep": check_kept}[kv](run)
    # Evaluations park samples, whose caches vLLM does not hand out.
    spans = [span for step in run.steps for sample in step.samples for span in sample.spans]
    assert any(span.recomputed for span in spans) == (kv == "keep")


@pytest.mark.wide
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kv", "layout"),
    [
        ("recompute", LAYOUTS["1 + 1"]),
        ("recompute", [*LAYOUTS["one trains, three generate"], *LAYOUTS["adapters"]]),
        ("keep", [*LAYOUTS["one trains, three generate"], *LAYOUTS["adapters"]]),
        ("keep", [*LAYOUTS["2 + 2"], *LAYOUTS["adapters"]]),
    ],
    ids=[
        "recompute", "recompute, one trains, three generate, adapters",
        "keep, one trains, three generate, adapters", "keep, 2 + 2, adapters",
    ],
)  # fmt: skip
def test_weights_of_vllm_change_under_conversations(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    kv: str,
    layout: list[str],
) -> None:
    """Amid turns, and while a reply is awaited: of such a conversation full blocks stay."""
    talking = [*TALKING, "+environment.params.sleep=0.05", "environment.max_turn_tokens=12"]
    settings = [*IN_FLIGHT, *VLLM, *talking, "rollout.stop=[]", f"schedule.parked_kv={kv}", *layout]
    run = start(train_here, long_tail, tmp_path / "run", *settings)
    check_in_flight(run, 2)
    if kv == "recompute":
        check_log_probs(run)
    else:
        check_kept(run, block=VLLM_BLOCK)
    samples = (sample for step in run.steps for sample in step.samples)
    pairs = (pair for s in samples for pair in pairwise(span for span in s.spans if span.trained))
    changes = {after.start > span.stop for span, after in pairs if after.version != span.version}
    assert changes == {False, True}  # within a turn, and between two


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
    strict = [*STRICT, "trainer.save_every=0"]
    shared = start(
        train_here, long_tail, tmp_path / "shared", *strict, "schedule=serial",
        "cluster.ranks=1", "cluster.pools.rollout=0",
    )  # fmt: skip
    for schedule in ("serial", "periodic"):
        apart = start(train_here, long_tail, tmp_path / schedule, *strict, f"schedule={schedule}")
        assert different(shared, apart) == []
        if schedule == "periodic":
            check_versions(apart, 0, updates=2)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["conversations", "conversations, two instances"])
def test_conversations_of_periodic_are_those_of_serial(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, layout: str
) -> None:
    """Replies come when they come; turns, tokens, rewards and weights are bit for bit those."""
    shared = start(
        train_here, long_tail, tmp_path / "shared", *STRICT, *TALKING, "schedule=serial",
        "cluster.ranks=1", "cluster.pools.rollout=0",
    )  # fmt: skip
    apart = start(
        train_here, long_tail, tmp_path / "apart", *STRICT, *LAYOUTS[layout],
        f"cluster.ranks={1 + 1 + ('two' in layout)}", "schedule=periodic",
    )  # fmt: skip
    assert different(shared, apart) == []
    check_versions(apart, 0, updates=2)
    assert {len(s.spans) for step in apart.steps for s in step.samples} == {1, 3, 5, 7}
    for line in apart.metrics:
        assert line["environment/turns"] > 2 * line["environment/episodes"] > 0


@pytest.mark.layouts
def test_adapters_alone_are_pushed(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """What generates is bit for bit what a switch makes; bytes are those of the adapters."""
    adapters = ["actor.lora.rank=4", *STRICT, "trainer.save_every=0"]
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
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(SCHEDULES[1], marks=pytest.mark.wide), SCHEDULES[2]],
    ids=lambda names: names[0],
)
def test_a_run_repeats_and_resumes_bit_for_bit(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, schedule: list[str]
) -> None:
    """From scratch, and from a checkpoint with samples that older weights than its own make."""
    once = start(train_here, long_tail, tmp_path / "once", *STRICT, *schedule)
    check_versions(once, STALENESS[schedule[0]], updates=2)
    again = start(
        train_here, long_tail, tmp_path / "again", *STRICT, *schedule, "trainer.save_every=0"
    )
    assert different(once, again) == []
    point = once.dir / "checkpoints" / "step_000002"
    state = json.loads((point / "resume" / "state.json").read_text())
    assert state["schedule"]["batches"]
    assert goes_on(point), "no sample goes on with its tokens"
    resumed = start(
        train_here, long_tail, tmp_path / "resumed", *STRICT, *schedule, f"trainer.resume={point}"
    )
    a, b = weights(once), weights(resumed)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert len(resumed.steps) == STEPS - 2


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("kv", "layout"),
    [("recompute", []), pytest.param("keep", [], marks=pytest.mark.wide),
     pytest.param(
        "recompute", ["cluster.ranks=4", "cluster.pools.rollout=2", "rollout.layout.pp=2"],
        marks=pytest.mark.wide,
     )],
    ids=["recompute", "keep", "pp 2"],
)  # fmt: skip
def test_a_record_is_followed_bit_for_bit(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    kv: str,
    layout: list[str],
) -> None:
    """By two instances in place of one, and resumed amid samples that rest."""
    flying = [*STRICT, *IN_FLIGHT, f"schedule.parked_kv={kv}"]
    flying += layout
    first = start(train_here, long_tail, tmp_path / "first", *flying)
    check_in_flight(first, 2, updates=2)
    write_settings(first, long_tail, *flying)
    more = [] if layout else ["cluster.ranks=3", "cluster.pools.rollout=2"]
    flying += [f"schedule.follow={first.dir}", *more]
    again = start(train_here, long_tail, tmp_path / "again", *flying)
    assert different(first, again) == []
    if kv == "keep":  # a checkpoint has no keys and values
        return
    point = again.dir / "checkpoints" / "step_000002"
    resumed = start(train_here, long_tail, tmp_path / "resumed", *flying, f"trainer.resume={point}")
    a, b = weights(first), weights(resumed)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    records = [read_lines(run.dir / "versions.jsonl") for run in (first, again, resumed)]
    samples = [[line["samples"] for line in record] for record in records]
    assert samples[0] == samples[1]
    assert samples[0][2:] == samples[2]


FOLLOWERS = {
    "apart": ["cluster.ranks=3", "cluster.pools.rollout=2"],
    "shared": ["cluster.ranks=1", "cluster.pools.rollout=0"],
}
LOSING = """
from hybridrl.workers.generator import Generator

tell_at_once = tell


def losing(load):
    def loading(generator, fill, version, keeps_kv=False):
        num = load(generator, fill, version, keeps_kv)
        admission = generator.rollout._admission
        for lane in [lane for lane in admission.lanes if lane.entries][1::2]:
            (victim,) = lane.entries
            admission._leave([victim])
            admission._release(victim)
            admission._queue(victim)
            admission.num_preempted += 1
        for awaits in admission._idle()[::2]:
            admission._evict(awaits)
        return num

    loading.loses = True
    return loading


def tell(*fields):
    if not hasattr(Generator.load, "loses"):
        Generator.load = losing(Generator.load)
    return tell_at_once(*fields)


losing_told = make_told("losing", False)
"""


LOST = {
    "responses": ["rollout.kv_cache_tokens=192"],
    "conversations": [
        *TALKING, "+environment.params.sleep=0.01", "environment.max_turn_tokens=12",
        "rollout.kv_cache_tokens=96", "rollout.kv_host_tokens=0",
    ],
}  # fmt: skip
"""Settings of runs that lose caches; of conversations no cache that gives way goes to the host."""


def lost_after(run: Any) -> set[bool]:
    """Whether what comes before a lost cache was computed again is a turn; if not, it is a reply.

    Of each of a run's losses, as a set.
    """
    samples = (sample for step in run.steps for sample in step.samples)
    pairs = (pair for sample in samples for pair in pairwise(sample.spans))
    return {before.trained for before, span in pairs if span.recomputed}


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("kind", LOST)
def test_caches_that_were_lost_are_computed_again_where_they_were(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, kind: str
) -> None:
    """One instance has no room for its samples, and loses some with each load; others have room.

    Those that follow load no weights under samples, so they lose none. Conversations lose theirs
    while a reply is awaited or has come, too.
    """
    (tmp_path / "losing.py").write_text(USER_CODE + LOSING)
    settings = [*STRICT, *IN_FLIGHT, "schedule.parked_kv=keep", "rollout.stop=[]", *LOST[kind]]
    settings += [f"recipe={{target: '{tmp_path}/losing.py:losing_told'}}"]
    full = [*settings, "rollout.block_size=4"]
    first = start(train_here, long_tail, tmp_path / "first", *full)
    check_in_flight(first, 2, updates=2)
    check_kept(first, updates=2)
    assert sum(line["samples/preempted"] for line in first.metrics) > 0
    assert (kind == "responses") in lost_after(first)
    record = read_lines(first.dir / "versions.jsonl")
    write_settings(first, long_tail, *full)
    settings += [f"schedule.follow={first.dir}", "rollout.kv_cache_tokens=0"]
    for name in FOLLOWERS if kind == "responses" else ["shared"]:
        again = start(train_here, long_tail, tmp_path / name, *settings, *FOLLOWERS[name])
        assert different(first, again) == []
        assert read_lines(again.dir / "versions.jsonl") == record
        assert sum(line["samples/preempted"] for line in again.metrics) == 0


@pytest.mark.wide
@pytest.mark.layouts
def test_rows_of_a_batch_lose_their_caches_and_are_followed(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """Nothing is strict here: rows decode together, and lost caches are computed by long passes."""
    (tmp_path / "losing.py").write_text(USER_CODE + LOSING)
    settings = [*IN_FLIGHT, "schedule.parked_kv=keep", "rollout.stop=[]", *LOST["conversations"]]
    settings += [f"recipe={{target: '{tmp_path}/losing.py:losing_told'}}"]
    first = start(train_here, long_tail, tmp_path / "first", *settings)
    check_in_flight(first, 2)
    check_kept(first)
    assert False in lost_after(first)
    write_settings(first, long_tail, *settings)
    settings += [f"schedule.follow={first.dir}", "rollout.kv_cache_tokens=0", *FOLLOWERS["apart"]]
    again = start(train_here, long_tail, tmp_path / "again", *settings)
    records = [read_lines(run.dir / "versions.jsonl") for run in (first, again)]
    assert records[0] == records[1]
    told = [
        [json.loads(sample.scalars["told"])[:2] for step in run.steps for sample in step.samples]
        for run in (first, again)
    ]
    for (tokens, log_probs), (same_tokens, close) in zip(*told, strict=True):
        assert tokens == same_tokens
        assert close == pytest.approx(log_probs, abs=1e-6)  # measured: 4.8e-7


SLOWED = """
import time

tell_at_once = tell


def tell(*fields):
    if dist.get_rank() == 1:  # of those that generate
        time.sleep(0.02)
    return tell_at_once(*fields)


slowed = make_told("slowed", False)
"""


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_record_is_followed_bit_for_bit_by_ranks_that_train_too(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, kv: str
) -> None:
    """Two generate, one of them slowed, and two train; two that do both follow, also resumed."""
    (tmp_path / "slowed.py").write_text(USER_CODE + SLOWED)
    settings = [*STRICT, *IN_FLIGHT, f"schedule.parked_kv={kv}"]
    settings.append(f"recipe={{target: '{tmp_path}/slowed.py:slowed'}}")
    apart = [*settings, "cluster.ranks=4", "cluster.pools.rollout=2"]
    first = start(train_here, long_tail, tmp_path / "first", *apart)
    check_in_flight(first, 2, updates=2)
    write_settings(first, long_tail, *apart)
    settings += [f"schedule.follow={first.dir}", "cluster.ranks=2", "cluster.pools.rollout=0"]
    again = start(train_here, long_tail, tmp_path / "again", *settings)
    assert different(first, again) == []
    record = read_lines(first.dir / "versions.jsonl")
    assert record == read_lines(again.dir / "versions.jsonl")
    if kv == "keep":  # a checkpoint has no keys and values
        return
    points = {n: again.dir / "checkpoints" / f"step_{n:06d}" for n in range(1, STEPS - 1)}
    resting = [step for step, point in points.items() if goes_on(point)]
    assert resting, "no sample rests"
    for step in {resting[0], resting[-1]}:
        point = points[step]
        resumed = start(
            train_here, long_tail, tmp_path / f"{step}", *settings, f"trainer.resume={point}"
        )
        a, b = weights(first), weights(resumed)
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
        assert record[step:] == read_lines(resumed.dir / "versions.jsonl")


FAILING = [
    *TALKING, "environment.max_failed_share=1", "environment.turn_timeout_s=0.3",
    "+environment.params.sleep=0.4",
]  # fmt: skip


@pytest.mark.layouts
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(FOLLOWERS["apart"], marks=pytest.mark.wide), FOLLOWERS["shared"]],
    ids=FOLLOWERS,
)
@pytest.mark.parametrize("kv", [pytest.param("recompute", marks=pytest.mark.wide), "keep"])
def test_a_record_of_conversations_is_followed_bit_for_bit(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    ranks: list[str],
    kv: str,
) -> None:
    """Replies come when they come, some too late: these episodes fail again, at their turns."""
    flying = [*STRICT, *IN_FLIGHT, *FAILING, f"schedule.parked_kv={kv}"]
    first = start(train_here, long_tail, tmp_path / "first", *flying)
    write_settings(first, long_tail, *flying)
    record = read_lines(first.dir / "versions.jsonl")
    failed = [kind for line in record for _, _, kind in line.get("failed", ())]
    assert "timeout" in failed
    # None fails but for the record.
    flying += [f"schedule.follow={first.dir}", *ranks, "environment.turn_timeout_s=30"]
    again = start(train_here, long_tail, tmp_path / "again", *flying)
    assert different(first, again) == []
    assert record == read_lines(again.dir / "versions.jsonl")
    several = [segments for line in record for _, segments in line["samples"] if len(segments) > 1]
    assert several, "no conversation has tokens of several versions"


@pytest.mark.wide
@pytest.mark.layouts
def test_an_on_policy_record_has_the_episodes_that_have_failed(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """With S = 0 prompts say which weights make a token; nothing but the record says which failed.

    No reply is late in the run that follows.
    """
    settings = [*STRICT, "schedule=periodic", *FAILING]
    first = start(train_here, long_tail, tmp_path / "first", *settings)
    write_settings(first, long_tail, *settings)
    record = read_lines(first.dir / "versions.jsonl")
    assert "timeout" in [kind for line in record for _, _, kind in line.get("failed", ())]
    settings += [f"schedule.follow={first.dir}", "environment.turn_timeout_s=30"]
    again = start(train_here, long_tail, tmp_path / "again", *settings, *FOLLOWERS["shared"])
    assert different(first, again) == []
    assert record == read_lines(again.dir / "versions.jsonl")


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
        pytest.param(
            layout,
            id=name,
            marks=[pytest.mark.layouts, *([] if name == "fsdp 2" else [pytest.mark.wide])]
            if layout
            else [],
        )
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
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trace shows it, of updates that are longer than any delay; weights come as loads."""
    update = base_worker.train

    def long(*arguments: Any) -> Any:
        time.sleep(0.3)
        return update(*arguments)

    monkeypatch.setattr(base_worker, "train", long)
    run = start(train_here, long_tail, tmp_path / "run", "schedule=one_step")
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
