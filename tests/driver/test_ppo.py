"""PPO on real ranks: the critic beside the actor, whatever the schedule and the critic's layout."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.algorithms.critic import ValueLoss
from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import ConfigError, TinyModelConfig, TrainerConfig
from hybridrl.flow import Flow
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight.nothing_to_learn import total_updates
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines

PPO = [
    "recipe=ppo", "recipe.num_samples=4", "recipe.critic_warmup=1", "recipe.kl_coef=0.2",
    "trainer.mini_batches=2", "trainer.epochs=2", "trainer.save_every=2",
    "roles.critic.optim.lr=30", "roles.critic.optim.eps=1000",
    "roles.critic.optim.clip_grad_norm=0",
]  # fmt: skip
RUNS = {
    "serial": [],
    "fused": ["schedule=fused", "schedule.migration_threshold=12"],
    "critic of tp 2": ["roles.critic.layout.tp=2"],
    "split": ["cluster.placement=split"],
    "split, fused": [
        "cluster.placement=split", "cluster.ranks=3", "cluster.pools.actor=2",
        "schedule=fused", "schedule.migration_threshold=12",
    ],
    "standalone": [
        "cluster.placement=standalone", "cluster.ranks=5", "cluster.pools.critic=1",
        "cluster.pools.reference=1", "cluster.pools.reward=1", "schedule=fused",
    ],
    "judges apart": [
        "cluster.pool_of={reference: reference, reward: reference}", "cluster.ranks=3",
        "cluster.pools.reference=1", "schedule=fused",
    ],
}  # fmt: skip
KEYS = ("critic/loss", "critic/grad_norm", "critic/explained_variance", "loss", "grad_norm")
MOMENTS = ("num_tokens", "mean", "squares")


@pytest.fixture(scope="module")
def run_of(
    train: Callable[..., Any],
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    """Three steps on two ranks by the name in `RUNS`; the actor learns from the second on."""
    kept = [setting for setting in long_tail if not setting.startswith("recipe")]

    @functools.cache
    def run(name: str) -> Any:
        run = train if name == "split" else train_here
        return run(tmp_path_factory.mktemp("ppo"), *kept, *PPO, "cluster.ranks=2", *RUNS[name])

    return run


def rl_lines(run: Any) -> list[dict[str, Any]]:
    lines = read_lines(run.dir / "metrics.jsonl")
    return [line for line in lines if "critic/loss" in line]


def responses(run: Any) -> list[tuple[int, str, str]]:
    lines = read_lines(run.dir / "samples.jsonl")
    return [(line["step"], line["id"], line["response"]) for line in lines if line["phase"] == "rl"]


def change(run: Any, folder: str) -> torch.Tensor:
    """How the parameters have changed since the start, of the actor's names."""
    start = load_file(run.dir / "start" / "model.safetensors")
    after = load_file(run.dir / folder / "model.safetensors")
    return torch.cat([(after[x] - start[x]).double().flatten() for x in start if x in after])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fused", marks=pytest.mark.slow),
        pytest.param("critic of tp 2", marks=pytest.mark.slow),
        pytest.param("split, fused", marks=pytest.mark.layouts),
        pytest.param("split", marks=pytest.mark.slow),
        pytest.param("standalone", marks=[pytest.mark.layouts, pytest.mark.wide]),
        pytest.param("judges apart", marks=[pytest.mark.layouts, pytest.mark.wide]),
    ],
)
def test_the_same_samples_and_losses(run_of: Callable[[str], Any], name: str) -> None:
    """Though samples move, or critic and reward model lie otherwise: values, losses, both models.

    Measured: moments 4e-6, losses 1e-7, changes of parameters 5e-7, of their size.
    """
    serial, other = run_of("serial"), run_of(name)
    assert responses(serial) == responses(other)
    assert len(responses(serial)) == 3 * 16
    for a, b in zip(serial.steps, other.steps, strict=True):
        assert [s.id for s in a.samples] == [s.id for s in b.samples]
        for x, y in zip(a.samples, b.samples, strict=True):
            for key in MOMENTS:  # of the advantages before whitening
                assert math.isclose(x.scalars[key], y.scalars[key], rel_tol=4e-5, abs_tol=1e-7)
    for a, b in zip(rl_lines(serial), rl_lines(other), strict=True):
        for key in KEYS:
            assert (key in a) == (key in b)
            assert abs(a.get(key, 0) - b.get(key, 0)) < 1e-6 * max(1.0, abs(a.get(key, 0))), key
    # Samples move where the instances of the actor's pool have forward passes to run.
    if "fused" in name:
        assert all(line["samples/migrated"] > 0 for line in other.metrics)
    else:
        assert not any(line.get("samples/migrated") for line in other.metrics)
    for folder in ("final", "final/critic"):
        moved, others = change(serial, folder), change(other, folder)
        assert moved.norm() > 1e-2, folder
        assert (moved - others).norm() / moved.norm() < 5e-6, folder


