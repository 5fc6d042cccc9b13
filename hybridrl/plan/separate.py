"""Ranks that generate and do not train, in virtual time: the schedules that they allow, by split.

A split is the number of instances that have ranks of their own; the other ranks train.
"""

from collections.abc import Callable
from dataclasses import replace

from hybridrl.config import AsyncScheduleConfig
from hybridrl.config.schedule import NewWeights, ParkedKV
from hybridrl.costs.push import PushCosts
from hybridrl.flow.executor import Scope
from hybridrl.plan.schedule import Outcome, Setting, replay


def in_flight(max_staleness: int, parked_kv: ParkedKV = ParkedKV.recompute) -> AsyncScheduleConfig:
    """Return the schedule whose instances take new weights under unfinished samples."""
    return AsyncScheduleConfig(
        max_staleness=max_staleness, new_weights=NewWeights.in_flight, parked_kv=parked_kv
    )


STALENESS = (1, 2, 4)
"""Values of `schedule.max_staleness` that are planned with weights in flight."""
SCHEDULES = {
    "periodic": AsyncScheduleConfig(max_staleness=0),
    "one_step": AsyncScheduleConfig(max_staleness=1),
    **{f"async, S = {most}": in_flight(most) for most in STALENESS},
}
"""The schedules of separate ranks, by the name that a line of the plan has."""


def split_setting(setting: Setting, instances: int, push: PushCosts) -> Setting:
    """The setting in which so many of the instances have ranks of their own, and the others train.

    An instance has the seconds that it had. Training ranks share updates and passes of models as
    all ranks did, so their seconds grow with the share that is gone: layouts that fit are assumed.
    """
    costs, train = setting.costs, setting.num_instances - instances
    assert 0 < instances < setting.num_instances, (instances, setting.num_instances)
    here = (Scope.RANK, Scope.DRIVER)
    return replace(
        setting,
        num_instances=instances,
        costs=replace(
            costs,
            token_s={
                name: seconds if setting.scope_of[name] in here else seconds / train
                for name, seconds in costs.token_s.items()
            },
            train_token_s=costs.train_token_s * setting.num_instances / train,
            drafting=None,
        ),
        scopes={
            **setting.scopes,
            **{n: s if s in here else Scope.POOL for n, s in setting.scope_of.items()},
        },
        widths=(),
        apart=push,
        num_training=train * setting.instance_ranks,
    )


def steps_to_skip(config: AsyncScheduleConfig) -> int:
    """Return the first steps that are not those of a long run: all begin on the first weights."""
    return max(2, 1 + config.max_staleness)


def replay_split(setting: Setting, config: AsyncScheduleConfig) -> Outcome:
    """Replay a split, without the steps to skip, and for two periods of the schedule at least.

    Where the longest sample takes longer than all else, S + 1 steps end soon after each other and
    the next one waits, over and over. So the mean is that of whole periods of S + 1 steps.
    """
    skip, period = steps_to_skip(config), 1 + config.max_staleness
    counted = max(setting.workload.num_steps - skip, 2 * period)
    steps = skip + -(-counted // period) * period
    setting = replace(setting, workload=replace(setting.workload, num_steps=steps))
    return replay(setting, config, skip)


def best_splits(
    setting: Setting, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Outcome]:
    """Every schedule of separate ranks, with the split of `Setting.splits` that is quickest.

    `periodic` and `one_step` are replayed with all splits. With weights in flight the search goes
    from the best split of the schedule before to a neighbor, for as long as that is quicker. The
    line after is the same split where keys and values stay as they are. `on_progress` gets the
    replays done and about how many there will be.
    """
    outcomes, splits, best, done = list[Outcome](), [*setting.splits], 0, 0
    in_all = [config.in_flight for config in SCHEDULES.values()]
    total = sum(4 if one else len(splits) for one in in_all)

    def outcome(split: int, name: str, config: AsyncScheduleConfig) -> Outcome:
        nonlocal done
        instances = splits[split]
        apart = split_setting(setting, instances, setting.splits[instances])
        replayed = replay_split(apart, config)
        done += 1
        on_progress(min(done, total), total)
        how = "in flight, " * config.in_flight + "keep, " * config.keeps_kv
        ranks = instances * setting.instance_ranks
        return replace(replayed, schedule=name, mechanisms=f"{how}{ranks} ranks generate")

    for name, config in SCHEDULES.items() if splits else ():
        tried = {
            split: outcome(split, name, config)
            for split in ([best] if config.in_flight else range(len(splits)))
        }
        best = min(tried, key=lambda split: tried[split].step_s)
        while near := [n for n in (best - 1, best + 1) if 0 <= n < len(splits) and n not in tried]:
            tried |= {split: outcome(split, name, config) for split in near}
            best = min(tried, key=lambda split: tried[split].step_s)
        outcomes.append(tried[best])
        if config.in_flight:
            kept = replace(config, parked_kv=ParkedKV.keep)
            outcomes.append(outcome(best, name, kept))
    return outcomes
