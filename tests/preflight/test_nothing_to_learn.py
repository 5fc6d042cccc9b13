"""Settings under which a run would train on nothing, and judges that tell nothing apart."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybridrl.recipes
from hybridrl.config import ConfigError, RewardConfig, RewardKind, RewardPartConfig
from hybridrl.data import Item
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.preflight.judges import try_judges, warn_of_long_answers
from hybridrl.preflight.nothing_to_learn import (
    warn_of_equal_samples,
    warn_of_idle_updates,
    warn_of_lone_samples,
    warn_of_long_warm_ups,
)
from hybridrl.preflight.prepare import build_recipe

FOLDERS = [path.parent for path in Path(hybridrl.recipes.__path__[0]).glob("*/config.yaml")]
GROUPED = sorted(f.name for f in FOLDERS if "group_size: int" in (f / "__init__.py").read_text())


def built(name: str, **settings: Any) -> Any:
    return build_recipe({"target": f"hybridrl.recipes.{name}:{name}", **settings})


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_has_no_baseline(name: str) -> None:
    assert built(name).stages
    with pytest.raises(ConfigError, match=r"recipe\.group_size=1: wanted 2 or more"):
        built(name, group_size=1)


def test_there_are_recipes_with_groups() -> None:
    assert {"grpo", "rloo", "dapo", "gspo"} <= set(GROUPED)


def test_a_ratio_that_may_not_move() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.clip_high=0\.0: wanted above 0, or clip_low"):
        built("grpo", clip_low=0.0, clip_high=0.0)
    assert built("grpo", clip_low=0.0).stages
    with pytest.raises(ConfigError, match=r"recipe\.clip_high=0\.0: wanted above 0, or clip_low"):
        built("gmpo", clip_low=0.0, clip_high=0.0)
    with pytest.raises(ConfigError, match=r"recipe\.clip=0\.0: wanted above 0, at most 1"):
        built("ppo", clip=0.0)


def test_labels_of_which_half_are_wrong_teach_nothing() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.label_smoothing=0\.5: wanted 0 to below 0\.5"):
        built("dpo", label_smoothing=0.5)


def test_weights_of_nothing() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.desirable_weight=0\.0: wanted above 0, or un"):
        built("kto", desirable_weight=0.0, undesirable_weight=0.0)
    assert built("kto", undesirable_weight=0.0).stages
    parts = {name: RewardPartConfig(weight=0.0) for name in ("a", "b")}
    with pytest.raises(ConfigError, match=r"cost\.parts=.*: wanted a part whose weight is not 0"):
        RewardConfig(kind=RewardKind.sum, parts=parts).check("cost")
    parts["c"] = RewardPartConfig()
    RewardConfig(kind=RewardKind.sum, parts=parts).check("cost")


@pytest.mark.parametrize(
    ("name", "settings", "steps", "warm", "lines"),
    [("grpo", {}, 0, 0, 1), ("grpo", {}, 0, 9, 0), ("grpo", {}, 1, 0, 0),
     ("ppo", {"critic_warmup": 5}, 5, 0, 1), ("ppo", {"critic_warmup": 5}, 6, 0, 0)],
)  # fmt: skip
def test_updates_that_never_begin_are_told(
    caplog: pytest.LogCaptureFixture, name: str, settings: Any, steps: int, warm: int, lines: int
) -> None:
    trainer = SimpleNamespace(steps=steps)
    config: Any = SimpleNamespace(trainer=trainer, warm_start_steps=warm)
    with caplog.at_level(logging.WARNING):
        warn_of_idle_updates(config, built(name, **settings))
    assert len(caplog.messages) == lines
    assert all("actor is never trained" in line for line in caplog.messages)


def test_statistics_of_one_sample_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    graph = built("reinforce_pp", num_samples=1)
    for prompts, lines in ((2, 0), (1, 1)):
        config: Any = SimpleNamespace(trainer=SimpleNamespace(prompts_per_step=prompts))
        with caplog.at_level(logging.WARNING):
            warn_of_lone_samples(config, graph)
        assert len(caplog.messages) == lines
    assert "of which there is one" in caplog.text


@pytest.mark.parametrize(("setting", "value"), [("temperature", 0.0), ("top_k", 1), ("min_p", 1.0)])
def test_greedy_samples_of_a_group_are_told(
    caplog: pytest.LogCaptureFixture, setting: str, value: float
) -> None:
    drawn = {"temperature": 1.0, "top_k": 0, "min_p": 0.0}
    for name, settings, lines in (
        ("grpo", drawn, 0), ("grpo", drawn | {setting: value}, 1), ("reinforce_pp", drawn, 0),
        ("sft", drawn | {setting: value}, 0),
    ):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_equal_samples(SimpleNamespace(rollout=SimpleNamespace(**settings)), built(name))  # type: ignore[arg-type]
        assert len(caplog.messages) == lines, (name, settings)


@pytest.mark.parametrize(("warm", "lines"), [(8, 0), (9, 1), (1000, 1)])
def test_a_warm_up_beyond_the_end_is_told(
    make_config: Any, caplog: pytest.LogCaptureFixture, warm: int, lines: int
) -> None:
    settings = ("trainer.steps=4", "trainer.mini_batches=2", f"trainer.optim.warmup_steps={warm}")
    with caplog.at_level(logging.WARNING):
        warn_of_long_warm_ups(make_config(*settings), built("grpo"))
    assert len(caplog.messages) == lines
    assert all("the run has 8 updates" in line for line in caplog.messages)


def items(answers: list[str]) -> list[Item]:
    return [
        Item(f"{n}?", (1,), answer, (2,), "main", {"question": f"{n}?", "answer": answer},
             answers=(answer,), place=f"row {n}")
        for n, answer in enumerate(answers, 1)
    ]  # fmt: skip


def tried(make_config: Any, judge: RewardConfig, template: str = "{answer}", n: int = 3) -> None:
    config = make_config("data=jsonl", "data.sources.main.name=mine.jsonl")
    config.reward, config.data.answer_template = judge, template
    try_judges(config, built("grpo"), items([str(k) for k in range(n)]))


@pytest.mark.long
def test_a_judge_that_likes_no_answer_is_named(
    make_config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def right(response, answer): return 0.5 * (response == f'#{answer}')\n"
        "def blind(response): return 1.0\n"
        "def none(solution_str, ground_truth): return None\n"
        "def some(response, answer): return 1.0 if response == answer else None\n"
        "def raises(response, answer): return 1.0 if response == answer else 1 / 0\n"
        "def half(response, answer): return 1.0 if answer < '2' else 1 / 0\n"
    )

    def function(name: str) -> RewardConfig:
        return RewardConfig(kind=RewardKind.function, function=f"{file}:{name}")

    with caplog.at_level(logging.WARNING):
        tried(make_config, RewardConfig(kind=RewardKind.exact))
        tried(make_config, RewardConfig(kind=RewardKind.exact, extract="#(.*)"), "so #{answer}")
        tried(make_config, function("right"), "#{answer}")
        assert not caplog.messages
        tried(make_config, RewardConfig(kind=RewardKind.exact, extract="#(.*)"))
        assert caplog.messages[0].startswith(
            "reward.extract=#(.*) finds nothing in 3 rows' own answers (row 1, '0'): does data.ans"
        )
        assert len(caplog.messages) == 1
        caplog.clear()
        tried(make_config, RewardConfig(kind=RewardKind.exact), "#{answer}")
        assert "reward.kind=exact gives none of 3 rows' own answers its best value" in caplog.text
        assert "row 1, '#0' got 0" in caplog.text
        caplog.clear()
        tried(make_config, function("blind"))
        assert "reward.kind=function gives none of 3 rows' own answers" in caplog.text
    with pytest.raises(
        ConfigError, match=r"reward\.function=.*row 1 \(TypeError: the reward is None"
    ):
        tried(make_config, function("none"))
    with pytest.raises(ConfigError, match=r"the response '' to .*TypeError: the reward is None"):
        tried(make_config, function("some"))
    caplog.clear()
    tried(make_config, function("raises"))  # costs these samples alone
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()
    tried(make_config, function("half"))
    (line,) = [line for line in caplog.messages if "nevertheless" in line]
    assert ":half failed on 1 of 3 rows that it was tried on. The run starts never" in line
    assert "The first failure: the response '2' to main, row 3 (ZeroDivisionError" in line


@pytest.mark.parametrize(
    ("judge", "longest", "line"),
    [
        ({}, 2, "of 8 answers that reward.kind=exact was tried on, 5 have more tokens than "
         "rollout.max_new_tokens=2, e.g. main, row 4, of 3: no response can be as long"),
        ({}, 3, ""),
        ({"extract": "#(.*)"}, 3, ""),  # the text before it need not be written
        ({"extract": "#(.*)"}, 1, "rollout.max_new_tokens=1, e.g. main, row 4, of 3: no resp"),
        ({"kind": RewardKind.regex, "pattern": r"\d+"}, 1, ""),
        ({"kind": RewardKind.regex, "pattern": "{answer}"}, 2, "of 8 answers that reward.kind=reg"),
    ],
)  # fmt: skip
def test_answers_that_no_response_is_long_enough_for(
    make_config: Any, caplog: pytest.LogCaptureFixture, judge: dict[str, Any], longest: int,
    line: str,
) -> None:  # fmt: skip
    config = make_config("data=jsonl", "data.sources.main.name=mine.jsonl")
    config.reward = RewardConfig(**{"kind": RewardKind.exact, **judge})
    config.data.answer_template = "so #{answer}" if "extract" in judge else "{answer}"
    config.rollout.max_new_tokens = longest
    graph, tokenizer = built("grpo"), make_char_tokenizer("so #0123456789", 64)
    trials = try_judges(config, graph, items(["7", "8", "9", *["100"] * 5, "1000"]))
    caplog.clear()
    warn_of_long_answers(config, trials, tokenizer)
    assert line in caplog.text
    assert len(caplog.messages) == bool(line)
