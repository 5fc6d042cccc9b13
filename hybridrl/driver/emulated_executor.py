"""The executor of emulated ranks: prompts that say nothing of lengths, modeled conversations."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from hybridrl.config import Config
from hybridrl.costs.instance import Costs
from hybridrl.data import Item
from hybridrl.driver.async_calls import Calling, answers_of
from hybridrl.driver.episodes import Episodes
from hybridrl.driver.load_balance import RankWork
from hybridrl.driver.ray_executor import OnSwitch, RayExecutor
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.conversations import ModeledTurn, reply_to
from hybridrl.flow.executor import Compared, EpisodeReply, TurnEnded
from hybridrl.flow.graph import Graph, UpdateStage
from hybridrl.flow.lengths import PromptKey
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.runtime.emulated_launcher import EmulatedLauncher
from hybridrl.system.node_info import NodeInfo
from hybridrl.workers.emulation import (
    emulated_conversations,
    emulated_workload,
    scaled_costs,
)
from hybridrl.workers.rank_calls import Reference

_DRIVER = -1  # the rank of a wait in the driver


class EmulatedExecutor(RayExecutor):
    """See `RayExecutor`; lengths and turns are those of `cluster.lengths` and `cluster.turns`."""

    def __init__(
        self,
        group: WorkerGroup,
        config: Config,
        on_switch: OnSwitch,
        works: Mapping[str, RankWork],
        graph: Graph,
    ) -> None:
        episodes = None
        if config.cluster.turns is not None:
            assert isinstance(group.launcher, EmulatedLauncher)
            episodes = EmulatedEpisodes(config, graph, group.launcher)
        super().__init__(group, config, on_switch, works, episodes)
        groups = emulated_workload(config, graph.group_size).groups
        self._prompt_ids = range(round(fmean(group.prompt_tokens for group in groups)))

    def counted_costs(
        self, graph: Graph, model_path: str, nodes: Sequence[NodeInfo]
    ) -> Costs | None:
        """The seconds of the device that ranks imitate."""
        return scaled_costs(self.config)

    def device_name(self, nodes: Sequence[NodeInfo]) -> str:
        """Scales of seconds that a text names say nothing of a device."""
        return "emulated"

    def compare(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        """Ranks that compute nothing have nothing to compare."""
        self._rounds.ready(Compared({}))

    def key_of(self, item: Item) -> PromptKey:
        """The prompt as a length ranker may know it: no length follows from its text.

        It has as many tokens as prompts of `cluster.lengths` have on average. So a run knows of
        prompts what its plan knows, and packs the same ones.
        """
        return PromptKey((item.source, item.prompt), item.source, self._prompt_ids)


class EmulatedEpisodes(Episodes):
    """Answers as the conversations of `hybridrl plan schedule` do; there are no environments.

    A sample's turns, replies and waits follow from its identity, as on its rank. A wait begins when
    the driver knows of the turn.
    """

    def __init__(self, config: Config, graph: Graph, launcher: EmulatedLauncher) -> None:
        super().__init__(config, None, launcher)
        conversations = emulated_conversations(config)
        assert conversations is not None, "cluster.turns"
        self._conversations, self._sleeping = conversations, launcher
        self._workload = emulated_workload(config, graph.group_size)
        self._turns: dict[SampleId, tuple[tuple[ModeledTurn, ...], str]] = {}
        self._num_turns: dict[SampleId, int] = {}

    def start(self, ids: Iterable[SampleId], item: Item, max_new_tokens: int) -> None:
        """See `Episodes`."""
        for id in ids:
            modeled = self._conversations.of(id, self._workload.length_of(id))
            self._turns[id], self._num_turns[id] = modeled.cut_at(max_new_tokens), 0

    @property
    def ids(self) -> frozenset[SampleId]:
        """See `Episodes`."""
        return frozenset(self._turns)

    def _answer(self, ended: TurnEnded) -> Calling[EpisodeReply | None]:
        """The model's reply, after its wait."""
        modeled = self._turns[ended.id]
        turns, finish = modeled
        turn = turns[self._num_turns[ended.id]]
        self._num_turns[ended.id] += 1
        self._counts.turns += 1
        reply = reply_to(ended, turn, self._num_turns[ended.id], finish)
        rings: Reference[None] = self._sleeping.after(turn.wait_s)
        yield from answers_of({rings: _DRIVER})
        if self._turns.get(ended.id) is not modeled:  # the sample has left meanwhile
            return None
        self._counts.reply_tokens += len(reply.tokens or ())  # of the step that it comes in
        if reply.tokens is None:
            self._counts.ended += 1
            self.end([ended.id])
        return reply

    def end(self, ids: Iterable[SampleId]) -> None:
        """See `Episodes`."""
        for id in ids:
            self._turns.pop(id, None)
            self._num_turns.pop(id, None)

    def close(self) -> None:
        """There are no processes."""
