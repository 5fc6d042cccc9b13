"""The loop of a server: clients' requests in turn on the ranks, in a thread beside the HTTP side.

    submit -> inbox -> training's queue, in the order of arrival  -> TRAIN
                    -> prompts that training shards score         -> TRAIN, then as samples
                    -> samples waiting, by their snapshot         -> GENERATE with that snapshot

The ranks are in one place at a time (`turns`). Work is one request of training, or a few decode
steps of all samples of a snapshot. So new requests for the snapshot that decodes join its batch.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from hybridrl.config import Config, ConfigError
from hybridrl.config.serve import ServeConfig
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.preflight.memory_plan import sizes_of_run
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.launcher import Launcher
from hybridrl.runtime.launchers import launched
from hybridrl.serving.checkpoints import CheckpointFiles
from hybridrl.serving.history import ServerHistory
from hybridrl.serving.prepare import PreparedServer, prepare_server
from hybridrl.serving.prompt_scores import PromptScoring
from hybridrl.serving.ranks import ServingRanks
from hybridrl.serving.requests import (
    Checkpoint,
    CheckpointPath,
    ClientAnswer,
    ClientRequest,
    Completed,
    Delete,
    DropSamples,
    Expire,
    Refused,
    SampleRequest,
    Save,
    ServedModel,
    ServerFailed,
    Unload,
)
from hybridrl.serving.sampling import ClientSampling, OpenSampling
from hybridrl.serving.snapshots import Snapshot, Snapshots
from hybridrl.serving.training import ClientTraining, ModelRequest
from hybridrl.serving.turns import TRAIN, next_place
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.rundata import last_step
from hybridrl.workers.serving import ServingWorker

logger = logging.getLogger(__name__)

SERVER_ERRORS = (WorkerError, RayStartError, OSError)
"""The errors that end a server after its start, each with one line."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request of training that waits since `since`, for its `future`."""

    request: ModelRequest
    future: "Future[ClientAnswer]"
    since: float


