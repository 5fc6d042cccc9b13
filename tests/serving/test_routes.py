"""The training API over HTTP, in front of a backend that runs nothing: order, refusals, ends."""

import asyncio
import json
import math
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from serve_backends import INFO, FakeBackend
from yarl import URL

from hybridrl.config import ConfigError, ServeConfig
from hybridrl.serving import payloads, wire
from hybridrl.serving.requests import (
    Checkpoint,
    CheckpointPath,
    CreateModel,
    DropSamples,
    ForwardBackward,
    OptimStep,
    Refused,
    SampleRequest,
    Save,
    Unload,
)
from hybridrl.serving.server import Server, listener, read_key
from hybridrl.serving.sessions import Session

KEY = "tml-" + "0" * 32


@dataclass
class Client:
    """A client without an SDK: it names its session, model and numbers itself."""

    http: aiohttp.ClientSession
    server: Server
    session: str = ""
    model: str = ""

    async def post(self, route: str, body: Any, method: str = "POST") -> tuple[int, Any]:
        kind = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.request(method, f"{self.server.url}/api/v1/{route}", **kind) as got:
            raw = await got.read()
            return got.status, json.loads(raw) if "json" in got.content_type else raw

    async def get(self, route: str) -> tuple[int, Any]:
        return await self.post(route, None, "GET")

    async def answer(self, promise: tuple[int, Any]) -> Any:
        """What a promise becomes, after as many long polls as it takes."""
        status, got = promise
        assert status == 200, got
        while True:
            body = {"request_id": got["request_id"], "allow_metadata_only": True}
            status, reply = await self.post("retrieve_future", body)
            if status != 408:
                assert status == 200, reply
                return reply

    async def begin(self) -> None:
        """Open a session with a model."""
        _, got = await self.post("create_session", {"tags": [], "sdk_version": "0"})
        self.session = got["session_id"]
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": INFO.name,
            "lora_config": {"rank": INFO.lora_rank},
        }
        self.model = (await self.answer(await self.post("create_model", body)))["model_id"]

    async def forward_backward(
        self, seq: int, loss: str = "cross_entropy", token: int | None = None
    ) -> tuple[int, Any]:
        """A batch of one datum, whose token is the number."""
        body = wire.MESSAGES["ForwardBackwardRequest"](
            model_id=self.model, seq_id=seq, loss_fn=loss
        )
        tokens = np.asarray([seq if token is None else token], np.int32)
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = tokens.tobytes(), 3
        target.shape.append(1)
        return await self.post("forward_backward", body.SerializeToString())

    async def step(self, seq: int, lr: float = 0.5) -> tuple[int, Any]:
        body = {"model_id": self.model, "seq_id": seq, "adam_params": {"learning_rate": lr}}
        return await self.post("optim_step", body)

    async def sampler(self, number: int = 0, **facts: Any) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **facts}
        status, got = await self.post("create_sampling_session", body)
        assert status == 200, got
        return got["sampling_session_id"]

    async def sample(self, sampler: str, seq: int, **facts: Any) -> tuple[int, Any]:
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4},
        }
        return await self.post("asample", body | facts)


@asynccontextmanager
async def served(
    backend: FakeBackend, poll_s: float = 30.0, key: str = KEY, **settings: Any
) -> AsyncIterator[Client]:
    """A server on a free port, and a client of it."""
    address = ServeConfig(port=0, **settings)
    server = Server(address, backend, KEY, listener(address), poll_s=poll_s)
    await server.start()
    try:
        async with aiohttp.ClientSession(headers={"X-API-Key": key}) as http:
            yield Client(http, server)
    finally:
        await server.close()


def run(story: Callable[[], Awaitable[None]]) -> None:
    """A test's own loop. A hang is an error in seconds, not in minutes."""
    asyncio.run(asyncio.wait_for(story(), 20))


