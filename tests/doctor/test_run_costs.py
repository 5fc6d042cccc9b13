"""`hybridrl plan calibrate --run`: costs scaled to the micro-batches that a run has timed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl import cli
from hybridrl.config import ActivationMode, ConfigError, compose
from hybridrl.config.stored_run import composed_run, overrides_of
from hybridrl.controller import mapping_command
from hybridrl.doctor import run_costs
from hybridrl.planner.accelerators import ACCELERATORS, layer_roofline
from hybridrl.planner.mapping import cluster_of
from hybridrl.planner.mapping_costs import MappingCosts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Costs of two ranks, far from what a core takes."""
    file = tmp_path_factory.mktemp("costs") / "base.json"
    gpu = ACCELERATORS["a100"]
    # Without what a row costs whatever is in it, which is most of so small a one.
    costs = MappingCosts(replace(layer_roofline(gpu), row_s=0.0), cluster_of(gpu, 1, 2))
    file.write_text(json.dumps(costs.to_json()))
    return file


def test_a_run_is_a_source_of_costs(
    tiny_run: list[str], make_run: Callable[..., Path], base: Path, tmp_path: Path, capsys: Any
) -> None:
    """PPO on two ranks: both roles' passes are there; the costs that it gives are plan auto's."""
    ppo = ("recipe=ppo", "recipe.kl_coef=0.01", "rollout.decode_steps=1", "trainer.steps=3")
    run_dir = make_run(tmp_path / "run", *ppo, without=["recipe.group_size"])
    passes = run_costs.read_passes(run_dir)
    assert set(passes) == {"actor", "critic"}
    kinds = {each.kind for own in passes.values() for each in own}
    assert kinds == {"F", "B"}
    lengths = [json.loads(line) for line in (run_dir / "lengths.jsonl").read_text().splitlines()]
    tokens = sum(sum(row["lengths"]) + sum(row["prompt_tokens"]) for row in lengths[1:])
    # The first rank has a part of the samples, each trained once, but none of the first step's.
    trained = sum(each.tokens for each in passes["actor"] if each.kind == "B")
    assert 0 < trained <= tokens

    recorded = composed_run(overrides_of(run_dir), writes=False)
    assert recorded.trainer.activations is ActivationMode.auto
    assert run_costs._activations_of(recorded, run_dir) is ActivationMode.keep  # of CPUs

    out = tmp_path / "run.json"
    cli.main(["plan", "calibrate", f"--run={run_dir}", f"--costs={base}", f"--out={out}"])
    printed = capsys.readouterr().out.splitlines()
    assert f"{sum(map(len, passes.values()))} timed passes" in printed[0]
    costs = MappingCosts.from_json(json.loads(out.read_text())).layer_costs
    plain = MappingCosts.from_json(json.loads(base.read_text())).layer_costs
    assert costs.forward.flop_s > 10 * plain.forward.flop_s  # a core is no A100
    assert costs.decode.weight_byte_s > plain.decode.weight_byte_s
    learned = run_costs.recorded_decoding(run_dir)
    assert learned is not None
    assert (costs.call_s, costs.round_trip_s) == (learned.costs.call_s, learned.costs.round_trip_s)
    assert costs.source.endswith("scaled to the run run")

    overrides = [*tiny_run[:-1], *ppo, "cluster.memory_check=warn"]
    options = ("--price", "--nodes=1", "--gpus-per-node=2", f"--costs={out}")
    report = mapping_command.run([*overrides, *options, "--lengths=lognormal:median=8,sigma=0.5"])
    assert report.record()["mappings"][0]["step_s"] > 0


def test_wrong_input_is_one_line(base: Path, stored: Callable[..., Path], tmp_path: Path) -> None:
    """A folder that is no run, one without passes, costs of fewer ranks, overrides beside costs."""
    with pytest.raises(ConfigError, match=r"^run=.*: wanted a run directory"):
        run_costs.run([f"--run={tmp_path}", f"--costs={base}"])
    empty = stored(1)
    with pytest.raises(ConfigError, match=r"^--run=.*: wanted a run that has trained"):
        run_costs.run([f"--run={empty}", f"--costs={base}"])
    line = '{"step": 1, "phase": "rl", "role": "actor", "passes": [%s]}\n'
    (empty / "passes.jsonl").write_text(line % '["X", 0, 8, 4, 36, 0.1]')
    with pytest.raises(ConfigError, match=r"^--run=.*passes.jsonl: 'X' is not a valid PassKind"):
        run_costs.run([f"--run={empty}", f"--costs={base}"])
    large = stored(4)
    (large / "passes.jsonl").write_text(line % '["F", 0, 8, 4, 36, 0.1]')
    with pytest.raises(ConfigError, match=r"^--costs=of 2: .* the run's 4 ranks"):
        run_costs.run([f"--run={large}", f"--costs={base}"])
    with pytest.raises(ConfigError, match=r"^option=cluster.ranks=2: wanted nothing"):
        run_costs.run([f"--run={large}", f"--costs={base}", "cluster.ranks=2"])
    with pytest.raises(ConfigError, match=r"^--out=.*: wanted a file in a directory"):
        run_costs.run([f"--run={large}", f"--out={tmp_path}/none/x.json"])


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[int], Path]:
    """The directory of a run of so many ranks, with its settings alone."""

    def make(ranks: int) -> Path:
        run_dir = tmp_path / f"run{ranks}"
        composed_run([f"run.dir={run_dir}", f"cluster.ranks={ranks}", "cluster.device=cpu"])
        return run_dir

    compose.register()
    return make
