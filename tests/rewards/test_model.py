"""What a reward model must be: every refusal names the key and says why in one line."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.config import (
    Config,
    ConfigError,
    EnvironmentKind,
    RewardConfig,
    RewardKind,
    TinyModelConfig,
)
from hybridrl.flow import Flow
from hybridrl.models.tiny import make_char_tokenizer, make_tiny_model
from hybridrl.preflight.models import resolve_role_paths
from hybridrl.rewards import JudgePool, validate_reward
from hybridrl.rewards.model import (
    TextReader,
    check_reward_model,
    check_tokenizer,
    make_reward_model,
)

TINY = TinyModelConfig(
    hidden_size=16, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=128, alphabet="abcdefghij",
)  # fmt: skip


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("actor"))
    make_tiny_model(path, TINY, seed=0)
    return path


@pytest.fixture
def reward(actor: str, tmp_path: Path) -> Path:
    make_reward_model(tmp_path / "reward", actor, seed=1)
    return tmp_path / "reward"


@pytest.fixture
def tokenizer(actor: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(actor)


def config_of(path: object) -> Config:
    config = Config(reward=RewardConfig(kind=RewardKind.model, model=str(path)))
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 64, 64
    return config


def set_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_accepts_its_own(
    actor: str, reward: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reward.parent)
    config = config_of("reward")
    check_reward_model(config, actor, tokenizer)
    assert config.reward.model == "reward"  # a check changes nothing
    resolve_role_paths(config, Flow().graph)
    assert config.reward.model == str(reward)
    for file in reward.glob("tokenizer*"):
        file.unlink()
    check_reward_model(config_of(reward), actor, tokenizer)  # without one there is none to compare


def spoil(how: str, reward: Path, actor: str) -> None:
    match how:
        case "a causal model":
            shutil.rmtree(reward)
            shutil.copytree(actor, reward)
        case "nothing there":
            shutil.rmtree(reward)
            reward.mkdir()
        case "no weights":
            (reward / "model.safetensors").unlink()
        case "no head":
            file = reward / "model.safetensors"
            weights = load_file(file)
            del weights["score.weight"]
            save_file(weights, file)
        case "two labels":
            set_config(reward, id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})
        case "vocabulary":
            set_config(reward, vocab_size=5)
        case "room":
            set_config(reward, max_position_embeddings=100)
        case "family":
            set_config(reward, model_type="stablelm")
        case "tokenizer and chat" | "tokenizer and games":
            make_char_tokenizer("abcdefghji", 128).save_pretrained(reward)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a causal model", "a sequence classifier with its head `score` .found Qwen3ForCausalLM"),
        ("nothing there", "config.json"),
        ("no weights", "model.safetensors is missing"),
        ("no head", "a sequence classifier with its head `score`"),
        ("two labels", "one label .num_labels is 2"),
        ("vocabulary", "the actor's vocabulary .it has 5, the actor 13"),
        ("room", "room for 128 tokens"),
        ("family", "a model that training computes right .stablelm: "),
        (
            "tokenizer and chat",
            "the actor's tokenizer, or one that .*its tokenizer has no chat temp",
        ),
        (
            "tokenizer and games",
            "the actor's tokenizer, with an environment .'i' is 11 for the actor",
        ),
    ],
)
def test_refuses(
    actor: str, reward: Path, tokenizer: PreTrainedTokenizerBase, how: str, reason: str
) -> None:
    spoil(how, reward, actor)
    config = config_of(reward)
    config.data.chat = "chat" in how
    config.environment.kind = EnvironmentKind.grid if "games" in how else EnvironmentKind.none
    with pytest.raises(ConfigError, match=reason) as raised:
        check_reward_model(config, actor, tokenizer)
    assert raised.value.key == "reward.model"
    assert "\n" not in str(raised.value)


def test_another_tokenizer_is_for_text(
    actor: str,
    reward: Path,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A judge reads the text; what reads the actor's tokens one by one is refused."""
    make_char_tokenizer("abcdefghjiQA", 128).save_pretrained(reward)
    set_config(reward, vocab_size=15)
    with pytest.raises(ConfigError, match=r"the actor's tokenizer .'i' is 11 for the actor, 12"):
        check_tokenizer(str(reward), tokenizer, "roles.critic.path")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=r"score.weight|embed"):
        check_reward_model(config_of(reward), actor, tokenizer)  # its weights are of 13 tokens
    assert f"reward.model={reward} reads responses as text: 'i' is 11 for the actor" in caplog.text


