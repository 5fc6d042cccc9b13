"""A judge that knows nothing: it stands in for a language model behind an OpenAI-compatible API.

    python scripts/stub_judge.py --port 8765 --delay 0.5 --trouble 0.2

It grades a request from 0 to 10 by a checksum of its text, so that equal requests get equal grades.
`--trouble` is the share of requests that it answers with HTTP 429, 500, nonsense, or not at all.
`GET /counts` has the number of requests, and how many were in flight at most. Of seconds it has
those that requests were to take, that they took, and that had any in flight. Tests and
`scripts/bench/judges.py` use it, too.
"""

import argparse
import asyncio
import contextlib
import random
import re
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

TROUBLES = ("429", "500", "garbage", "drop")
Trouble = Callable[[str, int], str | None]
"""What goes wrong with a request of this text, asked for the so-manieth time (from 0)."""


def grade(text: str) -> int:
    """From 0 to 10, the same for the same text."""
    return zlib.crc32(text.encode()) % 11


class StubJudge:
    """The server; as a context manager it runs in a thread.

    It answers `/v1/chat/completions` and, for `reward.kind=http`, `/score`.
    """

    def __init__(
        self,
        delay: Callable[[], float] = lambda: 0.0,
        trouble: Trouble = lambda text, attempt: None,
        port: int = 0,
        key: str = "",
    ) -> None:
        """`delay` gives the seconds of the next answer, `port` 0 takes a free one.

        Without the `key`, if it has one, it answers HTTP 401.
        """
        self.delay, self.trouble, self.port, self.key = delay, trouble, port, key
        self.asked: Counter[str] = Counter()
        self.keys: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.seconds = 0.0  # that requests were to take in all
        self.in_flight_s = 0.0  # that they took
        self.busy_s = self._since = 0.0  # with a request in flight
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        """The base of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the stub judge does not start"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.start())
        self._ready.set()
        with contextlib.suppress(RuntimeError):
            self._loop.run_forever()

    async def start(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_post("/score", self._handle)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/counts", self._counts)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _end(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _models(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return web.Response(status=401)
        return web.json_response({"data": [{"id": "stub"}]})

    async def _counts(self, request: web.Request) -> web.Response:
        counts = {"requests": sum(self.asked.values()), "most_in_flight": self.most_in_flight}
        times = {"seconds": self.seconds, "in_flight_s": self.in_flight_s, "busy_s": self.busy_s}
        return web.json_response({**counts, **times})

    def _knows(self, request: web.Request) -> bool:
        return not self.key or request.headers.get("Authorization") == f"Bearer {self.key}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not self._knows(request):
            return web.Response(status=401)
        body = await request.json()
        text = body["messages"][-1]["content"] if "messages" in body else str(body.get("response"))
        attempt = self.asked[text]
        self.asked[text] += 1
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        begun = time.monotonic()
        if not self.in_flight:
            self._since = begun
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        seconds = self.delay()
        self.seconds += seconds
        try:
            await asyncio.sleep(seconds)
            return await self._answer(request, body, text, self.trouble(text, attempt))
        finally:
            self.in_flight -= 1
            self.in_flight_s += time.monotonic() - begun
            if not self.in_flight:
                self.busy_s += time.monotonic() - self._since

    async def _answer(
        self, request: web.Request, body: dict[str, Any], text: str, trouble: str | None
    ) -> web.StreamResponse:
        if trouble == "hang":
            await asyncio.sleep(3600)
        if trouble == "drop":
            assert request.transport is not None
            request.transport.abort()
        if trouble == "garbage":
            return web.Response(text="<html>Sorry</html>")
        if trouble == "429":
            return web.Response(status=429, headers={"Retry-After": "0.2"}, text="slow down")
        if trouble and re.fullmatch(r"\d{3}", trouble):
            key = request.headers.get("Authorization", "")
            return web.Response(status=int(trouble), text=f"no, {key}")
        if "responses" in body:
            return web.json_response({"scores": [grade(str(x)) for x in body["responses"]]})
        if "messages" not in body:
            return web.json_response({"score": grade(text)})
        numbered = re.findall(r"^(\d+)\.\n(.*)$", text, re.MULTILINE)
        content = f"It is fine.\nScore: {trouble or grade(text)}"
        if "Score N: GRADE" in text:
            content = "\n".join(f"Score {i}: {grade(answer)}" for i, answer in numbered)
        return web.json_response({"choices": [{"message": {"content": content}}]})


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds of an answer, mean")
    parser.add_argument("--trouble", type=float, default=0.0, help="share of requests")
    options = parser.parse_args()
    draw = random.Random(0)

    def trouble(text: str, attempt: int) -> str | None:
        return draw.choice(TROUBLES) if draw.random() < options.trouble else None

    async def serve() -> None:
        judge = StubJudge(lambda: draw.uniform(0.5, 1.5) * options.delay, trouble, options.port)
        await judge.start()
        print(f"reward.endpoint.url={judge.url} reward.endpoint.model=stub", flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
