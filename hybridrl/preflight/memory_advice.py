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
    cut = more[::-1]  # FSDP's ranks gather what only tp and pp make smaller
    smaller = more if lora.rank else [f"adapters ({key}.lora.rank)", *more]
    moments = list(smaller)
    if model.optim.name is not OptimName.adamw8bit:
        moments.insert(len(smaller) - len(more), f"{place}.optim.name=adamw8bit")
    sharing = [f"a larger {place}.layout.cp"] * (model.layout.cp < model.layout.fsdp)
    chunks = ["trainer.chunk_tokens"] * _may_chunk(config)
    long = [f"{' or '.join([*sharing, *chunks])}, for long samples"] * bool(sharing or chunks)
    chunk, most = config.trainer.chunk_tokens, config.trainer.max_tokens_per_micro_batch
    rows = [_SMALLER + " and trainer.chunk_tokens" * (chunk == most), _SHORTER, *long]
    return {
        "float32 weights": smaller,
        "frozen weights": cut,
        "moments": moments,
        "whole matrices": more,
        "gathered weights": cut,
        "activations": [*_less_of_layers(config), *rows],
        CHUNK_KEYS: [_SHORTER, *sharing],
        "gradients": smaller,
        "shards": more,
        "parameter being saved": smaller,  # its size stays, others shrink
        "whole parameters": [f"a larger {place}.layout.tp"],
        "weights file": more,
        **_OF_SAMPLES,
    }


def _of_generation(config: Config, work: str, pool: str) -> dict[str, list[str]]:
    """Settings of the rollout engine and of roles that only score, by the size that they reduce."""
    rollout, ranks = config.rollout, config.cluster.pool_key(pool)
    more = [f"a larger rollout.layout.tp or .pp, with more {ranks} where there are too few"]
    fewer = ["a smaller rollout.max_running"] * (rollout.max_running > 1)
    half = [*more, "rollout.dtype=bfloat16"] if rollout.dtype is DType.float32 else more
    cache = ["a smaller rollout.kv_cache_tokens"] if rollout.kv_cache_tokens else [*fewer, _SHORTER]
    rows = [_SMALLER] * (not config.strict) + [_SHORTER]  # a strict run scores sample by sample
    wide = config.model.compute_dtype is DType.float32
    return {
        "generation weights": half,
        "KV cache": [*cache, *more],
        "KV cache and arrays of vLLM": [_SHORTER, *more],
        "activations": rows if work == "score" else [_SHORTER, *more],
        "logits": fewer or more,
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
    if _splits_backward(config):
        return ["trainer.activations=offload"]
    selective = "selective, " * (mode is not ActivationMode.selective)
    return [f"trainer.activations={selective}recompute or offload"]


def _may_chunk(config: Config) -> bool:
    """Whether samples are not in chunks, and can be."""
    adapters = [config.actor.lora, *(config.value_model_of(role).lora for role in VALUE_MODELS)]
    drops = any(lora.rank and lora.dropout for lora in adapters)
    return not (config.trainer.chunk_tokens or drops or _splits_backward(config))


def _splits_backward(config: Config) -> bool:
    values = [config.value_model_of(role).layout for role in VALUE_MODELS]
    return any(layout.splits_backward for layout in (config.trainer.layout, *values))