class Turns:
    """All work that clients wait for, and the place where the ranks are.

    Invariant: every request's future is in one place: in `training`, in `unscored`, in `waiting`
    under the version of its snapshot, with `sampling`, which has begun it, or in `leaving`.
    """

    def __init__(
        self,
        ranks: ServingRanks,
        served: ServedModel,
        run_dir: Path,
        settings: ServeConfig,
        history: ServerHistory,
        decode_steps: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks, self.served, self._settings, self._now = ranks, served, settings, now
        self.history, self._decode_steps = history, decode_steps
        self.files = CheckpointFiles(run_dir)
        self.snapshots = Snapshots(settings.snapshots)
        self.clients = ClientTraining(ranks, served, self.files, self.snapshots)
        self.sampling = ClientSampling(ranks, served.sampler_scores)
        self.training: deque[Ticket] = deque()
        self.unscored = PromptScoring(self.clients)
        self.waiting: dict[int, list[OpenSampling]] = {}
        self.leaving: deque[tuple[DropSamples, Future[ClientAnswer]]] = deque()
        self.place = TRAIN
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}  # of the snapshots that are to generate
        self._left_training = 0.0

    def take(self, request: ClientRequest, future: "Future[ClientAnswer]") -> None:
        """Let a request wait for its turn, or answer it at once; an error fails it alone."""
        with _failures(future):
            match request:
                case SampleRequest():
                    self._take_sample(request, future)
                case DropSamples():
                    self.leaving.append((request, future))
                case Delete():
                    self.files.delete(CheckpointPath.parse(request.path))
                    self.snapshots.detach(request.path)
                    future.set_result(Completed())
                case Expire():
                    self.files.expire(CheckpointPath.parse(request.path), request.ttl_s)
                    future.set_result(Completed())
                case _:
                    if isinstance(request, Unload):
                        self._abandon(request.model)
                    self.training.append(Ticket(request, future, self._now()))

    def _abandon(self, model: str) -> None:
        """Refuse what waits for a model whose client has left."""
        for ticket in [x for x in self.training if x.request.model == model]:
            self.training.remove(ticket)
            ticket.future.set_exception(Refused(f"{model}: the session has ended"))

    def _take_sample(self, request: SampleRequest, future: "Future[ClientAnswer]") -> None:
        snapshot, most = self._snapshot(request.weights), request.settings.max_tokens
        if most is None:
            most = self.served.max_tokens - len(request.prompt)
        snapshot.open += 1
        self.snapshots.sampled(snapshot)
        number = next(self._numbers)
        one = OpenSampling(request, future, snapshot, most, number, self._now())
        if one.wants_prompt and not self.served.sampler_scores:
            self.unscored.add(one)
        else:
            self._wait(one)

    def _wait(self, one: OpenSampling) -> None:
        """Let a request wait until its snapshot generates."""
        version = one.snapshot.version
        self.waiting.setdefault(version, []).append(one)
        self._since.setdefault(version, self._now())

    def _snapshot(self, text: str | None) -> Snapshot:
        """The snapshot of a path, which may have to be read before it generates."""
        if (snapshot := self.snapshots.get(text)) is not None:
            return snapshot
        if text is None:
            return self.snapshots.add(None, None, here=False)
        path = CheckpointPath.parse(text)
        if self.files.has(path):
            self.clients.check_source(text)
            return self.snapshots.add(text, self.files.folder(path), here=False)
        if text in self.snapshots.gone:
            raise Refused(
                f"{path} is gone: serve.snapshots={self.snapshots.most} keeps the last sampled"
                " ones; save_weights_for_sampler with a name writes files"
            )
        raise Refused(f"{path}: there is no such checkpoint")

    # -- work ----------------------------------------------------------------------------------

    def work(self) -> bool:
        """Do the next piece of work; False where there is none."""
        if self.leaving:
            self._drop_samples(self.leaving[0][0])
            self.leaving.popleft()[1].set_result(Completed())
            return True
        since = dict(self._since)
        if not self.snapshots.has_room:  # those that are here go on, until one has been answered
            since = {version: at for version, at in since.items() if self.snapshots[version].here}
        first = self._first_of_training()
        if first is not None:
            since[TRAIN] = max(first.since, self._left_training)
        if not since:
            return False
        place = next_place(self.place, since, self._now(), self._settings.patience_s)
        if place != self.place:
            try:
                self._enter(place, first)
            except Refused as refused:
                self._refuse(self.waiting.pop(place), refused)  # none of them has begun
                return True
        if place != TRAIN:
            self._generate(self.snapshots[place])
        elif isinstance(first, Ticket):
            self._train(first)
            self.training.remove(first)  # a request whose run raises is still here, to be failed
        elif first is not None:
            self._score(self.unscored.with_it(first))
        return True

    def _first_of_training(self) -> Ticket | OpenSampling | None:
        """What has waited longest for TRAIN, of what brings no snapshot or has room for it."""
        has_room = self.snapshots.has_room
        tickets = (x for x in self.training if has_room or not _brings_snapshot(x.request))
        prompts = (x for x in self.unscored if has_room or x.snapshot.here)
        first = next(tickets, None), next(prompts, None)
        return min((one for one in first if one is not None), key=lambda x: x.since, default=None)

    def _is_lost(self, snapshot: Snapshot) -> bool:
        """Whether the files of a snapshot are gone."""
        if snapshot.path is None:
            return False
        return snapshot.folder is None or not self.files.has(CheckpointPath.parse(snapshot.path))

    def _enter(self, place: int, first: Ticket | OpenSampling | None) -> None:
        """Bring the ranks to another place, in TRAIN for the `first` there.

        What is left at the old one waits from now on. Raises Refused for a snapshot that cannot be
        read.
        """
        left, now = self.place, self._now()
        if place != TRAIN and not self.snapshots[place].here:
            self._read(self.snapshots[place])
        if left == TRAIN:
            self._left_training = now
        elif left in self._since:
            self._since[left] = now
        if place == TRAIN:
            self.ranks.ask(ServingWorker.train)
        else:
            self.ranks.ask(ServingWorker.generate_with, place)
        self.place = place
        if place != TRAIN:
            self.history.switched(self.snapshots[place].model)
        elif isinstance(first, Ticket):
            self.history.switched(first.request.model)
        elif first is not None:
            self.history.switched(first.snapshot.model)

    def _read(self, snapshot: Snapshot) -> None:
        """Have the ranks read a snapshot, which they do in TRAIN."""
        if self._is_lost(snapshot):
            raise Refused(f"{snapshot.path}: the checkpoint has been deleted or replaced")
        if self.place != TRAIN:
            self.ranks.ask(ServingWorker.train)
            self.place = TRAIN
        self.clients.drop_snapshots(coming=1)
        folder = None if snapshot.folder is None else str(snapshot.folder)
        if error := self.ranks.ask(ServingWorker.read_snapshot, snapshot.version, folder):
            raise Refused(f"{snapshot.path or 'the base model'} cannot be read: {error}")
        snapshot.here = True

    def _train(self, ticket: Ticket) -> None:
        begun = self._now()
        with _refusals(ticket.future):
            answer = self.clients.run(ticket.request)
            self.clients.drop_snapshots()  # an unloaded model's
            self.history.trained(ticket.request, answer, begun - ticket.since)
            ticket.future.set_result(answer)

    def _score(self, requests: list[OpenSampling]) -> None:
        """Score the prompts of requests for one snapshot, which then wait for it to generate."""
        snapshot = requests[0].snapshot
        try:
            if not snapshot.here:
                self._read(snapshot)
        except Refused as refused:
            self.unscored.remove(requests)
            self._refuse(requests, refused)
            return
        self.unscored.score(requests)
        self.unscored.remove(requests)
        for one in requests:
            self._wait(one)

    def _generate(self, snapshot: Snapshot) -> None:
        """Some decode steps of a snapshot's samples, new ones with them."""
        new = self.waiting.pop(snapshot.version, [])
        self.history.began(new, self._now())
        self.sampling.begin(new)
        done = self.sampling.draw(snapshot, self._decode_steps)
        self.history.sampled(done)
        self._close(done)

    def _drop_samples(self, request: DropSamples) -> None:
        """Fail the requests of a session for samples, begun or not."""
        session = request.session
        dropped = [one for one in self.sampling.open() if one.request.session == session]
        if dropped:
            self.sampling.drop(dropped)
        for version, waiting in self.waiting.items():
            dropped += [one for one in waiting if one.request.session == session]
            self.waiting[version] = [one for one in waiting if one.request.session != session]
        unscored = [one for one in self.unscored if one.request.session == session]
        self.unscored.remove(unscored)
        dropped += unscored
        self._refuse(dropped, Refused(f"session {session}: {request.reason}"))

    def _refuse(self, requests: Sequence[OpenSampling], refused: Refused) -> None:
        """Refuse requests for samples of which the ranks have none."""
        for one in requests:
            one.future.set_exception(refused)
        self._close(requests)

    def _close(self, requests: Iterable[OpenSampling]) -> None:
        """Note that requests are answered; their snapshots may go, of which no sample is wanted."""
        begun = {one.snapshot.version for one in self.sampling.open()}
        for snapshot in (one.snapshot for one in requests):
            snapshot.open -= 1
            if not (self.waiting.get(snapshot.version) or snapshot.version in begun):
                self._since.pop(snapshot.version, None)
            if not snapshot.open:
                self.waiting.pop(snapshot.version, None)
                self.snapshots.closed(snapshot)
        self.clients.drop_snapshots()  # some may have no path any more

    def open(self) -> Iterator["Future[ClientAnswer]"]:
        """The futures of all requests that are not answered."""
        for ticket in self.training:
            yield ticket.future
        for _, future in self.leaving:
            yield future
        yield from (one.future for one in self.unscored)
        for requests in (*self.waiting.values(), self.sampling.open()):
            for one in requests:
                yield one.future


