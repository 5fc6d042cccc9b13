"""The settings of `make bench-tail`: devices, models, lengths and recipes; and the columns."""

from collections.abc import Mapping
from dataclasses import dataclass

CYCLE = 4  # steps of `schedule=packed`'s cycle: its default max_wait_steps, and one
NODE = 8  # GPUs of a node: instances join for the tail within one
ACCEPT = 0.6  # the share of right guesses: assumed

# RollPacker (arXiv 2509.21009, figure 2 and section 2.2: 14B, at most 16k tokens, math, code and a
# judge): 75 % of the responses have at most 755 to 1,100 tokens, the longest ones 25 to 32 times
# the median, and reach the limit. A log-normal with a 32nd of the limit at the median whose longest
# of 1,024 is the limit: sigma = ln(32) / 3.1. Its 75th percentile is 1,089, p99 over p50 is 13.5.
TAIL = 32
SIGMA = 1.118
# Table 1, 14B with at most 16k tokens under veRL: generation 72, 66, 71 % of a step, reward 5, 13,
# 7 %, training 23, 21, 22 %. The means of the three tasks.
PUBLISHED_SHARES = (0.70, 0.08, 0.22)


def long_tailed(limit: int, alike: float) -> str:
    """RollPacker's lengths under another limit; `alike` as in `--lengths`."""
    shape = f"median={limit // TAIL},sigma={SIGMA},max={limit},alike={alike}"
    return f"lognormal:{shape},accept={ACCEPT}"


@dataclass(frozen=True, slots=True)
class RecipeCase:
    """A recipe: its settings, and the names of its forward passes in the costs."""

    settings: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    group_key: str = "recipe.group_size"


_MODEL = ("reward=model", "reward.model=emulated")
_ALL = "recipe.skip_equal_groups=false"
RECIPES = {
    "verifier": RecipeCase((_ALL,)),
    "reference": RecipeCase((_ALL, "recipe.kl_coef=0.01"), ("reference",)),
    "reference_and_reward_model": RecipeCase(
        (_ALL, "recipe.kl_coef=0.01", *_MODEL), ("reward", "reference")
    ),
    "ppo": RecipeCase(
        ("recipe=ppo", *_MODEL), ("reward", "reference", "critic"), "recipe.num_samples"
    ),
}

# A side is a column of the table: the settings of a run. With early backward an instance trains a
# whole replica, which it has to hold: an 8B on four GPUs, but no 32B on four.
EARLY = ("schedule.early_backward=auto", "trainer.layout.replicas={instances}")
WIDE = (f"rollout.tail_tp={NODE}",)
SPECULATE = ("rollout.speculate=auto",)
SIDES: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "fused": ("schedule=fused",),
    "early": ("schedule=fused", *EARLY),
    "wide": ("schedule=fused", *WIDE),
    "speculate": ("schedule=fused", *SPECULATE),
    "packed": ("schedule=packed",),
    "early_wide": ("schedule=fused", *EARLY, *WIDE),
    "early_speculate": ("schedule=fused", *EARLY, *SPECULATE),
    "all": ("schedule=fused", *EARLY, *WIDE, *SPECULATE),
    "packed_speculate": ("schedule=packed", *SPECULATE),
    "partial": ("schedule=partial",),
}
EACH = ("serial", "fused", "early", "wide", "speculate", "packed", "early_wide", "all")
FEW_OF_NODES = ("serial", "fused", "early_speculate")  # an instance is a whole node: none is wider


Sides = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A device, a model and what a step generates.

    `costs` is a roofline's text, `sides` are those of each recipe. `wall_s` is what a step of
    `serial` shall take in wall time: `cluster.time_scale` follows. `published_shares` are
    generation, inference and training of a serial step where they are published. The costs of
    inference and training are scaled to them.
    """

    name: str
    costs: str
    ranks: int
    instance: int
    prompts: int
    group: int = 8
    limit: int
    lengths: str
    prompt_tokens: int = 256
    sides: Mapping[str, Sides]
    wall_s: float = 3.0
    cycles: int = 1
    published_shares: tuple[float, float, float] | None = None

    @property
    def instances(self) -> int:
        """Generation instances."""
        return self.ranks // self.instance

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of instances that may join for the tail."""
        return (NODE // self.instance,) if self.instance < NODE else ()

    @property
    def decode_steps(self) -> int:
        """Decode steps of a call: the longest response ends after at least 32 calls."""
        return max(16, self.limit // 32)


def _long(name: str, model: str, ranks: int, instance: int, alike: float, **sides: Sides) -> Case:
    """Eight samples a rank or more, of at most 16k tokens."""
    return Case(
        name=name,
        costs=f"gpu:model={model}",
        ranks=ranks,
        instance=instance,
        prompts=max(64, ranks),
        limit=16_384,
        lengths=long_tailed(16_384, alike),
        sides=sides,
    )


CASES = (
    _long(
        "8b_32", "8b", 32, 4, 0.5,
        verifier=EACH, reference_and_reward_model=("serial", "fused", "early", "all"),
    ),
    _long(
        "32b_256", "qwen2.5-32b", 256, 8, 0.5,
        verifier=("serial", "fused", "packed", "speculate"),
    ),
    _long("32b_32", "qwen2.5-32b", 32, 4, 0.5, verifier=("serial", "fused", "speculate")),
    _long("8b_256", "8b", 256, 8, 0.5, verifier=FEW_OF_NODES),
)  # fmt: skip

# By name alone: they would take the bench past 20 minutes.
MORE_CASES = (
    # Lengths that are independent within a prompt: the hardest for `packed`.
    _long("8b_32_independent", "8b", 32, 4, 0.0, verifier=("serial", "fused", "packed")),
)

# The timeline of the README: eight instances, a training that one can see.
PICTURE = Case(
    name="picture",
    costs="gpu:model=qwen2.5-14b",
    ranks=32,
    instance=4,
    prompts=32,
    limit=16_384,
    lengths=long_tailed(16_384, 0.5),
    sides={"reference": ("serial", "fused", "all")},
    published_shares=PUBLISHED_SHARES,
)
