"""API keys at the running router: who gets in where, what a key may use, and whose cache a prompt is in."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest
from router_rig import CHAT, COMPLETIONS, SECRET, Rig, filled, rig, until

from pdserve.clock import MonotonicClock
from pdserve.config import Config
from pdserve.errors import ConfigError
from pdserve.server.keys import Scope, new_key
from pdserve.server.serve import serve
from pdserve.testing import wire
from pdserve.testing.fake_worker import Fault, Phase, Script

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello?"}]},
    COMPLETIONS: {"prompt": "Hello"},
    RESPONSES: {"input": "Hello?", "store": False},
    MESSAGES: {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 8},
}


class Keys:
    """A keys file and the keys in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.yaml"
        self.of: dict[str, str] = {}
        self._lines: dict[str, str] = {}
        self.write()

    def add(self, name: str, *scopes: Scope, **limits: Any) -> str:
        """Put a key into the file."""
        self.of[name], self._lines[name] = new_key(name, scopes or (Scope.INFERENCE,), **limits)
        self.write()
        return self.of[name]

    def remove(self, name: str) -> None:
        del self._lines[name]
        self.write()

    def write(self, text: str | None = None) -> None:
        """Replace the file in one step."""
        partial = self.path.with_suffix(".partial")
        partial.write_text("\n".join(self._lines.values()) if text is None else text)
        partial.replace(self.path)

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.of[name]}"}


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """A user's, a scraper's and an operator's key."""
    monkeypatch.setattr("pdserve.server.key_file.POLL_S", 0.02)
    made = Keys(tmp_path)
    made.add("user")
    made.add("scraper", Scope.METRICS)
    made.add("operator", Scope.ADMIN)
    made.add("late", expires=datetime(2020, 1, 1, tzinfo=UTC))
    return made


