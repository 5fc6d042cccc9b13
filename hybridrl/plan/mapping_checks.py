"""What `hybridrl plan auto` refuses or assumes, since its costs do not know it."""

from collections.abc import Sequence

from hybridrl.config import ActivationMode, Config, ConfigError
from hybridrl.costs.mapping import ACTOR, SampleLength
from hybridrl.flow import Graph


def check_planned_recipe(config: Config, graph: Graph) -> None:
    """Raise for a recipe without generation, or without an update of the actor."""
    trains = graph.trains(ACTOR)
    if not (graph.generates and trains):
        name = str(config.recipe.get("target")).rpartition(":")[2]
        lacks = "does not generate" if trains else "does not train the actor"
        allowed = f"one that generates and trains the actor, as ppo or grpo; {name} {lacks}"
        raise ConfigError("recipe", name, allowed)


def check_known_costs(config: Config, samples: Sequence[SampleLength]) -> None:
    """Raise for samples that a mapping by hand trains in chunks, which have no costs."""
    most, chunk = config.trainer.max_tokens_per_micro_batch, config.trainer.chunk_tokens
    longest = max(sample.tokens for sample in samples)
    if chunk and longest > most:
        reason = f"for samples of {longest} tokens with trainer.max_tokens_per_micro_batch={most}"
        allowed = f"0 with plan auto, whose costs know no chunks, {reason}"
        raise ConfigError("trainer.chunk_tokens", chunk, allowed)


def cut_lengths(config: Config, samples: Sequence[SampleLength]) -> list[str]:
    """That responses end at the run's limit, where a tenth and more of them do."""
    limit = config.rollout.max_new_tokens
    share = sum(sample.response >= limit for sample in samples) / max(1, len(samples))
    if share < 0.1:
        return []
    return [f"rollout.max_new_tokens={limit}: {share:.0%} of the responses end there"]


def assumptions(config: Config) -> list[str]:
    """What the seconds of a mapping by hand assume."""
    lines = []
    if config.trainer.activations is ActivationMode.offload:
        lines.append(
            "trainer.activations=offload: its memory is that of the plan, its seconds are those of"
            " keep, as if other layers hid all copies to the host"
        )
    if config.trainer.activations is ActivationMode.selective:
        lines.append(
            "trainer.activations=selective: its memory is that of the plan, its seconds are those"
            " of keep, without the operations that are computed again"
        )
    off = {
        "rollout.speculate": config.rollout.speculate,
        "rollout.tail_tp": config.rollout.tail_tp,
        "schedule.early_backward": getattr(config.schedule, "early_backward", "never"),
    }
    for key, setting in off.items():
        value = setting if isinstance(setting, str) else setting.value
        if value not in ("off", "never"):
            lines.append(f"{key}={value}: the seconds are those without it")
    kind = config.schedule.kind
    if not config.schedule.serial_batches:
        lines.append(
            f"schedule={kind.value}: its batches are not those of serial, a step's seconds"
            " alone do not compare them"
        )
    return lines
