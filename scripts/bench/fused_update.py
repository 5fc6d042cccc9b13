"""RLHFuse's twelve problems of a fused update: the plans' seconds beside the published, JSON lines.

Actor and critic share the ranks, the critic in the other direction; where it has half the stages,
it is there twice, side by side. `free` has no limit of memory and is held to the lower bound;
`limited` may keep the published peak of activations. `sleep` runs plans on real ranks whose chunks
sleep, `real` trains an actor and a critic.
"""

import argparse
import math
import time
from dataclasses import dataclass

from fused_engines import compare_engines
from lines import show
from sleeping_chunks import compare_sleeping

from hybridrl.pipelines.problem import (
    PassCosts,
    PipelinedModel,
    PipelineProblem,
    side_by_side,
)
from hybridrl.pipelines.search import search


@dataclass(frozen=True, slots=True)
class Fusion:
    """Two models, and the plan of FlexFusion, the public code of RLHFuse (arXiv 2409.13221)."""

    pp: tuple[int, int]
    forward_s: tuple[int, int]
    """A backward pass takes twice as long."""
    kept_bytes: tuple[float, float]
    micro_batches: tuple[int, int]
    seconds: float
    peak_bytes: float

    @property
    def name(self) -> str:
        return f"pp{self.pp[0]}+{self.pp[1]}_{self.micro_batches[0]}+{self.micro_batches[1]}"

    def problem(self, limit: float) -> PipelineProblem:
        """The actor from the first rank on, the critics from the last one."""
        size, critic_size = self.pp
        ranks = (tuple(range(size)), *side_by_side(range(size - 1, -1, -1), size // critic_size))
        models = [
            PipelinedModel.uniform(
                "actor" if model == 0 else "critic",
                ranks=own,
                micro_batches=self.micro_batches[min(model, 1)],
                costs=PassCosts(
                    forward_s=self.forward_s[min(model, 1)],
                    backward_s=2 * self.forward_s[min(model, 1)],
                    kept_bytes=self.kept_bytes[min(model, 1)],
                ),
            )
            for model, own in enumerate(ranks)
        ]
        return PipelineProblem(models=models, num_ranks=size, limit_bytes=limit)


FUSIONS = [
    Fusion((8, 4), (5, 4), (1.95, 2), (32, 16), 708, 19.7),
    Fusion((8, 4), (5, 4), (1.95, 2), (16, 8), 372, 15.75),
    Fusion((8, 4), (5, 4), (1.95, 2), (8, 4), 225, 15.6),
    Fusion((8, 8), (5, 2), (1.95, 1), (32, 32), 702, 20.5),
    Fusion((8, 8), (5, 2), (1.95, 1), (16, 16), 366, 18.55),
    Fusion((8, 8), (5, 2), (1.95, 1), (8, 8), 225, 15.6),
    Fusion((16, 8), (2, 2), (1.64, 2), (64, 32), 618, 39.72),
    Fusion((16, 8), (2, 2), (1.64, 2), (32, 16), 330, 29.88),
    Fusion((16, 8), (2, 2), (1.64, 2), (16, 8), 186, 26.24),
    Fusion((16, 16), (2, 1), (1.64, 1), (64, 64), 613, 38.72),
    Fusion((16, 16), (2, 1), (1.64, 1), (32, 32), 318, 32.16),
    Fusion((16, 16), (2, 1), (1.64, 1), (16, 16), 186, 26.24),
]


def main() -> None:
    """Search every problem, free and limited."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of one core, for each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", default="free,limited,sleep,real")
    parser.add_argument("--only", default="", help="the beginning of a problem's name")
    args = parser.parse_args()
    for side in args.sides.split(","):
        if side == "sleep":
            for ranks in (2, 4, 8):
                compare_sleeping(ranks, budget_s=2.0)
            continue
        if side == "real":
            compare_engines()
            continue
        for fusion in FUSIONS:
            if fusion.name.startswith(args.only):
                compare(side, fusion, args.seconds, args.seed)


def compare(side: str, fusion: Fusion, budget_s: float, seed: int) -> None:
    """One search, as a line."""
    began = time.process_time()
    limit = fusion.peak_bytes if side == "limited" else math.inf
    # This process's time: what else the machine does takes none of the budget.
    result = search(fusion.problem(limit), budget_s=budget_s, seed=seed, clock=time.process_time)
    show(
        {
            "name": f"fused_update_{side}_{fusion.name}",
            "value": result.times.seconds,
            "baseline": fusion.seconds,
            "ratio": round(result.times.seconds / fusion.seconds, 4),
            "bound": result.bound_s,
            "peak": round(max(result.times.peak_bytes), 2),
            "published_peak": fusion.peak_bytes,
            "search_s": round(time.process_time() - began, 1),
            "unit": "the problem's seconds",
            "better": "lower",
        }
    )


if __name__ == "__main__":
    main()
