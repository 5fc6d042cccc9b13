"""Tinker's training API as routes of aiohttp: what a client sends, in; what the loop answers, out.

A request that runs is answered at once with an id (`futures.py`). One that is refused gets an id as
well, whose answer is the refusal: the SDK counts a model's requests before it sends them, so that
an HTTP error would leave a gap that the next request waits behind.
"""

import hmac
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from aiohttp import web

from hybridrl.serving import payloads, wire
from hybridrl.serving.futures import LARGEST_SEQ, Futures, MakeReply, WireReply, refuser
from hybridrl.serving.payloads import integer, optional, required
from hybridrl.serving.requests import (
    CheckpointPath,
    ClientRequest,
    CreateModel,
    DropSamples,
    LossOutputs,
    Refused,
    Samples,
    Saved,
    ServeBackend,
    ServedModel,
    ServerFailed,
    Stepped,
    Unload,
)
from hybridrl.serving.sessions import Session, Sessions, Unknown

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROTOBUF = "application/x-protobuf"
CLIENT_CONFIG = {"pjwt_auth_enabled": False, "credential_default_source": "api_key"}
"""Flags of the SDK whose defaults would not do; the others are off."""


class TooLarge(Exception):
    """A body beyond the limit; `beginning` is its first bytes."""

    def __init__(self, beginning: bytes, size: int, limit: int) -> None:
        super().__init__(f"a body of {size} bytes: at most {limit} (serve.largest_body)")
        self.beginning = beginning


