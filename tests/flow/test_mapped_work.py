"""A step under a device mapping: pools, instances of several ranks, updates of each role."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hybridrl.config import ConfigError, FusedScheduleConfig, ScheduleConfig, SerialScheduleConfig
from hybridrl.costs.devices import ACCELERATORS, MODELS
from hybridrl.costs.fused_plans import shared_score_s, shared_update_s, updates_s
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    DeviceMapping,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.meter import CostMeter
from hybridrl.costs.model import CostModel
from hybridrl.flow.executor import Scope
from hybridrl.flow.mapped_work import MappedWork
from hybridrl.flow.workload import Group, Workload
from hybridrl.plan.schedule import mapped_setting, replay

A100 = ACCELERATORS["a100"]
COSTS = CostModel(LayerCosts.of(A100), cluster_of(A100, nodes=2, per_node=8))
SHAPE = MODELS["7b"]
ACTOR = PlannedRole(name="actor", shape=SHAPE, trained=True)
CRITIC = PlannedRole(name="critic", shape=SHAPE, trained=True, passes=("values",), value_head=True)
REFERENCE = PlannedRole(name="reference", shape=SHAPE, passes=("reference",))
ROLES = (ACTOR, REFERENCE, CRITIC)
LENGTHS = (200, 300, 400, 100)
WORKLOAD = Workload(tuple(Group(64, LENGTHS) for _ in range(24)), prompts_per_step=8, num_steps=3)
SAMPLES = [SampleLength(64, n) for _ in range(8) for n in LENGTHS]


def work(
    pools: Mapping[str, tuple[str, ...]],
    ranks: Mapping[str, int],
    train: Mapping[str, TrainLayout],
    schedule: ScheduleConfig | None = None,
    tp: int = 2,
) -> MappedWork:
    """PPO of three 7B models."""
    mapping = DeviceMapping(
        pools=pools,
        ranks=ranks,
        train=train,
        gen=GenLayout(tp=tp),
        schedule=schedule or SerialScheduleConfig(),
    )
    return MappedWork(costs=COSTS, mapping=mapping, roles=ROLES)


TOGETHER = work(
    {"actor": ("actor", "reference", "critic")},
    {"actor": 16},
    {"actor": TrainLayout(pp=2, fsdp=8), "critic": TrainLayout(fsdp=16)},
)
APART = work(
    {"actor": ("actor", "reference"), "critic": ("critic",)},
    {"actor": 8, "critic": 8},
    {"actor": TrainLayout(fsdp=8), "critic": TrainLayout(fsdp=8)},
)


def outcome(mapped: MappedWork):  # type: ignore[no-untyped-def]
    """The mean step of the mapping's schedule."""
    setting = mapped_setting(mapped, WORKLOAD, 4, max_held=64)
    return replay(setting, mapped.mapping.schedule)


def test_a_serial_step_is_the_sum_of_its_work() -> None:
    """Roles on the same ranks follow one another, in their layouts, by way of the device."""
    step = outcome(TOGETHER)
    updates = {"update_actor", "update_critic"}
    before = {"to_generate", "generate", "reward", "reference", "to_train"}
    assert set(step.stages) == before | {"values"} | updates
    for role in (ACTOR, CRITIC):
        layout = TOGETHER.mapping.train[role.name]
        update = COSTS.update_s(role, layout, range(16), SAMPLES)
        update += 2 * COSTS.activate_s(role, layout)
        assert step.stages[f"update_{role.name}"] == pytest.approx(update)
    assert step.stages["to_generate"] == pytest.approx(
        COSTS.to_generation_s(ACTOR, TOGETHER.mapping)
    )
    # Values take the critic's shards, on all ranks: after generation and the reference.
    critic = TOGETHER.mapping.train["critic"]
    values = COSTS.score_s(CRITIC, critic, range(16), SAMPLES) + COSTS.activate_s(CRITIC, critic)
    assert step.stages["values"] == pytest.approx(values)
    instance = COSTS.generation(ACTOR, GenLayout(tp=2), range(16))
    assert step.front_s > 400 * instance.step_s
    assert step.step_s == pytest.approx(sum(step.stages.values()))
    # Every instance scores its own samples: as long as the one with most takes.
    least = COSTS.score_s(REFERENCE, GenLayout(tp=2), range(2), SAMPLES) / 8
    onload = COSTS.activate_s(REFERENCE, GenLayout(tp=2))
    assert least < step.stages["reference"] - onload < 3 * least


