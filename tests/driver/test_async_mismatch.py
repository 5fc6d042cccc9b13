"""The two engines are compared where all samples of a step are of older weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.schedule.asynchronous import Async
from hybridrl.telemetry.records import read_lines

STEPS = 4


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout",
    [
        ["cluster.ranks=2", "cluster.pools.rollout=1"],
        pytest.param(
            ["cluster.ranks=3", "cluster.pools.rollout=1", "trainer.layout.tp=2"],
            marks=pytest.mark.wide,
        ),
        ["cluster.ranks=2", "cluster.pools.rollout=1", "rollout.top_p=0.8", "rollout.top_k=20"],
    ],
    ids=["1 + 1", "2 + 1", "truncated"],
)
def test_a_group_of_the_trainer_s_weights_is_compared(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: list[str],
) -> None:
    """Each step that has one gives mismatch/*, and parameters are those of a run without it."""
    settings = [
        *tiny_run, *layout, "deterministic=strict", "schedule=one_step", f"trainer.steps={STEPS}",
        "trainer.optim.lr=0.05", "eval.sets.main.every=null",
    ]  # fmt: skip
    compare = Async.update_begins
    monkeypatch.setattr(Async, "update_begins", lambda self, updates: None)
    without = train_here(tmp_path / "without", *settings)

    def compared(self: Async, updates: Any) -> None:
        """All of the next batch is there, which the step's weights have made."""
        batch = self._batches.get(self._batch + 1, ())
        groups = self.schedule.groups
        self.schedule.loop.run_on(lambda: all(map(groups.is_complete, batch)), batch)
        compare(self, updates)

    monkeypatch.setattr(Async, "update_begins", compared)
    run = train_here(tmp_path / "run", *settings)
    means = [line.get("mismatch/mean") for line in run.metrics]
    # The first step's samples are of its weights; the last has no batch after it.
    assert means[-1] is None
    assert all(mean is not None and 0 < mean < 1e-5 for mean in means[:-1])
    assert [line.get("mismatch/mean") is None for line in without.metrics] == [
        False, True, True, True,
    ]  # fmt: skip
    assert run.metrics[1]["mismatch/ess_token"] == pytest.approx(1, abs=1e-5)
    notes = [
        [x["text"] for x in read_lines(one.dir / "events.jsonl") if x["kind"] == "note"]
        for one in (without, run)
    ]
    told = [[text for text in of_run if "mismatch/*" in text] for of_run in notes]
    assert [text.split(":")[0] for of_run in told for text in of_run] == ["step 2", "step 4"]
    wanted, got = (load_file(x.dir / "final" / "model.safetensors") for x in (without, run))
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    for line, other in zip(run.metrics, without.metrics, strict=True):
        assert {x: line[x] for x in ("loss", "grad_norm")} == {
            x: other[x] for x in ("loss", "grad_norm")
        }
