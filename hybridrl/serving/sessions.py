"""What clients have: sessions with their models and samplers, until they finish or fall silent."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.futures import Futures, RequestOrder
from hybridrl.serving.requests import Refused


class Unknown(Refused):
    """A name that this server has not, or no more; `code` is HTTP's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class SessionModel:
    """A model of a client. `created` is the id of the request that made it, `used` a time."""

    id: str
    order: RequestOrder
    created: str
    used: float
    metadata: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class ClientSampler:
    """What a client samples from: a snapshot's path, or None for the base model.

    `number` is the client's for it; `ids` are those of its requests, by their numbers.
    """

    id: str
    number: int
    weights: str | None
    ids: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Session:
    """A client. `seen` is the time of its last sign of life; `ended` says why it has none.

    It also lives while some of its `polls` are open: it waits for an answer.
    """

    id: str
    seen: float
    facts: dict[str, Any]
    polls: int = 0
    models: dict[str, SessionModel] = field(default_factory=dict)
    samplers: dict[str, ClientSampler] = field(default_factory=dict)
    ended: str | None = None


class Sessions:
    """All sessions of a server since it started, the ended ones by name alone."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def create(self, facts: dict[str, Any]) -> Session:
        """A new session; `facts` are the client's own about it."""
        session = Session(secrets.token_hex(8), self._clock(), facts)
        self._sessions[session.id] = session
        return session

    @property
    def open(self) -> list[Session]:
        """The sessions that have not ended."""
        return [session for session in self._sessions.values() if session.ended is None]

    def get(self, session_id: str) -> Session:
        """An open session, which thereby has given a sign of life. Raises Unknown."""
        self.check_known(session_id)
        session = self._sessions[session_id]
        if session.ended is not None:
            raise Unknown(410, f"session {session_id}: {session.ended}")
        session.seen = self._clock()
        return session

    def check_known(self, session_id: str) -> None:
        """Raise Unknown for a session that has never been, open or ended."""
        if session_id not in self._sessions:
            raise Unknown(
                404, f"session {session_id:.80}: unknown to this server, which may be new"
            )

    @contextmanager
    def polling(self, session_id: str) -> Iterator[None]:
        """Within, a client polls, which is a sign of life to the end, if its session is known."""
        session = self._sessions.get(session_id)
        if session is None:
            yield
            return
        session.polls += 1
        try:
            yield
        finally:
            session.polls -= 1
            session.seen = self._clock()

    def model(self, model_id: str) -> SessionModel:
        """A model of an open session. Raises Unknown."""
        session = self.get(model_id.partition(":")[0])
        if model_id not in session.models:
            raise Unknown(404, f"model {model_id:.120}: this session has none of that name")
        model = session.models[model_id]
        model.used = session.seen
        return model

    def sampler(self, sampler_id: str) -> ClientSampler:
        """A sampler of an open session. Raises Unknown."""
        session = self.get(sampler_id.partition(":")[0])
        if sampler_id not in session.samplers:
            raise Unknown(404, f"sampler {sampler_id:.120}: this session has none of that name")
        return session.samplers[sampler_id]

    def add_model(
        self, session: Session, model_id: str, futures: Futures, created: str, metadata: Any
    ) -> SessionModel:
        """A model of a session, which takes requests from now on."""
        model = SessionModel(
            model_id, RequestOrder(futures, session.id), created, self._clock(), metadata
        )
        session.models[model_id] = model
        return model

    def add_sampler(self, session: Session, number: int, weights: str | None) -> ClientSampler:
        """The sampler with a client's number, which is made once.

        Raises Refused for a number that is there with other weights.
        """
        sampler_id = f"{session.id}:sample:{number}"
        sampler = ClientSampler(sampler_id, number, weights)
        known = session.samplers.setdefault(sampler_id, sampler)
        if known.weights != weights:
            raise Refused(f"sampling_session_seq_id={number}: it has the weights {known.weights}")
        return known

    def end(self, session: Session, reason: str) -> list[str]:
        """End a session; returns the names of the models that it leaves."""
        session.ended, session.facts = reason, {}
        names = list(session.models)
        for model in session.models.values():
            model.order.end(f"session {session.id}: {reason}")
        session.models.clear()
        session.samplers.clear()
        return names

    def silent(self, idle_s: float) -> list[Session]:
        """The open sessions without a sign of life for that many seconds."""
        now = self._clock()
        return [each for each in self.open if not each.polls and now - each.seen > idle_s]
