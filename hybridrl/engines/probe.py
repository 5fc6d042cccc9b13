"""Whether the engines compute a model right, found out on a small model of its config.

The model is shrunk (`models.shrink`) and gets random weights. Then its packed training and its
paged decoding are compared with transformers' eager forward pass, in float32 in one process. A
family is taken because the numbers agree, not by its name. Verdicts are cached by config, code and
versions; a cache that is lost or broken only costs seconds.
"""

import contextlib
import copy
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

import hybridrl.engines
import hybridrl.kernels
import hybridrl.models
from hybridrl.config import Attention, ConfigError, RouterReplay, TrainerConfig
from hybridrl.engines.rollout.interface import Request, RolloutEngine, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedModel, pack, recorded_experts
from hybridrl.models import packed_attention
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.mixers import recurrent_modules
from hybridrl.models.parallel import FAMILIES, meta_model, num_experts
from hybridrl.models.recurrent import state_shapes, use_batches
from hybridrl.models.router_replay import ExpertShape, Routing, enable_replay
from hybridrl.models.shard import GenParallel
from hybridrl.models.shrink import shrink
from hybridrl.models.stages import prepare_training, whole

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference of a log-probability, and of a gradient relative to its largest element.

Families that are right differ by at most 1e-5 in float32. Faults, such as a sequence that sees
another or a window that is ignored, differ by 1e-2 and more.
"""
DELTA_TOLERANCE = 5e-3
"""The largest difference with layers of the gated delta rule.

They divide an output that may be near zero by its norm: transformers' chunks differ from its own
single steps by up to 3e-3 in such models. A state that leaks differs by 1 and more.
"""
RECURRENT_TOLERANCE = 5e-4
"""The largest difference with other recurrent layers: Mamba's have 1.2e-4 in transformers 5.24."""

_SMALL_GRADIENT = 1e-3  # of the model's largest: below it a gradient is compared with this
_LENGTHS = (3, 11, 11, 23)
_NEW_TOKENS = 14
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why packed training, or the native engine, is wrong for a model; None where it is right."""

    train: str | None = None
    native: str | None = None


def check_model(config: PretrainedConfig, key: str, *, train: bool, native: bool) -> None:
    """Raise ConfigError, which names `key`, for a model that an engine in use computes wrong.

    Families that tests prove (`models.parallel.FAMILIES`) are not probed, so that a run starts
    quickly.
    """
    if config.model_type in FAMILIES:
        return
    verdict = probed(config)
    wanted = {"training": verdict.train if train else None}
    wanted["the native rollout engine"] = verdict.native if native else None
    for engine, problem in wanted.items():
        if problem is not None:
            got = f"{config.model_type}: {problem}"
            path = config.name_or_path or config.model_type
            raise ConfigError(key, path, f"a model that {engine} computes right ({got})")


def check_has_classifier(config: PretrainedConfig, path: str, key: str) -> None:
    """Raise ConfigError for a family without a sequence classifier, which a value model is."""
    problem = None
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = "transformers has no sequence classifier"
    elif config.model_type not in FAMILIES and not hasattr(
        meta_model(shrink(config), classifier=True), "score"
    ):
        problem = "its classifier has no head `score`"
    if problem is not None:
        allowed = f"a family with a value model ({config.model_type}: {problem})"
        raise ConfigError(key, path, allowed)


def probed(config: PretrainedConfig) -> Verdict:
    """The verdict on a model's config, from the cache where it is known."""
    file = _cache_file(config)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Verdict(**json.loads(file.read_text()))
    logger.info("probing model type %s: its first run here", config.model_type)
    verdict = probe(config)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(json.dumps(asdict(verdict)))
        os.replace(temporary.name, file)
    return verdict


def probe(config: PretrainedConfig) -> Verdict:
    """Compare the engines with transformers on a small model of `config`; nothing is raised."""
    bar = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.manual_seed(0)
            try:
                model = random_model(shrink(config))
            except Exception as error:
                reason = f"no small model of its config can be made: {_line(error)}"
                return Verdict(reason, reason)
            if not (model._supports_attention_backend or recurrent_modules(model)):
                reason = "its layers do not call transformers' attention interface"
                return Verdict(reason, reason)
            return Verdict(_problem(_compare_training, model), _problem(_compare_decoding, model))
    finally:
        transformers_logging.set_verbosity(bar)


def _problem(
    compare: Callable[[PreTrainedModel], str | None], model: PreTrainedModel
) -> str | None:
    """The reason that a comparison gives, or with which it fails."""
    try:
        return compare(model)
    except Exception as error:  # whatever a family's own code runs into
        logger.debug("the probe failed", exc_info=True)
        return _line(error)


