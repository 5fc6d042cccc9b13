"""Our side of the end-to-end benches: `driver.run` as a run does it, on Ray, two ranks."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blocks import Blocks
from tasks import side_arguments

from hybridrl.config import Config, TelemetryConfig
from hybridrl.driver.origin import Origin
from hybridrl.driver.run import Run
from hybridrl.preflight.prepare import prepare
from hybridrl.runtime.launchers import launched
from hybridrl.telemetry.run import Telemetry


class _Done(Exception):
    """The bench has seen enough."""


class TurnTaking(Telemetry):
    """The run's record, kept in full, that also lets the other sides have their turn.

    A block's answer has the means of the metrics `facts`, where a step has them, and of the seconds
    of events: `push_s` are those of a step's events `push`.
    """

    def __init__(
        self, run_dir: Path, config: TelemetryConfig, blocks: Blocks, facts: Sequence[str] = ()
    ) -> None:
        super().__init__(run_dir, config, total_steps=1)
        self.blocks, self.facts = blocks, facts
        self._seconds: Counter[str] = Counter()

    def event(self, kind: str, **facts: Any) -> None:
        """Record it, and count its seconds."""
        super().event(kind, **facts)
        self._seconds[f"{kind}_s"] += facts.get("seconds", 0.0)

    def lengths(self, step: int, response_lengths: Sequence[int], **others: Sequence[int]) -> None:
        """Record them; a step has ended."""
        super().lengths(step, response_lengths, **others)
        *_, last = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        metrics = json.loads(last) | self._seconds
        self._seconds.clear()
        facts = {name: metrics[name] for name in self.facts if name in metrics}
        if not self.blocks.after_step(response_lengths, facts):
            raise _Done


def take_turns(
    configure: Callable[[Path], Config],
    blocks: Blocks,
    facts: Sequence[str] = (),
    kept: Path | None = None,
) -> None:
    """Run blocks of steps until no more are asked for; `configure` gets the run's directory.

    That is `kept`, or one that is removed.
    """
    run_dir = kept or Path(tempfile.mkdtemp(prefix="bench"))
    try:
        config = configure(run_dir)
        with (
            TurnTaking(run_dir, config.telemetry, blocks, facts) as telemetry,
            launched(config.cluster, run_dir / "logs") as launcher,
        ):
            run = Run(config, prepare(config), telemetry, launcher, Origin())
            try:
                if blocks.begin():
                    run.begin_recipe()
                    run.run_recipe()
            finally:
                run.group.kill()
    except _Done:
        pass
    finally:
        if kept is None:
            shutil.rmtree(run_dir)


def main() -> None:
    """Parse and run blocks of steps."""
    task, model_path = side_arguments(__doc__)
    blocks = Blocks()
    take_turns(lambda run_dir: task.config(model_path, run_dir), blocks)


if __name__ == "__main__":
    main()
