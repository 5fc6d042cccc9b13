"""The model of an emulated device, as far as checks read it: its sizes, and a tokenizer."""

from pathlib import Path

from hybridrl.config import VALUE_MODELS, Config, ConfigError, EmulatedClusterConfig, RewardKind
from hybridrl.costs.mapping import ACTOR
from hybridrl.flow import Graph
from hybridrl.planner.emulation import imitated_shapes, llama_config
from hybridrl.preflight.models import judges_of, resolve_model_path


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
