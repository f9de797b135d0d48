"""What stands in front of the public application: the path as it was sent, and the key that it needs. Knows nothing of what is behind.

Paths are matched without decoding, so no spelling of a path leads past a rule about it; only the model's name in `/v1/models/NAME` may be encoded.
Whatever is not named here needs the scope `inference`, also what does not exist.
"""

from collections.abc import Mapping
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import RequestError
from pdserve.server.api.endpoints import dialect_at
from pdserve.server.auth import Auth
from pdserve.server.errors import to_http
from pdserve.server.keys import ApiKey
from pdserve.server.keys import Scope as KeyScope

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/version"})
NEEDS: Mapping[str, KeyScope] = {"/metrics": KeyScope.METRICS}
MODEL_CARD = "/v1/models/"
_KEY = "pdserve.key"


class Gate:
    """ASGI middleware around the public application."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw_path = scope["raw_path"].decode("latin-1")
        if not raw_path.startswith(MODEL_CARD):
            scope["path"] = raw_path
        if raw_path not in OPEN_PATHS:
            try:
                scope[_KEY] = self._auth.admit(scope["headers"], NEEDS.get(raw_path, KeyScope.INFERENCE))
            except RequestError as error:
                http = to_http(error)
                http = replace(http, body=dialect_at(raw_path).error_body(http.status, http.body))
                await send({"type": "http.response.start", "status": http.status, "headers": http.headers})
                await send({"type": "http.response.body", "body": http.body})
                return
        await self._app(scope, receive, send)


def key_of(scope: Scope) -> ApiKey | None:
    """Return the key with which a request came in, None where none was needed."""
    key: ApiKey | None = scope.get(_KEY)
    return key
