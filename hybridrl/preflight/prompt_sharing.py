"""Decides before a run whether groups share their prompts (`trainer.share_prompts`)."""

import logging
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, Config, ConfigError, SharePrompts
from hybridrl.flow import Graph
from hybridrl.flow.graph import SourceStage
from hybridrl.models.config_json import num_recurrent

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

KEY = "trainer.share_prompts"
SHORTEST = 64
"""Tokens of the longest prompt from which on `auto` shares: less than that saves little."""


def decide_prompt_sharing(config: Config, graph: Graph, shape: "PretrainedConfig") -> str:
    """Set `trainer.share_prompts` to `always` or `never`; return a line that says which, and why.

    `shape` is the actor's model. The line is empty for `never`, and for `auto` with short prompts.
    Raises ConfigError for `always` where training would not be what it is without.
    """
    wanted = config.trainer.share_prompts
    short = config.data.max_prompt_tokens < SHORTEST
    if wanted is SharePrompts.never or (wanted is SharePrompts.auto and short):
        config.trainer.share_prompts = SharePrompts.never
        return ""
    obstacle, lone = _obstacle(config, graph, shape), _has_lone_samples(graph)
    if obstacle and wanted is SharePrompts.always:
        raise ConfigError(KEY, "always", f"auto or never: {obstacle}")
    if lone and wanted is SharePrompts.always:
        logger.warning("%s=always has no effect: %s", KEY, lone)
    reason = obstacle or lone
    config.trainer.share_prompts = SharePrompts.never if reason else SharePrompts.always
    line = f"{KEY}={wanted.value}: {f'never, {reason}' if reason else 'always'}"
    logger.info("%s", line)
    return line


def _obstacle(config: Config, graph: Graph, shape: "PretrainedConfig") -> str | None:
    """Why shared prompts would change a run by more than rounding, or take memory unplanned."""
    from hybridrl.models.attention_shape import attention_shape

    if num_recurrent(shape):
        return "recurrent layers compute each sequence from its first token on"
    if config.strict:
        return "deterministic=strict sums gradients sequence by sequence"
    loras = {"actor": config.actor.lora}
    trained = [role for role in VALUE_MODELS if role in graph.learned]
    loras |= {VALUE_MODELS[role]: config.value_model_of(role).lora for role in trained}
    for place, lora in loras.items():
        if lora.rank and lora.dropout:
            wanted = f"{place}.lora.dropout=0 ({lora.dropout})"
            return f"dropout is drawn for each response; wanted {wanted}"
    if attention_shape(shape).sinks:
        return "a mask for each layer, which attention sinks need, takes more than it saves"
    return None


def _has_lone_samples(graph: Graph) -> str | None:
    """Why no prompt has several samples; None where one may have."""
    numbers = [s.num_samples for s in graph.stages.values() if isinstance(s, SourceStage)]
    if None in numbers or sum(number or 0 for number in numbers) > 1:
        return None
    return "each prompt has one sample"
