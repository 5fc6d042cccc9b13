"""Checks of the models of a recipe's roles before a run starts a process.

Each check raises `ConfigError`, which names the key to change, and changes nothing;
`resolve_role_paths` follows them.
"""

import re
from pathlib import Path
from typing import Any

from hybridrl.config import (
    VALUE_MODELS,
    Config,
    ConfigError,
    EmulatedClusterConfig,
    RewardKind,
    Vision,
)
from hybridrl.costs.mapping import ACTOR
from hybridrl.flow import Graph
from hybridrl.flow.graph import ComputeStage, StageMethod
from hybridrl.preflight.recurrent_layers import check_recurrent_numbers, check_recurrent_value_model
from hybridrl.workers.emulation import imitated_shapes, llama_config

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_role_models(config: Config, graph: Graph, actor_path: str, tokenizer: Any) -> None:
    """Raise for a model of a role in `graph` that cannot be made, laid out, or read samples.

    `tokenizer` is that of the actor, whose model is at `actor_path`.
    """
    _check_known(graph)
    _check_copies(config, graph)
    for role in judges_of(config, graph):
        judge = config.judge_of(role)
        if judge.kind is RewardKind.model:
            _check_no_text(graph, role)
            from hybridrl.models.load import load_config
            from hybridrl.rewards.model import check_reward_model

            check_reward_model(config, actor_path, tokenizer, role)
            check_recurrent_numbers(config, load_config(str(judge.model), f"{role}.model"))
    for role in VALUE_MODELS:
        if role in graph.learned:
            _check_value_model(config, role, actor_path, tokenizer)
    if "teacher" in graph.roles:
        for key, path in config.teacher.paths.items():
            _check_teacher(config, resolve_model_path(path, key), key, actor_path, tokenizer)
    for stage in graph.stages.values():
        if isinstance(stage, ComputeStage) and stage.num_top > len(tokenizer):
            allowed = f"at most {len(tokenizer)}, the model's vocabulary"
            wanted = f"the top {stage.num_top} tokens, in stage {stage.name}"
            raise ConfigError("recipe", wanted, allowed)


def resolve_role_paths(config: Config, graph: Graph) -> None:
    """Make the paths of the roles' models absolute where they are directories: ranks read them."""
    for role in judges_of(config, graph):
        judge = config.judge_of(role)
        if judge.kind is RewardKind.model and Path(str(judge.model)).is_dir():
            judge.model = str(Path(str(judge.model)).resolve())
    for role in VALUE_MODELS:
        settings = config.value_model_of(role)
        if role in graph.learned and settings.path is not None:
            settings.path = resolve_model_path(settings.path, f"{VALUE_MODELS[role]}.path")
    if "teacher" in graph.roles:
        teacher = config.teacher
        if teacher.path is not None:
            teacher.path = resolve_model_path(teacher.path, "teacher.path")
        for name, path in teacher.by_source.items():
            teacher.by_source[name] = resolve_model_path(path, f"teacher.by_source.{name}")


def scores_with_copies(graph: Graph) -> bool:
    """Whether copies of the actor score: in the native engine's module, whatever generates."""
    return bool(graph.copies) or "reference" in graph.roles


def judges_of(config: Config, graph: Graph) -> list[str]:
    """The judges in a run of `graph`: its own, and those of evaluation."""
    return list(dict.fromkeys([*config.eval_judges, *graph.judges]))


def _check_known(graph: Graph) -> None:
    for name in graph.learned:
        if name != "actor" and name not in VALUE_MODELS:
            allowed = f"one that is trained: actor, {', '.join(VALUE_MODELS)}"
            raise ConfigError("recipe", f"role {name}", allowed)


def _check_copies(config: Config, graph: Graph) -> None:
    for copy in graph.copies.values():
        if copy.of != "actor":
            raise ConfigError("recipe", f"copy {copy.name} of {copy.of}", "a copy of the actor")
        rank = config.actor.lora.rank
        if rank and copy.update != "frozen":  # a product of averages is no average of products
            allowed = f"0: the recipe keeps a moving average ({copy.name}), which adapters have not"
            raise ConfigError("actor.lora.rank", rank, allowed)


def resolve_model_path(path: str, key: str) -> str:
    """A model's directory, absolute and with whole weights in it, or its hub name."""
    if Path(path).is_dir():
        from hybridrl.models.weight_files import check_files

        check_files(Path(path), key)
        return str(Path(path).resolve())
    if not _HUB_NAME.fullmatch(path) or path.startswith("."):
        raise ConfigError(key, path, "a directory that exists, or a hub name")
    return path


def _check_no_text(graph: Graph, role: str) -> None:
    for stage in graph.stages.values():
        if stage.role == role and stage.method is StageMethod.SCORE and len(stage.scalars) > 2:
            allowed = f"a verifier: the recipe reads the text that is judged ({stage.scalars[2]})"
            raise ConfigError(f"{role}.kind", RewardKind.model.value, allowed)


