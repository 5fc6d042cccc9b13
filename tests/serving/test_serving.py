"""`hybridrl serve` as its users start it: the SDK's clients in front of ranks of a tiny model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from served_command import SdkProgram, Served

import hybridrl
from hybridrl.config import ConfigError, ServeConfig
from hybridrl.serving.server import listener
from hybridrl.serving.start import check_overrides, serving
from hybridrl.system import activity
from hybridrl.telemetry.rundata import load

TINY = [
    "model=tiny",
    "cluster=processes",
    "cluster.ranks=1",
    "cluster.device=cpu",
    "actor.lora.rank=4",
    "serve.port=0",
    "data.max_prompt_tokens=24",
    "rollout.max_new_tokens=16",
]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("recipe=grpo", "recipe=grpo: wanted nothing: it is the client's with hybridrl serve"),
        ("recipe.clip=0.2", "recipe.clip=0.2: wanted nothing"),
        ("experiment=spell_tiny", "experiment=spell_tiny: wanted nothing"),
        ("data=jsonl", "data=jsonl: wanted data.max_prompt_tokens alone"),
        ("+eval/sets@eval.sets.x=y", "eval/sets=y: wanted nothing"),
        ("trainer.optim.lr=1", "trainer.optim.lr=1: wanted nothing"),
        ("rollout.temperature=0.5", "rollout.temperature=0.5: wanted nothing"),
        ("trainer.save_in_background=true", "trainer.save_in_background=true: wanted nothing"),
        ("trainer.resume=auto", "trainer.resume=auto: wanted nothing: clients load"),
    ],
)
def test_what_has_no_effect_is_refused(override: str, line: str) -> None:
    check_overrides(TINY)
    with pytest.raises(ConfigError) as refused:
        check_overrides([*TINY, override])
    assert str(refused.value).startswith(line)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "run"


@pytest.mark.parametrize(
    ("override", "expected"),
    [("run.dir=own", "own"), ("++run.dir=own", "own"), ("serve.port=0", r"runs/[-\d]+-serve")],
)
def test_a_directory_of_the_user_s_is_where_the_server_writes(
    override: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    started = list[str]()

    def start(config: Any) -> None:
        started.append(str(Path(config.run.dir).relative_to(tmp_path)))
        raise InterruptedError

    monkeypatch.setattr("hybridrl.serving.start.ServeLoop.start", start)
    with pytest.raises(InterruptedError), serving([*TINY, override]):
        pass
    assert re.fullmatch(expected, *started)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.tiny.max_positions=10000"], 8192),
        (["model.tiny.max_positions=2048"], 2047),
        (["rollout.max_new_tokens=50"], 66),
        (["data.max_prompt_tokens=50", "model.tiny.max_positions=2048"], 74),
    ],
)
def test_a_request_is_as_long_as_the_model_s_context_if_no_length_is_set(
    overrides: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of the default data set, of 16 tokens, are not those of clients."""

    class Started(Exception):
        pass

    def start(config: Any) -> None:
        raise Started(config.longest_generated)

    monkeypatch.setattr("hybridrl.serving.start.ServeLoop.start", start)
    plain = [setting for setting in TINY if not setting.startswith(("data.", "rollout."))]
    own = [*plain, *overrides, f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(Started, match=f"^{expected}$"), serving(own):
        pass


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_another_address_than_loopback_is_warned_about(
    caplog: pytest.LogCaptureFixture, host: str, is_told: bool
) -> None:
    with caplog.at_level("WARNING"):
        listener(ServeConfig(host=host, port=0)).close()
    assert ("serve.host=0.0.0.0: whoever reaches it can try keys" in caplog.text) is is_told


PRINTS = """
import ctypes
from hybridrl.cli.serve import _own_output
with _own_output() as output:
    print("python's")
    ctypes.CDLL(None).puts(b"c's")
    print("own", file=output, flush=True)
"""


def test_what_libraries_have_printed_to_a_buffer_is_not_on_standard_output() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PRINTS]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "own\n"
    assert sorted(ended.stderr.splitlines()) == ["c's", "python's"]


@pytest.fixture(scope="module")
def served(run_dir: Path) -> Iterator[Served]:
    served = Served(run_dir, *TINY, "serve.idle_s=16")
    yield served
    served.kill()


@pytest.mark.tinker
def test_a_client_that_is_killed_in_a_batch_leaves_nothing(served: Served, run_dir: Path) -> None:
    """Its models are freed once it has been silent, and another client trains all the while."""
    pytest.importorskip("tinker")
    killed, other = SdkProgram("endless", served), SdkProgram("steps", served)
    try:
        lost, model = killed.line(), other.line()
        killed.kill()
        for _ in range(MOST_STEPS):
            if (lost, "unloaded") in (told := _told(run_dir)):
                break
            other.line()  # it has made another step
        assert [what for name, what in told if name == lost] == ["created", "unloaded"]
        assert (model, "unloaded") not in told
        for _ in range(3):
            other.line()
    finally:
        for program in (killed, other):
            program.kill()


