"""Which updates may begin early, derived from the recipes' graphs; and how much of them does."""

import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.costs.instance import Costs
from hybridrl.flow import Flow, Graph, recipe
from hybridrl.flow.early_updates import EarlySettings, EarlyUpdate, early_update
from hybridrl.flow.executor import Sampling, Scope
from hybridrl.flow.ledger import generation_first, sections
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.flow.sample import SampleId
from hybridrl.preflight.prepare import build_recipe
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.fused import Fused
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.readiness import early_stages
from hybridrl.schedule.serial import SerialSchedule
from hybridrl.schedule.tail import plan
from hybridrl.schedule.tail.early import seconds_left

RECIPES = Path(__file__).parents[2] / "recipes"

EARLY = None
BY_RECIPE = {
    **dict.fromkeys(["grpo", "dr_grpo", "rloo", "gspo", "gmpo", "cispo", "sapo", "opo"], EARLY),
    **dict.fromkeys(["maxrl", "remax", "ttrl", "gigpo"], EARLY),
    **dict.fromkeys(["distill", "distill_topk", "self_distill"], EARLY),
    "dapo": "take may ask for another round, which every rank generates",
    "ppo": "update_actor shares its ranks with the update update_critic",
    "safe_rlhf": "update_actor shares its ranks with the update update_critic",
    "reinforce_pp": "whitening reads the whole batch",
    "gdpo": "standardized_sum reads the whole batch",
    "clip_cov": "the recipe's numbers ['draws'] change within a step",
    "kl_cov": "update_actor has 4 optimizer steps",
    "dars": "the samples of generate are of an earlier round of the step",
    "xrpo": "the samples of generate are of an earlier round of the step",
    **dict.fromkeys(["sft", "dpo", "simpo", "orpo", "kto", "rm"], "no update of the actor follows"),
}
"""By recipe, with the settings that it comes with: early, or why its update is late."""


def graph_of(name: str, **keys: Any) -> Graph:
    """The graph of a recipe of the package, by its config.yaml and `keys`."""
    config = OmegaConf.create({"rollout": {"max_new_tokens": 20}, "run": {"seed": 0}})
    config["reward"] = {"parts": {"math": {"weight": 1.0}, "length": {"weight": 1.0}}}
    config["recipe"] = OmegaConf.load(RECIPES / name / "config.yaml")
    settings: Any = OmegaConf.to_container(config, resolve=True)
    settings["recipe"].pop("defaults", None)
    return build_recipe(settings["recipe"] | keys)


def derived(graph: Graph, executor: Any, settings: EarlySettings | None = None) -> EarlyUpdate:
    """What is derived for the last section of a graph."""
    section = sections(generation_first(list(graph.stages.values())))[-1]
    names = {stage.name for stage in early_stages(graph, section, executor, by_group=True)}
    return early_update(graph, section, names, executor, settings or EarlySettings())


def test_no_recipe_is_left_out() -> None:
    assert BY_RECIPE.keys() == {path.parent.name for path in RECIPES.glob("*/config.yaml")}


@pytest.mark.parametrize("name", BY_RECIPE)
def test_recipes(virtual_executor: Any, name: str) -> None:
    update, reason = derived(graph_of(name), virtual_executor()), BY_RECIPE[name]
    if reason is EARLY:
        assert update.stage is not None, update.reason
        assert update.stage.role == "actor"
    else:
        assert update.stage is None
        assert reason in update.reason


def test_a_recipe_s_settings_decide_too(virtual_executor: Any) -> None:
    executor = virtual_executor()
    assert derived(graph_of("grpo", kl_coef=0.1), executor).stage is not None
    # Old log-probabilities by a rollout engine whose weights are not the trainer's.
    executor.scopes = {"actor": Scope.WORLD}
    trainer = graph_of("grpo", correction={"old_log_probs": "trainer"})
    assert derived(trainer, executor).reason == (
        "old_log_probs needs the training shards of all ranks"
    )
    own = graph_of("grpo")
    stage = own.stages["update_actor"]
    loss = replace(stage.loss)
    object.__setattr__(loss, "normalize", "mine.py:weights")
    own.stages["update_actor"] = replace(stage, loss=loss)
    assert "normalization mine.py:weights" in derived(own, virtual_executor()).reason
    # A critic on ranks of its own: what is left is the whitening.
    executor = virtual_executor(scopes={"critic": Scope.POOL})
    assert derived(graph_of("ppo"), executor).reason == "whitening reads the whole batch"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (EarlySettings(obstacle="the layout"), "the layout"),
        (EarlySettings(epochs=2), "update_actor has 2 optimizer steps (epochs x mini-batches)"),
        (EarlySettings(mini_batches=3), "update_actor has 3 optimizer steps (epochs x mini-batch"),
    ],
)
def test_a_run_s_settings_decide_too(
    virtual_executor: Any, settings: EarlySettings, reason: str
) -> None:
    update = derived(graph_of("grpo"), virtual_executor(), settings)
    assert update.stage is None
    assert update.reason.startswith(reason)