@pytest.mark.layouts
def test_a_pool_of_its_own_works_while_the_other_does(run_of: Callable[[str], Any]) -> None:
    """Values of finished samples while others decode; both updates at once; nothing is left.

    A pool that gets no time on a busy machine may begin late, but not in every step.
    """
    run = run_of("split, fused")
    steps = [{span.name: span for span in result.spans} for result in run.steps]
    assert any(spans["values"].start < spans["generate"].stop for spans in steps)
    for spans in steps[1:]:  # in the first the critic is alone
        assert spans["update_actor"].start < spans["update_critic"].stop
        assert spans["update_critic"].start < spans["update_actor"].stop
    assert run.stored == [0, 0, 0]
    work = [span for span in run.spans if span.name in ("values", "reward")]
    lanes = {span.lane for span in work if not span.lane.startswith("driver")}
    assert lanes == {"rank 2"}


@pytest.mark.layouts
def test_the_critic_warms_up_alone(run_of: Callable[[str], Any]) -> None:
    """In the first step the actor is left as it is; in the others both take every mini-batch."""
    first, *rest = rl_lines(run_of("serial"))
    assert "loss" not in first
    assert "grad_norm" not in first
    assert len(rest) == 2
    for line in (first, *rest):
        assert line["critic/optimizer_steps"] == 4
        assert line["critic/grad_norm"] > 0
    assert all(line["optimizer_steps"] == 4 and line["grad_norm"] > 0 for line in rest)
    kl = [line["kl_mean"] for line in (first, *rest)]  # to the reference, per response
    assert kl[:2] == pytest.approx([0, 0], abs=1e-4)
    assert abs(kl[2]) > 1e-2
    assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-6)  # its values are zero
    assert {line["critic/explained_variance"] != 0 for line in rest} == {True}


