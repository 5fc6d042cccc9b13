"""Seconds of the mapping search on HybridFlow's setting: PPO of 13B models, all 15 placements.

A line's value is what the search takes on one core, its baseline what is wanted: a minute for 128
GPUs, five for 1,024 (published: up to half an hour, arXiv 2409.19256, section 8).
"""

import argparse

from lines import line, show

from hybridrl.planner.published_mappings import all_placements

WANTED = {128: 60.0, 1024: 300.0}


def main() -> None:
    """Search on each number of GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="*", choices=WANTED, default=list(WANTED))
    for gpus in parser.parse_args().gpus:
        result = all_placements(gpus)
        extra = {"replayed": result.num_replayed, "complete": result.is_complete}
        name = f"mapping_search_{gpus}_gpus"
        show(line(name, "s", "lower", [result.seconds], [WANTED[gpus]], **extra))


if __name__ == "__main__":
    main()