def _line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors, and sums in the same order on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """The oracle: transformers' eager attention, weights that make peaked distributions.

    Buffers that checkpoints hold are drawn as well, so that an engine which loses them is wrong.
    """
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    parameters = {id(p) for p in model.parameters()}
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if not tensor.is_floating_point():
                continue
            if id(tensor) not in parameters or tensor.dim() < 2:
                tensor.add_(torch.rand_like(tensor) * 0.5)
            else:
                tensor.normal_(0, 1.5 * tensor.shape[-1] ** -0.5)
    return model


# Training


def _compare_training(model: PreTrainedModel) -> str | None:
    ids = [torch.randint(1, model.config.vocab_size, (length,)) for length in _LENGTHS]
    weights = [torch.randn(length - 1) for length in _LENGTHS]
    wanted = [eager_log_probs(model, row) for row in ids]
    wanted_gradients = _gradients(model, wanted, weights)
    packed = _copy(model, packed_attention.NAME)
    state_shapes(packed)  # a train engine counts the operations on states by them
    got = _packed_log_probs(packed, ids)
    gradients = _gradients(packed, got, weights)
    pairs = zip(got, wanted, strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    allowed = tolerance(model)
    if not difference <= allowed:
        return f"log-probabilities differ by {difference:.1e} from transformers'"
    return compare_gradients(gradients, wanted_gradients, allowed)


def tolerance(model: PreTrainedModel) -> float:
    """The largest difference of a model that is right."""
    if not recurrent_modules(model):
        return TOLERANCE
    by_delta_rule = getattr(model.config, "linear_num_value_heads", None) is not None
    return DELTA_TOLERANCE if by_delta_rule else RECURRENT_TOLERANCE


def compare_gradients(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], allowed: float = TOLERANCE
) -> str | None:
    """The worst gradient; one that is 0 but for rounding is compared with the model's largest."""
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        scale = max(float(gradient.abs().max()), _SMALL_GRADIENT * largest)
        difference = float((got[name] - gradient).abs().max()) / scale
        if not difference <= allowed:
            return f"the gradient of {name} differs by {difference:.1e} from transformers'"
    return None


