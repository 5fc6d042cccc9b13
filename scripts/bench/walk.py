"""The environment of `episodes.py`. Its processes import this file, and nothing that is large."""

import time
from typing import Any

from hybridrl.environments import EpisodeTask


async def walk(task: EpisodeTask, model: Any, rng: Any) -> float:
    """Answers at once; a turn that says so has it hang."""
    turn = await model.turn(task.messages)
    while True:
        if turn.text == "hang":
            time.sleep(3600)
        turn = await model.turn("on")
