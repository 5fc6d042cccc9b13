"""The settings of a run, with those of a command line after them."""

from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from hybridrl.config import Config, ConfigError
from hybridrl.config.compose import register
from hybridrl.config.stored_run import composed_run, overrides_of

pytestmark = pytest.mark.long


@pytest.fixture
def run(tmp_path: Path) -> Path:
    register()
    composed_run([f"run.dir='{tmp_path}'", "rollout.max_new_tokens=7", "rollout.temperature=0.5"])
    return tmp_path


def with_settings(run: Path, *following: str) -> Config:
    return composed_run([*overrides_of(run, following), *following], writes=False)


def test_single_keys_prevail(run: Path) -> None:
    rollout = with_settings(run, "rollout.temperature=1", "rollout={decode_steps: 4}").rollout
    assert (rollout.max_new_tokens, rollout.temperature, rollout.decode_steps) == (7, 1.0, 4)


@pytest.mark.parametrize(
    ("following", "value"),
    [("rollout=vllm", "vllm"), ("cluster=emulated", "emulated"), ("schedule=packed", "packed")],
)
def test_a_group_that_is_chosen_replaces_that_of_the_run(
    run: Path, following: str, value: str
) -> None:
    config = with_settings(run, following)
    of_group = {
        "rollout": config.rollout.engine,
        "cluster": config.cluster.kind,
        "schedule": config.schedule.kind,
    }
    assert of_group[following.partition("=")[0]].value == value


def test_an_older_run_has_the_keys_of_every_kind_of_cluster(run: Path) -> None:
    """They had no effect but with their kind; what counts stays."""
    file = run / ".hydra" / "config.yaml"
    settings = OmegaConf.load(file)
    settings.cluster.update({"ranks": 3, "nodes": 1, "requeue": 0, "ranks_per_process": None})
    OmegaConf.save(settings, file)
    cluster = with_settings(run).cluster
    assert (cluster.kind.value, cluster.ranks) == ("local", 3)


def test_what_is_gone_counts_where_training_is_repeated(run: Path) -> None:
    file = run / ".hydra" / "config.yaml"
    settings = OmegaConf.load(file)
    settings.environment.partial = "timed"
    OmegaConf.save(settings, file)
    with pytest.raises(ConfigError, match=r"^environment\.partial=timed: wanted counted, as every"):
        overrides_of(run)
    assert composed_run(overrides_of(run, repeats=False), writes=False).rollout.max_new_tokens == 7


def test_a_job_s_restarts_are_left_out(tmp_path: Path) -> None:
    job = ["cluster=slurm", "cluster.ranks=1", "cluster.requeue=2", "cluster.restarts=2"]
    composed_run([f"run.dir='{tmp_path}'", *job])
    cluster = with_settings(tmp_path, "trainer.resume=never").cluster
    assert (cluster.kind.value, cluster.ranks, cluster.begins_again) == ("slurm", 1, "")


def test_an_experiment_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"^experiment=: wanted settings one by one"):
        overrides_of(run, ["experiment=spell_tiny"])


def test_a_run_of_old_has_its_settings_under_the_names_of_now(run: Path) -> None:
    """Groups and keys of a recipe that moved, and a group that has the name of a key of old."""
    file = run / ".hydra" / "config.yaml"
    node = OmegaConf.load(file)
    assert isinstance(node, DictConfig)
    node.critic = {**node.roles.critic, "path": "somewhere"}
    node.recipe.correction = "truncate"
    node.recipe.old_log_probs = "trainer"
    del node.roles["critic"]
    OmegaConf.save(node, file)
    for _ in range(2):  # what is written then is not renamed once more
        config = with_settings(run, "rollout.temperature=1")
        assert config.roles.critic.path == "somewhere"
        correction = config.recipe["correction"]
        assert (correction["weights"], correction["old_log_probs"]) == ("truncate", "trainer")
        composed_run(overrides_of(run))


@pytest.mark.parametrize(
    "settings",
    [
        ["experiment=tools_tiny"],
        ["data=products", "~eval.sets.main", "+eval.sets={own: {temperature: 1.0}}"],
        ["+rollout.logit_bias={3: 1.0}"],
    ],
    ids=lambda settings: settings[0],
)
def test_what_mappings_have_by_default_is_not_added(tmp_path: Path, settings: list[str]) -> None:
    """The run has its own sources and sets, and no others."""
    register()
    before = composed_run([f"run.dir='{tmp_path}'", *settings])
    after = with_settings(tmp_path)
    assert before.data.sources.keys() == after.data.sources.keys()
    assert before.eval.sets.keys() == after.eval.sets.keys()
    assert asdict(before) == asdict(after)
