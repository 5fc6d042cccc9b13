"""Runs a pipeline plan: this rank's list of actions, for one model or several.

Messages between two ranks go out in the order of the sender's list, which the receiver knows, too.
There is a process group for each direction, since NCCL keeps the order of all messages between two
ranks of a group. So what is sent never waits for what is received. Rows have their own length,
which both ends know: no row is padded to another's.

Gradients of a model alone are reduced after a chunk's last pass: ranks of one FSDP group have one
list. Where their lists differ, FSDP's collectives would deadlock within them. So weights of several
models are gathered before the first action, and gradients are reduced after the last.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from hybridrl.layout.process_groups import shared_group, warm_up
from hybridrl.pipelines.problem import PassKind, PipelineAction, PipelinePlan
from hybridrl.system.activity import mark

ChunkForward = Callable[[torch.Tensor, int], torch.Tensor]
"""From ids or hidden states, and the micro-batch's number: hidden states, at last the loss [1]."""

ChunkEnded = Callable[[int], None]
"""Called with the number of a chunk after its last backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPipeline:
    """A model's pipeline as one rank sees it; `chunks` are its own, of a pipeline of others none.

    `hidden_shapes` [micro_batches] and `dtype` are those of the messages. `ids` are the rows.
    """

    ranks: Sequence[int]
    """The place of each chunk in the plan."""
    hidden_shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    ids: Sequence[torch.Tensor] = ()
    chunks: Mapping[int, ChunkForward]
    modules: Mapping[int, nn.Module]
    """The module of each chunk, whose weights a backward pass in halves leaves gradients."""
    trains: bool = True
    """Else it only scores: no graph is kept."""
    chunk_ended: ChunkEnded | None = None


@dataclass(frozen=True, slots=True)
class _Message:
    """What an action sends to the chunk after it, or before it."""

    model: int
    forward: bool
    chunk: int
    """The chunk that it is for."""
    micro_batch: int


@dataclass(slots=True)
class _Kept:
    """A micro-batch between forward and the end of backward on a chunk."""

    x: torch.Tensor
    out: torch.Tensor
    gradient: torch.Tensor | None = None
    halves: list[dict[str, Any]] | None = None


class PipelineGroups:
    """Process groups of all ranks for messages to later and to earlier ranks; collective.

    All models of a process have the same two.
    """

    def __init__(self, device: torch.device) -> None:
        ranks = list(range(dist.get_world_size()))
        self.later, self.earlier = shared_group(ranks, 1), shared_group(ranks, 2)
        self.device = device
        self._connected: set[tuple[int, int]] = set()
        warm_up([self.later, self.earlier], device)

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send the first messages between the ranks of these pairs; collective, once a pair.

        NCCL creates a communicator then, and both hosts wait for it. So all ranks take the pairs in
        one order: two that began with different ones would wait for ever.
        """
        own = dist.get_rank()
        for pair in sorted({(min(pair), max(pair)) for pair in pairs} - self._connected):
            self._connected.add(pair)
            for source, target in (pair, pair[::-1]) if own in pair else ():
                group, token = self.towards(source, target), torch.zeros(1, device=self.device)
                if own == source:
                    work = dist.isend(token, group=group, group_dst=target)
                else:
                    work = dist.irecv(token, group=group, group_src=source)
                assert work is not None
                work.wait()

    def towards(self, source: int, target: int) -> ProcessGroup:
        """The group of messages from one global rank to another."""
        return self.later if source < target else self.earlier


