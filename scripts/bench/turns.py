"""Conversations on one rollout engine: held between turns, against other ways to have them.

64 conversations of 8 turns, whose replies take log-normal times, with random weights on one thread.
All sides alternate in one process. Wall time is that of the engine, which sleeps where all wait.

- `lockstep`: the same engine, but the replies to a turn come to all once the last of them is there;
- `bound`: the slowest conversation alone, or all decode work without waits, whichever is longer;
- `new_requests`: without waits, each turn a new request whose tokens are computed again;
- `row_step`: a row's decode step while rows come and go, over that of a batch that stays;
- `driver`: CPU time of the driver's process for a turn, over a millisecond (`episodes.py`);
- `hidden_planned`, `hidden_emulated`: the share of forward passes that run while others decode or
  all wait, over nine tenths. The first is in virtual time, the second in an emulated run;
- `hung`: what a hung environment costs the others of its process, over one limit of a turn and the
  start of a process.

Prints one JSON object per line.
"""

import argparse
import functools
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import episodes
import torch
from lines import line, show, take_turns
from rollout import tiny

from hybridrl.config import compose
from hybridrl.engines.rollout.interface import HeldTurn, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key

VOCAB = 256
SIGMA = 1.0  # of the logarithm of a wait


@dataclass(frozen=True)
class Plan:
    """What all conversations are: prompts and replies by conversation and turn, in tokens."""

    conversations: int
    turns: int
    prompt: int
    turn: int
    reply: int

    @property
    def response(self) -> int:
        """Tokens of the longest response, with room for one more."""
        return self.turns * (self.turn + self.reply) + 1

    def requests(self) -> list[Request]:
        """All of them, anew."""
        stops = tuple(range(VOCAB // 20))  # so that turns end at different times
        limits = SamplingParams(self.response, stop_token_ids=stops, max_turn_tokens=self.turn)
        draw = random.Random(0)
        return [
            Request(i, draw.choices(range(VOCAB), k=self.prompt), limits, stream_key(0, i))
            for i in range(self.conversations)
        ]

    def reply_to(self, id: object, number: int) -> list[int]:
        """The reply to turn `number`."""
        return random.Random(f"reply {id} {number}").choices(range(VOCAB), k=self.reply)

    def wait(self, id: object, number: int, mean: float) -> float:
        """Seconds of that reply: log-normal with this mean."""
        normal = random.Random(f"wait {id} {number}").gauss(0, 1)
        return mean * math.exp(SIGMA * normal - SIGMA * SIGMA / 2)

    def waits(self, id: object, mean: float) -> float:
        """Seconds of all replies to a conversation."""
        return sum(self.wait(id, number, mean) for number in range(self.turns - 1))


class Conversations:
    """An engine that has the conversations of a plan, again and again."""

    def __init__(self, plan: Plan, shape: str) -> None:
        self.plan = plan
        model = tiny(shape, torch.float32, VOCAB)
        longest = plan.prompt + plan.response
        self.engine = NativeEngine(
            model.config, dtype=model.dtype, device=torch.device("cpu"),
            max_running=plan.conversations, block_size=16, kv_cache_tokens=0, max_sequence=longest,
        )  # fmt: skip
        self.engine.load_weights(model.state_dict().items())

    def run(
        self, mean: float = 0.0, lockstep: bool = False, keep: bool = True, only: object = None
    ) -> float:
        """Wall time of all conversations, or of one `only`; replies take `mean` seconds.

        Without `keep` a turn ends its request. The next turn is a new one.
        """
        plan, engine = self.plan, self.engine
        requests = [r for r in plan.requests() if only is None or r.id == only]
        numbers = {request.id: 0 for request in requests}
        due: list[tuple[float, int, HeldTurn]] = []
        rank = itertools.count()
        start = time.perf_counter()
        engine.submit(requests)
        while numbers:
            if engine.stats().running + engine.stats().waiting:
                engine.step()
            for turn in engine.take_turns():
                seconds = plan.wait(turn.id, numbers[turn.id], mean) if mean else 0.0
                at = time.perf_counter() + seconds
                heapq.heappush(due, (at, next(rank), turn))
            if lockstep and due:
                if len(due) < len(numbers):
                    continue
                last = max(at for at, _, _ in due)
                due = sorted((last, number, turn) for _, number, turn in due)
            if due and not engine.stats().running + engine.stats().waiting:
                time.sleep(max(0.0, due[0][0] - time.perf_counter()))
            while due and due[0][0] <= time.perf_counter():
                self._answer(heapq.heappop(due)[2], numbers, keep)
        return time.perf_counter() - start

    def _answer(self, turn: HeldTurn, numbers: dict[object, int], keep: bool) -> None:
        number = numbers[turn.id]
        if number + 1 == self.plan.turns:
            self.engine.answer(turn.id, None)
            del numbers[turn.id]
            return
        numbers[turn.id] += 1
        if not keep:
            self.engine.submit(self.engine.park([turn.id]))
        self.engine.answer(turn.id, self.plan.reply_to(turn.id, number))

    def slowest(self, mean: float) -> float:
        """Wall time of the conversation that waits longest, alone."""
        ids = range(self.plan.conversations)
        return self.run(mean, only=max(ids, key=lambda id: self.plan.waits(id, mean)))

    def prefilled(self) -> tuple[int, int]:
        """Tokens that the engine computes by prefill, and those of prompts and replies."""
        plan, before = self.plan, self.engine.stats().prefill_tokens
        self.run()
        replies = (plan.turns - 1) * plan.reply
        return self.engine.stats().prefill_tokens - before, plan.conversations * (
            plan.prompt + replies
        )


def row_step(plan: Plan, shape: str, comes: bool, steps: int) -> float:
    """Seconds of a row's decode step, prefills and the like apart.

    Half of twice as many conversations decode where rows come and go, and all where they stay.
    """
    rows = plan.conversations
    num = 2 * rows if comes else rows
    longest = plan.prompt + 2 * plan.turn + 2 * steps
    side = Conversations(replace(plan, conversations=num, turns=1), shape)
    engine = NativeEngine(
        side.engine.model.config, dtype=torch.float32, device=torch.device("cpu"),
        max_running=rows, block_size=16, kv_cache_tokens=num * longest, max_sequence=longest,
    )  # fmt: skip
    engine.load_weights(side.engine.model.state_dict().items())
    limits = SamplingParams(longest - plan.prompt, max_turn_tokens=plan.turn)
    if not comes:
        limits = replace(limits, max_turn_tokens=limits.max_new_tokens)
    requests = [replace(request, sampling=limits) for request in side.plan.requests()]
    for i, request in enumerate(requests if comes else ()):  # their turns end one after another
        request.response_ids, request.log_probs = ([1] * (i % plan.turn), [0.0] * (i % plan.turn))
    engine.submit(requests)
    spent = [0.0]
    fill = engine._filler.fill

    def timed_fill(*args: object) -> None:
        start = time.thread_time()
        fill(*args)  # type: ignore[arg-type]
        spent[0] += time.thread_time() - start

    engine._filler.fill = timed_fill  # type: ignore[method-assign, assignment]
    held: list[HeldTurn] = []
    step_all(engine, held, rows, plan.turn // 2)
    before, start = engine.stats().decode_tokens, time.thread_time() - spent[0]
    step_all(engine, held, rows, steps)
    seconds = time.thread_time() - spent[0] - start
    return seconds / (engine.stats().decode_tokens - before)


def step_all(engine: NativeEngine, held: list[HeldTurn], rows: int, steps: int) -> None:
    """Decode, and answer those held longest as soon as a row is free."""
    for _ in range(steps):
        engine.step()
        held += engine.take_turns()
        stats = engine.stats()
        free = rows - stats.running - stats.waiting
        for turn in held[:free]:
            engine.answer(turn.id, [1])
        del held[:free]


def alternate(
    name: str, ours: Callable[[], float], theirs: Callable[[], float], args: argparse.Namespace
) -> None:
    """Measure both by turns and print the ratio."""
    sides = take_turns({"ours": ours, "theirs": theirs}, args.rounds)
    extra = {"conversations": args.conversations, "turns": args.turns, "shape": args.shape}
    show(line(name, "s", "lower", sides["ours"], sides["theirs"], **extra))


def main(options: Iterable[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--turn", type=int, default=16, help="tokens of the longest turn")
    parser.add_argument("--reply", type=int, default=16, help="tokens of a reply")
    parser.add_argument("--shape", default="1m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--wait", type=float, default=1.0, help="times the mean waits")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of row_step")
    args = parser.parse_args(None if options is None else list(options))
    torch.set_num_threads(1)
    plan = Plan(args.conversations, args.turns, args.prompt, args.turn, args.reply)
    side = Conversations(plan, args.shape)
    short, long = 0.2 * args.wait, 0.5 * args.wait

    computed, wanted = side.prefilled()
    show(line("turns_prefilled_tokens", "tokens", "lower", [computed], [wanted]))
    alternate("turns_vs_lockstep", lambda: side.run(short), lambda: side.run(short, True), args)
    alternate(
        "turns_vs_bound", lambda: side.run(long), lambda: max(side.slowest(long), side.run()), args
    )
    alternate("turns_vs_new_requests", side.run, lambda: side.run(keep=False), args)
    step = functools.partial(row_step, plan, args.shape, steps=args.steps)
    alternate("turns_row_step", lambda: step(comes=True), lambda: step(comes=False), args)
    compose.register()
    show(line("turns_driver", "s", "lower", [episodes.driver_s(plan.turns)], [0.001]))
    planned, emulated = (
        measure(plan.turns) for measure in (episodes.hidden_planned, episodes.hidden_emulated)
    )
    show(line("turns_hidden_planned", "share", "higher", [planned], [0.9]))
    show(line("turns_hidden_emulated", "share", "higher", [emulated], [0.9]))
    hung = episodes.hung_s(hangs=True) - episodes.hung_s(hangs=False)
    show(line("turns_hung", "s", "lower", [hung], [episodes.LIMIT_S + episodes.start_s()]))


if __name__ == "__main__":
    main()
