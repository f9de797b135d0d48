"""The admin application: the controller's side of the router, on a port of its own, behind the deployment's secret or an admin's key."""

import hmac
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve import __version__
from pdserve.errors import PdserveError
from pdserve.observe.receipts import KEPT
from pdserve.server.app import add_error_shape, error_response
from pdserve.server.auth import Auth
from pdserve.server.errors import to_http
from pdserve.server.features import has_moved
from pdserve.server.keys import Scope as KeyScope
from pdserve.server.router import Router
from pdserve.server.upstream import SECRET_HEADER
from pdserve.types import FleetSnapshot, Receipt, Role

DEFAULT_RECEIPTS = 100
_decode_fleet = msgspec.json.Decoder(FleetSnapshot).decode


class _CanaryPair(msgspec.Struct):
    prefill_worker: str
    decode_worker: str


_decode_pair = msgspec.json.Decoder(_CanaryPair).decode


class SecretGate:
    """ASGI middleware that answers 401 on every path to whoever knows neither the secret nor an admin's key."""

    def __init__(self, app: ASGIApp, secret: str, auth: Auth) -> None:
        self._app = app
        self._auth = auth
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = SECRET_HEADER.encode()
            given = next((value for header, value in scope["headers"] if header == name), b"")
            is_known = hmac.compare_digest(given, self._secret) or self._auth.opens(scope["headers"], KeyScope.ADMIN)
            if not is_known:
                await error_response(401, "the secret is missing or wrong", "unauthorized")(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_admin_app(router: Router, secret: str) -> FastAPI:
    """Return the ASGI application of the admin port."""
    app = FastAPI(title="pdserve admin", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(SecretGate, secret=secret, auth=router.auth)
    add_error_shape(app)

    @app.exception_handler(msgspec.DecodeError)
    async def bad_body(_request: Request, error: msgspec.DecodeError) -> Response:
        return error_response(400, f"the body is not what this path takes: {error}", "invalid_body")

    @app.exception_handler(PdserveError)
    async def refused(_request: Request, error: PdserveError) -> Response:
        http = to_http(error)
        return Response(http.body, http.status, media_type="application/json")

    @app.put("/admin/v1/fleet")
    async def put_fleet(request: Request) -> Response:
        router.update_fleet(_decode_fleet(await request.body()))
        return _json({"version": router.pool.version})

    @app.post("/admin/v1/canary")
    async def canary(request: Request) -> Response:
        """Serve one token through a pair: its receipt if KV really moved, else an error that says how far it came."""
        pair = _decode_pair(await request.body())
        receipt = await router.canary(pair.prefill_worker, pair.decode_worker)
        if receipt.outcome != "finished":
            return error_response(502, f"no token came: {receipt.outcome}, status {receipt.status}, {receipt.reason}", "canary_failed")
        if receipt.receive is None or not has_moved(receipt.receive):
            executed = receipt.executed["disaggregation"]
            return error_response(502, f"a token came, but decode computed the prompt itself: {executed}", "canary_failed")
        return _json(receipt)

    @app.exception_handler(RequestValidationError)
    async def bad_argument(_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return error_response(400, f"{field}: {first['msg'].lower()}", "invalid_value", param=field)

    _add_receipts(app, router)

    @app.get("/admin/v1/status")
    async def status() -> Response:
        return _json(_status(router))

    return app


def _add_receipts(app: FastAPI, router: Router) -> None:
    @app.get("/admin/v1/receipts")
    async def receipts(
        limit: Annotated[int, Query(ge=0, le=KEPT)] = DEFAULT_RECEIPTS,
        outcome: str | None = None,
        path: str | None = None,
        reason: str | None = None,
    ) -> Response:
        """Return the last receipts, newest first; of one outcome, path or reason if given."""
        wanted = [(name, value) for name, value in (("outcome", outcome), ("path", path), ("reason", reason)) if value is not None]
        return _json({"receipts": router.receipts.last(limit, lambda r: all(getattr(r, name) == value for name, value in wanted))})

    @app.get("/admin/v1/receipts/{known_as}")
    async def receipt(known_as: str) -> Response:
        """Return one receipt, by the request's id, the client's word for it, or the transfer's id."""
        found = router.receipts.find(known_as)
        if found is None:
            return error_response(
                404, f"no such receipt among the last {KEPT}; one appears when its transfer's records are in", "not_found"
            )
        return _json(found)


def _status(router: Router) -> dict[str, Any]:
    pool = router.pool
    load, kv_load = pool.load(), pool.kv_load()
    return {
        "fleet_version": pool.version,
        "queue": {
            "requests": pool.queued_requests,
            "tokens": pool.queued_tokens,
            "max_tokens": pool.max_queued_tokens,
        },
        "in_flight": {role.value: pool.in_flight(role) for role in Role},
        "running": router.running,
        "pending_receipts": router.pending_receipts,
        "breakers": [
            {"prefill_worker": prefill and prefill[0], "decode_worker": decode and decode[0], "state": state.value}
            for (prefill, decode), state in pool.breakers.states().items()
        ],
        "disaggregation": {model: verdict.value for model, verdict in pool.verdicts().items()},
        "stopping": router.is_stopping,
        "workers": [
            {**asdict(worker), "in_flight": load[worker.worker_id], "kv_reserved_tokens": kv_load[worker.worker_id]}
            for worker in pool.workers
        ],
    }


def _json(value: Receipt | dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
