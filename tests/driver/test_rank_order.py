"""`cluster.rank_order`: another worker for each rank changes where ranks are, and nothing else."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config import ConfigError
from hybridrl.config.compose import check, register
from hybridrl.plan import mapping_command

pytestmark = pytest.mark.long

SMALL = ["cluster.ranks=2", "trainer.layout.pp=2", "model.tiny.num_layers=2", "trainer.steps=2",
         "eval.sets.main.num_prompts=2"]  # fmt: skip


def test_a_run_in_another_order_trains_the_same(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Rank 1 is the driver's process then; weights are equal bit for bit."""
    kept = [x for x in tiny_run if not x.startswith("model.tiny.num_layers")]
    weights, pids = [], []
    for name, order in (("own", "[]"), ("other", "[1,0]")):
        run = train_here(tmp_path / name, *kept, *SMALL, f"cluster.rank_order={order}")
        weights.append(load_file(run.dir / "final" / "model.safetensors"))
        log = (run.dir / "logs" / "driver.log").read_text()
        pids.append([int(pid) for pid in re.findall(r"rank \d+ is up on \S+, pid (\d+)", log)])
    one, other = weights
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert pids[0].index(os.getpid()) == 0
    assert pids[1].index(os.getpid()) == 1


@pytest.mark.parametrize("order", ["[0]", "[0,0]", "[1,2]", "[0,1,2]"])
def test_an_order_has_each_rank_once(order: str) -> None:
    register()
    wanted = r"^cluster.rank_order=\[.*\]: wanted each of the 2 ranks once: 0 to 1 in some order"
    with pytest.raises(ConfigError, match=wanted):
        check(["cluster.ranks=2", f"cluster.rank_order={order}"])


PLAN = ["recipe=grpo", "model=qwen3_8b", "--nodes=4", "--gpus-per-node=2", "--gpu-gib=30",
        "--lengths=lognormal:median=300,sigma=0.8", "--number=1", "trainer.prompts_per_step=32",
        "data.max_prompt_tokens=64", "rollout.max_new_tokens=960"]  # fmt: skip


def test_the_price_knows_a_slow_cable(tmp_path: Path) -> None:
    """A pipeline whose neighbors are not on its ends is priced quicker."""
    gbs = [[20e9] * 4 for _ in range(4)]
    gbs[0][1] = gbs[1][0] = gbs[2][3] = gbs[3][2] = 0.02e9
    table = [[300e9 if i // 2 == j // 2 else gbs[i // 2][j // 2] for j in range(8)]
             for i in range(8)]  # fmt: skip
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"bytes_per_s": table}))
    layout = ["trainer.layout.pp=4", "trainer.layout.tp=2", "rollout.layout.tp=2",
              "schedule=serial",
              "trainer.activations=recompute", "cluster.ranks=8"]  # fmt: skip
    plain = mapping_command.run([*PLAN, *layout, "--price", f"--links={links}"])
    ordered = mapping_command.run(
        [*PLAN, *layout, "cluster.rank_order=[0,1,4,5,2,3,6,7]", "--price", f"--links={links}"]
    )
    apart, around = (report.result.best[0] for report in (plain, ordered))
    assert around.seconds.training < 0.9 * apart.seconds.training


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "wanted bytes_per_s"),
        ('{"bytes_per_s": [[1, 1], [1, 1]]}', "2 workers, not --nodes x --gpus-per-node = 8"),
    ],
)
def test_wrong_links_are_one_line(content: str, message: str, tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    links.write_text(content)
    with pytest.raises(ConfigError) as raised:
        mapping_command.run([*PLAN, f"--links={links}"])
    assert str(raised.value).startswith(f"--links={links}: wanted a file with bytes_per_s")
    assert message in str(raised.value)
