"""The embedded rollout engine: continuous batching of a Hugging Face module over a paged KV cache.

Every running sequence has a pending last token whose keys and values are not cached yet. One decode
step feeds the pending tokens of all and draws the next ones. Prefill fills the cache up to the
pending token and draws nothing, so a fresh, a resumed and a preempted request are one case.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config import SPECULATED, RouterReplay
from hybridrl.engines.rollout.admission import Admission
from hybridrl.engines.rollout.batch import DecodeBatch, PassInputs, VerifyBatch
from hybridrl.engines.rollout.cache_fill import CacheFiller, KVCosts
from hybridrl.engines.rollout.entries import Entry, Lane
from hybridrl.engines.rollout.expert_record import ExpertRecorder, Experts
from hybridrl.engines.rollout.graph_decode import (
    GraphDecoder,
    GraphSettings,
    LateTokens,
    can_step,
    graph_settings,
)
from hybridrl.engines.rollout.interface import REST, EngineParts, HeldTurn, Output, Request, Stats
from hybridrl.engines.rollout.logit_edits import SeenTokens
from hybridrl.engines.rollout.memory import native_cache
from hybridrl.engines.rollout.random import UniformTable
from hybridrl.engines.rollout.requests import append_reply, check_positions, end_turn, output_of
from hybridrl.engines.rollout.responses import GrowingResponses
from hybridrl.engines.rollout.speculation import Guess, Speculation, make_speculation, verify_batch
from hybridrl.engines.rollout.stage import Drawn, DrawnTokens, RolloutStage
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.layout.layerwise import Fill
from hybridrl.models.load import check_supported
from hybridrl.models.local_weights import load_buffers
from hybridrl.models.paged_attention import KVCache
from hybridrl.models.router_replay import ExpertShape
from hybridrl.models.shard import GenParallel

logger = logging.getLogger(__name__)


class NativeEngine:
    """See `RolloutEngine`. Runs the module of `model_config`, one replica on one device.

    `max_running` sequences decode at the same time, of at most `max_sequence` tokens each;
    `kv_cache_tokens` 0 gives room for all of them at full length. Held requests that give way have
    at most `kv_host_tokens` on the host; None: as many as in the cache. Weights are uninitialized
    until `load` or `load_weights`. Raises ValueError for an unsupported model family, or
    one with fewer positions than `max_sequence`. `stops` ends responses by their text, besides each
    request's stop tokens.

    With `parallel` the engine is one rank of an instance of several, with a shard of weights and
    cache. All ranks get the same calls in the same order, know all tokens and return the same
    outputs. Under pipeline parallelism there is one lane of sequences per stage, and stages compute
    different lanes at the same time. A step's tokens are collected in the next step, so outputs
    are one step late; `park` collects them first.

    The output of a `deterministic` engine for a sample does not depend, bit for bit, on its other
    work. Every sequence decodes in a separate lane. A prefill has one prompt without its response
    and its last token. The response of a request without its KV cache is fed again token by token.
    It holds among engines of equal layout, block size and number of threads; nothing is batched.

    With `router_replay` at `rollout` it records every token's experts. A token computed again
    takes those that it had. At `trainer` its module takes them from others, who score with it.

    With `speculation` a step may make several tokens of a request: guessed ones, where the request
    draws them itself. It excludes `deterministic` and pipeline parallelism.

    With `graphs` rows decode by graph steps where engine, model and batch can (`graph_decode.py`),
    and are collected in the next step, too.

    With a `stage` it computes with that module, and a subclass gives it its cache (`wide.py`).

    Example of two stages, lanes a and b: stage 0 computes a1 b1 a2 b2, stage 1, half a step later,
    a1 b1 a2 b2. When stage 0 has finished b1, the tokens of a1 have arrived for a2.
    """

    parts: EngineParts
    """The arguments of `build`."""

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
        kv_host_tokens: int | None = None,
        parallel: GenParallel | None = None,
        deterministic: bool = False,
        stops: StopStrings | None = None,
        router_replay: RouterReplay = RouterReplay.off,
        speculation: Speculation | None = None,
        graphs: GraphSettings | None = None,
        stage: RolloutStage | None = None,
    ) -> None:
        check_supported(model_config)
        check_positions(max_sequence, model_config.max_position_embeddings)
        self._device = torch.device(device)
        self._block_size, self._vocab_size = block_size, model_config.vocab_size
        per_sequence = -(-max_sequence // block_size)
        self._num_blocks = -(-kv_cache_tokens // block_size) or max_running * per_sequence
        self._parallel = parallel or GenParallel()
        self._deterministic, self._stops = deterministic, stops
        assert speculation is None or (not deterministic and self._parallel.pp == 1)
        self._speculation = speculation
        # A thread's own time tells a pass from what else a machine does; other ranks' it does not.
        alone = self._device.type == "cpu" and self._parallel.tp == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self._pass_tokens = max(max_running, SPECULATED)  # of a pass with drafts

        # This rank's module and its cache. One that is passed has its owner's memory.
        self._stage = stage or RolloutStage(
            model_config,
            self._parallel,
            dtype=dtype,
            device=self._device,
            max_sequence=max_sequence,
            takes_routing=router_replay is not RouterReplay.off,
            max_running=max_running,
        )
        recorder: ExpertRecorder | None = None
        if router_replay is RouterReplay.rollout:
            own = [number for number, _ in self._stage.numbered_layers()]
            shape = ExpertShape.of(model_config)
            recorder = ExpertRecorder(shape, own, self._parallel, self._device)
        self._graphs: GraphDecoder | None = None
        if graphs is not None and can_step(self._stage, deterministic, speculation):
            self._graphs = GraphDecoder(self._stage, graphs, max_running, max_sequence, recorder)
        self._cache: KVCache | None = None
        if stage is None:
            self.take_cache()
        logger.debug("%d KV blocks, at most %d sequences at a time", self._num_blocks, max_running)

        # Requests: who runs, and what each draws from.
        self._admission = Admission(
            num_lanes=max(self._parallel.pp, max_running if deterministic else 1),
            max_running=max_running,
            block_size=block_size,
            num_blocks=self._num_blocks,
            max_sequence=max_sequence,
            vocab_size=self._vocab_size,
            replays=deterministic,
            records=recorder is not None,
            whole_records=self._parallel.pp == 1,
            save=self._save,
            num_states=self._stage.num_states,
            state_tokens=self._stage.state_tokens,
            place=self._stage.place,
        )
        # Both ways are exact; stages decide at different times.
        agree = None if deterministic or self._parallel.pp > 1 else self._parallel.of_first
        in_host = self._num_blocks * block_size if kv_host_tokens is None else kv_host_tokens
        self._costs = KVCosts(agree, in_host, self._stage.state_tokens)
        self._filler = CacheFiller(
            self._stage, recorder, self._costs, self._device, block_size, self._vocab_size,
            not deterministic,
        )  # fmt: skip
        self._uniforms = UniformTable(max_running)
        self._seen = SeenTokens(max_running, self._device)
        self._finished: list[Output] = []
        self._turns: list[HeldTurn] = []

        self._asleep = False
        # Counters of `stats`.
        self._decode_steps = self._decode_tokens = self._cached_tokens = 0

    @classmethod
    def build(cls, parts: EngineParts) -> Self:
        """See `build_engine`; on a GPU its cache takes the memory that training leaves."""
        tokens = parts.rollout.kv_cache_tokens
        if parts.device.type == "cuda":
            tokens = native_cache(parts)
        engine = cls(
            parts.model_config,
            dtype=parts.dtype,
            device=parts.device,
            max_running=parts.rollout.max_running,
            block_size=parts.rollout.block_size,
            kv_cache_tokens=tokens,
            max_sequence=parts.max_sequence,
            kv_host_tokens=parts.rollout.kv_host_tokens,
            parallel=parts.parallel,
            deterministic=parts.deterministic,
            stops=parts.stops,
            router_replay=parts.router_replay,
            speculation=make_speculation(parts.rollout.draft_length, parts.parallel),
            graphs=graph_settings(parts),
        )
        engine.parts = parts
        # `load` brings parameters alone.
        load_buffers(engine.model, parts.model_path, parts.model_config)
        return engine

    @property
    def model(self) -> PreTrainedModel:
        """See `SharesWeights`: the rank's shard of the Hugging Face module.

        Its attention is paged (keyword argument `paged`); a caller that scores with it selects
        another attention function during the call. Without weights while asleep.
        """
        return self._stage.model

    @property
    def parallel(self) -> GenParallel:
        """The rank's coordinates in its instance."""
        return self._parallel

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """See `RolloutEngine`.

        Raises ValueError, before anything is queued, for a request that can never run. So does a
        `kv` without this rank's layers and heads, or without all its tokens but the last.
        """
        requests = list(requests)
        for request in requests:
            self._filler.check(request)
        self._admission.submit(requests)

    @torch.inference_mode()
    def park(self, ids: Iterable[object], with_kv: bool = False) -> list[Request]:
        """See `RolloutEngine`. An id that has just finished is skipped, as any unknown one."""
        self._settle()
        ids = list(ids)
        for entry in self._admission.cached(ids) if with_kv else ():
            entry.request.kv = self._filler.read(entry, self._admission.tables, self.take_cache())
        parked = self._admission.remove(ids)
        for request in parked:
            if not with_kv:
                request.kv = None
            if self._speculation is not None:
                request.siblings = self._speculation.source.siblings(request)
                self._speculation.source.end(request)
        self._filler.join_records([request.routed_experts for request in parked])
        return parked

    @torch.inference_mode()
    def copy(self) -> list[Request]:
        """See `RolloutEngine`."""
        self._settle()
        requests = self._admission.requests
        self._filler.join_records([request.routed_experts for request in requests])
        return [request.copy() for request in requests]

    def _save(self, entry: Entry, in_host: int) -> bool:
        """Copy what a request has cached, which gives way, if it pays: whether that was done."""
        if not self._costs.copies(entry.kept, in_host):
            return False
        assert self._cache is not None
        with self._costs.timing_copy(entry.kept, self._cache.blocks):
            entry.request.kv = self._filler.read(entry, self._admission.tables, self._cache)
        return True

    # Turns

    def take_turns(self) -> list[HeldTurn]:
        """See `RolloutEngine`."""
        turns, self._turns = self._turns, []
        return turns

    def answer(
        self, id: object, tokens: Sequence[int] | None, finish: str = "stop"
    ) -> Output | None:
        """See `RolloutEngine`. All ranks of an instance end a response together."""
        request = self._admission.held(id)
        if tokens is None:
            self._admission.remove([id])
            self._filler.join_records([request.routed_experts])
            return output_of(request, finish)
        append_reply(request, tokens, self._vocab_size)
        self._admission.answer(id)
        return None

    def _end(self, ended: Sequence[tuple[Request, str]]) -> None:
        """Responses of a lane have ended. Ended turns are held, and so is what rests."""
        done, held = [], []
        for request, finish in ended:
            if self._speculation is not None:
                self._speculation.source.end(request)
            if finish == REST or request.sampling.max_turn_tokens:
                self._turns.append(end_turn(request, finish))
                held.append(request.id)
            else:
                self._finished.append(output_of(request, finish))
                done.append(request.id)
        if done:
            self._admission.remove(done)
        if held:
            self._admission.hold(held)

    # One step

    def begin_call(self, limit: int | None) -> None:
        """See `BoundsCalls`."""
        if self._speculation is not None:
            self._speculation.begin_call(limit)

    @property
    def call_is_done(self) -> bool:
        """See `BoundsCalls`."""
        speculation = self._speculation
        return speculation is not None and speculation.call_is_done(self._admission)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """See `RolloutEngine`."""
        assert not self._asleep, "the engine sleeps"
        if self._admission.waiting:
            self.take_cache()
        before, late = self._decode_tokens, 0
        for lane in self._admission.lanes:
            if lane.drawn is not None:
                self._collect(lane)
            if self._admission.waiting:
                self._admit(lane)
            if self._graphs is not None:
                self._arrange(lane, self._graphs)
            if lane.steps_left:
                lane.steps_left -= 1
            elif lane.entries:
                self._grow(lane)
            if lane.entries and self._speculation is None:
                late += self._launch(lane)
            elif lane.entries:
                self._speculate(lane)
        if self._parallel.pp == 1:
            self._collect_all(late)
        self._decode_steps += self._decode_tokens > before
        finished, self._finished = self._finished, []
        if finished:
            self._filler.join_records(output.routed_experts for output in finished)
        return finished

    def take_cache(self) -> KVCache:
        """The KV cache, allocated if there is none."""
        if self._cache is None:
            self._cache = self._stage.make_cache(self._num_blocks, self._block_size)
        return self._cache

    def _admit(self, lane: Lane) -> None:
        """Admit waiting requests to a lane and cache their tokens."""
        admitted = self._admission.admit(lane)
        if not admitted.entries:
            return
        assert self._cache is not None
        timed = self._admission.num_held > 0
        self._filler.fill(admitted, self._cache, self._admission.tables, timed)
        if self._speculation is not None:
            for entry in admitted.entries:
                self._speculation.source.begin(entry.request)
        if self._stage.draws:
            slots = [entry.slot for entry in admitted.entries]
            self._uniforms.forget(slots)
            self._seen.forget(slots)

    def _arrange(self, lane: Lane, graphs: GraphDecoder) -> None:
        """Let a lane whose rows have changed take graph steps, if they can."""
        if not lane.entries or lane.graph or lane.batch:
            return
        if not graphs.arrange(lane, self._admission.tables):
            self._collect_all()
            graphs.forget()

    def _grow(self, lane: Lane) -> None:
        """Give blocks to the lane's rows, some of which may lose theirs to older ones."""
        if self._admission.is_short(lane):
            self._collect_all()
        self._admission.grow(lane, ahead=lane.graph is not None)
        if self._graphs is not None:
            self._arrange(lane, self._graphs)

    def _launch(self, lane: Lane) -> bool:
        """Feed a lane's pending tokens; on return the sampled tokens may still be in flight.

        Returns whether they may stay there until the next step.
        """
        assert self._cache is not None
        tables = self._admission.tables
        if lane.graph is not None:
            assert self._graphs is not None
            return self._graphs.launch(lane, self._cache, self._admission)
        batch = self._filler.lane_batch(lane, self._cache, tables)
        lane.routing = self._filler.new_routing()
        uniforms = None
        if self._stage.draws:
            uniforms = self._uniforms.draw(batch.requests, batch.slots, batch.counts)
        inputs = batch.inputs(self._cache, tables, uniforms)
        lane.drawn = self._draw(batch, inputs, self._stage.decode(inputs, lane.routing))
        self._decode_tokens += len(batch.requests)
        self._cached_tokens += int(batch.positions.sum())
        return False

    def _draw(
        self, batch: DecodeBatch | VerifyBatch, inputs: PassInputs, logits: torch.Tensor | None
    ) -> Drawn:
        """Sample the tokens of a pass, or receive them."""
        edited = None
        if logits is not None and batch.sampling.edits is not None:
            drawing = batch.requests, batch.slots, batch.counts
            edited = batch.sampling.edits.apply(logits, *drawing, self._seen)
        return self._stage.draw(logits, inputs.uniforms, batch.sampling, edited)

    def _collect_all(self, late: int = 0) -> None:
        """Collect the tokens of all steps, but for so many of the last graph steps."""
        for lane in self._admission.lanes:
            if lane.drawn is not None:
                self._collect(lane)
        lane = self._admission.lanes[0]  # graph steps have no other
        for step in self._graphs.collect(lane, late) if self._graphs is not None else ():
            self._decode_tokens += len(step.requests)
            self._cached_tokens += step.cached
            if step.whole:
                self._append(lane, step, step.drawn, step.experts)
            else:
                self._end(self._responses(step, eager=True).append(step.drawn, step.experts))

    def _settle(self) -> None:
        """Collect the tokens of all steps; the requests have them then."""
        self._collect_all()
        for lane in self._admission.lanes:
            lane.write()

    def _collect(self, lane: Lane) -> None:
        """Append the tokens of a lane's last step; remove finished sequences."""
        assert lane.drawn is not None
        assert lane.batch is not None
        drawn, lane.drawn = lane.drawn, None
        values = drawn.wait()
        rows, routing = len(values.tokens), lane.routing
        experts = None if routing is None else self._filler.experts(routing, rows)
        lane.batch.advance(drawn.tokens)
        self._append(lane, lane.batch, values, experts)

    def _append(
        self,
        lane: Lane,
        rows: DecodeBatch | LateTokens,
        drawn: DrawnTokens,
        experts: Experts | None,
    ) -> None:
        """Append a token to each row of a lane's batch, and end those whose last one it is."""
        if lane.responses is None:
            # Edits of logits and drafts read the requests.
            edits = isinstance(rows, DecodeBatch) and rows.sampling.edits is not None
            lane.responses = self._responses(rows, edits or self._speculation is not None)
        self._end(lane.responses.append(drawn, experts))

    def _responses(self, rows: DecodeBatch | LateTokens, eager: bool) -> GrowingResponses:
        limits = self._admission.limits[rows.slots]
        return GrowingResponses(rows.requests, limits, self._stops, eager)

    # Speculation

    def _speculate(self, lane: Lane) -> None:
        """A step of a lane with drafts, where there are any; the speculation learns its time."""
        speculation = self._speculation
        assert speculation is not None
        speculation.admitted(self._admission)
        start, before = self._clock(), self._decode_tokens
        # What it takes to begin a batch is not the time of its passes.
        timed, rows = lane.is_arranged, len(lane.entries)
        guesses = speculation.guesses(lane, self._admission, self._pass_tokens)
        if guesses is None:
            self._launch(lane)
            self._collect(lane)
        elif guesses:
            self._verify(lane, guesses, speculation)
            timed, rows = any(guess.tokens for guess in guesses), len(guesses)
        if timed:
            seconds = self._clock() - start
            speculation.lengths.saw_pass(rows, self._decode_tokens - before, seconds)

    def _verify(self, lane: Lane, guesses: list[Guess], speculation: Speculation) -> None:
        """Feed pending tokens and drafts, draw behind each, and keep what is right."""
        tables = self._admission.tables
        lane.flush(tables)
        assert self._cache is not None
        uniforms_of = self._uniforms.draw_ahead if self._stage.draws else None
        rest = self._cache, self._vocab_size, self._device, uniforms_of
        batch = verify_batch(guesses, tables, *rest)
        routing = self._filler.new_routing()
        logits = self._stage.decode(batch.inputs, routing, batch.places)
        drawn = self._draw(batch, batch.inputs, logits).wait()
        self._decode_tokens += len(batch.requests)
        self._cached_tokens += sum(guess.entry.length - 1 for guess in guesses)
        spans, ended = speculation.accept_all(guesses, batch, drawn, self._stops)
        for guess in guesses:
            self._admission.cut(guess.entry)
        self._filler.keep(spans, routing)
        self._end(ended)

    # Weights

    def parameters(self) -> dict[str, torch.Tensor]:
        """The rank's own tensors by state-dict name, tied ones once; to be written in place.

        Shapes are those of `gen_layout(...).local(name, rank)`: padded rows of a vocabulary need
        no value.
        """
        assert not self._asleep, "the engine sleeps"
        return self._stage.parameters()

    def load(self, fill: Fill, keeps_kv: bool = False) -> None:
        """See `RolloutEngine`. All shards are filled at once."""
        self._collect_all()
        self._admission.drop_prefixes()
        self._stage.forget_images()
        if not keeps_kv:
            self._drop_cached("its weights cannot change")
        if self._asleep:
            self._stage.allocate()
            self._asleep = False
            logger.debug("awake, with weights to be filled")
        fill(self.parameters())

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, named as in `state_dict()`: see `RolloutStage.copy_in`.

        A rank of several passes its own shards.
        """
        self.load(lambda parameters, names=None: self._stage.copy_in(weights))

    def _drop_cached(self, what: str) -> None:
        """Drop what these weights have cached, of nothing that runs or is held."""
        busy = self._admission.num_running + self._admission.num_held
        assert not busy, f"{what} while requests run or are held: park them first"
        self._admission.forget()

    def _free_cache(self) -> None:
        for lane in self._admission.lanes:
            lane.kept = None
        if self._graphs is not None:
            self._graphs.free()
        self._cache = None

    def sleep(self, keep_weights: bool = False) -> None:
        """See `RolloutEngine`. Requests that run or are held must be parked before weights go."""
        if keep_weights:
            assert not self._admission.num_running, (
                "the engine cannot free its cache while requests run: park them first"
            )
        else:
            self._drop_cached("it cannot sleep")
        self._admission.give_up()
        self._free_cache()
        if not keep_weights:
            self._stage.free()
            self._asleep = True
        logger.debug("asleep, %s weights", "with" if keep_weights else "without")

    def close(self) -> None:
        """Nothing to end."""

    @property
    def unfinished(self) -> int:
        """See `RolloutEngine`."""
        admission = self._admission
        return admission.num_running + len(admission.waiting) + len(self._finished)

    def stats(self) -> Stats:
        """Counters and load."""
        return Stats(
            running=self._admission.num_running + len(self._finished),
            waiting=len(self._admission.waiting),
            decode_steps=self._decode_steps,
            decode_tokens=self._decode_tokens,
            cached_tokens=self._cached_tokens,
            prefill_calls=self._filler.prefill_calls,
            prefill_tokens=self._filler.prefill_tokens,
            replayed_tokens=self._filler.replayed_tokens,
            restored_tokens=self._filler.restored_tokens,
            shared_prompt_tokens=self._admission.shared_tokens,
            num_preempted=self._admission.num_preempted,
            graph_steps=0 if self._graphs is None else self._graphs.num_steps,
            graph_captures=0 if self._graphs is None else self._graphs.num_captured,
            kv_blocks_free=self._admission.allocator.num_free,
            kv_blocks_total=self._num_blocks,
            kv_bytes_per_token=self._stage.token_bytes,
            state_bytes=self._stage.state_bytes,
            held=self._admission.num_held,
            kept_tokens=self._admission.kept_tokens,
            moved_tokens=self._admission.moved_tokens,
            recomputed_tokens=self._admission.recomputed_tokens,
            has_cache=self._cache is not None,
            drafted_tokens=0 if self._speculation is None else self._speculation.num_drafted,
            accepted_tokens=0 if self._speculation is None else self._speculation.num_accepted,
            refused_drafts=0 if self._speculation is None else self._speculation.num_refused,
        )
