"""The configuration as a whole: its keys are frozen, described, and composed from the tree."""

import ast
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf

from hybridrl.config import (
    CLUSTERS,
    ClusterConfig,
    Config,
    EvalSetConfig,
    JudgeConfig,
    RewardPartConfig,
    ScheduleConfig,
    SourceConfig,
    compose,
)
from hybridrl.config.compose import register, to_config
from hybridrl.config.dotted import load_function
from hybridrl.config.renamed_keys import RENAMED_GROUPS
from hybridrl.config.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("keys.txt")
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/config.yaml"))
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in (ROOT / "conf").glob("*/*.yaml")
    if path.parent.name not in ("experiment", "roles")  # train.yaml takes that for each role
)
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


def keys(kind: type, path: str = "") -> list[str]:
    """Every leaf below a dataclass, dotted."""
    names = []
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            names += keys(hints[field.name], f"{path}{field.name}.")
        else:
            names.append(f"{path}{field.name}")
    return names


def recipe_config(name: str) -> type:
    node = OmegaConf.load(ROOT / "recipes" / name / "config.yaml")
    recipe = load_function("recipe.target", node.target)
    return get_type_hints(recipe.function)["cfg"]


OF_JUDGES = "|".join(field.name for field in fields(JudgeConfig))
CORRECTED = (
    "cispo clip_cov dapo dars dr_grpo gdpo gigpo gmpo grpo gspo kl_cov maxrl ppo reinforce_pp "
    "safe_rlhf sapo ttrl xrpo"
)
SHARED = (
    (
        rf"(reward\.parts\.NAME|reward|cost)\.(?=({OF_JUDGES})\b)",
        "reward|cost|reward.parts.NAME.",
        ("cost.", "reward.", "reward.parts.NAME."),
    ),
    (r"(reward|cost)\.(?!parts\.)", "reward|cost.", ("cost.", "reward.")),
    (
        r"roles\.(critic|cost_critic|reward)\.",
        "roles.NAME.",
        ("roles.cost_critic.", "roles.critic.", "roles.reward."),
    ),
    (
        r"recipe\[\w+\]\.correction\.",
        "recipe[*].correction.",
        tuple(f"recipe[{name}].correction." for name in CORRECTED.split()),
    ),
)
"""Settings of one dataclass in several places: they are listed once, under this name."""


def all_keys() -> list[str]:
    """Every key, those of kinds and recipes as `schedule[KIND].KEY` and `recipe[NAME].KEY`."""
    now = keys(Config) + [f"data.sources.NAME.{key}" for key in keys(SourceConfig)]
    now += [f"reward.parts.NAME.{key}" for key in keys(RewardPartConfig)]
    now += [f"eval.sets.NAME.{key}" for key in keys(EvalSetConfig)]
    for kind, entry in SCHEDULES.items():
        own = set(keys(entry.settings)) - set(keys(ScheduleConfig))
        now += [f"schedule[{kind.value}].{key}" for key in own]
    for kind, settings in CLUSTERS.items():
        own = set(keys(settings)) - set(keys(ClusterConfig))
        now += [f"cluster[{kind.value}].{key}" for key in own]
    for name in RECIPES:
        now += [f"recipe[{name}].{key}" for key in keys(recipe_config(name))]
    return now


def test_the_list_of_keys_is_frozen() -> None:
    """A new key is a decision: add it to keys.txt by hand."""
    now = set(all_keys())
    for shared, listed, wanted in SHARED:
        places: dict[str, set[str]] = {}
        for key in now:
            if place := re.match(shared, key):
                places.setdefault(place[0], set()).add(key.removeprefix(place[0]))
        assert sorted(places) == list(wanted)
        first, *others = places.values()
        assert all(each == first for each in others), f"{listed} has other keys in some places"
        now = {re.sub(f"^{shared}", listed, key) for key in now}
    assert sorted(now) == FROZEN.read_text().splitlines()


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Every key and group of keys as a page writes it; a recipe's keys under `recipe`."""
    written = [re.sub(r"\[\w+\]", "", key) for key in all_keys()]
    return {key[: dot.start()] for key in written for dot in re.finditer(r"\.|$", key)}


GROUPS = "|".join([*(field.name for field in fields(Config)), *RENAMED_GROUPS])
DOTTED = re.compile(rf"(?<![\w./-])((?:{GROUPS})(?:\.\w+)*\.(?:\w+|\*))(?!\.?\w)")
OF_USERS = re.compile(r"^(data\.sources|eval\.sets|reward\.parts)\.\w+")
CODE = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"(?<![\w.(])([\w.]+)=")
ROW = re.compile(r"^\| (`.*?) \|", re.MULTILINE)
PAGES_OF_RECIPES = sorted((ROOT / "recipes").rglob("*.md")) + sorted(
    (ROOT / "recipes").rglob("*.py")
)


def named_keys(text: str) -> set[str]:
    """The keys that a text names in full."""
    return {OF_USERS.sub(r"\1.NAME", key.removesuffix(".*")) for key in DOTTED.findall(text)}


@pytest.mark.parametrize(
    "page", PAGES_OF_RECIPES, ids=lambda page: str(page.relative_to(ROOT / "recipes"))
)
def test_keys_that_a_recipe_names_exist(page: Path, known: set[str]) -> None:
    """In its page and in its texts: docstrings and messages."""
    text = page.read_text()
    if page.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        text = "\n".join(str(x.value) for x in nodes if isinstance(x, ast.Constant))
    assert named_keys(text) <= known


