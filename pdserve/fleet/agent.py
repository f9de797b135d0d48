"""The worker's private agent: routes that vLLM's own API server gets from our `vllm.endpoint_plugins` entry point, and the lock on all its routes.

Reaches the engine core through one utility method (`pdserve.kv.engine_plugin`), which runs between two steps. Knows vLLM's front end; nothing of
who asks, of roles or of the fleet.
"""

import asyncio
import hmac
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from pdserve.ports import AbortReport, AgentStatus, PeerEntry, PeerHandshake
from pdserve.types import RankAddress

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

SECRET_HEADER = b"x-pdserve-secret"
ENGINE_METHOD = "pdserve"
PREFIX = "/pdserve/v1"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SecretMiddleware:
    """Asks for the cluster secret on every path, health and metrics included; constant-time comparison.

    Args:
        app: the ASGI application behind it.
        secret: what to ask for; from `PDSERVE_SECRET` by default. Without one, nothing passes.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], secret: str | None = None) -> None:
        self._app = app
        self._secret = (secret if secret is not None else os.environ.get("PDSERVE_SECRET", "")).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            response = JSONResponse(
                {"error": {"message": "wrong or missing secret", "type": "authentication_error", "param": None, "code": None}}, 401
            )
            await response(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        given = next((value for name, value in scope.get("headers", ()) if name == SECRET_HEADER), b"")
        return bool(self._secret) and hmac.compare_digest(given, self._secret)


class AgentPlugin:
    """vLLM's endpoint plugin: attaches the agent's routes."""

    name = "pdserve_agent"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(_routes())

    async def init_state(self, engine_client: "EngineClient | None", state: "State", args: Namespace) -> None:
        state.pdserve_engine = engine_client


def _routes() -> APIRouter:
    router = APIRouter(prefix=PREFIX)

    @router.get("/status")
    async def status(request: Request) -> JSONResponse:
        engine = request.app.state.pdserve_engine
        facts = await _call(engine, "status")
        return _json(_status(facts, engine))

    @router.put("/peers")
    async def peers(request: Request) -> JSONResponse:
        body = msgspec.json.decode(await request.body(), type=_PeersBody)
        rows = [
            (entry.worker_id, entry.incarnation, rank.rank, rank.host, rank.port, entry.tensor_parallel_size)
            for entry in body.peers
            for rank in entry.ranks
        ]
        await _call(request.app.state.pdserve_engine, "peers", [body.version, rows])
        return _json({})

    @router.get("/records")
    async def records(request: Request, after: int = 0) -> JSONResponse:
        return _json(await _call(request.app.state.pdserve_engine, "records", after))

    @router.post("/abort")
    async def abort(request: Request) -> JSONResponse:
        body = msgspec.json.decode(await request.body(), type=_AbortBody)
        return _json(await abort_requests(request.app.state.pdserve_engine, body.request_ids))

    return router


class _PeersBody(msgspec.Struct):
    version: int
    peers: list[PeerEntry]


class _AbortBody(msgspec.Struct):
    request_ids: list[str]


async def _call(engine: Any, operation: str, argument: Any = None) -> Any:
    return await engine.engine_core.call_utility_async(ENGINE_METHOD, operation, argument)


async def abort_requests(engine: Any, request_ids: list[str]) -> AbortReport:
    """Abort by the router's ids, then go through the engine loop: when that returns, the abort is done.

    A request that was answered is no longer the front end's to abort, but its blocks are kept while its transfer is open: that is closed.
    """
    started_s = time.monotonic()
    live = engine.output_processor.external_req_ids
    # Not waited for yet: the engine takes it, the abort and the question behind that between the same two steps.
    before = asyncio.ensure_future(_call(engine, "blocks"))
    await asyncio.sleep(0)
    aborted = 0
    while True:
        engine_ids = engine_request_ids(live, request_ids)
        await engine.abort(engine_ids)
        aborted += len(engine_ids)
        after, kept = await _call(engine, "kept")
        if not engine_request_ids(live, request_ids):
            break
    held = {internal_id: _router_id(external_id(internal_id)) for internal_id in kept}
    wanted = set(request_ids)
    mine = [internal_id for internal_id, router_id in held.items() if router_id in wanted]
    if mine:
        await _call(engine, "close", mine)
    return AbortReport(aborted, await before, after, time.monotonic() - started_s, tuple({held[internal_id] for internal_id in mine}))


def engine_request_ids(live: Iterable[str], request_ids: Iterable[str]) -> list[str]:
    """Return the front end's ids of the router's requests."""
    wanted = set(request_ids)
    return [engine_id for engine_id in live if _router_id(engine_id) in wanted]


def external_id(internal_id: str) -> str:
    """Return the front end's id of a request, which the engine core knows with a random part behind it."""
    return internal_id.rpartition("-")[0]


def _router_id(engine_id: str) -> str:
    """Undo what vLLM makes of the router's id: a prefix before it, and for completions a prompt's number, for responses a turn's number behind it."""
    if engine_id.startswith("resp_"):
        return engine_id.removeprefix("resp_").rpartition("_")[0]
    prefix, _, rest = engine_id.partition("-")
    return rest if prefix == "chatcmpl" else rest.rpartition("-")[0]


def _status(facts: dict[str, Any], engine: Any) -> AgentStatus:
    config = engine.vllm_config
    extra = config.kv_transfer_config.kv_connector_extra_config
    served = config.model_config.served_model_name
    return AgentStatus(
        worker_id=extra["worker_id"],
        incarnation=extra["incarnation"],
        model=served[0] if isinstance(served, list) else served,
        max_model_len=config.model_config.max_model_len,
        block_tokens=facts["block_tokens"],
        blocks_total=facts["blocks_total"],
        blocks_free=facts["blocks_free"],
        running=facts["running"],
        waiting=facts["waiting"],
        transfers_open=facts["transfers_open"],
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        ranks=tuple(RankAddress(**rank) for rank in facts["ranks"]),
        handshakes=tuple(
            PeerHandshake(peer_worker=worker, peer_incarnation=incarnation, rank=rank, peer_rank=peer_rank, state=state, reason=reason)
            for worker, incarnation, rank, peer_rank, state, reason in facts["handshakes"]
        ),
    )


def _json(value: object) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(value))
