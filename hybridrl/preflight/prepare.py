"""Everything that is checked and made before a run starts a process."""

import logging
import sys
import traceback
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config import (
    VALUE_MODELS,
    WARM_START,
    Config,
    ConfigError,
    Device,
    EmulatedClusterConfig,
    RouterReplay,
    ScheduleConfig,
)
from hybridrl.config.bounds import check_bounds, check_finite, check_values
from hybridrl.config.compose import explain, unknown_key
from hybridrl.config.dotted import load_function
from hybridrl.config.renamed_keys import new_name
from hybridrl.config.versions import installed, untried
from hybridrl.data import Data, Item, KnownRows, load_data, load_eval_set
from hybridrl.data.prompts import RowUses
from hybridrl.data.turns import TurnTemplate
from hybridrl.engines.rollout.available import engine_checks
from hybridrl.flow import Graph, Recipe
from hybridrl.flow.graph import (
    ComputeStage,
    GenerateStage,
    StageMethod,
    UpdateStage,
    with_temperatures,
)
from hybridrl.flow.judgements import with_parts
from hybridrl.preflight.activation_choice import decide_activations
from hybridrl.preflight.environment import check_environment, openings, turn_template
from hybridrl.preflight.first_samples import FirstSamples
from hybridrl.preflight.fused_updates import decide_fused_updates
from hybridrl.preflight.images import check_images, check_tower_files, most_pads
from hybridrl.preflight.judges import IsRecorded, check_rows, try_judges, warn_of_long_answers
from hybridrl.preflight.memory_plan import check_memory, local_obstacle, unknown_room
from hybridrl.preflight.models import (
    check_quantized,
    check_role_models,
    imitated_model,
    language_model_line,
    resolve_model_path,
    resolve_role_paths,
    scores_with_copies,
)
from hybridrl.preflight.nothing_to_learn import (
    check_groups,
    warn_of_equal_samples,
    warn_of_idle_updates,
    warn_of_lone_samples,
    warn_of_long_warm_ups,
)
from hybridrl.preflight.packages import check_packages, check_ray
from hybridrl.preflight.placement import check_placement
from hybridrl.preflight.prompt_sharing import decide_prompt_sharing
from hybridrl.preflight.recurrent_layers import check_recurrent_layers
from hybridrl.preflight.sampling_replay import check_sampling_replay
from hybridrl.preflight.schedule_choice import decide_schedule
from hybridrl.runtime.devices import resolve_device
from hybridrl.runtime.ray_cluster import check_ranks
from hybridrl.schedule.build import check_graph
from hybridrl.system.compiler import compiler_fault, cpp_compiler_fault
from hybridrl.system.short_tmpdir import shorten_tmpdir
from hybridrl.workers.emulation import check_emulation, emulated_gpu_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """The inputs of a run, before its ranks start; `eval_items` are by evaluation set."""

    model_path: str
    data: Data
    eval_items: dict[str, list[Item]]
    graph: Graph
    warm_start: Graph | None
    turns: TurnTemplate | None = None
    """What stands between the turns of conversations; None without an environment."""
    first_samples: str = ""
    """Some of its rows as text: see `hybridrl.preflight.first_samples`."""
    schedule: str = ""
    """What `schedule=auto` is, and why; empty where the key has another value."""
    activations: str = ""
    """What `trainer.activations=auto` is, and why; empty where the key has another value."""
    prompt_sharing: str = ""
    """Whether groups share prompts, and why not; empty for `trainer.share_prompts=never`."""
    language_model: str = ""
    """What trains of a checkpoint for images and text; empty for other models."""
    image_pads: int = 0
    """The most pads of images that a prompt has."""

    @property
    def notes(self) -> list[str]:
        """The lines that a run starts with."""
        return [*filter(None, (self.language_model, self.schedule, self.prompt_sharing))]


