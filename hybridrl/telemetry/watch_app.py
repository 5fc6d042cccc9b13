"""The web application of `hybridrl watch`: the page, its data, and the samples of one run.

It answers GET requests alone, and no request names a path.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.records import dump
from hybridrl.telemetry.report import fill_page, script
from hybridrl.telemetry.sample_search import SamplePosition, SampleQuery
from hybridrl.telemetry.watched_run import WatchedRun

Number = TypeVar("Number", int, float)

_SCRIPTS = ("charts.js", "page.js", "samples.js", "live.js")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_POLICY = (
    "default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(run: WatchedRun, token: str | None, hosts: Sequence[str]) -> Starlette:
    """The application; with a `token` it answers only to those who have it.

    `hosts` are the names by which a browser may call it. Others are refused, so that no site's page
    can read the answers under its name (DNS rebinding).
    """
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        Middleware(GZipMiddleware, minimum_size=10_000),
    ]
    if token is not None:
        middleware.append(Middleware(BaseHTTPMiddleware, dispatch=_guard(token)))
    answers = _Answers(run)
    endpoints = {
        "/": answers.page,
        "/data": answers.data,
        "/samples": answers.samples,
        "/sample": answers.sample,
    }
    return Starlette(
        routes=[Route(path, endpoint) for path, endpoint in endpoints.items()],
        middleware=middleware,
        exception_handlers={ConfigError: _refuse},
    )


class _Answers:
    """The endpoints, by their paths; they run in threads."""

    def __init__(self, run: WatchedRun) -> None:
        self.run, self._script = run, script(*_SCRIPTS)
        digest = hashlib.sha256(f"\n{self._script}\n".encode()).digest()
        self._policy = _POLICY.format(digest=base64.b64encode(digest).decode())

    def page(self, request: Request) -> Response:
        """The page with the data of this moment. It runs no script but its own."""
        self.run.read()
        data = self.run.page_data
        headers = {"Content-Security-Policy": self._policy, **_HEADERS}
        return HTMLResponse(fill_page(data["name"], self._script, data), headers=headers)

    def data(self, request: Request) -> Response:
        """The page's data, or nothing where the page has the newest."""
        self.run.read()
        data = self.run.page_data
        if request.query_params.get("have") == data["live"]["version"]:
            return Response(status_code=204)
        return _json(data)

    def samples(self, request: Request) -> Response:
        """A page of the samples that are wanted, where the next one begins, damaged files."""
        query, begin = parse_query(request.query_params)
        return _json(asdict(self.run.search.page(query, begin)))

    def sample(self, request: Request) -> Response:
        """One sample with its tokens."""
        params = request.query_params
        step = _as_number(params, "step", int)
        sample = None if step is None else self.run.search.sample(step, params.get("key", ""))
        return PlainTextResponse("no such sample", 404) if sample is None else _json(sample)


def parse_query(params: Mapping[str, str]) -> tuple[SampleQuery, SamplePosition | None]:
    """What a request asks for, and where its list begins. Raises ConfigError for a wrong number."""
    texts: dict[str, Any] = {
        name: params.get(name, "") for name in ("text", "phase", "kind", "status")
    }
    bounds: dict[str, Any] = {
        name: _as_number(params, name, float) for name in ("min_reward", "max_reward")
    }
    limits: dict[str, Any] = {
        name: _as_number(params, name, int) for name in ("step", "min_tokens", "max_tokens")
    }
    query = SampleQuery(**texts, **bounds, **limits)
    from_step = _as_number(params, "from_step", int)
    skip = _as_number(params, "skip", int) or 0
    return query, None if from_step is None else SamplePosition(from_step, skip)


def _guard(token: str) -> Callable[[Request, RequestResponseEndpoint], Any]:
    """Lets those pass who have the token in the address or, from then on, in a cookie."""
    cookie = f"hybridrl_watch_{secrets.token_hex(4)}"  # a browser's cookies do not tell ports apart

    async def guard(request: Request, proceed: RequestResponseEndpoint) -> Response:
        if _same(request.query_params.get("token", ""), token):
            answer: Response = RedirectResponse("/", 303)  # the token leaves the address bar
            answer.set_cookie(cookie, token, httponly=True, samesite="lax")
            return answer
        if _same(request.cookies.get(cookie, ""), token):
            return await proceed(request)
        return PlainTextResponse("open the address that hybridrl watch has printed", 403)

    return guard


def _same(text: str, token: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(text.encode("utf-8", "replace"), token.encode())


def _json(value: Mapping[str, Any]) -> Response:
    return Response(dump(value), media_type="application/json", headers=_HEADERS)


def _refuse(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 400)


def _as_number(params: Mapping[str, str], key: str, kind: Callable[[str], Number]) -> Number | None:
    text = params.get(key, "")
    try:
        return kind(text) if text.strip() else None
    except ValueError:
        raise ConfigError(key, text, "a number") from None
