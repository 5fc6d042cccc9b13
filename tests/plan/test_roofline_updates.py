"""Updates of a roofline in pipelines: the seconds of `plan auto`, in `plan schedule`."""

from dataclasses import replace

import pytest

from hybridrl.config import ConfigError, SerialScheduleConfig
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    DeviceMapping,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel
from hybridrl.costs.roofline import Roofline, layouts_of, read_roofline, roles_of, with_pipelines
from hybridrl.flow.graph import Stage
from hybridrl.flow.mapped_work import MappedWork, step_samples
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.workload import Shape, read_workload
from hybridrl.plan.schedule_command import run

TEXT = "gpu:model=13b,critic=7b,gpus=8,total=32"
SHAPE = Shape(prompts_per_step=64, group_size=4, num_steps=4, prompt_tokens=128)
WORKLOAD = read_workload("lognormal:median=400,sigma=0.77,max=4000", SHAPE)
SAMPLES = step_samples(WORKLOAD, 4)
TOKENS = sum(sample.tokens for sample in SAMPLES)


def seconds(
    text: str, samples: list[SampleLength], mini_batches: int = 1, epochs: int = 1
) -> tuple[float, float]:
    """Return the seconds of a step's updates on these samples, apart and in one plan."""
    named, tokens = Roofline.of(text), sum(sample.tokens for sample in samples)
    costs, *_ = read_roofline(text)
    costs = with_pipelines(
        costs,
        named.accelerator,
        roles_of(named),
        layouts_of(named, 8192),
        samples,
        mini_batches=mini_batches,
        epochs=epochs,
    )
    return costs.train_token_s * tokens, costs.fused_train_token_s * tokens


def mapped_seconds(text: str, mini_batches: int, epochs: int) -> tuple[float, float]:
    """Return the seconds of a step's updates by `plan auto`, apart and in one plan."""
    named = Roofline.of(text)
    cluster = cluster_of(named.accelerator, named.total // 8, 8)
    roles = [
        PlannedRole(name=name, shape=shape, trained=True, value_head=name == "critic")
        for name, shape in named.trained.items()
    ]
    mapping = DeviceMapping(
        pools={"actor": ("actor", "critic")},
        ranks={"actor": named.total},
        train=layouts_of(named, 8192),
        gen=GenLayout(tp=8),
        schedule=SerialScheduleConfig(),
        fuses=True,
    )
    costs = CostModel(LayerCosts.of(named.accelerator), cluster)
    work = MappedWork(
        costs=costs, mapping=mapping, roles=roles, mini_batches=mini_batches, epochs=epochs
    )
    samples = [
        Sample(id=SampleId(number, k=0), prompt_tokens=one.prompt, response_tokens=one.response)
        for number, one in enumerate(SAMPLES)
    ]
    actor, critic = (Stage(name=f"update_{role.name}", role=role.name) for role in roles)
    assert work.fuses([actor], critic)
    apart = work.update_s([actor], samples) + work.update_s([critic], samples)
    return apart, work.update_s([actor, critic], samples)


@pytest.mark.parametrize("sizes", ["pp=2", "pp=4", "pp=4,critic_pp=2,tp=2", "pp=8,critic_pp=4"])
@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (4, 2)])
def test_seconds_are_those_of_plan_auto(sizes: str, mini_batches: int, epochs: int) -> None:
    """One plan takes less than two pipelines one after the other."""
    text = f"{TEXT},{sizes}"
    apart, fused = seconds(text, SAMPLES, mini_batches, epochs)
    assert (apart, fused) == pytest.approx(mapped_seconds(text, mini_batches, epochs))
    assert fused < apart


@pytest.mark.parametrize("sizes", ["pp=2", "pp=4,critic_pp=2,tp=2"])
def test_seconds_a_token_hold_for_other_steps(sizes: str) -> None:
    """The first step's seconds a token hold for samples of other steps.

    Measured: within 1 percent.
    """
    text = f"{TEXT},{sizes}"
    per_token = [value / TOKENS for value in seconds(text, SAMPLES)]
    for step in range(1, 4):
        groups = WORKLOAD.groups[64 * step : 64 * (step + 1)]
        samples = step_samples(replace(WORKLOAD, groups=groups), 4)
        tokens = sum(sample.tokens for sample in samples)
        for own, first in zip(seconds(text, samples), per_token, strict=True):
            assert own == pytest.approx(first * tokens, rel=0.02)


@pytest.mark.parametrize(
    "train",
    [
        {"actor": TrainLayout(pp=2, fsdp=16), "critic": TrainLayout(pp=2, fsdp=8, tp=2)},
        {"actor": TrainLayout(pp=2, fsdp=16), "critic": TrainLayout(fsdp=32)},
    ],
    ids=["another tp", "all weights of 7B at once"],
)
def test_what_cannot_share_a_plan_has_no_seconds_of_one(train: dict[str, TrainLayout]) -> None:
    costs, named = read_roofline(TEXT)[0], Roofline.of(TEXT)
    costs = with_pipelines(costs, named.accelerator, roles_of(named), train, SAMPLES)
    assert costs.train_token_s > 0
    assert costs.fused_train_token_s == 0


LENGTHS = ("--lengths=lognormal:median=300,sigma=0.816,max=2000", "--prompts=8", "--steps=2")


def step_s(*args: str) -> dict[str, float]:
    lines, _, _ = run([*LENGTHS, *args], lambda done, of: None)
    return {line[0]: float(line[1]) for line in lines[1:]}


@pytest.mark.long
def test_the_command_compares_updates_in_one_plan() -> None:
    """Each schedule also with them; the difference is that of the updates."""
    table = step_s(f"--costs={TEXT},pp=4,critic_pp=2,mini_batches=4")
    plain = [name for name in table if " + " not in name]
    for name in plain:
        assert table[f"{name} + fused updates"] < table[name]
    saved = table["serial"] - table["serial + fused updates"]
    assert table["partial"] - table["partial + fused updates"] == pytest.approx(saved, rel=0.2)
    assert "fused + early backward" not in table  # which an actor in a pipeline has not
    without = step_s(f"--costs={TEXT}")
    assert not any("fused updates" in name for name in without)
    assert "fused + early backward" in without


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ("pp=3", "pp x tp = 3 x 1 of 32 ranks"),
        ("pp=2,tp=32", "pp x tp = 2 x 32 of 32 ranks"),
        ("pp=2,tp=16", "40 heads and 40 layers of actor on tp 16 and 2 chunks"),
    ],
)
def test_pipelines_that_do_not_divide_are_refused(sizes: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        step_s(f"--costs={TEXT},{sizes}")


def test_updates_may_take_a_multiple_of_their_roofline():
    """Nothing else changes; pipelines have their own seconds, so there it is refused."""
    plain, *_ = read_roofline(TEXT)
    longer, *_ = read_roofline(f"{TEXT},train_times=6")
    assert longer == replace(plain, train_token_s=longer.train_token_s)
    assert longer.train_token_s == pytest.approx(6 * plain.train_token_s)
    with pytest.raises(ConfigError, match="without train_times"):
        Roofline.of(f"{TEXT},pp=2,train_times=6")
