"""The policy in training behind OpenAI's API: `/v1/chat/completions` on loopback."""

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from hybridrl.config import ConfigError
from hybridrl.environments.program import ROLES, Model, TurnLimit
from hybridrl.environments.task import ChatMessage, ModelTurn
from hybridrl.environments.tool_calls import ToolCall, Tools, find_calls

LARGEST_REQUEST = 16 << 20
"""Bytes of a request, which holds a whole conversation."""
REFUSED = {
    "n": ((1, None), "1: an episode is one conversation"),
    "logprobs": ((False, None), "false: the ranks keep log-probabilities"),
    "top_logprobs": ((0, None), "0: the ranks keep log-probabilities"),
    "functions": (([], None), "tools"),
    "audio": ((None,), "text"),
}
"""Parameters that are refused, less these values, and what is allowed. Others, of sampling say, are
passed over: the run's settings hold."""
TYPES: dict[str, tuple[type, str]] = {
    "model": (str, "a text"),
    "stream": (bool, "true or false"),
    "stream_options": (Mapping, "an object"),
}
"""Parameters that are read, besides messages and tools; null is as left out."""


class Refusal(Exception):
    """An answer that is no completion; `code` is that of HTTP."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ChatEndpoint:
    """Serves all episodes of a process, each under a separate key.

    A request whose messages extend the conversation recorded so far continues it. Its new messages
    are a reply, and the completion is the model's next turn. Other requests get 409 with the first
    difference, and the episode has failed (`rewritten`): its tokens would not be those read.
    """

    def __init__(self, port: int) -> None:
        """`port` 0: any that is free."""
        self.port = port
        self._models: dict[str, Model] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; once. Raises ConfigError where the port is taken."""
        if self._runner is not None:
            return
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_get("/v1/models", self._list_models)
        # A client that is gone waits for no turn, and a process that ends for no client.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        except OSError as error:
            allowed = f"0, or a port that is free ({error.strerror or error})"
            raise ConfigError("environment.port", self.port, allowed) from error
        self.port = self._runner.addresses[0][1]

    def admit(self, model: Model) -> tuple[str, str]:
        """The address and a key for an episode's model, until `dismiss`."""
        key = f"sk-{secrets.token_hex(16)}"
        self._models[key] = model
        return f"http://127.0.0.1:{self.port}/v1", key

    def dismiss(self, model: Model) -> None:
        """Take an episode's keys back."""
        self._models = {key: other for key, other in self._models.items() if other is not model}

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            model = self._model_of(request)
            with _as_refusal():
                body = json.loads(await request.read())
            whole = await completion(model, body)
            if not body.get("stream"):
                return web.json_response(whole)
            options = body.get("stream_options") or {}
            return await _streamed(request, chunks_of(whole, bool(options.get("include_usage"))))
        except Refusal as error:
            told = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            return web.json_response({"error": told}, status=error.code)

    def _model_of(self, request: web.Request) -> Model:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or key not in self._models:
            raise Refusal(401, "no episode has this key")
        return self._models[key]


async def _streamed(request: web.Request, chunks: Iterable[Any]) -> web.StreamResponse:
    """Send chunks as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    lines = [json.dumps(chunk) for chunk in chunks]
    await response.write("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())
    await response.write_eof()
    return response


async def completion(model: Model, body: Any) -> dict[str, Any]:
    """The model's next turn after the messages of a request. Raises Refusal."""
    if not isinstance(body, Mapping):
        raise Refusal(400, "the request is no object")
    for name, (kind, wanted) in TYPES.items():
        if not isinstance(body.get(name), kind | None):
            raise Refusal(400, f"{name}={body[name]!r:.40}: wanted {wanted}")
    for name, (values, allowed) in REFUSED.items():
        # The types too: True equals 1.
        if not any(type(body.get(name)) is type(x) and body.get(name) == x for x in values):
            raise Refusal(400, f"{name}={body[name]!r:.40}: wanted {allowed}")
    messages, tools = read_messages(body.get("messages")), read_tools(body.get("tools"))
    if not model.messages:
        model.tools = tools
    elif tools != model.tools:
        model.rewrite("the tools are not those of the first request")
        raise Refusal(409, "the tools are not those of the first request")
    if repeats(model, messages):
        return recorded_completion(model, body)
    new = extension(model, messages)
    try:
        turn = await model.turn(new)
    except TurnLimit:
        model.reach_limit()
        raise Refusal(400, "environment.max_turns is reached: the episode has ended") from None
    except RuntimeError as error:
        raise Refusal(400, str(error)) from error
    calls = find_calls(turn.text, tools)
    model.replaced += sum(call.replaced for call in calls)
    model.messages[-1] = answer_of(turn, calls, len(model.turns), tools)
    return recorded_completion(model, body)


