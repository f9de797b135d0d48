"""Who may do what: the key that a request's headers present, against the keys in force. Knows no path, no limit and no file."""

import time
from collections.abc import Callable, Iterable
from enum import StrEnum

from pdserve.errors import RequestError
from pdserve.server.keys import ApiKey, KeyRing, Scope

Headers = Iterable[tuple[bytes, bytes]]


class Refusal(StrEnum):
    """Why a request was turned away; label of a metric."""

    MISSING = "missing"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    SCOPE = "scope"


_SAYS = {
    Refusal.MISSING: (401, "no API key was given: send Authorization: Bearer KEY, or x-api-key: KEY", "missing_api_key"),
    Refusal.UNKNOWN: (401, "the API key is not known", "invalid_api_key"),
    Refusal.EXPIRED: (401, "the API key has expired", "expired_api_key"),
    Refusal.SCOPE: (403, "the API key does not open this", "insufficient_scope"),
}


class Auth:
    """The keys in force; one per router.

    Args:
        ring: None opens everything that only keys guard.
        on_refused: told each refusal.
        unix_s: the time of day, for keys that expire.
    """

    def __init__(
        self, ring: KeyRing | None, on_refused: Callable[[Refusal], None] = lambda _: None, unix_s: Callable[[], float] = time.time
    ) -> None:
        self.ring = ring
        self._on_refused = on_refused
        self._unix_s = unix_s

    def admit(self, headers: Headers, scope: Scope) -> ApiKey | None:
        """Return the key that opens this, None where no key is needed. Raises `RequestError` (401, 403)."""
        if self.ring is None:
            return None
        key, refusal = self._judge(self.ring, headers, scope)
        if refusal is not None:
            self._on_refused(refusal)
            status, message, code = _SAYS[refusal]
            raise RequestError(status, message, None, code)
        return key

    def opens(self, headers: Headers, scope: Scope) -> bool:
        """Say whether a key is presented that opens this; not where there are no keys at all."""
        return self.ring is not None and self._judge(self.ring, headers, scope)[1] is None

    def _judge(self, ring: KeyRing, headers: Headers, scope: Scope) -> tuple[ApiKey | None, Refusal | None]:
        presented = presented_key(headers)
        if not presented:
            return None, Refusal.MISSING
        key = ring.find(presented)
        if key is None:
            return None, Refusal.UNKNOWN
        if key.is_expired(self._unix_s()):
            return None, Refusal.EXPIRED
        return key, None if scope in key.scopes else Refusal.SCOPE


def presented_key(headers: Headers) -> bytes:
    """Return the key in a request's headers, empty if there is none; a bearer token goes before `x-api-key`."""
    other = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return token.strip()
        elif name == b"x-api-key":
            other = other or value.strip()
    return other