def prepare(
    config: Config,
    is_recorded: IsRecorded | None = None,
    known: Mapping[str, KnownRows] = MappingProxyType({}),
) -> PreparedRun:
    """Check the config against the world, make the tiny model; raises `ConfigError`.

    `is_recorded` is for a replay: see `try_judges`. `known` are the rows of a run that resumes.
    """
    from transformers.utils import logging as transformers_logging

    from hybridrl.models.load import end_token_ids, load_config
    from hybridrl.workers.sampling import SamplingTexts

    transformers_logging.disable_progress_bar()

    shorten_tmpdir()  # before judges are tried
    run_dir = Path(config.run.dir)
    graph = _with_temperatures(with_parts(build_recipe(config.recipe), config), config)
    warm_start = None
    if config.warm_start_steps:
        warm_start = _once(build_recipe({"target": WARM_START}))
    for line in untried(installed()):
        logger.warning("%s", line)
    gpu_memory = check_machine(config, graph)
    check_recipe(config, graph)
    engine_checks(config.rollout).check_installed()
    check_optimizers(config, graph)
    config.telemetry.check_installed()
    check_environment(config, graph)
    check_writable(run_dir)
    if isinstance(config.cluster, EmulatedClusterConfig):
        gpu_memory = emulated_gpu_memory(config.cluster)
        model_path = imitated_model(config, config.cluster, graph, run_dir / "start")
        check_emulation(config, config.cluster, graph)
    else:
        model_path = model_path_of(config, run_dir)
    # A path with no model in it is an error of its own.
    shape = load_config(model_path, vision=config.model.vision)
    language_model = language_model_line(config, model_path)
    data, eval_items, turns, tokenizer = _load(config, model_path, graph, known)
    items = [*data.train, *data.eval, *chain(*eval_items.values())]
    check_images(config, graph, shape, data.train, items)
    check_tower_files(config, model_path, items)
    check_rows(config, graph, items)
    trials = {}
    if config.cluster.holds_models:
        trials = try_judges(config, graph, items, is_recorded)
        warn_of_long_answers(config, trials, tokenizer)
    schedule = decide_schedule(config, graph, shape)
    check_schedule(config.schedule, graph)
    sharing = decide_prompt_sharing(config, graph, shape)
    pads = most_pads(shape, items)
    activations = decide_activations(config, graph, shape, gpu_memory, pads)
    decide_fused_updates(config, graph, shape, gpu_memory, pads)
    check_memory(config, graph, model_path, gpu_memory, pads)
    ends = SamplingTexts(tokenizer, config.data.chat, (), end_token_ids(model_path, shape)).end_ids
    shown = FirstSamples(config, graph, tokenizer, sorted(ends), trials, turns).text(data.train)
    chosen = {"schedule": schedule, "activations": activations, "prompt_sharing": sharing}
    chosen |= {"language_model": language_model}
    return PreparedRun(
        model_path, data, eval_items, graph, warm_start, turns, shown, **chosen, image_pads=pads
    )


def _with_temperatures(graph: Graph, config: Config) -> Graph:
    """The graph whose stages compute with the temperature that their samples were drawn with."""
    temperature = config.rollout.temperature
    try:
        return with_temperatures(graph, temperature)
    except ValueError as error:
        raise ConfigError("rollout.temperature", temperature, f"1 ({error})") from None


def check_machine(config: Config, graph: Graph) -> int | None:
    """Check what ranks need of this machine or cluster; the bytes of a GPU, None without one.

    Raises ConfigError.
    """
    check_ray(config)
    gpu_memory = resolve_device(config, asks_memory=True)
    check_packages(config)
    check_compiler(config)
    check_ranks(config.cluster)
    check_placement(config, graph)
    return gpu_memory


def check_compiler(config: Config) -> None:
    """Raise for a run on this machine which lacks a compiler that its kernels need."""
    cluster = config.cluster
    if cluster.address is not None or not cluster.holds_models:
        return
    if cluster.device is not Device.cuda:
        if config.trainer.compile and (fault := cpp_compiler_fault()):
            raise ConfigError("trainer.compile", True, f"false, or a C++ compiler ({fault})")
        return
    if fault := compiler_fault():
        allowed = f"a C compiler for Triton's kernels ({fault}), or cpu"
        raise ConfigError("cluster.device", cluster.device.value, allowed)