def test_requests_run_by_their_numbers_and_once() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            promises = {}
            for seq in (3, 2, 5, 2, 4, 3):
                again = (await client.forward_backward(seq))[1]
                assert promises.setdefault(seq, again) == again
            assert not backend.of_model(ForwardBackward)
            promises[1] = (await client.step(1))[1]
            for promise in promises.values():
                await client.answer((200, promise))
            repeated = await client.step(1, lr=0.75)
            assert (await client.answer(repeated))["metrics"] == {"lr": 0.5}
            asked = backend.of_model(OptimStep, ForwardBackward)
            assert isinstance(asked[0], OptimStep)
            assert [int(fb.data[0].tokens[0]) for fb in asked[1:]] == [2, 3, 4, 5]

    run(story)


def test_a_refused_request_takes_its_number() -> None:
    """The wire, the reader and the backend refuse one each: the next ones run."""

    async def story() -> None:
        backend = FakeBackend()
        async with served(backend, largest_body=1 << 20) as client:
            await client.begin()
            wrong = [
                (await client.forward_backward(1, "wrong"), "loss_fn=wrong"),
                (await client.step(2, lr=-1.0), "learning_rate=-1.0: wanted 0 or more"),
            ]
            head = wire.MESSAGES["ForwardBackwardRequest"](model_id=client.model, seq_id=3)
            large = head.SerializeToString() + bytes(3 << 20)
            wrong.append((await client.post("forward_backward", large), "serve.largest_body"))
            head = wire.MESSAGES["ForwardBackwardRequest"](model_id=client.model, seq_id=4)
            broken = head.SerializeToString() + b"\x1a\xff"
            line = "the body is no ForwardBackwardRequest"
            wrong.append((await client.post("forward_backward", broken), line))
            assert (await client.post("forward_backward", broken[1:]))[0] == 400  # nobody's number
            body = {"model_id": client.model, "seq_id": 5, "path": "../name"}
            wrong.append((await client.post("save_weights", body), "path='../name'"))
            outside = await client.forward_backward(6, token=32)
            wrong.append((outside, "data[0].model_input: token 32, wanted 0 to 31"))
            step = {"model_id": client.model, "seq_id": 7, "adam_params": {"eps": 0.0}}
            wrong.append((await client.post("optim_step", step), "eps=0.0: wanted above 0"))
            right = await client.step(8)
            assert await client.answer(right) == {"type": "optim_step", "metrics": {"lr": 0.5}}
            for promise, line in wrong:
                failed = await client.answer(promise)
                assert failed["category"] == "user"
                assert line in failed["error"]
            assert len(backend.of_model(OptimStep, Save)) == 1

    run(story)


def test_a_long_poll_ends_in_408_and_another_has_the_answer() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend, poll_s=0.05) as client:
            await client.begin()
            sampler = await client.sampler(base_model=INFO.name)
            backend.gate.clear()
            status, promise = await client.sample(sampler, 0)
            assert status == 200
            assert len(promise["sample_sequence_ids"]) == 1
            body = {"request_id": promise["request_id"]}
            status, pending = await client.post("retrieve_future", body)
            assert (status, pending["type"]) == (408, "try_again")
            backend.gate.set()
            got = await client.answer((200, promise))
            assert wire.MESSAGES["SampleResponse"].FromString(got).sequences[0].stop_reason == 1
            assert await client.answer((200, promise)) == got  # the client may have lost it

    run(story)


def test_samples_are_keyed_by_the_clients_numbers_and_run_once() -> None:
    """Two clients that do the same ask the same, whatever their sessions are named."""

    async def story() -> None:
        backend = FakeBackend()
        keys = []
        for _ in range(2):
            async with served(backend) as client:
                await client.begin()
                body = {"model_id": client.model, "seq_id": 1, "sampling_session_seq_id": 4}
                saved = await client.answer(await client.post("save_weights_for_sampler", body))
                sampler = saved["sampling_session_id"]
                first = await client.sample(sampler, 7, num_samples=3)
                assert await client.sample(sampler, 7, num_samples=3) == first
                assert len(set(first[1]["sample_sequence_ids"])) == 3
                await client.answer(first)
                (asked,) = backend.of_model(SampleRequest)
                assert asked.weights == f"tinker://{client.model}/sampler_weights/client:4"
                keys.append(asked.key)
                backend.asked.clear()
        assert keys == [(4, 7)] * 2

    run(story)


