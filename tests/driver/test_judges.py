"""Whole runs with judges that wait, on a server that delays and fails."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stubs import StubJudge, grade

from hybridrl.config import ConfigError
from hybridrl.config.compose import check, register
from hybridrl.driver.train import BudgetSpent, train
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines

KEY = "sk-verysecret123"
FUNCTIONS = """
import asyncio


def places(prompts, responses, answers, items):
    assert len(set(prompts)) == 1
    return [sorted(responses).index(response) / 10 + len(responses) for response in responses]


async def waits(prompt, response, answer, item):
    await asyncio.sleep(len(response) / 100)
    return (sum(map(ord, response)) % 7) / 6
"""


@pytest.fixture
def judge() -> Iterator[Any]:
    """Every fifth request gets HTTP 429 or nonsense first."""

    def trouble(text: str, attempt: int) -> str | None:
        wrong = ("429", "garbage", "500")[len(text) % 3]
        return wrong if attempt == 0 and len(text) % 5 == 0 else None

    delays = iter(0.001 * (i * 37 % 80) for i in range(100_000))
    with StubJudge(delay=lambda: next(delays), trouble=trouble) as stub:
        yield stub


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def chat(url: str) -> list[str]:
    return [
        "reward=chat", "reward.extract=null", f"reward.endpoint.url={url}",
        "reward.endpoint.model=stub", "reward.endpoint.backoff_s=0.01", "reward.max_in_flight=6",
        "reward.endpoint.template='{prompt}|{response}'", "reward.endpoint.score_range=[0,10]",
    ]  # fmt: skip


def without_reward(settings: list[str]) -> list[str]:
    return [setting for setting in settings if not setting.startswith("reward")]


def samples(run: Any, phase: str = "rl") -> list[dict[str, Any]]:
    return [line for line in read_lines(run.dir / "samples.jsonl") if line["phase"] == phase]


FEW = ["trainer.steps=2", "eval.sets.main.num_prompts=2", "eval.sets.main.every=null"]
FUSED = ["schedule=fused", "schedule.migration_threshold=6", "rollout.decode_steps=2"]


@pytest.mark.layouts
def test_serial_and_fused_train_on_the_same_batch(
    train_here: Callable[..., Any], tiny_run: list[str], judge: Any, tmp_path: Path
) -> None:
    """Whatever order replies come in; with a reference, for which samples move while judged."""
    settings = [*without_reward(tiny_run), *chat(judge.url), *FEW, "recipe.kl_coef=0.01"]
    runs = {
        "serial": train_here(tmp_path / "serial", *settings),
        "fused": train_here(tmp_path / "fused", *settings, *FUSED),
    }
    for run in runs.values():
        lines = samples(run)
        assert len(lines) == 2 * 16
        for line in lines:
            assert line["status"] == "ok"
            assert line["reward"] == grade(f"{line['prompt']}|{line['response']}") / 10
        requests = sum(metrics["judge/requests"] for metrics in run.metrics)
        retries = sum(metrics["judge/retries"] for metrics in run.metrics)
        assert 0 < requests - retries <= 32 + 2
        assert run.stored == [0, 0]
    serial, fused = ([(x["id"], x["response"], x["reward"]) for x in samples(r)[:16]]
                     for r in runs.values())  # fmt: skip
    assert serial == fused
    assert judge.most_in_flight == 6
    asked = 2 * (32 + 4)
    assert sum(judge.asked.values()) <= asked * 2


@pytest.mark.layouts
@pytest.mark.parametrize("schedule", ["serial", "fused", "partial"])
def test_a_function_sees_whole_groups(
    schedule: str,
    train_here: Callable[..., Any],
    tiny_run: list[str],
    functions: Path,
    tmp_path: Path,
) -> None:
    reward = ["reward=function", f"reward.function={functions}:places", "reward.call=group"]
    settings = [*without_reward(tiny_run), *reward, "reward.extract=null", *FEW]
    more = {"serial": [], "fused": FUSED, "partial": ["schedule=partial", FUSED[-1]]}[schedule]
    run = train_here(tmp_path / "run", *settings, *more)
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in samples(run):
        groups[line["step"], line["prompt"]].append(line)
    whole = [group for group in groups.values() if len(group) == 4]
    assert len(whole) == len(groups) == 8
    for group in whole:
        ordered = sorted(line["response"] for line in group)
        for line in group:
            assert line["reward"] == ordered.index(line["response"]) / 10 + 4
    assert {line["reward"] for line in samples(run, "evaluation")} == {1.0}


@pytest.mark.long
def test_an_async_function_is_known_without_a_setting(
    train_here: Callable[..., Any], tiny_run: list[str], functions: Path, tmp_path: Path
) -> None:
    reward = ["reward=function", f"reward.function={functions}:waits", "reward.extract=null"]
    run = train_here(tmp_path / "run", *without_reward(tiny_run), *reward, *FEW)
    for line in samples(run):
        assert line["reward"] == (sum(map(ord, line["response"])) % 7) / 6
    log = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert "judge reward starts, called by the driver" in log


@pytest.mark.wide
@pytest.mark.layouts
def test_a_spent_budget_ends_the_run_which_resumes(
    command: Callable[..., Any],
    tiny_run: list[str],
    judge: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reply is paid twice, and the key is nowhere."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    run = tmp_path / "run"
    settings = [
        *without_reward(tiny_run), *chat(judge.url), *FEW, f"run.dir={run}", "log.level=debug",
        "cluster=processes", "cluster.ranks=1", "trainer.resume=auto", "trainer.steps=3",
        "reward.endpoint.key_env=JUDGE_KEY", "reward.endpoint.retries=9", "telemetry.report=true",
    ]  # fmt: skip
    first = command(*settings, "reward.endpoint.budget=40")
    code, out, error = first.end(timeout=250)
    assert code == 1, error
    wanted = "hybridrl: reward.endpoint.budget=40: all of these requests are spent; stopped after"
    assert wanted in error
    assert sum(judge.asked.values()) == 40
    second = command(*settings, "reward.endpoint.budget=400")
    code, more_out, more_error = second.end(timeout=250)
    assert code == 0, more_error
    assert "continuing after step" in more_error
    assert all(count <= 2 for count in judge.asked.values())  # once, and once after trouble
    assert judge.keys == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.parent.name == "judges" for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in out + error + more_out + more_error


@pytest.mark.wide
@pytest.mark.layouts
def test_a_budget_that_an_evaluation_spends(
    make_config: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Before the first step, between two steps, after the last: no step is lost."""
    run = tmp_path / "run"
    with StubJudge() as stub:
        settings = [
            *without_reward(tiny_run), *chat(stub.url), *FEW, f"run.dir={run}",
            "cluster=processes", "cluster.ranks=1", "trainer.resume=auto",
            "eval.sets.main.every=1", "reward.endpoint.cache=false",
        ]  # fmt: skip

        def spend(budget: int) -> str:
            with pytest.raises(BudgetSpent) as error:
                train(make_config(*settings, f"reward.endpoint.budget={budget}"))
            return str(error.value)

        # Two requests an evaluation, sixteen a step.
        assert spend(1).endswith("stopped after step 0")
        assert spend(1 + 2 + 16 + 1).endswith("after step 1; trainer.resume=auto continues with a"
                                              " higher one")  # fmt: skip
        assert (run / "checkpoints" / "step_000001" / "resume").is_dir()
        assert not (run / "final").exists()
        spent_at_end = spend(20 + 2 + 16 + 1)
        assert "stopped after step 2; trainer.resume=auto continues" in spent_at_end
        assert (run / "final" / "model.safetensors").is_file()
        assert "accuracy_after" in train(make_config(*settings, "reward.endpoint.budget=99"))
        steps = [x["step"] for x in read_lines(run / "metrics.jsonl") if "loss" in x]
        assert steps == [1, 2]
        assert sum(stub.asked.values()) <= 39 + 2


