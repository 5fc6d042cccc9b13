"""The embedded rollout engine: continuous batching of a Hugging Face module over a paged KV cache.

Every running sequence has a pending last token whose keys and values are not cached yet; one
decode step feeds the pending tokens of all and draws the next ones. Prefill fills the cache up to
the pending token and draws nothing, so a fresh, a resumed and a preempted request are one case.
"""

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from hybridrl.engines.rollout.batch import DecodeBatch, Prefill, prefill_batches
from hybridrl.engines.rollout.decode import FAMILIES as FUSED_FAMILIES
from hybridrl.engines.rollout.decode import FusedDecoder
from hybridrl.engines.rollout.interface import Output, Request, Stats
from hybridrl.engines.rollout.kv_cache import BlockAllocator
from hybridrl.engines.rollout.random import uniforms
from hybridrl.engines.rollout.sampling import sample
from hybridrl.models import paged_attention
from hybridrl.models.paged_attention import KVPool, PagedBatch

FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
_UNIFORMS = 256  # positions whose uniforms are made at once


@dataclass(slots=True, eq=False)
class _Sequence:
    """An unfinished request: `blocks` and `slot` (its row in the engine's tables) while running."""

    request: Request
    order: int
    blocks: list[int] = field(default_factory=list)
    slot: int = -1

    @property
    def length(self) -> int:
        """Tokens of prompt and response, the pending one included."""
        return len(self.request.prompt_ids) + len(self.request.response_ids)

    def tokens(self) -> list[int]:
        """Prompt and response."""
        return [*self.request.prompt_ids, *self.request.response_ids]


@dataclass(slots=True)
class _Prefix:
    """A shared prompt: `blocks` cache all but its last token, None while they are not computed.

    The entry holds its blocks itself as long as `users` unfinished requests name it. Sequences
    share the full ones and copy the last, partly filled one, since they go on writing in it.
    """

    prompt_ids: list[int]
    users: int = 0
    blocks: list[int] | None = None