def test_the_wrong_key_and_no_key_are_refused() -> None:
    async def story() -> None:
        async with served(FakeBackend(), key="tml-" + "1" * 32) as client:
            for route in ("client/config", "create_session", "retrieve_future", "unknown"):
                status, got = await client.post(route, {})
                assert (status, got["detail"].partition(":")[0]) == (401, "X-API-Key")
            client.http.headers.clear()
            assert (await client.get("sessions"))[0] == 401
            reading, writing = await asyncio.open_connection(
                "127.0.0.1", URL(client.server.url).port
            )
            writing.write(b"GET /api/v1/sessions HTTP/1.1\r\nHost: x\r\nX-API-Key: \xff\r\n\r\n")
            assert b"401" in await reading.readline()
            writing.close()

    run(story)


@pytest.mark.parametrize("idle_s", [5.0, 20.0])
def test_fewer_seconds_than_clients_need_are_told(
    idle_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with served(FakeBackend(), idle_s=idle_s):
            pass

    run(story)
    told = "serve.idle_s=5: clients give a sign of life every 10 s, and may lose their models"
    assert [record.getMessage() for record in caplog.records] == [told] * (idle_s < 20)


def test_a_page_is_asked_for_by_numbers() -> None:
    async def story() -> None:
        async with served(FakeBackend()) as client:
            await client.begin()
            assert (await client.get("sessions?limit=1"))[1] == {"sessions": [client.session]}
            for query, wanted in {"limit=-1": "0 to", "limit=x": "an int", "offset=": "an"}.items():
                status, got = await client.get(f"sessions?{query}")
                assert status == 400
                assert got["detail"].startswith(f"{query}: wanted {wanted}")

    run(story)


def test_a_client_is_told_what_differs_when_it_begins() -> None:
    async def story() -> None:
        async with served(FakeBackend()) as client:
            assert (await client.post("client/config", {}))[1]["pjwt_auth_enabled"] is False
            _, got = await client.post("create_session", {"tags": [], "sdk_version": "0"})
            assert "are not on the unembedding" in got["warning_message"]

    run(story)


def test_a_number_of_a_sampler_stands_for_one_path() -> None:
    async def story() -> None:
        async with served(FakeBackend()) as client:
            await client.begin()
            sampler = await client.sampler(3)
            assert await client.sampler(3) == sampler
            body = {"model_id": client.model, "seq_id": 1, "sampling_session_seq_id": 3}
            saved = await client.answer(await client.post("save_weights_for_sampler", body))
            assert saved["error"] == "sampling_session_seq_id=3: it has the weights None"

    run(story)


@pytest.mark.parametrize(
    ("read", "body", "line"),
    [
        (
            payloads.read_optim_step,
            {"adam_params": {"grad_clip_norm": -1}},
            "grad_clip_norm=-1.0: wanted 0 or more",
        ),
        (
            payloads.read_optim_step,
            {"adam_params": {"grad_clip_norm": math.nan}},
            "grad_clip_norm=nan: wanted 0 or more",
        ),
        (
            payloads.read_save_for_sampler,
            {"path": "a", "ttl_seconds": 1 << 40},
            "ttl_seconds=1099511627776: wanted 1 to 3162240000",
        ),
    ],
)
def test_a_number_out_of_bounds_is_refused(read: Any, body: Any, line: str) -> None:
    with pytest.raises(Refused) as refused:
        read(body, "m")
    assert str(refused.value) == line


def test_a_session_that_finishes_frees_its_models_behind_what_runs() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            running, waiting = await client.step(1), await client.step(3)
            assert (await client.post(f"sessions/{client.session}/finish", {}))[0] == 200
            assert (await client.post(f"sessions/{client.session}/finish", {}))[0] == 200
            assert await client.answer(running) == {"type": "optim_step", "metrics": {"lr": 0.5}}
            assert "finished" in (await client.answer(waiting))["error"]  # 2 never comes
            heartbeat = {"session_id": client.session}
            assert (await client.post("session_heartbeat", heartbeat))[0] == 410
            status, got = await client.step(4)
            assert (status, got["detail"]) == (410, f"session {client.session}: finished")
            assert [type(x) for x in backend.asked] == [CreateModel, OptimStep, DropSamples, Unload]
            assert backend.models == set()

    run(story)


async def polls(session: Session, number: int) -> None:
    """Wait until a session has so many open polls."""
    for _ in range(2000):
        if session.polls == number:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(session.polls)


def test_a_silent_client_is_ended_and_one_that_polls_is_not() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            now = [100.0]
            client.server.api.sessions._clock = lambda: now[0]
            await client.begin()
            silent = client.session
            await client.begin()
            promise = await client.step(1)
            now[0] = 150
            await client.answer(promise)
            now[0] = 190
            session = client.server.api.sessions.get(client.session)
            backend.gate.clear()
            sample = await client.sample(await client.sampler(base_model=INFO.name), 0)
            poll = asyncio.create_task(client.answer(sample))
            await polls(session, 1)
            now[0] = 300
            client.server.api.end_silent(60)
            await asyncio.sleep(0)
            assert [s.id for s in client.server.api.sessions.open] == [client.session]
            assert backend.of_model(Unload) == [Unload(f"{silent}:train:0")]
            reason = "no sign of life for 60 s (serve.idle_s)"
            assert backend.of_model(DropSamples) == [DropSamples(silent, reason)]
            status, got = await client.post("session_heartbeat", {"session_id": silent})
            assert (status, got["detail"]) == (
                410,
                f"session {silent}: {reason}",
            )
            poll.cancel()
            await polls(session, 0)
            now[0] = 360  # of which the poll's end was the last sign
            assert client.server.api.sessions.silent(60) == []
            now[0] = 361
            assert len(client.server.api.sessions.silent(60)) == 1

    run(story)


def test_a_failure_of_the_server_fails_all_and_a_bug_one_request() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            bug = await client.answer(await client.forward_backward(1, "bug"))
            assert bug == {"error": "ZeroDivisionError: of the server", "category": "server"}
            assert not client.server.failure.done()
            sampler = await client.sampler(base_model=INFO.name)
            backend.gate.clear()
            sample = await client.sample(sampler, 0)
            dead = await client.forward_backward(2, "broken")
            line = "rank 1 (actor) has died; its log is rank1.log"
            for promise in (dead, sample, await client.step(3)):
                failed = await client.answer(promise)
                assert failed == {"error": line, "category": "server"}
            assert client.server.failure.result(0) == line

    run(story)


def test_a_backend_that_ends_by_itself_ends_the_server_at_once() -> None:
    """No request has to find out."""

    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            sampler = await client.sampler(base_model=INFO.name)
            backend.gate.clear()
            sample = await client.sample(sampler, 0)
            backend.failure.set_result("rank 0 has died")
            ended = asyncio.wrap_future(client.server.failure)
            assert await asyncio.wait_for(ended, 5) == "rank 0 has died"
            assert (await client.answer(sample))["error"] == "rank 0 has died"

    run(story)


def test_checkpoints_are_listed_without_a_rank() -> None:
    """Which may be busy for long."""

    async def story() -> None:
        backend = FakeBackend(
            files={"tinker://a/weights/x": Checkpoint("tinker://a/weights/x", 8, 1, 0)}
        )
        async with served(backend) as client:
            await client.begin()
            before = len(backend.asked)
            for route in ("checkpoints", "training_runs", "training_runs/a/checkpoints"):
                assert (await client.get(route))[0] == 200
            await client.sampler(model_path="tinker://a/weights/x")
            assert len(backend.asked) == before

    run(story)


@pytest.mark.parametrize("model", ["*", "..", "a%2Fb", "x" * 129])
def test_a_training_run_of_no_model_s_name_is_refused(model: str) -> None:
    async def story() -> None:
        async with served(FakeBackend()) as client:
            url = URL(f"{client.server.url}/api/v1/training_runs/", encoded=True)
            async with client.http.get(URL(f"{url}{model}/checkpoints", encoded=True)) as got:
                assert got.status == 400
                assert "wanted up to 128 letters" in (await got.json())["detail"]

    run(story)


def test_an_end_answers_what_is_done_and_fails_the_rest() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            sampler = await client.sampler(base_model=INFO.name)
            backend.gate.clear()
            promise = await client.sample(sampler, 0)
            waiting = asyncio.create_task(client.answer(promise))
            await asyncio.sleep(0.05)  # it is in its long poll
            await client.server.close()
            assert (await waiting)["error"] == "the server has ended"
            assert backend.closed

    run(story)


@pytest.mark.parametrize(
    ("route", "body", "status", "line"),
    [
        ("create_session", b"{", 400, "the body is no JSON"),
        ("create_session", [], 400, "the body is no object"),
        ("session_heartbeat", {}, 400, "session_id: left out, wanted a text"),
        ("session_heartbeat", {"session_id": "x"}, 404, "session x: unknown"),
        ("optim_step", {"model_id": "x:train:0", "seq_id": 1}, 404, "session x"),
        ("optim_step", {"model_id": "MODEL", "seq_id": 0}, 400, "seq_id=0: wanted 1 to "),
        ("optim_step", {"model_id": "MODEL", "seq_id": 2**70}, 400, "seq_id=118059162"),
        ("optim_step", {"model_id": "MODEL"}, 400, "seq_id: left out, wanted an integer"),
        ("forward_backward", b"\xff\xff", 400, "the body is no ForwardBackwardRequest"),
        ("retrieve_future", {"request_id": "x"}, 404, "session x: unknown to this server"),
        ("retrieve_future", {"request_id": "SESSION:x"}, 404, "request SESSION:x: unknown"),
        ("asample", {"sampling_session_id": "SESSION:sample:9"}, 404, "sampler"),
        ("audit", {}, 404, "POST /api/v1/audit: hybridrl serve has no such route"),
        ("telemetry", b"0" * ((1 << 20) + 1), 413, "a body of 1048577 bytes: at most 1048576"),
        (
            "create_sampling_session",
            {"session_id": "SESSION", "sampling_session_seq_id": 1, "base_model": "other"},
            400,
            "base_model=other: this server has tiny/model",
        ),
        (
            "create_sampling_session",
            {
                "session_id": "SESSION",
                "sampling_session_seq_id": 1,
                "model_path": "tinker://a/weights/..",
            },
            400,
            "'tinker://a/weights/..': wanted",
        ),
        (
            "create_sampling_session",
            {
                "session_id": "SESSION",
                "sampling_session_seq_id": 1,
                "model_path": "tinker://a/weights/b",
            },
            400,
            "tinker://a/weights/b: no checkpoint",
        ),
    ],
)
def test_a_wrong_request_is_one_line(route: str, body: Any, status: int, line: str) -> None:
    async def story() -> None:
        async with served(FakeBackend(), largest_body=1 << 20) as client:
            await client.begin()
            sent = body
            if isinstance(body, dict):
                names = {"MODEL": client.model, "SESSION": client.session}
                text = json.dumps(body)
                for name, value in names.items():
                    text = text.replace(name, value)
                sent = json.loads(text)
            code, got = await client.post(route, sent)
            wanted = line.replace("SESSION", client.session)
            assert (code, got["detail"][: len(wanted)]) == (status, wanted)
            assert "\n" not in got["detail"]

    run(story)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"base_model": "other"}, "base_model=other: this server has tiny/model"),
        ({"lora_config": {"rank": 4}}, "rank=4: this server has adapters of rank 8"),
        ({"lora_config": {"rank": 8, "seed": 1 << 64}}, "seed=18446744073709551616: wanted -92"),
        ({"lora_config": {"rank": 8, "seed": -(1 << 63) - 1}}, "seed=-9223372036854775809"),
        ({"lora_config": {"rank": 8, "train_mlp": False}}, "train_mlp=false"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type='dimuon': wanted adamw"),
    ],
)
def test_a_model_that_cannot_be_is_refused(facts: dict[str, Any], line: str) -> None:
    async def story() -> None:
        async with served(FakeBackend()) as client:
            await client.begin()
            body = {
                "session_id": client.session,
                "model_seq_id": 1,
                "base_model": INFO.name,
                "lora_config": {"rank": 8},
            }
            promise = await client.post("create_model", body | facts)
            assert (await client.answer(promise))["error"].startswith(line)
            client.model = promise[1]["model_id"]
            status, got = await client.step(1)
            assert status == 400
            assert got["detail"].startswith(f"model {client.model} was refused: {line}")

    run(story)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"prompt": {"chunks": []}}, "prompt: 0 tokens, wanted 1 to 64"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt: an image or audio"),
        ({"prompt": {"chunks": [{"tokens": [1, 32]}]}}, "prompt: token 32, wanted 0 to 31"),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, "tokens: wanted a list of integers"),
        ({"sampling_params": {"max_tokens": 62}}, "the prompt's 3 tokens and max_tokens=62"),
        ({"sampling_params": {"top_p": 0}}, "top_p=0.0: wanted above 0"),
        ({"sampling_params": {"temperature": -1}}, "temperature=-1.0: wanted 0 or more"),
        ({"sampling_params": {"temperature": 1e39}}, "temperature=1e+39: wanted 0, or 0.0001 to"),
        ({"sampling_params": {"temperature": 1e-46}}, "temperature=1e-46: wanted 0, or 0.0001"),
        ({"sampling_params": {"stop": ["\ud800"]}}, "stop=['\\ud800']: wanted texts that UTF-8"),
        ({"sampling_params": {"stop": [1.5]}}, "stop=[1.5]: wanted texts or token ids"),
        ({"sampling_params": {"stop": 5}}, "stop=5: wanted texts or token ids"),
        ({"sampling_params": {"stop": ["x"] * 1025}}, "stop: 1025 texts and ids, wanted at most"),
        ({"sampling_params": {"stop": [32]}}, "stop=[32]: wanted texts or token ids, 0 to 31"),
        ({"sampling_params": {"top_p": 10**400}}, "top_p=10000000000000000000...: wanted a number"),
        ({"sampling_params": {"max_tokens": "4"}}, "max_tokens='4': wanted an integer"),
        ({"topk_prompt_logprobs": 33}, "topk_prompt_logprobs=33: wanted 0 to 32"),
        ({"record_stability_info": True}, "record_stability_info: stable_reinforce is not served"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: not served"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
            "target_prompt_logprobs: shape [1, 1], wanted [2, K]",
        ),
        (
            {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [2, 0]}},
            "target_prompt_logprobs: shape [2, 0], wanted [2, K]",
        ),
    ],
)
def test_a_wrong_sample_fails_alone(facts: dict[str, Any], line: str) -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            sampler = await client.sampler(base_model=INFO.name)
            failed = await client.answer(await client.sample(sampler, 0, **facts))
            assert (failed["error"][: len(line)], failed["category"]) == (line, "user")
            assert isinstance(await client.answer(await client.sample(sampler, 1)), bytes)
            assert len(backend.of_model(SampleRequest)) == 1

    run(story)


