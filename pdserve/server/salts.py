"""The salt of each tenant's prefix cache: tenants share no cached block, so nobody learns from its own latency what another has asked.

Both legs and the router's own affinity use the same salt, since all of them read it from the request.

The client's own `cache_salt` keeps its meaning within the tenant. Knows no key and no engine.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

from pdserve.errors import RequestError

FIELD = "cache_salt"
_PURPOSE = b"pdserve cache salt 1"


class TenantSalts:
    """Derives salts; one per router.

    Args:
        secret: of the deployment: without it nobody can tell a salt, also who knows tenant and client's part.
    """

    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE, hashlib.sha256)

    def salted(self, body: Mapping[str, Any], tenant: str) -> Mapping[str, Any]:
        """Return the body under its tenant's salt. Raises `RequestError` for a client's salt that engines refuse."""
        own = body.get(FIELD)
        if own == "":
            raise RequestError(400, f"{FIELD} must not be empty", FIELD, "invalid_value")
        parts = (tenant.encode(), b"" if own is None else own.encode())
        return {**body, FIELD: hmac.new(self._key, b"\0".join(parts), hashlib.sha256).hexdigest()}
