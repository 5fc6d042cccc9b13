"""The client of an endpoint that judges: requests in flight, retries, budget, and the replies kept.

docs/judges.md has the requests and replies.
"""

import asyncio
import contextlib
import email.utils
import hashlib
import heapq
import itertools
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from hybridrl.config import ConfigError, JudgeConfig, RewardCall, RewardKind
from hybridrl.config.endpoint import GROUP_SCORE, NUMBER, SCORE, SCORE_FIELDS
from hybridrl.config.patterns import compiled
from hybridrl.config.row_fields import fill
from hybridrl.rewards.results import BudgetSpent, EndpointError, EndpointTimeout, RewardInput
from hybridrl.sandbox.worker import cpu_limit

MAX_BACKOFF_S = 60.0
MAX_RETRY_AFTER_S = 600.0
"""Seconds of a `Retry-After` that are kept to; an endpoint that asks for more gets less."""
PROBE_S = 10.0
"""Seconds in which an endpoint must answer at all, before a run."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses of HTTP below 500 after which a request is worth a retry."""
REFUSING = frozenset({401, 403})
NOT_THERE = 404
SHOWN = 200
"""Characters of a reply in a message."""


class Endpoint:
    """Asks for scores; to be used in one event loop.

    At most `max_in_flight` requests are in flight. One that failed waits for its retry without a
    place among them, so a slow or failing reply holds no other up. Requests of equal content share
    one reply.

    `counts` are the requests so far, the retries among them, and the replies that were there.
    """

    def __init__(self, config: JudgeConfig, replies: Path | None = None) -> None:
        """`replies` is the file that they are kept in. Raises ConfigError for a missing key."""
        self.config, self.settings = config, config.endpoint
        self._is_chat = config.kind is RewardKind.chat
        self._whole_groups = config.call is RewardCall.group
        if self._is_chat:
            self._pattern = compiled("reward.endpoint.score", self.settings.score or SCORE)
        self._key = _key_of(config)
        self._proxy = _proxy_of(self.url)
        self._file = ReplyFile(replies)
        self._slots = RequestSlots(config.max_in_flight)
        self._asked: dict[str, asyncio.Future[str]] = {}
        self._session: aiohttp.ClientSession | None = None
        self.counts = {"requests": 0, "retries": 0, "cached": 0}

    @property
    def url(self) -> str:
        """Where requests go."""
        base = str(self.settings.url)
        return f"{base.rstrip('/')}/chat/completions" if self._is_chat else base

    @property
    def _late(self) -> str:
        return f"no reply within {self.settings.timeout_s:g} s"

    async def probe(self) -> None:
        """Raise ConfigError where nothing answers, or the key is refused; asks for no score."""
        base = str(self.settings.url)
        status = await self._probe("GET", f"{base.rstrip('/')}/models" if self._is_chat else base)
        # Not every API has a list of models. An empty request is none that costs.
        if status == NOT_THERE and await self._probe("POST", self.url) == NOT_THERE:
            such_as = ", such as http://HOST:8000/v1" if self._is_chat else ""
            allowed = f"the address of a judge{such_as} ({self.url} is HTTP {NOT_THERE})"
            raise ConfigError("reward.endpoint.url", base, allowed)
        if status in REFUSING:
            name = self.settings.key_env
            allowed = f"a variable with a key that {base} accepts (it answers HTTP {status})"
            raise ConfigError("reward.endpoint.key_env", name or "null", allowed)

    async def _probe(self, method: str, url: str) -> int:
        """The status of a request without content; raises ConfigError where nothing answers."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        content: dict[str, Any] | None = {} if method == "POST" else None
        try:
            async with self._opened().request(
                method,
                url,
                headers=self._headers(),
                proxy=self._proxy,
                timeout=timeout,
                json=content,
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = self._clean(str(error) or f"nothing within {PROBE_S:g} s")
            allowed = f"an endpoint that answers ({reason})"
            raise ConfigError("reward.endpoint.url", str(self.settings.url), allowed) from None

    async def close(self) -> None:
        """Close its connections and its file."""
        self._file.close()
        if self._session is not None:
            await self._session.close()

    async def scores(
        self, items: Sequence[RewardInput], texts: Sequence[str | None]
    ) -> list[float]:
        """The rewards of responses to one prompt, of which `texts` are judged.

        Raises EndpointError or BudgetSpent.
        """
        body = self._chat_body(items, texts) if self._is_chat else self._http_body(items, texts)
        body |= self.settings.body
        body = {name: value for name, value in body.items() if value is not None}
        reply = await self._shared_reply(body, lambda reply: self.read(reply, len(items)))
        return self.read(reply, len(items))

    # -- requests ------------------------------------------------------------------------------

    def _chat_body(
        self, items: Sequence[RewardInput], texts: Sequence[str | None]
    ) -> dict[str, Any]:
        item, settings = items[0], self.settings
        responses = "\n\n".join(f"{i}.\n{text or ''}" for i, text in enumerate(texts, 1))
        fields = {**item.item, "prompt": item.prompt, "row": item.item}
        fields["answer"] = " or ".join(item.right_answers) or "(none)"
        fields["question"] = _plain(item.asked)
        fields |= {"response": texts[0] or "", "responses": responses}
        try:
            content = fill(settings.rubric(self._whole_groups), fields)
        except (KeyError, ValueError, TypeError) as error:
            raise EndpointError(f"the template does not fit the row ({error})") from None
        return {
            "model": settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }

    def _http_body(
        self, items: Sequence[RewardInput], texts: Sequence[str | None]
    ) -> dict[str, Any]:
        item = items[0]
        body = {"prompt": item.prompt, "answer": item.told_answer, "item": dict(item.item)}
        if self._whole_groups:
            body["responses"] = [text or "" for text in texts]
        else:
            body["response"] = texts[0] or ""
        return body

    async def _shared_reply(self, body: dict[str, Any], check: Callable[[str], object]) -> str:
        """The reply to a request: one that is kept, one that is being waited for, or a new one."""
        content = json.dumps(body, sort_keys=True, default=str)
        key = hashlib.sha256(f"{self.url}\n{content}".encode()).hexdigest()
        if not self.settings.cache:
            return await self._reply(content, check)
        kept = self._file.reply(key)
        if kept is not None:
            with contextlib.suppress(EndpointError):  # the way to read it may have changed
                check(kept)
                self.counts["cached"] += 1
                return kept
        if key in self._asked:
            self.counts["cached"] += 1
            return await self._asked[key]
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            reply = await self._reply(content, check)
        except BaseException as error:
            asked.set_exception(error)
            asked.exception()  # perhaps no other has waited
            raise
        finally:
            del self._asked[key]
        asked.set_result(reply)
        self._file.keep(key, reply)
        return reply

    async def _reply(self, content: str, check: Callable[[str], object]) -> str:
        """The first good reply; raises EndpointError after the last retry."""
        for retry in range(self.settings.retries + 1):
            async with self._slots.one(retry):
                self._spend(retry)
                reply, problem, wait_s = await self._ask(content)
            if not problem:
                try:
                    check(reply)
                    return reply
                except EndpointError as error:
                    problem, wait_s = str(error), 0.0
            if wait_s is None:
                break
            if retry < self.settings.retries:
                most = min(MAX_BACKOFF_S, self.settings.backoff_s * 2**retry)
                await asyncio.sleep(max(wait_s, most * random.uniform(0.5, 1.0)))
        kind = EndpointTimeout if problem == self._late else EndpointError
        raise kind(self._clean(problem))

    def _spend(self, retry: int) -> None:
        budget = self.settings.budget
        if budget is not None and self._file.spent >= budget:
            raise BudgetSpent(f"budget={budget}: all of these requests are spent")
        self._file.count()
        self.counts["requests"] += 1
        self.counts["retries"] += retry > 0

    async def _ask(self, content: str) -> tuple[str, str, float | None]:
        """One request: its reply, or the problem and the seconds to wait at least.

        None of them where no retry helps.
        """
        headers = {"Content-Type": "application/json", **self._headers()}
        timeout = aiohttp.ClientTimeout(total=self.settings.timeout_s)
        try:
            async with self._opened().post(
                self.url, data=content.encode(), headers=headers, proxy=self._proxy, timeout=timeout
            ) as response:
                text = await response.text(errors="replace")
        except TimeoutError:
            return "", self._late, 0.0
        except (aiohttp.ClientError, OSError) as error:
            return "", f"{type(error).__name__}: {error}", 0.0
        if response.status < 300:
            return self._clean(text), "", 0.0
        problem = f"HTTP {response.status} {response.reason}: {text[:SHOWN]}"
        if response.status in PASSING or response.status >= 500:
            return "", problem, _retry_after(response.headers.get("Retry-After"))
        return "", problem, None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The slots bound them. Without `trust_env`, which would send ~/.netrc's password.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    # -- replies -------------------------------------------------------------------------------

    def read(self, reply: str, number: int) -> list[float]:
        """So many rewards from a reply; raises EndpointError for one that has not got them."""
        try:
            value = json.loads(reply)
        except ValueError:
            raise EndpointError(f"no JSON: {reply[:SHOWN]!r}") from None
        scores = self._of_chat(value, number) if self._is_chat else self._of_http(value, number)
        return [self._in_range(score) for score in scores]

    def _of_chat(self, value: Any, number: int) -> list[float]:
        try:
            text = str(value["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"no message of a chat: {str(value)[:SHOWN]}") from None
        if self._whole_groups and self.settings.score is None:
            return _numbered_scores(text, number)
        with cpu_limit(self.config.timeout_s):  # the expression is the user's
            matches = [match.group(1) for match in self._pattern.finditer(text)]
        numbers = [str(match) for match in matches if re.fullmatch(NUMBER, str(match).strip())]
        if len(numbers) < number or (self._whole_groups and len(numbers) != number):
            raise EndpointError(f"{len(numbers)} scores for {number} responses: {text[-SHOWN:]!r}")
        return [float(score) for score in numbers[-number:]]

    def _of_http(self, value: Any, number: int) -> list[float]:
        name = self.settings.score or SCORE_FIELDS[self._whole_groups]
        score = value
        for step in name.split("."):
            score = score.get(step) if isinstance(score, Mapping) else None
        scores = score if self._whole_groups else [score]
        known = isinstance(scores, list) and len(scores) == number
        if not known or any(isinstance(x, bool) or not isinstance(x, int | float) for x in scores):
            wanted = f"a list of {number} numbers" if self._whole_groups else "a number"
            raise EndpointError(f"{name} is not {wanted}: {str(value)[:SHOWN]}")
        return [float(score) for score in scores]

    def _in_range(self, score: float) -> float:
        if not math.isfinite(score):
            raise EndpointError(f"the score is {score}")
        bounds = self.settings.rubric_range if self._is_chat else self.settings.score_range
        if bounds is None:
            return score
        low, high = bounds
        if not low <= score <= high:
            raise EndpointError(f"the score {score:g} is not from {low:g} to {high:g}")
        return (score - low) / (high - low)

    def _clean(self, text: str) -> str:
        """Without the key, which an endpoint may send back."""
        return text.replace(self._key, "***") if self._key else text


class RequestSlots:
    """`number` slots; of requests that wait for one, that of the most tries goes first.

    In the order of their coming, retries would follow all that is new. At the end they alone would
    be left, few at a time, and fill few of the slots. To be used in one event loop.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def one(self, retry: int) -> AsyncIterator[None]:
        """Hold a slot; `retry` counts the tries before this one."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-retry, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Hand a slot to the next that waits and was not canceled."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _numbered_scores(text: str, number: int) -> list[float]:
    """Scores of a group by the number that each line names, once each; a lone one may lack it."""
    scores = sorted((int(m[1] or 1), float(m[2])) for m in re.finditer(GROUP_SCORE, text))
    numbers = [index for index, _ in scores]
    if numbers != list(range(1, number + 1)):
        shown = f"{numbers}, wanted each of 1 to {number} once: {text[-SHOWN:]!r}"
        raise EndpointError(f"scores of the responses {shown}")
    return [score for _, score in scores]


def _key_of(config: JudgeConfig) -> str:
    name = config.endpoint.key_env
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError("reward.endpoint.key_env", name, "a variable that is set, to the key")
    return key


def _proxy_of(url: str) -> str | None:
    """The proxy for an address, by the environment: `https_proxy`, `no_proxy` and so on."""
    parts = urlsplit(url)
    if proxy_bypass(parts.netloc):
        return None
    proxy = getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _retry_after(value: str | None) -> float:
    """The seconds that an endpoint asks to wait, which it gives as such or as a date."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_S)


