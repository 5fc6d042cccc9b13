"""The driver's part of judging: judges that it calls, and the judgements that have failed.

The driver calls judges that wait, and those that see samples of many ranks.
"""

import contextlib
import functools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hybridrl.config import Config
from hybridrl.driver.async_calls import Calling, result_of
from hybridrl.driver.node_pools import LOST, NodePools
from hybridrl.driver.sample_moves import by_rank
from hybridrl.flow.executor import Computed, Event
from hybridrl.flow.graph import ComputeStage, Stage
from hybridrl.flow.judgements import OK
from hybridrl.flow.sample import Sample
from hybridrl.rewards import JudgePool, RewardInput, RewardResult
from hybridrl.runtime.launcher import Launcher
from hybridrl.telemetry.records import read_lines

logger = logging.getLogger(__name__)

FOLDER = "judges"
"""In the run directory: the replies of endpoints, a file for each role, and the failures."""
FAILURES = "failures.jsonl"
STATUS = "_status"


class DriverJudges:
    """The judges that the driver calls, by role; each starts at its first use, on every node.

    Requests to an endpoint all leave from the driver's, which bounds and keeps them.
    """

    def __init__(self, config: Config, launcher: Launcher) -> None:
        self.config, self.launcher = config, launcher
        self._pools: dict[str, NodePools] = {}
        self._recorded: dict[str, Counter[str]] = {}

    def judge(self, role: str, items: Sequence[RewardInput]) -> Calling[list[RewardResult]]:
        """Have responses judged together; where their node dies, on another; see `JudgePool`."""
        if role not in self._pools:
            self._pools[role] = self._start(role)
            logger.info("judge %s starts, called by the driver", role)
        results: Any = LOST
        while results is LOST:
            results = yield from result_of(self._pools[role].freest().call("submit", items))
        return cast(list[RewardResult], results)

    def _start(self, role: str) -> NodePools:
        judge, sources = self.config.judge_of(role), self.config.sources_of(role)
        replies = Path(self.config.run.dir) / FOLDER / f"{role}.jsonl"
        at_once = judge.kind.asks or judge.waits  # the share is of calls, else of processes

        def make(share: int) -> Callable[[], JudgePool]:
            own = replace(judge, num_processes=share, max_in_flight=share)
            return functools.partial(JudgePool, own, sources, replies, role)

        if at_once:
            nodes = [] if judge.kind.asks else self.launcher.other_nodes()
            return NodePools(make, judge.max_in_flight, nodes)
        return NodePools(make, judge.num_processes, self.launcher.other_nodes(), least=1)

    def is_full(self, role: str) -> bool:
        """Whether what is judged now waits until other responses are."""
        return role in self._pools and self._pools[role].is_full

    def metrics(self) -> dict[str, float]:
        """`judge/requests`, `/retries` and `/cached` of endpoints, since the last call."""
        total: dict[str, float] = {}
        for role, pools in self._pools.items():
            before, counts = self._recorded.get(role, Counter()), pools.counts
            self._recorded[role] = counts
            for name, count in counts.items():
                key = f"judge/{name}"
                total[key] = total.get(key, 0.0) + count - before[name]
        return total

    def close(self) -> None:
        """End their processes, of all even where closing one fails."""
        with contextlib.ExitStack() as stack:
            for pools in self._pools.values():
                stack.callback(pools.close)


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
        if not self._known or not isinstance(event, Computed):
            return event
        if self._known.keys().isdisjoint(map(str, event.ids)):
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
        lines, samples = [], list(samples)
        names = {name: None for sample in samples for name in sample.scalars}
        judged = [name for name in names if name.endswith(STATUS)]
        for sample in samples:
            scalars = sample.scalars
            failed = {x: scalars[x] for x in judged if x in scalars and scalars[x] != OK}
            if failed and self._known.get(str(sample.id)) != failed:
                lines.append({"step": step, "id": str(sample.id), "failed": failed})
        if lines:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            self._take(lines)
