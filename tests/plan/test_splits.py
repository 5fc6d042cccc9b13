"""`hybridrl plan schedule --rollout`: schedules of ranks that generate alone, in virtual time."""

from dataclasses import replace

import pytest

from hybridrl.config import AsyncScheduleConfig, ConfigError
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.instance import Costs
from hybridrl.costs.push import PushCosts, push_costs
from hybridrl.flow.workload import Shape, read_workload
from hybridrl.plan.schedule import Setting, replay, split_setting, split_variants
from hybridrl.plan.schedule_command import run

HERE = [
    "--lengths=lognormal:median=50,sigma=0.8", "--prompts=4", "--group-size=2", "--steps=4",
    "--max-tokens=200", "--costs=gpu:model=8b,gpus=2,total=8",
]  # fmt: skip


def setting(train_token_s: float, splits: dict[int, PushCosts]) -> Setting:
    """Four instances; all responses of 100 tokens, one second each alone."""
    costs = Costs(
        step_s=0.01, row_s=0.0, cached_token_s=0.0, prefill_token_s=0.0,
        token_s={"reference": 1e-5}, train_token_s=train_token_s,
    )  # fmt: skip
    shape = Shape(prompts_per_step=4, group_size=2, num_steps=6, prompt_tokens=0, max_tokens=None)
    workload = read_workload("lognormal:median=100,sigma=0", shape)
    return Setting(
        costs=costs, num_instances=4, max_held=1, workload=workload, group_size=2, splits=splits
    )


def test_a_push_sends_one_model_and_a_rank_takes_its_shard():
    """Bytes over the datasheet's links: 64 GB/s to the host, 50 GB/s to other nodes."""
    gpu = ACCELERATORS["h100"]
    few = push_costs(16e9, gpu, train_ranks=8, instance_ranks=4, instances=1)
    assert few.push_s == pytest.approx(2e9 / 64e9)
    assert few.load_s == pytest.approx(4e9 / 50e9 + 4e9 / 64e9)
    many = push_costs(16e9, gpu, train_ranks=8, instance_ranks=4, instances=6)
    assert many.load_s == pytest.approx(12e9 / 50e9 + 4e9 / 64e9)


def test_training_ranks_share_what_all_did():
    split = split_setting(setting(1e-3, {}), 1, PushCosts())
    assert split.num_instances == 1
    assert split.costs.train_token_s == pytest.approx(1e-3 * 4 / 3)
    assert split.costs.token_s["reference"] == pytest.approx(1e-5 / 3)


@pytest.mark.parametrize("train_token_s", [1e-3, 1e-2])
def test_one_step_takes_the_longer_side_and_periodic_both(train_token_s):
    """G and T as by hand: 8 samples of a second in turn on 2 instances; 800 tokens on 2 of 4."""
    push = PushCosts(push_s=0.01, load_s=0.02)
    split = split_setting(setting(train_token_s, {}), 2, push)
    generate_s, train_s = 4.0, 800 * train_token_s * 2 + 0.004
    periodic, one_step = (
        replay(split, AsyncScheduleConfig(max_staleness=staleness), skip=2) for staleness in (0, 1)
    )
    assert periodic.step_s == pytest.approx(generate_s + train_s + 0.03, rel=0.01)
    assert one_step.step_s == pytest.approx(max(generate_s, train_s), rel=0.02)
    assert (periodic.off_policy, one_step.off_policy) == (0.0, 1.0)


def test_every_split_has_both_schedules():
    lines = split_variants(setting(1e-3, {1: PushCosts(), 3: PushCosts()}))
    assert [line.mechanisms for line in lines["periodic"]] == [
        "1 ranks generate",
        "3 ranks generate",
    ]
    assert lines.keys() == {"periodic", "one_step"}
    assert not split_variants(replace(setting(1e-3, {}), splits={}))


def test_the_command_adds_the_best_split_of_each():
    lines, _, record = run([*HERE, "--rollout=auto"], lambda done, of: None)
    names = [line[0] for line in lines[1:]]
    assert names[:2] == ["serial", "fused + no migration"]
    assert [name.split(" + ")[0] for name in names[-2:]] == ["periodic", "one_step"]
    fixed, *_ = run([*HERE, "--rollout=4"], lambda done, of: None)
    assert [line[0] for line in fixed[-2:]] == [
        "periodic + 4 ranks generate", "one_step + 4 ranks generate",
    ]  # fmt: skip
    best, of_4 = float(lines[-1][1]), float(fixed[-1][1])
    assert best <= of_4
    assert record["schedules"][-1]["schedule"] == "one_step"
    plain, *_ = run(HERE, lambda done, of: None)
    assert plain == lines[:-2]


@pytest.mark.parametrize("text", ["3", "8", "0", "x", "-2"])
def test_splits_that_do_not_fit_are_refused(text):
    with pytest.raises(ConfigError, match=r"--rollout.*a multiple of 2 from 2 to 6, of 8 ranks"):
        run([*HERE, f"--rollout={text}"], lambda done, of: None)
