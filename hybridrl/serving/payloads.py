"""The JSON bodies of the API as requests: each field is checked, and a wrong one is one line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hybridrl.serving.requests import (
    NAME,
    NO_TOKEN,
    CheckpointPath,
    CreateModel,
    Int32,
    LikeliestTokens,
    LoadModel,
    OptimStep,
    Refused,
    SampledResponse,
    SampleRequest,
    Samples,
    SampleSettings,
    Save,
    ServedModel,
)
from hybridrl.serving.wire import DTYPES, SparseLayout, check_cells, tokens_of, write_samples

T = TypeVar("T")
Body = Mapping[str, Any]

MOST_SAMPLES = 4096
"""Responses to one prompt in a request."""
MOST_STOPS = 1024
"""Stop texts and ids of a request: every new token is held against each."""
TEMPERATURES = 1e-4, 1e4
"""Least and most but for 0: logits that are divided by it stay numbers in float32."""
MOST_SECONDS = 100 * 366 * 24 * 3600
"""Until a checkpoint expires: a hundred years."""
WORDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false"}
WORDS |= {list: "a list", dict: "an object"}


def optional(body: Body, key: str, kind: type[T]) -> T | None:
    """A field of a body, None where it is left out or null. Raises Refused for another type."""
    value = body.get(key)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise Refused(f"{key}={str(value)[:20]}...: wanted {WORDS[float]}") from None
    if value is not None and type(value) is not kind:  # True is no integer
        raise Refused(f"{key}={value!r:.60}: wanted {WORDS[kind]}")
    return value


def required(body: Body, key: str, kind: type[T]) -> T:
    """A field of a body that must be there. Raises Refused."""
    value = optional(body, key, kind)
    if value is None:
        raise Refused(f"{key}: left out, wanted {WORDS[kind]}")
    return value


def integer(body: Body, key: str, default: int | None, least: int, most: int) -> int | None:
    """An integer between two bounds. Raises Refused."""
    value = optional(body, key, int)
    if value is not None and not least <= value <= most:
        raise Refused(f"{key}={value}: wanted {least} to {most}")
    return default if value is None else value


def number(body: Body, key: str, default: float, *, below: float = math.inf) -> float:
    """A number of 0 or more. Raises Refused, for null, too: so the SDK writes NaN and infinity."""
    if key in body and body[key] is None:
        raise Refused(f"{key}=null: wanted a number that is finite")
    value = optional(body, key, float)
    if value is not None and not 0 <= value < below:
        wanted = "0 or more" if below == math.inf else f"0 to below {below:g}"
        raise Refused(f"{key}={value}: wanted {wanted}")
    return default if value is None else value


def check_base(body: Body, info: ServedModel) -> None:
    """Raise Refused for a base model that is not the one that is served."""
    base = optional(body, "base_model", str)
    if base is not None and base != info.name:
        raise Refused(f"base_model={base:.200}: this server has {info.name}")


def check_optimizer(body: Body, key: str) -> None:
    """Raise Refused for another optimizer than AdamW."""
    kind = (optional(body, key, dict) or {}).get("type", "adamw")
    if kind != "adamw":
        raise Refused(f"{key}.type={kind!r:.60}: wanted adamw")


def read_create_model(body: Body, model: str, info: ServedModel) -> CreateModel:
    """A `create_model` body as a request for the model of that name. Raises Refused.

    With all weights trained, `info.lora_rank` 0, the rank of the client's adapter has no meaning.
    """
    required(body, "base_model", str)
    check_base(body, info)
    check_optimizer(body, "optimizer_config")
    lora = optional(body, "lora_config", dict) or {}
    rank = required(lora, "rank", int) if lora else info.lora_rank
    if info.lora_rank and rank != info.lora_rank:
        raise Refused(f"rank={rank}: this server has adapters of rank {info.lora_rank}")
    for key in ("train_mlp", "train_attn"):
        if optional(lora, key, bool) is False:
            raise Refused(f"{key}=false: adapters are where the server has them")
    seed = integer(lora, "seed", None, -(1 << 63), (1 << 64) - 1)  # what torch takes
    return CreateModel(model, seed)


def read_load(body: Body, info: ServedModel) -> tuple[str, bool]:
    """The path of a `load_weights` body, and whether the optimizer's state is loaded."""
    check_base(body, info)
    check_optimizer(body, "optimizer_config")
    if optional(body, "weights_access_token", str) is not None:
        raise Refused("weights_access_token: this server has one account")
    path = str(CheckpointPath.parse(required(body, "path", str)))
    return path, required(body, "optimizer", bool)


