"""The memory plan of a dry run's case, beside the peaks of its phases."""

from transformers import PretrainedConfig

from gpu_dry.case import (
    MICRO_BATCH_TOKENS,
    SAMPLES,
    Case,
    prompt_lengths,
)
from hybridrl.config import (
    Config,
    RewardKind,
    RolloutLayoutConfig,
    TrainLayoutConfig,
)
from hybridrl.preflight.memory_inputs import LongestInputs, PackedRow
from hybridrl.preflight.memory_plan import Room, plan_run
from hybridrl.preflight.prepare import build_recipe

PLANNED = {
    "load actor": "load actor",
    "load rollout engine": "load rollout engine",
    "switch after updates": "switch",
    "prefill and first decode": "prefill",
    "decode": "decode",
    "reference": "score reference",
    "judge": "score reward",
    "update": "train actor",
    "build critic": "load critic",
    "update of the critic": "train critic",
}
"""Phases of a dry run, and the plan's names for them."""


def planned(case: Case, config: Config, shape: PretrainedConfig, gen_stage: int) -> dict[str, int]:
    """Bytes of the phases of `PLANNED` that the case has, on the pipeline stages of its rank."""
    recipe = "hybridrl.recipes.ppo:ppo" if case.critic else "hybridrl.recipes.grpo:grpo"
    graph = build_recipe({"target": recipe, "kl_coef": 0.1})
    config.reward.kind = RewardKind.model
    config.model.attention = case.chosen_attention
    inputs = LongestInputs.of(config, graph)
    if not case.only_trains:
        inputs = LongestInputs(
            row=lambda layout, ranks: _longest_row(layout, case),
            prompt=max(prompt_lengths()),
        )
    stage = case.rank // (case.ranks // config.trainer.layout.pp)
    room, stages = Room(80 * 2**30, 0), (stage, gen_stage)
    run = plan_run(config, graph, shape, room, inputs, stages, case.staying)
    sizes = {phase.name: phase.total for phase in run.pools["actor"].phases}
    return {phase: sizes[name] for phase, name in PLANNED.items() if name in sizes}


def _longest_row(layout: TrainLayoutConfig | RolloutLayoutConfig, case: Case) -> PackedRow:
    """The rows of an update, or of scoring, over the samples that the ranks of a replica share."""
    tokens = SAMPLES * layout.pp * layout.tp * case.sample_tokens
    rows = max(1, -(-tokens // MICRO_BATCH_TOKENS))
    if isinstance(layout, RolloutLayoutConfig):
        tokens = case.sample_tokens if case.strict else min(tokens, MICRO_BATCH_TOKENS)
        rows = 1
    scored = tokens * 3 // 4  # of a sample the rest is the prompt
    return PackedRow(tokens // rows, scored // rows, rows)
