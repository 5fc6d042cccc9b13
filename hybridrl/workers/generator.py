"""What generates on one rank: a rollout engine, and the samples on their way through it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybridrl.config import Config
from hybridrl.data import Item
from hybridrl.engines.rollout.interface import (
    REST,
    BoundsCalls,
    EngineParts,
    HeldTurn,
    Output,
    Request,
    RolloutEngine,
    SamplingParams,
    SharesWeights,
    build_engine,
)
from hybridrl.engines.rollout.kept_ids import whole_distributions
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Answer,
    Command,
    CopyTokens,
    EpisodeReply,
    Finished,
    Park,
    Parked,
    Resume,
    Submit,
    TurnEnded,
)
from hybridrl.flow.instance_work import Work
from hybridrl.flow.sample import NO_RANK, NO_VERSION, SampleId, TokenSpan
from hybridrl.flow.saved_samples import SaveFinished, TakeSaved
from hybridrl.layout.layerwise import Fill, Held
from hybridrl.layout.layout import Layout
from hybridrl.models.context import context_tokens
from hybridrl.models.parallel import model_parameters
from hybridrl.models.response_text import ResponseText
from hybridrl.models.shard import GenParallel
from hybridrl.system.activity import mark
from hybridrl.system.memory import free_cached_memory
from hybridrl.workers.answers import InstanceDescription
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.sampling import SamplingTexts, stop_strings
from hybridrl.workers.saved_samples import SavedSamples, take_saved
from hybridrl.workers.store import KEPT_IDS, ROUTED_EXPERTS, SampleStore, StoredSample
from hybridrl.workers.turns import (
    CONVERSATION_TENSORS,
    answered,
    conversation_tensors,
    grown,
    recomputed,
)
from hybridrl.workers.wide import WideShare, cut_samples, wide_shares

_MARKED_STEPS = 16  # decode steps that are one stretch of a call


@dataclass(frozen=True, slots=True)
class ParkedSample:
    """All that another instance needs to continue a sample and to score it.

    `spans` are the policy versions of its tokens so far, `rank` parked it.
    """

    request: Request
    item: Item
    spans: tuple[TokenSpan, ...]
    rank: int = NO_RANK


class Generated(NamedTuple):
    """What a call has made; the state of `Parked` is a dict of `ParkedSample` by id."""

    finished: list[Finished]
    parked: list[Parked]
    turns: list[TurnEnded]
    work: Work
    copies: list[Parked]


class Generator:
    """This rank's place in a rollout instance. It knows of no trainer, and of no other role.

    States: made (random weights) -> `load` -> `advance`, any number of times; the engine's own are
    in `RolloutEngine`. `version` is that of its weights, as whoever brings them names it. A sample
    is here from its `Submit` or `Resume` until it is finished, and in the store, or parked.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        model_config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingTexts,
        store: SampleStore,
        device: torch.device,
        layout: Layout,
        reserved_bytes: int = 0,
    ) -> None:
        """`layout` says which weights this rank has; its mesh is of all ranks. Collective.

        Others will take `reserved_bytes` of the device while it generates.
        """
        self.config, self.store, self.sampling = config, store, sampling
        rollout, mesh = config.rollout, layout.mesh
        self._keeps_ids, self._keeps_kv = rollout.replays_sampling, config.schedule.keeps_kv
        self._model_config = model_config
        # this rank's place in generation
        self.rank = dist.get_rank()
        self._first_rank = config.cluster.pool_ranks[config.cluster.home].start
        self.number = self._first_rank + self.rank
        """This rank's number among those of the run."""
        self.instance = mesh.coordinates(self.rank)["instance"]
        self._num_instances = mesh.extent("instance")
        # The ranks of this instance, of which each keeps a share of the finished samples.
        self.own_peers: list[int] = mesh.grid()[self.instance].ravel().tolist()
        self.parallel = GenParallel.make(mesh, device.type, rollout.layout.ep)
        self.wide = wide_shares(model_config, rollout, mesh, device)
        self._joined: WideShare | None = None
        # the rollout engine, which takes what is left of the device
        self.rollout = make_rollout_engine(
            config,
            model_path,
            model_config,
            layout,
            self.parallel,
            device,
            stop_strings(tokenizer, config.stop_texts),
            reserved_bytes,
        )
        self.text_of = ResponseText(tokenizer, rollout.skip_special_tokens)
        self.version = NO_VERSION
        self._saved = SavedSamples(self.number)
        self._items: dict[SampleId, tuple[Item, tuple[TokenSpan, ...]]] = {}
        self._last_version: dict[SampleId, int] = {}  # of those that ended just before a load

    def describe(self, grouping: str) -> InstanceDescription:
        """The rank's instance, for ranks in the order of `grouping`."""
        first, layout = self._first_rank, self.config.rollout.layout
        return InstanceDescription(
            gen_layout={"instance": self._num_instances, "pp": layout.pp, "tp": layout.tp},
            gen_grouping=grouping,
            instance=self.instance,
            peers=[first + rank for rank in self.own_peers],
            wide={n: [first + rank for rank in share.peers] for n, share in self.wide.items()},
            kept_tokens=tuple(self.text_of.kept.values()),
        )

    def load(self, fill: Fill, version: int, keeps_kv: bool = False) -> int:
        """Let `fill` write the weights of a `version`; see `RolloutEngine.load`.

        Unfinished samples go on under them, with `keeps_kv` on the keys and values that they have.
        Gives their number.
        """
        going: list[Request] = []
        if self._items:
            going = self.rollout.copy() if keeps_kv else self.rollout.park(self._items)
        before, ended = self._parked(going).state, self._items.keys() - {r.id for r in going}
        self._last_version |= dict.fromkeys(ended, self.version)
        self._items |= {id: (sample.item, sample.spans) for id, sample in before.items()}
        self.rollout.load(fill, keeps_kv)
        self.version = version
        if not keeps_kv:
            self.rollout.submit(going)
        return len(going)

    def close(self) -> None:
        """End the rollout engine."""
        self._saved.close()
        self.rollout.close()

    @property
    def shared_model(self) -> PreTrainedModel | None:
        """The module with the engine's weights, which others may compute with, if there is one."""
        if not self.config.rollout.features.shares_weights:
            return None
        return cast(SharesWeights, self.rollout).model

    @cached_property
    def held_weights(self) -> Held | None:
        """What gives the weights that the engine generates with, if a module has them."""
        model = self.shared_model
        if model is None:
            return None
        own = dict(model.named_parameters())  # they stay, whatever becomes of their tensors
        return lambda: {name: parameter.data for name, parameter in own.items()}

    @property
    def unfinished(self) -> int:
        """Samples that decode or wait for room: neither finished, nor parked, nor at a reply."""
        return self.engine.unfinished

    # -- wide instances ------------------------------------------------------------------------

    @property
    def engine(self) -> RolloutEngine:
        """The engine that decodes: the rank's own, or that of a wide instance."""
        if self._joined is None:
            return self.rollout
        assert self._joined.engine is not None
        return self._joined.engine

    @property
    def instance_rank(self) -> int:
        """This rank's number in the instance that decodes."""
        return (self._joined or self).parallel.instance_rank

    def join(self, instance: int) -> None:
        """Decode as a rank of `instance`, which is its own or a wide one."""
        share = None if instance == self.instance else self.wide[instance]
        if share is not self._joined:
            assert self._joined is None, "two instances at a time"
            self._joined = share
            if share is not None:
                share.join(self.rollout, model_parameters(self._model_config))

    def leave(self) -> None:
        """Leave a wide instance that has no samples left, and decode alone again."""
        if self._joined is not None and not self.unfinished + self.engine.stats().held:
            assert self._joined.engine is not None
            self._joined.engine.leave()
            self._joined = None

    # -- generation --------------------------------------------------------------------------

    def advance(
        self,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> Generated:
        """Obey commands, then decode.

        The state of `Resume` is a dict of `ParkedSample` by id. Unless calls must be equal, one
        ends early where a turn has ended for one in `enough_turns` of the samples that are left. So
        their environments need not wait for it. That follows from tokens alone, so all ranks of an
        instance agree.
        """
        start, before, kv_seconds, kv_tokens = time.perf_counter(), self.engine.stats(), 0.0, 0
        # commands
        parked: list[Parked] = []
        finished: list[Finished] = []
        self._saved.begin_call(next((x for x in commands if isinstance(x, SaveFinished)), None))
        for command in commands:
            match command:
                case Submit():
                    self.engine.submit(self._requests(command))
                case TakeSaved():
                    finished += self._take(command)
                case Park():
                    begin = time.perf_counter()
                    parked.append(self._park(command))
                    if command.with_kv:
                        kv_seconds += time.perf_counter() - begin
                        kv_tokens += sum(parked[-1].tokens)
                case Resume():
                    self._resume(command)
                case Answer():
                    finished += self._answer(command)
        ended = self.engine.take_turns()
        # decoding: with drafts a step may make several tokens of a sample, and what conversations
        # make follows from turns, whatever the calls are
        steps = 0
        converses = self.config.environment.is_on
        equal = self.config.schedule.entry.counts_tokens and not converses
        call = self._bounded_call(num_decode_steps if equal else None)
        engine = self.engine
        while steps < num_decode_steps and self.unfinished and not (call and call.call_is_done):
            if steps % _MARKED_STEPS == 0:
                mark("decode" if steps else "admit and decode", steps)
            # At once: a sample that is finished is saved, whatever becomes of the call.
            finished += [sample for output in engine.step() if (sample := self._finish(output))]
            ended += engine.take_turns()
            steps += 1
            if ended and not equal and enough_turns * len(ended) >= self.unfinished:
                break
        copies = [self._copies()] if any(isinstance(c, CopyTokens) for c in commands) else []
        told: list[HeldTurn] = []
        # Copies, and parking, have collected the last step's tokens.
        while ended := ended + engine.take_turns():
            told += [turn for turn in ended if turn.finish != REST]
            if rested := tuple(cast(SampleId, turn.id) for turn in ended if turn.rests):
                parked.append(self._park(Park(rested, self.config.schedule.keeps_kv)))
            ended = []
        # results, and what they have cost
        after = self.engine.stats()
        turns = [turn for ended_turn in told if (turn := self._turn_ended(ended_turn))]
        work = Work(
            seconds=time.perf_counter() - start,
            decode_steps=after.decode_steps - before.decode_steps,
            rows=after.decode_tokens - before.decode_tokens,
            cached=after.cached_tokens - before.cached_tokens,
            prefill_tokens=(after.prefill_tokens + after.replayed_tokens)
            - (before.prefill_tokens + before.replayed_tokens),
            admitted=sum(map(_num_admitted, commands)),
            kv_tokens=kv_tokens,
            kv_seconds=kv_seconds,
            preempted=after.num_preempted - before.num_preempted,
            drafted=after.drafted_tokens - before.drafted_tokens,
            accepted=after.accepted_tokens - before.accepted_tokens,
            refused=after.refused_drafts - before.refused_drafts,
            kept_tokens=after.kept_tokens - before.kept_tokens,
            moved_tokens=after.moved_tokens - before.moved_tokens,
            recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        )
        return Generated(finished, parked, turns, work, copies)

    def decode(self, requests: Sequence[Request], num_decode_steps: int) -> list[Output]:
        """Decode further requests, which are no samples of a run, with those that are here.

        Gives the ones that have finished within so many steps, whole.
        """
        self.engine.submit(requests)
        self._bounded_call(None)
        outputs: list[Output] = []
        for step in range(num_decode_steps):
            if not self.unfinished:
                break
            if step % _MARKED_STEPS == 0:
                mark("decode" if step else "admit and decode", step)
            outputs += self.engine.step()
        return outputs

    def _bounded_call(self, limit: int | None) -> BoundsCalls | None:
        """Begin a call of so many steps, in an engine that must know them."""
        if not self.config.rollout.features.bounds_calls:
            return None
        engine = cast(BoundsCalls, self.engine)
        engine.begin_call(limit)
        return engine

    def _park(self, command: Park) -> Parked:
        parked = self._parked(self.engine.park(command.ids, command.with_kv), command.width)
        for id in parked.ids:
            del self._items[id]
        return parked

    def _copies(self) -> Parked:
        return self._parked(self.engine.copy())

    def _parked(self, requests: Sequence[Request], width: int = 1) -> Parked:
        """These requests with the versions of their tokens."""
        samples: dict[SampleId, ParkedSample] = {}
        for request in requests:
            id = cast(SampleId, request.id)
            item, spans = self._items[id]
            spans = grown(spans, len(request.response_ids), self.version)
            samples[id] = ParkedSample(request, item, spans, self.number)
        tokens = tuple(request.num_tokens for request in requests)
        return Parked(tuple(samples), tokens, self.version, samples, width)

    def _resume(self, command: Resume) -> None:
        same = command.parked.version == self.version
        samples: Mapping[SampleId, ParkedSample] = command.parked.state
        requests = []
        for id, rests_at in zip(command.ids, _rests(command), strict=True):
            request = samples[id].request
            usable = (same or command.stale_kv) and not command.recompute
            kv = request.kv if usable else None
            request = replace(request, kv=kv, rests_at=rests_at)
            self._items[id] = (samples[id].item, samples[id].spans)
            requests.append(request)
        self.engine.submit(requests)

    def _take(self, command: TakeSaved) -> list[Finished]:
        """Store the samples that this rank tells of, of those that are saved."""
        item: Item = command.prompt
        return [
            take_saved(id, place, item, self.store, self.number)
            for id, place in command.places.items()
            if self._tells(id)
        ]

    def _answer(self, command: Answer) -> list[Finished]:
        """Continue or end samples whose reply has come; gives those that end.

        Replies to samples of other instances are left out.
        """
        ended = []
        for reply in command.replies:
            if reply.id not in self._items:
                continue
            output = self.engine.answer(reply.id, reply.tokens, reply.finish)
            if reply.tokens is None:
                assert output is not None
                if sample := self._finish(output, reply):
                    ended.append(sample)
                continue
            item, spans = self._items[reply.id]
            spans = answered(spans, len(reply.tokens), self.version)
            self._items[reply.id] = item, spans
        return ended

    def _turn_ended(self, turn: HeldTurn) -> TurnEnded | None:
        """A sample waits for a reply from now on; one rank of the instance says so."""
        id = cast(SampleId, turn.id)
        if id in self._items:  # else it was parked in the same call
            item, spans = self._items[id]
            self._items[id] = item, grown(spans, turn.response_tokens, self.version)
        if not self._tells(id):
            return None
        text = self.text_of(turn.token_ids)
        return TurnEnded(id, tuple(turn.token_ids), text, turn.finish, turn.response_tokens)

    def _tells(self, id: SampleId) -> bool:
        """Whether this rank, of those that have a sample, stores it and speaks of it."""
        peers = self.own_peers if self._joined is None else self._joined.peers
        return peers[(id.prompt + id.k) % len(peers)] == self.rank

    def _requests(self, command: Submit) -> list[Request]:
        item: Item = command.prompt
        for id in command.ids:
            self._items[id] = (item, ())
        shares, params = len(command.ids) > 1, self.sampling.params(command.sampling)
        requests = [self.request(id, item, params, shares) for id in command.ids]
        for request, rests_at in zip(requests, _rests(command), strict=True):
            request.rests_at = rests_at
        return requests

    def request(self, id: SampleId, item: Item, params: SamplingParams, shares: bool) -> Request:
        """The request of a new response; with `shares` it reads its prompt's cached prefix."""
        return Request(
            id=id,
            prompt_ids=item.prompt_ids,
            sampling=params,
            stream=stream_key(self.config.run.seed, *id),
            prefix=(id.prompt, id.branch) if shares else None,
            task=item.source,
            images=item.images,
        )

    def _finish(self, output: Output, reply: EpisodeReply | None = None) -> Finished | None:
        """Store a finished sample, or leave it to another rank: all of the instance have it.

        A conversation is finished by the last `reply` of its environment.
        """
        id: SampleId = output.id  # type: ignore[assignment]  # a `cast` for each sample is a call
        item, spans = self._items.pop(id)
        version = self._last_version.pop(id, self.version)
        if not self._tells(id):
            return None
        num_tokens = len(output.token_ids)
        tensors = {
            "tokens": torch.tensor([*item.prompt_ids, *output.token_ids]),
            "log_probs": torch.tensor(output.log_probs, dtype=torch.float32),
        }
        # fields that only some samples have
        more: tuple[str, ...] = ()
        scalars: Mapping[str, float | int | str] = {}
        if output.routed_experts is not None:
            tensors[ROUTED_EXPERTS] = torch.from_numpy(output.routed_experts.whole())
            more = (ROUTED_EXPERTS,)
        if self._keeps_ids:
            kept = output.kept_ids or whole_distributions(num_tokens)
            tensors[KEPT_IDS] = torch.from_numpy(kept.flat())
            more += (KEPT_IDS,)
        if reply is not None:
            texts = item.prompt_ids, output.token_ids
            tensors |= conversation_tensors(output.turns, *texts, reply.turn_rewards)
            more += CONVERSATION_TENSORS
            scalars = {"num_turns": len(output.turns), **reply.scalars}
        stored = StoredSample(num_tokens, item, tensors, item.images)
        self.store.add(id, stored)
        spans = grown(spans, num_tokens, version)
        if self._keeps_kv:
            spans = recomputed(spans, output.recomputed_at)
        finished = Finished(
            id=id,
            rank=self.number,
            prompt_tokens=len(item.prompt_ids),
            response_tokens=num_tokens,
            finish=output.finish,
            spans=spans,
            more_tensors=more,
            scalars=scalars,
        )
        self._saved.append(finished, version, stored)
        return finished

    # -- parked samples on their way -----------------------------------------------------------

    def export_parked(
        self, parked: Parked, data_plane: DataPlane
    ) -> dict[int, dict[SampleId, Any]]:
        """References by instance rank and sample: one for each sample that has its KV cache."""
        samples: dict[SampleId, ParkedSample] = parked.state
        shares = {self.instance_rank: samples}
        if parked.width > 1:
            shares = cut_samples(samples, self.parallel, self._model_config, parked.width)
        if any(sample.request.kv is not None for sample in samples.values()):
            return {
                rank: {id: data_plane.put({id: s}) for id, s in share.items()}
                for rank, share in shares.items()
            }
        references = dict.fromkeys(samples, data_plane.put(samples)) if samples else {}
        return dict.fromkeys(shares, references)


def make_rollout_engine(
    config: Config,
    model_path: str,
    model_config: PretrainedConfig,
    layout: Layout,
    parallel: GenParallel,
    device: torch.device,
    stops: StopStrings | None,
    reserved_bytes: int = 0,
) -> RolloutEngine:
    """The engine that the config asks for, with this rank's weights of `layout`. Collective.

    Training's weights must have left the device, unless they stay there. Roles that stay and
    images will take `reserved_bytes` more. The engine is awake, its weights are random.
    """
    longest = config.longest_generated
    free_cached_memory(device)  # an engine may take what the device has left
    return build_engine(
        EngineParts(
            rollout=config.rollout,
            model_path=model_path,
            model_config=model_config,
            layout=layout,
            parallel=parallel,
            device=device,
            stops=stops,
            # Prompts that would not leave room for a response are not in the data.
            max_sequence=min(longest, context_tokens(model_config)),
            deterministic=config.strict,
            router_replay=config.trainer.router_replay,
            reserved_bytes=reserved_bytes,
        )
    )


def _rests(command: Submit | Resume) -> tuple[int, ...]:
    return command.rests_at or (0,) * len(command.ids)


def _num_admitted(command: Command) -> int:
    """The samples that a command begins or continues."""
    if isinstance(command, Answer):
        return sum(reply.tokens is not None for reply in command.replies)
    return len(command.ids) if isinstance(command, Submit | Resume) else 0