def test_numbers_of_the_recipe_make_it_late(virtual_executor: Any) -> None:
    @recipe("counts")
    def counts(flow: Flow, cfg: dict[str, Any]) -> None:
        seen = flow.state("seen", 0.0)
        samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=2))
        samples = samples.by_group(lambda rewards: [seen.get() for _ in rewards])
        flow.actor.update(samples, loss=ClippedLoss())

    assert "numbers ['seen'] change" in derived(counts.build({}), virtual_executor()).reason


# -- a step ------------------------------------------------------------------------------------


def schedule_of(
    executor: Any, graph: Graph, early: EarlySettings | None, prompts: int, **limits: Any
) -> Any:
    """A fused schedule with early backward; serial where `early` is None."""
    step = StepSettings(
        sampling=Sampling(max_new_tokens=100), decode_steps=2, prompts_per_step=prompts
    )
    stream = ((i, f"prompt {i}") for i in range(1000))
    if early is None:
        return SerialSchedule(graph, executor, stream, step)
    return LoopSchedule(
        graph,
        executor,
        stream,
        step,
        Fused(early=early),
        limits=RoundLimits(**{"max_held": 100, "chunk_tokens": 30} | limits),
        length_model=LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1, 2, 3))),
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("grpo", {}),
        (
            "grpo",
            {"correction": {"old_log_probs": "trainer"}},
        ),  # passes with the generation weights
        ("grpo", {"kl_coef": 0.1}),
        ("rloo", {}),
        ("gspo", {}),
    ],
)
def test_recipes_train_on_what_serial_trains_on(
    virtual_executor: Any, name: str, keys: dict[str, Any]
) -> None:
    """Three steps with random latencies; every sample counts once, with the same fields."""
    num_early = 0
    for seed in range(12):
        lengths = random.Random(seed).choices([1, 2, 3, 40], [4, 4, 4, 1], k=50)
        seen = []
        for early in (None, EarlySettings()):
            executor = virtual_executor(
                3, seed, lambda id, lengths=lengths: lengths[(3 * id.prompt + id.k) % 50]
            )
            graph = graph_of(name, group_size=2, **keys)
            schedule = schedule_of(executor, graph, early, 6)
            results = [schedule.run_step(step) for step in range(3)]
            seen.append((executor.updates, [[s.id for s in r.samples] for r in results]))
            counted = sum(r.metrics.get("samples/trained_early", 0.0) for r in results)
            assert counted == executor.num_early
        num_early += executor.num_early
        assert seen[0] == seen[1]
    assert num_early > 10


def two_of_three(virtual_executor: Any, **limits: Any) -> tuple[Any, Any]:
    """Prompts of two samples on three instances; that of prompt 2 takes ten times as long."""
    executor = virtual_executor(3, 0, lambda id: 60 if id.prompt == 2 else 5 + id.k)
    executor.reward_of = lambda id: (float(id.k), "ok")
    schedule = schedule_of(executor, graph_of("grpo", group_size=2), EarlySettings(), 3, **limits)
    return executor, schedule


def drawn(length_of: Any, id: SampleId, name: str) -> Any:
    """What the engine and the roles make of a sample, which follows from its identity alone."""
    draw, num = random.Random(f"{id} {name}"), length_of(id)
    if name == "reward":
        return float(draw.randrange(2))
    if name == "reward_status":
        return "ok"
    if name == "tokens":
        return torch.tensor([draw.randrange(50) for _ in range(3 + num)])
    return torch.tensor([-draw.random() for _ in range(num)])


