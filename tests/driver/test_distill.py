"""Distillation on real ranks: a teacher of another size, and teachers that cannot read samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import ConfigError, TinyModelConfig
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines

ALPHABET = TinyModelConfig().alphabet
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the actor, and sure of what it says."""
    path = tmp_path_factory.mktemp("models") / "teacher"
    return make_sure(path, **SMALL | {"hidden_size": 48})


def make_sure(path: Path, **shape: int) -> Path:
    """A model whose words depend much on what it has read."""
    make_tiny_model(path, TinyModelConfig(**shape), seed=1)
    weights = load_file(path / "model.safetensors")
    sure = {name: 8 * value if value.dim() > 1 else value for name, value in weights.items()}
    save_file(sure, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.layouts
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


@pytest.mark.layouts
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


TOLD = """
import json
from hybridrl.algorithms.distill import Divergence, TopKDistillLoss
from hybridrl.flow import recipe
def tell(*fields):
    return json.dumps([field.tolist() for field in fields])
@recipe('told')
def told(flow, cfg):
    samples = flow.actor.generate(flow.prompts, num_samples=2)
    samples = TEACHER
    fields = ('tokens', 'teacher_top_ids', 'teacher_top_log_probs')
    samples = samples.map(tell, fields, scalars=('told',))
    flow.actor.update(samples, loss=TopKDistillLoss(top_k=6, divergence=Divergence.jsd))
"""
TWO_RANKS = ["cluster.ranks=2", "trainer.layout.tp=2", "rollout.layout.tp=2"]
LAYOUTS = [
    pytest.param(["cluster.ranks=1"], id="one rank"),
    pytest.param(TWO_RANKS, id="tp 2", marks=pytest.mark.layouts),
    pytest.param(
        ["cluster.ranks=2", "trainer.layout.pp=2", "rollout.layout.pp=2"],
        id="pp 2",
        marks=pytest.mark.layouts,
    ),
    pytest.param(
        ["cluster.ranks=2", "cluster.pools.rollout=1", "schedule=periodic"],
        id="others generate",
        marks=pytest.mark.layouts,
    ),
    pytest.param(
        ["cluster.ranks=3", "cluster.pools.rollout=1", "schedule=periodic"],
        id="others generate, fsdp 2",
        marks=pytest.mark.layouts,
    ),
]
APART = pytest.param(
    ["cluster.ranks=2", "cluster.pool_of.teacher=teacher"],
    id="a pool of its own",
    marks=pytest.mark.layouts,
)


def told_run(
    train_here: Callable[..., Any], tiny_run: list[str], folder: Path, scored: str, *more: str
) -> Any:
    """A step of a recipe that tells what its teacher said: `scored` is the stage."""
    file = folder / "told.py"
    file.write_text(TOLD.replace("TEACHER", scored))
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    return train_here(
        folder / "run", *settings, f"recipe={{target: '{file}:told'}}", "trainer.steps=1",
        "model.tiny.num_layers=2", "eval.sets.main.every=null", "eval.sets.main.num_prompts=2",
        *more,
    )  # fmt: skip


def of_response(model: Any, ids: list[int], num_response: int) -> torch.Tensor:
    """Log-probabilities [response_tokens, vocab] of transformers, in float64."""
    logits = model(torch.tensor(ids)[None]).logits[0, -num_response - 1 : -1]
    return logits.log_softmax(-1)


def check_step(
    run: Any, start: Path, teacher_says: Callable[[Any, list[int], int], torch.Tensor]
) -> None:
    """Teacher's words, loss and norm of the gradient, against transformers in float64.

    Measured: 2e-6, 3e-7, and 4e-6 of the norm.
    """
    student = AutoModelForCausalLM.from_pretrained(start).double()
    losses = []
    for sample in run.steps[0].samples:
        tokens, top_ids, top = json.loads(sample.scalars["told"])
        with torch.no_grad():
            log_probs = teacher_says(sample, tokens, len(top))
        wanted = log_probs.gather(1, torch.tensor(top_ids))
        torch.testing.assert_close(wanted, log_probs.topk(6).values, atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(top).double(), wanted, atol=1e-4, rtol=0)
        p = of_response(student, tokens, len(top)).gather(1, torch.tensor(top_ids)).exp()
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, wanted.exp()))
        mean = (p + q) / 2
        losses.append(((p * (p / mean).log() + q * (q / mean).log()) / 2).sum(-1))
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = [x.grad.flatten() for x in student.parameters() if x.grad is not None]
    (line,) = run.metrics
    for name in ("loss", "divergence"):
        assert line[name] == pytest.approx(loss.item(), rel=1e-4)
    assert line["grad_norm"] == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-3)
    assert 0 < line["teacher_mass"] < 1


