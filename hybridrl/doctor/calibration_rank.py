"""One rank of `hybridrl plan calibrate`: it measures links with the others, then layers alone.

Layers are measured by the engines' own code, on models of a few layers with random weights. The
other ranks do the same meanwhile, so what ranks take from each other (memory's bandwidth) is in it.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import Config, Device, PipelineSchedule, TrainLayoutConfig
from hybridrl.doctor.measure import Link, Probe
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.layout.switching import plan_switch
from hybridrl.models.context import context_tokens
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.parallel import computes_halves
from hybridrl.models.shard import GenParallel
from hybridrl.pipelines.balance import micro_batches
from hybridrl.pipelines.problem import PassKind
from hybridrl.pipelines.recorded import RecordedPass
from hybridrl.planner.layer_fit import PackedTokens, TimedDecoding, TimedPass, TimedSwitch
from hybridrl.planner.mapping import SampleLength
from hybridrl.planner.model_shape import ModelShape

if TYPE_CHECKING:
    import torch

_REPEATS = 3
_REPEATS_TOGETHER = 9  # of decode steps in which ranks wait for each other: other work delays all
_TP = 2  # of the passes and decode steps whose all-reduces are measured
_PP, _CHUNKS = 2, 4  # of those in halves; a zero-bubble schedule has two chunks a rank
_CPU_TOKENS = 2048  # of a row: more only takes longer
_STEPS = 8  # of a timed call of the rollout engine
_ROWS = (1, 4, 16, 64)
_COPY_BYTES = {"cpu": 2**26, "cuda": 2**28}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """What a rank has measured."""

    links: list[Link]
    passes: list[TimedPass] = field(default_factory=list)
    split: list[TimedPass] = field(default_factory=list)
    """By two ranks under tensor parallelism, with other ranks as further sets of two."""
    in_halves: list[tuple[ModelShape, RecordedPass]] = field(default_factory=list)
    """Backward passes in halves, of a pipeline of two ranks."""
    decoding: list[TimedDecoding] = field(default_factory=list)
    """By one rank, by two under tensor parallelism, and by a pipeline of two."""
    switches: list[TimedSwitch] = field(default_factory=list)
    flops: float = 0.0
    """A second, of large products in the compute format."""
    memory_bytes_per_s: float = 0.0
    """Read and written by a copy within the device's memory."""
    host_bytes_per_s: float = 0.0
    """From the device to the host; 0 where they are one."""