@pytest.mark.parametrize(
    ("name", "keys"), [("dapo", {"group_size": 2}), ("ppo", {"num_samples": 2})]
)
def test_recipes_whose_update_is_late_train_on_what_serial_trains_on(
    virtual_executor: Any, name: str, keys: dict[str, Any]
) -> None:
    """Nothing is trained early, and no sample is trained twice or elsewhere."""
    for seed in range(6):
        lengths = random.Random(seed).choices([1, 2, 3, 40], [4, 4, 4, 1], k=50)
        seen = []
        for early in (None, EarlySettings()):

            def length_of(id: SampleId, lengths: Any = lengths) -> int:
                return int(lengths[(3 * id.prompt + id.k) % 50])

            outputs_of = partial(drawn, length_of)
            executor = virtual_executor(3, seed, length_of, outputs_of=outputs_of)
            schedule = schedule_of(executor, graph_of(name, **keys), early, 6)
            results = [schedule.run_step(step) for step in range(3)]
            updates = [
                (stage, id, {key: np.asarray(value).tolist() for key, value in fields.items()})
                for stage, samples in executor.updates
                for id, fields in samples
            ]
            seen.append((updates, [[s.id for s in r.samples] for r in results]))
            assert executor.num_early == 0
            assert not any(r.metrics.get("samples/trained_early") for r in results)
            assert "early backward" not in {span.name for r in results for span in r.spans}
        assert seen[0] == seen[1]
        stages = {"update_actor"} | ({"update_critic"} if name == "ppo" else set())
        assert {stage for stage, _, _ in seen[0][0]} == stages


def early_calls(executor: Any) -> list[list[int]]:
    """The tokens of the samples of each call that trains early, entered while steps are run."""
    calls: list[list[int]] = []
    train_early = executor.train_early

    def watched(stage: Any, instance: int, samples: Any) -> None:
        calls.append([sample.tokens for sample in samples])
        train_early(stage, instance, samples)

    executor.train_early = watched
    return calls


def test_whole_groups_are_trained_while_the_longest_decodes(virtual_executor: Any) -> None:
    executor, schedule = two_of_three(virtual_executor)
    result = schedule.run_step(0)
    assert result.metrics["samples/trained_early"] == 4
    spans = {span.name: span for span in result.spans}
    assert spans["early backward"].stop < spans["generate"].stop
    assert [s.id.prompt for s in result.samples] == [0, 0, 1, 1, 2, 2]
    assert [(id.prompt, id.k) for id, _ in executor.updates[0][1]] == [
        (prompt, k) for prompt in range(3) for k in range(2)
    ]


def test_a_chunk_has_a_micro_batch_s_tokens(virtual_executor: Any) -> None:
    """A sample of 8 tokens fills a chunk of 8; its partner of 9 is in the next one."""
    executor, schedule = two_of_three(virtual_executor, chunk_tokens=8)
    calls = early_calls(executor)
    assert schedule.run_step(0).metrics["samples/trained_early"] == 4
    assert sorted(calls) == [[8], [8], [9], [9]]


def test_nothing_is_begun_that_would_outlast_the_decoding(virtual_executor: Any) -> None:
    """By the costs, training a sample takes longer than what is left to decode."""
    executor, schedule = two_of_three(virtual_executor)
    costs = Costs(step_s=1.0, train_token_s=100.0)
    schedule.meter.costs = lambda: costs
    schedule.length_model.forecast.add([60])
    assert schedule.run_step(0).metrics["samples/trained_early"] == 0
    cheap = replace(costs, train_token_s=0.1)
    schedule.meter.costs = lambda: cheap
    executor.length_of = lambda id: 60 if id.prompt == 5 else 5 + id.k
    assert schedule.run_step(1).metrics["samples/trained_early"] == 4


@pytest.mark.parametrize(
    ("name", "train_token_s", "taken"),
    [
        ("stay", 0.5, "stay"),
        ("train early", 0.5, "train_early"),
        ("migrate, train early", 0.5, "migrate_train_early"),
        ("stay", 0.0, "train_early"),  # training was not measured yet, so it is tried
    ],
)
def test_a_metric_says_which_plan_a_step_took(
    virtual_executor: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    train_token_s: float,
    taken: str,
) -> None:
    monkeypatch.setattr(plan, "best_plan", lambda plans: {p.name: p for p in plans}[name])
    _, schedule = two_of_three(virtual_executor)
    first = schedule.run_step(0).metrics  # nothing is known yet
    assert not [key for key in first if key.startswith("plan/")]
    costs = Costs(step_s=1.0, train_token_s=train_token_s)
    schedule.meter.costs = lambda: costs
    metrics = schedule.run_step(1).metrics
    chosen = {key: value for key, value in metrics.items() if key.endswith("_chosen")}
    names = ("stay", "train_early", "migrate", "migrate_train_early")
    assert chosen == {f"plan/{one}_chosen": float(one == taken) for one in names}
    assert {key.removesuffix("_chosen") for key in chosen} == {
        key.removesuffix("_s") for key in metrics if key.startswith("plan/") and key[-2:] == "_s"
    }
    happened = {key: value for key, value in metrics.items() if key.endswith("_happened")}
    came_to = "train_early" if "train_early" in taken else "stay"  # one instance has the tail
    assert happened == {f"plan/{one}_happened": float(one == came_to) for one in names}