def read_load_into(body: Body, model: str, info: ServedModel) -> LoadModel:
    """A `load_weights` body as a request for a model that is there."""
    return LoadModel(model, *read_load(body, info))


def read_create_from(body: Body, model: str, info: ServedModel) -> CreateModel:
    """A `load_weights` body as a request for a new model."""
    path, optimizer = read_load(body, info)
    return CreateModel(model, source=path, optimizer=optimizer)


def read_optim_step(body: Body, model: str) -> OptimStep:
    """An `optim_step` body. Defaults are the SDK's."""
    if "optimizer_params" in body:
        check_optimizer(body, "optimizer_params")
    params = required(body, "adam_params", dict)
    if not (eps := number(params, "eps", 1e-12)):
        raise Refused("eps=0.0: wanted above 0, or a gradient of 0 makes weights that are none")
    return OptimStep(
        model,
        lr=number(params, "learning_rate", 1e-4),
        beta1=number(params, "beta1", 0.9, below=1),
        beta2=number(params, "beta2", 0.95, below=1),
        eps=eps,
        weight_decay=number(params, "weight_decay", 0.0),
        clip=number(params, "grad_clip_norm", 0.0),
    )


def _saved_name(body: Body, default: str) -> str:
    name = optional(body, "path", str) or default
    if not NAME.fullmatch(name) or ":" in name:  # which a snapshot without files has
        wanted = "up to 128 letters, digits and ._-, not a dot first"
        raise Refused(f"path={name!r:.140}: wanted {wanted}")
    return name


def read_save(body: Body, model: str, seq: int) -> Save:
    """A `save_weights` body."""
    return Save(
        model,
        _saved_name(body, f"{seq:06}"),
        "weights",
        _ttl(body),
        overwrite=optional(body, "overwrite", bool) or False,
    )


def read_save_for_sampler(body: Body, model: str) -> Save:
    """A `save_weights_for_sampler` body: with files where it has a name, else in memory."""
    if optional(body, "path", str) is not None:
        return Save(model, _saved_name(body, ""), "sampler_weights", _ttl(body))
    client = required(body, "sampling_session_seq_id", int)
    return Save(model, f"client:{client}", "sampler_weights", files=False)


def _ttl(body: Body) -> float | None:
    seconds = integer(body, "ttl_seconds", None, 1, MOST_SECONDS)
    return None if seconds is None else float(seconds)


def read_ttl(body: Body) -> float | None:
    """The seconds of a `ttl` body; None is for ever."""
    return _ttl(body)