class PipelineExecutor:
    """One run of a plan on this rank. The ranks of the plan make one together."""

    def __init__(
        self,
        plan: PipelinePlan,
        pipelines: Sequence[LocalPipeline],
        groups: PipelineGroups,
        device: torch.device,
        ranks: Sequence[int],
    ) -> None:
        """`ranks` are the global ranks at the places of the plan, of which this one is one."""
        self.plan, self.pipelines, self.groups, self.device = plan, pipelines, groups, device
        self._ranks, self._rank = ranks, dist.get_rank()
        self._place = ranks.index(self._rank)
        steps = {pair for pipeline in pipelines for pair in pairwise(pipeline.ranks)}
        groups.connect((ranks[a], ranks[b]) for a, b in steps if a != b)
        self._kept: dict[tuple[int, int, int], _Kept] = {}
        self._local: dict[_Message, torch.Tensor] = {}
        """What a chunk of this rank leaves another one of it, and what has arrived."""
        self._coming = {
            place: deque(self._messages_from(place))
            for place in range(len(plan))
            if place != self._place
        }
        self._posted: dict[_Message, tuple[dist.Work, torch.Tensor]] = {}
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def run(self) -> None:
        """All of this rank's actions. Gradients are added to those of the chunks' weights."""
        own = self.plan[self._place]
        for position, action in enumerate(own):
            # The next message is on its way while this action computes.
            for near in own[position : position + 2]:
                self._post(near)
            self._act(action)
            while self._sent and self._sent[0][0].is_completed():
                self._sent.popleft()
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    # Passes

    def _act(self, action: PipelineAction) -> None:
        mark(action.kind.value, action.micro_batch)
        match action.kind:
            case PassKind.forward:
                self._forward(action)
            case PassKind.backward:
                self._backward(action)
            case PassKind.backward_input:
                self._backward_input(action)
            case PassKind.backward_weights:
                self._backward_weights(action)

    def _forward(self, action: PipelineAction) -> None:
        model, _, chunk, number = action
        pipeline = self.pipelines[model]
        if chunk == 0:
            x = pipeline.ids[number]
        else:
            x = self._take(_Message(model, True, chunk, number)).requires_grad_(pipeline.trains)
        with torch.set_grad_enabled(pipeline.trains):
            out = pipeline.chunks[chunk](x, number)
        if pipeline.trains:
            self._kept[model, chunk, number] = _Kept(x, out)
        if chunk + 1 < len(pipeline.ranks):
            self._give(_Message(model, True, chunk + 1, number), out.detach())

    def _gradient(self, action: PipelineAction) -> torch.Tensor | None:
        """The gradient of a chunk's output; None for the loss, whose gradient is 1."""
        model, _, chunk, number = action
        if chunk + 1 == len(self.pipelines[model].ranks):
            return None
        return self._take(_Message(model, False, chunk, number))

    def _backward(self, action: PipelineAction) -> None:
        model, _, chunk, number = action
        kept, gradient = self._kept.pop((model, chunk, number)), self._gradient(action)
        torch.autograd.backward(kept.out, gradient)
        self._give_gradient(action, kept.x.grad)
        del kept
        self._end(action)

    def _backward_input(self, action: PipelineAction) -> None:
        model, _, chunk, number = action
        kept = self._kept[model, chunk, number]
        kept.gradient = self._gradient(action)
        if chunk == 0:
            return  # it has no gradient of its input: the other half is all
        weights = self.pipelines[model].modules[chunk].parameters()
        gradient = None if kept.gradient is None else [kept.gradient]
        (dx,), kept.halves = stage_backward_input([kept.out], gradient, [kept.x], weights)
        self._give_gradient(action, dx)

    def _backward_weights(self, action: PipelineAction) -> None:
        model, _, chunk, number = action
        kept, pipeline = self._kept.pop((model, chunk, number)), self.pipelines[model]
        if kept.halves is None:
            torch.autograd.backward(kept.out, kept.gradient)
        else:
            stage_backward_weight(pipeline.modules[chunk].parameters(), kept.halves)
        del kept
        self._end(action)

    def _end(self, action: PipelineAction) -> None:
        """After a micro-batch's last pass over a chunk: micro-batches pass it in their order."""
        pipeline = self.pipelines[action.model]
        is_last = action.micro_batch == len(pipeline.hidden_shapes) - 1
        if is_last and pipeline.chunk_ended is not None:
            pipeline.chunk_ended(action.chunk)

    def _give_gradient(self, action: PipelineAction, gradient: torch.Tensor | None) -> None:
        if action.chunk > 0:
            assert gradient is not None
            message = _Message(action.model, False, action.chunk - 1, action.micro_batch)
            self._give(message, gradient)

    # Messages

    def _target(self, message: _Message) -> int:
        return self.pipelines[message.model].ranks[message.chunk]

    def _messages_from(self, place: int) -> Iterator[_Message]:
        """What a place sends to this one, in the order of its list."""
        for model, kind, chunk, number in self.plan[place]:
            last = len(self.pipelines[model].ranks) - 1
            message = None
            if kind is PassKind.forward and chunk < last:
                message = _Message(model, True, chunk + 1, number)
            elif kind in (PassKind.backward, PassKind.backward_input) and chunk > 0:
                message = _Message(model, False, chunk - 1, number)
            if message is not None and self._target(message) == self._place:
                yield message

    def _needed(self, action: PipelineAction) -> tuple[int, _Message] | None:
        """The place and the message that an action waits for."""
        model, kind, chunk, number = action
        ranks = self.pipelines[model].ranks
        if kind is PassKind.forward and chunk > 0:
            source, message = ranks[chunk - 1], _Message(model, True, chunk, number)
        elif kind in (PassKind.backward, PassKind.backward_input) and chunk + 1 < len(ranks):
            source, message = ranks[chunk + 1], _Message(model, False, chunk, number)
        else:
            return None
        return None if source == self._place else (source, message)

    def _post(self, action: PipelineAction) -> None:
        """Receive what an action waits for, and first what its source sends before."""
        needed = self._needed(action)
        if needed is None:
            return
        source, message = needed
        coming = self._coming[source]
        while message not in self._posted and message not in self._local:
            following = coming.popleft()
            pipeline = self.pipelines[following.model]
            shape = pipeline.hidden_shapes[following.micro_batch]
            buffer = torch.empty(shape, dtype=pipeline.dtype, device=self.device)
            peer = self._ranks[source]
            group = self.groups.towards(peer, self._rank)
            work = dist.irecv(buffer, group=group, group_src=peer)
            assert work is not None
            self._posted[following] = work, buffer

    def _take(self, message: _Message) -> torch.Tensor:
        if message in self._local:
            return self._local.pop(message)
        work, buffer = self._posted.pop(message)
        work.wait()
        return buffer

    def _give(self, message: _Message, tensor: torch.Tensor) -> None:
        target = self._target(message)
        if target == self._place:
            self._local[message] = tensor
            return
        peer = self._ranks[target]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self.groups.towards(self._rank, peer), group_dst=peer)
        assert work is not None
        self._sent.append((work, tensor))