URL = "http://127.0.0.1:1/v1"
REFUSED = {
    "no endpoint": (
        [*chat(URL), "reward.endpoint.template=null"],
        rf"^reward.endpoint.url={URL}: wanted an endpoint that answers",
    ),
    "budget": (["reward.endpoint.budget=0"], "^reward.endpoint.budget=0: wanted 1 or more"),
    "group of one": (
        ["recipe=remax", "reward=function", "reward.call=group", "reward.function=FILE:places"],
        "^reward.call=group: wanted sample: the recipe has one response a prompt in stage",
    ),
    "part": (
        ["reward=sum", "+reward.parts={a: {kind: chat, endpoint: {url: 'http://a/v1'}}}"],
        "^reward.parts.a.endpoint.model=null: wanted the judge's model",
    ),
    "batch": (["reward=exact", "reward.call=batch"], "^reward.call=batch: wanted sample, for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings(
    name: str, make_config: Callable[..., Any], functions: Path, tmp_path: Path
) -> None:
    settings, message = REFUSED[name]
    settings = [setting.replace("FILE", str(functions)) for setting in settings]
    small = ["data.size=20", "data.eval_size=4", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(*settings, *small))


def test_an_unknown_call_is_refused() -> None:
    register()
    with pytest.raises(ConfigError, match=r"^reward\.call=all: wanted .*sample.*batch.*group"):
        check(["reward.call=all"])


def test_a_template_names_columns_that_the_rows_have(
    make_config: Callable[..., Any], judge: Any, tmp_path: Path
) -> None:
    small = ["data.size=20", "data.eval_size=4", f"run.dir={tmp_path / 'run'}"]
    settings = [*chat(judge.url), "reward.endpoint.template='{rubric} {response}'"]
    message = r"^reward.endpoint.template=\{rubric\}: wanted fields of the rows \(.*has no rubric"
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(*settings, *small))
