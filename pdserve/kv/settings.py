"""The KV layer's settings as they reach an engine: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, plus the secret's variable.

Defaults and ranges live in `pdserve.config.KvConfig`, which writes them; this module reads and refuses.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.errors import ConfigError

SECRET_VARIABLE = "PDSERVE_SECRET"
"""environment variable with the cluster secret, hex; never on a command line"""


class KvSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank needs to know."""

    worker_id: str
    incarnation: str
    host: str = "127.0.0.1"
    """address that this worker's ranks listen on"""
    transport: str = "tcp"
    slot_bytes: int = 4 << 20
    arena_bytes: int = 64 << 20
    digest: str = "parcel"
    transfer_timeout_s: float = 120.0
    lease_s: float = 10.0

    @property
    def num_slots(self) -> int:
        return max(1, self.arena_bytes // self.slot_bytes)


def read_settings(extra_config: Mapping[str, Any]) -> KvSettings:
    """Parse the connector's extra configuration.

    Raises:
        ConfigError: names the field.
    """
    try:
        return msgspec.convert(dict(extra_config), KvSettings)
    except msgspec.ValidationError as error:
        raise ConfigError("kv_connector_extra_config", dict(extra_config), str(error)) from error


def read_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the cluster secret.

    Raises:
        ConfigError: it is missing or not hex of at least 16 bytes.
    """
    text = environ.get(SECRET_VARIABLE, "")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise ConfigError(SECRET_VARIABLE, "(hidden)", "set it to at least 32 hex digits, the same for every worker of the deployment")
    return secret
