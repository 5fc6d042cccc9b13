"""Sides that are processes and take turns: one runs a block of steps, the others wait.

A side says `ready`, then reads a number of steps per line from its stdin. It runs so many and
answers with one line of JSON. It stops at the end of its stdin. While it waits it does nothing.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

_NO_FACTS: Mapping[str, float] = {}


class Blocks:
    """The side's end: `begin`, then `after_step` after each step until it answers False.

    Its answers go to what stdout was; anything else that the process prints goes to stderr.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._left = self._steps = 0
        self._lengths: list[int] = []
        self._facts: Counter[str] = Counter()

    def begin(self) -> bool:
        """Wait for the first block."""
        self._answer({"ready": True})
        return self._next()

    def after_step(
        self, response_lengths: Sequence[int], facts: Mapping[str, float] = _NO_FACTS
    ) -> bool:
        """Count a step of samples of these lengths (tokens); waits where the block has ended.

        The block's answer has the mean of each of its `facts`.
        """
        self._lengths += response_lengths
        self._facts.update(facts)
        self._left -= 1
        self._steps += 1
        if self._left:
            return True
        seconds = time.perf_counter() - self._start
        samples = len(self._lengths)
        self._answer(
            {
                "samples_per_s": samples / seconds,
                "wall_s": seconds / self._steps,
                "response_tokens_mean": sum(self._lengths) / samples,
                "response_tokens_max": max(self._lengths),
                **{name: total / self._steps for name, total in self._facts.items()},
            }
        )
        return self._next()

    def _next(self) -> bool:
        self._left = int(sys.stdin.readline() or 0)
        self._lengths, self._facts, self._steps = [], Counter(), 0
        self._start = time.perf_counter()
        return self._left > 0

    def _answer(self, record: dict[str, Any]) -> None:
        self._answers.write(json.dumps(record) + "\n")
        self._answers.flush()


class Side:
    """The bench's end of a side that runs as `command`."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.command = " ".join(command)
        # Not a pipe: an unread one fills up, and the side would wait indefinitely.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **env},
        )
        self._read()

    def block(self, steps: int) -> dict[str, float]:
        """Run `steps` steps; rates and lengths of the block."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the side, by itself where it can."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._log.close()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"{self.command} ended:\n{self._log.read()[-4000:]}")
        return json.loads(answer)


def in_turns(
    commands: Mapping[str, Sequence[str]], rounds: int, steps: int, warm_up: int | None = None
) -> dict[str, list[dict[str, float]]]:
    """Blocks of sides that run as these commands, the order drawn anew for every round.

    All are alive at once. One block of each warms up, with `warm_up` steps where that is given.
    """
    draw = random.Random(0)
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        sides = {}
        for name, command in commands.items():
            sides[name] = Side(command, {"OMP_NUM_THREADS": "1"})
            stack.callback(sides[name].close)
        for i in range(rounds + 1):
            for name in draw.sample(list(sides), len(sides)):
                block = sides[name].block(steps if i else warm_up or steps)
                if i:
                    blocks[name].append(block)
    return blocks
