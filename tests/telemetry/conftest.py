"""A made-up run that looks like a real one: two ranks, a warm start of 60 steps, 60 steps of RL."""

import importlib.util
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from hybridrl.config.run import TelemetryConfig
from hybridrl.telemetry import sample_files
from hybridrl.telemetry.run import Telemetry

WARM, RL = 60, 60
HOSTILE = "<script>document.title = 'owned'</script><b>7</b>"


def rank_spans(
    telemetry: Telemetry, rng: random.Random, step: int, start: float, rl: bool
) -> float:
    """Spans of one step on the driver and two ranks; returns when it ended."""
    stages = [("switch", 0.012), ("generate", 0.55), ("score", 0.04), ("log_probs", 0.09)]
    now = start
    for name, seconds in [*(stages if rl else []), ("update", 0.31)]:
        ends = []
        for rank in range(2):
            end = now + seconds * rng.uniform(0.75, 1.0)
            telemetry.span(f"rank {rank}", name, now, end, step, tokens=rng.randint(900, 1100))
            ends.append(end)
        telemetry.span("driver", name, now, max(ends), step)
        now = max(ends) + 0.004
    return now


def rank_memory(telemetry: Telemetry, step: int, start: float, end: float) -> None:
    """What two ranks with a device each hold: more while they generate, rank 1 the most."""
    for rank in range(2):
        for when, used in ((start, 40), (start + 0.01, 110 + rank), ((start + end) / 2, 40)):
            held = {"resident": 9 * 10**9, "free": (150 - used) * 10**9, "total": 150 * 10**9}
            telemetry.memory(f"rank {rank}", when + step * 1e-6, held)


def rl_metrics(rng: random.Random, step: int) -> dict[str, float]:
    """Metrics of RL step `step`, 1 to 60."""
    done = step / RL
    reward = 0.58 + 0.37 * (1 - math.exp(-3 * done)) + rng.gauss(0, 0.025)
    length = 9 + 3 * done + rng.gauss(0, 0.3)
    return {
        "loss": rng.gauss(0, 0.012),
        "grad_norm": 0.4 + abs(rng.gauss(0, 0.12)),
        "lr": 3e-4,
        "entropy": 0.42 * math.exp(-1.6 * done) + rng.gauss(0, 0.01),
        "reward_mean": min(1.0, reward),
        "reward_std": 0.4 - 0.2 * done,
        "response_tokens_mean": length,
        "response_tokens_p10": length - 4 - rng.random(),
        "response_tokens_p90": length + 5 + rng.random(),
        "response_tokens_max": 24,
        "tokens_per_s": 4300 + rng.gauss(0, 220),
        "samples_per_s": 256 + rng.gauss(0, 10),
        "step_s": 0.95,
        "approx_kl": abs(rng.gauss(2e-4, 1e-4)),
        "mismatch/mean": 7e-3,
        "mismatch/max": abs(rng.gauss(0.03, 0.01)),
        "mismatch/kl": 6e-5,
        "mismatch/ess_token": 0.9999,
        "mismatch/ess_sequence": 0.999,
        "clip_fraction_high": abs(rng.gauss(0.004, 0.002)),
        "samples/used": 240,
        "samples/dropped": 16,
        "samples/filtered": 16,
        "samples/join_dropped": 0,
        "samples/aborted": 0,
        "reward_error": 1 if step == 17 else 0,
        "reward_timeout": 0,
    }


def sample(rng: random.Random, step: int, k: int) -> dict[str, object]:
    """One record of samples.jsonl."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    right = rng.random() < 0.6 + 0.35 * step / RL
    hostile = step == RL and k == 0
    return {
        "id": f"{step * 32 + k}.{k}",
        "prompt": f"sort: {a} {b} {a + b} -> ",
        "response": HOSTILE if hostile else f"{min(a, b)} {max(a, b)} {a + b if right else a}.",
        "reward": 1.0 if right and not hostile else 0.0,
        "status": "ok",
        "tokens": rng.randint(5, 20),
        "finish": "stop",
        "advantage": rng.gauss(0, 1),
    }


def evaluation(accuracy: float) -> dict[str, float]:
    return {
        "eval_accuracy": accuracy,
        "eval/main/avg@4": accuracy,
        "eval/main/avg@4/low": accuracy - 0.04,
        "eval/main/avg@4/high": accuracy + 0.03,
        "eval/main/pass@4": min(1.0, accuracy + 0.15),
        "eval/main/pass@4/low": accuracy + 0.1,
        "eval/main/pass@4/high": 1.0,
    }


def write_run(run_dir: Path) -> Path:
    """Write the whole run through `Telemetry` and return its directory."""
    rng = random.Random(0)
    config = TelemetryConfig(progress=False, loggers=[])
    with Telemetry(run_dir, config, WARM + RL) as telemetry:
        now = time.time()
        telemetry.phase("warm_start", WARM)
        for step in range(1, WARM + 1):
            now = rank_spans(telemetry, rng, step, now, rl=False)
            loss = 2.6 * math.exp(-step / 14) + 0.42 + rng.gauss(0, 0.03)
            norm = 2.2 * math.exp(-step / 20) + abs(rng.gauss(0.3, 0.1))
            telemetry.log(step, {"loss": loss, "grad_norm": norm, "tokens_per_s": 9100.0})
            if step % 20 == 0:
                accuracy = 0.6 * step / WARM + 0.004
                telemetry.log(step, evaluation(accuracy))
        telemetry.phase("rl", RL, first_step=WARM)
        for step in range(WARM + 1, WARM + RL + 1):
            number = step - WARM
            start, now = now, rank_spans(telemetry, rng, step, now, rl=True)
            rank_memory(telemetry, step, start, now)
            metrics = rl_metrics(rng, number)
            if number == 30:
                metrics |= {"loss": math.nan, "grad_norm": math.inf}
                telemetry.event("bad_step", step=step, loss=math.nan)
            telemetry.event(
                "switch",
                step=step,
                bytes=8_400_000,
                seconds=rng.uniform(9e-3, 14e-3),
                bytes_theory=8_000_000,
            )
            telemetry.lengths(step, [int(rng.gauss(8 + number / 20, 3)) % 25 for _ in range(256)])
            telemetry.samples(step, [sample(rng, number, k) for k in range(8)])
            telemetry.log(step, metrics)
            if number % 10 == 0:
                accuracy = min(1.0, 0.6 + 0.35 * (1 - math.exp(-3.5 * number / RL)))
                telemetry.log(step, evaluation(accuracy))
        telemetry.event("checkpoint", step=WARM + RL, path="checkpoints/final", bytes=12_600_000)
    (run_dir / "config.yaml").write_text("recipe:\n  target: hybridrl.recipes.grpo.recipe:grpo\n")
    return run_dir


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished synthetic run. Do not write into it: copy it first."""
    return write_run(tmp_path_factory.mktemp("runs") / "sort-three-numbers")