def models_of(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Small models that tell costs apart: numbers of layers, and half of the width.

    Head sizes, the vocabulary and the family's code are those of `config`.
    """
    kinds = [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}]
    if all(getattr(config, key, 0) % 2 == 0 for key in _WIDTHS):
        halves = {key: getattr(config, key) // 2 for key in _WIDTHS}
        halves["num_key_value_heads"] = max(1, config.num_key_value_heads // 2)
        halves["head_dim"] = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        kinds.append({**halves, "num_hidden_layers": 2})
    return [_with(config, **kind) for kind in kinds]


def _with(config: PretrainedConfig, num_hidden_layers: int, **others: int) -> PretrainedConfig:
    settings = config.to_dict()
    for key in ("layer_types", "architectures"):
        settings.pop(key, None)
    settings |= {**others, "num_hidden_layers": num_hidden_layers}
    return AutoConfig.for_model(**settings)


_HALVES = (PassKind.backward_input, PassKind.backward_weights)
_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def write_models(config: PretrainedConfig, folder: Path) -> list[Path]:
    """The models of `models_of`, each in a directory below `folder`; at last one for a pipeline."""
    import torch

    paths = []
    for number, shape in enumerate([*models_of(config), _with(config, _CHUNKS)]):
        torch.manual_seed(number)
        path = folder / str(number)
        AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(path)
        paths.append(path)
    return paths


def measure_rank(
    rank: int, size: int, host: str, port: int, config: Config, models: Sequence[Path], out: Path
) -> None:
    """Write this rank's `RankTimes` to `out`/RANK, pickled."""
    import pickle

    import torch
    import torch.distributed as dist

    torch.set_num_threads(config.cluster.threads_per_rank or 1)
    links = []
    if size > 1:
        probe = Probe(rank, size, config.cluster)
        probe.join(host, port)
        links = probe.measure(messages=True)
    torch.set_num_threads(config.cluster.threads_per_rank or 1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    device = torch.device("cpu")
    if config.cluster.device is Device.cuda:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    flops, within, host_rate = _of_device(device, config)
    times = RankTimes(
        links=links, flops=flops, memory_bytes_per_s=within, host_bytes_per_s=host_rate
    )
    *alone, in_chunks = models
    for path in alone:
        _measure_model(path, config, device, times)
        gc.collect()
    dist.destroy_process_group()
    if size % _TP == 0:
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rendezvous = f"file://{out / 'rendezvous'}"
        dist.init_process_group(kind, init_method=rendezvous, rank=rank, world_size=size)
        for path in alone:
            _measure_split(path, config, device, times)
        if computes_halves():
            _measure_halves(in_chunks, config, device, times)
        dist.destroy_process_group()
    (out / str(rank)).write_bytes(pickle.dumps(times))


def _of_device(device: "torch.device", config: Config) -> tuple[float, float, float]:
    """`RankTimes.flops`, `memory_bytes_per_s`, `host_bytes_per_s`."""
    import torch

    from hybridrl.system.peak_flops import measure_peak

    tensor = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    copy = torch.empty_like(tensor)
    within = _median_s(device, lambda: copy.copy_(tensor))
    host = 0.0
    if device.type == "cuda":
        pinned = torch.empty(tensor.shape, pin_memory=True)
        host = tensor.nbytes / _median_s(device, lambda: pinned.copy_(tensor))
    peak = measure_peak(device, TORCH_DTYPES[config.model.compute_dtype])
    return peak, 2 * tensor.nbytes / within, host


def _measure_model(path: Path, config: Config, device: "torch.device", times: RankTimes) -> None:
    shape_config = AutoConfig.from_pretrained(path)
    shape = ModelShape.of_config(shape_config.to_dict())
    trainer = config.trainer
    trainer.layout = TrainLayoutConfig(fsdp=1)
    if device.type == "cpu":
        trainer.max_tokens_per_micro_batch = min(trainer.max_tokens_per_micro_batch, _CPU_TOKENS)
    engine = TrainEngine(str(path), model=config.model, trainer=trainer, device=device)
    longest = context_tokens(shape_config)
    _measure_training(engine, shape, longest, times.passes)
    _measure_generation(engine, shape, config, longest, times)


def _measure_split(path: Path, config: Config, device: "torch.device", times: RankTimes) -> None:
    """The same with the model on two ranks; each set of two trains on its own sequences."""
    import torch.distributed as dist

    shape_config = AutoConfig.from_pretrained(path)
    shape, trainer = ModelShape.of_config(shape_config.to_dict()), config.trainer
    if shape.heads % _TP or shape.kv_heads % _TP:
        return
    trainer.layout = TrainLayoutConfig(tp=_TP, replicas=dist.get_world_size() // _TP, fsdp=1)
    engine = TrainEngine(str(path), model=config.model, trainer=trainer, device=device)
    longest = context_tokens(shape_config)
    _measure_training(engine, shape, longest, times.split, shares=(1, 4), tp=_TP)
    _measure_generation(engine, shape, config, longest, times, tp=_TP)


def _measure_halves(path: Path, config: Config, device: "torch.device", times: RankTimes) -> None:
    """Updates of a zero-bubble pipeline on two ranks, each of whose passes is timed; decoding."""
    import torch
    import torch.distributed as dist

    shape = ModelShape.of_config(AutoConfig.from_pretrained(path).to_dict())
    trainer = config.trainer
    replicas, schedule = dist.get_world_size() // _PP, PipelineSchedule.zero_bubble
    trainer.layout = TrainLayoutConfig(pp=_PP, replicas=replicas, fsdp=1, schedule=schedule)
    engine = TrainEngine(str(path), model=config.model, trainer=trainer, device=device)
    engine.clock.enabled = True
    length = max(4, trainer.max_tokens_per_micro_batch // 4)
    length = min(length, context_tokens(engine.model.config))
    ids = torch.randint(0, shape.vocabulary, (8, length))
    sequences = [TrainSequence(row, length // 2) for row in ids]
    for repeat in range(1 + _REPEATS):
        engine.update([] if engine.dims.rank("pp") else sequences, CrossEntropyLoss())
        passes = engine.clock.take()
        if repeat:
            times.in_halves.extend((shape, each) for each in passes if each.kind in _HALVES)
    _measure_generation(engine, shape, config, context_tokens(engine.model.config), times, pp=_PP)


def _measure_training(
    engine: TrainEngine,
    shape: ModelShape,
    longest: int,
    passes: list[TimedPass],
    shares: Sequence[int] = (1, 4, 16),
    tp: int = 1,
) -> None:
    """Forward passes and updates: rows of several sizes, of long and of short sequences.

    The first of `tp` ranks gives the sequences that all of them compute.
    """
    import torch
    import torch.distributed as dist

    budget, loss = engine.trainer.max_tokens_per_micro_batch, CrossEntropyLoss()
    lengths = sorted({max(4, min(longest, budget) // share) for share in shares})
    clock = _clock if tp == 1 else _wall_clock
    for length in lengths:
        for tokens in (budget // 4, budget, 2 * budget)[: 3 if tp == 1 else 2]:
            number = max(1, tokens // length)
            # Half and a quarter of the tokens are scored, so that the head is told from layers.
            scored = length // 2 if number % 2 else length // 4
            sample = SampleLength(length - scored, scored)
            ids = torch.randint(0, shape.vocabulary, (number, length))
            sequences = [TrainSequence(row, scored) for row in ids]
            if dist.get_rank() % tp:
                sequences = []
            rows = tuple(
                PackedTokens(
                    tokens=len(row) * length,
                    scored=len(row) * scored,
                    pairs=len(row) * sample.pairs,
                )
                for row in micro_batches([length] * number, budget)
            )
            for _ in range(1 + _REPEATS):
                with clock(engine.device) as seconds:
                    engine.log_probs(sequences)
                score = TimedPass(shape=shape, rows=rows, trains=False, seconds=seconds[0])
                with _optimizer_clock(engine) as stepped, clock(engine.device) as seconds:
                    engine.update(sequences, loss)
                update = TimedPass(
                    shape=shape,
                    rows=rows,
                    trains=True,
                    seconds=seconds[0],
                    optimizer_s=stepped[0],
                )
                passes.extend((score, update))
            del passes[-2 * (1 + _REPEATS) : -2 * _REPEATS]  # the first of each warms up


def _measure_generation(
    engine: TrainEngine,
    shape: ModelShape,
    config: Config,
    longest: int,
    times: RankTimes,
    pp: int = 1,
    tp: int = 1,
) -> None:
    """Prompts, decode steps of a few and of many rows, and the weights' way to the engine.

    The weights' way counts only on one rank alone.
    """
    rollout = config.rollout
    budget = engine.trainer.max_tokens_per_micro_batch
    alone = pp * tp == 1
    repeats = _REPEATS if alone or longest < 4 * _REPEATS_TOGETHER * _STEPS else _REPEATS_TOGETHER
    room = (1 + repeats) * _STEPS
    prompts = sorted({max(2, min(longest - room, budget // 4) // share) for share in (1, 8)})
    most = max(n for n in _ROWS if n <= rollout.max_running or n == 1)
    stages = engine.dims.stage_of_layer(shape.layers)
    plan = plan_switch(engine.parameters, engine.dims.axes, pp, tp, stage_of_layer=stages).plan
    parallel = GenParallel() if alone else GenParallel.make(plan.dst.mesh, engine.device.type)
    native = NativeEngine(
        engine.model.config,
        dtype=TORCH_DTYPES[rollout.dtype],
        device=engine.device,
        max_running=most,
        block_size=rollout.block_size,
        kv_cache_tokens=0,
        max_sequence=prompts[-1] + room,
        parallel=parallel,
    )
    switches = []
    for _ in range(1 + _REPEATS):
        with _clock(engine.device) as seconds:
            native.update_weights(plan, engine.named_shards())
        switches.append(TimedSwitch(shape=shape, seconds=seconds[0]))
    if alone:
        times.switches.extend(switches[1:])
    for prompt in prompts:
        for rows in (n for n in _ROWS if n <= most):
            _measure_rows(native, shape, prompt, rows, repeats, times.decoding)


def _measure_rows(
    engine: NativeEngine,
    shape: ModelShape,
    prompt: int,
    rows: int,
    repeats: int,
    decoding: list[TimedDecoding],
) -> None:
    """So many rows of a prompt each: their prefill with a step, then steps alone.

    As in a run prompts differ in length, and rows end one after the other. Each time the engine
    gathers the keys and values of those that are left anew.
    """
    import torch

    device = engine.parameters()[next(iter(engine.parameters()))].device
    pp, tp = engine.parallel.pp, engine.parallel.tp
    clock = _clock if pp * tp == 1 else _wall_clock
    same = torch.Generator().manual_seed(rows)  # on all ranks of the instance
    lengths = [max(2, prompt * (4 - i % 4) // 4) for i in range(rows)]
    ids = [torch.randint(0, shape.vocabulary, (n,), generator=same).tolist() for n in lengths]

    def submit(most: int) -> None:
        for i, prompt_ids in enumerate(ids):
            params = SamplingParams(max_new_tokens=1 + most * (rows - i) // rows)
            engine.submit([Request(i, prompt_ids, params, stream_key(0, i))])

    submit(0)  # warms up: memory of these sizes is new
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    submit(repeats * _STEPS)
    before = engine.stats()
    with clock(device) as first:
        engine.step()
    after = engine.stats()
    steps = []
    for _ in range(repeats):
        begun = engine.stats()
        with clock(device) as seconds:
            for _ in range(_STEPS):
                engine.step()
        ended = engine.stats()
        steps.append(
            TimedDecoding(
                shape=shape,
                pp=pp,
                tp=tp,
                steps=ended.decode_steps - begun.decode_steps,
                rows=ended.decode_tokens - begun.decode_tokens,
                cached=ended.cached_tokens - begun.cached_tokens,
                seconds=seconds[0],
            )
        )
    while engine.stats().running:
        engine.step()
    decoding.extend(steps)
    step_s = steps[0].seconds / steps[0].steps
    filled = after.prefill_tokens - before.prefill_tokens
    decoding.append(
        TimedDecoding(
            shape=shape,
            pp=pp,
            tp=tp,
            admitted=rows,
            prefill=filled,
            pairs=sum(length * (length - 1) // 2 for length in lengths),
            seconds=max(0.0, first[0] - step_s),
        )
    )


@contextmanager
def _clock(device: "torch.device") -> Iterator[list[float]]:
    """Appends the seconds of its body to the list, once the device has ended it."""
    seconds: list[float] = []
    _wait(device)
    start = _now(device)
    yield seconds
    _wait(device)
    seconds.append(_now(device) - start)


@contextmanager
def _wall_clock(device: "torch.device") -> Iterator[list[float]]:
    """The same from the moment that all ranks are there, with the time that they wait."""
    import torch.distributed as dist

    seconds: list[float] = []
    dist.barrier()
    start = time.perf_counter()
    yield seconds
    _wait(device)
    seconds.append(time.perf_counter() - start)


def _now(device: "torch.device") -> float:
    """Seconds; on a CPU those of this process, which another one on its core does not lengthen."""
    import torch

    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


@contextmanager
def _optimizer_clock(engine: TrainEngine) -> Iterator[list[float]]:
    """The seconds of the optimizer's step within the body."""
    seconds: list[float] = []
    begun: list[float] = []

    def before(*_: object) -> None:
        _wait(engine.device)
        begun.append(_now(engine.device))

    def after(*_: object) -> None:
        _wait(engine.device)
        seconds.append(_now(engine.device) - begun.pop())

    hooks = [
        engine.optimizer.register_step_pre_hook(before),
        engine.optimizer.register_step_post_hook(after),
    ]
    yield seconds
    for hook in hooks:
        hook.remove()


def _median_s(device: "torch.device", work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _REPEATS):
        with _clock(device) as clock:
            work()
        seconds += clock
    return statistics.median(seconds[1:])


def _wait(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
