"""A side of `make bench-plan-steps`: a run with the settings of its command line."""

import argparse
from pathlib import Path

from blocks import Blocks
from our_side import take_turns
from tasks import make_config


def main() -> None:
    """Parse and run blocks of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="is left in place")
    parser.add_argument("settings", nargs="*", help="Hydra overrides")
    args = parser.parse_args()
    take_turns(
        lambda run_dir: make_config(*args.settings, f"run.dir={run_dir}"),
        Blocks(),
        ("step_s",),
        args.run_dir,
    )


if __name__ == "__main__":
    main()