def check_recipe(config: Config, graph: Graph) -> None:
    """Raise where the recipe and the other settings do not go together."""
    _check_on_policy(config, graph)
    _check_recorded(config, graph)
    check_sampling_replay(config, graph)
    _check_curriculum(config, graph)
    _check_privileged(config, graph)
    check_groups(graph)
    warn_of_lone_samples(config, graph)
    warn_of_equal_samples(config, graph)
    warn_of_idle_updates(config, graph)
    warn_of_long_warm_ups(config, graph)


def check_optimizers(config: Config, graph: Graph) -> None:
    """Raise for an optimizer of the run whose package is missing."""
    config.trainer.optim.check_installed("trainer.optim")
    if config.warm_start_steps:
        config.warm_start.optim.check_installed("warm_start.optim")
    for role, name in VALUE_MODELS.items():
        if role in graph.learned:
            config.value_model_of(role).optim.check_installed(f"{name}.optim")


def _check_on_policy(config: Config, graph: Graph) -> None:
    """A loss without a ratio is right for one optimizer step on the samples of an update."""
    for stage in graph.stages.values():
        if not isinstance(stage, UpdateStage) or not stage.loss.on_policy:
            continue
        for key in ("epochs", "mini_batches"):
            number = getattr(stage, key) or getattr(config.trainer, key)
            if number > 1:
                allowed = f"1: the loss of stage {stage.name!r} has no ratio to an old policy"
                raise ConfigError(f"trainer.{key}", number, allowed)


def _check_recorded(config: Config, graph: Graph) -> None:
    """Raise where experts are to be those of an old policy's pass that the recipe does not make."""
    replay = config.trainer.router_replay
    stages = graph.stages.values()
    passes = [s for s in stages if s.role == "actor" and s.method is StageMethod.LOG_PROBS]
    if replay is RouterReplay.trainer and not passes:
        allowed = "off, rollout, or a recipe with the old policy's pass (old_log_probs=trainer)"
        raise ConfigError("trainer.router_replay", replay.value, allowed)


def _check_curriculum(config: Config, graph: Graph) -> None:
    """Raise where prompts are to rest by rewards that the recipe does not have."""
    curriculum = config.data.curriculum
    if any("reward" in stage.scalars for stage in graph.stages.values()):
        return
    for key in ("easy_rest", "hard_rest"):
        if rest := getattr(curriculum, key):
            allowed = "0 for a recipe without a reward, which no prompt is solved by"
            raise ConfigError(f"data.curriculum.{key}", rest, allowed)


def _check_privileged(config: Config, graph: Graph) -> None:
    """Raise where a role is to read prompts that the data do not have."""
    for stage in graph.stages.values():
        reads = isinstance(stage, ComputeStage) and stage.privileged
        if reads and config.data.privileged_template is None:
            allowed = f"a text with what {stage.role} is to know, as '{{question}} ({{answer}})'"
            raise ConfigError("data.privileged_template", "null", allowed)


def check_schedule(schedule: ScheduleConfig, graph: Graph) -> None:
    """Raise for a schedule that cannot run the recipe."""
    try:
        check_graph(schedule, graph)
    except ValueError as error:
        raise ConfigError("schedule", schedule.kind.value, str(error)) from None


def _once(graph: Graph) -> Graph:
    """One pass over the batch as one mini-batch, whatever the trainer's settings for the recipe."""
    for name, stage in graph.stages.items():
        if isinstance(stage, UpdateStage):
            graph.stages[name] = replace(stage, epochs=1, mini_batches=1)
    return graph


