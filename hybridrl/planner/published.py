"""RLHFuse's setting under the simulator, with its published figures.

Setting (arXiv 2409.13221, section 7): 32 nodes of 8 Hopper GPUs, 8 x 200 Gb/s between nodes. LLaMA
actors and critics of 13B to 65B, the reference of the actor's size, the reward model of the
critic's. HH-RLHF prompts; global batch 512; responses of at most 512, 1,024 and 2,048 tokens.

Not published, and so assumed: response lengths below the limit (here `LMSYS`, by which the paper
shows the tail), instances of one node each, and the efficiency of each stage. A roofline makes
inference a smaller share of an iteration than on that testbed. It does not count the loading of
weights, the filling of pipelines and small batches, which slow short stages. Fusion hides
inference, so the ratio is at most 1 + inference over generation. It is therefore given for the
roofline and for inference that takes a stated share of generation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridrl.config import FusedScheduleConfig, SerialScheduleConfig
from hybridrl.planner.accelerators import read_roofline, samples_held
from hybridrl.planner.schedule import Outcome, Setting, replay
from hybridrl.planner.workload import LMSYS, Workload

PAIRS = (("13b", "33b"), ("33b", "13b"), ("33b", "65b"), ("65b", "33b"))
LIMITS = (512, 1024, 2048)
SHARES = (0.0, 0.25, 0.5)  # inference over generation, serially; 0 is the roofline's
_BATCH, _GPUS, _PROMPT_TOKENS, _STEPS = 512, 256, 150, 2

PUBLISHED_FRONT = (1.2, 1.6)
"""Generation and inference without over with inter-stage fusion (section 7.3, in the text)."""
PUBLISHED_ITERATION = (1.2, 1.4)
"""RLHFuse-Base over RLHFuse, an iteration, inter- and intra-stage fusion together (section 7.2)."""
PUBLISHED_THRESHOLD = 0.2
"""Share of the batch that is left at the best migration threshold, about (section 7.3)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One pair of models under one limit. Ratios are serial over fused, above 1 is sooner."""

    actor: str
    critic: str
    limit: int
    share: float
    """Inference over generation, one after the other."""
    front: float
    """Generation and inference."""
    iteration: float
    """The full iteration; training by the roofline, without intra-stage fusion."""
    threshold: float
    """Share of the batch that is unfinished when the tail migrates."""


def rlhfuse(on_progress: Callable[[int, int], None] = lambda done, of: None) -> list[Compared]:
    """Every pair, limit and share; `on_progress` gets the cases done and their total."""
    cases = [(pair, limit) for pair in PAIRS for limit in LIMITS]
    comparisons = []
    for done, ((actor, critic), limit) in enumerate(cases, 1):
        on_progress(done, len(cases))
        setting = paper_setting(actor, critic, limit)
        for share in SHARES:
            comparisons.append(_compare(setting, actor, critic, limit, share))
    return comparisons


def paper_setting(actor: str, critic: str, limit: int) -> Setting:
    """A roofline of the paper's testbed."""
    text = f"gpu:model={actor},critic={critic},gpu=hopper-200g,gpus=8,total={_GPUS}"
    costs, num_instances, model, accelerator, gpus = read_roofline(text)
    lengths = replace(LMSYS, max=limit)
    groups = tuple(lengths.draw(_BATCH * _STEPS, 1, _PROMPT_TOKENS))
    return Setting(
        costs=costs,
        num_instances=num_instances,
        max_held=min(256, samples_held(model, accelerator, gpus, _PROMPT_TOKENS + limit)),
        decode_steps=16,
        chunk_tokens=8192,
        workload=Workload(groups, _BATCH, _STEPS),
        group_size=1,
    )


def _compare(setting: Setting, actor: str, critic: str, limit: int, share: float) -> Compared:
    serial = replay(setting, SerialScheduleConfig())
    generation = replay(_inferring(setting, 0.0), SerialScheduleConfig()).front_s
    inference = serial.front_s - generation
    if share:
        setting = _inferring(setting, share * generation / inference)
        serial = replay(setting, SerialScheduleConfig())
    fused = _best(setting)
    return Compared(
        actor,
        critic,
        limit,
        serial.front_s / generation - 1,
        serial.front_s / fused.front_s,
        serial.step_s / fused.step_s,
        (fused.threshold or 0) / setting.num_samples,
    )


def _best(setting: Setting) -> Outcome:
    """As the model chooses, or at the published threshold."""
    published = round(PUBLISHED_THRESHOLD * setting.num_samples)
    fused = [FusedScheduleConfig(migration_threshold=n) for n in (None, 0, published)]
    tried = [replay(setting, config) for config in fused]
    return min(tried, key=lambda outcome: outcome.front_s)


def _inferring(setting: Setting, times: float) -> Setting:
    """The same with forward-only stages that take `times` as long."""
    token_s = {name: seconds * times for name, seconds in setting.costs.token_s.items()}
    return replace(setting, costs=replace(setting.costs, token_s=token_s))
