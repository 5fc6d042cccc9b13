"""Responses judged per second by an endpoint against the bound of its requests in flight.

    make bench-judges

A stub server in a separate process takes 0.5 to 1.5 x `--delay` for each request. To a share of
them it answers with HTTP 429, HTTP 500 or nonsense, or drops the connection. The bound is N
requests in flight over the mean seconds of a request. All requests count. Sides:
`pool` is the judge alone, all responses there at once. `serial` and `fused` are steps of a run with
a tiny model on two ranks. Seconds without a request in flight do not count: a run does other
things, too. Prints one JSON object a line. `ratio` is requests per second over the bound; it also
falls where the server is late. `places_filled` is the share of the N that were in use.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from hybridrl.config import EndpointConfig, JudgeConfig, RewardKind
from hybridrl.rewards import JudgePool, RewardInput

STUB = Path(__file__).parents[1] / "stub_judge.py"
TINY = [
    "model.tiny.hidden_size=32", "model.tiny.intermediate_size=64", "model.tiny.num_layers=1",
    "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2", "model.tiny.head_dim=16",
    "data.size=2000", "data.eval_size=8", "warm_start.steps=0", "rollout.max_new_tokens=12",
    "telemetry.loggers=[]", "telemetry.report=false", "eval.sets.main.num_prompts=1",
    "eval.sets.main.every=null", "eval.sets.main.reward.kind=exact", "trainer.steps=1",
    "reward=chat", "reward.extract=null", "recipe.group_size=8",
    "reward.endpoint.model=stub", "reward.endpoint.score_range=[0,10]",
]  # fmt: skip
TEMPLATE = "{prompt} {response}"


class Stub:
    """The server in a process, and its counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = [f"--delay={options.delay}", f"--trouble={options.trouble}", "--port=0"]
        self._process = subprocess.Popen(
            [sys.executable, str(STUB), *settings], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[0].partition("=")[2]

    def counts(self) -> dict[str, float]:
        """The counts of the server."""
        url = self.url.replace("/v1", "/counts")
        with urllib.request.urlopen(url) as reply:
            counts: dict[str, float] = json.load(reply)
        return counts

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def pool(url: str, options: argparse.Namespace) -> None:
    """The judge alone."""
    endpoint = EndpointConfig(
        url=url, model="stub", template=TEMPLATE, backoff_s=0.1, retries=10, cache=False
    )
    config = JudgeConfig(kind=RewardKind.chat, endpoint=endpoint, max_in_flight=options.in_flight)
    with closing(JudgePool(config)) as judge:
        futures = [judge.submit([RewardInput("", str(i), "")]) for i in range(options.responses)]
        assert all(result.status == "ok" for f in futures for result in f.result())


def run(url: str, schedule: str, options: argparse.Namespace) -> None:
    """One step of a run under a schedule."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *TINY, f"run.dir={folder}/run", f"schedule={schedule}", f"cluster={options.cluster}",
            "cluster.ranks=2",
            f"trainer.prompts_per_step={options.responses // 8}", f"reward.endpoint.url={url}",
            f"reward.endpoint.template='{TEMPLATE}'", "reward.endpoint.backoff_s=0.1",
            "reward.endpoint.retries=10", f"reward.max_in_flight={options.in_flight}",
            "reward.endpoint.cache=false",
        ]  # fmt: skip
        command = [sys.executable, "-m", "hybridrl.cli", "train", *settings]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def measured(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One round of a side: its requests per second, and the bound."""
    stub = Stub(options)
    try:
        if side == "pool":
            pool(stub.url, options)
        else:
            run(stub.url, side, options)
        counts = stub.counts()
    finally:
        stub.close()
    bound = options.in_flight * counts["requests"] / counts["seconds"]
    per_s = counts["requests"] / counts["busy_s"]
    filled = counts["in_flight_s"] / counts["busy_s"] / options.in_flight
    most = counts["most_in_flight"]
    return {"per_s": per_s, "bound": bound, "most_in_flight": most, "filled": filled}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--trouble", type=float, default=0.2)
    parser.add_argument("--cluster", default="local", help="processes: without Ray")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["pool", "serial", "fused"])
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in options.sides}
    for _ in range(options.rounds):
        for side in options.sides:
            rounds[side].append(measured(side, options))
    for side, results in rounds.items():
        record = {
            "name": f"judge_requests_per_s_{side}",
            "value": round(statistics.median(r["per_s"] for r in results), 1),
            "unit": "requests/s",
            "baseline": round(statistics.median(r["bound"] for r in results), 1),
            "ratio": round(statistics.median(r["per_s"] / r["bound"] for r in results), 3),
            "better": "higher",
            "rounds": len(results),
            "most_in_flight": max(r["most_in_flight"] for r in results),
            "places_filled": round(statistics.median(r["filled"] for r in results), 3),
            "ratios": [round(r["per_s"] / r["bound"], 3) for r in results],
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