def build_recipe(settings: dict[str, Any]) -> Graph:
    """The graph of the recipe at `recipe.target` under its other settings."""
    settings = dict(settings)
    target = settings.pop("target", None)
    if not target:
        raise ConfigError("recipe.target", target, "module:function, or /path/file.py:function")
    recipe = _load_recipe(str(target))
    config_type = typing.get_type_hints(recipe.function).get("cfg")
    cfg: Any = SimpleNamespace(**settings)
    if isinstance(config_type, type) and is_dataclass(config_type):
        cfg = _typed(config_type, settings)
    try:
        return recipe.build(cfg)
    except ConfigError:
        raise
    except ValueError as error:
        allowed = f"settings that make a dataflow: {error}"
        raise ConfigError("recipe", recipe.name, allowed) from None
    except Exception as error:  # whatever the user's recipe does
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error}, {frame.filename} line {frame.lineno}"
        raise ConfigError("recipe.target", target, f"a recipe that builds ({problem})") from error


def _typed(config_type: type, settings: dict[str, Any]) -> Any:
    """The recipe's own dataclass, filled from `recipe.*`."""
    kinds = typing.get_type_hints(config_type)
    known = [field.name for field in fields(config_type)]
    for key in settings.keys() - set(known):
        raise unknown_key(f"recipe.{key}", settings[key], known)
    for name in known:
        if is_dataclass(kinds[name]) and not isinstance(value := settings.get(name, {}), dict):
            if new_name(f"recipe.{name}"):
                raise unknown_key(f"recipe.{name}", value, known)
            raise ConfigError(f"recipe.{name}", value, f"settings, each as recipe.{name}.NAME=...")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config_type), settings)
        values: Any = OmegaConf.to_container(merged)
        check_finite(values, "recipe")
        check_values(config_type, values, "recipe")
        settled = OmegaConf.to_object(merged)
        check_bounds(settled, "recipe")  # of the dataclasses in it, too
        return settled
    except OmegaConfBaseException as error:
        below = {
            f"{k}.{n}": x for k, v in settings.items() if isinstance(v, dict) for n, x in v.items()
        }
        single = {key: value for key, value in settings.items() if not isinstance(value, dict)}
        explained = explain(error, [f"{key}={value}" for key, value in {**single, **below}.items()])
        raise ConfigError(f"recipe.{explained.key}", explained.value, explained.allowed) from None


def _load_recipe(target: str) -> Recipe:
    recipe = load_function("recipe.target", target)
    if not isinstance(recipe, Recipe):
        raise ConfigError("recipe.target", target, "a function marked @recipe(...)")
    if target.rpartition(":")[0].endswith(".py"):  # its functions travel to the ranks by value
        with suppress(ImportError):  # without Ray there are none but the driver's
            from ray import cloudpickle

            cloudpickle.register_pickle_by_value(sys.modules[recipe.function.__module__])
    return recipe


def check_writable(run_dir: Path) -> None:
    """Make the run directory; raises ConfigError where nothing can be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".probe"
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
    except OSError as error:
        raise ConfigError("run.dir", run_dir, f"a writable directory ({error.strerror})") from None


def model_path_of(config: Config, run_dir: Path) -> str:
    """The directory of the actor's model, which is made in the run directory if it is tiny."""
    path = config.model.path
    if path is None:
        from safetensors import SafetensorError

        from hybridrl.checkpoint.folder import cause_of
        from hybridrl.models.tiny import make_tiny_model

        directory = run_dir / "start"
        try:
            make_tiny_model(directory, config.model.tiny, config.run.seed)
        except (OSError, SafetensorError) as error:
            allowed = f"a directory with room for a model ({cause_of(error)[1]})"
            raise ConfigError("run.dir", run_dir, allowed) from error
        return str(directory)
    return resolve_model_path(path, "model.path")


