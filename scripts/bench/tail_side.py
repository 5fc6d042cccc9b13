"""A side of a bench on two real ranks: a run with the settings of its command line."""

import argparse
from pathlib import Path

from blocks import Blocks
from fusion import configuration
from our_side import take_turns

FACTS = (
    "bubble_share",
    "bubble_share/actor",
    "bubble_share/rollout",
    "push_s",
    "load_s",
    "generate_s",
    "samples/trained_early",
    "samples/migrated",
    "samples/widened",
    "samples/draft_acceptance",
)


def main() -> None:
    """Parse and run blocks of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("actor", type=Path)
    parser.add_argument("--judge", type=Path, help="with it, also a reference")
    parser.add_argument("--prompts", type=int, required=True, help="of a step")
    parser.add_argument("--settings", nargs="*", default=[], help="Hydra overrides")
    args = parser.parse_args()
    blocks = Blocks()
    take_turns(
        lambda run_dir: configuration(args.actor, args.judge, run_dir, args.prompts, args.settings),
        blocks,
        FACTS,
    )


if __name__ == "__main__":
    main()
