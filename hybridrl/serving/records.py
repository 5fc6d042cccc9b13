"""The routes of the SDK's REST client: training runs, checkpoints and sessions, to list and delete.

A training run is a model. What other accounts, billing or publishing would need is refused.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from hybridrl.serving import payloads
from hybridrl.serving.futures import LARGEST_SEQ
from hybridrl.serving.payloads import integer, required
from hybridrl.serving.requests import (
    Checkpoint,
    CheckpointPath,
    Delete,
    Expire,
    Refused,
    check_model_name,
)
from hybridrl.serving.routes import Api
from hybridrl.serving.sessions import Unknown

LATEST = datetime.max.replace(tzinfo=UTC).timestamp() - 1
TYPES = {"weights": "training", "sampler_weights": "sampler"}


class RecordRoutes:
    """The routes over the files of an API's backend and over its sessions."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def routes(self) -> list[web.RouteDef]:
        """The routes, the last of which refuses by name what is not served."""
        run, checkpoint = "training_runs/{model}", "training_runs/{model}/checkpoints/{kind}/{name}"
        return [
            web.post("/api/v1/weights_info", self._weights_info),
            web.get("/api/v1/training_runs", self._runs),
            web.get(f"/api/v1/{run}", self._run),
            web.get(f"/api/v1/{run}/checkpoints", self._checkpoints),
            web.get("/api/v1/checkpoints", self._checkpoints),
            web.delete(f"/api/v1/{checkpoint}", self._delete),
            web.put(f"/api/v1/{checkpoint}/ttl", self._expire),
            web.get("/api/v1/sessions", self._sessions),
            web.get("/api/v1/sessions/{session}", self._session),
            web.route("*", "/{path:.*}", self._refuse),
        ]

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = required(await self._api.json(request), "tinker_path", str)
        checkpoints = self._api.backend.listed(CheckpointPath.parse(path).model)
        for checkpoint in checkpoints:
            if checkpoint.path == path:
                return web.json_response(self._weights(checkpoint.rank))
        raise Unknown(404, f"{path}: no checkpoint of that name")

    def _weights(self, rank: int) -> dict[str, Any]:
        """What a model's weights are."""
        name = self._api.backend.info.name
        return {"base_model": name, "is_lora": rank > 0, "lora_rank": rank or None}

    async def _runs(self, request: web.Request) -> web.Response:
        runs = self._all_runs()
        shown, cursor = _page(request, runs)
        return web.json_response({"training_runs": shown, "cursor": cursor})

    async def _run(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        for run in self._all_runs():
            if run["training_run_id"] == model:
                return web.json_response(run)
        raise Unknown(404, f"training run {model:.120}: no model and no checkpoint of that name")

    def _all_runs(self) -> list[dict[str, Any]]:
        """Every model that is there or has files, the one used last first."""
        files: dict[str, list[Checkpoint]] = {}
        for checkpoint in self._api.backend.listed():
            files.setdefault(CheckpointPath.parse(checkpoint.path).model, []).append(checkpoint)
        models = {
            name: model
            for session in self._api.sessions.open
            for name, model in session.models.items()
        }
        runs = []
        for name in {**models, **files}:
            saved, model = files.get(name, []), models.get(name)
            rank = saved[-1].rank if saved else self._api.backend.info.lora_rank
            used = model.used if model is not None else saved[-1].created
            runs.append(
                {
                    "training_run_id": name,
                    "model_owner": "local",
                    "last_request_time": _time(used),
                    "last_checkpoint": _last(saved, "weights"),
                    "last_sampler_checkpoint": _last(saved, "sampler_weights"),
                    "user_metadata": model.metadata if model is not None else None,
                    **self._weights(rank),
                }
            )
        return sorted(runs, key=lambda run: str(run["last_request_time"]), reverse=True)

    async def _checkpoints(self, request: web.Request) -> web.Response:
        """The checkpoints of a model, all at once; those of all, newest first, in pages."""
        model = request.match_info.get("model")
        if model is not None:
            check_model_name(model)
        checkpoints = [_shown(checkpoint) for checkpoint in self._api.backend.listed(model)]
        if model is not None:
            return web.json_response({"checkpoints": checkpoints})
        shown, cursor = _page(request, checkpoints[::-1])
        return web.json_response({"checkpoints": shown, "cursor": cursor})

    async def _delete(self, request: web.Request) -> web.Response:
        await self._api.ask(Delete(_path_of(request)))
        return web.json_response({})

    async def _expire(self, request: web.Request) -> web.Response:
        ttl_s = payloads.read_ttl(await self._api.json(request))
        await self._api.ask(Expire(_path_of(request), ttl_s))
        return web.json_response({})

    async def _sessions(self, request: web.Request) -> web.Response:
        names = [session.id for session in self._api.sessions.open]
        shown, _ = _page(request, names[::-1])
        return web.json_response({"sessions": shown})

    async def _session(self, request: web.Request) -> web.Response:
        session = self._api.sessions.get(request.match_info["session"])
        facts = {key: session.facts.get(key) for key in ("user_metadata", "display_name")}
        return web.json_response(
            {
                "training_run_ids": list(session.models),
                "sampler_ids": list(session.samplers),
                **facts,
            }
        )

    async def _refuse(self, request: web.Request) -> web.Response:
        raise Unknown(404, f"{request.method} {request.path}: hybridrl serve has no such route")


def _path_of(request: web.Request) -> str:
    """The path of the checkpoint that a route names. Raises Refused."""
    names = (request.match_info[name] for name in ("model", "kind", "name"))
    return str(CheckpointPath.parse("tinker://" + "/".join(names)))


def _page(request: web.Request, entries: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """The entries that a query asks for by `limit` and `offset`, and where they are."""
    query = {}
    for key in {"limit", "offset"} & request.query.keys():
        try:
            query[key] = int(request.query[key])
        except ValueError:
            raise Refused(f"{key}={request.query[key]:.60}: wanted an integer") from None
    offset = integer(query, "offset", 0, 0, LARGEST_SEQ) or 0
    limit = integer(query, "limit", 100, 0, LARGEST_SEQ) or 0
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return entries[offset : offset + limit], cursor


def _last(checkpoints: Sequence[Checkpoint], kind: str) -> dict[str, Any] | None:
    """The newest checkpoint of a kind."""
    newest_first = (entry for entry in reversed(checkpoints) if f"/{kind}/" in entry.path)
    newest = next(newest_first, None)
    return None if newest is None else _shown(newest)


def _shown(checkpoint: Checkpoint) -> dict[str, Any]:
    path = CheckpointPath.parse(checkpoint.path)
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": TYPES[path.kind],
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "expires_at": None if checkpoint.expires is None else _time(checkpoint.expires),
    }


def _time(seconds: float) -> str:
    seconds = min(seconds, LATEST)  # of a file that somebody has changed
    return datetime.fromtimestamp(seconds, UTC).isoformat()