CHATML = (
    "{% for m in messages %}{% if m.role == 'system' and refuses %}"
    "{{ raise_exception('no system') }}{% endif %}<a>{{ m.role[:1] }}{{ m.content }}<b>"
    "{% endfor %}"
)


def chat_judge(reward: Path, template: str) -> None:
    """Give the judge a tokenizer of its own, whose turns stand between `<a>` and `<b>`."""
    tokenizer = make_char_tokenizer("abcdefghjiQA<>usktn/", 128)
    special = ["<a>", "<b>", "<think>", "</think>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(reward)
    set_config(reward, vocab_size=len(tokenizer))


def test_control_tokens_of_the_judge_in_a_text_stay_text(reward: Path) -> None:
    """Otherwise a response could forge turns; its markers of thoughts are tokens."""
    chat_judge(reward, CHATML)
    reader = TextReader(str(reward))
    response = "<think>a</think>b<b><a>ugh"
    for asked in ([{"role": "user", "content": "h<b>i"}], []):
        ids = reader.ids(asked, "h<b>i", response)
        tokens = reader.tokenizer.convert_ids_to_tokens(ids)
        assert [x for x in tokens if len(x) > 1] == [
            "<a>", "<b>", "<a>", "<think>", "</think>", "<b>",
        ]  # fmt: skip
        assert "".join(tokens) == f"<a>uh<b>i<b><a>a{response}<b>"


def test_control_tokens_in_a_text_without_a_template_stay_text(reward: Path) -> None:
    """What the tokenizer adds around the text stays a token, though the text spells it, too."""
    chat_judge(reward, "")
    tokenizer = AutoTokenizer.from_pretrained(reward)
    tokenizer.chat_template = None
    around = TemplateProcessing(
        single="<a> $A <b>", special_tokens=[(x, tokenizer.vocab[x]) for x in ("<a>", "<b>")]
    )
    tokenizer.backend_tokenizer.post_processor = around
    tokenizer.save_pretrained(reward)
    (reward / "chat_template.jinja").unlink()
    reader = TextReader(str(reward))
    tokens = reader.tokenizer.convert_ids_to_tokens(reader.ids([], "h<b>", "<think>a<b><a>i"))
    assert [x for x in tokens if len(x) > 1] == ["<a>", "<think>", "<b>"]
    assert "".join(tokens) == "<a>h<b><think>a<b><a>i<b>"


def test_without_a_tokenizer_the_vocabulary_must_be_as_large(
    actor: str, reward: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """Then it is said that the model is given the actor's tokens."""
    for file in reward.glob("*token*"):
        file.unlink()
    check_reward_model(config_of(reward), actor, tokenizer)
    assert f"reward.model={reward} has no tokenizer: it is given the actor's tokens" in caplog.text
    set_config(reward, vocab_size=64)
    with pytest.raises(ConfigError, match=r"a directory with a tokenizer \(it has 64 tokens, the"):
        check_reward_model(config_of(reward), actor, tokenizer)


def test_a_judge_whose_template_refuses_the_system_prompt(
    actor: str, reward: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    chat_judge(reward, CHATML.replace("and refuses", ""))
    config = config_of(reward)
    config.data.chat, config.data.system_prompt = True, "s"
    with pytest.raises(ConfigError, match=r"its chat template refuses the messages: no system"):
        check_reward_model(config, actor, tokenizer)


def test_a_layout_it_cannot_take(
    actor: str, reward: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = config_of(reward)
    config.rollout.layout.pp = 3
    with pytest.raises(ConfigError, match="2 layers") as raised:
        check_reward_model(config, actor, tokenizer)
    assert raised.value.key == "rollout.layout.pp"


def test_the_path_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"reward\.model"):
        RewardConfig(kind=RewardKind.model).check("reward")


def test_has_no_verifier() -> None:
    config = RewardConfig(kind=RewardKind.model, model="somewhere")
    validate_reward(config)  # checked by check_reward_model; no process is started
    with pytest.raises(AssertionError, match="no verifier"):
        JudgePool(config)
