"""Run benches by name: `python scripts/bench/run.py [NAME...]`; all of them without a name.

A name is a figure (`transfer_32mb_vs_ray`) or the beginning of some (`samples_per_s_short`). Prints
one JSON object a line: name, value (ours), unit, baseline, ratio (ours over the baseline), better.
docs/benchmarks.md says what each figure compares.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = {
    "dispatch_empty_vs_ray": ("data_plane.py", "--only", "dispatch"),
    "dispatch_empty_vs_verl": ("data_plane.py", "--only", "dispatch"),
    "transfer_32mb_vs_ray": ("data_plane.py", "--only", "transfer"),
    "transfer_32mb_vs_verl": ("data_plane.py", "--only", "transfer"),
    "rollout_tokens_per_s_vs_loop": ("rollout.py",),
    "rollout_tokens_per_s_1_row_vs_loop": ("rollout.py",),
    "rollout_tokens_per_s_8_rows_vs_loop": ("rollout.py",),
    "rollout_tokens_per_s_256_rows_vs_loop": ("rollout.py",),
    "rollout_tokens_per_s_prompt_2048_vs_loop": ("rollout.py",),
    "samples_per_s_short_vs_loop": ("end_to_end.py", "--task", "short", "--against", "loop"),
    "samples_per_s_short_vs_trl": ("end_to_end.py", "--task", "short", "--against", "trl"),
    "samples_per_s_short_vs_trl_batching": (
        "end_to_end.py",
        "--task",
        "short",
        "--against",
        "trl_batching",
    ),
    "samples_per_s_longtail_vs_loop": ("end_to_end.py", "--task", "longtail", "--against", "loop"),
    "samples_per_s_longtail_vs_trl": ("end_to_end.py", "--task", "longtail", "--against", "trl"),
    "samples_per_s_longtail_vs_trl_batching": (
        "end_to_end.py",
        "--task",
        "longtail",
        "--against",
        "trl_batching",
    ),
}


def commands(names: list[str]) -> list[tuple[str, ...]]:
    """The scripts to run, each once; a script that gives several figures is told of all of them."""
    wanted = [f for f in FIGURES if not names or any(f.startswith(name) for name in names)]
    merged: dict[tuple[str, ...], list[str]] = {}
    for figure in wanted:
        script, *options = FIGURES[figure]
        if "--against" in options:  # one run in which all sides take turns
            merged.setdefault((script, *options[:2]), []).extend(options[2:])
        else:
            merged.setdefault((script, *options), [])
    return [(*command, *more) for command, more in merged.items()]


def main() -> None:
    """Parse and run; exits with 1 if a bench has failed, after the others have run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    args = parser.parse_args()
    for name in args.names:
        if not any(figure.startswith(name) for figure in FIGURES):
            parser.error(f"{name}: wanted the beginning of one of {', '.join(FIGURES)}")
    failed = [
        script
        for script, *options in commands(args.names)
        if subprocess.run([sys.executable, str(HERE / script), *options], check=False).returncode
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