def _load(
    config: Config, model_path: str, graph: Graph, known: Mapping[str, KnownRows]
) -> tuple[Data, dict[str, list[Item]], TurnTemplate | None, Any]:
    """The run's prompts, of training and by evaluation set, once the model is checked.

    Also what stands between turns, and the tokenizer.
    """
    from hybridrl.data.images import PromptImages
    from hybridrl.models.context import context_tokens

    model, tokenizer = checked_model(config, graph, model_path)
    _check_sampling(config, graph, tokenizer, model.vocab_size)
    with openings(config) as opening:
        context = context_tokens(model)
        uses = RowUses(
            graph.columns,
            targets=graph.trains_targets or config.warm_start_steps > 0,
            generates=graph.generates,
        )
        size = model.vocab_size
        images = PromptImages.of(model_path, tokenizer)
        loading = {"opening": opening, "images": images}
        data, eval_items = _load_items(config, tokenizer, context, size, uses, known, loading)
        turns = turn_template(config, tokenizer, opening) if opening is not None else None
    _check_kv_cache(config, [data.train, *eval_items.values()])
    return data, eval_items, turns, tokenizer


def checked_model(config: Config, graph: Graph, model_path: str) -> tuple[Any, Any]:
    """The config of the actor's model and its tokenizer, once both are checked.

    So are other roles' models. Raises ConfigError for what cannot train, generate, be laid out or
    be written.
    """
    from hybridrl.checkpoint.hf import check_side_files
    from hybridrl.data.chat import template_text
    from hybridrl.models.load import check_supported, load_config, load_tokenizer
    from hybridrl.models.stored_weights import check_stored
    from hybridrl.workers.sampling import stop_strings

    model = load_config(model_path)
    config.data.chat_template = template_text(config.data)  # ranks may not see its file
    try:
        check_supported(model)
        tokenizer = load_tokenizer(model_path, config.data.chat_template)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        allowed = f"a model with its tokenizer that can be trained ({reason})"
        raise ConfigError("model.path", model_path, allowed) from None
    if config.cluster.knows_model:
        _check_model(config, graph, model)
    if config.cluster.holds_models:
        check_side_files(model_path, tokenizer, Path(config.run.dir))
        check_stored(model_path, load_config(model_path, vision=config.model.vision))
        check_quantized(config, model_path)
        check_role_models(config, graph, model_path, tokenizer)
        resolve_role_paths(config, graph)
    stop_strings(tokenizer, config.rollout.stop)
    stop_strings(tokenizer, config.environment.stop, "environment.stop")
    return model, tokenizer


def _check_model(config: Config, graph: Graph, model: Any) -> None:
    """Raise for a `model` that the engines cannot train, generate with, or lay out."""
    from hybridrl.engines.probe import check_model

    check_model(model, "model.path", train=True, native=scores_with_copies(graph))
    check_model_settings(config, model)
    check_attention(config, model, local=not unknown_room(config))
    engine_checks(config.rollout).check_model(config, model)


def check_model_settings(config: Config, model: Any) -> None:
    """Raise for layouts and other settings that the actor's `model` cannot have."""
    from hybridrl.engines.probe import check_balance, check_replay
    from hybridrl.models.adapters import check_lora
    from hybridrl.models.parallel import check_gen_layout, check_tail_tp, check_train_layout
    from hybridrl.models.router_balance import check_bias_update

    check_recurrent_layers(config, model)
    check_train_layout(model, config.trainer.layout)
    gen = config.rollout.layout
    check_gen_layout(model, gen.pp, gen.tp, ep=gen.ep)
    check_tail_tp(model, config.rollout)
    if config.trainer.router_replay is not RouterReplay.off:
        check_replay(model, config.trainer.router_replay)
    check_balance(model, config.trainer)
    check_bias_update(model, config.trainer.router_bias_update_rate)
    check_lora(model, config.actor.lora, "actor.lora")
    if config.rollout.features.ascending:
        _check_gen_order(config)


