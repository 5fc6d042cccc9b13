"""Judges on the driver's node: those that wait, and those that see samples of many ranks."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from hybridrl.config import Config
from hybridrl.driver.sample_moves import by_rank
from hybridrl.flow.graph import ComputeStage, Stage
from hybridrl.flow.sample import Sample
from hybridrl.rewards import JudgePool, RewardInput, RewardResult

logger = logging.getLogger(__name__)

FOLDER = "judges"
"""In the run directory: the replies of endpoints, a file for each role."""


class DriverJudges:
    """The judges of a run that work on the driver's node, by role; each starts at its first use."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._judges: dict[str, JudgePool] = {}
        self._recorded: dict[str, dict[str, int]] = {}

    def submit(self, role: str, items: Sequence[RewardInput]) -> "Future[list[RewardResult]]":
        """Have responses judged together; see `JudgePool.submit`."""
        if role not in self._judges:
            judge = self.config.judge_of(role)
            replies = Path(self.config.run.dir) / FOLDER / f"{role}.jsonl"
            sources = self.config.sources_of(role)
            self._judges[role] = JudgePool(judge, sources, replies, role)
            logger.info("judge %s starts on the driver's node", role)
        return self._judges[role].submit(items)

    def is_full(self, role: str) -> bool:
        """Whether what is submitted now waits until other responses are judged."""
        return role in self._judges and self._judges[role].is_full

    def metrics(self) -> dict[str, float]:
        """`judge/requests`, `/retries` and `/cached` of endpoints, since the last call."""
        total: dict[str, float] = {}
        for role, judge in self._judges.items():
            before, counts = self._recorded.get(role, {}), judge.asked
            self._recorded[role] = counts
            for name, count in counts.items():
                key = f"judge/{name}"
                total[key] = total.get(key, 0.0) + count - before.get(name, 0)
        return total

    def close(self) -> None:
        """End their processes."""
        for judge in self._judges.values():
            judge.close()


def read_together(stage: Stage, samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples that such a judge reads at a time: those of a rank, or of a prompt."""
    if not (isinstance(stage, ComputeStage) and stage.whole_groups):
        return list(by_rank(samples).values())
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.id):
        groups[sample.id.prompt].append(sample)
    return list(groups.values())
