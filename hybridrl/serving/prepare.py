"""Everything that is checked and made before a server starts a process: a run's, without data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import (
    Config,
    ConfigError,
    EmulatedClusterConfig,
    LoraConfig,
    OptimName,
    RouterReplay,
    Vision,
)
from hybridrl.engines.rollout.available import engine_checks
from hybridrl.flow import Flow, Graph, recipe
from hybridrl.models.context import context_tokens
from hybridrl.models.load import load_config
from hybridrl.preflight.activation_choice import decide_activations
from hybridrl.preflight.memory_plan import check_memory
from hybridrl.preflight.prepare import (
    check_machine,
    check_writable,
    checked_model,
    model_path_of,
)
from hybridrl.preflight.prompt_sharing import decide_prompt_sharing
from hybridrl.preflight.schedule_choice import decide_schedule
from hybridrl.preflight.served_copies import most_models
from hybridrl.serving.requests import ServedModel
from hybridrl.system.short_tmpdir import shorten_tmpdir


@dataclass(frozen=True)
class PreparedServer:
    """The inputs of a server, before its ranks start; `graph` is what memory is planned for."""

    model_path: str
    served: ServedModel
    graph: Graph


@recipe("serve")
def _served(flow: Flow, cfg: Any) -> None:
    """Generate and train: the roles of a server."""
    flow.actor.update(flow.actor.generate(flow.prompts), loss=CrossEntropyLoss())


def prepare_server(config: Config) -> PreparedServer:
    """Check the config against the world, make the tiny model; raises `ConfigError`."""
    shorten_tmpdir()
    run_dir, graph = Path(config.run.dir), replace(_served.build(None), from_clients=True)
    config.eval.sets = {}  # whose judges ranks would start
    _check_served(config)
    gpu_memory = check_machine(config, graph)
    engine_checks(config.rollout).check_installed()
    config.telemetry.check_installed()
    check_writable(run_dir)
    path = model_path_of(config, run_dir)
    shape, _ = checked_model(config, graph, path)
    decide_schedule(config, graph, shape)
    decide_prompt_sharing(config, graph, shape)
    pads = 0  # clients' prompts are texts
    decide_activations(config, graph, shape, gpu_memory, pads)
    plan = check_memory(config, graph, path, gpu_memory, pads)
    served = ServedModel(
        name=config.serve.name or config.model.path or "tiny",
        tokenizer_path=path,
        max_tokens=_most_tokens(config, context_tokens(shape)),
        lora_rank=config.actor.lora.rank,
        vocab=load_config(path).vocab_size,
        trained=_trained(config.actor.lora),
        sampler_scores=config.rollout.features.shares_weights,
        most_models=most_models(config, shape, plan),
    )
    return PreparedServer(path, served, graph)


def _trained(lora: LoraConfig) -> str:
    """Which weights are trained, in words."""
    if not lora.rank:
        return "all weights"
    modules = ", ".join(sorted(lora.target_modules))
    return f"adapters of rank {lora.rank} and alpha {lora.alpha} on {modules}"


def _most_tokens(config: Config, context: int) -> int:
    """Tokens of the longest prompt with its response, which the KV cache must hold.

    A datum of as many input tokens has a target behind them, which the model computes, too.
    """
    rollout = config.rollout
    cached = rollout.kv_cache_tokens // rollout.block_size * rollout.block_size
    return min(config.longest_generated, context - 1, cached or context)


def _check_served(config: Config) -> None:
    """Raise for settings that a server cannot have, by their keys."""
    cluster, rollout, trainer = config.cluster, config.rollout, config.trainer
    if isinstance(cluster, EmulatedClusterConfig) or not cluster.holds_models:
        raise ConfigError("cluster", cluster.kind.value, "a cluster whose ranks hold models")
    cluster.check_starts_once("serve")
    if cluster.home != "actor" or len(cluster.pool_ranks) > 1:
        allowed = "one pool, whose ranks train and generate"
        raise ConfigError("cluster.pools", ", ".join(cluster.pool_ranks), allowed)
    if config.environment.is_on:
        raise ConfigError("environment", config.environment.kind.value, "none: clients have theirs")
    if config.model.vision is not Vision.frozen:
        raise ConfigError("model.vision", config.model.vision.value, "frozen: clients send texts")
    if trainer.optim.name is not OptimName.adamw:
        raise ConfigError(
            "trainer.optim.name", trainer.optim.name.value, "adamw, as clients expect"
        )
    if trainer.router_replay is not RouterReplay.off:
        raise ConfigError("trainer.router_replay", trainer.router_replay.value, "off")
    if rollout.stop:
        raise ConfigError("rollout.stop", rollout.stop, "[]: each request has stop texts")
