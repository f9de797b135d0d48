"""The public application: which path does what, and every error in its API's shape. Knows nothing of how a request is served.

The routes that take a body are raw ASGI: validation by pydantic, dependency solving and response objects would cost more than the rest of the router.
"""

import time

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route as AsgiRoute
from starlette.types import Receive, Scope, Send

from pdserve import __version__
from pdserve.errors import NoReadyWorker
from pdserve.server.api.endpoints import ENDPOINTS, dialect_at
from pdserve.server.api.questions import Question
from pdserve.server.api.request import Route
from pdserve.server.api.responses import NOT_STORED
from pdserve.server.api.schema import openapi
from pdserve.server.errors import error_body, to_http
from pdserve.server.router import Router
from pdserve.types import Role


class PublicApp(FastAPI):
    """A FastAPI application that answers the routes which take a body ahead of its middleware: those need none of it."""

    def __init__(self, router: Router) -> None:
        super().__init__(title="pdserve", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        self._endpoints = {path: Answering(router, endpoint) for path, endpoint in ENDPOINTS.items()}
        for path, endpoint in self._endpoints.items():
            # For what the short cut does not take: the framework's own 405.
            self.router.routes.append(AsgiRoute(path, endpoint, methods=["POST"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)


class Answering:
    """ASGI endpoint of one of them."""

    def __init__(self, router: Router, endpoint: Route | Question) -> None:
        self._router = router
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router.answer(self._endpoint, scope, receive, send)


def create_app(router: Router) -> FastAPI:
    """Return the ASGI application of the public port."""
    app = PublicApp(router)
    add_error_shape(app)
    _add_models(app, router)
    _add_health(app, router)
    _add_stored(app)

    @app.get("/openapi.json", response_model=None)
    async def schema() -> dict[str, object] | Response:
        try:
            return openapi(router.body_limits())
        except NoReadyWorker as error:
            http = to_http(error)
            return Response(http.body, http.status, media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(router.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def add_error_shape(app: FastAPI) -> None:
    """Have the framework's own errors (no such path, wrong method, bad arguments) look like all others."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = {
            404: f"no such path: {request.url.path[:256]}",
            405: f"{request.method} is not allowed here",
        }.get(error.status_code, str(error.detail))
        body = dialect_at(request.url.path).error_body(error.status_code, error_body(error.status_code, message))
        return Response(body, error.status_code, dict(error.headers or {}), "application/json")


def error_response(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None, *, param: str | None = None
) -> Response:
    """Return an error in OpenAI's shape."""
    return Response(error_body(status, message, param, code), status, headers, "application/json")


def _add_stored(app: FastAPI) -> None:
    @app.api_route("/v1/responses/{response_id:path}", methods=["GET", "POST", "DELETE"])
    async def stored(response_id: str) -> Response:
        """Nothing is stored, so nothing can be read, continued or cancelled; a running response ends when its connection does."""
        return error_response(404, NOT_STORED, "not_stored", param="response_id")


def _add_models(app: FastAPI, router: Router) -> None:
    started = int(time.time())

    def card(model: str, max_model_len: int) -> dict[str, object]:
        return {
            "id": model,
            "object": "model",
            "created": started,
            "owned_by": "pdserve",
            "root": model,
            "parent": None,
            "max_model_len": max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [card(model, length) for model, length in router.pool.models.items()]}

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model_card(model: str) -> dict[str, object] | Response:
        length = router.pool.models.get(model)
        if length is None:
            return error_response(404, f"the model {model[:128]!r} does not exist", "model_not_found")
        return card(model, length)


def _add_health(app: FastAPI, router: Router) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Say whether any request could be served now."""
        can_serve = router.pool.ready(Role.DECODE) > 0 and not router.is_stopping
        return Response(status_code=200 if can_serve else 503)

    @app.get("/livez")
    async def livez() -> Response:
        """Answer as long as the event loop turns."""
        return Response(status_code=200)

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, object]:
        """Say whether requests can be disaggregated now, and if not why."""
        ready = {role.value: router.pool.ready(role) for role in Role}
        missing = [f"no ready {role} worker" for role, count in ready.items() if not count]
        if router.is_stopping:
            missing.append("shutting down")
        response.status_code = 503 if missing else 200
        return {"ready": not missing, "workers": ready, "reasons": missing}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}
