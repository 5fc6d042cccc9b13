"""A server from its overrides: what has no effect is refused, then ranks and HTTP start."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from hybridrl.config import ConfigError, compose, stored_run
from hybridrl.models.context import context_tokens
from hybridrl.models.load import load_config
from hybridrl.preflight.settings import composed_run, own_run_dir
from hybridrl.serving.loop import ServeLoop
from hybridrl.serving.server import KEY_FILE, Server, in_thread, listener, read_key
from hybridrl.telemetry.log import driver_log

THE_CLIENTS = "nothing: it is the client's with hybridrl serve"
NEEDLESS = {
    **dict.fromkeys(
        (
            "cost",
            "environment",
            "eval",
            "experiment",
            "recipe",
            "reward",
            "roles",
            "rollout.bad_words",
            "rollout.frequency_penalty",
            "rollout.ignore_eos",
            "rollout.logit_bias",
            "rollout.min_new_tokens",
            "rollout.min_p",
            "rollout.presence_penalty",
            "rollout.repetition_penalty",
            "rollout.temperature",
            "rollout.top_k",
            "rollout.top_p",
            "schedule",
            "teacher",
            "trainer.epochs",
            "trainer.max_bad_steps",
            "trainer.mini_batches",
            "trainer.optim.betas",
            "trainer.optim.clip_grad_norm",
            "trainer.optim.eps",
            "trainer.optim.lr",
            "trainer.optim.min_lr_ratio",
            "trainer.optim.schedule",
            "trainer.optim.warmup_steps",
            "trainer.optim.weight_decay",
            "trainer.prompts_per_step",
            "trainer.steps",
            "warm_start",
        ),
        THE_CLIENTS,
    ),
    "data": "data.max_prompt_tokens alone: the data is the client's with hybridrl serve",
    "telemetry": "telemetry.loggers and telemetry.project alone with hybridrl serve",
    "trainer.keep_last": "nothing: clients save and delete",
    "trainer.resume": "nothing: clients load what they have saved",
    "trainer.resume_changed": "nothing: clients load what they have saved",
    "trainer.save_every": "nothing: clients save and delete",
    "trainer.save_in_background": "nothing: clients save and delete",
}
"""Settings of a run that a server has no use for, with those below them, and what is wanted."""
USED = {"data.max_prompt_tokens", "telemetry.loggers", "telemetry.project"}
LENGTHS = {"data.max_prompt_tokens", "rollout.max_new_tokens"}
"""What bounds a request: a prompt with its response has at most as many tokens as both together."""
MOST_TOKENS = 8192
"""A prompt with its response, where neither is set."""
OWN_FOLDER = "run.dir=runs/${now:%Y%m%d-%H%M%S}-serve"


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override that has no effect on a server."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        key = key.partition("@")[0]
        for needless, wanted in NEEDLESS.items():
            if key not in USED and (key == needless or key.startswith((f"{needless}.", "eval/"))):
                raise ConfigError(key, value, wanted)


@contextmanager
def serving(overrides: Sequence[str]) -> Iterator[Server]:
    """A server with these overrides, until the end of the block: see `hybridrl serve`.

    Raises ConfigError before a process starts, and later the errors of ranks.
    """
    check_overrides(overrides)
    own = [OWN_FOLDER, *_lengths(overrides), *overrides]  # the last one wins
    config = composed_run(own, new=not _continues_a_server(overrides))
    run_dir = Path(config.run.dir)
    with ExitStack() as stack:
        stack.enter_context(own_run_dir(config))
        stack.enter_context(driver_log(config.log.level, run_dir / "logs" / "driver.log"))
        key = read_key(run_dir)
        bound = stack.enter_context(closing(listener(config.serve)))
        backend = ServeLoop.start(config)
        yield stack.enter_context(in_thread(config.serve, backend, key, bound))


def _lengths(overrides: Sequence[str]) -> list[str]:
    """Where overrides set no length: all that the model's context has place for, within a bound.

    The default data set has prompts of a few tokens, which say nothing about those of clients.
    """
    if LENGTHS & {override.lstrip("+~").partition("=")[0] for override in overrides}:
        return []
    compose.register()
    config = stored_run.composed_run([OWN_FOLDER, *overrides], writes=False)
    path, context = config.model.path, config.model.tiny.max_positions
    if path is not None:
        context = context_tokens(load_config(path))
    longest = min(MOST_TOKENS, context - 1)
    return [f"data.max_prompt_tokens={max(1, longest - config.longest_response)}"]


def _continues_a_server(overrides: Sequence[str]) -> bool:
    """Whether `run.dir` is the directory of an earlier server, whose records are continued."""
    plain = [override.lstrip("+") for override in overrides]
    folders = [one.removeprefix("run.dir=") for one in plain if one.startswith("run.dir=")]
    return bool(folders) and (Path(folders[-1]) / KEY_FILE).is_file()
