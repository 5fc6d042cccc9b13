"""The rollout engine that a config asks for, on one rank."""

import torch
from transformers import PretrainedConfig

from hybridrl.config import Config
from hybridrl.engines.rollout.interface import EngineParts, RolloutEngine, engine_class
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.layout.switching import Switch
from hybridrl.models.context import context_tokens
from hybridrl.models.shard import GenParallel
from hybridrl.workers.device_residency import free_cached_memory


def make_rollout_engine(
    config: Config,
    model_path: str,
    model_config: PretrainedConfig,
    switch: Switch,
    parallel: GenParallel,
    device: torch.device,
    stops: StopStrings | None,
    reserved_bytes: int = 0,
) -> RolloutEngine:
    """The engine at this rank's position of the generation mesh. Collective.

    Training's weights must have left the device, unless they stay there. Roles that stay will take
    `reserved_bytes` more. The engine is awake, its weights are random.
    """
    longest = config.longest_generated
    free_cached_memory(device)  # an engine may take what the device has left
    return engine_class(config.rollout).build(
        EngineParts(
            rollout=config.rollout,
            model_path=model_path,
            model_config=model_config,
            switch=switch,
            parallel=parallel,
            device=device,
            stops=stops,
            # Prompts that would not leave room for a response are not in the data.
            max_sequence=min(longest, context_tokens(model_config)),
            deterministic=config.strict,
            router_replay=config.trainer.router_replay,
            reserved_bytes=reserved_bytes,
        )
    )