async def ask(r: Rig, path: str = CHAT, headers: Mapping[str, str] | None = None, **body: Any) -> tuple[int, Any, Mapping[str, str]]:
    """Post a request; returns status, parsed body and headers."""
    async with r.client.post(r.url + path, json={"model": wire.MODEL, **BODIES[path], **body}, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


async def metrics(r: Rig, keys: Keys) -> dict[str, float]:
    async with r.client.get(f"{r.url}/metrics", headers=keys.headers("scraper")) as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def test_who_has_no_key_gets_nothing(keys: Keys) -> None:
    """401 before a body is read, in the shape of the API that was asked; no engine hears of it and no receipt is made; each is counted."""
    async with rig(keys_file=str(keys.path)) as r:
        for path in BODIES:
            for headers in (
                {},
                {"authorization": "Bearer nope"},
                {"x-api-key": "nope"},
                {"authorization": "Basic bm9wZQ=="},
                keys.headers("late"),
            ):
                status, body, answered = await ask(r, path, headers)
                assert (status, answered["www-authenticate"]) == (401, "Bearer")
                assert body["error"]["type"] == ("authentication_error" if path == MESSAGES else "AuthenticationError")
            assert (await ask(r, path, keys.headers("operator")))[0] == 403
        for path in ("/v1/models", "/v1/models/fake", "/nope", "/docs", "/openapi.json", "/admin/v1/status"):
            async with r.client.get(r.url + path) as answer:
                assert answer.status == 401, path
        assert r.legs == []
        assert (await r.admin("receipts"))["receipts"] == []
        counted = await metrics(r, keys)
        assert counted['pdserve_keys_refused_total{reason="unknown"}'] == 8
        assert counted['pdserve_keys_refused_total{reason="scope"}'] == 4
        assert counted['pdserve_keys_refused_total{reason="expired"}'] == 4


async def test_a_key_opens_what_its_scopes_say(keys: Keys) -> None:
    """Both ways to send it; health is everybody's, metrics the scraper's."""
    async with rig(keys_file=str(keys.path)) as r:
        for path in BODIES:
            assert (await ask(r, path, keys.headers("user")))[0] == 200, path
            assert (await ask(r, path, {"x-api-key": keys.of["user"]}))[0] == 200, path
        for path, expected in (
            ("/metrics", {"user": 403, "scraper": 200, "operator": 403, "": 401}),
            ("/v1/models", {"user": 200, "scraper": 403, "operator": 403, "": 401}),
            ("/health", {"user": 200, "scraper": 200, "": 200}),
            ("/livez", {"": 200}),
            ("/readyz", {"": 200}),
            ("/version", {"": 200}),
        ):
            for name, status in expected.items():
                async with r.client.get(r.url + path, headers=keys.headers(name) if name else {}) as answer:
                    assert answer.status == status, (path, name)


async def test_no_spelling_of_a_path_leads_past_its_scope(keys: Keys) -> None:
    """Encoded, doubled, dotted, with a slash at the end, in absolute form: none of them is the path, and none redirects to it."""
    async with rig(keys_file=str(keys.path)) as r:
        port = int(r.url.rpartition(":")[2])
        for target in (
            "/%6Detrics",
            "//metrics",
            "/./metrics",
            "/health/../metrics",
            "/metrics/",
            "/health%2F..%2Fmetrics",
            "/METRICS",
            "/metrics;x",
            "/v1/model%73",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\nx-api-key: {keys.of['user']}\r\nconnection: close\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            assert answer.split()[1] == b"404", target
        for target in ("/metrics?x", "http://elsewhere/metrics", "/metrics#x"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\nx-api-key: {keys.of['user']}\r\nconnection: close\r\n\r\n".encode())
            assert (await reader.read()).split()[1] == b"403", target
            writer.close()
        assert (await ask(r, COMPLETIONS, keys.headers("user")))[0] == 200


async def test_the_admin_port_takes_the_secret_or_an_admins_key(keys: Keys) -> None:
    """No other key opens it."""
    async with rig(keys_file=str(keys.path)) as r:
        for headers, status in (
            ({"x-pdserve-secret": SECRET}, 200),
            ({"x-pdserve-secret": "", **keys.headers("operator")}, 200),
            ({"x-pdserve-secret": "wrong", "x-api-key": keys.of["operator"]}, 200),
            ({"x-pdserve-secret": "", **keys.headers("user")}, 401),
            ({"x-pdserve-secret": "", **keys.headers("scraper")}, 401),
            ({"x-pdserve-secret": ""}, 401),
        ):
            async with r.client.get(f"{r.admin_url}/admin/v1/status", headers=headers) as answer:
                assert answer.status == status, headers


async def test_keys_come_and_go_while_it_runs(keys: Keys) -> None:
    """A new key opens and a removed one stops opening, without a restart; a file that cannot be used changes nothing and is counted."""
    async with rig(keys_file=str(keys.path)) as r:
        new = {"authorization": f"Bearer {keys.add('new')}"}

        async def status_of(headers: Mapping[str, str], status: int) -> None:
            async def is_so() -> bool:
                return (await ask(r, headers=headers))[0] == status

            await until(is_so)

        await status_of(new, 200)
        keys.remove("new")
        await status_of(new, 401)
        for bad in ("- {", "- {name: x}", "nothing"):
            before = (await metrics(r, keys)).get('pdserve_keys_loads_total{outcome="refused"}', 0)
            keys.write(bad)

            async def is_counted(before: float = before) -> bool:
                return (await metrics(r, keys)).get('pdserve_keys_loads_total{outcome="refused"}', 0) == before + 1

            await until(is_counted)
            assert (await ask(r, headers=keys.headers("user")))[0] == 200
        assert (await metrics(r, keys))["pdserve_keys"] == 4
        keys.write()
        await status_of(new, 401)


async def test_a_request_under_way_outlives_its_key(keys: Keys) -> None:
    """Removing a key refuses what comes; it ends nothing."""
    async with rig(keys_file=str(keys.path)) as r:
        r.decodes[0].script = Script(tokens=tuple("abcdef"), token_delay_s=0.05)
        running = asyncio.create_task(ask(r, headers=keys.headers("user")))
        await until(lambda: len(r.legs) == 2)
        keys.remove("user")

        async def is_refused() -> bool:
            return (await ask(r, headers=keys.headers("user")))[0] == 401

        await until(is_refused)
        assert (await running)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
async def test_no_router_is_open_to_other_hosts_by_mistake(host: str, keys: Keys) -> None:
    """Without keys an address that others reach is refused, with the way out; keys or the operator's word open it."""

    async def start(**router: Any) -> None:
        config = Config.model_validate({"router": {"port": 0, "host": host, **router}})
        bound = asyncio.Event()
        served = asyncio.create_task(serve(config, SECRET, clock=MonotonicClock(), on_bound=lambda *_: bound.set()))
        waiting = asyncio.create_task(bound.wait())
        await asyncio.wait({served, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        served.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        try:
            await served
        except asyncio.CancelledError:
            assert bound.is_set()

    with pytest.raises(ConfigError) as raised:
        await start()
    assert (raised.value.field, raised.value.value) == ("router.host", host)
    assert "router.keys_file" in raised.value.fix
    for allowed in ({"allow_open": True}, {"keys_file": str(keys.path)}):
        try:
            await start(**allowed)
        except ConfigError as error:
            assert "address of this host" in error.fix


async def test_a_router_does_not_start_with_a_keys_file_it_cannot_use(keys: Keys) -> None:
    """Rather than serving nobody, or everybody."""
    keys.write("- {name: user}")
    with pytest.raises(ConfigError) as raised:
        await serve(
            Config.model_validate({"router": {"port": 0, "keys_file": str(keys.path)}}),
            SECRET,
            clock=MonotonicClock(),
            on_bound=lambda *_: None,
        )
    assert (raised.value.field, raised.value.value) == ("router.keys_file", "entry 1, sha256")


async def test_a_key_is_told_its_limits_and_held_to_them(keys: Keys) -> None:
    """OpenAI's headers on every answer; beyond a limit 429 with `Retry-After` and no leg; other names are not touched."""
    keys.add("small", requests_per_minute=2)
    async with rig(keys_file=str(keys.path)) as r:
        answers = [await ask(r, headers=keys.headers("small")) for _ in range(3)]
        assert [answer[0] for answer in answers] == [200, 200, 429]
        assert [answer[2]["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert answers[0][2]["x-ratelimit-limit-requests"] == "2"
        assert "x-ratelimit-limit-tokens" not in answers[0][2]
        assert answers[2][1]["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answers[2][2]["retry-after"]) <= 30
        assert len(r.decodes[0].legs) == 2
        status, _, headers = await ask(r, headers=keys.headers("user"))
        assert status == 200
        assert not any(name.lower().startswith("x-ratelimit") for name in headers)
        (receipt,) = (receipt for receipt in await r.receipts(4) if receipt.status == 429)
        assert (receipt.status, receipt.outcome, receipt.reason) == (429, "shed", "rate_limited_requests")
        assert (await metrics(r, keys))['pdserve_shed_total{reason="rate_limited_requests"}'] == 1


async def test_streams_are_told_their_limits_too(keys: Keys) -> None:
    """With the head, long before the usage is known."""
    keys.add("small", requests_per_minute=5, tokens_per_minute=1000)
    async with rig(keys_file=str(keys.path)) as r:
        body = filled(CHAT, {"stream": True})
        async with r.client.post(r.url + CHAT, json=body, headers=keys.headers("small")) as answer:
            assert answer.headers["x-ratelimit-remaining-requests"] == "4"
            assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
            await answer.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_charged_by_usage(keys: Keys, stream: bool) -> None:
    """What was reserved for an answer that turned out short comes back; nine tokens in and four out are thirteen."""
    keys.add("small", tokens_per_minute=6000)
    async with rig(keys_file=str(keys.path)) as r:
        for _ in range(2):
            async with r.client.post(
                r.url + CHAT, json=filled(CHAT, {"max_tokens": 2000, "stream": stream}), headers=keys.headers("small")
            ) as answer:
                assert answer.status == 200
                assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 3000
                await answer.read()
        await r.receipts(2)
        status, _, headers = await ask(r, headers=keys.headers("small"), messages=[])
        assert status == 400
        assert 6000 - 2 * 13 <= int(headers["x-ratelimit-remaining-tokens"]) <= 6000 - 2 * 13 + 300


async def test_a_request_beyond_the_token_limit_waits_for_its_minute(keys: Keys) -> None:
    """Reserved at admission: many at once cannot overdraw what each alone would fit into."""
    keys.add("small", tokens_per_minute=3000)
    async with rig(keys_file=str(keys.path)) as r:
        r.decodes[0].script = Script(tokens=("x",) * 4, token_delay_s=0.1)
        answers = await asyncio.gather(*(ask(r, headers=keys.headers("small"), max_tokens=1000, n=1) for _ in range(20)))
        statuses = [answer[0] for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) < 20
        refused = next(answer for answer in answers if answer[0] == 429)
        assert refused[1]["error"]["code"] == "rate_limit_exceeded"
        assert "tokens" in refused[1]["error"]["message"]
        assert {receipt.reason for receipt in await r.receipts(20)} == {"default", "rate_limited_tokens"}


@pytest.mark.parametrize(
    "script", [Script(status=400), Script(status=500), Script(fault=Fault.RESET), Script(fault=Fault.ERROR, phase=Phase.AFTER_HEAD)]
)
async def test_what_gave_nothing_costs_no_tokens(keys: Keys, script: Script) -> None:
    """A request that failed before its first data is given back."""
    keys.add("small", tokens_per_minute=6000)
    async with rig(keys_file=str(keys.path)) as r:
        r.decodes[0].script = script
        for _ in range(5):
            async with r.client.post(
                r.url + CHAT, json=filled(CHAT, {"stream": True, "max_tokens": 3000}), headers=keys.headers("small")
            ) as answer:
                assert answer.status >= 400
        _, _, headers = await ask(r, headers=keys.headers("small"), messages=[])
        assert headers["x-ratelimit-remaining-tokens"] == "6000"


def salts(r: Rig) -> list[Any]:
    return [leg.body.get("cache_salt") for leg in r.legs]


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_both_legs_of_a_tenant_carry_its_salt(keys: Keys, path: str) -> None:
    """One tenant's requests share it, another's do not; the client's own salt separates within the tenant and is never passed on."""
    keys.add("other")
    async with rig(keys_file=str(keys.path)) as r:
        seen: dict[tuple[str, str | None], Any] = {}
        for name in ("user", "other"):
            for own in (None, "mine"):
                for _ in range(2):
                    for worker in r.workers:
                        worker.legs.clear()
                    extra = {} if own is None else {"cache_salt": own}
                    assert (await ask(r, path, keys.headers(name), **extra))[0] == 200
                    prefill, decode = salts(r)
                    assert prefill == decode
                    assert len(prefill) == 64
                    assert seen.setdefault((name, own), prefill) == prefill
        assert len(set(seen.values())) == 4


async def test_every_attempt_and_every_path_carries_the_salt(keys: Keys) -> None:
    """Retries and local requests as well: no engine ever computes a tenant's prompt without it."""
    async with rig(prefills=2, decodes=2, keys_file=str(keys.path)) as r:
        r.decodes[0].script = Script(status=500)
        for body in ({}, {"n": 2}, {"stream": True}):
            async with r.client.post(r.url + CHAT, json=filled(CHAT, body), headers=keys.headers("user")) as answer:
                assert answer.status == 200
                await answer.read()
        assert len(set(salts(r))) == 1
        assert salts(r)[0] is not None


@pytest.mark.parametrize(("setting", "is_salted"), [("auto", False), ("always", True), ("never", False)])
async def test_without_keys_salts_are_the_clients_unless_set(setting: str, is_salted: bool) -> None:
    """One tenant has nobody to be kept apart from."""
    async with rig(tenant_cache_salt=setting) as r:
        await ask(r, COMPLETIONS)
        await ask(r, COMPLETIONS, cache_salt="mine")
        own = [leg.body.get("cache_salt") for leg in r.decodes[0].legs]
        assert own == [leg.body.get("cache_salt") for leg in r.prefills[0].legs]
        assert (own == [None, "mine"]) is not is_salted
        assert len(set(own)) == 2


async def test_salts_can_be_left_to_clients_with_keys_too(keys: Keys) -> None:
    """For tenants that are one company."""
    async with rig(keys_file=str(keys.path), tenant_cache_salt="never") as r:
        await ask(r, COMPLETIONS, keys.headers("user"), cache_salt="mine")
        assert salts(r) == ["mine", "mine"]


async def test_a_wrong_salt_is_the_clients_to_mend(keys: Keys) -> None:
    """Of the wrong type or empty, as without keys."""
    async with rig(keys_file=str(keys.path)) as r:
        for wrong in (5, ""):
            status, body, _ = await ask(r, COMPLETIONS, keys.headers("user"), cache_salt=wrong)
            assert (status, body["error"]["param"]) == (400, "cache_salt")
        assert orjson.dumps(body)
        assert r.legs == []
