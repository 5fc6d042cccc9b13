"""The costs and lengths of an emulated device, by the texts of `hybridrl plan schedule`."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config import (
    Config,
    ConfigError,
    EmulatedClusterConfig,
)
from hybridrl.costs.instance import Costs, Drafting
from hybridrl.costs.model_shape import ModelShape
from hybridrl.costs.push import PushCosts, push_costs
from hybridrl.costs.roofline import Roofline
from hybridrl.flow.conversations import ConversationModel, read_conversations
from hybridrl.flow.graph import (
    ComputeStage,
    Graph,
    MapStage,
    Stage,
    StageMethod,
)
from hybridrl.flow.workload import Shape, Workload, known_guesses, read_costs, read_workload

Read = TypeVar("Read")


def emulated_costs(config: Config) -> Costs:
    """Return `cluster.costs` in real seconds, with `rollout.speculate`; raises `ConfigError`.

    A roofline is of an instance's ranks, and of all of them, unless its text says otherwise.
    """
    costs = _costs(config)
    return replace(costs, drafting=_drafting(config, costs))


def _drafting(config: Config, costs: Costs) -> Drafting | None:
    """How rows guess ahead: the share of right guesses is that of the lengths, else of the costs.

    Raises `ConfigError` where neither says it.
    """
    rollout = config.rollout
    if rollout.draft_length == 0:
        return None
    accept = emulated_workload(config, 1).accept
    if accept is None and costs.drafting is not None:
        accept = costs.drafting.accept
    if accept is None:
        allowed = f"off, or {known_guesses('cluster.lengths', 'cluster.costs')}"
        raise ConfigError("rollout.speculate", rollout.speculate, allowed)
    return Drafting(tokens=rollout.draft_length, accept=accept, pass_tokens=rollout.pass_tokens)


def scaled_costs(config: Config) -> Costs:
    """Return the costs in the seconds that the run takes for them."""
    return scaled(emulated_costs(config), _cluster(config).time_scale)


def emulated_gpu_memory(cluster: EmulatedClusterConfig) -> int | None:
    """Return the bytes of a GPU of the costs; None where they name none. Raises `ConfigError`."""
    if not cluster.knows_model:
        return None
    named = _of_key("cluster.costs", lambda: Roofline.of(cluster.costs))
    return round(named.accelerator.memory_bytes / 1e9) * 2**30  # makers mean GiB by 80 GB


def imitated_shapes(config: Config) -> dict[str, ModelShape]:
    """Return the models that a roofline names, by role: its critic also judges."""
    named = Roofline.of(_cluster(config).costs).trained
    return {**named, **({"reward": named["critic"]} if "critic" in named else {})}


def _cluster(config: Config) -> EmulatedClusterConfig:
    assert isinstance(config.cluster, EmulatedClusterConfig), config.cluster.kind
    return config.cluster


def _costs(config: Config) -> Costs:
    text = _cluster(config).costs
    if not text.startswith("gpu:"):
        facts: dict[str, Any] = _of_key("cluster.costs", lambda: read_costs(Path(text)))
        costs: Costs = facts["costs"]
        return costs
    ranks = _model_ranks(config)
    gpus = config.rollout.layout.ranks
    named = _of_key("cluster.costs", lambda: Roofline.of(text, gpus, ranks))
    if named.instances != ranks // gpus:
        allowed = f"a roofline of {ranks // gpus} instances of {gpus}, as the run's ranks are"
        raise ConfigError("cluster.costs", text, allowed)
    return named.costs(emulated_widths(config))


def _model_ranks(config: Config) -> int:
    """The ranks that train the actor or generate, which the costs are of."""
    return sum(config.ranks_of(pool) for pool in {"actor", config.cluster.home})


def emulated_train_token_s(config: Config) -> float:
    """Seconds a token of an update, which the ranks of the pool `actor` share."""
    share = _model_ranks(config) / config.ranks_of("actor")
    return scaled_costs(config).train_token_s * share


def emulated_push(config: Config) -> PushCosts:
    """Seconds of a push and a load, as `plan schedule --rollout` has them."""
    cluster, size = _cluster(config), config.rollout.layout.ranks
    if not cluster.knows_model:
        return PushCosts(load_s=scaled_costs(config).switch_s)
    named = Roofline.of(cluster.costs)
    costs = push_costs(
        named.weight_bytes,
        named.accelerator,
        train_ranks=config.ranks_of("actor"),
        instance_ranks=size,
        instances=config.ranks_of(config.cluster.home) // size,
    )
    return PushCosts(costs.push_s * cluster.time_scale, costs.load_s * cluster.time_scale)


def emulated_widths(config: Config) -> tuple[int, ...]:
    """Return the numbers of instances that may decode the tail as one."""
    rollout = config.rollout
    return tuple(rollout.widths(config.ranks_of(config.cluster.home) // rollout.layout.ranks))


def emulated_workload(config: Config, group_size: int) -> Workload:
    """`cluster.lengths` in the run's shape; raises `ConfigError`."""
    cluster, trainer = _cluster(config), config.trainer
    return _workload(
        cluster.lengths,
        trainer.prompts_per_step,
        group_size,
        trainer.steps,
        cluster.prompt_tokens,
        config.run.seed,
    )


