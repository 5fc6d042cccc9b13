"""What vLLM's import finds in the environment."""

import os

import pytest
import torch.distributed as dist

from hybridrl.engines.rollout.vllm.groups import set_environment


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "3"})
    monkeypatch.setattr(dist, "get_rank", lambda: 11)


def test_the_allocators_settings_have_the_name_that_vllm_knows() -> None:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    set_environment([2, 2])
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_what_the_user_has_set_stays() -> None:
    """The index of the rank's GPU among those that it sees is the launcher's."""
    os.environ |= {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    set_environment([3, 1])
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "b:2"
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("11", "3")
    assert os.environ["VLLM_PP_LAYER_PARTITION"] == "3,1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # the engine depends on it
