"""The program of a verifier process: `python -m hybridrl.rewards.worker FD PARENT`.

It reads pickles from its parent, which it trusts. It answers in JSON, since the parent must not
trust a process that judges a model's output. It imports neither torch nor ray.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from hybridrl.config import (
    JailKind,
    JudgeConfig,
    RewardCall,
    RewardKind,
    SourceConfig,
)
from hybridrl.rewards import jail
from hybridrl.rewards.child import limit_process, start_failure
from hybridrl.rewards.functions import is_async, user_function
from hybridrl.rewards.results import JudgeAnswer, RewardInput, failure
from hybridrl.rewards.verifiers import make_selector, make_verifier


def make_judge(
    config: JudgeConfig, sources: Mapping[str, SourceConfig]
) -> Callable[[Sequence[RewardInput]], list[JudgeAnswer]]:
    """Judges a batch in one call, or one of a single response. Raises ConfigError."""
    if config.call is not RewardCall.sample:
        function, select = user_function(config), make_selector(config)

        def judge_batch(items: Sequence[RewardInput]) -> list[JudgeAnswer]:
            texts = [select(item.response) for item in items]
            arguments = function.arguments(items, [text or "" for text in texts])
            return function.answers(function.function(**arguments), texts)

        return judge_batch
    verify = make_verifier(config, sources)

    def judge_one(items: Sequence[RewardInput]) -> list[JudgeAnswer]:
        ((reward, text),) = map(verify, items)
        return [[reward, None, text]]

    return judge_one


def judged(
    judge: Callable[[Sequence[RewardInput]], list[JudgeAnswer]], items: Sequence[RewardInput]
) -> list[JudgeAnswer]:
    """The answers of `judge`, or its error for each of `items`."""
    try:
        return judge(items)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the user's as well
        return [failure(error)] * len(items)


def main(descriptor: int, parent: int) -> None:
    """Build the verifier, report ready, then judge chunk after chunk, with one answer a sample.

    The parent closes the connection to end the process.
    """
    limit_process(parent)
    connection = Connection(descriptor)

    def answer(value: object) -> None:
        connection.send_bytes(json.dumps(value).encode())

    config, sources, paths = connection.recv()
    sys.path[:] = paths  # a user's module is found as in the parent
    jail.configure(config.jail, config.limits)
    try:
        judge = make_judge(config, sources)
        answer(["ready", jail_of(config), waits(config)])
    except BaseException as error:
        answer(start_failure(error))
        return
    with contextlib.suppress(EOFError):
        while True:
            chunk = connection.recv()
            size = len(chunk) if config.call is RewardCall.batch else 1
            for start in range(0, len(chunk), size):
                for one in judged(judge, chunk[start : start + size]):
                    answer(one)


def jail_of(config: JudgeConfig) -> str:
    """What confines the programs that the verifier runs, in words; empty where it runs none."""
    runs_programs = config.kind is RewardKind.code or config.jail is not JailKind.auto
    return str(jail.choose(config.jail)) if runs_programs else ""


def waits(config: JudgeConfig) -> bool:
    """Whether the verifier waits for something else than a core of this machine."""
    if config.waits is None and config.kind is RewardKind.function:
        return is_async(user_function(config).function)
    return bool(config.waits)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
