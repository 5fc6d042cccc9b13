"""The driver's part of judging: judges on its node, and the judgements that have failed.

On the driver's node are judges that wait, and those that see samples of many ranks.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config import Config
from hybridrl.driver.sample_moves import by_rank
from hybridrl.flow.executor import Computed, Event
from hybridrl.flow.graph import ComputeStage, Stage
from hybridrl.flow.judgements import OK
from hybridrl.flow.sample import Sample
from hybridrl.rewards import JudgePool, RewardInput, RewardResult
from hybridrl.telemetry.records import read_lines

logger = logging.getLogger(__name__)

FOLDER = "judges"
"""In the run directory: the replies of endpoints, a file for each role, and the failures."""
FAILURES = "failures.jsonl"
STATUS = "_status"


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


class JudgeFailures:
    """The judgements that have failed in a run's whole steps: `RUN/judges/failures.jsonl`.

    Where such a step is made again, by the resumed run or a replay, they fail again. So its batch
    stays the same, though the judge may answer by then. `_known` has the statuses by sample id and
    field.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FOLDER / FAILURES
        self._known: dict[str, dict[str, str]] = {}

    def resume(self, last_step: int | None) -> None:
        """Have those of the run's own record fail; later ones than of `last_step` are deleted."""
        lines = read_lines(self.path)
        stand = [line for line in lines if last_step is None or line["step"] <= last_step]
        if len(stand) < len(lines):
            self.path.write_text("".join(json.dumps(line) + "\n" for line in stand))
        self._take(stand)

    def follow(self, run_dir: Path) -> None:
        """Have the judgements fail that have failed in another run."""
        self._take(read_lines(run_dir / FOLDER / FAILURES))

    def _take(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            self._known[line["id"]] = line["failed"]

    def followed(self, event: Event) -> Event:
        """The event; of judgements that are known to have failed with what they failed with."""
        if not isinstance(event, Computed) or self._known.keys().isdisjoint(map(str, event.ids)):
            return event
        scalars = {name: list(values) for name, values in event.scalars.items()}
        for place, id in enumerate(event.ids):
            for status, text in self._known.get(str(id), {}).items():
                if status in scalars:
                    scalars[status][place] = text
                    scalars[status.removesuffix(STATUS)][place] = 0.0
        return replace(event, scalars={name: tuple(values) for name, values in scalars.items()})

    def record(self, step: int, samples: Iterable[Sample]) -> None:
        """Record what has failed in a whole step, whose `samples` these are."""
        lines = []
        for sample in samples:
            failed = {
                name: value
                for name, value in sample.scalars.items()
                if name.endswith(STATUS) and value != OK
            }
            if failed and self._known.get(str(sample.id)) != failed:
                lines.append({"step": step, "id": str(sample.id), "failed": failed})
        if lines:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            self._take(lines)
