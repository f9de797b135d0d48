"""What a client's request passes on its way in, and what it owes on its way out: its key's limits, the caps on bodies, its tenant's salt.

    meter(key)   what the key may still use        enter   one request more
    admit        capped, salted, its expected tokens reserved
    settle       the reservation replaced by what the request used

Knows no path, no worker and no connection.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pdserve.server.api.dialect import Dialect
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import ClientRequest, Route
from pdserve.server.caps import Caps, check_caps, with_output_limit
from pdserve.server.draft import Draft
from pdserve.server.keys import ApiKey
from pdserve.server.rate_limit import Meter, RateLimits
from pdserve.server.salts import TenantSalts

_OUTPUT_FIELDS = {Route.CHAT: "max_completion_tokens", Route.RESPONSES: "max_output_tokens"}
"""by route: what limits an answer that engines would else let grow to the model's length"""


class Edge:
    """One per router.

    Args:
        salts: None leaves bodies the salt that clients gave them.
        tokens: returns how many tokens a request's prompt and answers are expected to have.
    """

    def __init__(
        self, caps: Caps, limits: RateLimits, salts: TenantSalts | None, tokens: Callable[[ClientRequest], tuple[int, int]]
    ) -> None:
        self._caps = caps
        self._limits = limits
        self._salts = salts
        self._tokens = tokens

    def meter(self, key: ApiKey | None, dialect: Dialect) -> Meter:
        """Return what measures a request under this key, and tells its client in the way of this API."""
        if key is None:
            return Meter(None, None)
        return self._limits.meter(
            key.name, key.requests_per_minute, key.tokens_per_minute, speaks_anthropic=dialect is DIALECTS[Route.MESSAGES]
        )

    def enter(self, meter: Meter) -> None:
        """Count the request. Raises `RateLimited`."""
        self._limits.enter(meter)

    def admit(self, request: ClientRequest, raw: bytes, tenant: str, meter: Meter) -> ClientRequest:
        """Return the request as it may be served. Raises `RequestError`, `RateLimited`."""
        body = request.body
        self.check(raw, body)
        most = self._caps.max_output_tokens
        if most is not None:
            # An engine refuses a limit beyond the model's length, and takes that length for none.
            body = with_output_limit(body, _OUTPUT_FIELDS.get(request.route), min(most, request.max_model_len))
        if self._salts is not None:
            body = self._salts.salted(body, tenant)
        admitted = request if body is request.body else replace(request, body=body)
        if meter.tokens is not None:
            self._limits.reserve(meter, sum(self._tokens(admitted)))
        return admitted

    def check(self, raw: bytes, body: Mapping[str, Any]) -> None:
        """Raise `RequestError` for a body that holds more than it may; `raw` is what it was parsed from."""
        check_caps(raw, body, self._caps)

    def settle(self, meter: Meter, draft: Draft) -> None:
        """Charge what the request used. Nothing is charged for what failed before it gave anything, or never reached an engine."""
        if draft.outcome == "finished" and draft.usage:
            used_tokens = sum(draft.usage.get(kind) or 0 for kind in ("prompt_tokens", "completion_tokens"))
        elif draft.has_data or (draft.outcome == "cancelled" and draft.attempts):
            # Nobody said how far it came.
            used_tokens = meter.reserved_tokens
        else:
            used_tokens = 0
        self._limits.settle(meter, used_tokens)

    def headers(self, meter: Meter) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell a client about its limits."""
        return self._limits.headers(meter)