@pytest.mark.parametrize("name", RECIPES)
def test_settings_that_a_recipes_page_lists_exist(name: str, known: set[str]) -> None:
    """In its table, where `.last` names follow a full one, and as `key=value`."""
    page = (ROOT / "recipes" / name / "README.md").read_text()
    _, heading, table = page.partition("| setting | default |")
    listed = [
        key for code in CODE.findall(page) for key in re.findall(r"(?<![\w.(])([\w.]+)=", code)
    ]
    for cell in ROW.findall(table.partition("\n\n")[0]):
        for key in CODE.findall(cell):
            listed.append(listed[-1].rpartition(".")[0] + key if key.startswith(".") else key)
    assert listed or not heading
    own = {*keys(recipe_config(name)), "experiment"}
    assert [key for key in listed if OF_USERS.sub(r"\1.NAME", key) not in own | known] == []


def dataclass_fields() -> list[tuple[str, ast.ClassDef]]:
    files = [
        *(ROOT / "hybridrl" / "config").glob("*.py"),
        *(ROOT / "recipes").glob("*/__init__.py"),
    ]
    return [
        (file.relative_to(ROOT).as_posix(), node)
        for file in sorted(files)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.decorator_list
    ]


@pytest.mark.parametrize(
    ("file", "node"), dataclass_fields(), ids=[f"{f}:{n.name}" for f, n in dataclass_fields()]
)
def test_every_key_has_a_docstring(file: str, node: ast.ClassDef) -> None:
    assert ast.get_docstring(node)
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert described, f"{file}: {ast.unparse(statement.target)} has no docstring"


def composed(*overrides: str) -> Any:
    register()
    return compose.composed([*overrides, "run.dir=out"])


NEEDED = {
    ("cluster", "slurm"): ["cluster.gpus_per_node=8"],
    ("model", "pretrained"): ["model.path=some/model"],
    ("data", "jsonl"): ["data.sources.main.name=x"],
    ("data", "csv"): ["data.sources.main.name=file.csv"],
    ("data", "parquet"): ["data.sources.main.name=x"],
    ("data", "huggingface"): ["data.sources.main.name=x"],
    ("data", "reasoning_gym"): ["data.sources.main.name=x"],
    ("schedule", "async"): ["cluster.pools.rollout=1"],
    ("schedule", "one_step"): ["cluster.pools.rollout=1"],
    ("schedule", "periodic"): ["cluster.pools.rollout=1"],
    ("environment", "function"): ["environment.path=a:b"],
    ("environment", "tools"): ["environment.path=a:b"],
    ("environment", "gym"): ["environment.path=Name-v0"],
    ("environment", "verifiers"): ["environment.path=name"],
    ("reward", "environment"): ["environment=grid"],
    ("reward", "function"): ["reward.function=a:b"],
    ("cluster", "ray"): ["cluster.address=http://head:8265"],
    ("reward", "sum"): ["+reward.parts={a: {kind: exact}}"],
    ("reward", "regex"): ["reward.pattern=x"],
    ("reward", "model"): ["reward.model=some/model"],
    ("reward", "chat"): ["reward.endpoint.url=http://judge/v1", "reward.endpoint.model=some"],
    ("reward", "http"): ["reward.endpoint.url=http://judge/score"],
}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    config = to_config(composed(f"{group}={option}", *NEEDED.get((group, option), [])))
    assert getattr(config, group)


@pytest.mark.parametrize("name", sorted(file.stem for file in ROOT.glob("conf/reward/*.yaml")))
def test_every_cost_is_the_reward_of_its_name(name: str) -> None:
    needed = NEEDED.get(("reward", name), [])
    needed = [*needed, *(override.replace("reward.", "cost.") for override in needed)]
    config = to_config(composed(f"reward={name}", f"cost={name}", *needed))
    assert config.cost == replace(config.reward, extract=None)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    assert to_config(composed(f"experiment={name}")).trainer.steps > 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_all_settings_of_its_dataclass(name: str) -> None:
    settings = dict(to_config(composed(f"recipe={name}")).recipe)
    target = settings.pop("target")
    assert target.startswith(f"hybridrl.recipes.{name}:")
    default = OmegaConf.structured(recipe_config(name))
    plain = OmegaConf.to_container(default, enum_to_str=True)
    raw = OmegaConf.load(ROOT / f"recipes/{name}/config.yaml")
    borrowed = {key: settings[key] for key in settings if OmegaConf.is_interpolation(raw, key)}
    assert settings == plain | borrowed
    assert settings.keys() == plain.keys()
    differs = raw.keys() - {"target", "defaults"}
    assert all(raw[key] != plain[key] for key in differs - borrowed.keys())


def test_root_defaults_are_the_dataclasses() -> None:
    """What train.yaml does not set is as in hybridrl/config: there is no second set of defaults.

    But for the optimizer of the warm start, which is that of model=tiny.
    """
    config = to_config(composed("model=pretrained", "model.path=some/model"))
    for group in ("trainer", "rollout", "eval", "cluster", "telemetry", "warm_start"):
        assert getattr(config, group) == getattr(Config(), group)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 120),
        (["model.path=somewhere"], 0),
        (["recipe=sft"], 0),
        (["recipe=sft", "warm_start.steps=7"], 7),
        (["warm_start.steps=0"], 0),
    ],
)
def test_a_model_made_on_the_spot_has_a_warm_start(overrides: list[str], steps: int) -> None:
    assert to_config(composed(*overrides)).warm_start_steps == steps