def _check_value_model(config: Config, role: str, actor_path: str, tokenizer: Any) -> None:
    from hybridrl.engines.probe import check_balance, check_has_classifier, check_model
    from hybridrl.models.adapters import check_lora
    from hybridrl.models.load import absent_parameters, load_value_config
    from hybridrl.models.parallel import check_train_layout, num_experts
    from hybridrl.models.stored_weights import check_stored
    from hybridrl.rewards.model import check_reads_samples

    settings, name = config.value_model_of(role), VALUE_MODELS[role]
    key = f"{name}.path"
    path = actor_path if settings.path is None else resolve_model_path(settings.path, key)
    model = load_value_config(path, key)
    _check_supported(model, path, key)
    check_has_classifier(model, path, key)
    check_model(model, key, train=True, native=False)
    check_train_layout(model, settings.layout, f"{name}.layout")
    own = settings.path is not None
    check_recurrent_value_model(config, model, settings.layout, name, own)
    if num_experts(model):
        check_balance(model, config.trainer)
    check_lora(model, settings.lora, f"{name}.lora")
    if settings.path is not None:
        check_reads_samples(config, path, model, actor_path, tokenizer, key)
    check_stored(path, model, classifier=True, zeros=absent_parameters(model), key=key)


def _check_teacher(config: Config, path: str, key: str, actor_path: str, tokenizer: Any) -> None:
    from hybridrl.engines.probe import check_model
    from hybridrl.models.load import is_classifier, load_config
    from hybridrl.models.parallel import check_gen_layout, num_experts
    from hybridrl.models.stored_weights import check_stored
    from hybridrl.rewards.model import check_reads_samples

    model = load_config(path, key)
    _check_supported(model, path, key)
    if is_classifier(model):
        raise ConfigError(key, path, "a language model (it is a sequence classifier)")
    check_model(model, key, train=True, native=True)
    check_recurrent_numbers(config, model)
    gen = config.rollout.layout
    ep = gen.ep if num_experts(model) else 1
    check_gen_layout(model, gen.pp, gen.tp, ep)
    check_reads_samples(config, path, model, actor_path, tokenizer, key)
    check_stored(path, model, key=key)


def check_quantized(config: Config, path: str) -> None:
    """Raise ConfigError for a quantized checkpoint with an engine that would keep it quantized."""
    from hybridrl.models.config_json import is_read
    from hybridrl.models.quantized import stored_quantization

    if not config.rollout.features.dequantizes and is_read(stored_quantization(path)):
        engine = config.rollout.engine.value
        allowed = (
            f"native with the quantized weights of model.path={path}, which {engine} would keep so"
        )
        raise ConfigError("rollout.engine", engine, allowed)


def language_model_line(config: Config, path: str) -> str:
    """Return a line that says what trains of a checkpoint for images and text; others have none."""
    from hybridrl.models.image_text import whole_config

    whole = whole_config(path)
    if whole is None:
        return ""
    tower = "stays as it is, and is written with it"
    if config.model.vision is Vision.train:
        tower = "trains with it"
    return f"model.path: the text part of {whole.model_type} trains; its image tower {tower}"


def _check_supported(model: Any, path: str, key: str) -> None:
    from hybridrl.models.load import check_supported

    try:
        check_supported(model)
    except ValueError as error:
        raise ConfigError(key, path, f"a decoder that is supported ({error})") from None


def imitated_model(
    config: Config, cluster: EmulatedClusterConfig, graph: Graph, folder: Path
) -> str:
    """Write tokenizer and `config.json` of the costs' model to `folder`, without weights.

    Layouts and memory are checked by these sizes, so other roles' models get theirs, too. Costs
    that name no model have `model.path`, or the tiny one. Raises ConfigError.
    """
    from transformers import AutoConfig

    from hybridrl.models.load import load_tokenizer
    from hybridrl.models.parallel import check_gen_layout, check_train_layout
    from hybridrl.models.tiny import make_char_tokenizer, make_tiny_model

    path, tiny = config.model.path, config.model.tiny
    if path is not None:
        path = resolve_model_path(path, "model.path")
    if not cluster.knows_model:
        if path is None:
            make_tiny_model(folder, tiny, config.run.seed)
        return path or str(folder)
    if path is None:
        tokenizer = make_char_tokenizer(tiny.alphabet, tiny.max_positions)
    else:
        try:
            tokenizer = load_tokenizer(path, None)
        except (OSError, ValueError) as error:
            allowed = f"a model with its tokenizer ({' '.join(str(error).split())[:200]})"
            raise ConfigError("model.path", path, allowed) from None
    tokenizer.save_pretrained(folder)
    tokens = max(config.longest_sample, config.longest_generated)
    shapes = {
        role: AutoConfig.for_model(
            **llama_config(sizes, tokens), eos_token_id=tokenizer.eos_token_id
        )
        for role, sizes in imitated_shapes(config).items()
    }
    for role, shape in shapes.items():
        shape.save_pretrained(folder if role == ACTOR else folder / role)
    gen = config.rollout.layout
    # Before the layouts of value models, which have the actor's where they say nothing.
    check_train_layout(shapes[ACTOR], config.trainer.layout)
    check_gen_layout(shapes[ACTOR], gen.pp, gen.tp, gen.ep)
    for role in VALUE_MODELS:
        if role in graph.learned and role in shapes:
            settings = config.value_model_of(role)
            settings.path = str(folder / role)
            check_train_layout(shapes[role], settings.layout, f"{VALUE_MODELS[role]}.layout")
    for role in judges_of(config, graph):
        judge = config.judge_of(role)
        whole = role.partition(".")[0]
        if judge.kind is RewardKind.model and whole in shapes:
            judge.model = str(folder / whole)
    return str(folder)
