"""Who gets in: keys in headers against the keys in force."""

import hmac
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

from pdserve.errors import RequestError
from pdserve.server import keys as keys_module
from pdserve.server.auth import Auth, Refusal, presented_key
from pdserve.server.gate import Gate, key_of
from pdserve.server.keys import KeyRing, Scope, new_key, parse_keys

NOW = datetime(2027, 1, 1, tzinfo=UTC)


class Door:
    """An `Auth` over one key of each kind."""

    def __init__(self) -> None:
        made = {
            "user": new_key("user"),
            "scraper": new_key("scraper", [Scope.METRICS]),
            "operator": new_key("operator", [Scope.ADMIN]),
            "late": new_key("late", expires=NOW),
        }
        self.keys = {name: key.encode() for name, (key, _) in made.items()}
        self.refusals: list[Refusal] = []
        self.auth = Auth(parse_keys("\n".join(line for _, line in made.values())), self.refusals.append, NOW.timestamp)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], b""),
        ([(b"authorization", b"Bearer k")], b"k"),
        ([(b"authorization", b"bearer   k ")], b"k"),
        ([(b"authorization", b"Basic k")], b""),
        ([(b"authorization", b"k")], b""),
        ([(b"x-api-key", b"k")], b"k"),
        ([(b"x-api-key", b"a"), (b"authorization", b"Bearer b")], b"b"),
        ([(b"x-api-key", b"a"), (b"authorization", b"Basic b")], b"a"),
        ([(b"x-api-key", b"a"), (b"x-api-key", b"b")], b"a"),
    ],
)
def test_a_key_comes_as_bearer_token_or_in_a_header_of_its_own(headers: list[tuple[bytes, bytes]], key: bytes) -> None:
    """OpenAI's clients send the one, Anthropic's the other; other schemes are no keys."""
    assert presented_key(headers) == key


@pytest.mark.parametrize(
    ("name", "scope", "status", "refusal"),
    [
        ("user", Scope.INFERENCE, None, None),
        ("scraper", Scope.METRICS, None, None),
        ("operator", Scope.ADMIN, None, None),
        ("operator", Scope.INFERENCE, 403, Refusal.SCOPE),
        ("user", Scope.METRICS, 403, Refusal.SCOPE),
        ("user", Scope.ADMIN, 403, Refusal.SCOPE),
        ("late", Scope.INFERENCE, 401, Refusal.EXPIRED),
        ("nobody", Scope.INFERENCE, 401, Refusal.UNKNOWN),
        (None, Scope.INFERENCE, 401, Refusal.MISSING),
    ],
)
def test_a_key_opens_its_scopes_and_nothing_else(name: str | None, scope: Scope, status: int | None, refusal: Refusal | None) -> None:
    """No scope includes another; each refusal is told with its reason, and says nothing of what was presented."""
    door = Door()
    headers = [] if name is None else [(b"authorization", b"Bearer " + door.keys.get(name, b"pdk-CANARY"))]
    assert door.auth.opens(headers, scope) is (status is None)
    if status is None:
        key = door.auth.admit(headers, scope)
        assert key is not None
        assert key.name == name
        return
    with pytest.raises(RequestError) as raised:
        door.auth.admit(headers, scope)
    assert raised.value.status == status
    assert door.refusals == [refusal]
    assert "CANARY" not in str(raised.value)