def _plain(question: Any) -> str:
    """A question as text, which may be a list of messages."""
    if not isinstance(question, list):
        return str(question)
    messages = [message for message in question if isinstance(message, Mapping)]
    return "\n\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)


class ReplyFile:
    """Replies by key, and the number of requests, in a file of the run directory.

    Lines: `{"key": ..., "reply": ...}` for each reply that is kept, `{"requests": 1}` for each
    request. Memory holds only where a reply stands: a long run has gigabytes of them. With `path`
    None nothing outlives the object.
    """

    def __init__(self, path: Path | None) -> None:
        self.spent = 0
        """Requests so far, of earlier runs on this file, too."""
        self._places: dict[str, int] = {}
        if path is None:
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (see close)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        place, line = 0, b""
        for line in self._file:
            with contextlib.suppress(ValueError):  # cut off when its run was killed
                entry = json.loads(line)
                self.spent += entry.get("requests", 0)
                if "key" in entry:
                    self._places[entry["key"]] = place
            place += len(line)
        if line and not line.endswith(b"\n"):
            self._file.write(b"\n")

    def count(self) -> None:
        """Note a request, before it is sent."""
        self.spent += 1
        self._write({"requests": 1})

    def keep(self, key: str, reply: str) -> None:
        """Note a reply."""
        self._places[key] = self._write({"key": key, "reply": reply})

    def reply(self, key: str) -> str | None:
        """The last reply that was kept under a key."""
        if key not in self._places:
            return None
        self._file.seek(self._places[key])
        return str(json.loads(self._file.readline())["reply"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> int:
        """Append a line, and give its place."""
        place = self._file.seek(0, 2)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        return place
