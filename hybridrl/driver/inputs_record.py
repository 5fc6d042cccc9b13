"""The records of what a run depends on, made while its ranks start."""

from concurrent.futures import ThreadPoolExecutor

from hybridrl.config import Config
from hybridrl.data.known_rows import rows_of, write_rows
from hybridrl.driver.inputs import inputs_of
from hybridrl.preflight.prepare import PreparedRun
from hybridrl.telemetry.run import Telemetry


class InputsRecord:
    """Digests of data and code, and the rows that are known: `write` has them in the run directory.

    All items are hashed, which takes seconds where they are many, on a thread; where the process
    has recorded them before it restarted its ranks, nothing is.
    """

    def __init__(self, config: Config, prepared: PreparedRun, telemetry: Telemetry) -> None:
        self._telemetry, self._saves = telemetry, config.trainer.saves
        self._begun = not telemetry.has_inputs
        if self._begun:
            data, thread = prepared.data, ThreadPoolExecutor(1, "inputs")
            self._inputs = thread.submit(inputs_of, config, data)
            self._rows = thread.submit(rows_of, data.train, data.eval, prepared.eval_items)
            thread.shutdown(wait=False)

    def write(self) -> None:
        """Wait for them, and write them."""
        if not self._begun:
            return
        self._telemetry.inputs(self._inputs.result())
        if self._saves:
            write_rows(self._telemetry.run_dir, self._rows.result())
