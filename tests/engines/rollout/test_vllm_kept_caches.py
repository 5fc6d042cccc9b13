"""Weights of vLLM that change under requests, on the keys and values that these have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import PreTrainedModel
from vllm_asynchronous import asynchronous, late_draws
from vllm_engines import ODD, load, plan_of, start
from vllm_kept_caches import Lives, check_lives, live

from hybridrl.layout.grouping import TrainAxes

pytestmark = pytest.mark.vllm
Ranks = Callable[..., list[Any]]


@pytest.fixture
def directory(make_model: Callable[..., PreTrainedModel], tmp_path: Path) -> str:
    alike = {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
    make_model("qwen3", **ODD, **alike).save_pretrained(tmp_path / "qwen3")
    return str(tmp_path / "qwen3")


def lives_of(directory: str, tp: int, late: bool = False) -> Lives:
    """Lives in an engine of `tp` ranks."""
    model = load(directory)
    switch = plan_of(model, TrainAxes(replicas=dist.get_world_size()), 1, tp)
    engine = start(directory, switch, model, kv_cache_tokens=8192, max_running=12)
    if late:
        late_draws(engine)
    lives = live(engine, switch, directory)
    engine.close()
    return lives


def both(directory: str, tp: int) -> tuple[Lives, Lives]:
    """Without asynchronous scheduling, and with it."""
    plain = lives_of(directory, tp)
    with asynchronous():
        return plain, lives_of(directory, tp, late=True)


def test_caches_stay_and_new_prompts_read_none_of_older_weights(
    directory: str, fresh_ranks: Ranks
) -> None:
    """Some requests wait for a row while weights change: 40 in all, of which 12 run."""
    ((plain, ahead),) = fresh_ranks(1, both, directory, 1)
    check_lives(directory, plain)
    check_lives(directory, ahead)


@pytest.mark.slow
def test_ranks_of_an_instance_keep_the_same(directory: str, fresh_ranks: Ranks) -> None:
    (plain, ahead), other = fresh_ranks(2, both, directory, 2)
    check_lives(directory, plain)
    check_lives(directory, ahead)
    assert (plain, ahead) == other
