"""One rank where samples live: it generates, judges, hands samples on, and records them."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from hybridrl.config import Config, JudgeHome, KeptSamples
from hybridrl.data import Item
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Answer,
    Command,
    Computed,
    Finished,
    Parked,
    Resume,
    TargetsLoaded,
    generated_tensors,
)
from hybridrl.flow.graph import AnswersStage, MapStage, Stage
from hybridrl.flow.sample import LOSS_MASK, NO_VERSION, SampleId, TokenSpan
from hybridrl.rewards import JudgePool, RewardInput
from hybridrl.rewards.results import scalars_of
from hybridrl.telemetry.digests import ShardDigest
from hybridrl.telemetry.trace import TimeSpan
from hybridrl.workers.base_worker import BaseWorker, Published, Reply
from hybridrl.workers.data_plane import DataPlane, SamplesLost, with_parked
from hybridrl.workers.digests import digests_of_samples, load_tensors, save_tensors
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.generator import Generator, ParkedSample
from hybridrl.workers.pending_samples import PendingRecord, load_pending, save_pending
from hybridrl.workers.roles import reward_inputs, run_map
from hybridrl.workers.sample_writer import SampleFacts, SampleWriter
from hybridrl.workers.store import StoredSample
from hybridrl.workers.turns import SampleTexts, turn_texts

logger = logging.getLogger(__name__)


class SampleWorker(BaseWorker):
    """One rank of the pool that generates; the verifiers are here, too.

    A sample stays in `store` from the call that made it until `release`, or until it moves.
    """

    def __init__(
        self, rank: int, size: int, config: Config, model_path: str, data_plane: DataPlane
    ) -> None:
        super().__init__(rank, size, config, model_path, data_plane)
        self.number = config.cluster.pool_ranks[config.cluster.home].start + rank
        """This rank's number among those of the run."""
        self.verifiers: dict[str, JudgePool] = {}
        self.writer: SampleWriter | None = None

    @property
    def generator(self) -> Generator:
        """The rank's place in a rollout instance."""
        raise NotImplementedError

    def _add_judge(self, name: str) -> None:
        if name not in self.verifiers and self.config.home_of(name) is JudgeHome.rank:
            self.verifiers[name] = JudgePool(
                self.config.judge_of(name), self.config.sources_of(name), key=name
            )
            logger.debug("verifier %s made", name)

    def _begin_records(self) -> None:
        """Write samples, where the config asks for it."""
        if self.config.telemetry.samples is KeptSamples.all:
            folder = Path(self.config.run.dir)
            self.writer = SampleWriter(folder, self.number, self.generator.text_of)

    @dispatch(Dispatch.SAME)
    def close(self) -> Reply[None]:
        """End child processes and leave the process group."""
        if self.writer is not None:
            self.writer.close()
        self.generator.close()
        for verifier in self.verifiers.values():
            verifier.close()
        return super().close()

    # -- generation --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> Reply[Published[Advanced]]:
        """Obey commands and decode for a bounded number of steps.

        Parked samples go into the data plane, each rank's share under its `instance_rank`, and come
        out of it on the instance that resumes them. `instance` may be a wide one: then the rank is
        in it as long as it has samples.
        """
        self._before_decoding()
        # fetch what resumes here
        start = time.perf_counter()
        self.generator.join(instance)
        is_wide = instance != self.generator.instance
        commands, lost = self._import_parked(commands)
        fetch_s = time.perf_counter() - start
        # decode
        with self._span("wide decode" if is_wide else "generate"):
            outcome = self.generator.advance(commands, num_decode_steps, enough_turns)
        finished, work = outcome.finished, outcome.work
        if work.drafted:
            self._name_last_span(work.name(is_wide))
        # hand on what was parked
        start = time.perf_counter()
        parked, copies = self._exported(outcome.parked), self._exported(outcome.copies)
        put_s = time.perf_counter() - start
        # keys and values that came or went, with the time of their way
        work = replace(work, kv_bytes=sum(map(self._kv_bytes, commands)))
        kv_tokens = work.kv_tokens + sum(kv_tokens_of(c) for c in commands)
        if kv_tokens:
            kv_seconds = work.kv_seconds + fetch_s + put_s
            seconds = work.seconds + fetch_s + put_s
            work = replace(work, seconds=seconds, kv_tokens=kv_tokens, kv_seconds=kv_seconds)
        unfinished = self.generator.unfinished
        self.generator.leave()
        value = Advanced(
            instance,
            unfinished,
            tuple(finished),
            parked,
            lost,
            work=work,
            turns=tuple(outcome.turns),
            copies=copies,
        )
        ids = [event.id for event in finished]
        return self._reply(
            self._published(value, ids, generated_tensors(finished), with_items=True)
        )

    def _exported(self, parked: Sequence[Parked]) -> tuple[Parked, ...]:
        """These with references in place of the samples."""
        return tuple(
            replace(event, state=self.generator.export_parked(event, self.data_plane))
            for event in parked
        )

    def _before_decoding(self) -> None:
        """Have the device free for the rollout engine."""

    def _import_parked(
        self, commands: Sequence[Command]
    ) -> tuple[list[Command], tuple[SampleId, ...]]:
        """The commands with parked samples themselves in place of their references.

        Samples that are lost, since the rank that had put them has ended, leave the commands.
        Raises SamplesLost in an instance of several ranks, of which others may have had theirs.
        """
        imported, lost = list[Command](), dict[SampleId, None]()
        for command in commands:
            match command:
                case Resume():
                    try:
                        with self._span("fetch", len(command.ids)):
                            place = self.generator.instance_rank
                            imported.append(with_parked(command, place, self.data_plane))
                    except SamplesLost:
                        if self.config.rollout.layout.ranks > 1:
                            raise
                        lost |= dict.fromkeys(command.ids)
                case Answer() if not lost.keys().isdisjoint(command.ids):
                    replies = tuple(reply for reply in command.replies if reply.id not in lost)
                    imported.append(Answer(replies))
                case _:
                    imported.append(command)
        return imported, tuple(lost)

    def _kv_bytes(self, command: Command) -> int:
        """Bytes of keys and values that a command has brought from other ranks."""
        if not isinstance(command, Resume):
            return 0
        samples: list[ParkedSample] = [command.parked.state[id] for id in command.ids]
        others = [s.request.kv for s in samples if s.rank != self.number]
        return sum(kv.nbytes for kv in others if kv is not None)

    # -- per-sample stages -------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def load_targets(
        self, stage: AnswersStage, ids: tuple[SampleId, ...], items: tuple[Item, ...]
    ) -> Reply[TargetsLoaded]:
        """Make the dataset's targets the responses of new samples (supervised training)."""
        events = []
        for id, item in zip(ids, items, strict=True):
            target, trained = item.response(stage.column)
            tokens = torch.tensor([*item.prompt_ids, *target])
            num_prompt, num_target = len(item.prompt_ids), len(target)
            tensors = {"tokens": tokens, LOSS_MASK: torch.tensor(trained, dtype=torch.bool)}
            self.store.add(id, StoredSample(num_target, item, tensors, item.images))
            spans, more = written_spans(trained), (LOSS_MASK,)
            events.append(Finished(id, self.number, num_prompt, num_target, "stop", spans, more))
        return self._reply(TargetsLoaded(stage.name, tuple(events)))

    @dispatch(Dispatch.SAME, concurrent=True)
    def run_local_stage(
        self, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[dict[str, Any], ...]
    ) -> Reply[Computed]:
        """Run a verifier or a `map` on samples that live here, while the rank does other work.

        `scalars` are the driver's fields.
        """
        logger.debug("%s, samples: %d", stage.name, len(ids))
        start = time.time()
        if isinstance(stage, MapStage):
            new_scalars, tensors = run_map(stage, self.store, ids, scalars)
        else:
            assert stage.role is not None
            inputs = reward_inputs(self.store, self.generator.text_of, ids)
            results = self.verifiers[stage.role].score(inputs)
            new_scalars, tensors = scalars_of(stage.scalars, results), ()
        stop = time.time()
        value = Computed(stage.name, ids, new_scalars, tensors, seconds=stop - start)
        return Reply(value, (TimeSpan(stage.name, start, stop),), concurrent=True)

    @dispatch(Dispatch.SAME, concurrent=True)
    def reward_inputs(self, ids: tuple[SampleId, ...]) -> Reply[tuple[RewardInput, ...]]:
        """What a judge that the driver calls sees of samples that live here."""
        inputs = reward_inputs(self.store, self.generator.text_of, ids)
        return Reply(tuple(inputs), (), concurrent=True)

    # -- moving samples ------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def export_samples(
        self, moves: dict[int, tuple[SampleId, ...]], fields: tuple[str, ...] | None, keep: bool
    ) -> Reply[dict[int, list[Any]]]:
        """Put samples into the data plane for other ranks; references to parcels by receiver.

        `moves` lists ids by receiver. With `fields`, one parcel a receiver holds those tensors and
        no items. Without, a sample travels whole, with its item, in a parcel for each set of
        fields. The samples stay here only where `keep` says so.
        """
        references: dict[int, list[Any]] = {}
        with self._span("export", sum(map(len, moves.values()))):
            for receiver, ids in moves.items():
                parcels = (
                    self.store.pack_whole(ids) if fields is None else [self.store.pack(ids, fields)]
                )
                if not keep:
                    self.store.drop(ids)
                references[receiver] = [self.data_plane.put(parcel) for parcel in parcels]
        return self._reply(references)

    @dispatch(Dispatch.SAME, concurrent=True)
    def import_samples(self, ids: tuple[SampleId, ...], parcels: tuple[Any, ...]) -> Reply[None]:
        """Store tensors of `ids` that other ranks have exported, in `parcels` among others.

        Runs at any time: stages import their samples with their own call.
        """
        logger.debug("import, samples: %d", len(ids))
        start = time.time()
        self._accept(parcels, ids)
        return Reply(None, (TimeSpan("fetch", start, time.time()),), concurrent=True)

    # -- looking in --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def texts(self, ids: tuple[SampleId, ...]) -> Reply[dict[SampleId, SampleTexts]]:
        """Prompt, response and turns of the samples that live here, for the record."""
        decode = self.generator.text_of
        texts = {}
        for id in ids:
            sample = self.store[id]
            prompt = sample.tensors["tokens"][: -sample.response_tokens or None]
            texts[id] = SampleTexts(
                self.tokenizer.decode(prompt),
                decode(sample.response_ids),
                turn_texts(sample.response_ids, sample.tensors, decode),
            )
        return self._reply(texts)

    @dispatch(Dispatch.SAME)
    def record_samples(
        self, step: int, phase: str, samples: tuple[SampleFacts, ...]
    ) -> Reply[None]:
        """Have samples that live here written to the run's Parquet files, while the rank works.

        They may be released at once. Raises OSError where those of an earlier step did not fit.
        """
        assert self.writer is not None, "telemetry.samples says that none are written"
        with self._span("record", len(samples)):
            self.writer.put(step, phase, [(facts, self.store[facts.id]) for facts in samples])
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def finish_records(self) -> Reply[None]:
        """Wait until the samples of all steps are in their files; raises OSError."""
        with self._span("record"):
            self._finish_records()
        return self._reply(None)

    def _finish_records(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    @dispatch(Dispatch.SAME)
    def digest_samples(
        self, ids: tuple[SampleId, ...]
    ) -> Reply[dict[SampleId, dict[str, ShardDigest]]]:
        """Digests of all tensors of the samples that live here."""
        with self._span("digest", len(ids)):
            return self._reply(digests_of_samples(self.store, ids))

    @dispatch(Dispatch.SAME)
    def save_tensors(self, folder: str, ids: tuple[SampleId, ...]) -> Reply[None]:
        """Write all tensors of the samples that live here into a file of this rank."""
        with self._span("save", len(ids)):
            save_tensors(Path(folder) / f"tensors_{self.rank}.safetensors", self.store, ids)
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def load_tensors(self, folder: str, share: dict[SampleId, tuple[int, Item]]) -> Reply[None]:
        """Store samples of `save_tensors` here: response tokens and items by id."""
        with self._span("load", len(share)):
            load_tensors(Path(folder), self.store, share)
        return self._reply(None)

    # -- checkpoints -------------------------------------------------------------------------

    @dispatch(Dispatch.PER_RANK)
    def save_pending(self, path: str, share: tuple[PendingRecord, ...]) -> Reply[list[SampleId]]:
        """Write this rank's share of the pending samples; answers with those that are lost."""
        with self._span("save"):
            lost = save_pending(Path(path), self.rank, share, self.store, self.data_plane)
        return self._reply(lost)

    @dispatch(Dispatch.PER_RANK)
    def load_pending(self, path: str, share: tuple[PendingRecord, ...]) -> Reply[Any]:
        """Load this rank's share of the pending samples; answers with a reference to the parked."""
        with self._span("load"):
            parked = load_pending(Path(path), share, self.store, self.generator)
        return self._reply(self.data_plane.put(parked) if parked else None)


def written_spans(trained: Sequence[bool]) -> tuple[TokenSpan, ...]:
    """Spans of a response that no policy made, from whether each token is trained."""
    spans, start = [], 0
    for is_trained, run in groupby(trained):
        stop = start + len(list(run))
        spans.append(TokenSpan(start, stop, NO_VERSION, is_trained))
        start = stop
    return tuple(spans)


def kv_tokens_of(command: Command) -> int:
    """Tokens whose keys and values come with a command."""
    if not isinstance(command, Resume):
        return 0
    requests = [command.parked.state[sample].request for sample in command.ids]
    return sum(len(r.prompt_ids) + len(r.response_ids) for r in requests if r.kv is not None)