class NativeEngine:
    """See `RolloutEngine`. Runs the module of `model_config`, one replica on one device.

    `max_running` sequences decode at the same time, of at most `max_sequence` tokens each;
    `kv_cache_tokens` 0 gives room for all of them at full length. Weights are uninitialised until
    `update_weights`. Raises ValueError for a model family that the paged attention does not cover.

    When blocks run out, prompts kept for sharing are given up first, then the newest sequence is
    preempted: its blocks are freed, it waits at the head of the queue and is computed again. The
    oldest sequence always goes on, and fits alone, so the queue drains.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_running: int,
        block_size: int,
        kv_cache_tokens: int,
        max_sequence: int,
    ) -> None:
        if model_config.model_type not in FAMILIES:
            raise ValueError(
                f"the native rollout engine does not run model type {model_config.model_type!r}; "
                f"it runs {', '.join(FAMILIES)}"
            )
        self._device, self._dtype = torch.device(device), dtype
        self._max_running, self._block_size = max_running, block_size
        self._max_sequence = max_sequence
        per_sequence = -(-max_sequence // block_size)
        self._num_blocks = -(-kv_cache_tokens // block_size) or max_running * per_sequence
        config = copy.deepcopy(model_config)
        with no_init_weights():
            self._model = AutoModelForCausalLM.from_config(
                config, attn_implementation=paged_attention.NAME, dtype=dtype
            )
        self._model.tie_weights()  # no_init_weights leaves this out
        self._model.to(self._device).eval().requires_grad_(False)
        fused = config.model_type in FUSED_FAMILIES
        self._decoder = FusedDecoder(self._model, max_sequence) if fused else None
        self._vocab_size: int = config.vocab_size
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._aliases = set(self._model.state_dict()) - set(self._shapes)
        self._awake = True
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sequences: dict[object, _Sequence] = {}
        self._prefixes: dict[object, _Prefix] = {}
        self._submitted = self._decode_steps = self._decode_tokens = 0
        self._prefill_tokens = self._shared_tokens = 0
        self._tables = np.zeros((max_running, per_sequence), np.int64)
        self._uniforms = np.zeros((max_running, _UNIFORMS))
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._batch: DecodeBatch | None = None
        self._make_cache()

    def _make_cache(self) -> None:
        config = self._model.config
        self._allocator = BlockAllocator(self._num_blocks)
        self._pool: KVPool | None = KVPool(
            layers=config.num_hidden_layers,
            blocks=self._num_blocks + 1,
            block_size=self._block_size,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            dtype=self._dtype,
            device=self._device,
        )

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, first come first served; a parked request goes on where it stopped.

        Raises ValueError, before anything is queued, for a request that can never run.
        """
        seen: set[object] = set()
        prompts = {name: prefix.prompt_ids for name, prefix in self._prefixes.items()}
        for request in requests:
            self._check(request)
            if request.id in seen or request.id in self._sequences:
                raise ValueError(f"request {request.id!r} is already in the engine")
            seen.add(request.id)
            prompt = list(request.prompt_ids)
            if request.prefix is not None and prompts.setdefault(request.prefix, prompt) != prompt:
                raise ValueError(f"prefix {request.prefix!r} names two different prompts")
        for request in requests:
            own = replace(
                request,
                prompt_ids=list(request.prompt_ids),
                response_ids=list(request.response_ids),
                log_probs=list(request.log_probs),
            )
            if own.prefix is not None:
                prefix = self._prefixes.setdefault(own.prefix, _Prefix(list(own.prompt_ids)))
                prefix.users += 1
            sequence = _Sequence(own, self._submitted)
            self._submitted += 1
            self._sequences[own.id] = sequence
            self._waiting.append(sequence)

    def _check(self, request: Request) -> None:
        name, sampling = f"request {request.id!r}", request.sampling
        if not request.prompt_ids:
            raise ValueError(f"{name} has an empty prompt")
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocab_size:
            raise ValueError(
                f"{name} has token ids {min(request.prompt_ids)} to {max(request.prompt_ids)}; "
                f"the model's vocabulary has 0 to {self._vocab_size - 1}"
            )
        if len(request.response_ids) >= sampling.max_new_tokens:
            raise ValueError(
                f"{name} has {len(request.response_ids)} response tokens already; "
                f"rollout.max_new_tokens={sampling.max_new_tokens}"
            )
        total = len(request.prompt_ids) + sampling.max_new_tokens
        if total > self._max_sequence:
            raise ValueError(
                f"{name} may reach {total} tokens (prompt {len(request.prompt_ids)} + "
                f"rollout.max_new_tokens={sampling.max_new_tokens}); "
                f"the longest sequence is {self._max_sequence}"
            )
        if -(-(total - 1) // self._block_size) > self._num_blocks:
            raise ValueError(
                f"{name} may reach {total} tokens (prompt {len(request.prompt_ids)} + "
                f"rollout.max_new_tokens={sampling.max_new_tokens}); rollout.kv_cache_tokens="
                f"{self._num_blocks * self._block_size} can never hold it"
            )

    @torch.inference_mode()
    def park(self, ids: Iterable[object]) -> list[Request]:
        """Take unfinished requests out, with what they have generated; `submit` resumes them.

        An id that is not in the engine (it may just have finished) is passed over.
        """
        parked = []
        for id_ in ids:
            sequence = self._sequences.get(id_)
            if sequence is None:
                continue
            if sequence.slot >= 0:
                self._stop(sequence)
            else:
                self._waiting.remove(sequence)
            self._forget(sequence)
            parked.append(sequence.request)
        return parked

    # One step

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One decode step for all running requests (admitting and prefilling waiting ones)."""
        assert self._awake, "the engine sleeps"
        self._admit()
        if not self._running:
            return []
        self._grow()
        if self._batch is not None and self._batch.full:
            self._end_batch()
        if self._batch is None:
            self._batch = DecodeBatch(
                [(s.request, s.slot, s.length) for s in self._running],
                self._block_size,
                self._vocab_size,
                self._device,
            )
        batch = self._batch
        assert self._pool is not None
        paged, token_ids, positions = batch.inputs(self._pool, self._tables)
        logits = self._forward(paged, token_ids, positions)
        drawn = self._draw_uniforms(batch)
        tokens, log_probs = sample(logits, drawn, batch.sampling)
        batch.advance(tokens)
        self._decode_steps += 1
        self._decode_tokens += len(batch.requests)
        return self._append(batch, tokens.tolist(), log_probs.tolist())

    def _forward(
        self, paged: PagedBatch, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Logits [tokens, vocab] of a decode step."""
        if self._decoder is not None:
            return self._decoder(paged, token_ids, positions)
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, paged=paged
        ).logits
        return logits[0]

    def _draw_uniforms(self, batch: DecodeBatch) -> torch.Tensor:
        """This step's uniforms [rows] float64; made `_UNIFORMS` positions ahead."""
        column = batch.counts % _UNIFORMS
        for row in np.flatnonzero(column == 0):
            request = batch.requests[row]
            self._fill_uniforms([(request, int(batch.slots[row]))], int(batch.counts[row]))
        return torch.from_numpy(self._uniforms[batch.slots, column]).to(self._device)

    def _fill_uniforms(self, rows: list[tuple[Request, int]], start: int) -> None:
        """Uniforms of the block of positions that holds `start`, for requests in slots."""
        start -= start % _UNIFORMS
        longest = max(request.sampling.max_new_tokens for request, _ in rows)
        positions = np.arange(start, max(min(start + _UNIFORMS, longest), start + 1))
        keys = np.array([request.stream for request, _ in rows], np.uint64)
        slots = [slot for _, slot in rows]
        self._uniforms[slots, : len(positions)] = uniforms(keys[:, None], positions)

    def _append(
        self, batch: DecodeBatch, tokens: list[int], log_probs: list[float]
    ) -> list[Output]:
        """Add the drawn tokens; take finished sequences out."""
        outputs = []
        for request, token, log_prob in zip(batch.requests, tokens, log_probs, strict=True):
            request.response_ids.append(token)
            request.log_probs.append(log_prob)
            if token in request.sampling.stop_token_ids:
                finish = "stop"
            elif len(request.response_ids) >= request.sampling.max_new_tokens:
                finish = "length"
            else:
                continue
            outputs.append(Output(request.id, request.response_ids, request.log_probs, finish))
        for output in outputs:
            sequence = self._sequences[output.id]
            self._stop(sequence)
            self._forget(sequence)
        return outputs

    # Admission and blocks

    def _admit(self) -> None:
        """Admit waiting requests, first come first served, and prefill them."""
        admitted: list[_Sequence] = []
        fresh: list[_Prefix] = []
        cached: list[int] = []
        copies: list[tuple[int, int]] = []
        while self._waiting and len(self._running) < self._max_running:
            sequence = self._waiting[0]
            shared = self._reserve(sequence, fresh)
            if shared is None:
                break
            self._waiting.popleft()
            self._start(sequence)
            admitted.append(sequence)
            prefix = self._prefixes.get(sequence.request.prefix) if shared else None
            cached.append(shared)
            if prefix is not None and shared % self._block_size:
                assert prefix.blocks is not None
                last = shared // self._block_size
                copies.append((prefix.blocks[last], sequence.blocks[last]))
        if not admitted:
            return
        self._prefill([Prefill(prefix.prompt_ids[:-1], 0, prefix.blocks or []) for prefix in fresh])
        if copies:
            source, destination = torch.tensor(copies, device=self._device).unbind(1)
            assert self._pool is not None
            self._pool.copy(source, destination)
        self._prefill(
            [
                Prefill(sequence.tokens()[start:-1], start, sequence.blocks)
                for sequence, start in zip(admitted, cached, strict=True)
            ]
        )
        self._fill_admitted(admitted)

    def _fill_admitted(self, admitted: list[_Sequence]) -> None:
        """Uniforms of the admitted, together for those that start in the same block."""
        starts: dict[int, list[tuple[Request, int]]] = {}
        for sequence in admitted:
            start = len(sequence.request.response_ids) // _UNIFORMS * _UNIFORMS
            starts.setdefault(start, []).append((sequence.request, sequence.slot))
        for start, rows in starts.items():
            self._fill_uniforms(rows, start)

    def _reserve(self, sequence: _Sequence, fresh: list[_Prefix]) -> int | None:
        """Give a sequence its blocks: how many tokens a shared prefix caches; None if no room.

        One free block for each running sequence is left, so that an admission does not end in a
        preemption at once. A prefix that is to be computed is added to `fresh`.
        """
        prefix = self._prefixes.get(sequence.request.prefix)
        need = -(-sequence.length // self._block_size)
        if prefix is not None and len(prefix.prompt_ids) > 1:
            shared = len(prefix.prompt_ids) - 1
            full = shared // self._block_size
            own = -(-shared // self._block_size) if prefix.blocks is None else 0
            if need - full + own + len(self._running) + 1 <= self._allocator.num_free:
                if prefix.blocks is None:
                    prefix.blocks = self._allocator.take(own)
                    fresh.append(prefix)
                else:
                    self._shared_tokens += shared
                self._allocator.share(prefix.blocks[:full])
                sequence.blocks = prefix.blocks[:full] + self._allocator.take(need - full)
                return shared
        elif need + len(self._running) + 1 <= self._allocator.num_free:
            sequence.blocks = self._allocator.take(need)
            return 0
        if self._running:
            return None
        # Alone it always fits, without a block kept for a prefix.
        self._drop_prefixes()
        sequence.blocks = self._allocator.take(need)
        return 0

    def _end_batch(self) -> None:
        """The running sequences are about to change."""
        if self._batch is not None:
            self._batch.flush(self._tables)
        self._batch = None

    def _start(self, sequence: _Sequence) -> None:
        self._end_batch()
        sequence.slot = self._free_slots.pop()
        self._tables[sequence.slot] = 0
        self._tables[sequence.slot, : len(sequence.blocks)] = sequence.blocks
        self._running.append(sequence)

    def _stop(self, sequence: _Sequence) -> None:
        """Take a running sequence's blocks and slot away."""
        self._end_batch()
        self._running.remove(sequence)
        self._allocator.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], -1

    def _forget(self, sequence: _Sequence) -> None:
        """A sequence leaves the engine; with its last user a prefix goes."""
        request = sequence.request
        del self._sequences[request.id]
        if request.prefix is not None:
            prefix = self._prefixes[request.prefix]
            prefix.users -= 1
            if not prefix.users:
                self._allocator.release(prefix.blocks or [])
                del self._prefixes[request.prefix]

    def _drop_prefixes(self) -> None:
        for prefix in self._prefixes.values():
            self._allocator.release(prefix.blocks or [])
            prefix.blocks = None

    def _grow(self) -> None:
        """A block for every pending token that starts one; preempts the newest when out."""
        size = self._block_size
        if self._batch is not None and (self._batch.positions % size).all():
            return  # no pending token is the first of a block
        for sequence in sorted(self._running, key=lambda s: s.order):
            if sequence.slot < 0 or sequence.length <= len(sequence.blocks) * size:
                continue
            if not self._allocator.num_free:
                self._drop_prefixes()
            while not self._allocator.num_free and sequence.slot >= 0:
                victim = max(self._running, key=lambda s: s.order)
                self._stop(victim)
                self._waiting.appendleft(victim)
            if sequence.slot >= 0:
                self._tables[sequence.slot, len(sequence.blocks)] = self._allocator.take(1)[0]
                sequence.blocks.append(int(self._tables[sequence.slot, len(sequence.blocks)]))

    def _prefill(self, jobs: list[Prefill]) -> None:
        """Write the keys and values of the jobs' tokens."""
        jobs = [job for job in jobs if job.tokens]
        self._prefill_tokens += sum(len(job.tokens) for job in jobs)
        assert self._pool is not None
        for paged, token_ids, positions in prefill_batches(jobs, self._pool, self._device):
            self._model.base_model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                paged=paged,
            )

    # Weights

    def parameters(self) -> dict[str, torch.Tensor]:
        """The engine's own tensors by state-dict name, tied ones once; to be written in place."""
        assert self._awake, "the engine sleeps"
        return {name: parameter.data for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors, named as in `state_dict()`, into the engine's parameters.

        The names of a tied pair fill the same tensor: the pair's second name is passed over.
        Raises ValueError for an unknown name or another shape.
        """
        assert not self._running, "weights change while requests run: park them first"
        self._drop_prefixes()
        own = self.parameters()
        for name, tensor in weights:
            if name in self._aliases:
                continue
            if name not in own:
                raise ValueError(f"the rollout model has no parameter {name!r}")
            if own[name].shape != tensor.shape:
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}, wanted {tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)

    def sleep(self) -> None:
        """Free weights and KV cache. Waiting requests stay; running ones must be parked before."""
        assert not self._running, "the engine cannot sleep while requests run: park them first"
        self._drop_prefixes()
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=self._dtype, device=self._device)
        if self._decoder is not None:
            self._decoder.free()
        self._pool = None
        self._awake = False

    def wake(self) -> None:
        """Allocate weights (to be filled by `update_weights`) and KV cache."""
        if self._awake:
            return
        for name, parameter in self._model.named_parameters():
            parameter.data = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if self._decoder is not None:
            self._decoder.allocate()
        self._make_cache()
        self._awake = True

    def stats(self) -> Stats:
        """Counters and load."""
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            decode_steps=self._decode_steps,
            decode_tokens=self._decode_tokens,
            prefill_tokens=self._prefill_tokens,
            shared_prompt_tokens=self._shared_tokens,
            kv_blocks_free=self._allocator.num_free,
            kv_blocks_total=self._num_blocks,
        )