def test_pools_train_at_once() -> None:
    """The actor's and the critic's updates overlap: a step waits for the longer one."""
    step = outcome(APART)
    actor, critic = step.stages["update_actor"], step.stages["update_critic"]
    others = step.stages["to_generate"] + step.front_s + step.stages["to_train"]
    assert step.step_s == pytest.approx(others + max(actor, critic))
    alone = COSTS.update_s(CRITIC, TrainLayout(fsdp=8), range(8, 16), SAMPLES)
    assert critic == pytest.approx(alone + 2 * COSTS.activate_s(CRITIC, TrainLayout(fsdp=8)))


def test_instances_of_more_ranks() -> None:
    """With tp 8 two instances instead of eight decode fewer rows a step each, of all samples."""
    mappings = [
        work(TOGETHER.mapping.pools, {"actor": 16}, TOGETHER.mapping.train, tp=tp) for tp in (2, 8)
    ]
    assert [m.mapping.instances for m in mappings] == [8, 2]
    assert outcome(mappings[0]).front_s != pytest.approx(outcome(mappings[1]).front_s, rel=0.01)


def test_fused_hides_the_reference() -> None:
    """Inference on freed instances: no later than one after the other."""
    train = APART.mapping.train
    fused = work(APART.mapping.pools, APART.mapping.ranks, train, FusedScheduleConfig())
    assert outcome(fused).front_s <= outcome(APART).front_s * 1.01


def test_counted_updates_are_those_that_the_meter_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """All epochs and mini-batches of all roles on the whole batch; pools train at once."""
    together = {name: replace(x, pp=2, fsdp=8) for name, x in TOGETHER.mapping.train.items()}
    fused = replace(TOGETHER.mapping, train=together, fuses=True)
    seen: list[float] = []
    monkeypatch.setattr(
        CostMeter, "saw_train", lambda self, seconds, tokens: seen.append(seconds / tokens)
    )
    for mapped in (
        TOGETHER,
        replace(APART, mini_batches=4, epochs=2),
        replace(TOGETHER, mapping=fused, mini_batches=2),
    ):
        seen.clear()
        outcome(mapped)
        assert seen == pytest.approx([mapped.flow_costs(SAMPLES).train_token_s] * 3)


def test_mini_batches_and_epochs() -> None:
    """Two epochs of four mini-batches are eight optimizer steps on a quarter of the samples."""
    several = replace(APART, mini_batches=4, epochs=2)
    layout = TrainLayout(fsdp=8)
    quarter = COSTS.update_s(ACTOR, layout, range(8), SAMPLES[:8])
    way = 2 * COSTS.activate_s(ACTOR, layout)
    assert outcome(several).stages["update_actor"] == pytest.approx(8 * quarter + way)


def test_a_role_has_its_own_mini_batches_and_epochs() -> None:
    """The recipe's numbers come before the trainer's."""
    actor = replace(ACTOR, mini_batches=4, epochs=2)
    several = replace(APART, roles=(actor, REFERENCE, CRITIC))
    layout = TrainLayout(fsdp=8)
    quarter = COSTS.update_s(ACTOR, layout, range(8), SAMPLES[:8])
    step, way = outcome(several), 2 * COSTS.activate_s(ACTOR, layout)
    assert step.stages["update_actor"] == pytest.approx(8 * quarter + way)
    assert step.stages["update_critic"] == outcome(APART).stages["update_critic"]