def test_a_sample_that_is_too_long_holds_up_none_behind_it(
    virtual_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half of the time that is left 20 tokens can be trained: not the 33 of the first sample.

    Its partner has 8, and is trained early; the first one is trained with the rest.
    """
    monkeypatch.setattr(plan, "best_plan", lambda plans: max(plans, key=lambda p: p.trains_early))
    lengths = {0: (30, 5), 1: (5, 6), 2: (60, 60)}
    executor = virtual_executor(3, 0, lambda id: lengths[id.prompt][id.k])
    executor.reward_of = lambda id: (float(id.k), "ok")
    schedule = schedule_of(executor, graph_of("grpo", group_size=2), EarlySettings(), 3)
    costs = Costs(step_s=1.0, train_token_s=0.5)
    schedule.meter.costs = lambda: costs
    schedule.length_model.forecast.add([60])
    schedule.length_model.longest_of_prompt.add([60])
    calls = early_calls(executor)
    assert schedule.run_step(0).metrics["samples/trained_early"] == 3
    assert calls == [[8, 9], [8]]
    assert [(id.prompt, id.k) for id, _ in executor.updates[0][1]] == [
        (prompt, k) for prompt in range(3) for k in range(2)
    ]


def test_a_chunk_is_filled_past_a_sample_that_has_no_room_in_it(virtual_executor: Any) -> None:
    """Samples have 13, 33 and 13 tokens: the first and the last are one micro-batch of 30."""
    lengths = {0: (10, 30, 10), 1: (90, 90, 90)}
    executor = virtual_executor(2, 0, lambda id: lengths[id.prompt][id.k])
    executor.reward_of = lambda id: (float(id.k), "ok")
    schedule = schedule_of(executor, graph_of("grpo", group_size=3), EarlySettings(), 2)
    calls = early_calls(executor)
    assert schedule.run_step(0).metrics["samples/trained_early"] == 3
    assert calls == [[13, 13], [33]]


def test_seconds_until_the_longest_ends() -> None:
    costs = Costs(step_s=1.0, row_s=0.5, cached_token_s=0.01)
    # 60 tokens of 2 rows, which hold 40 + 30 tokens each on average
    assert seconds_left(costs, 100, 40, 2) == pytest.approx(60 * (1 + 2 * 0.5 + 0.01 * 140))
    # longer than any before: a quarter more
    assert seconds_left(costs, 100, 200, 1) == pytest.approx(50 * (1.5 + 0.01 * 225))


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("grpo", EarlySettings(), "early backward: update_actor begins while samples decode"),
        (
            "dapo",
            EarlySettings(),
            "schedule.early_backward has no effect: take may ask for another",
        ),
        ("grpo", EarlySettings(obstacle="why"), "schedule.early_backward has no effect: why"),
    ],
)
def test_a_line_of_the_log_says_it(
    virtual_executor: Any,
    caplog: pytest.LogCaptureFixture,
    name: str,
    settings: EarlySettings,
    line: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="hybridrl.schedule.fused"):
        schedule_of(virtual_executor(), graph_of(name), settings, 4)
    (record,) = caplog.records
    assert record.getMessage().startswith(line)


def test_an_update_that_a_step_leaves_out_does_not_begin(virtual_executor: Any) -> None:
    executor = virtual_executor(3, 0, lambda id: 60 if id.prompt % 3 == 2 else 5)
    executor.reward_of = lambda id: (float(id.k), "ok")
    graph = graph_of("grpo", group_size=2)
    graph.stages["update_actor"] = replace(graph.stages["update_actor"], after=1)
    schedule = schedule_of(executor, graph, EarlySettings(), 3)
    assert schedule.run_step(0).metrics["samples/trained_early"] == 0
    assert executor.updates == []
    assert schedule.run_step(1).metrics["samples/trained_early"] == 4


def test_a_step_that_fails_leaves_nothing_to_the_next(virtual_executor: Any) -> None:
    executor, schedule = two_of_three(virtual_executor)
    update = executor.update

    def failing(updates: Any) -> None:
        raise OSError("in the update")

    executor.update = failing
    with pytest.raises(OSError, match="in the update"):
        schedule.run_step(0)
    assert len(executor.early["update_actor"]) == 4
    executor.update = update
    executor.length_of = lambda id: 60 if id.prompt == 5 else 5 + id.k
    result = schedule.run_step(1)
    assert result.metrics["samples/trained_early"] == executor.num_early == 4
    assert [s.id.prompt for s in result.samples] == [3, 3, 4, 4, 5, 5]
