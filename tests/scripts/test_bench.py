"""The benches run with tiny sizes and print records of the agreed shape."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from script_modules import SCRIPTS, load_script
from transformers import AutoModelForCausalLM

from hybridrl.config import TinyModelConfig
from hybridrl.models.tiny import make_tiny_model

BENCH = SCRIPTS / "bench"


def load(name: str) -> ModuleType:
    return load_script(f"bench/{name}.py")


def records(script: str, *options: str) -> dict[str, dict[str, Any]]:
    """What a bench prints, by name, its shape checked."""
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *options],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for record in lines:
        assert list(record)[:6] == ["name", "value", "unit", "baseline", "ratio", "better"]
        assert record["better"] in ("higher", "lower")
        assert min(record["value"], record["baseline"], record["ratio"]) > 0
    return {record["name"]: record for record in lines}


def test_the_ratio_is_paired_and_the_values_are_medians() -> None:
    record = load("lines").line("x", "s", "lower", [1.0, 2.0, 9.0], [1.0, 4.0, 6.0], ranks=4)
    assert (record["value"], record["baseline"], record["ratio"]) == (2.0, 4.0, 1.0)
    assert record["ranks"] == 4


def test_a_mixture_is_compared_with_the_dense_demo_by_seed() -> None:
    def of(*runs: tuple[float, float]) -> list[dict[str, float]]:
        return [{"accuracy_after": accuracy, "seconds": seconds} for accuracy, seconds in runs]

    dense, moe = of((0.8, 100), (0.5, 200), (0.4, 100)), of((0.7, 120), (0.5, 300), (0.42, 130))
    accuracy, seconds = load("moe_learning").compare({"dense": dense, "moe": moe})
    assert (accuracy["value"], accuracy["baseline"], accuracy["behind_mean"]) == (0.5, 0.5, 0.0267)
    assert accuracy["by_seed"] == {"dense": [0.8, 0.5, 0.4], "moe": [0.7, 0.5, 0.42]}
    assert (seconds["value"], seconds["ratio"], seconds["better"]) == (130, 1.3, "lower")


def test_sides_take_turns_and_the_first_round_is_left_out() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = load("lines").take_turns({x: lambda x=x: side(x) for x in "abc"}, rounds=30)
    turns = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) == 6  # every order comes up
    assert measured["a"] == [3.0 * i + t.index("a") + 1 for i, t in enumerate(turns) if i]


def test_sides_that_are_processes_take_turns() -> None:
    """Each answers here with the blocks that it was asked for so far; the first one warms up."""
    side = (
        "import json, sys\nprint('true', flush=True)\nasked = []\nfor line in sys.stdin:\n"
        "    asked.append(int(line))\n    print(json.dumps(asked), flush=True)"
    )
    command = [sys.executable, "-c", side]
    blocks = load("blocks").in_turns({"a": command, "b": command}, rounds=2, steps=3, warm_up=5)
    assert blocks == {name: [[5, 3], [5, 3, 3]] for name in "ab"}


def test_figures_of_one_run_are_asked_for_together() -> None:
    run = load("run")
    assert run.commands(["samples_per_s_short"]) == [
        (
            *("end_to_end.py", "--task", "short", "--against", "loop", "--against", "trl"),
            *("--against", "trl_batching"),
        )
    ]
    assert run.commands(["dispatch", "transfer"]) == [
        ("data_plane.py", "--only", "dispatch"),
        ("data_plane.py", "--only", "transfer"),
    ]
    scripts = {command[0] for command in run.commands([])}
    assert scripts == {"data_plane.py", "rollout.py", "end_to_end.py"}


def test_an_unknown_figure_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), "nothing"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing: wanted" in done.stderr


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    shape = TinyModelConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    make_tiny_model(path, shape, seed=0)
    return path


def test_the_plain_loop_samples_what_the_model_says(tiny: Path) -> None:
    """Its log-probabilities, through padding, cache and compaction, are the model's own."""
    loop = load("plain_loop")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    prompts = [(5, 9, 11), (7,), (8, 6, 4, 12, 20)]
    torch.manual_seed(0)
    responses = loop.generate(model, prompts, max_new=40, eos=1)
    lengths = [len(response.ids) for response in responses]
    assert len(responses) == 3 * loop.GROUP_SIZE
    assert min(lengths) < max(lengths)  # rows were taken out of the batch
    for i, response in enumerate(responses):
        assert 1 not in response.ids[:-1]
        assert response.ids[-1] == 1 or len(response.ids) == 40
        prompt = prompts[i // loop.GROUP_SIZE]
        ids = torch.tensor([[*prompt, *response.ids]])
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-5, rtol=0)