def test_steps_that_differ_share_a_plan_as_long_as_they_can() -> None:
    """The critic's two steps go with the actor's first two of four, whose rest is alone."""
    actor = replace(ACTOR, mini_batches=4)
    critic = replace(CRITIC, mini_batches=1, epochs=2)
    train = {"actor": TrainLayout(pp=4, fsdp=4), "critic": TrainLayout(pp=2, fsdp=8)}
    ranks, batches = range(16), [SAMPLES[i : i + 8] for i in range(0, 32, 8)]
    wanted = sum(COSTS.update_s(actor, train["actor"], ranks, batch) for batch in batches[2:])
    for batch in batches[:2]:
        own = {"actor": batch, "critic": SAMPLES}
        wanted += shared_update_s(COSTS, (actor, critic), train, ranks, (), own)
    wanted += sum(2 * COSTS.activate_s(role, train[role.name]) for role in (actor, critic))
    assert updates_s(COSTS, (actor, critic), train, ranks, SAMPLES) == pytest.approx(wanted)
    alone = sum(updates_s(COSTS, [role], train, ranks, SAMPLES) for role in (actor, critic))
    assert wanted < alone


@pytest.mark.parametrize(
    ("pools", "ranks", "train", "tp", "message"),
    [
        ({"actor": ("actor", "reference")}, {"actor": 16}, {}, 2, "mapping.pools"),
        (TOGETHER.mapping.pools, {"actor": 32}, {}, 2, "at most the 16 ranks of the cluster"),
        (
            TOGETHER.mapping.pools,
            {"actor": 16},
            {**TOGETHER.mapping.train, "critic": TrainLayout(fsdp=8)},
            2,
            "= 16, the ranks of its pool",
        ),
        (TOGETHER.mapping.pools, {"actor": 16}, TOGETHER.mapping.train, 3, "divides 16 ranks"),
    ],
)
def test_mappings_that_do_not_fit(
    pools: Mapping[str, tuple[str, ...]],
    ranks: Mapping[str, int],
    train: Mapping[str, TrainLayout],
    tp: int,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        work(pools, ranks, train, tp=tp)


def test_updates_and_passes_share_plans() -> None:
    """Old log-probabilities by training shards go out with values, and both updates together."""
    actor = replace(ACTOR, passes=("old_log_probs",), scores_in_generation=False)
    roles = (actor, REFERENCE, CRITIC)
    train = {"actor": TrainLayout(pp=4, fsdp=4), "critic": TrainLayout(pp=2, replicas=2, fsdp=4)}
    apart = DeviceMapping(
        pools={"actor": ("actor", "reference", "critic")},
        ranks={"actor": 16},
        train=train,
        gen=GenLayout(tp=2),
        schedule=SerialScheduleConfig(),
    )
    steps = {}
    for fuses in (False, True):
        mapped = MappedWork(costs=COSTS, mapping=replace(apart, fuses=fuses), roles=roles)
        assert mapped.scopes["old_log_probs"] is mapped.scopes["values"] is Scope.WORLD
        steps[fuses] = outcome(mapped)
    fused = steps[True].stages
    trained = [actor, CRITIC]
    ways = sum(2 * COSTS.activate_s(role, train[role.name]) for role in trained)
    update = shared_update_s(COSTS, trained, train, range(16), SAMPLES) + ways
    assert fused["update_actor"] == fused["update_critic"] == pytest.approx(update)
    scores = shared_score_s(COSTS, trained, train, range(16), SAMPLES) + ways / 2
    assert fused["old_log_probs"] == fused["values"] == pytest.approx(scores)
    saved = sum(steps[False].stages[name] for name in ("update_actor", "update_critic")) - update
    saved += sum(steps[False].stages[name] for name in ("old_log_probs", "values")) - scores
    assert saved > 0
    assert steps[False].step_s - steps[True].step_s == pytest.approx(saved)