@pytest.mark.layouts
def test_the_coefficient_follows_the_kl(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Its rule, from the distances that are recorded: it moves the next step's penalty."""
    kept = [setting for setting in tiny_run if not setting.startswith("recipe")]
    settings = ["recipe=ppo", "recipe.num_samples=4", "recipe.kl_coef=0.2", "trainer.steps=3"]
    settings += ["recipe.kl_target=0.05", "recipe.kl_horizon=32", "eval.sets.main.every=null"]
    run = train_here(tmp_path / "run", *kept, *settings, "trainer.optim.lr=1e-2")
    coefs = [0.2]
    for line, step in zip(rl_lines(run), run.steps[-3:], strict=True):
        step_scalars = [sample.scalars for sample in step.samples]
        assert {scalars["kl_coef"] for scalars in step_scalars} == {coefs[-1]}
        error = min(max(sum(scalars["kl"] for scalars in step_scalars) / 16 / 0.05 - 1, -0.2), 0.2)
        coefs.append(coefs[-1] * (1 + error * 16 / 32))
        assert line["state/kl_coef"] == pytest.approx(coefs[-1], rel=1e-9)
        coefs[-1] = line["state/kl_coef"]
    assert len(coefs) == 4
    assert coefs[0] > coefs[1] < coefs[-1]  # at first there is no distance


@pytest.mark.layouts
def test_checkpoints_hold_the_critic_beside_the_actor(run_of: Callable[[str], Any]) -> None:
    run = run_of("serial")
    for folder in (run.dir / "final", run.dir / "checkpoints" / "step_000002"):
        assert AutoModelForCausalLM.from_pretrained(folder).lm_head is not None
        critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic")
        assert critic.config.num_labels == 1
        assert critic.score.weight.abs().max() > 0
    assert run.stored == [0, 0]
    (event,) = [e for e in read_lines(run.dir / "events.jsonl") if e["kind"] == "role"]
    assert (event["role"], event["train_layout"]["fsdp"]) == ("critic", 2)


@pytest.mark.slow
def test_strict_is_equal_bit_for_bit(
    train: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """With AdamW, which carries a last bit somewhere into everything."""
    changed = ("recipe", "trainer.optim.", "roles.critic.optim.", "recipe.kl_coef")
    kept = [setting for setting in (*long_tail, *PPO) if not setting.startswith(changed)]
    settings = [*kept, "recipe=ppo", "recipe.num_samples=4", "recipe.kl_coef=0.2"]
    settings += ["trainer.optim.lr=1e-2", "roles.critic.optim.lr=1e-2", "deterministic=strict"]
    runs = [
        train(tmp_path / name, *settings, "cluster.ranks=2", *RUNS[name])
        for name in ("serial", "fused")
    ]
    for folder in ("final", "final/critic"):
        one, other = (load_file(run.dir / folder / "model.safetensors") for run in runs)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
        assert change(runs[0], folder).norm() > 1e-2


def test_each_role_has_the_updates_of_its_own_stages() -> None:
    """Its learning rate's schedule ends with the last of them."""
    flow = Flow()
    samples = flow.critic.values(flow.answers).map(abs, ("values",), ("returns",))
    flow.critic.update(samples, loss=ValueLoss(), mini_batches=3)
    flow.critic.update(samples, loss=ValueLoss(), name="again", after=6)
    flow.actor.update(samples, loss=CrossEntropyLoss(), epochs=5, after=20)
    trainer = TrainerConfig(epochs=2, mini_batches=4)
    roles = ("critic", "actor", "cost_critic")
    wanted = [10 * 2 * 3 + (10 - 6) * 2 * 4, 0, 0]
    assert [total_updates(flow.graph, role, 10, trainer) for role in roles] == wanted
    assert total_updates(flow.graph, "actor", 21, trainer) == 5 * 4


def test_a_coefficient_of_zero_cannot_follow(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    settings = ["recipe=ppo", "recipe.kl_coef=0", "recipe.kl_target=1", f"run.dir={tmp_path}/run"]
    with pytest.raises(ConfigError, match=r"^recipe.kl_target=1.0: wanted null with kl_coef=0"):
        prepare(make_config(*settings))


ALPHABET = TinyModelConfig().alphabet


@pytest.mark.parametrize(
    ("labels", "alphabet", "allowed"),
    [
        (2, ALPHABET, r"a classifier with one label \(num_labels is 2\)"),
        (1, ALPHABET[1:], r"the actor's vocabulary \(it has 78, the actor 79 tokens\)"),
        (1, ALPHABET[::-1], r"the actor's tokenizer \('a' is \d+ for the actor, \d+ here\)"),
    ],
    ids=["labels", "vocabulary", "tokenizer"],
)
def test_a_critic_that_cannot_read_the_samples(
    labels: int, alphabet: str, allowed: str, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "other"
    make_tiny_model(path, TinyModelConfig(alphabet=alphabet), seed=0)
    config = AutoConfig.from_pretrained(path)
    config.num_labels, config.architectures = labels, ["Qwen3ForSequenceClassification"]
    config.save_pretrained(path)
    settings = ["data.size=20", "data.eval_size=4", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=f"^roles.critic.path={path}: wanted {allowed}$"):
        prepare(make_config("recipe=ppo", f"roles.critic.path={path}", *settings))
