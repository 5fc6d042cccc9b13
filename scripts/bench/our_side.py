"""Our side of the end-to-end benches: `controller.run` as a run does it, on Ray, two ranks."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from blocks import Blocks
from tasks import side_arguments

from hybridrl.config import TelemetryConfig
from hybridrl.controller.checkpoints import Origin
from hybridrl.controller.preflight import prepare
from hybridrl.controller.run import Run
from hybridrl.runtime.launchers import launched
from hybridrl.telemetry.run import Telemetry


class _Done(Exception):
    """The bench has seen enough."""


class TurnTaking(Telemetry):
    """The run's record, kept in full, that also lets the other sides have their turn."""

    def __init__(self, run_dir: Path, config: TelemetryConfig, blocks: Blocks) -> None:
        super().__init__(run_dir, config, total_steps=1)
        self.blocks = blocks

    def lengths(self, step: int, response_lengths: Sequence[int], **others: Sequence[int]) -> None:
        """Record them; a step has ended."""
        super().lengths(step, response_lengths, **others)
        if not self.blocks.after_step(response_lengths):
            raise _Done


def main() -> None:
    """Parse and run blocks of steps."""
    task, model_path = side_arguments(__doc__)
    blocks = Blocks()
    run_dir = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        config = task.config(model_path, run_dir)
        with (
            TurnTaking(run_dir, config.telemetry, blocks) as telemetry,
            launched(config.cluster, run_dir / "logs") as launcher,
        ):
            run = Run(config, prepare(config), telemetry, launcher, Origin())
            try:
                if blocks.begin():
                    run.run_recipe()
            finally:
                run.group.kill()
    except _Done:
        pass
    finally:
        shutil.rmtree(run_dir)


if __name__ == "__main__":
    main()