@pytest.mark.parametrize(
    ("tokens", "shape", "line"),
    [
        ([], [], "data: empty, wanted one datum or more"),
        ([1] * 65, [65], "data[0]: 65 tokens, wanted 1 to 64"),
        ([1, 32], [2], "data[0].model_input: token 32, wanted 0 to 31"),
        ([1, 2], [2, 0], "data[0].target_tokens: shape [2, 0], wanted [2] or [2, K]"),
        ([1, 2], [1], "data[0].target_tokens: shape [1], wanted [2] or [2, K]"),
    ],
)
def test_a_wrong_datum_is_refused(tokens: list[int], shape: list[int], line: str) -> None:
    """Before its turn, in a line; none of it is checked again."""
    body = wire.MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    if tokens:
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        target.dense, target.dtype = np.ones(math.prod(shape), np.int32).tobytes(), 3
        target.shape.extend(shape)
    with pytest.raises(Refused) as refused:
        wire.read_forward_backward(body, INFO)
    assert str(refused.value).startswith(line)


def test_settings_of_samples_are_the_clients() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            sampler = await client.sampler(base_model=INFO.name)
            params = [
                {"max_tokens": 5, "seed": -3, "temperature": 0, "top_k": -1},
                {"stop": []},
                {"stop": "\n"},
                {"stop": [7, 9], "top_k": 3, "top_p": 0.5},
                {"stop": ["a", "b"]},
            ]
            for seq, settings in enumerate(params):
                await client.answer(await client.sample(sampler, seq, sampling_params=settings))
            got = [asked.settings for asked in backend.of_model(SampleRequest)]
            assert [s.max_tokens for s in got] == [5, None, None, None, None]
            assert [s.eos for s in got] == [True, False, False, False, False]
            assert [s.stop_texts for s in got] == [(), (), ("\n",), (), ("a", "b")]
            assert [s.stop_tokens for s in got] == [(), (), (), (7, 9), ()]
            assert [(s.seed, s.temperature) for s in got] == [(-3, 0.0), *[(None, 1.0)] * 4]
            assert [(s.top_k, s.top_p) for s in got] == [(0, 1.0)] * 3 + [(3, 0.5), (0, 1.0)]

    run(story)


