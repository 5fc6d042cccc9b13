"""`hybridrl plan auto`: the mapping of a recipe's roles to a cluster, as overrides of `train`."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hybridrl.config import (
    ActivationMode,
    AsyncScheduleConfig,
    ClusterKind,
    Config,
    ConfigError,
    Device,
    FuseUpdates,
)
from hybridrl.config.cluster import PoolName
from hybridrl.config.schedule import SCHEDULES, ScheduleConfig, SerialScheduleConfig
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    ACTOR,
    AT_ONCE,
    ClusterShape,
    GenLayout,
    PlannedRole,
    TrainLayout,
)
from hybridrl.costs.mapping_overrides import (
    keys_set,
    layout_key,
    mapping_of,
    overrides,
    pool_field,
    pools_of,
    train_config,
)
from hybridrl.costs.memory import GIB, MemoryPlan
from hybridrl.costs.model import UNSCALED, CostModel
from hybridrl.flow import Graph
from hybridrl.flow.judgements import with_parts
from hybridrl.flow.workload import LENGTHS, Shape, Workload, read_workload
from hybridrl.plan.fitting_layouts import DoesNotFit, check_fits
from hybridrl.plan.mapping_checks import (
    assumptions,
    check_known_costs,
    check_planned_recipe,
    cut_lengths,
)
from hybridrl.plan.mapping_options import FLAGS, auto_options, read_cluster, read_scales
from hybridrl.plan.mapping_price import MappingPrices
from hybridrl.plan.mapping_report import MappingReport, describe, unfinished
from hybridrl.plan.mapping_search import MappingResults, MappingSearch, PricedMapping
from hybridrl.plan.mapping_split import ROLLOUT, PricedSplit, SplitSearch
from hybridrl.plan.search_space import SearchSpace, micro_batch_choices
from hybridrl.preflight import memory_plan
from hybridrl.preflight.activation_choice import decide_activations
from hybridrl.preflight.environment import check_environment
from hybridrl.preflight.fused_updates import decide_fused_updates
from hybridrl.preflight.placement import (
    ConfiguredPlaces,
    check_apart,
    check_placement,
    graphs_of,
)
from hybridrl.preflight.prepare import (
    build_recipe,
    check_attention,
    check_model_settings,
    check_recipe,
    check_schedule,
)
from hybridrl.preflight.prompt_sharing import decide_prompt_sharing
from hybridrl.preflight.roles_together import roles_together
from hybridrl.preflight.schedule_choice import decide_schedule, early_settings
from hybridrl.schedule.build import check_graph
from hybridrl.schedule.readiness import early_updates
from hybridrl.telemetry.log import command_log

if TYPE_CHECKING:
    from hybridrl.preflight.mapping_memory import MappingMemory
    from hybridrl.preflight.mapping_roles import Shapes

USAGE = f"""usage: hybridrl plan auto [OVERRIDES] --nodes=N --lengths=... [OPTIONS]
       hybridrl plan auto OVERRIDES --price --nodes=N --lengths=... [OPTIONS]