@pytest.fixture(scope="session")
def make_run() -> Callable[[Path], Path]:
    """Writes a synthetic run into a directory of your own."""
    return write_run


def sample_columns(step: int, rank: int) -> dict[str, list[Any]]:
    """Six samples of a step, of three prompts, of which rank 1 has the last one's."""
    rows = []
    for position in range(5 * step - 2, 5 * step + 1):
        for k in range(2):
            if (position == 5 * step) != bool(rank):
                continue
            num = 3 + (position + k) % 4
            spans = [(0, 2, step - 2, True), (2, num, step - 1, k == 0)]
            names = ("start", "stop", "version", "trained")
            hostile = position == 4 and k == 0
            texts = [f" {word}" for word in ("one", "two", "three", "four", "five", "six")][:num]
            texts[0] = HOSTILE if hostile else "zero\n"
            log_probs = [-0.05 * 3**i for i in range(num)]
            rows.append(
                {
                    "step": step, "phase": "rl", "id": f"{position}.{k}",
                    "prompt_position": position, "branch": "", "k": k,
                    "source": ("sums", "words")[position % 2],
                    "task": ("short", "long")[position % 2],
                    "prompt": f"prompt {position} -> ", "response": "".join(texts),
                    "prompt_tokens": 4, "response_tokens": num,
                    "prompt_ids": [1, 2, 3, 4], "response_ids": list(range(num)),
                    "token_texts": texts, "log_probs": log_probs,
                    "reward": float(k == 0), "advantage": 1.0 - 2 * k, "advantages": None,
                    "finish": "length" if num == 6 else "stop",
                    "status": "dropped" if position % 5 == 0 else "used",
                    "drop_reason": "filter" if position % 5 == 0 else None, "drop_text": None,
                    "spans": [dict(zip(names, span, strict=True)) for span in spans],
                    "scalars": [{"name": "reward_status", "value": None, "text": "ok"}],
                    "fields": [{"name": "reference_log_probs", "values": log_probs[::-1]}],
                }
            )  # fmt: skip
    return {name: [row[name] for row in rows] for name in rows[0]}


class SampledRun:
    """A run of ten steps that keeps every sample, step by step: `with SampledRun(dir) as run`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.telemetry = Telemetry(run_dir, TelemetryConfig(progress=False, loggers=[]), 10)

    def __enter__(self) -> Self:
        self.telemetry.__enter__()
        self.telemetry.phase("rl", 10)
        return self

    def __exit__(self, *error: Any) -> None:
        self.telemetry.__exit__(*error)

    def step(self, step: int) -> None:
        """A step: first its files, then its metrics."""
        for rank in range(2):
            sample_files.write(self.run_dir, step, rank, sample_columns(step, rank))
        for rank in range(2):
            self.telemetry.span(f"rank {rank}", "generate", 10.0 * step, 10 * step + 4, step)
        kinds = {f"{kind}/samples": 3.0 for kind in ("source/sums", "source/words", "task/long")}
        self.telemetry.log(step, {"reward_mean": 0.1 * step, "loss": 0.5, **kinds})


@pytest.fixture(scope="session")
def new_sampled_run() -> type[SampledRun]:
    """Begins a run in a directory of your own."""
    return SampledRun


@pytest.fixture(scope="session")
def sampled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps that has kept every sample. Do not write into it."""
    run_dir = tmp_path_factory.mktemp("runs") / "sampled"
    with SampledRun(run_dir) as run:
        evaluated = {"id": "0.0", "set": "main", "prompt": "2 + 2", "response": "5", "reward": 0.0}
        run.telemetry.samples(1, [evaluated], "evaluation")
        for step in range(1, 4):
            run.step(step)
    return run_dir


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


class Viewer:
    """Opens pages and collects what went wrong in them."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, path: Path | str, width: int = 1200, dark: bool = False) -> Any:
        """A page of a file, or of an address."""
        scheme = "dark" if dark else "light"
        page = self._browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda m: m.type in ("error", "warning") and self.errors.append(m.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path if isinstance(path, str) else path.resolve().as_uri())
        page.wait_for_selector("footer")
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return page


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed (extra `dev`)")
    if BROWSER is None:
        pytest.skip("no Chromium on PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def new_viewer(browser: Any) -> Callable[[], Viewer]:
    """Makes a `Viewer` of its own."""
    return lambda: Viewer(browser)


@pytest.fixture
def viewer(browser: Any) -> Viewer:
    return Viewer(browser)
