"""Whether a recipe can train on the ids that truncated sampling has kept."""

from hybridrl.config import MOST_KEPT, Config, ConfigError, SamplingReplay
from hybridrl.flow import Graph
from hybridrl.flow.executor import Sampling
from hybridrl.flow.graph import GenerateStage, UpdateStage
from hybridrl.flow.ledger import sampling_of


def check_sampling_replay(config: Config, graph: Graph) -> None:
    """Raise ConfigError for a stage that truncates and keeps no ids, or a loss that reads top ids.

    A stage may draw by other settings than those of `rollout`.
    """
    rollout = config.rollout
    if rollout.sampling_replay is SamplingReplay.off:
        return
    default = Sampling.of(rollout, rollout.max_new_tokens, rollout.temperature)
    for stage in graph.stages.values():
        match stage:
            case GenerateStage():
                sampling = sampling_of(stage, default)
                recorded = rollout.replays_sampling and 1 <= sampling.top_k <= MOST_KEPT
                if sampling.truncates and not recorded:
                    allowed = (
                        f"off with stage {stage.name!r}, which draws with top_p={sampling.top_p:g} "
                        f"and top_k={sampling.top_k}: wanted a rollout.top_k of 1 to {MOST_KEPT}"
                    )
                    raise ConfigError("rollout.sampling_replay", "auto", allowed)
            case UpdateStage() if rollout.replays_sampling and stage.loss.candidates is not None:
                using = " and ".join(f"rollout.{setting}" for setting in rollout.truncating)
                allowed = (
                    f"off with {using} and the loss of stage {stage.name!r}, which compares "
                    "likeliest tokens of whole distributions"
                )
                raise ConfigError("rollout.sampling_replay", "auto", allowed)
