"""Settings that make a phase of a memory plan smaller."""

from hybridrl.config import VALUE_MODELS, ActivationMode, Config, DType, OptimName
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
    place, key = VALUE_MODELS.get(role, "trainer"), VALUE_MODELS.get(role, "actor")
    model = config.trainer if role == "actor" else config.value_model_of(role)
    lora = config.actor.lora if role == "actor" else config.value_model_of(role).lora
    more = [f"more {config.cluster.pool_key(pool)}", f"a larger {place}.layout.tp or .pp"]
    smaller = more if lora.rank else [f"adapters ({key}.lora.rank)", *more]
    moments = list(smaller)
    if model.optim.name is not OptimName.adamw8bit:
        moments.insert(len(smaller) - len(more), f"{place}.optim.name=adamw8bit")
    sharing = f"a larger {place}.layout.cp"
    rows = [_SMALLER, _SHORTER, f"{sharing} or trainer.chunk_tokens, for long samples"]
    return {
        "float32 weights": smaller,
        "frozen weights": more,
        "moments": moments,
        "whole matrices": more,
        "gathered weights": more,
        "activations": [*_less_of_layers(config), *rows],
        CHUNK_KEYS: [_SHORTER, sharing],
        "gradients": smaller,
        "shards": more,
        "parameter being saved": smaller,  # its size stays, others shrink
        "whole parameters": more,
        "weights file": more,
        **_OF_SAMPLES,
    }


def _of_generation(config: Config, work: str, pool: str) -> dict[str, list[str]]:
    """Settings of the rollout engine and of roles that only score, by the size that they reduce."""
    rollout, ranks = config.rollout, config.cluster.pool_key(pool)
    more = [f"a larger rollout.layout.tp or .pp, with more {ranks} where there are too few"]
    fewer = ["a smaller rollout.max_running"]
    half = [*more, "rollout.dtype=bfloat16"] if rollout.dtype is DType.float32 else more
    cache = ["a smaller rollout.kv_cache_tokens"] if rollout.kv_cache_tokens else [*fewer, _SHORTER]
    wide = config.model.compute_dtype is DType.float32
    return {
        "generation weights": half,
        "KV cache": [*cache, *more],
        "KV cache and arrays of vLLM": [_SHORTER, *more],
        "activations": [_SMALLER, _SHORTER] if work == "score" else [_SHORTER, *more],
        "logits": fewer,
        WAITING: ["a smaller rollout.kv_host_tokens"],
        "copied keys and values": cache,
        "scoring weights": [*more, "model.compute_dtype=bfloat16"] if wide else more,
        "buckets": ["a smaller rollout.layout.bucket_mb"],
        "float32 weights": ["more cluster.ranks"],
        "moments": ["more cluster.ranks"],
        **_OF_SAMPLES,
    }


def _less_of_layers(config: Config) -> list[str]:
    """What keeps fewer activations than the run's mode, most of them first."""
    mode = config.trainer.activations
    if mode in (ActivationMode.recompute, ActivationMode.offload):
        return []
    values = [config.value_model_of(role).layout for role in VALUE_MODELS]
    if any(layout.splits_backward for layout in (config.trainer.layout, *values)):
        return ["trainer.activations=offload"]
    selective = "selective, " * (mode is not ActivationMode.selective)
    return [f"trainer.activations={selective}recompute or offload"]