def test_the_plain_loop_takes_the_step_of_the_formula(tiny: Path) -> None:
    """At the sampling weights the gradient is that of -mean(advantage x log-probability)."""
    loop = load("plain_loop")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    prompts = [(5, 9, 11), (7,)]
    torch.manual_seed(0)
    responses = loop.generate(model, prompts, max_new=12, eos=1)
    advantages = loop.group_advantages([float(i % 3 == 0) for i in range(len(responses))])
    total = torch.zeros(())
    for i, response in enumerate(responses):
        prompt = prompts[i // loop.GROUP_SIZE]
        ids = torch.tensor([[*prompt, *response.ids]])
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total = total - advantages[i] * log_probs.gather(-1, ids[0, len(prompt) :, None]).sum()
    (total / sum(len(response.ids) for response in responses)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop.update(model, torch.optim.SGD(model.parameters(), lr=1.0), prompts, responses, advantages)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            before[name] - parameter.detach(), expected[name], atol=1e-5, rtol=1e-4
        )


@pytest.mark.slow
def test_dispatch_and_transfer() -> None:
    lines = records("data_plane.py", "--tiny")
    assert set(lines) == {
        f"{what}_vs_{other}" for what in ("dispatch_empty", "transfer_32mb")
        for other in ("ray", "verl")
    }  # fmt: skip
    assert lines["transfer_32mb_vs_ray"]["unit"] == "s"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["short", "longtail"])
@pytest.mark.parametrize("other", ["loop", "trl", "trl_batching"])
def test_end_to_end(task: str, other: str, tmp_path: Path) -> None:
    if other.startswith("trl"):
        pytest.importorskip("trl", reason="the extra `bench` is not installed")
    # Untrained weights under the name of the warm-started ones: the shape is what is tested.
    name = f"{task}-{load('tasks').TASKS[task].warm_start_steps}"
    make_tiny_model(tmp_path / name, TinyModelConfig(hidden_size=32, num_layers=1), seed=0)
    lines = records(
        "end_to_end.py", "--task", task, "--against", other, "--cache", str(tmp_path),
        "--rounds", "1", "--steps", "1", "--prompts", "2",
    )  # fmt: skip
    record = lines[f"samples_per_s_{task}_vs_{other}"]
    assert record["unit"] == "samples/s"
    assert record["response_tokens_mean"] > 0
    assert record["baseline_response_tokens_mean"] > 0


@pytest.mark.tinker
@pytest.mark.slow  # four processes that import torch, one after the other
def test_a_served_loop_against_a_run(tmp_path: Path) -> None:
    """The sides draw the same responses, with untrained weights as above."""
    pytest.importorskip("tinker")
    name = f"short-{load('tasks').TASKS['short'].warm_start_steps}"
    make_tiny_model(tmp_path / name, TinyModelConfig(hidden_size=32, num_layers=1), seed=0)
    small = ("--rounds=1", "--steps=1", "--prompts=2", "--ranks=1", "--lora=8")
    lines = records("serve.py", "--cache", str(tmp_path), *small)
    record = lines["served_tokens_per_s_lora8"]
    assert record["unit"] == "tokens/s"
    assert record["response_tokens_mean"] == record["baseline_response_tokens_mean"] > 0


@pytest.mark.parametrize("python", [sys.executable, "/nowhere/python"])
def test_a_python_without_skyrl_is_refused(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("serve_skyrl").main([f"--skyrl={python}"])
    line = f"--skyrl={python}: wanted a Python that has skyrl[tinker,jax]==0.4.0"
    assert line in capsys.readouterr().err


@pytest.mark.slow  # most of a minute
def test_the_longest_sequence_at_a_fixed_memory() -> None:
    """Counted, not timed: cp 2 holds nearly twice as many tokens, and chunks more of them, too."""
    small = ("--mib", "4", "--chunk", "64", "--start", "128", "--hidden", "32")
    lines = records("long_rows.py", *small, "--sides", "keep", "cp2", "chunks")
    ratio = {name.removeprefix("longest_sequence_"): r["ratio"] for name, r in lines.items()}
    assert ratio["keep"] == 1
    assert 1.6 < ratio["cp2"] <= 2
    assert ratio["chunks"] > 1.5
    assert all(0 < r["peak_mib"] <= 4 for r in lines.values())


@pytest.mark.wide
@pytest.mark.layouts
def test_conversations_against_other_ways_to_have_them() -> None:
    """Each side runs; the engine prefills prompts and replies once, less what is pending."""
    small = ["--conversations=4", "--turns=2", "--prompt=20", "--turn=6", "--reply=5"]
    lines = records("turns.py", *small, "--rounds=1", "--wait=0.05", "--steps=8")
    prefilled = lines["turns_prefilled_tokens"]
    assert prefilled["value"] == 4 * (20 + 5) - 4  # a prompt's last token is fed by a decode step
    assert lines.keys() == {
        "turns_prefilled_tokens", "turns_vs_lockstep", "turns_vs_bound", "turns_vs_new_requests",
        "turns_row_step", "turns_driver", "turns_hung",
        "turns_hidden_planned", "turns_hidden_emulated",
    }  # fmt: skip
    assert lines["turns_hidden_planned"]["value"] > 0.9  # of two turns


@pytest.mark.slow
def test_a_hybrid_against_a_dense_model() -> None:
    """Each side runs; a copy has the states whatever the sample's length."""
    small = ["--rounds=1", "--rows=4", "--new=2", "--tokens", "20", "40"]
    lines = records("hybrid.py", *small)
    names = "decode", "train", "chunks", "park_20", "park_40"
    assert list(lines) == [f"hybrid/{name}" for name in names]
    short, long = lines["hybrid/park_20"], lines["hybrid/park_40"]
    assert short["state_bytes"] == long["state_bytes"] > 0
    assert long["bytes"] - short["bytes"] == 20 * 2 * 2 * 32 * 4  # keys, values, heads