def _copy(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A model of the same weights with another attention, as the train engine has it."""
    copied = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), dtype=torch.float32, attn_implementation=attention
    )
    copied.load_state_dict(model.state_dict())
    use_batches(copied)
    return prepare_training(copied)


def eager_log_probs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The oracle's log-probability of every token but the first, [tokens - 1]."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def _packed_log_probs(model: PreTrainedModel, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    batch = pack([TrainSequence(row, len(row) - 1) for row in ids], Attention.torch, _CPU)
    log_probs, _ = PackedModel(whole(model))(batch.ids, batch)
    ordered = dict(zip(batch.order, log_probs.split(batch.counts), strict=True))
    return [ordered[index] for index in range(len(ids))]


def _gradients(
    model: PreTrainedModel, log_probs: list[torch.Tensor], weights: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    (torch.cat(log_probs) * torch.cat(weights)).sum().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


# Generation


def _compare_decoding(model: PreTrainedModel) -> str | None:
    engine = make_engine(model.config)
    engine.load_weights(model.state_dict().items())
    return compare_responses(model, engine)


def make_engine(config: PretrainedConfig, parallel: GenParallel | None = None) -> NativeEngine:
    """A native engine for what `compare_responses` generates."""
    return NativeEngine(
        config,
        dtype=torch.float32,
        device=_CPU,
        max_running=len(_LENGTHS),
        block_size=4,
        kv_cache_tokens=0,
        max_sequence=max(_LENGTHS) + _NEW_TOKENS,
        parallel=parallel,
    )


@torch.no_grad()
def compare_responses(model: PreTrainedModel, engine: RolloutEngine) -> str | None:
    """Why greedy responses to prompts of several lengths differ from the oracle `model`'s."""
    prompts = {i: torch.randint(1, model.config.vocab_size, (n,)) for i, n in enumerate(_LENGTHS)}
    sampling = SamplingParams(_NEW_TOKENS, temperature=0.0)
    engine.submit([Request(i, ids.tolist(), sampling, stream=i) for i, ids in prompts.items()])
    outputs: list[Any] = []
    while len(outputs) < len(prompts):
        outputs += engine.step()
    for output in outputs:
        if problem := _compare_response(model, prompts[output.id], output):
            return problem
    return None


def _compare_response(model: PreTrainedModel, prompt: torch.Tensor, output: Any) -> str | None:
    response = torch.tensor(output.token_ids)
    log_probs = _step_log_probs(model, prompt, response)
    wanted = log_probs.gather(-1, response[:, None])[:, 0]
    difference, allowed = (
        float((wanted - torch.tensor(output.log_probs)).abs().max()),
        tolerance(model),
    )
    if not difference <= allowed:
        return f"log-probabilities differ by {difference:.1e} from transformers'"
    short = float((log_probs.max(-1).values - wanted).max())
    if not short <= allowed:
        return f"a greedy token is {short:.1e} less likely than transformers'"
    return None


def _step_log_probs(
    model: PreTrainedModel, prompt: torch.Tensor, response: torch.Tensor
) -> torch.Tensor:
    """The oracle's log-probabilities [tokens, vocab] of a response: by one pass over all of it.

    With recurrent layers by a prefill and single steps, as a response is made: steps round
    otherwise than a pass does.
    """
    ids = torch.cat([prompt, response])[None]
    if not recurrent_modules(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)
    cache = DynamicCache(config=model.config)
    start, logits = 0, []
    for stop in range(len(prompt), ids.shape[1]):
        positions = torch.arange(start, stop)[None]  # Bamba's own begin at 0 in each call
        out = model(
            ids[:, start:stop], position_ids=positions, past_key_values=cache, use_cache=True
        )
        logits.append(out.logits[0, -1])
        start = stop
    return torch.stack(logits).float().log_softmax(-1)


# Router replay


def check_replay(config: PretrainedConfig, replay: RouterReplay) -> None:
    """Raise ConfigError for a model whose experts cannot be chosen from outside.

    Tried on a small model, as all of this module is, and in an instant: without a cache.
    """
    if problem := _router_problem(config):
        raise ConfigError("trainer.router_replay", replay.value, f"off ({problem})")


def check_balance(config: PretrainedConfig, trainer: TrainerConfig) -> None:
    """Raise ConfigError for a model whose routers cannot be balanced as `trainer` says.

    The balance loss reads the scores by which routers choose, as a replay does.
    """
    coef = trainer.router_aux_loss_coef
    if coef and (problem := _router_problem(config)):
        raise ConfigError("trainer.router_aux_loss_coef", coef, f"0 ({problem})")


def _router_problem(config: PretrainedConfig) -> str | None:
    """`replay_problem`, with random weights that do not depend on the caller's."""
    if not num_experts(config):
        return f"{config.model_type} has no experts"
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(0)
        return replay_problem(config)


@torch.no_grad()
def replay_problem(config: PretrainedConfig) -> str | None:
    """Why a replayed choice of experts would be another one; None where it is the recorded one.

    The own choice must change no bit. In the opposite order it must change nothing but the order of
    sums: then weights follow their experts.
    """
    model = _copy(random_model(shrink(config)), packed_attention.NAME)
    shape = ExpertShape.of(model.config)
    if not shape.layers:
        return f"{config.model_type}: its experts are no separate module"
    enable_replay(enumerate(decoder_layers(model)), shape)
    packed = PackedModel(whole(model))
    ids = [torch.randint(1, model.config.vocab_size, (length,)) for length in _LENGTHS]
    wanted, chosen = _routed(packed, [TrainSequence(row, len(row) - 1) for row in ids])
    own, _ = _routed(packed, _with_experts(ids, chosen))
    opposite = [experts.flip(-1) for experts in chosen]
    flipped, taken = _routed(packed, _with_experts(ids, opposite))
    same = all(map(torch.equal, taken, opposite))
    if not same or taken[0].shape[1:] != (len(shape.layers), shape.per_token):
        return f"{config.model_type}: its router does not choose by topk over the experts"
    if not torch.equal(own, wanted) or float((flipped - wanted).abs().max()) > TOLERANCE:
        return f"{config.model_type}: its weights do not follow the experts that are chosen"
    return None


def _with_experts(ids: list[torch.Tensor], chosen: list[torch.Tensor]) -> list[TrainSequence]:
    return [
        TrainSequence(row, len(row) - 1, routed_experts=experts)
        for row, experts in zip(ids, chosen, strict=True)
    ]


def _routed(
    model: PackedModel, sequences: list[TrainSequence]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of a row, and the experts that its sequences have taken."""
    batch = pack(sequences, Attention.torch, _CPU)
    routing = batch.routing or Routing()
    routing.records = True
    log_probs, _ = model(batch.ids, replace(batch, routing=routing))
    by_sequence = dict(recorded_experts(batch, routing.on_host()))
    return log_probs, [by_sequence[index][:-1] for index in range(len(sequences))]


# The cache


def _cache_file(config: PretrainedConfig) -> Path:
    """A file a config: in `XDG_CACHE_HOME`, by all that can change the verdict."""
    settings = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "dtype")}
    versions = [version(name) for name in ("torch", "transformers")]
    text = json.dumps([settings, versions, _code()], sort_keys=True, default=str)
    name = f"{config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "hybridrl" / "verdicts" / name


def _code() -> str:
    """A digest of the code that the probe runs."""
    digest = hashlib.sha256(hybridrl.__version__.encode())
    for package in (hybridrl.models, hybridrl.engines, hybridrl.kernels):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(file.read_bytes())
    return digest.hexdigest()
