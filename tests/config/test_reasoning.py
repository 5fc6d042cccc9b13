"""What the import of reasoning_gym brings along."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

from hybridrl.config.reasoning import import_reasoning_gym

gym = import_reasoning_gym()
assert len(gym.create_dataset("spell_backward", seed=0, size=2)) == 2
assert import_reasoning_gym() is gym
assert "matplotlib" not in sys.modules
row = gym.create_dataset("game_of_life", seed=0, size=1)[0]
assert "matplotlib" in sys.modules
print(len(row["answer"]) > 9)
"""


@pytest.mark.long
def test_only_cellular_automata_import_matplotlib() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
