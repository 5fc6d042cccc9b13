"""The memory plan of ranks on CPUs, against the growth of their processes since their imports."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_dry.on_cpu import TINY, model_config
from hybridrl.config import TinyModelConfig
from hybridrl.models.tiny import make_char_tokenizer

pytestmark = [pytest.mark.gpu_dry_full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 100 M parameters in bfloat16, as hubs have them, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    for path, config in ((folder, model_config()), (folder / TINY, model_config(hidden_size=16))):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
        make_char_tokenizer(TinyModelConfig().alphabet, 4096).save_pretrained(path)
    return folder


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_is_within_ten_percent(size: int, model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paths = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    outs = [tmp_path / f"{rank}.json" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "gpu_dry.on_cpu", str(r), str(size), str(port), model, out],
            env=os.environ | paths,
        )
        for r, out in enumerate(outs)
    ]
    try:
        assert [rank.wait() for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    for out in outs:
        for phase, (grown, planned) in json.loads(out.read_text()).items():
            figures = f"{phase}: {grown >> 20} MiB grown, {planned >> 20} planned"
            print(figures)
            assert abs(planned - grown) < 0.10 * grown, figures