class ServeLoop:
    """See `ServeBackend`: the ranks of a server, and the thread that asks them.

    States: made by `start`, which returns once the ranks are up -> `submit`, any number of times ->
    `close`, or the death of a rank. Then every request fails with one line.
    """

    info: ServedModel
    failure: "Future[str]"

    def __init__(self, config: Config, prepared: PreparedServer, launcher: Launcher) -> None:
        self.info, self.run_dir = prepared.served, Path(config.run.dir)
        self._config, self._prepared, self._launcher = config, prepared, launcher
        self._inbox: queue.SimpleQueue[tuple[ClientRequest, Future[ClientAnswer]] | None]
        self._inbox = queue.SimpleQueue()
        self._closing, self._ended = threading.Event(), threading.Event()
        self._ready: Future[None] = Future()
        self.failure = Future()
        self._done: Future[None] = Future()
        self._launched = ExitStack()  # what `start` has entered
        self._thread = threading.Thread(target=self._run, name="serve loop", daemon=True)

    @classmethod
    def start(cls, config: Config) -> Self:
        """Check the config and start its ranks. Raises ConfigError, and what ranks fail with.

        The launcher starts in the caller's thread: Ray and we set handlers of signals, which only
        the main thread can.
        """
        prepared = prepare_server(config)
        with ExitStack() as stack:
            launcher = stack.enter_context(launched(config.cluster, Path(config.run.dir) / "logs"))
            loop = cls(config, prepared, launcher)
            loop._thread.start()
            try:
                loop._ready.result()
            except BaseException:  # a signal: the thread ends what it has started
                loop._closing.set()
                loop._inbox.put(None)
                loop._thread.join()
                raise
            loop._launched = stack.pop_all()
        return loop

    async def submit(self, request: ClientRequest) -> ClientAnswer:
        """See `ServeBackend`."""
        future: Future[ClientAnswer] = Future()
        future.set_running_or_notify_cancel()  # a client that leaves takes no answer away
        self._inbox.put((request, future))
        if self._ended.is_set():  # nobody will read it
            self._fail_inbox()
        return await asyncio.wrap_future(future)

    def listed(self, model: str | None = None) -> tuple[Checkpoint, ...]:
        """See `ServeBackend`."""
        return CheckpointFiles(self.run_dir).all(model)

    async def close(self) -> None:
        """See `ServeBackend`. The call that runs is answered, all other requests fail."""
        self._closing.set()
        self._inbox.put(None)
        await asyncio.wrap_future(self._done)  # no thread that waits keeps the process
        await asyncio.to_thread(self._launched.close)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        config, prepared, turns = self._config, self._prepared, None
        try:
            with self._telemetry() as telemetry:
                path = prepared.model_path
                ranks = ServingRanks(
                    self._launcher, config, path, _no_span, lambda rank, reading: None, serves=True
                )
                try:
                    ranks.setup(sizes_of_run(config, prepared.graph, path, pads=0))
                    history = ServerHistory(telemetry, last_step(self.run_dir))
                    turns = Turns(
                        ranks,
                        self.info,
                        self.run_dir,
                        config.serve,
                        history,
                        config.rollout.decode_steps,
                    )
                    self._ready.set_result(None)
                    self._serve(turns)
                    ranks.close()
                finally:
                    ranks.kill()
        except Exception as error:
            line = " ".join(str(error).split()) or type(error).__name__
            if not self._ready.done():
                self._ready.set_exception(error)
            elif not isinstance(error, (*SERVER_ERRORS, ConfigError)):
                logger.exception("the server has failed")
            self.failure.set_result(line)
        finally:
            for future in turns.open() if turns is not None else ():
                self._fail(future)
            self._ended.set()  # before the inbox is read for the last time
            self._fail_inbox()
            self._done.set_result(None)

    def _telemetry(self) -> Telemetry:
        """The records of the run; those of an earlier server are continued."""
        settings = replace(self._config.telemetry, progress=False)  # what it prints is its address
        return Telemetry(self.run_dir, settings, total_steps=0)

    def _serve(self, turns: Turns) -> None:
        """Take requests and work on them until `close`."""
        busy = False
        while not self._closing.is_set():
            try:
                while item := self._inbox.get(block=not busy):
                    turns.take(*item)
                    busy = True
            except queue.Empty:
                pass
            if not self._closing.is_set():
                busy = turns.work()

    def _fail_inbox(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                self._fail(item[1])

    def _fail(self, future: "Future[ClientAnswer]") -> None:
        if not future.done():
            line = self.failure.result() if self.failure.done() else "the server has ended"
            future.set_exception(ServerFailed(line))


def _brings_snapshot(request: ModelRequest) -> bool:
    """Whether the ranks keep a snapshot more after a request."""
    return isinstance(request, Save) and request.kind == "sampler_weights"


@contextmanager
def _failures(future: "Future[ClientAnswer]") -> Iterator[None]:
    """Within, any error becomes the answer: nothing is asked of ranks, whose death ends all."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Refused):
            logger.exception("a request failed before its turn")
        future.set_exception(error)


@contextmanager
def _refusals(future: "Future[ClientAnswer]") -> Iterator[None]:
    """Within, what is the client's fault becomes the answer."""
    try:
        yield
    except Refused as refused:
        future.set_exception(refused)


def _no_span(lane: str, span: object, step: int) -> None:
    """Nobody records a server's spans."""
