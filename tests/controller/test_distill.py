"""Distillation on real ranks: a teacher of another size, and teachers that cannot read samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import ConfigError, TinyModelConfig
from hybridrl.controller.preflight import prepare
from hybridrl.models.tiny import make_tiny_model
from hybridrl.telemetry.records import read_lines

ALPHABET = TinyModelConfig().alphabet
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the actor, and sure of what it says."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    make_tiny_model(path, TinyModelConfig(**SMALL | {"hidden_size": 48}), seed=1)
    weights = load_file(path / "model.safetensors")
    sure = {name: 8 * value if value.dim() > 1 else value for name, value in weights.items()}
    save_file(sure, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_the_student_comes_near_the_teacher(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    user_code: Path,
    teacher: Path,
    tmp_path: Path,
) -> None:
    """The recorded KL of the first step is that of transformers; it falls."""
    file = tmp_path / "told.py"
    file.write_text(
        "import json\n"
        "from hybridrl.algorithms.distill import DistillLoss\n"
        "from hybridrl.flow import recipe\n"
        "def tell(*fields):\n"
        "    return json.dumps([field.tolist() for field in fields])\n"
        "@recipe('told')\n"
        "def told(flow, cfg):\n"
        "    samples = flow.actor.generate(flow.prompts, num_samples=4)\n"
        "    samples = flow.teacher.log_probs(samples)\n"
        "    fields = ('tokens', 'log_probs', 'teacher_log_probs')\n"
        "    samples = samples.map(tell, fields, scalars=('told',))\n"
        "    flow.actor.update(samples, loss=DistillLoss())\n"
    )
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    run = train_here(
        tmp_path / "run", *settings, f"recipe={{target: '{file}:told'}}", "trainer.steps=16",
        "trainer.prompts_per_step=16",
        f"teacher.path={teacher}", "trainer.optim.lr=1e-2", "eval.sets.main.every=null",
        "eval.sets.main.num_prompts=2",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(teacher)
    gaps = []
    for sample in run.steps[0].samples:
        tokens, log_probs, scored = map(torch.tensor, json.loads(sample.scalars["told"]))
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, -len(scored) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, tokens[-len(scored) :, None])[:, 0]
        torch.testing.assert_close(scored, wanted, atol=1e-4, rtol=0)
        gaps.append(log_probs - wanted)
    kl = [line["reverse_kl"] for line in run.metrics]
    assert kl[0] == pytest.approx(torch.cat(gaps).mean().item(), abs=1e-3)
    assert sum(kl[-4:]) < 0.9 * sum(kl[:4])


def test_by_default_the_teacher_is_the_start(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """After the warm start: it teaches nothing, but for the last bits of two engines."""
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    settings += ["warm_start.steps=2", "trainer.optim.lr=1e-9", "eval.sets.main.num_prompts=2"]
    run = train_here(
        tmp_path / "run",
        *settings,
        "recipe=distill",
        "trainer.steps=1",
        "eval.sets.main.every=null",
    )
    (line,) = [line for line in run.metrics if "reverse_kl" in line]
    assert abs(line["reverse_kl"]) < 1e-5
    assert read_lines(run.dir / "samples.jsonl")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vocabulary": ({"alphabet": ALPHABET[1:]}, {}, r"the actor's vocabulary \(it has 78, the"),
    "tokenizer": ({"alphabet": ALPHABET[::-1]}, {}, r"the actor's tokenizer \('a' is \d+ for the"),
    "positions": ({"max_positions": 30}, {}, r"room for \d+ tokens, .* \(its context is 30\)"),
    "classifier": (
        {}, {"architectures": ["Qwen3ForSequenceClassification"]}, "a language model .it is a seq"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_teacher_that_cannot_read_the_samples(
    name: str, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    tiny, changed, allowed = REFUSED[name]
    path = tmp_path / "other"
    make_tiny_model(path, TinyModelConfig(**tiny), seed=0)
    config = AutoConfig.from_pretrained(path)
    config.update(changed)
    config.save_pretrained(path)
    with pytest.raises(ConfigError, match=f"^teacher.path={path}: wanted {allowed}"):
        prepare(make_config(*refused(path, tmp_path)))


def test_a_teacher_that_is_not_there(make_config: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=f"^teacher.path={path}: wanted a directory that exists"):
        prepare(make_config(*refused(path, tmp_path)))


def refused(path: Path, folder: Path) -> list[str]:
    settings = ["data.size=20", "data.eval_size=4", f"run.dir={folder / 'run'}"]
    return ["recipe=distill", f"teacher.path={path}", *settings]