def read_prompt(body: Body, info: ServedModel) -> Int32:
    """The tokens of a prompt [N]. Raises Refused."""
    ids: list[int] = []
    for chunk in required(required(body, "prompt", dict), "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise Refused("prompt: an image or audio, wanted text alone")
        ids += _integers(chunk, "tokens")
    if not 0 < len(ids) <= info.max_tokens:
        raise Refused(f"prompt: {len(ids)} tokens, wanted {info.lengths}")
    return tokens_of(np.asarray(ids), "prompt", info.vocab)


def _integers(body: Body, key: str) -> list[int]:
    values = required(body, key, list)
    if any(type(value) is not int or abs(value) >= 1 << 62 for value in values):
        raise Refused(f"{key}: wanted a list of integers")
    return values


def read_settings(body: Body, vocab: int) -> SampleSettings:
    """The `sampling_params` of a body. Raises Refused."""
    temperature, top_p = number(body, "temperature", 1.0), number(body, "top_p", 1.0)
    least, most = TEMPERATURES
    if temperature and not least <= temperature <= most:
        raise Refused(f"temperature={temperature}: wanted 0, or {least:g} to {most:g}")
    if not 0 < top_p <= 1:
        raise Refused(f"top_p={top_p}: wanted above 0, at most 1")
    stop = body.get("stop")
    stops: Sequence[Any] = stop if isinstance(stop, list) else () if stop is None else [stop]
    if len(stops) > MOST_STOPS:
        raise Refused(f"stop: {len(stops)} texts and ids, wanted at most {MOST_STOPS}")
    texts = tuple(entry for entry in stops if isinstance(entry, str) and entry)
    tokens = tuple(entry for entry in stops if type(entry) is int and 0 <= entry < vocab)
    if not isinstance(stop, str | list | None) or len(texts) + len(tokens) != len(stops):
        raise Refused(f"stop={stop!r:.60}: wanted texts or token ids, 0 to {vocab - 1}")
    if not all(map(_encodes, texts)):
        raise Refused(f"stop={stop!r:.60}: wanted texts that UTF-8 has")
    return SampleSettings(
        integer(body, "max_tokens", None, 1, 1 << 31),
        temperature,
        max(0, integer(body, "top_k", -1, -1, 1 << 31) or 0),
        top_p,
        integer(body, "seed", None, -(1 << 63), (1 << 63) - 1),
        tokens,
        texts,
        eos=stop is None,
    )


def _encodes(text: str) -> bool:
    """Whether a text of JSON has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class SampleBody:
    """An `asample` body: its request, and what of it shapes the answer alone.

    `count` responses are answered, those beyond the request's being empty. Of the prompt the last
    `last` tokens are scored. Named tokens come back in `layout`.
    """

    request: SampleRequest
    count: int
    last: int | None
    layout: SparseLayout | None

    def reply(self, samples: Samples) -> bytes:
        """The answer's bytes."""
        empty = SampledResponse(np.empty(0, np.int32), np.empty(0, np.float32), "length")
        sequences = samples.sequences or (empty,) * self.count
        scores, topk = samples.prompt_logprobs, samples.topk
        if self.last is not None:
            first = len(self.request.prompt) - self.last
            if scores is not None:
                scores = np.where(np.arange(len(scores)) < first, np.float32("nan"), scores)
            if topk is not None:
                kept = np.arange(len(topk.tokens))[:, None] >= first
                topk = LikeliestTokens(topk.tokens * kept, np.where(kept, topk.logprobs, NO_TOKEN))
        return write_samples(Samples(sequences, scores, topk, samples.named), self.layout)


def read_sampling(
    body: Body, weights: str | None, key: tuple[int, ...], session: str, info: ServedModel
) -> SampleBody:
    """An `asample` body of a session as a request for the snapshot `weights`. Raises Refused.

    A prompt that fills the context can be scored, where a response to it has no place.
    """
    if optional(body, "record_stability_info", bool):
        told = "stable_reinforce is not served; set loss_fn=importance_sampling"
        raise Refused(f"record_stability_info: {told}")
    if optional(body, "prompt_alt_tokens_k", int):
        raise Refused("prompt_alt_tokens_k: not served; sample(max_tokens=1) at each position")
    prompt = read_prompt(body, info)
    settings = read_settings(required(body, "sampling_params", dict), info.vocab)
    count = integer(body, "num_samples", 1, 1, MOST_SAMPLES) or 1
    scored = optional(body, "prompt_logprobs", bool) or False
    last = integer(body, "prompt_logprobs_last_n", None, 1, max(1, len(prompt) - 1))
    room, most = info.max_tokens - len(prompt), settings.max_tokens or 1
    fits = most <= room
    if not fits and not (scored and most == 1):
        told = f"the prompt's {len(prompt)} tokens and max_tokens={most}"
        raise Refused(f"{told}: wanted together {info.lengths}")
    topk, topk_sampled = (
        _number_likeliest(body, name, info)
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs")
    )
    named, layout = _read_named(body, len(prompt), info)
    responses = settings.max_tokens or room
    check_cells([(len(prompt), topk), (count, responses, topk_sampled)])
    request = SampleRequest(
        weights,
        prompt,
        count if fits else 0,
        settings,
        key,
        session,
        scored,
        topk,
        topk_sampled,
        named,
    )
    return SampleBody(request, count, last, layout)


def _number_likeliest(body: Body, name: str, info: ServedModel) -> int:
    """How many likeliest tokens a body wants at a position. Raises Refused where there are none."""
    number = integer(body, name, 0, 0, info.vocab) or 0
    if number and not info.sampler_scores:
        raise Refused(f"{name}={number}: wanted 0; a server with rollout=native gives them")
    return number


def _read_named(
    body: Body, length: int, info: ServedModel
) -> tuple[Int32 | None, SparseLayout | None]:
    """The tokens whose log-probabilities a body names, [length - 1, K], and their layout."""
    tensor = optional(body, "target_prompt_logprobs", dict)
    if tensor is None:
        return None, None
    name, layout = "target_prompt_logprobs", None
    shape = _integers(tensor, "shape")
    if len(shape) != 2 or shape[0] != length - 1 or shape[1] < 1:
        raise Refused(f"{name}: shape {shape}, wanted [{length - 1}, K]")
    check_cells([shape])
    ids = np.asarray(_integers(tensor, "data"), DTYPES[2])
    if tensor.get("sparse_crow_indices") is not None:
        starts, columns = (
            np.asarray(_integers(tensor, key), np.int64)
            for key in ("sparse_crow_indices", "sparse_col_indices")
        )
        layout = SparseLayout((shape[0], shape[1]), starts, columns)
        ids = layout.dense(ids, -1)
    if ids.size != math.prod(shape):
        raise Refused(f"{name}: {ids.size} elements for shape {shape}")
    return tokens_of(ids.reshape(shape), name, info.vocab, least=-1), layout