def _check_sampling(config: Config, graph: Graph, tokenizer: Any, vocab_size: int) -> None:
    """Raise for tokens and words that the model does not have, or a stage of short responses."""
    from hybridrl.workers.sampling import bad_word_ids

    rollout = config.rollout
    sets = {f"eval.sets.{name}": settings for name, settings in config.eval.sets.items()}
    for key, settings in {"rollout": rollout, **sets}.items():
        bad_word_ids(tokenizer, settings.bad_words, f"{key}.bad_words")
        for token in settings.logit_bias:
            if not 0 <= token < vocab_size:
                allowed = f"ids of the model's vocabulary, 0 to {vocab_size - 1}"
                raise ConfigError(f"{key}.logit_bias", token, allowed)
    for stage in graph.stages.values():
        longest = isinstance(stage, GenerateStage) and stage.sampling.max_new_tokens
        if longest and rollout.min_new_tokens > longest:
            allowed = f"at most {longest}, the longest response of stage {stage.name!r}"
            raise ConfigError("rollout.min_new_tokens", rollout.min_new_tokens, allowed)


def _load_items(
    config: Config,
    tokenizer: Any,
    max_context: int,
    vocab_size: int,
    uses: RowUses,
    known: Mapping[str, KnownRows],
    loading: Mapping[str, Any],
) -> tuple[Data, dict[str, list[Item]]]:
    """Training's items, without any that an evaluation set has; the sets' items by name.

    `loading` are settings of `load_data` and `load_eval_set` alike.
    """
    new = config.rollout.max_new_tokens
    sets = {
        name: load_eval_set(
            name,
            settings,
            config.data,
            tokenizer,
            max_context=max_context,
            max_new_tokens=settings.max_new_tokens or new,
            vocab_size=vocab_size,
            known=known.get(f"eval.sets.{name}"),
            **loading,
        )
        for name, settings in config.eval.sets.items()
        if settings.source
    }
    data = load_data(
        config.data,
        tokenizer,
        max_context=max_context,
        max_new_tokens=new,
        uses=uses,
        vocab_size=vocab_size,
        reserved={item.identity for items in sets.values() for item in items},
        known=known,
        **loading,
    )
    held_out = {
        name: data.eval[: settings.num_prompts or None]
        for name, settings in config.eval.sets.items()
        if not settings.source
    }
    return data, {name: (sets | held_out)[name] for name in config.eval.sets}


def check_attention(config: Config, model: Any, local: bool = False) -> None:
    """Raise for an attention by name that cannot compute this model, or has no GPU.

    With `local`, GPUs and packages of ranks are those of this node, and count too.
    """
    from hybridrl.models.attention_choice import OBSTACLES
    from hybridrl.models.attention_shape import attention_shape
    from hybridrl.models.load import TORCH_DTYPES

    wanted = config.model.attention
    if of_wanted := OBSTACLES.get(wanted):
        dtype = TORCH_DTYPES[config.model.compute_dtype]
        obstacle = of_wanted(dtype, attention_shape(model), None)
        if config.cluster.device is Device.cpu:
            obstacle = f"{wanted.value} needs a GPU, and the ranks are on CPUs"
        elif local:
            obstacle = obstacle or local_obstacle(wanted, config, model)
        if obstacle:
            raise ConfigError("model.attention", wanted.value, f"torch or auto: {obstacle}")


def _check_gen_order(config: Config) -> None:
    """Raise for an order of ranks in generation that the rollout engine cannot have."""
    from hybridrl.layout.grouping import TrainAxes
    from hybridrl.layout.switching import check_ascending

    train, gen = config.trainer.layout, config.rollout.layout
    axes = TrainAxes.of(train)
    check_ascending(axes, gen.pp, gen.tp, gen.grouping)


def _check_kv_cache(config: Config, items: Sequence[Sequence[Item]]) -> None:
    """Raise for a KV cache that cannot hold one sample of the longest prompt."""
    rollout = config.rollout
    if not rollout.kv_cache_tokens:
        return
    longest = max(len(item.prompt_ids) for of_set in items for item in of_set)
    needed = longest + config.longest_response - (not rollout.features.caches_last_token)
    if rollout.kv_cache_tokens < needed:
        allowed = f"0, or at least {needed}: a prompt of {longest} tokens and its response"
        raise ConfigError("rollout.kv_cache_tokens", rollout.kv_cache_tokens, allowed)