class Api:
    """The routes over a backend; the sessions and futures are theirs.

    `on_failure` is called with the line of a failure that ends the server.
    """

    def __init__(
        self,
        backend: ServeBackend,
        key: str,
        *,
        largest_body: int,
        on_failure: Callable[[str], None],
        sessions: Sessions,
        poll_s: float,
    ) -> None:
        self.backend = backend
        self.sessions = sessions
        self._on_failure = on_failure
        self.futures = Futures(self.fail, poll_s)
        self._key = key.encode()
        self._largest_body = largest_body
        self._ended: str | None = None

    def routes(self) -> list[web.RouteDef]:
        """The routes of sessions, training and sampling."""
        posts: Mapping[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "create_sampling_session": self._create_sampler,
            "asample": self._asample,
            "retrieve_future": self._retrieve,
            **dict.fromkeys(READERS, self._in_turn),
        }
        gets: Mapping[str, Handler] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }
        return [
            *(web.post(f"/api/v1/{name}", handler) for name, handler in posts.items()),
            *(web.get(f"/api/v1/{name}", handler) for name, handler in gets.items()),
        ]

    def refuse_new(self, line: str) -> None:
        """Fail every request that comes from now on with this line."""
        self._ended = self._ended or line

    def fail(self, line: str) -> None:
        """Fail all requests, and every later one, with this line."""
        self.refuse_new(line)
        self.futures.fail_all(line)
        self._on_failure(line)

    async def ask(self, request: ClientRequest) -> Any:
        """The backend's answer. Raises Refused or ServerFailed."""
        if self._ended is not None:
            raise ServerFailed(self._ended)
        return await self.backend.submit(request)

    def end_session(self, session: Session, reason: str) -> None:
        """End a session: drop its samples, and free its models behind what of them runs."""
        self._detach(DropSamples(session.id, reason), session.id)
        for model in self.sessions.end(session, reason):
            self._detach(Unload(model), session.id)
        self.futures.forget(session.id)

    def end_silent(self, idle_s: float) -> None:
        """End the sessions without a sign of life for that many seconds."""
        for session in self.sessions.silent(idle_s):
            logger.warning("session %s: silent for %g s, its models are freed", session.id, idle_s)
            self.end_session(session, f"no sign of life for {idle_s:g} s (serve.idle_s)")

    def _detach(self, request: ClientRequest, session: str) -> str:
        """Start a request that waits for no other; returns its id."""

        async def run() -> WireReply:
            await self.ask(request)
            return {}

        pending = self.futures.open(session)
        self.futures.start(pending, run)
        return pending.id

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and tell an error as one line of JSON."""
        key = request.headers.get("X-API-Key", "").encode(errors="surrogateescape")
        try:
            if not hmac.compare_digest(key, self._key):
                raise Unknown(401, "X-API-Key: not the key of this server (TINKER_API_KEY)")
            return await handler(request)
        except Unknown as error:
            return _error(error.code, error)
        except TooLarge as error:
            return _error(413, error)
        except Refused as error:
            return _error(400, error)
        except ServerFailed as error:
            return _error(503, error)
        except web.HTTPException:
            raise
        except Exception as error:
            logger.exception("a request failed")
            return _error(500, error)

    async def body(self, request: web.Request) -> bytes:
        """The bytes of a request. Raises TooLarge, after all of it has been read past."""
        kept, size = bytearray(), 0
        async for piece in request.content.iter_any():
            size += len(piece)
            if size <= self._largest_body:
                kept += piece
        if size > self._largest_body:
            raise TooLarge(bytes(kept[:256]), size, self._largest_body)
        return bytes(kept)

    async def json(self, request: web.Request) -> payloads.Body:
        """The object of a request. Raises Refused, TooLarge."""
        try:
            body = json.loads(await self.body(request))
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON ({error})") from error
        if not isinstance(body, dict):
            raise Refused("the body is no object")
        return body

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _client_config(self, request: web.Request) -> web.Response:
        largest = {"fwdbwd_max_chunk_bytes_count": min(5_000_000, self._largest_body // 2)}
        return web.json_response({**CLIENT_CONFIG, **largest})

    async def _dynamic_config(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _telemetry(self, request: web.Request) -> web.Response:
        await self.body(request)  # passed over: nothing of a client's is recorded
        return web.json_response({"status": "accepted"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        info = self.backend.info
        model = {"model_name": info.name, "max_context_length": info.max_tokens}
        return web.json_response(
            {"supported_models": [{**model, "trainable": True, "sampleable": True}]}
        )

    async def _create_session(self, request: web.Request) -> web.Response:
        session = self.sessions.create(dict(await self.json(request)))
        rank = self.backend.info.lora_rank
        told = f"adapters have rank {rank} and are not on the unembedding, whatever train_unembed"
        if not rank:
            told = "all weights are trained, whatever the rank that a client names"
        reply = {"type": "create_session", "session_id": session.id, "warning_message": told}
        return web.json_response(reply)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self.sessions.get(required(await self.json(request), "session_id", str))
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        with suppress(Unknown):  # it has finished before
            self.end_session(self.sessions.get(request.match_info["session"]), "finished")
        return web.json_response({})

    async def _create_model(self, request: web.Request) -> web.Response:
        body = await self.json(request)
        return self._new_model(body, payloads.read_create_model)

    def _new_model(self, body: payloads.Body, read: Callable[..., CreateModel]) -> web.Response:
        """Make a model that the client's session and number name; once."""
        session = self.sessions.get(required(body, "session_id", str))
        number = integer(body, "model_seq_id", None, 0, LARGEST_SEQ)
        if number is None:
            raise Refused("model_seq_id: left out, wanted an integer")
        name = f"{session.id}:train:{number}"
        if name not in session.models:
            pending = self.futures.open(session.id)
            metadata = body.get("user_metadata")
            model = self.sessions.add_model(session, name, self.futures, pending.id, metadata)

            async def run() -> WireReply:
                try:
                    request = read(body, name, self.backend.info)
                    await self.ask(request)
                except Refused as error:
                    model.order.end(f"model {name} was refused: {error}")
                    raise
                if request.source is not None:
                    return {"type": "load_weights", "model_id": name, "path": request.source}
                return {"type": "create_model", "model_id": name}

            self.futures.start(pending, run)
        return _promise(session.models[name].created, model_id=name)

    async def _get_info(self, request: web.Request) -> web.Response:
        model = self.sessions.model(required(await self.json(request), "model_id", str))
        info = self.backend.info
        data = {"model_name": info.name, "tokenizer_id": info.tokenizer_path}
        return web.json_response(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": info.name,
                "model_data": data,
                "is_lora": bool(info.lora_rank),
                "lora_rank": info.lora_rank or None,
            }
        )

    def _take_turn(self, model_id: str, seq: int, run: MakeReply) -> web.Response:
        request_id = self.sessions.model(model_id).order.submit(seq, run)
        return _promise(request_id, model_id=model_id)

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = b""
        try:
            body = await self.body(request)
            message = wire.parse("ForwardBackwardRequest", body)
        except (TooLarge, Refused) as error:
            beginning = error.beginning if isinstance(error, TooLarge) else body
            numbers = wire.numbers_of(beginning)
            if numbers is None:
                raise
            return self._take_turn(*numbers, refuser(Refused(str(error))))

        # Read before its turn: a body is not kept as bytes, and a refusal costs no other request.
        try:
            asked = wire.read_forward_backward(message, self.backend.info)
        except Refused as error:
            return self._take_turn(message.model_id, message.seq_id, refuser(error))

        async def run() -> WireReply:
            return wire.write_outputs(cast(LossOutputs, await self.ask(asked)))

        return self._take_turn(message.model_id, message.seq_id, run)

    async def _in_turn(self, request: web.Request) -> web.Response:
        """A request of a model, by the route's reader in `READERS`."""
        name, body = request.path.rpartition("/")[2], await self.json(request)
        if name == "load_weights" and body.get("model_id") is None:
            return self._new_model(body, payloads.read_create_from)
        model_id = required(body, "model_id", str)
        seq = required(body, "seq_id", int)
        try:
            asked = READERS[name](body, model_id, seq, self.backend.info)
        except Refused as error:
            return self._take_turn(model_id, seq, refuser(error))

        async def run() -> WireReply:
            return {"type": name, **self._reply(asked, await self.ask(asked), body)}

        return self._take_turn(model_id, seq, run)

    def _reply(self, asked: ClientRequest, answer: Any, body: payloads.Body) -> dict[str, Any]:
        """The fields of an answer in JSON."""
        if isinstance(answer, Stepped):
            return {"metrics": {key: _readable(x) for key, x in answer.metrics.items()}}
        model_id = required(body, "model_id", str)
        if isinstance(answer, Saved):
            number = optional(body, "sampling_session_seq_id", int)
            if number is None or optional(body, "path", str) is not None:
                return {"path": answer.path}
            session = self.sessions.get(model_id.partition(":")[0])
            return {
                "sampling_session_id": self.sessions.add_sampler(session, number, answer.path).id
            }
        return {"model_id": model_id, "path": getattr(asked, "path", None)}

    async def _create_sampler(self, request: web.Request) -> web.Response:
        body = await self.json(request)
        session = self.sessions.get(required(body, "session_id", str))
        number = integer(body, "sampling_session_seq_id", None, 0, LARGEST_SEQ)
        if number is None:
            raise Refused("sampling_session_seq_id: left out, wanted an integer")
        path = optional(body, "model_path", str)
        payloads.check_base(body, self.backend.info)
        if path is not None:
            self.check_exists(path)
        sampler = self.sessions.add_sampler(session, number, path)
        reply = {"type": "create_sampling_session", "sampling_session_id": sampler.id}
        return web.json_response(reply)

    def check_exists(self, path: str) -> None:
        """Raise Refused for a path that has no files."""
        listed = self.backend.listed(CheckpointPath.parse(path).model)
        if path not in (checkpoint.path for checkpoint in listed):
            raise Refused(f"{path}: no checkpoint of that name")

    async def _sampler(self, request: web.Request) -> web.Response:
        sampler = self.sessions.sampler(request.match_info["sampler"])
        return web.json_response(
            {
                "sampler_id": sampler.id,
                "base_model": self.backend.info.name,
                "model_path": sampler.weights,
            }
        )

    async def _asample(self, request: web.Request) -> web.Response:
        body = await self.json(request)
        sampler = self.sessions.sampler(required(body, "sampling_session_id", str))
        seq = integer(body, "seq_id", None, 0, LARGEST_SEQ)
        if seq is None:
            raise Refused("seq_id: left out, wanted an integer")
        count = integer(body, "num_samples", 1, 1, payloads.MOST_SAMPLES) or 1
        if seq not in sampler.ids:
            session = sampler.id.partition(":")[0]
            asked = self._sampling(body, sampler.weights, (sampler.number, seq), session)
            pending = self.futures.open(session)
            sampler.ids[seq] = pending.id
            self.futures.start(pending, asked)
        names = [f"{sampler.id}:{seq}:{index}" for index in range(count)]
        return _promise(sampler.ids[seq], sample_sequence_ids=names)

    def _sampling(
        self, body: payloads.Body, weights: str | None, key: tuple[int, int], session: str
    ) -> MakeReply:
        try:
            asked = payloads.read_sampling(body, weights, key, session, self.backend.info)
        except Refused as error:
            return refuser(error)

        async def run() -> WireReply:
            return asked.reply(cast(Samples, await self.ask(asked.request)))

        return run

    async def _retrieve(self, request: web.Request) -> web.Response:
        request_id = required(await self.json(request), "request_id", str)
        try:
            with self.sessions.polling(request_id.partition(":")[0]):
                status, reply = await self.futures.fetch(request_id)
        except KeyError:
            self.sessions.check_known(request_id.partition(":")[0])
            raise Unknown(404, f"request {request_id:.80}: unknown, or fetched long ago") from None
        if isinstance(reply, bytes):
            return web.Response(body=reply, content_type=PROTOBUF)
        return web.json_response(reply, status=status)


def _refuse_external(*_: object) -> ClientRequest:
    told = "save_state, whose directory has the adapter in peft's format"
    raise Refused(f"save_weights_external: not served; {told}")


READERS: Mapping[str, Callable[[payloads.Body, str, int, ServedModel], ClientRequest]] = {
    "optim_step": lambda body, model, seq, info: payloads.read_optim_step(body, model),
    "save_weights": lambda body, model, seq, info: payloads.read_save(body, model, seq),
    "save_weights_for_sampler": lambda body, model, seq, info: payloads.read_save_for_sampler(
        body, model
    ),
    "save_weights_external": _refuse_external,
    "load_weights": lambda body, model, seq, info: payloads.read_load_into(body, model, info),
}
"""The routes of a model's requests in JSON, and how each is read."""


def _readable(value: float) -> float | str:
    """A number as JSON has it, which lacks those that are not finite; the SDK reads their names."""
    return value if math.isfinite(value) else str(value)


def _promise(request_id: str, **facts: Any) -> web.Response:
    return web.json_response({"request_id": request_id, **facts})


def _error(code: int, error: Exception) -> web.Response:
    return web.json_response({"detail": str(error)}, status=code)
