"""The actor on one rank: its training shard, its rollout engine, and the switch between them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybridrl.config import Config, DType, RouterReplay
from hybridrl.data import Item
from hybridrl.engines.rollout.interface import HeldTurn, Output, Request, RolloutEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Answer,
    Command,
    EpisodeReply,
    Finished,
    Park,
    Parked,
    Resume,
    Sampling,
    Submit,
    TurnEnded,
    Work,
)
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.sample import NO_RANK, NO_VERSION, SampleId, TokenSpan
from hybridrl.layout.adapters import AdapterSwitch
from hybridrl.layout.parameters import gen_layout, train_layout
from hybridrl.layout.plan import Plan, plan
from hybridrl.layout.process_groups import warm_up
from hybridrl.layout.switching import Switch, plan_switch
from hybridrl.layout.weight_switch import SwitchStats, WeightSwitch, connect_peers, gather_groups
from hybridrl.models.adapters import pair_of
from hybridrl.models.buffers import copy_buffers
from hybridrl.models.load import TORCH_DTYPES, end_token_ids
from hybridrl.models.response_text import ResponseText
from hybridrl.models.shard import GenParallel
from hybridrl.workers.answers import ActorDescription
from hybridrl.workers.ema import MovingAverage
from hybridrl.workers.generation import make_rollout_engine
from hybridrl.workers.sampling import SamplingTexts, stop_strings
from hybridrl.workers.staying_roles import ALL_LEAVE, StayingRoles
from hybridrl.workers.store import ROUTED_EXPERTS, SampleStore, StoredSample
from hybridrl.workers.training import (
    RoleScoring,
    SampleFields,
    UpdateShare,
    UpdateSteps,
    log_probs_stage,
)
from hybridrl.workers.turns import (
    CONVERSATION_TENSORS,
    answered,
    conversation_tensors,
    grown,
)
from hybridrl.workers.wide import WideShare, wide_shares


@dataclass(frozen=True, slots=True)
class ParkedSample:
    """All that another instance needs to continue a sample and to score it.

    `spans` are the policy versions of its tokens so far, `rank` parked it.
    """

    request: Request
    item: Item
    spans: tuple[TokenSpan, ...]
    rank: int = NO_RANK


class Actor:
    """One set of weights in two layouts. `version` counts optimizer steps.

    Invariant: while the rollout engine is awake, its weights are those of `generating_version`.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        store: SampleStore,
        device: torch.device,
        staying: StayingRoles = ALL_LEAVE,
        nodes: Sequence[str] = (),
    ) -> None:
        """The actor may be one of the roles that are `staying` on the device.

        `nodes` has the node of each rank; without it all are on one.
        """
        self.config, self.store, self.device = config, store, device
        rollout = config.rollout
        # the training shards
        self.train_engine = TrainEngine(
            model_path,
            model=config.model,
            trainer=config.trainer,
            device=device,
            gen_tp=rollout.layout.tp,
            gen_ep=rollout.layout.ep,
            lora=config.actor.lora,
            seed=config.run.seed,
        )
        # the switch, and this rank's place in generation
        model_config = AutoConfig.from_pretrained(model_path)
        self.switch_plan = self._plan_switch(model_config.num_hidden_layers, nodes)
        mesh = self.switch_plan.plan.dst.mesh
        self.instance = mesh.coordinates(dist.get_rank())["instance"]
        # The ranks of this instance, of which each keeps a share of the finished samples.
        self._own_peers: list[int] = mesh.grid()[self.instance].ravel().tolist()
        self.parallel = GenParallel.make(mesh, device.type, rollout.layout.ep)
        self.wide = wide_shares(model_config, rollout, mesh, device)
        self._joined: WideShare | None = None
        # Before the rollout engine takes the memory that communicators leave.
        warm_up(gather_groups(self.switch_plan.plan, dist.get_rank()), device)
        if device.type == "cuda":  # gloo connects all ranks when a group is made
            connect_peers(self.switch_plan.plan, device)
        self.adapters = self._load_base()
        # the rollout engine, which takes what the training shards leave of the device
        memory = self.train_engine.memory
        memory.stays = "actor" in staying.names
        self.train_engine.offload()
        stop = config.stop_texts
        self.rollout = make_rollout_engine(
            config,
            model_path,
            model_config,
            self.switch_plan,
            self.parallel,
            device,
            stop_strings(tokenizer, stop),
            # What is there already, its weights, is seen in use.
            max(0, staying.reserved_bytes - memory.nbytes * memory.stays),
        )
        self._text_of = ResponseText(tokenizer, config.rollout.skip_special_tokens)
        self.sampling = SamplingTexts(
            tokenizer, config.data.chat, stop, end_token_ids(model_path, model_config)
        )
        self.rollout.sleep()
        self.generating_version = NO_VERSION
        self.averages: dict[str, MovingAverage] = {}
        self._items: dict[SampleId, tuple[Item, tuple[TokenSpan, ...]]] = {}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end its responses and turns, that of its tokenizer or template first."""
        return self.sampling.all_end_ids

    def _plan_switch(self, num_layers: int, nodes: Sequence[str]) -> Switch:
        """Plan the weight switch."""
        rollout, engine = self.config.rollout, self.train_engine
        return plan_switch(
            engine.parameters,
            engine.dims.axes,
            rollout.layout.pp,
            rollout.layout.tp,
            rollout.layout.grouping,
            engine.dims.stage_of_layer(num_layers),
            gen_ep=rollout.layout.ep,
            vocab_multiple=rollout.features.vocab_multiple,
            ascending=rollout.features.ascending,
            nodes=nodes,
        )

    def _load_base(self) -> AdapterSwitch | None:
        """The switch of the adapters, with the base weights loaded; None without adapters."""
        if self.train_engine.lora is None:
            return None
        kind = TORCH_DTYPES[self.config.rollout.dtype]
        switch = self._adapter_switch(self.switch_plan.plan, kind)
        switch.load(self.train_engine.named_shards(), self.device)
        return switch

    def _adapter_switch(self, base: Plan, dtype: torch.dtype) -> AdapterSwitch:
        """A switch of the adapters between the layouts of `base`, which moves the weights."""
        engine, layers = self.train_engine, self.train_engine.model.config.num_hidden_layers
        assert engine.lora is not None
        stages, gen_tp = engine.dims.stage_of_layer(layers), self.config.rollout.layout.tp
        src = train_layout(engine.adapters, engine.dims.axes, stages, gen_tp)
        dst = gen_layout(engine.adapters, base.dst.mesh, layers)
        pairs = {name: pair for name in base.src.shapes if (pair := pair_of(name))[0] in src.shapes}
        bucket = self.config.rollout.layout.bucket_bytes(self.device.type)
        return AdapterSwitch(
            base, plan(src, dst), pairs, engine.lora.scaling, dist.get_rank(), dtype, bucket
        )

    def _move_weights(self) -> SwitchStats:
        """Reshard the training weights into the rollout engine."""
        shards = self.train_engine.named_shards()
        if self.rollout.model is not None:
            self.copy_biases(self.rollout.model)
        if self.adapters is None:
            return self.rollout.update_weights(self.switch_plan.plan, shards)
        return self.adapters.switch(shards, self.rollout.write_weights, self.device)

    def copy_biases(self, model: PreTrainedModel) -> None:
        """Fill the routing biases of a `local_model` on this rank, if training moves them.

        Collective. Small next to the weights, they go through the hosts.
        """
        if self.config.trainer.router_bias_update_rate:
            copy_buffers(model, self.train_engine.buffers())

    def base_weights(self, dtype: DType) -> Mapping[str, torch.Tensor] | None:
        """The weights without adapters, as a `local_model` on this rank holds them.

        They are in host memory and must not change. None once the adapters have been trained, and
        where no base is kept in `dtype`.
        """
        rollout = self.config.rollout
        same = dtype is rollout.dtype and rollout.features.shares_weights
        if self.adapters is None or self.train_engine.version or not same:
            return None
        return self.adapters.base

    def copy_weights(
        self,
        parameters: Mapping[str, torch.Tensor],
        dtype: DType,
        shards: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Fill the `parameters` of a `local_model` on this rank. Collective.

        They get the present weights, or `shards` in the layout of the training weights.
        """
        layout = gen_layout(
            self.train_engine.parameters,
            self.switch_plan.plan.dst.mesh,
            self.train_engine.model.config.num_hidden_layers,
            ep=self.config.rollout.layout.ep,
        )
        kind = TORCH_DTYPES[dtype]
        move = plan(self.switch_plan.plan.src, layout)
        present: Mapping[str, torch.Tensor] = self.train_engine.named_shards()
        if shards is not None:
            present = {name: shard.to(self.device) for name, shard in shards.items()}
        if self.train_engine.lora is None:
            WeightSwitch(move, dist.get_rank(), kind).switch(present, parameters)
        else:
            assert shards is None, "adapters have no average"
            switch = self._adapter_switch(move, kind)
            switch.load(present, self.device)
            switch.switch(present, lambda fill: fill(parameters), self.device)

    def describe(self) -> ActorDescription:
        """The actor on this rank."""
        return ActorDescription(
            parameters=self.train_engine.num_parameters,
            trained_parameters=self.train_engine.num_trained,
            attention=self.train_engine.attention.value,
            device=str(self.device),
            train_layout=self.train_engine.dims.axes,
            gen_layout=dict(self.switch_plan.plan.dst.mesh.axes),
            gen_grouping=self.switch_plan.grouping.value,
            instance=self.instance,
            peers=self._own_peers,
            wide={number: share.peers for number, share in self.wide.items()},
            kept_tokens=tuple(self._text_of.kept.values()),
        )

    def close(self) -> None:
        """End the rollout engine."""
        self.rollout.close()

    @property
    def unfinished(self) -> int:
        """Samples that decode or wait for room: neither finished, nor parked, nor at a reply."""
        stats = self.engine.stats()
        return stats.running + stats.waiting

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

    @property
    def _peers(self) -> list[int]:
        """The ranks of the instance that decodes, of which each keeps some finished samples."""
        return self._own_peers if self._joined is None else self._joined.peers

    def join(self, instance: int) -> None:
        """Decode as a rank of `instance`, which is its own or a wide one."""
        share = None if instance == self.instance else self.wide[instance]
        if share is not self._joined:
            assert self._joined is None, "two instances at a time"
            self._joined = share
            if share is not None:
                share.join(self.rollout, self.train_engine.parameters)

    def leave(self) -> None:
        """Leave a wide instance that has no samples left, and decode alone again."""
        if self._joined is not None and not self.unfinished + self.engine.stats().held:
            assert self._joined.engine is not None
            self._joined.engine.leave()
            self._joined = None

    # -- weight switch -----------------------------------------------------------------------

    def switch_weights(self, woken: bool) -> SwitchStats | None:
        """Move the newest weights to the rollout engine, unless it has them. Collective.

        An engine that has just `woken` has none. Gives the switch's cost, None where nothing moved.
        """
        if not woken and self.generating_version == self.train_engine.version:
            return None
        stats = self._move_weights()
        self.generating_version = self.train_engine.version
        return stats

    # -- generation --------------------------------------------------------------------------

    def advance(
        self,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> tuple[list[Finished], list[Parked], list[TurnEnded], Work]:
        """Obey commands, then decode.

        Returns finished samples, parked ones, turns that have ended, and the work done. The state
        of `Parked` and of `Resume` is a dict of `ParkedSample` by id. Unless
        calls must be equal, one ends early where a turn has ended for one in `enough_turns` of the
        samples that are left. So their environments need not wait for it. That follows from tokens
        alone, so all ranks of an instance agree.
        """
        start, before, kv_seconds, kv_tokens = time.perf_counter(), self.engine.stats(), 0.0, 0
        # commands
        parked: list[Parked] = []
        outputs: list[tuple[Output, EpisodeReply | None]] = []
        for command in commands:
            match command:
                case Submit():
                    self.engine.submit(self._requests(command))
                case Park():
                    begin = time.perf_counter()
                    parked.append(self._park(command))
                    if command.with_kv:
                        kv_seconds += time.perf_counter() - begin
                        kv_tokens += sum(parked[-1].tokens)
                case Resume():
                    self._resume(command)
                case Answer():
                    outputs += self._answer(command)
        ended = self.engine.take_turns()
        # decoding: with drafts a step may make several tokens of a sample, and what conversations
        # make follows from turns, whatever the calls are
        steps = 0
        converses = self.config.environment.is_on
        equal = self.config.schedule.entry.counts_tokens and not converses
        self.engine.begin_call(num_decode_steps if equal else None)
        while steps < num_decode_steps and self.unfinished and not self.engine.call_is_done:
            outputs += [(output, None) for output in self.engine.step()]
            ended += self.engine.take_turns()
            steps += 1
            if ended and not equal and enough_turns * len(ended) >= self.unfinished:
                break
        # results, and what they have cost
        after = self.engine.stats()
        finished = [sample for o, reply in outputs if (sample := self._finish(o, reply))]
        turns = [told for turn in ended if (told := self._turn_ended(turn))]
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
        return finished, parked, turns, work

    def _park(self, command: Park) -> Parked:
        samples: dict[SampleId, ParkedSample] = {}
        tokens = []
        for request in self.engine.park(command.ids, command.with_kv):
            id = cast(SampleId, request.id)
            item, spans = self._items.pop(id)
            spans = grown(spans, len(request.response_ids), self.generating_version)
            samples[id] = ParkedSample(request, item, spans, dist.get_rank())
            tokens.append(len(request.prompt_ids) + len(request.response_ids))
        version, width = self.generating_version, command.width
        return Parked(tuple(samples), tuple(tokens), version, samples, width)

    def _resume(self, command: Resume) -> None:
        same = command.parked.version == self.generating_version
        samples: Mapping[SampleId, ParkedSample] = command.parked.state
        requests = []
        for id in command.ids:
            request = samples[id].request
            if not (same or command.stale_kv):
                request = replace(request, kv=None)
            self._items[id] = (samples[id].item, samples[id].spans)
            requests.append(request)
        self.engine.submit(requests)

    def _answer(self, command: Answer) -> list[tuple[Output, EpisodeReply]]:
        """Continue or end samples whose reply has come; gives the outputs of those that end.

        Replies to samples of other instances are left out.
        """
        ended = []
        for reply in command.replies:
            if reply.id not in self._items:
                continue
            if reply.tokens is None:
                ended.append((self.engine.finish(reply.id, reply.finish), reply))
                continue
            self.engine.append(reply.id, reply.tokens)
            item, spans = self._items[reply.id]
            spans = answered(spans, len(reply.tokens), self.generating_version)
            self._items[reply.id] = item, spans
        return ended

    def _turn_ended(self, turn: HeldTurn) -> TurnEnded | None:
        """A sample waits for a reply from now on; one rank of the instance says so."""
        id = cast(SampleId, turn.id)
        if id in self._items:  # else it was parked in the same call
            item, spans = self._items[id]
            self._items[id] = item, grown(spans, turn.response_tokens, self.generating_version)
        if not self._tells(id):
            return None
        text = self._text_of(turn.token_ids)
        return TurnEnded(id, tuple(turn.token_ids), text, turn.finish, turn.response_tokens)

    def _tells(self, id: SampleId) -> bool:
        """Whether this rank, of those that have a sample, stores it and speaks of it."""
        return self._peers[(id.prompt + id.k) % len(self._peers)] == dist.get_rank()

    def _requests(self, command: Submit) -> list[Request]:
        item: Item = command.prompt
        for id in command.ids:
            self._items[id] = (item, ())
        shares = len(command.ids) > 1
        return [self.request(id, item, command.sampling, shares) for id in command.ids]

    def request(self, id: SampleId, item: Item, sampling: Sampling, shares: bool) -> Request:
        """The request of a new response; with `shares` it reads its prompt's cached prefix."""
        return Request(
            id=id,
            prompt_ids=item.prompt_ids,
            sampling=self.sampling.params(sampling),
            stream=stream_key(self.config.run.seed, *id),
            prefix=(id.prompt, id.branch) if shares else None,
            task=item.source,
        )

    def _finish(self, output: Output, reply: EpisodeReply | None) -> Finished | None:
        """Store a finished sample, or leave it to another rank: all of the instance have it.

        A conversation is finished by the last `reply` of its environment.
        """
        id = cast(SampleId, output.id)
        item, spans = self._items.pop(id)
        if not self._tells(id):
            return None
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
        if reply is not None:
            texts = item.prompt_ids, output.token_ids
            tensors |= conversation_tensors(output.turns, *texts, reply.turn_rewards)
            more += CONVERSATION_TENSORS
            scalars = {"num_turns": len(output.turns), **reply.scalars}
        self.store.add(id, StoredSample(len(output.token_ids), item, tensors))
        return Finished(
            id=id,
            rank=dist.get_rank(),
            prompt_tokens=len(item.prompt_ids),
            response_tokens=len(output.token_ids),
            finish=output.finish,
            spans=grown(spans, len(output.token_ids), self.generating_version),
            more_tensors=more,
            scalars=scalars,
        )

    # -- scoring and training ------------------------------------------------------------------

    def scoring(self, stage: Stage, ids: Sequence[SampleId]) -> RoleScoring:
        """Log-probabilities of the responses under the training weights."""
        replay = self.config.trainer.router_replay
        self.train_engine.temperature = stage.temperature
        return log_probs_stage(self.train_engine, self.store, stage, ids, replay)

    def update_steps(self, stage: UpdateStage, share: UpdateShare) -> UpdateSteps:
        """The steps of training on this rank's share.

        Before the first optimizer step the trainer's weights are those that have generated, so
        there its log-probabilities are compared with the rollout engine's: `ENGINE_GAPS`.
        """
        self.train_engine.temperature = stage.temperature
        version = self.train_engine.version
        return UpdateSteps(
            engine=self.train_engine,
            store=self.store,
            config=self.config,
            stage=stage,
            share=share,
            compare=ENGINE_GAPS,
            compared=lambda id: _sampled(self.store[id], share.versions[id], version),
            stepped=self._stepped,
            replays=self.config.trainer.router_replay is not RouterReplay.off,
        )

    def _stepped(self) -> None:
        for average in self.averages.values():
            average.follow()


def _num_admitted(command: Command) -> int:
    """The samples that a command begins or continues."""
    if isinstance(command, Answer):
        return sum(reply.tokens is not None for reply in command.replies)
    return 0 if isinstance(command, Park) else len(command.ids)


ENGINE_GAPS = {"rollout_log_probs": "mismatch", "stale_log_probs": "staleness"}
"""Reserved fields of an update's sequences, and the metrics that they are compared under.

A sample that the present weights made alone shows how far the two engines are apart. A sample with
older tokens (schedule=partial) is counted apart, whole: its weights differ, too, and later tokens
may read the older weights' KV cache.
"""


def _sampled(sample: StoredSample, version: int, present: int) -> SampleFields:
    """Log-probabilities of the rollout engine, if it made the sample.

    `version` is the policy version of the oldest token, `present` that of the weights now.
    """
    if "log_probs" not in sample.tensors:
        return {}
    name = "rollout_log_probs" if version == present else "stale_log_probs"
    return {name: sample.tensors["log_probs"]}