def test_a_prompt_that_fills_the_context_is_scored() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            sampler = await client.sampler(base_model=INFO.name)
            whole = {
                "prompt": {"chunks": [{"tokens": [1] * 64}]},
                "sampling_params": {"max_tokens": 1},
            }
            got = await client.answer(
                await client.sample(
                    sampler, 0, **whole, prompt_logprobs=True, prompt_logprobs_last_n=2
                )
            )
            response = wire.MESSAGES["SampleResponse"].FromString(got)
            assert [s.tokens for s in response.sequences] == [b""]
            scores = np.frombuffer(response.prompt_logprobs, np.float32)
            assert np.isnan(scores).tolist() == [True] * 62 + [False] * 2
            failed = await client.answer(await client.sample(sampler, 1, **whole))
            assert "wanted together 1 to 64 (data.max_prompt_tokens plus" in failed["error"]

    run(story)


def test_two_clients_are_apart() -> None:
    async def story() -> None:
        backend = FakeBackend()
        async with served(backend) as client:
            await client.begin()
            other = Client(client.http, client.server)
            await other.begin()
            promises = [await client.step(2), await other.step(1)]
            await client.answer(promises[1])
            assert [step.model for step in backend.of_model(OptimStep)] == [other.model]
            await client.answer(await client.step(1))
            await client.answer(promises[0])
            assert [step.model for step in backend.of_model(OptimStep)] == [
                other.model,
                client.model,
                client.model,
            ]

    run(story)