def test_every_key_is_compared_whichever_was_presented(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the last, none: the same comparisons are made, by the function whose time does not depend on what differs."""
    door = Door()
    compared: list[tuple[bytes, bytes]] = []

    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    assert door.auth.ring is not None
    for presented in (door.keys["user"], door.keys["late"], b"", b"x" * 4096):
        compared.clear()
        door.auth.ring.find(presented)
        assert len(compared) == 4
        assert {len(side) for pair in compared for side in pair} == {32}


def test_without_keys_everything_is_open_but_no_admin_is_known() -> None:
    """The admin port keeps to the deployment's secret."""
    auth = Auth(None)
    assert auth.admit([], Scope.INFERENCE) is None
    assert not auth.opens([(b"x-api-key", b"")], Scope.ADMIN)


def test_with_no_key_in_the_file_nobody_gets_in() -> None:
    """An empty ring is not an absent one."""
    with pytest.raises(RequestError):
        Auth(KeyRing()).admit([(b"x-api-key", b"k")], Scope.INFERENCE)


class Behind:
    """The application behind a gate, and the client in front of it."""

    def __init__(self, auth: Auth) -> None:
        self.scopes: list[Any] = []
        self.sent: list[Any] = []
        self._gate = Gate(self.app, auth)

    async def app(self, scope: Any, _receive: Any, _send: Any) -> None:
        self.scopes.append(scope)

    async def get(self, raw_path: bytes, path: str, key: bytes = b"") -> int | None:
        """Ask for a path; returns the gate's status, None if it let the request in."""
        self.sent.clear()

        async def send(message: Any) -> None:
            self.sent.append(message)

        headers = [(b"authorization", b"Bearer " + key)] if key else []
        await self._gate({"type": "http", "raw_path": raw_path, "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
        return self.sent[0]["status"] if self.sent else None


@pytest.mark.parametrize(
    ("path", "opens"),
    [
        ("/health", {"", "user", "scraper", "operator"}),
        ("/livez", {"", "user", "scraper", "operator"}),
        ("/readyz", {"", "user", "scraper", "operator"}),
        ("/version", {"", "user", "scraper", "operator"}),
        ("/metrics", {"scraper"}),
        ("/v1/chat/completions", {"user"}),
        ("/v1/messages", {"user"}),
        ("/v1/models", {"user"}),
        ("/v1/models/x", {"user"}),
        ("/anything/else", {"user"}),
        ("/health/", {"user"}),
    ],
)
async def test_each_path_needs_its_scope(path: str, opens: set[str]) -> None:
    """What is not named needs `inference`, also what does not exist."""
    door = Door()
    behind = Behind(door.auth)
    for name in ("", "user", "scraper", "operator"):
        status = await behind.get(path.encode(), path, door.keys.get(name, b""))
        assert status == (None if name in opens else 403 if name else 401), (path, name)


@pytest.mark.parametrize(
    ("raw", "decoded"),
    [(b"/%6detrics", "/metrics"), (b"/health%2f..%2fmetrics", "/health/../metrics"), (b"/v1/chat/completion%73", "/v1/chat/completions")],
)
async def test_a_path_counts_as_it_was_sent(raw: bytes, decoded: str) -> None:
    """No other spelling of a path reaches what the path reaches."""
    door = Door()
    behind = Behind(door.auth)
    assert await behind.get(raw, decoded, door.keys["scraper"]) == 403
    assert await behind.get(raw, decoded, door.keys["user"]) is None
    assert behind.scopes[-1]["path"] == raw.decode()


async def test_a_model_may_be_named_with_an_encoded_slash() -> None:
    """Clients encode the name they put into a path."""
    door = Door()
    behind = Behind(door.auth)
    assert await behind.get(b"/v1/models/org%2Fname", "/v1/models/org/name", door.keys["user"]) is None
    assert behind.scopes[-1]["path"] == "/v1/models/org/name"


async def test_the_key_goes_along_with_the_request() -> None:
    """Those behind the gate learn whose request it is; a client cannot say so itself."""
    door = Door()
    behind = Behind(door.auth)
    await behind.get(b"/v1/models", "/v1/models", door.keys["user"])
    await behind.get(b"/health", "/health", door.keys["user"])
    keys = [key_of(scope) for scope in behind.scopes]
    assert [key and key.name for key in keys] == ["user", None]


@pytest.mark.parametrize(("path", "shape"), [("/v1/chat/completions", {"error"}), ("/v1/messages", {"type", "error"})])
async def test_a_refusal_has_the_shape_of_the_api_it_came_by(path: str, shape: set[str]) -> None:
    """OpenAI's for most, Anthropic's for its own; a browser is told how to ask."""
    behind = Behind(Door().auth)
    assert await behind.get(path.encode(), path) == 401
    assert shape <= set(orjson.loads(behind.sent[1]["body"]))
    assert (b"www-authenticate", b"Bearer") in behind.sent[0]["headers"]