@lru_cache(maxsize=4)  # one for all ranks of a process
def _workload(
    text: str, prompts: int, group_size: int, steps: int, prompt_tokens: int | None, seed: int
) -> Workload:
    shape = Shape(
        prompts_per_step=prompts,
        group_size=group_size,
        num_steps=steps,
        prompt_tokens=prompt_tokens,
        seed=seed,
    )
    return _of_key("cluster.lengths", lambda: read_workload(text, shape))


def emulated_conversations(config: Config) -> ConversationModel | None:
    """`cluster.turns`, with waits in real seconds; None without turns. Raises `ConfigError`."""
    text, scale = config.cluster.turns, _cluster(config).time_scale
    if text is None:
        return None
    model = _of_key("cluster.turns", lambda: read_conversations(text))
    return replace(model, wait_s=model.wait_s * scale)


def check_emulation(config: Config, cluster: EmulatedClusterConfig, graph: Graph) -> None:
    """Raise `ConfigError` for texts that cannot be read, or a stage without costs."""
    costs = emulated_costs(config)
    workload = emulated_workload(config, graph.group_size).cut_at(config.rollout.max_new_tokens)
    longest = [max(group.lengths) for group in workload.groups]  # of each prompt
    of = "the longest responses of prompts of cluster.lengths"
    config.schedule.check_lengths(min(longest) - 1, max(longest), of)
    emulated_conversations(config)
    for stage in graph.stages.values():
        if is_pass(stage, config) and cost_name(costs, stage) is None:
            known = ", ".join(costs.token_s) or "none"
            allowed = f"costs of stage {stage.name}, or of its role {stage.role} (there: {known})"
            raise ConfigError("cluster.costs", cluster.costs, allowed)


def llama_config(sizes: ModelShape, tokens: int) -> dict[str, Any]:
    """Return the Hugging Face config of a Llama of these sizes, which reads so many tokens."""
    return {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.features,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": sizes.tied,
        "max_position_embeddings": tokens,
    }


def is_pass(stage: Stage, config: Config) -> bool:
    """Whether a stage is a forward pass of a model; verifiers and `map` are none."""
    if not isinstance(stage, ComputeStage) or isinstance(stage, MapStage):
        return False
    return stage.method is not StageMethod.SCORE or config.is_neural(stage.role or "")


def cost_name(costs: Costs, stage: Stage) -> str | None:
    """The name under which a forward-only stage has costs: its own or its role's.

    None where neither has, but for the actor: its own pass costs as prefill does.
    """
    names = (stage.name, stage.role or "")
    known = next((name for name in names if name in costs.token_s), None)
    return known or ("actor" if stage.role == "actor" else None)


def pass_seconds(costs: Costs, stage: Stage, tokens: float) -> float:
    """Seconds of one call of a forward-only stage on an instance."""
    name = cost_name(costs, stage)
    if name is None:
        return 0.0
    if name not in costs.token_s:
        return costs.prefill_token_s * tokens
    return costs.compute(name, tokens)


def scaled(costs: Costs, factor: float) -> Costs:
    """All seconds times `factor`."""
    values: dict[str, Any] = {
        name: {x: seconds * factor for x, seconds in value.items()}
        if isinstance(value, dict)
        else value * factor
        for name, value in asdict(replace(costs, drafting=None)).items()
        if name != "drafting"
    }
    return Costs(**values, drafting=costs.drafting)


def _of_key(key: str, read: Callable[[], Read]) -> Read:
    """What `read` gives; its errors name `key` in place of an option."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(key, error.value, error.allowed) from None
