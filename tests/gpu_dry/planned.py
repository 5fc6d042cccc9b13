"""The memory plan of a dry run's case, beside the peaks of its phases."""

from transformers import PretrainedConfig

from gpu_dry.case import MICRO_BATCH_TOKENS, PROMPT_TOKENS, SAMPLE_TOKENS, SAMPLES, Case
from hybridrl.config import Attention, Config, RewardKind
from hybridrl.controller.memory_plan import plan_run
from hybridrl.controller.memory_sizes import PackedRow
from hybridrl.controller.preflight import build_recipe

PLANNED = {
    "switch after updates": "switch",
    "prefill and first decode": "prefill",
    "reference": "score reference",
    "judge": "score reward",
    "update": "train actor",
    "build critic": "load critic",
    "update of the critic": "train critic",
}
"""Phases of a dry run, and the plan's names for them."""


def planned(case: Case, config: Config, shape: PretrainedConfig) -> dict[str, int]:
    """Bytes of the phases of `PLANNED` that the case has, on the case's pipeline stage.

    A pipeline's row is longer than any that is scored, so its scoring phases are not compared. A
    strict engine reads one prompt at a time, where the plan has 4,096 tokens.
    """
    recipe = "hybridrl.recipes.ppo:ppo" if case.critic else "hybridrl.recipes.grpo:grpo"
    graph = build_recipe({"target": recipe, "kl_coef": 0.1})
    config.reward.kind = RewardKind.model
    layout = config.trainer.layout
    if not case.flash:
        config.model.attention = Attention.torch
    row = _longest_row(layout.pp, layout.tp)
    stage = case.rank // (case.ranks // layout.pp)
    plan = plan_run(config, graph, shape, 80 * 2**30, 0, row, stage)
    sizes = {phase.name: phase.total for phase in plan.phases}
    compared = {phase: sizes[name] for phase, name in PLANNED.items() if name in sizes}
    if layout.pp > 1:
        del compared["reference"], compared["judge"]
    if case.strict:
        del compared["prefill and first decode"]
    return compared


def _longest_row(pp: int, tp: int) -> PackedRow:
    """The rows of an update over the samples that the ranks of a replica share.

    Numbers gathered from other ranks are made up, so a pipeline has the fewest rows that it takes.
    """
    tokens = SAMPLES * pp * tp * SAMPLE_TOKENS
    rows = pp if pp > 1 else max(1, -(-tokens // MICRO_BATCH_TOKENS))
    scored = tokens * (SAMPLE_TOKENS - PROMPT_TOKENS) // SAMPLE_TOKENS
    return PackedRow(tokens // rows, scored // rows, rows)