Finds which ranks each model of a recipe gets, its layouts in training and in generation, and the
schedule, for the least seconds of a step. The last line is the best mapping as a command:
`hybridrl train` with its overrides. With --price it prices the mapping of the OVERRIDES instead.

  the recipe         recipe=ppo model=qwen3_8b roles.critic.path=DIR reward=model ...
                     (a config.json is enough)
  --lengths          {LENGTHS}
  --prompt-tokens    of a prompt, where the lengths do not say (data.max_prompt_tokens)
  the cluster        --nodes=N, --gpus-per-node=N (8), --gpu={"|".join(ACCELERATORS)},
                     --gpu-gib=N (80); --node-gbs, --network-gbs, --host-gbs: GB/s of a GPU within
                     its node, to other nodes, to the host (the datasheet's); --links=FILE, a table
                     of all workers' links where they differ
  --costs=RUN        a run's directory: its costs.json has the scale of each kind of work
  separate ranks     --max-staleness=S[,S...] (0): steps that generation may be ahead of training,
                     where ranks that generate alone are compared; the quickest S is taken
  the search         --number=N of results (10), --seconds=N (60) of searching; splits get what
                     placements have left, or a quarter

  hybridrl plan auto recipe=ppo model=llama3_8b rollout.max_new_tokens=2048 --nodes=4 \\
    --lengths=lmsys"""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Everything that is known before the search."""

    config: Config
    graph: Graph
    shapes: "Shapes"
    roles: Sequence[PlannedRole]
    prices: MappingPrices
    memory: "MappingMemory"
    room: memory_plan.Room
    user_args: Sequence[str]


def run(
    args: Sequence[str], on_progress: Callable[[int, int], None] = lambda replayed, of: None
) -> MappingReport:
    """The mappings that `args` ask for. Raises ConfigError."""
    from hybridrl.config import compose

    options, rest = auto_options(args)
    compose.register()
    prices_one = "--price" in rest
    rest = [arg for arg in rest if arg not in FLAGS]
    if not prices_one and (wrong := next(keys_set(rest), None)):
        key, _, value = wrong.partition("=")
        raise ConfigError(key, value, "nothing: plan auto chooses it, or --price prices it")
    cluster = read_cluster(options)
    if prices_one:
        user_args = rest
    else:
        user_args = [arg for arg in rest if not arg.startswith("cluster.ranks=")]
        rest = [*rest, f"cluster.ranks={cluster.ranks}"]
    config = compose.check(rest)
    if not config.cluster.holds_models:
        raise ConfigError(
            "cluster", "emulated", "local or slurm: a mapping is of ranks with models"
        )
    if not prices_one:  # it is searched
        config.schedule = SerialScheduleConfig()
    with command_log(config.log.level):
        problem = _problem(config, cluster, options, user_args)
        if prices_one:
            return _price(problem, options)
        return _search(problem, options, on_progress)


def _problem(
    config: Config, cluster: ClusterShape, options: Mapping[str, Any], user_args: Sequence[str]
) -> _Problem:
    from hybridrl.models.shape import model_shape
    from hybridrl.preflight.mapping_memory import MappingMemory
    from hybridrl.preflight.mapping_roles import planned_roles, role_shapes

    if config.cluster.kind is not ClusterKind.slurm:
        gpus = 0 if config.cluster.device is Device.cpu else cluster.ranks
        config.resolve_device(gpus, "the planned cluster")
    device = options.get("gpu", "h100")
    if config.cluster.device is Device.cpu and "gpu" not in options:  # roles stay where they are
        device = "cpu"
        sizes = {"nodes": cluster.nodes, "gpus_per_node": cluster.per_node, "gpu": device}
        cluster = replace(read_cluster({**options, **sizes}), host=AT_ONCE)
    if config.cluster.ranks != cluster.ranks:
        allowed = f"--nodes x --gpus-per-node = {cluster.nodes} x {cluster.per_node}"
        raise ConfigError("cluster.ranks", config.cluster.ranks, allowed)
    graph = with_parts(build_recipe(config.recipe), config)
    check_planned_recipe(config, graph)
    check_recipe(config, graph)
    check_environment(config, graph)
    shape = model_shape(config.model)
    check_attention(config, shape)
    decide_schedule(config, graph, shape)
    decide_prompt_sharing(config, graph, shape)
    config = memory_plan.with_flash(config, shape)
    if config.cluster.device is Device.cuda:
        room = memory_plan.gpu_room(round(options.get("gpu_gib", 80) * GIB))
    else:
        room = memory_plan.local_room(config)
    shapes = role_shapes(config, graph, shape)
    try:
        roles = planned_roles(config, graph, shapes)
    except ValueError as error:
        raise ConfigError("model", shape.model_type, f"a decoder: {error}") from None
    workload = _workload(config, graph, options)
    memory = MappingMemory(config, graph, shapes, room)
    layers = LayerCosts.of(
        cluster.accelerator, config.model.compute_dtype.itemsize, config.rollout.engine
    )
    scales = UNSCALED
    if "costs" in options:
        scales = read_scales(options["costs"], device, config.rollout.engine.value)
    costs = CostModel(layers, cluster, scales=scales)
    prices = MappingPrices(
        costs,
        memory,
        roles,
        workload,
        decode_steps=config.rollout.decode_steps,
        epochs=config.trainer.epochs,
        mini_batches=config.trainer.mini_batches,
    )
    return _Problem(config, graph, shapes, roles, prices, memory, room, user_args)


def _workload(config: Config, graph: Graph, options: Mapping[str, Any]) -> Workload:
    """The samples of one step."""
    if "lengths" not in options:
        raise ConfigError("--lengths", "", LENGTHS)
    prompts = config.trainer.prompts_per_step
    workload = read_workload(
        options["lengths"],
        Shape(
            prompts_per_step=prompts,
            group_size=graph.group_size,
            num_steps=1,
            prompt_tokens=options.get("prompt_tokens", config.data.max_prompt_tokens),
            max_tokens=config.rollout.max_new_tokens,
            seed=config.run.seed,
        ),
    )
    return replace(workload, groups=workload.groups[:prompts], num_steps=1)


def _space(problem: _Problem) -> SearchSpace:
    """What `train` can run."""
    from hybridrl.models.parallel import (
        SPLIT_TOKENS,
        check_gen_layout,
        check_train_layout,
        num_experts,
    )

    config, shapes, trainer = problem.config, problem.shapes, problem.config.trainer

    @cache
    def allows_train(role: str, layout: TrainLayout) -> bool:
        try:
            check_train_layout(shapes[role], train_config(layout))
        except ConfigError:
            return False
        return True

    @cache
    def allows_gen(role: str, gen: GenLayout) -> bool:
        try:
            check_gen_layout(
                shapes[role], gen.pp, gen.tp, gen.ep if num_experts(shapes[role]) else 1
            )
        except ConfigError:
            return False
        return True

    @cache
    def runs(pools: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
        """Whether roles may be apart from the actor as these are."""
        placed = deepcopy(config)
        fields = {pool_field(role): pool for pool, roles in pools for role in roles}
        for field in fields.keys() - {ACTOR}:
            setattr(placed.cluster.pool_of, field, PoolName(fields[field]))
            setattr(placed.cluster.pools, fields[field], 1)
        try:
            for pool, graph in graphs_of(problem.graph, placed).items():
                if pool != ACTOR:
                    check_apart(placed, pool, graph)
        except ConfigError:
            return False
        return True

    def pools(partition: Sequence[Sequence[str]]) -> Mapping[str, tuple[str, ...]] | None:
        by_name = pools_of(problem.roles, partition)
        return by_name if by_name and runs(tuple(by_name.items())) else None

    scorers = [role.name for role in problem.roles if not role.trained]
    samples = len(problem.prices.samples)
    longest, chunk = config.longest_sample, trainer.chunk_tokens
    small, usual = micro_batch_choices(longest, samples, chunk, shares=not chunk)
    return SearchSpace(
        pools=pools,
        schedules=_schedules(problem),
        micro_batch_tokens=usual,
        small_micro_batches=small,
        longest=longest,
        activations=(ActivationMode.keep, ActivationMode.recompute),
        allows_train=lambda role, layout: allows_train(role.name, replace(layout, fsdp=1)),
        allows_gen=lambda role, gen: all(allows_gen(name, gen) for name in (ACTOR, *scorers)),
        fuses=bool(roles_together(config, problem.graph, "actor")) and not trainer.chunk_tokens,
        splits_tokens=lambda role: shapes[role.name].model_type in SPLIT_TOKENS,
    )


def _schedules(problem: _Problem) -> list[ScheduleConfig]:
    """Return the schedules with the batches of `serial` that the recipe allows."""
    schedules = []
    for kind, entry in SCHEDULES.items():
        settings = entry.settings(kind=kind)
        if entry.may_be_stale or not entry.serial_batches:
            continue
        try:
            check_graph(settings, problem.graph)
        except ValueError:
            continue
        schedules.append(settings)
    return schedules


def _mapping_search(problem: _Problem) -> MappingSearch:
    prices = problem.prices
    ranks = prices.costs.cluster.ranks
    return MappingSearch(problem.roles, prices, problem.memory, ranks, _space(problem))


def _search(
    problem: _Problem, options: Mapping[str, Any], on_progress: Callable[[int, int], None]
) -> MappingReport:
    cluster = problem.prices.costs.cluster
    search = _mapping_search(problem)
    number = int(options.get("number", 10))
    try:
        result = search.run(number, seconds := options.get("seconds", 60.0), on_progress)
    except DoesNotFit as error:
        raise ConfigError("--nodes", cluster.nodes, f"more, or larger ones: {error}") from None
    best, refused = list[PricedMapping](), list[str]()
    for one in result.best:
        memory = _memory_of(problem, one, refused)
        if memory is not None:
            best.append(replace(one, memory=memory))
    if not best:
        allowed = f"a recipe and cluster of which a mapping runs: {'; '.join(refused)}"
        raise ConfigError("plan", "auto", allowed)
    shared_s = best[0].seconds.step_s
    staleness, left_s = options.get("max_staleness", [0]), seconds - result.seconds
    budget_s = max(left_s, seconds / 4)
    splits, separate, rest_s = _splits(problem, search, staleness, budget_s, shared_s, refused)
    if winners := [split for split in splits if split.wins(shared_s)]:
        best = [min(winners, key=lambda split: split.step_s).priced, *best][:number]
    settings = [overrides(one.mapping) for one in best]
    source = options.get("costs", "datasheet")
    result = replace(result, best=best)
    return MappingReport(
        result,
        settings,
        refused,
        problem.user_args,
        source,
        assumed=cut_lengths(problem.config, problem.prices.samples),
        separate=separate,
        separate_s={split.max_staleness: split.step_s for split in splits},
        separate_rest_s=rest_s,
        shared_s=shared_s,
    )


def _memory_of(
    problem: _Problem, one: PricedMapping, refused: list[str]
) -> Mapping[str, MemoryPlan] | None:
    """The memory of a mapping that a run can have; else None, and one reason more."""
    try:
        return checked(problem, [*problem.user_args, *overrides(one.mapping)])[1]
    except ConfigError as error:
        refused.append(f"{describe(one)} ({error})")
        return None


def _splits(
    problem: _Problem,
    search: MappingSearch,
    staleness: Sequence[int],
    budget_s: float,
    shared_s: float,
    refused: list[str],
) -> tuple[list[PricedSplit], list[str], dict[int, float | None]]:
    """The quickest split of each staleness that a run can have, and why it wins or loses.

    The third are bounds of the splits that time has left out, by staleness. Each staleness has an
    equal share of the time that the ones before it have left.
    """
    chosen, lines, rest_s = list[PricedSplit](), list[str](), dict[int, float | None]()
    searches, until = _split_search(problem, search), time.monotonic() + budget_s
    for number, most in enumerate(staleness):
        not_tried = f"with max_staleness={most} ranks that generate alone are not tried"
        try:
            check_graph(AsyncScheduleConfig(max_staleness=most), problem.graph)
        except ValueError as error:
            lines.append(f"{not_tried}: the recipe runs with {error}")
            continue
        share_s = (until - time.monotonic()) / (len(staleness) - number)
        result = searches.run(most, share_s)
        rest_s[most] = result.rest_s
        line = f"{not_tried}: no split of these ranks fits"
        if num_replayed := len(result.splits):
            line = f"{not_tried}: none of {num_replayed} that were replayed can run"
        for split in result.splits:
            memory = _memory_of(problem, split.priced, refused)
            if memory is not None:
                chosen.append(replace(split, priced=replace(split.priced, memory=memory)))
                line = split.reason(shared_s)
                line += "; --max-staleness=1 lets steps overlap" * (not any(staleness))
                break
        if result.rest_s is not None:
            line += f"; {unfinished(result.rest_s)}"
        lines.append(line)
    return chosen, lines, rest_s


def _split_search(problem: _Problem, search: MappingSearch) -> SplitSearch:
    """The search for a split, which knows whether a run would train groups as they come."""
    places = deepcopy(problem.config)
    places.cluster.pools.rollout = 1
    early = early_settings(places, (), problem.shapes[ACTOR])
    updates = early_updates(problem.graph, ConfiguredPlaces(places), early).values()
    return SplitSearch(search, any(update.stage for update in updates))


def _price(problem: _Problem, options: Mapping[str, Any]) -> MappingReport:
    """The mapping of the config itself, with updates in one plan or apart as a run has them."""
    config, memory = checked(problem, problem.user_args)
    check_known_costs(config, problem.prices.samples)
    mapping = mapping_of(config, problem.roles)
    problem = replace(problem, prices=problem.prices.in_order(mapping.rank_order))
    search = _mapping_search(problem)
    if alone := config.cluster.pools.rollout:
        if len(mapping.pools) > 1 or not isinstance(mapping.schedule, AsyncScheduleConfig):
            allowed = "0, or with schedule=periodic, one_step or async and no other pool with roles"
            raise ConfigError("cluster.pools.rollout", alone, f"{allowed}: others have no price")
        mapping = replace(
            mapping,
            pools={**mapping.pools, ROLLOUT: ()},
            ranks={**mapping.ranks, ROLLOUT: alone},
        )
        priced = replace(_split_search(problem, search).price(mapping).priced, memory=memory)
    else:
        priced = search.price(mapping, memory)
    settings = []
    if problem.config.trainer.activations is ActivationMode.auto:
        settings.append(f"trainer.activations={config.trainer.activations.value}")
    if len(mapping.train) > 1 and problem.config.trainer.fuse_updates is FuseUpdates.auto:
        settings.append(f"trainer.fuse_updates={config.trainer.fuse_updates.value}")
    source = options.get("costs", "datasheet")
    assumed = [*assumptions(config), *cut_lengths(config, problem.prices.samples)]
    result = MappingResults(best=[priced])
    return MappingReport(result, [settings], [], problem.user_args, source, assumed)


def checked(problem: _Problem, args: Sequence[str]) -> tuple[Config, Mapping[str, MemoryPlan]]:
    """The config of these overrides as a run decides it, and its memory by pool.

    With the checks of `train` that need neither weights nor data. Raises ConfigError, which names
    the largest size where a rank cannot hold it.
    """
    from hybridrl.config import compose
    from hybridrl.models.parallel import check_train_layout

    config = compose.check(args)
    ranks = problem.prices.costs.cluster.ranks
    if config.cluster.kind is not ClusterKind.slurm:
        gpus = 0 if config.cluster.device is Device.cpu else ranks
        config.resolve_device(gpus, "the planned cluster")
    check_placement(config, problem.graph)
    for role in problem.roles:
        if role.trained:
            is_actor = role.name == ACTOR
            own = config.trainer if is_actor else config.value_model_of(role.name)
            key = layout_key(role.name)
            check_train_layout(problem.shapes[role.name], own.layout, key)
    shape = problem.shapes[ACTOR]
    check_model_settings(config, shape)
    decide_schedule(config, problem.graph, shape)
    check_schedule(config.schedule, problem.graph)
    config = memory_plan.with_flash(config, shape)
    of_gpu = problem.room.capacity if config.cluster.device is Device.cuda else None
    decide_prompt_sharing(config, problem.graph, shape)
    decide_activations(config, problem.graph, shape, of_gpu)
    decide_fused_updates(config, problem.graph, shape, of_gpu)
    plan = memory_plan.plan_run(config, problem.graph, shape, problem.room)
    try:
        check_fits(plan.pools)
    except DoesNotFit as error:
        raise ConfigError("mapping", _first_line(args), f"one that fits: {error}") from None
    return config, plan.pools


def _first_line(args: Sequence[str]) -> str:
    return " ".join(keys_set(args)) or "of the defaults"
