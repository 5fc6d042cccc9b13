"""One step in this process: `python -m gpu_steps STEP SETTINGS RESULT`, two files."""

import os
import pkgutil
import sys
from pathlib import Path

from gpu_steps.figures import Figures, Skipped
from gpu_steps.steps import STEPS, Settings


def main() -> None:
    """Measure; an exception ends the process with its traceback."""
    name, settings_file, result_file = sys.argv[1:]
    settings = Settings.read(Path(settings_file))
    figures = Figures(Path(result_file), settings.device)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a directory
    # All ranks are on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    step = STEPS[name]
    try:
        if obstacle := step.obstacle(settings.device):
            raise Skipped(obstacle)
        pkgutil.resolve_name(step.target)(settings, figures)
    except Skipped as reason:
        figures.skip_step(str(reason))


if __name__ == "__main__":
    main()
