"""Settings that make a phase of a memory plan smaller, of those that are not made already."""

from hybridrl.config import (
    VALUE_MODELS,
    ActivationMode,
    Config,
    DType,
    OptimName,
    TrainLayoutConfig,
)
from hybridrl.costs.image_memory import READING
from hybridrl.costs.memory import KEPT_ID_ROWS, KEPT_IDS, TOGETHER, WAITING, MemoryPhase
from hybridrl.costs.train_memory import CHUNK_KEYS

_LARGE = 0.2  # of a phase: what is worth a setting besides the largest size
_SMALLER = "a smaller trainer.max_tokens_per_micro_batch"
_SHORTER = "a smaller rollout.max_new_tokens or data.max_prompt_tokens"
_OF_SAMPLES = {
    READING: ["a smaller data.max_prompt_tokens or trainer.prompts_per_step"],
    KEPT_IDS: ["a smaller rollout.top_k"],
    KEPT_ID_ROWS: ["a smaller rollout.top_k"],
}


def advice(config: Config, phase: MemoryPhase, pool: str) -> str:
    """What reduces the largest sizes of the `phase`, on ranks of the `pool`; may be empty."""
    work, _, role = phase.name.partition(" ")
    if role == TOGETHER:
        return "trainer.fuse_updates=never"
    if work in ("load", "train", "save") and (role == "actor" or role in VALUE_MODELS):
        settings = _of_training(config, role, pool)
    else:
        settings = _of_generation(config, work, pool)
    sizes = phase.sizes
    first, *others = sorted(sizes, key=lambda name: sizes[name], reverse=True)
    second = [name for name in others[:1] if sizes[name] >= _LARGE * phase.total]
    texts = [text for name in (first, *second) for text in settings.get(name, ())]
    return "; ".join(dict.fromkeys(texts))


def _of_training(config: Config, role: str, pool: str) -> dict[str, list[str]]:
    """Settings of a trained model, by the size that they reduce."""
    place = VALUE_MODELS.get(role, "trainer")
    model = config.trainer if role == "actor" else config.value_model_of(role)
    lora, lora_key = config.actor.lora, "actor.lora.rank"
    if role != "actor":
        lora, lora_key = config.value_model_of(role).lora, f"{place}.lora.rank"
    layout, ranks = model.layout, config.ranks_of(pool)
    more = [f"more {config.cluster.pool_key(pool)}"]
    narrower = [f"a larger {place}.layout.tp"] if layout.tp < ranks else []
    thinner = [f"a larger {place}.layout.tp or .pp"] if layout.tp * layout.pp < ranks else []
    adapters = [] if lora.rank else [f"adapters ({lora_key})"]
    small = "adamw8bit"
    moments = [] if model.optim.name is OptimName.adamw8bit else [f"{place}.optim.name={small}"]
    other_mode = _less_of_layers(config)
    return {
        "float32 weights": [*adapters, *more, *thinner],
        "frozen weights": thinner or more,
        "moments": [*adapters, *moments, *more, *thinner],
        "whole matrices": more,
        "gathered weights": thinner or more,
        "activations": [*other_mode, *_shorter_rows(config, place, layout)],
        CHUNK_KEYS: [_SHORTER, *_more_sharing(place, layout)],
        "gradients": [*adapters, *more, *thinner],
        "shards": [*more, *thinner],
        "parameter being saved": [*adapters, *more, *thinner],  # its size stays, others shrink
        "whole parameters": narrower or more,
        "weights file": [*more, *thinner],
        **_OF_SAMPLES,
    }


def _of_generation(config: Config, work: str, pool: str) -> dict[str, list[str]]:
    """Settings of the rollout engine and of roles that only score, by the size that they reduce."""
    rollout, ranks = config.rollout, config.ranks_of(pool)
    more = [f"more {config.cluster.pool_key(pool)} and a larger rollout.layout.tp"]
    fewer = ["a smaller rollout.max_running"] if rollout.max_running > 1 else []
    if rollout.layout.tp * rollout.layout.pp < ranks:
        more = ["a larger rollout.layout.tp or .pp"]
    half = [*more, "rollout.dtype=bfloat16"] if rollout.dtype is DType.float32 else more
    cache = ["a smaller rollout.kv_cache_tokens"] if rollout.kv_cache_tokens else [*fewer, _SHORTER]
    wide = config.model.compute_dtype is DType.float32
    return {
        "generation weights": half,
        "KV cache": [*cache, *more],
        "KV cache and arrays of vLLM": [_SHORTER, *more],
        "activations": _shorter_scored_rows(config) if work == "score" else [_SHORTER, *more],
        "logits": fewer or more,
        WAITING: ["a smaller rollout.kv_host_tokens"],
        "copied keys and values": cache,
        "scoring weights": [*more, "model.compute_dtype=bfloat16"] if wide else more,
        "buckets": ["a smaller rollout.layout.bucket_mb"],
        "float32 weights": ["more cluster.ranks"],
        "moments": ["more cluster.ranks"],
        **_OF_SAMPLES,
    }


def _shorter_rows(config: Config, place: str, layout: TrainLayoutConfig) -> list[str]:
    """A row has the tokens of a micro-batch, or of a full sample where that is longer.

    Ranks of cp share such a sample; with chunks a row of it is no longer than a micro-batch.
    """
    most, chunk = config.trainer.max_tokens_per_micro_batch, config.trainer.chunk_tokens
    if chunk:
        return [_SMALLER if chunk < most else f"{_SMALLER} with trainer.chunk_tokens"]
    of_rank = -(-config.longest_sample // layout.cp)
    if most >= of_rank:
        return [_SMALLER, *([_SHORTER] if most == of_rank else [])]
    texts = [_SHORTER, *_more_sharing(place, layout)]
    if _may_chunk(config):
        texts.append("trainer.chunk_tokens")
    return texts


def _more_sharing(place: str, layout: TrainLayoutConfig) -> list[str]:
    """More ranks that share a long sample, where there may be."""
    return [f"a larger {place}.layout.cp"] if layout.cp < layout.fsdp else []


def _less_of_layers(config: Config) -> list[str]:
    """What keeps fewer activations than the run's mode, most of them first."""
    mode, modes = config.trainer.activations, "recompute or offload"
    if mode in (ActivationMode.recompute, ActivationMode.offload):
        return []
    if mode is not ActivationMode.selective:
        modes = f"selective, {modes}"
    return [f"trainer.activations={'offload' if _splits_backward(config) else modes}"]


def _may_chunk(config: Config) -> bool:
    """Whether every model that may be trained can be in chunks."""
    adapters = [config.actor.lora, *(config.value_model_of(role).lora for role in VALUE_MODELS)]
    drops = any(lora.rank and lora.dropout for lora in adapters)
    return not drops and not _splits_backward(config)


def _splits_backward(config: Config) -> bool:
    """Whether a model that may be trained has a zero-bubble pipeline."""
    values = [config.value_model_of(role).layout for role in VALUE_MODELS]
    return any(layout.splits_backward for layout in (config.trainer.layout, *values))


def _shorter_scored_rows(config: Config) -> list[str]:
    """Likewise of a role that only scores, whole samples; a strict run scores one by one."""
    packed = not config.strict and config.trainer.max_tokens_per_micro_batch > config.longest_sample
    return [_SMALLER if packed else _SHORTER]
