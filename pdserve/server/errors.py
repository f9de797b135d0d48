"""The one table from errors to HTTP, in OpenAI's shape. Nothing else in the server chooses a status.

    the client's fault   RequestError, an engine's 4xx     passed on, one attempt
    no room              RateLimited                       429 with Retry-After: the key's own limit
                         PoolSaturated, NoReadyWorker      429 or 503 with Retry-After
    transport            WorkerLost, by phase              502 or 504, tried elsewhere before the first data; speaks against the workers
    the engine's fault   UpstreamError 5xx                 tried elsewhere before the first data
    out of time          TimeoutError                      504
    KV did not arrive    LoadFailed                        503

Messages are for clients: no path, no address, no worker, no secret. What an engine said about the client's own request passes verbatim.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import orjson

from pdserve.errors import LoadFailed, NoReadyWorker, PdserveError, PoolSaturated, RateLimited, RequestError, UpstreamError, WorkerLost
from pdserve.server.reply import Stopped

RETRY_AFTER_S = 5
"""Retry-After while a role has no ready worker"""
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_NO_ROOM = {
    "requests": (429, "the queue is full", "queue_full"),
    "tokens": (429, "the queue is full", "queue_full"),
    "deadline": (503, "the queue is longer than this request has time", "deadline_unmeetable"),
    "connections": (503, "this router has no room for another request", "too_many_connections"),
}
_LOST = {
    "connect": (502, "the engine for this request cannot be reached", "engine_unreachable"),
    "head": (502, "the engine serving this request was lost", "engine_lost"),
    "body": (502, "the engine serving this request was lost", "engine_lost"),
    "first_byte": (504, "the engine gave no first data in time", "engine_first_byte"),
    "idle": (504, "the engine fell silent", "engine_idle"),
}
_OURS_TO_MEND = frozenset({401, 403, 407})
"""an engine that does not know the router's secret is no fault of the client"""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as a client sees it."""

    status: int
    body: bytes
    outcome: str
    """see `Receipt.outcome`"""
    retry_after_s: int | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error object as JSON."""
    error: dict[str, Any] = {"message": message, "type": _TYPES.get(status, "APIError"), "param": param, "code": code}
    return orjson.dumps({"error": error})


def to_http(error: BaseException) -> HttpError:
    """Translate any error; one that is not ours is a 500 that says nothing."""
    match error:
        case RequestError():
            return HttpError(error.status, error_body(error.status, error.message, error.param, error.code), "client_error")
        case RateLimited():
            retry_after_s = max(1, ceil(error.retry_after_s))
            message = f"{error}; retry after {retry_after_s} s"
            return HttpError(429, error_body(429, message, None, "rate_limit_exceeded"), "shed", retry_after_s)
        case PoolSaturated():
            return _no_room(error)
        case NoReadyWorker():
            message = f"no {error.role} worker is ready"
            return HttpError(503, error_body(503, message, None, "no_ready_worker"), "shed", RETRY_AFTER_S)
        case UpstreamError() if error.status in _OURS_TO_MEND:
            return HttpError(502, error_body(502, "the engine refused the router", None, "engine_refused"), "upstream_error")
        case UpstreamError():
            outcome = "client_error" if error.status < 500 else "upstream_error"
            body = error.body if _is_error_object(error.body) else error_body(error.status, "the engine failed")
            return HttpError(error.status, body, outcome)
        case LoadFailed():
            message = "the prompt's KV cache did not reach the decode worker; try again"
            return HttpError(503, error_body(503, message, None, "kv_load_failed"), "failed", 1)
        case WorkerLost():
            status, message, code = _LOST.get(error.phase, _LOST["body"])
            return HttpError(status, error_body(status, message, None, code), "failed")
        case TimeoutError():
            return HttpError(504, error_body(504, "the request's time is up", None, "deadline_exceeded"), "failed")
        case Stopped():
            return HttpError(503, error_body(503, "this router is shutting down", None, "stopping"), "shed", 1)
        case PdserveError():
            return HttpError(500, error_body(500, "the request could not be served"), "failed")
        case _:
            return HttpError(500, error_body(500, "internal error", None, "internal_error"), "failed")


def _no_room(error: PoolSaturated) -> HttpError:
    retry_after_s = max(1, round(error.retry_after_s))
    status, reason, code = _NO_ROOM[error.reason]
    return HttpError(status, error_body(status, f"{reason}; retry after {retry_after_s} s", None, code), "shed", retry_after_s)


def _is_error_object(body: bytes) -> bool:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(parsed, dict) and isinstance(parsed.get("error"), dict)


def is_retryable(error: PdserveError) -> bool:
    """Say whether another attempt may end better: lost workers and engine failures, never what is the client's own fault."""
    if isinstance(error, UpstreamError):
        return error.status in (500, 502, 503, 504)
    return isinstance(error, WorkerLost)
