"""What is composed with the groups' choices kept is what Hydra composes."""

import copy
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.config.compose import check, register
from hybridrl.config.composition import compose_train
from hybridrl.config.recipe_source import add_recipe


def settings(node: DictConfig) -> tuple[object, str]:
    """Values, types and Hydra's choices; `hydra.overrides` is what may differ."""
    choices = OmegaConf.to_container(node.hydra.runtime)
    with open_dict(node):
        del node["hydra"]
    kinds = {key: OmegaConf.get_type(node, str(key)) for key in node}
    return (choices, kinds, OmegaConf.is_struct(node)), OmegaConf.to_yaml(node)


def by_hydra(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_module("hybridrl.conf", version_base="1.3"):
        return compose("train", overrides=overrides, return_hydra_config=True)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.steps=3", "run.dir=x", "recipe=ppo", "+recipe.other=1", "trainer.steps=4"],
        ["experiment=spell_tiny", "~recipe.kl_coef", "++schedule.more=[1,2]"],
        ["eval/sets=[]", "+eval.sets={a: {num_prompts: 3}}", "eval.sets.a.num_prompts=4"],
        ["reward={kind: regex}", "reward.pattern=x", "roles@roles.cost_critic=default"],
        ["run.dir=x/${hydra:job.override_dirname}", "hydra.job.num=3"],
    ],
    ids=["none", "values", "deleted and forced", "sets", "a mapping", "names hydra"],
)
def test_it_is_what_hydra_composes(overrides: list[str]) -> None:
    register()
    for _ in range(2):  # composed, and kept
        assert settings(compose_train(overrides)) == settings(by_hydra(overrides))


@pytest.mark.parametrize(
    "override", ["trainer.nope=1", "+trainer.steps=1", "~recipe.nope", "trainer.optim.lr=abc"]
)
def test_it_refuses_what_hydra_refuses(override: str) -> None:
    register()
    with pytest.raises(Exception) as wanted:  # noqa: PT011 whatever Hydra raises
        by_hydra([override])
    with pytest.raises(type(wanted.value)) as error:
        compose_train([override])
    assert str(error.value) == str(wanted.value)


def test_a_composition_is_its_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may be changed, and the next one has none of it, nor its working directory."""
    register()
    compose_train(["run.dir=x"]).trainer.steps = 99
    monkeypatch.chdir(tmp_path)
    node = compose_train(["run.dir=x"])
    assert node.trainer.steps != 99
    assert node.hydra.runtime.cwd == str(tmp_path)


def test_the_store_is_not_copied_and_stays_as_it_is() -> None:
    """Hydra copies its sources for each composition; what it then changes are copies of nodes."""
    register()
    store = ConfigStore.instance()
    assert copy.deepcopy(store) is store
    names = "schema", "cost/exact", "cluster/schema/ray", "recipe/ppo"

    def stored() -> list[str]:
        return [OmegaConf.to_yaml(store.load(f"{name}.yaml").node) for name in names]

    before = stored()
    node = by_hydra(["recipe=ppo", "cost=exact", "cluster=ray", "trainer.steps=99"])
    node.cost.kind, node.recipe.clip, node.cluster.address = "regex", 7, "here"
    assert stored() == before


def test_a_users_own_file_is_read_each_time(tmp_path: Path) -> None:
    """As in a notebook, where it changes between two runs."""
    register()
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    for steps in (3, 4):
        own.write_text(f"# @package _global_\ntrainer: {{steps: {steps}}}\n")
        config = check(["experiment=mine", "run.dir=x"], str(tmp_path))
        assert config.trainer.steps == steps


def test_a_recipe_of_the_same_name_is_another() -> None:
    register()
    for clip in (1, 2):
        node = OmegaConf.create({"target": "hybridrl.recipes.grpo:grpo", "seen": clip})
        add_recipe("twice", node)
        assert check(["recipe=twice", "run.dir=x"]).recipe["seen"] == clip
