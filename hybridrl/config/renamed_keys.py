"""Keys that have another name now, or are gone: refused on a command line, known in old runs."""

from collections.abc import Container, Mapping
from typing import Any

RENAMED_KEYS = {
    "data.skip_long_prompts": "data.skip_unusable_rows",
    "eval.every": "eval.sets.main.every",
    "eval.num_prompts": "eval.sets.main.num_prompts",
    "eval.num_samples": "eval.sets.main.num_samples",
    "eval.success_threshold": "eval.sets.main.success_threshold",
    "recipe.centre": "recipe.center",
    "recipe.correction": "recipe.correction.weights",
    "recipe.correction_bound": "recipe.correction.bound",
    "recipe.correction_level": "recipe.correction.level",
    "recipe.ewma_decay": "recipe.correction.ewma_decay",
    "recipe.normalise": "recipe.normalize",
    "recipe.old_log_probs": "recipe.correction.old_log_probs",
    "recipe.reference_decay": "recipe.reference_ema_decay",
    "recipe.std_normalise": "recipe.std_normalize",
    "recipe.step_scale": "recipe.correction.step_scale",
    "rollout.max_staleness": "schedule.max_staleness",
    "rollout.migration": "schedule.migration",
    "rollout.migration_threshold": "schedule.migration_threshold",
    "rollout.over_provision": "schedule.over_provision",
    "rollout.parked_kv": "schedule.parked_kv",
    "telemetry.tensorboard": "telemetry.loggers",
    "trainer.activation_checkpointing": "trainer.activations",
    "schedule": "schedule.kind",  # in settings alone: a command line has schedule=NAME still
}
"""Old to new, in full."""

RENAMED_GROUPS = {
    "critic": "roles.critic",
    "cost_critic": "roles.cost_critic",
    "reward_model": "roles.reward",
}
"""Groups of keys, old to new."""

REMOVED_KEYS: dict[str, Any] = {
    "environment.partial": "counted",
    "rollout.length_ranker": "running",
    "schedule.draw_anew": False,
    "schedule.length_ranker": "running",
    "trainer.attention_cost": 1.0,
}
"""Keys that are gone, with the value that every run has now."""

NEEDLESS_KEYS = {
    "cluster.ranks_per_process": "all emulated ranks are in the driver's process",
    "telemetry.predicted": "the report of every run shows predicted seconds",
}
"""Keys that are gone and had no part in what a run computes, with the reason."""


def new_name(key: str) -> str | None:
    """The name of now of an old `key`, or of a key in a group that has another name."""
    group, dot, rest = key.partition(".")
    if group in RENAMED_GROUPS:
        return RENAMED_GROUPS[group] + dot + rest
    return RENAMED_KEYS.get(key)


def with_new_names(settings: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Stored `settings`, by dotted key, with the names of now.

    A `known` key keeps its name: a user's recipe may have a key that others had.
    """
    return {key if key in known else new_name(key) or key: value for key, value in settings.items()}