@pytest.mark.layouts
@pytest.mark.parametrize("layout", [*LAYOUTS, APART])
def test_the_likeliest_tokens_of_two_teachers(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    layout: list[str],
) -> None:
    """Each reads the samples of its source: those of every second prompt."""
    teacher, other = tmp_path / "teacher", tmp_path / "other"
    two_layers = SMALL | {"num_layers": 2}
    make_tiny_model(teacher, TinyModelConfig(**two_layers | {"hidden_size": 48}), seed=1)
    make_tiny_model(other, TinyModelConfig(**two_layers), seed=2)
    run = told_run(
        train_here, tiny_run, tmp_path, "flow.teacher.top_log_probs(samples, 6)", *layout,
        f"teacher.path={teacher}", f"+teacher.by_source={{letters: '{other}'}}",
        "+data.sources={letters: {name: spell_backward, params: {max_word_len: 5}}}",
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(path).double() for path in (teacher, other)]
    start = run.dir / "start"
    check_step(run, start, lambda x, ids, num: of_response(models[x.id.prompt % 2], ids, num))


@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_that_has_read_the_answer(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path, layout: list[str]
) -> None:
    """It scores the same response after another prompt; the average is still the start."""
    average = "flow.copy(flow.actor, update='ewma', decay=0.9)"
    scored = f"{average}.top_log_probs(samples, 6, privileged=True, name='teacher')"
    start = make_sure(tmp_path / "sure", **SMALL | {"num_layers": 2})
    run = told_run(
        train_here, tiny_run, tmp_path, scored, "data=spell_hints", "data.eval_size=8",
        f"model.path={start}", *layout,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(start).double()
    tokenizer = AutoTokenizer.from_pretrained(start)
    differ = []

    def teacher_says(sample: Any, ids: list[int], num: int) -> torch.Tensor:
        asked = tokenizer.decode(ids[: len(ids) - num])
        word = asked.partition(">")[2] or asked
        prompt = f"{word[-2::-1]}>{word}"
        differ.append(prompt != asked)
        return of_response(model, [*tokenizer(prompt)["input_ids"], *ids[-num:]], num)

    check_step(run, start, teacher_says)
    assert any(differ)


def test_without_a_privileged_prompt(make_config: Callable[..., Any], tmp_path: Path) -> None:
    settings = ["recipe=self_distill", "data=spell_backward", f"run.dir={tmp_path / 'run'}"]
    message = r"^data\.privileged_template=null: wanted a text with what actor_ewma is to know"
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(*settings, "data.privileged_template=null"))


def test_more_tokens_than_the_vocabulary_has(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    settings = ["recipe=distill_topk", "recipe.top_k=1000", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(
        ConfigError, match=r"^recipe=the top 1000 tokens, in stage \w+: wanted at most 79,"
    ):
        prepare(make_config(*settings, "data.size=20", "data.eval_size=4"))


def test_a_teacher_of_no_source(make_config: Callable[..., Any], tmp_path: Path) -> None:
    settings = ["recipe=distill_topk", "+teacher.by_source={words: some/model}"]
    with pytest.raises(ConfigError, match=r"^teacher\.by_source=words: wanted one of spell$"):
        make_config(*settings, f"run.dir={tmp_path / 'run'}")


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
