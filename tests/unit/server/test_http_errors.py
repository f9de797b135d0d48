"""The one table from errors to HTTP."""

import orjson
import pytest

from pdserve.errors import FleetError, NoReadyWorker, PoolSaturated, RateLimited, RequestError, UpstreamError, WorkerLost
from pdserve.server.errors import HttpError, is_retryable, to_http
from pdserve.server.reply import Stopped

SECRET_DETAIL = "10.0.0.7:8001 /srv/engine"


@pytest.mark.parametrize(
    ("error", "status", "outcome", "retry_after_s"),
    [
        (RequestError(413, "too large", None, "body_too_large"), 413, "client_error", None),
        (RequestError(401, "no key"), 401, "client_error", None),
        (RequestError(403, "not this"), 403, "client_error", None),
        (RateLimited("requests", 5, 11.2), 429, "shed", 12),
        (RateLimited("tokens", 5, 0.01), 429, "shed", 1),
        (PoolSaturated("tokens", 12.4), 429, "shed", 12),
        (PoolSaturated("requests", 0.1), 429, "shed", 1),
        (PoolSaturated("deadline", 90), 503, "shed", 90),
        (PoolSaturated("connections", 1), 503, "shed", 1),
        (NoReadyWorker("decode"), 503, "shed", 5),
        (Stopped(), 503, "shed", 1),
        (WorkerLost("d0", "connect", SECRET_DETAIL), 502, "failed", None),
        (WorkerLost("d0", "head", SECRET_DETAIL), 502, "failed", None),
        (WorkerLost("d0", "body", SECRET_DETAIL), 502, "failed", None),
        (WorkerLost("d0", "first_byte", SECRET_DETAIL), 504, "failed", None),
        (WorkerLost("d0", "idle", SECRET_DETAIL), 504, "failed", None),
        (TimeoutError(SECRET_DETAIL), 504, "failed", None),
        (UpstreamError("d0", 500, b"Internal Server Error " + SECRET_DETAIL.encode()), 500, "upstream_error", None),
        (UpstreamError("d0", 503, b""), 503, "upstream_error", None),
        (UpstreamError("d0", 401, b'{"error":{"message":"secret"}}'), 502, "upstream_error", None),
        (FleetError("d0", SECRET_DETAIL), 500, "failed", None),
        (ZeroDivisionError(SECRET_DETAIL), 500, "failed", None),
    ],
)
def test_every_error_has_a_status_and_openais_shape(error: Exception, status: int, outcome: str, retry_after_s: int | None) -> None:
    """Status, outcome and Retry-After as listed; the body is whole and tells nothing of our insides."""
    http = to_http(error)
    assert (http.status, http.outcome, http.retry_after_s) == (status, outcome, retry_after_s)
    assert set(orjson.loads(http.body)["error"]) == {"message", "type", "param", "code"}
    assert SECRET_DETAIL.encode() not in http.body
    assert b"d0" not in http.body
    headers = dict(http.headers)
    assert headers[b"content-length"] == str(len(http.body)).encode()
    assert headers.get(b"retry-after") == (None if retry_after_s is None else str(retry_after_s).encode())
    assert headers.get(b"www-authenticate") == (b"Bearer" if status == 401 else None)


@pytest.mark.parametrize("status", [400, 404, 409, 422, 429, 500])
def test_what_an_engine_says_in_openais_shape_passes_verbatim(status: int) -> None:
    """Byte for byte, whatever its own fields are."""
    body = b'{"error": {"message":"m","type":"t","param":null,"code":400}, "extra": 1}'
    http = to_http(UpstreamError("d0", status, body))
    assert (http.status, http.body) == (status, body)
    assert http.outcome == ("client_error" if status < 500 else "upstream_error")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (WorkerLost("d0", "connect"), True),
        (WorkerLost("d0", "head"), True),
        (WorkerLost("d0", "body"), True),
        (WorkerLost("d0", "idle"), True),
        *((UpstreamError("d0", status, b""), True) for status in (500, 502, 503, 504)),
        *((UpstreamError("d0", status, b""), False) for status in (400, 401, 404, 409, 422, 429, 501)),
        (RequestError(400, "x"), False),
        (NoReadyWorker("decode"), False),
        (PoolSaturated("tokens", 1), False),
    ],
)
def test_only_failures_that_may_go_away_are_tried_again(error: Exception, again: bool) -> None:
    """A client's own fault costs one attempt."""
    assert is_retryable(error) is again  # type: ignore[arg-type]


def test_an_error_is_a_value() -> None:
    """Two clients with the same fault get the same answer."""
    assert to_http(NoReadyWorker("prefill")) == to_http(NoReadyWorker("prefill"))
    assert isinstance(to_http(TimeoutError()), HttpError)


def test_an_errors_representation_says_no_more_than_its_message() -> None:
    """Event loops show it when nobody awaited; what an engine said stays with the client."""
    assert repr(UpstreamError("d0", 400, SECRET_DETAIL.encode())) == "UpstreamError('worker d0 answered 400')"
