"""vLLM as a rollout engine, in the worker processes: one engine rank per rank of an instance.

Every rank of an instance has its own scheduler, gets the same calls in the same order and so
decides alike. The ranks communicate in the collectives of the forward pass. vLLM calls this
`external_launcher`.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hybridrl.config import RouterReplay
from hybridrl.config.rollout import ENGINES, Engine
from hybridrl.engines.rollout.available import in_transformers_backend
from hybridrl.engines.rollout.expert_record import ExpertRecord
from hybridrl.engines.rollout.interface import REST, EngineParts, HeldTurn, Output, Request, Stats
from hybridrl.engines.rollout.kept_ids import rows_of
from hybridrl.engines.rollout.memory import kv_bytes_per_token
from hybridrl.engines.rollout.requests import (
    AdmissionLimits,
    append_reply,
    append_token,
    check_positions,
    check_requests,
    end_turn,
    output_of,
    tokens_left,
)
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.engines.rollout.vllm.groups import end_groups, set_environment
from hybridrl.engines.rollout.vllm.memory import DeviceMemory, HostMemory
from hybridrl.engines.rollout.vllm.start import (
    batched_tokens,
    device_share,
    engine_arguments,
    give_own_classes,
    make_intermediate_tensors,
    start_engine,
)
from hybridrl.engines.rollout.vllm.steps import StepQueue, reads_tokens
from hybridrl.layout.layerwise import Fill, by_layer
from hybridrl.layout.layout import Layout, stages_of_layers
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.weight_switch import Tensors
from hybridrl.models.local_weights import stored_buffers
from hybridrl.models.router_replay import ExpertShape

logger = logging.getLogger(__name__)

VOCAB_MULTIPLE = ENGINES[Engine.vllm].vocab_multiple
"""vLLM pads the rows of a vocabulary, of all tp ranks together, to a multiple of this."""
_GPU_SHARE = 0.9  # vLLM's own default


@dataclass(slots=True, eq=False)
class _Entry:
    """An unfinished request, of which every turn is a request of vLLM's.

    `key` is vLLM's name of the turn in progress. `scheduled` is the turn in vLLM's scheduler, and
    `draws` in the logits processor: None while the request is held. Those of a lower `order` go
    first. It `has_begun` where this turn has a token. When the last one ended, `cached` tokens were
    in the cache. Its cached blocks have the `salt` of the weights by which the first ones were
    computed: no request of another salt reads them.
    """

    request: Request
    order: int
    salt: str
    key: str = ""
    scheduled: Any = None
    draws: Any = None
    has_begun: bool = False
    cached: int = 0


class VLLMEngine:
    """See `RolloutEngine`. Runs the model of the directory `model_path`, one replica per instance.

    All ranks of `layout.mesh` (axes instance, pp, tp) create one together, in processes whose
    default group exists; afterwards instances are independent. `layout` says which weights this
    rank holds (see `plan_switch`, with `VOCAB_MULTIPLE` and `ascending`). The weights are random
    until `load`. Raises ValueError if `max_sequence` exceeds the model's positions.

    Tokens are sampled by the request's own stream, as in `NativeEngine`: same weights, same seeds,
    same tokens, up to the order of float operations (`vllm.sampling`). A parked request is
    resubmitted as a prompt, and so is a held one that continues. On the same engine, vLLM's prefix
    cache has all its full blocks, until others need them.

    With `whole_experts` a tp rank has some of the experts, else a part of each. `own_arguments` are
    further `EngineArgs`, which `check_arguments` has passed.

    With `router_replay` at `rollout` it records every token's experts. It cannot be told which to
    take: a token that is computed again keeps its record, whichever it takes then.

    `kv_cache_tokens` 0 sizes the cache on a CPU for `max_running` sequences at full length; on a
    GPU it is the remaining `gpu_memory_utilization`. On a GPU sleep frees weights and cache
    (level 2); CUDA graphs stay. The first work after `load` allocates the cache, so that
    computations in between have its memory. On a CPU sleep frees the cache alone: the backend keeps
    packed weights.
    """

    def __init__(
        self,
        model_path: str,
        model_config: PretrainedConfig,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_running: int,
        block_size: int,
        kv_cache_tokens: int,
        max_sequence: int,
        stops: StopStrings | None = None,
        gpu_memory_utilization: float = _GPU_SHARE,
        router_replay: RouterReplay = RouterReplay.off,
        whole_experts: bool = False,
        own_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        check_positions(max_sequence, model_config.max_position_embeddings)
        self._rank, self._dtype, self._stops = dist.get_rank(), dtype, stops
        self._experts: ExpertShape | None = None
        if router_replay is RouterReplay.rollout:
            self._experts = ExpertShape.of(model_config)
        mesh = layout.mesh
        stage = mesh.coordinates(self._rank)["pp"]
        self._kv_bytes_per_token = kv_bytes_per_token(model_config, mesh, stage, dtype)

        # vLLM reads its environment when it is imported.
        stages = stages_of_layers(model_config.num_hidden_layers, mesh.extent("pp"))
        set_environment([stages.count(stage) for stage in range(1 + max(stages))])
        logger.debug("importing vLLM")
        from hybridrl.engines.rollout.vllm import images, sampling

        self._sampling = sampling
        arguments = engine_arguments(
            model_path,
            mesh,
            dtype=dtype,
            device=device,
            max_running=max_running,
            block_size=block_size,
            kv_cache_tokens=kv_cache_tokens,
            max_sequence=max_sequence,
            bytes_per_token=self._kv_bytes_per_token,
            gpu_memory_utilization=gpu_memory_utilization,
            sampler=self._sampling.StreamSampler,
            batched_tokens=batched_tokens(device),
            records_experts=self._experts is not None,
            whole_experts=whole_experts,
            own={**images.take_features(model_config), **own_arguments},
        )
        self._prompts = images.PromptInputs(model_config, dtype, device, embeds=stage == 0)
        if in_transformers_backend(model_config):
            give_own_classes()
        constants = stored_buffers(model_path, model_config)
        self._start(arguments, mesh, block_size, device)
        self._reach_weights(layout, device, constants)
        self._open_queue(model_config.vocab_size, max_sequence, block_size)

    def _start(
        self, arguments: dict[str, Any], mesh: Mesh, block_size: int, device: torch.device
    ) -> None:
        """Start vLLM's engine, and get hold of its scheduler, its cache and this rank's worker."""
        logger.debug("starting vLLM's engine, pp %d, tp %d", mesh.extent("pp"), mesh.extent("tp"))
        self._engine = start_engine(arguments, mesh, block_size, device)
        self._core = self._engine.engine_core.engine_core
        self._pool = self._core.scheduler.kv_cache_manager.block_pool
        logger.debug("vLLM's engine is up, %d KV blocks", self._pool.num_gpu_blocks)
        self._worker = self._core.model_executor.driver_worker.worker
        runner = self._worker.model_runner
        if mesh.extent("pp") > 1:
            make_intermediate_tensors(runner, self._worker.get_model(), self._dtype, device)
        processors = runner.input_batch.logitsprocs.non_argmax_invariant
        (sampler,) = (p for p in processors if isinstance(p, self._sampling.StreamSampler))
        sampler.follow(runner.input_batch)
        # Under pp vLLM would split the requests over batches. They would not overlap: a rank is
        # done with a batch when all stages are.
        is_asynchronous = self._engine.vllm_config.scheduler_config.async_scheduling
        self._queue = StepQueue(self._core, sampler, is_asynchronous=is_asynchronous)
        self._core.step_fn = self._queue.step

    def _reach_weights(self, layout: Layout, device: torch.device, constants: Tensors) -> None:
        """Find the weights that `load` fills, and the memory that sleep frees.

        `constants` are tensors that no load brings, see `VLLMWeights`.
        """
        from hybridrl.engines.rollout.vllm.weights import VLLMWeights

        self._names = tuple(layout.rules)
        shapes = {name: LocalTensor(layout.local(name, self._rank)).shape for name in layout.rules}
        self._weights = VLLMWeights(self._worker.get_model(), shapes, self._dtype, constants)
        caches = self._worker.model_runner.kv_caches
        self._memory: DeviceMemory | HostMemory = (
            DeviceMemory(self._worker) if device.type == "cuda" else HostMemory(caches)
        )
        self._asleep, self._has_cache = False, True

    def _open_queue(self, vocab_size: int, max_sequence: int, block_size: int) -> None:
        """Limits of requests, those that are unfinished, and the counters of `stats`."""
        self._limits = AdmissionLimits(
            vocab_size=vocab_size,
            max_sequence=max_sequence,
            block_size=block_size,
            num_blocks=self._pool.num_gpu_blocks - 1,
            last_cached=True,
        )
        self._entries: dict[object, _Entry] = {}
        self._by_key: dict[str, _Entry] = {}  # those that vLLM has
        self._turns: list[HeldTurn] = []
        self._ended: list[Output] = []  # which no step has returned
        self._submitted = self._num_loads = 0
        self._counts: Counter[str] = Counter()

    @classmethod
    def build(cls, parts: EngineParts) -> Self:
        """See `build_engine`; on a GPU it takes the memory that training leaves."""
        share = device_share(parts) if parts.device.type == "cuda" else _GPU_SHARE
        return cls(
            parts.model_path,
            parts.model_config,
            parts.layout,
            dtype=parts.dtype,
            device=parts.device,
            max_running=parts.rollout.max_running,
            block_size=parts.rollout.block_size,
            kv_cache_tokens=parts.rollout.kv_cache_tokens,
            max_sequence=parts.max_sequence,
            stops=parts.stops,
            gpu_memory_utilization=share,
            router_replay=parts.router_replay,
            whole_experts=parts.parallel.ep > 1,
            own_arguments=parts.rollout.vllm,
        )

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """See `RolloutEngine`.

        Raises ValueError, before anything is queued, for a request that can never run, or that has
        a `kv`: vLLM accepts none.
        """
        requests = list(requests)
        check_requests(requests, self._limits, self._entries)
        for request in requests:
            if request.kv is not None:
                raise ValueError(f"request {request.id!r} comes with a KV cache; vLLM takes none")
        for request in requests:
            record = request.routed_experts or ExpertRecord()  # it grows by what vLLM returns
            copied = replace(
                request,
                response_ids=list(request.response_ids),
                log_probs=list(request.log_probs),
                routed_experts=None if self._experts is None else record.copy(),
                kept_ids=request.own_kept_ids(),
                turns=list(request.turns),
                recomputed_at=list(request.recomputed_at),
            )
            entry = self._entries[copied.id] = _Entry(copied, self._submitted, self._salt)
            self._submitted += 1
            if not copied.is_held:
                self._add(entry)

    def _add(self, entry: _Entry) -> None:
        """Queue a request in vLLM, whose prompt there is all that it has."""
        request = entry.request
        done, sampling = len(request.response_ids), request.sampling
        entry.draws = self._sampling.Draws(request, done)
        params = self._sampling.SamplingParams(
            temperature=0.0,  # the logits processor leaves only one choice
            max_tokens=tokens_left(request),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=self._sampling.RequestOutputKind.DELTA,
            extra_args={self._sampling.DRAWS: entry.draws},
            skip_clone=True,
            # Tokens that are computed again have their experts on record.
            routed_experts_prompt_start=len(request.routed_experts or ()),
        )
        entry.key, entry.has_begun = f"{entry.order}.{len(request.turns)}", False
        prompt = self._prompts.of(request, entry.salt)
        name = self._engine.add_request(entry.key, prompt, params, priority=entry.order)
        entry.scheduled = self._core.scheduler.requests[name]
        self._by_key[entry.key] = entry
        self._queue.num_reading += reads_tokens(sampling)

    def park(self, ids: Iterable[object], with_kv: bool = False) -> list[Request]:
        """See `RolloutEngine`.

        An id that is not in the engine (it may just have finished) is skipped. Raises ValueError
        `with_kv`: vLLM exports no keys and values.
        """
        if with_kv:
            raise ValueError("vLLM gives no keys and values of a parked request")
        entries = [self._entries.pop(id_) for id_ in dict.fromkeys(ids) if id_ in self._entries]
        scheduled = [entry for entry in entries if entry.scheduled is not None]
        for entry in scheduled:
            self._keep_experts(entry)
        self._engine.abort_request([entry.key for entry in scheduled])
        for entry in scheduled:
            self._leave(entry)
        self._settle()
        return [entry.request for entry in entries]

    def copy(self) -> list[Request]:
        """See `RolloutEngine`. Experts are those that vLLM has, which may lack the last tokens'."""
        self._collect()
        copies = []
        for entry in self._entries.values():
            one = replace(entry, request=entry.request.copy())
            if one.scheduled is not None:
                self._keep_experts(one)
            copies.append(one.request)
        return copies

    def _keep_experts(self, entry: _Entry, returned: Any = None) -> None:
        """Append to a request's record what vLLM has `returned`, or has of an unfinished request.

        It counts all layers of the model; records have those with experts.
        """
        record, shape = entry.request.routed_experts, self._experts
        if record is None or shape is None:
            return
        states = self._engine.output_processor.request_states
        pieces = [returned]
        if returned is None:
            pieces = states[entry.scheduled.request_id].routed_experts_chunks
        for piece in pieces:
            record.append(piece[:, list(shape.layers)].astype(shape.numpy_dtype))

    def _leave(self, entry: _Entry) -> None:
        """vLLM has the request no longer: it has ended, is held or is parked."""
        del self._by_key[entry.key]
        self._queue.num_reading -= reads_tokens(entry.request.sampling)
        self._counts["num_preempted"] += entry.scheduled.num_preemptions
        entry.scheduled = entry.draws = None

    def _settle(self) -> None:
        """Once vLLM has no request, read the step that it has begun for some of them."""
        if not self._by_key:
            self._queue.drain()

    # Turns

    def take_turns(self) -> list[HeldTurn]:
        """The turns that have ended since the last call; their requests are held.

        vLLM does not have them meanwhile. Its prefix cache does, until others need the blocks: the
        longest held give theirs first.
        """
        turns, self._turns = self._turns, []
        return turns

    def answer(
        self, id: object, tokens: Sequence[int] | None, finish: str = "stop"
    ) -> Output | None:
        """See `RolloutEngine`. What is cached in full blocks is not computed again."""
        entry = self._held(id)
        if tokens is None:
            del self._entries[id]
            return output_of(entry.request, finish)
        append_reply(entry.request, tokens, self._limits.vocab_size)
        self._add(entry)
        return None

    def _held(self, id: object) -> _Entry:
        """A held request; raises ValueError for another."""
        entry = self._entries.get(id)
        if entry is None or entry.scheduled is not None:
            status = "unknown" if entry is None else "in a turn"
            raise ValueError(f"request {id!r} is {status}; only a held one can be answered")
        return entry

    # One step

    def begin_call(self, limit: int | None) -> None:
        """See `BoundsCalls`: a step makes one token of each request.

        With a limit the call's last step begins none that the call would not read.
        """
        self._queue.begin_call(limit)

    @property
    def call_is_done(self) -> bool:
        """Never before its last step."""
        return False

    def step(self) -> list[Output]:
        """See `RolloutEngine`.

        With asynchronous scheduling the next step computes when this one returns. Requests that
        wait, or come between, join the one after it.
        """
        assert not self._asleep, "the engine sleeps"
        if self._by_key:
            if not self._has_cache:
                logger.debug("allocating the KV cache")
                self._memory.make_cache()
                self._has_cache = True
            self._read_step()
        outputs, self._ended = self._ended, []
        return outputs

    def _collect(self) -> None:
        """Read the step that has begun, if one has; the next `step` returns what ends with it."""
        if self._queue.is_ahead:
            self._queue.begin_call(1)  # no other one begins
            self._read_step()
            self._queue.begin_call(None)

    def _read_step(self) -> None:
        """Give the requests the tokens of vLLM's next step."""
        counts, stopped = self._counts, list[str]()
        prefills = 0
        outputs_of_step: list[Any] = self._engine.step()
        drawn = self._queue.drawn
        log_probs = drawn.log_probs.tolist()
        kept = None if drawn.kept is None else rows_of(drawn.kept)
        for output in outputs_of_step:
            entry, (completion,) = self._by_key[output.request_id], output.outputs
            request = entry.request
            if not entry.has_begun:
                entry.has_begun = True
                prefills += 1
                self._count_prefill(entry, output.num_cached_tokens or 0)
            (token,) = completion.token_ids
            row = drawn.numbers[entry.draws]
            ids = None if kept is None else kept[row]
            finish = append_token(request, token, log_probs[row], ids, self._stops)
            counts["decode_tokens"] += 1
            counts["cached_tokens"] += request.num_tokens - 1
            if finish is None:
                assert not output.finished, f"vLLM ends request {request.id!r} by itself"
                continue
            stopped += [] if output.finished else [entry.key]
            self._keep_experts(entry, completion.routed_experts)
            self._leave(entry)
            if finish == REST or request.sampling.max_turn_tokens:
                self._turns.append(end_turn(request, finish))
                entry.cached = request.num_tokens - 1  # the last one was not computed
            else:
                del self._entries[request.id]
                self._ended.append(output_of(request, finish))
        self._engine.abort_request(stopped)
        self._settle()
        counts["decode_steps"] += bool(outputs_of_step)
        counts["prefill_calls"] += bool(prefills)

    def _count_prefill(self, entry: _Entry, known: int) -> None:
        """Count the tokens of a request that begins, of which the cache had the first `known`."""
        kept = min(known, entry.cached)
        self._counts["kept_tokens"] += kept
        self._counts["recomputed_tokens"] += entry.cached - kept
        self._counts["shared_prompt_tokens"] += known - kept
        self._counts["prefill_tokens"] += entry.request.num_tokens - known
        if entry.request.response_ids and not kept:
            entry.request.recomputed_at.append(len(entry.request.response_ids))
        entry.cached = 0

    # Weights

    @torch.no_grad()
    def load(self, fill: Fill, keeps_kv: bool = False) -> None:
        """See `RolloutEngine`. It is filled layer by layer if vLLM repacks.

        With `keeps_kv` requests stay in vLLM's scheduler, with their blocks. Nothing else steps
        it, so it need not be paused.
        """
        if keeps_kv:
            self._collect()
        else:
            self._check_parked("its weights cannot change")
        if self._asleep:
            self._memory.wake()
            self._asleep = False
            logger.debug("awake, with weights to be filled")
        if self._weights.repacks:
            for names in by_layer(self._names):
                with self._weights.layer(names) as tensors:
                    fill(tensors, names)
        else:
            fill(self._weights.tensors())
            self._weights.process()
        self._weights.fill_constants()
        self._num_loads += 1
        if keeps_kv:
            self._begin_anew()
        else:
            self._forget_prompts()

    @property
    def _salt(self) -> str:
        """The salt of the blocks that a request computes which begins now."""
        return str(self._num_loads)

    def _begin_anew(self) -> None:
        """Let requests without a token of theirs compute all by the present weights.

        vLLM cannot drop cached prompts while requests have blocks, so these get another salt.
        """
        for entry in self._entries.values():
            if entry.has_begun or entry.cached:
                continue
            entry.salt = self._salt
            if entry.scheduled is not None:
                self._engine.abort_request([entry.key])
                self._leave(entry)
                self._add(entry)

    def _check_parked(self, what: str) -> None:
        busy = self._num_running + self.stats().held
        assert not busy, f"{what} while requests run or are held: park them first"
        self._queue.drain()

    def _forget_prompts(self) -> None:
        done = self._engine.reset_prefix_cache()
        assert done, "vLLM keeps cached prompts"
        # Features of images. Its engine's own method warns of waiting requests, which have none.
        self._core.scheduler.reset_encoder_cache()
        self._core.model_executor.reset_encoder_cache()

    # Memory

    def sleep(self, keep_weights: bool = False) -> None:
        """See `RolloutEngine`. Requests that run or are held must be parked before weights go."""
        if keep_weights:
            self._free_cache()
            return
        self._check_parked("it cannot sleep")
        if not self._asleep:
            self._forget_prompts()
            logger.debug("falling asleep")
            self._memory.sleep()
            self._asleep, self._has_cache = True, False

    def _free_cache(self) -> None:
        """Free the cache alone."""
        assert not self._num_running, "the engine cannot free its cache while requests run"
        if not self._has_cache:
            return
        self._queue.drain()
        self._forget_prompts()
        self._memory.free_cache()
        self._has_cache = False
        logger.debug("the KV cache is free")

    @property
    def unfinished(self) -> int:
        """See `RolloutEngine`."""
        return len(self._by_key) + len(self._ended)

    @property
    def _num_running(self) -> int:
        """The requests that vLLM has begun; outputs that no step has returned hold nothing."""
        _, waiting = self._core.scheduler.get_request_counts()
        return len(self._by_key) - waiting

    def stats(self) -> Stats:
        """Counters and load."""
        # Only `num_preempted` counts preemptions, and a request adds to it when it leaves: no
        # counter has the tokens that these compute again.
        return Stats(
            running=self._num_running + len(self._ended),
            waiting=len(self._by_key) - self._num_running,
            held=len(self._entries) - len(self._by_key),
            kv_blocks_free=self._pool.get_num_free_blocks(),
            kv_blocks_total=self._limits.num_blocks,
            kv_bytes_per_token=self._kv_bytes_per_token,
            has_cache=self._has_cache,
            **self._counts,
        )

    def close(self) -> None:
        """End vLLM's engine and its process groups; all ranks call it.

        vLLM's own shutdown would destroy all process groups, the default one among them.
        """
        logger.debug("ending vLLM's engine")
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        end_groups()
