"""`python -m gpu_dry`: runs cases on a fake GPU; see docs/gpu_dry.md."""

from gpu_dry import fake_cuda
from gpu_dry.cuda_lines import LineProbes

fake_cuda.load()  # before torch
probes = LineProbes()
probes.install()  # before the package

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402

from gpu_dry import fake_device  # noqa: E402
from gpu_dry.cases import CASES, FULL, OTHER_RANKS  # noqa: E402
from gpu_dry.dry_run import run_case  # noqa: E402
from gpu_dry.provoke import copies_of_host_memory, provoke  # noqa: E402


def main() -> None:
    """Run the cases that the command line names, or the whole table; write a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m gpu_dry")
    parser.add_argument("--case", action="append", help="a case by its name; all if left out")
    parser.add_argument("--full", action="store_true", help="the cases of `make gpu-dry-full`")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the results")
    options = parser.parse_args()
    table = FULL | OTHER_RANKS if options.full else CASES

    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    device = fake_device.FakeDevice()
    fake_cuda.install(lambda name: device.sync("wait"))
    fake_device.install(device)
    results = {"all": [*table], "provoked": provoke(device)}
    results["host copies"] = copies_of_host_memory(device)
    results |= {"cases": {}, "memory": {}, "attention": {}}
    for name in options.case or table:
        begun = time.process_time()
        figures = run_case(table[name], device)
        for kind in ("memory", "attention"):
            results[kind][name] = figures.pop(kind)
        if not table[name].only_trains:
            results["cases"][name] = figures
        print(f"{name}: {time.process_time() - begun:.1f} s of CPU", file=sys.stderr, flush=True)
        results["missed"] = probes.missed()
        options.out.write_text(json.dumps(results, indent=1))  # after each: a case may fail


if __name__ == "__main__":
    main()
