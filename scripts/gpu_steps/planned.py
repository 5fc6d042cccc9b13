"""What `hybridrl plan memory` predicts of the run whose peaks the report measures."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from hybridrl.algorithms import advantages
from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.config import Config
from hybridrl.flow import Flow, recipe
from hybridrl.models.load import load_config
from hybridrl.preflight.memory_inputs import LongestInputs, PackedRow
from hybridrl.preflight.memory_plan import Room, plan_run

PLANNED = {
    "build": ("load actor", "load rollout engine"),
    "switch": ("switch",),
    "decode": ("prefill", "decode"),
    "update": ("train actor",),
}
"""Phases of the report, and the plan's, of which the largest counts."""


@recipe("report")
def _update_alone(flow: Flow, cfg: Any) -> None:
    """An actor that generates and trains, and no other model."""
    samples = flow.actor.generate(flow.prompts, num_samples=1)
    samples = flow.reward.score(samples)
    samples = samples.by_group(advantages.group_relative)
    flow.actor.update(samples, loss=ReinforceLoss())


def planned_peaks(
    config: Config, cache_tokens: int, row: tuple[int, int], decode_rows: int
) -> dict[str, int]:
    """Bytes by phase, for a KV cache as large as the measured one, and what was computed at once.

    `row` has the row's tokens, and those of responses. So many `decode_rows` are full samples.
    """
    config = deepcopy(config)
    config.rollout.kv_cache_tokens, config.rollout.max_running = cache_tokens, decode_rows
    assert config.model.path is not None
    shape = load_config(config.model.path)
    graph = _update_alone.build(SimpleNamespace())
    longest = PackedRow(*row, number=1)
    inputs = LongestInputs(
        row=lambda *_: longest,
        prompt=config.data.max_prompt_tokens,
        copied=decode_rows * config.longest_sample,
    )
    # The report offloads what a run of this size would leave on the device.
    run = plan_run(config, graph, shape, Room(2**40, 0), inputs, staying=())
    sizes = {phase.name: phase.total for phase in run.pools["actor"].phases}
    return {phase: max(sizes[name] for name in names) for phase, names in PLANNED.items()}