def recorded_completion(model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    """The completion that has the model's last turn, for a request."""
    turn, message = model.turns[-1], model.messages[-1]
    reason = "tool_calls" if message.get("tool_calls") else turn.finish
    return {
        "id": f"chatcmpl-{len(model.turns)}",
        "object": "chat.completion",
        "created": 0,  # a replay gives the same
        "model": str(body.get("model") or "policy"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.tokens,
            "total_tokens": turn.prompt_tokens + turn.tokens,
        },
    }


def chunks_of(whole: Mapping[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
    """A completion as the chunks of a stream: message, finish, usage where it is asked for.

    A turn comes from its rank as a whole, so its text is one chunk.
    """
    (choice,) = whole["choices"]
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    head = {name: whole[name] for name in ("id", "created", "model")}
    head |= {"object": "chat.completion.chunk", **({"usage": None} if with_usage else {})}
    for delta, reason in ((message, None), ({}, choice["finish_reason"])):
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if with_usage:
        yield {**head, "choices": [], "usage": whole["usage"]}


def repeats(model: Model, messages: Sequence[ChatMessage]) -> bool:
    """Whether these are those of the last request: its client has not received the answer."""
    before = model.messages[:-1]
    return bool(model.turns) and list(map(canonical, messages)) == list(map(canonical, before))


def extension(model: Model, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages that are new; raises Refusal where the others are not those recorded."""
    recorded = model.messages
    for number, before in enumerate(recorded):
        now = messages[number] if number < len(messages) else None
        if now is None or canonical(now) != canonical(before):
            difference = f"message {number} was {_shown(before)}, and is {_shown(now)}"
            model.rewrite(difference)
            raise Refusal(409, f"{difference}: a conversation can only be continued")
    new = list(messages[len(recorded) :])
    if not new or (recorded and any(m["role"] not in ROLES for m in new)):
        raise Refusal(400, "no new message of the user's or a tool's after the recorded ones")
    return new


def read_messages(value: Any) -> list[ChatMessage]:
    """The messages of a request, with their contents as text. Raises Refusal."""
    if not isinstance(value, list) or not value:
        raise Refusal(400, "messages is no list of messages")
    messages = []
    for entry in value:
        if not isinstance(entry, Mapping) or entry.get("role") not in (*ROLES, "assistant"):
            raise Refusal(400, f"{entry!r:.60} is no message")
        content = entry.get("content")
        if isinstance(content, list):
            if any(not isinstance(c, Mapping) or c.get("type") != "text" for c in content):
                raise Refusal(400, "a message's content is not text alone")
            content = "".join(str(piece.get("text") or "") for piece in content)
        if not isinstance(content, str | None):
            raise Refusal(400, f"a message's content is {content!r:.40}, wanted a text")
        _check_calls(entry.get("tool_calls"))
        told = {key: value for key, value in entry.items() if value is not None}
        messages.append({**told, "content": content or ""})
    return messages


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a request. Raises Refusal."""
    if not isinstance(value, list | None) or not all(isinstance(x, dict) for x in value or ()):
        raise Refusal(400, f"tools is {value!r:.60}, wanted a list of objects")
    for tool in value or ():
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refusal(400, f"tools has {tool!r:.60}, wanted functions with a name")
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else 0
        if not isinstance(properties, Mapping | None):
            wanted = "a JSON schema with properties by name"
            raise Refusal(400, f"parameters of {function['name']}: wanted {wanted}")
    return tuple(value or ())


def _check_calls(value: Any) -> None:
    """Raise Refusal where a message's calls of tools have no form."""
    if not isinstance(value, list | None):
        raise Refusal(400, f"tool_calls is {value!r:.40}, wanted a list of objects")
    for call in value or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise Refusal(400, f"tool_calls has {call!r:.40}, wanted objects with a function")


def canonical(message: ChatMessage) -> tuple[Any, ...]:
    """What of a message a template sees, in one form: clients write what they read otherwise."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.dumps(json.loads(str(arguments)), sort_keys=True)
        calls.append((call.get("id"), function.get("name"), arguments))
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")


def answer_of(turn: ModelTurn, tried: Sequence[ToolCall], number: int, tools: Tools) -> ChatMessage:
    """A turn as the message that a client gets; its calls of `tools` have ids that replays keep.

    It has the text as well, where the model has called something wrongly: a client sees it there.
    """
    names = {tool["function"]["name"] for tool in tools}
    calls = [call for call in tried if not call.error and call.name in names]
    message: ChatMessage = {"role": "assistant", "content": turn.text}
    if calls:
        message["content"] = None if len(calls) == len(tried) else turn.text
        message["tool_calls"] = [
            {
                "id": call.id or f"call{number:02}{index:03}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(calls)
        ]
    return message


def _shown(message: ChatMessage | None) -> str:
    if message is None:
        return "left out"
    role, content, calls, _ = canonical(message)
    return f"{role} {content[:60]!r}{f' with {calls}' if calls else ''}"


@contextlib.contextmanager
def _as_refusal() -> Any:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is no JSON ({error})") from error
