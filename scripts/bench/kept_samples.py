"""The cost of `telemetry.samples=all`: `make bench-samples RUN=DIR`.

DIR has kept its samples. The largest file of a step of the recipe is written again, as its rank has
written it, several times. Prints one JSON object: how long the rank waits, how long its thread
writes (wall and CPU time), and both over the step's seconds, which the run has measured.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lines import show
from transformers import AutoTokenizer

from hybridrl.flow.ledger import Drop, DropReason
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.models.response_text import ResponseText
from hybridrl.telemetry import sample_files
from hybridrl.telemetry.rundata import load
from hybridrl.workers.sample_writer import SampleFacts, SampleWriter
from hybridrl.workers.store import StoredSample


def stored(row: dict[str, Any]) -> tuple[SampleFacts, StoredSample]:
    """A recorded sample as its rank had it."""
    drop = Drop(DropReason(row["drop_reason"]), row["drop_text"]) if row["drop_reason"] else None
    facts = SampleFacts(
        SampleId(row["prompt_position"], row["branch"], row["k"]),
        row["source"],
        row["task"],
        tuple(TokenSpan(**span) for span in row["spans"]),
        {s["name"]: s["value"] if s["text"] is None else s["text"] for s in row["scalars"]},
        drop,
    )
    tensors = {
        "tokens": torch.tensor(row["prompt_ids"] + row["response_ids"]),
        **{x: torch.tensor(row[x]) for x in ("log_probs", "advantages") if row[x] is not None},
        **{field["name"]: torch.tensor(field["values"]) for field in row["fields"]},
    }
    return facts, StoredSample(row["response_tokens"], None, tensors)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as on a rank
    run = load(arguments.run)
    steps = {at.step: seconds for at, seconds in run.series("step_s") if at.phase == "rl"}
    files = sample_files.files_by_step(arguments.run)
    paths = [path for step in steps for path in files.get(step, ())]
    if not paths:
        parser.error(f"RUN={arguments.run}: wanted a run with telemetry.samples=all")
    file = max(paths, key=lambda path: path.stat().st_size)
    table = sample_files.read([file], sample_files.schema().names)
    samples = [stored(row) for row in table.to_pylist()]
    tokenizer = AutoTokenizer.from_pretrained(arguments.run / "final")
    waits, walls, cpus = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = SampleWriter(Path(folder), 0, ResponseText(tokenizer))
        for step in range(arguments.rounds + 1):  # the first looks up the tokens' texts
            begin, cpu = time.perf_counter(), time.process_time()
            writer.put(step, "rl", samples)
            waits.append(time.perf_counter() - begin)
            writer.flush()
            walls.append(time.perf_counter() - begin)
            cpus.append(time.process_time() - cpu)
        writer.close()
    step_s = statistics.median(seconds for seconds in steps.values() if seconds is not None)
    wait, wall, cpu = (statistics.median(seconds[1:]) for seconds in (waits, walls, cpus))
    show(
        {
            "name": "kept_samples",
            "samples": len(samples),
            "tokens": sum(sample.tensors["tokens"].numel() for _, sample in samples),
            "bytes": file.stat().st_size,
            "step_s": round(step_s, 3),
            "rank_waits_s": float(f"{wait:.3g}"),
            "thread_writes_s": float(f"{wall:.3g}"),
            "thread_cpu_s": float(f"{cpu:.3g}"),
            "first_write_s": float(f"{walls[0]:.3g}"),
            "waits_of_step": float(f"{wait / step_s:.2g}"),
            "cpu_of_step": float(f"{cpu / step_s:.2g}"),
            "better": "lower",
        }
    )


if __name__ == "__main__":
    main()