@pytest.mark.parametrize(
    "path",
    [
        "tinker://a/weights",
        "tinker://a/weights/../b",
        "tinker://../weights/b",
        "tinker://a/other/b",
        "file://a/weights/b",
        "tinker://a/weights/b/c",
        "tinker://a/weights/" + "b" * 129,
        "tinker://a/weights/b\n",
    ],
)
def test_paths_outside_are_refused(path: str) -> None:
    with pytest.raises(Refused, match="wanted tinker://MODEL/weights/NAME"):
        CheckpointPath.parse(path)
    assert str(CheckpointPath.parse("tinker://s:train:0/weights/a.b")) == (
        "tinker://s:train:0/weights/a.b"
    )


def test_the_key_is_kept_in_a_file_of_its_owner(tmp_path: Path) -> None:
    key = read_key(tmp_path)
    file = tmp_path / "api_key"
    assert key.startswith("tml-")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert read_key(tmp_path) == key != read_key(other)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 600"):
        read_key(tmp_path)
    file.chmod(0o600)
    file.write_text("")
    with pytest.raises(ConfigError, match="a key tml-"):
        read_key(tmp_path)


def test_other_commands_refuse_the_servers_settings() -> None:
    ServeConfig().check_unused("train")
    with pytest.raises(ConfigError, match=r"serve.port=1: wanted 8000, with hybridrl train"):
        ServeConfig(port=1).check_unused("train")
