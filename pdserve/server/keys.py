"""API keys as a file keeps them: names, digests, scopes, limits. A key itself is nowhere at rest, and is compared with all of them in constant time.

A file is a YAML list, or one JSON object a line:

    - {name: alice, sha256: 9f86d0…, scopes: [inference, metrics], requests_per_minute: 60, tokens_per_minute: 100000, expires: 2027-01-01T00:00:00Z}

Several keys may bear one name, so that a new one can be handed out before the old one goes; they share their limits. Knows no HTTP and reads no file.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import msgspec
import yaml

from pdserve.errors import ConfigError

FIELD = "router.keys_file"
MAX_KEYS = 10_000
PREFIX = "pdk-"
"""begins every key that is made here, so that scanners for leaked secrets can tell one"""
KEY_BYTES = 32
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_PLACE = re.compile(r"at `\$\.(\w+)|missing required field `(\w+)`")
_FIXES = {
    "name": "give 1 to 64 letters, digits, '.', '_' or '-'",
    "sha256": "give the key's SHA-256 as 64 hex digits",
    "scopes": "give a list of inference, admin, metrics",
    "requests_per_minute": "give a whole number above 0",
    "tokens_per_minute": "give a whole number above 0",
    "expires": "give a date and time with its zone, as 2027-01-01T00:00:00Z",
}


class Scope(StrEnum):
    """What a key opens. None includes another."""

    INFERENCE = "inference"
    """everything on the public port but its health, version and metrics"""
    ADMIN = "admin"
    """the admin port"""
    METRICS = "metrics"


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a keys file."""

    name: _Name
    """whose it is: the tenant in queue, caches and metrics"""
    sha256: _Digest
    scopes: frozenset[Scope] = frozenset({Scope.INFERENCE})
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """prompt and answer together"""
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    @property
    def limits(self) -> tuple[int | None, int | None]:
        return (self.requests_per_minute, self.tokens_per_minute)

    def is_expired(self, unix_s: float) -> bool:
        return self.expires is not None and self.expires.timestamp() <= unix_s


class KeyRing:
    """The keys in force. Immutable; an empty one opens nothing."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        self._digests = [(bytes.fromhex(key.sha256), key) for key in keys]

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the key that was presented. Takes as long for each, and for none."""
        digest = hashlib.sha256(presented).digest()
        found: ApiKey | None = None
        for known, key in self._digests:
            if hmac.compare_digest(known, digest):
                found = key
        return found


def parse_keys(text: str) -> KeyRing:
    """Read a keys file's text.

    Raises:
        ConfigError: which entry is wrong, and how; never what it holds, which might be a key.
    """
    entries = _entries(text)
    if len(entries) > MAX_KEYS:
        raise ConfigError(FIELD, f"{len(entries)} keys", f"at most {MAX_KEYS} are allowed")
    keys = [_key(number, entry) for number, entry in enumerate(entries, 1)]
    _check_unambiguous(keys)
    return KeyRing(keys)


def new_key(
    name: str,
    scopes: Iterable[Scope] = (Scope.INFERENCE,),
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    expires: datetime | None = None,
) -> tuple[str, str]:
    """Make a key; returns it and its line for the file. Raises `ConfigError` for a name or a limit that no file may hold."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    fields = {
        "name": name,
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "scopes": [scope.value for scope in scopes],
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "expires": expires,
    }
    given = msgspec.to_builtins({field: value for field, value in fields.items() if value is not None})
    _key(1, given)
    return key, "- " + msgspec.json.format(msgspec.json.encode(given), indent=0).decode()


def _entries(text: str) -> list[object]:
    """Return the entries with all their values as text, as JSON lines or YAML have them."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    try:
        if lines and all(line.lstrip().startswith("{") for line in lines):
            return [msgspec.json.decode(line) for line in lines]
        # Not the safe loader's guesses: a digest of digits only is text, and so is a point in time.
        entries = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, msgspec.DecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(FIELD, "the file", f"mend the syntax{where}") from None
    if entries in (None, ""):
        return []
    if not isinstance(entries, list):
        raise ConfigError(FIELD, "the file", "give a list of keys, or one JSON object a line")
    return entries


def _key(number: int, entry: object) -> ApiKey:
    try:
        return msgspec.convert(entry, ApiKey, strict=False)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        field = (place[1] or place[2]) if place is not None else None
        where = f"entry {number}" if field is None else f"entry {number}, {field}"
        raise ConfigError(FIELD, where, _FIXES.get(field or "", f"give an object with no other fields than {', '.join(_FIXES)}")) from None


def _check_unambiguous(keys: Sequence[ApiKey]) -> None:
    digests: dict[str, int] = {}
    limits: dict[str, ApiKey] = {}
    for number, key in enumerate(keys, 1):
        if digests.setdefault(key.sha256.lower(), number) != number:
            raise ConfigError(FIELD, f"entry {number}", f"the same key as entry {digests[key.sha256.lower()]}: remove one")
        if limits.setdefault(key.name, key).limits != key.limits:
            raise ConfigError(FIELD, f"entry {number}", "keys of one name share their limits: give the same ones")
