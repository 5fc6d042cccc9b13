"""`hybridrl plan schedule --rollout`: schedules of ranks that generate alone, in virtual time."""

from dataclasses import replace

import pytest

from hybridrl.config import AsyncScheduleConfig, ConfigError
from hybridrl.config.schedule import ParkedKV
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.instance import Costs
from hybridrl.costs.push import PushCosts, push_costs
from hybridrl.costs.roofline import Roofline
from hybridrl.flow.workload import Shape, read_workload
from hybridrl.plan.schedule import Setting, replay
from hybridrl.plan.schedule_command import run
from hybridrl.plan.separate import best_splits, in_flight, replay_split, split_setting

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
    for outcome in (periodic, one_step):  # an instance that loads does not decode
        assert outcome.decode_s == pytest.approx(generate_s, rel=0.01)


def test_groups_are_trained_as_they_come_once_there_is_a_micro_batch_for_each_rank():
    """Two instances make a group of two samples a second, which takes 0.4 s to train.

    Where a group is a micro-batch a rank, three of the four are trained while others are made, and
    the step ends 0.4 s after the last. Nine ranks find too few tokens, and train all at the end.
    """
    split = split_setting(replace(setting(1e-3, {}), chunk_tokens=200), 2, PushCosts())
    assert split.num_training == 2
    config = AsyncScheduleConfig(max_staleness=0)
    seconds = {
        ranks: replay(replace(split, num_training=ranks), config, skip=2).step_s for ranks in (1, 9)
    }
    assert seconds[9] == pytest.approx(4.0 + 1.6, rel=0.01)
    assert seconds[1] == pytest.approx(4.0 + 0.4, rel=0.01)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_in_flight_the_longest_sample_takes_its_share_of_a_step(max_staleness):
    """Two instances with rows for all: S + 1 batches are made together, in the second of one."""
    alone = replace(setting(1e-6, {}), max_held=256, decode_steps=10)
    split = split_setting(alone, 2, PushCosts())
    seconds = replay_split(split, in_flight(max_staleness)).step_s
    assert seconds == pytest.approx(1.0 / (max_staleness + 1), rel=0.12)  # calls are 0.1 s
    longer = replace(split, workload=replace(split.workload, num_steps=9))
    assert replay_split(longer, in_flight(max_staleness)).step_s == pytest.approx(seconds, rel=0.02)


def test_a_load_in_flight_computes_the_tokens_again_unless_caches_stay():
    """Each of the two instances takes a load a step, under one row of at most 100 tokens."""
    costs = replace(setting(1e-3, {}).costs, prefill_token_s=2e-3)
    one_row = replace(setting(1e-3, {}), costs=costs, decode_steps=10)
    split = split_setting(one_row, 2, PushCosts(load_s=0.05))
    again, kept = (replay_split(split, in_flight(1, parked_kv)) for parked_kv in ParkedKV)
    assert kept.decode_s == pytest.approx(4.0)
    assert 4.0 < again.decode_s <= 4.2
    assert kept.step_s < again.step_s
    nothing = replace(split, costs=replace(split.costs, prefill_token_s=0.0))
    assert replay_split(nothing, in_flight(1)).step_s == kept.step_s


@pytest.mark.long
def test_every_schedule_has_the_best_split_that_a_search_of_all_finds():
    apart = setting(5e-3, {n: PushCosts() for n in (1, 2, 3)})
    lines = best_splits(apart)
    assert [line.schedule for line in lines] == [
        "periodic", "one_step", *("async, S = 1",) * 2, *("async, S = 2",) * 2,
        *("async, S = 4",) * 2,
    ]  # fmt: skip
    for line, max_staleness in zip(lines[2::2], (1, 2, 4), strict=True):
        config = in_flight(max_staleness)
        every = [replay_split(split_setting(apart, n, PushCosts()), config) for n in (1, 2, 3)]
        assert line.step_s == min(one.step_s for one in every)
        assert line.mechanisms == "in flight, 2 ranks generate"
    assert lines[3].mechanisms == "in flight, keep, 2 ranks generate"
    assert not best_splits(replace(apart, splits={}))


@pytest.mark.long
def test_the_command_adds_the_best_split_of_each():
    lines, _, record = run([*HERE, "--rollout=auto"], lambda done, of: None)
    names = [line[0] for line in lines[1:]]
    assert names[:2] == ["serial", "fused + no migration"]
    separate = ["periodic", "one_step", *(f"async, S = {n}" for n in (1, 1, 2, 2, 4, 4))]
    assert [name.split(" + ")[0] for name in names[-8:]] == separate
    fixed, *_ = run([*HERE, "--rollout=4"], lambda done, of: None)
    assert [line[0] for line in fixed[-8:-5]] == [
        "periodic + 4 ranks generate", "one_step + 4 ranks generate",
        "async, S = 1 + in flight, 4 ranks generate",
    ]  # fmt: skip
    for best, of_4 in zip(lines[-8:-6], fixed[-8:-6], strict=True):
        assert float(best[1]) <= float(of_4[1])
    assert record["schedules"][-1]["schedule"] == "async, S = 4"
    plain, *_ = run(HERE, lambda done, of: None)
    assert plain == lines[:-8]


@pytest.mark.parametrize("text", ["3", "8", "0", "x", "-2"])
def test_splits_that_do_not_fit_are_refused(text):
    with pytest.raises(ConfigError, match=r"--rollout.*a multiple of 2 from 2 to 6, of 8 ranks"):
        run([*HERE, f"--rollout={text}"], lambda done, of: None)


def test_updates_may_take_a_multiple_of_their_roofline():
    """Nothing else changes."""
    plain = Roofline.of("gpu:model=13b,critic=7b,total=32").costs()
    longer = Roofline.of("gpu:model=13b,critic=7b,total=32,train_times=6").costs()
    assert longer == replace(plain, train_token_s=longer.train_token_s)
    assert longer.train_token_s == pytest.approx(6 * plain.train_token_s)