@pytest.mark.tinker
@pytest.mark.parametrize("kills_rank", [False, True])
def test_a_server_that_ends_amid_calls_leaves_nothing(tmp_path: Path, kills_rank: bool) -> None:
    """By SIGTERM, or since a rank dies: it tells so in a line, and a client's calls fail."""
    pytest.importorskip("tinker")
    ranks = [setting for setting in TINY if setting != "cluster.ranks=1"]
    served = Served(tmp_path / "run", *ranks, "cluster.ranks=2")
    client = SdkProgram("endless", served)
    try:
        client.line()  # there is a batch of which the first is done
        group = set(psutil.Process(served.process.pid).children(recursive=True))
        if kills_rank:
            rank = activity.read(tmp_path / "run" / activity.FOLDER / "00001")
            assert rank is not None
            os.kill(rank.pid, signal.SIGKILL)
            _, errors = served.process.communicate(timeout=120)
            code = served.process.returncode
        else:
            code, errors = served.end()
        assert code == int(kills_rank)
        assert "Traceback" not in errors
        assert ("rank 1 of 2" in errors) == kills_rank
        assert not psutil.wait_procs(group, timeout=30)[1]
        assert client.process.wait(timeout=120) != 0
        # A busy client may ask again only once the address is closed.
        told = ["rank 1 of 2"] if kills_rank else ["the server ends", "Connection error"]
        assert any(line in client.errors for line in told)
    finally:
        served.kill()
        client.kill()


MOST_STEPS = 10_000
"""Steps of minutes, after which the test has failed."""


def _told(run_dir: Path) -> list[tuple[str, str]]:
    """The models of a server's events, each with what has happened to it."""
    return [(event["model"], event["what"]) for event in load(run_dir).events]


@pytest.mark.tinker
def test_a_loop_trains_samples_and_goes_on_from_its_files(served: Served, run_dir: Path) -> None:
    """Then SIGTERM ends the server, whose process leaves no other, and its records are a run's."""
    tinker = pytest.importorskip("tinker")
    types: Any = tinker.types
    said = re.fullmatch(
        r"serving (\S+) at (http://127\.0\.0\.1:\d+) \(LoRA, rank 4; at most 40 tokens\)\n",
        served.first,
    )
    assert said is not None, served.first
    exported = re.fullmatch(
        r"export TINKER_BASE_URL=(\S+) TINKER_API_KEY=(tml-\w+)\n", served.second
    )
    assert exported is not None
    assert exported[1] == said[2]
    service = tinker.ServiceClient(base_url=exported[1], api_key=exported[2])
    created = service.create_lora_training_client(base_model=said[1], rank=4, seed=1)
    training = created.result() if hasattr(created, "result") else created
    tokens = training.get_tokenizer().encode("abc", add_special_tokens=False)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    with pytest.raises(Exception, match="importance_sampling"):
        training.forward_backward([datum], "stable_reinforce").result(120)
    losses = []
    for _ in range(3):
        loss = training.forward_backward([datum], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.05))
        losses.append(loss.result(120).metrics["loss:sum"])
        step.result(120)
    assert losses[0] > losses[1] > losses[2]
    sampler = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    prompt = types.ModelInput.from_ints(tokens)
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    (sequence,) = sampler.sample(prompt, 1, params).result(120).sequences
    whole = types.ModelInput.from_ints([*tokens, *sequence.tokens])
    scored = sampler.compute_logprobs(whole).result(120)
    assert scored[len(tokens) :] == pytest.approx(sequence.logprobs, abs=1e-5)
    path = training.save_state("one").result(120).path
    again = service.create_training_client_from_state_with_optimizer(path)
    again = again.result() if hasattr(again, "result") else again
    first, second = (
        each.forward([datum], "cross_entropy").result(120).metrics["loss:sum"]
        for each in (training, again)
    )
    assert first == pytest.approx(second, abs=1e-6)
    code, errors = served.end()
    assert code == 0
    assert "Traceback" not in errors
    assert "Warning" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(served.process.pid, 0)  # its ranks, too
    run, model = load(run_dir), path.removeprefix("tinker://").partition("/")[0]
    assert run.state == "finished"
    assert [value for _, value in run.series(f"loss/{model}")] == pytest.approx(losses)
    assert [event["what"] for event in run.events if event["model"] == model][:2] == [
        "created",
        f"saved {path}",
    ]


@pytest.mark.wide
@pytest.mark.ray
def test_a_server_on_its_own_ray(tmp_path: Path) -> None:
    """The command's handlers of signals are set again behind Ray's, and SIGTERM ends it."""
    settings = [setting for setting in TINY if setting != "cluster=processes"]
    code, errors = Served(tmp_path / "run", *settings).end()
    assert code == 0
    assert "Traceback" not in errors


@pytest.mark.long
def test_a_server_of_a_notebook(tmp_path: Path) -> None:
    """Its ranks are up within the block, and the port is free after it."""
    import urllib.request

    with hybridrl.serve([*TINY, f"run.dir={tmp_path / 'run'}"]) as server:
        url = f"{server.url}/api/v1/get_server_capabilities"
        request = urllib.request.Request(url, headers={"X-API-Key": server.key})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert b'"max_context_length": 40' in answer.read()
    assert (tmp_path / "run" / "api_key").read_text() == server.key
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(request, timeout=60)
