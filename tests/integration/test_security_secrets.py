"""What clients send and engines answer is nobody else's: distinctive strings go through every success and every failure, and are then searched for in
all that the router tells anybody but that client: its log, its metrics, its receipts and its admin answers; and in its errors.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog
from router_rig import CHAT, COMPLETIONS, Rig, rig, until

from pdserve.observe import log
from pdserve.server.keys import Scope, new_key
from pdserve.server.router import Router
from pdserve.testing import wire
from pdserve.testing.fake_worker import Fault, Phase, Script
from pdserve.types import CloseReason

PROMPT, OUTPUT, HEADER, FIELD, PATH, MODEL, WRONG_KEY = (
    f"canary-{what}-9c41" for what in ("pr", "out", "head", "field", "path", "model", "key")
)
ECHOED = (PATH, MODEL)
"""what an error may say to the client that asked for it"""
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CONVERSATION = [{"role": "system", "content": PROMPT}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": CONVERSATION, "tools": [{"type": "function", "function": {"name": FIELD, "parameters": {"type": "object"}}}]},
    COMPLETIONS: {"prompt": PROMPT, "suffix": PROMPT, "stop": [FIELD]},
    RESPONSES: {"input": PROMPT, "instructions": PROMPT, "store": False},
    MESSAGES: {"messages": [{"role": "user", "content": PROMPT}], "system": PROMPT, "max_tokens": 8},
}
HEADERS = {
    "user-agent": HEADER,
    "cookie": f"a={HEADER}",
    "x-session-id": HEADER,
    "traceparent": HEADER,
    "x-forwarded-for": HEADER,
    "x-data-parallel-rank": HEADER,
    "x-pdserve-role": HEADER,
}


class Told:
    """All that was said about requests."""

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / "router.log"
        self.keys_path = folder / "keys.yaml"
        self.errors: list[bytes] = []
        self.key, line = new_key("user", requests_per_minute=100_000)
        self.scraper, scrapers = new_key("scraper", [Scope.METRICS])
        self.keys_path.write_text(f"{line}\n{scrapers}\n")

    async def of(self, r: Rig) -> dict[str, bytes]:
        """Return everything, by where it was found."""
        admin = [orjson.dumps(await r.admin(path)) for path in ("receipts?limit=1000", "status")]
        async with r.client.get(f"{r.url}/metrics", headers={"x-api-key": self.scraper}) as answer:
            metrics = await answer.read()
        async with r.client.get(f"{r.url}/readyz") as answer:
            ready = await answer.read()
        return {
            "log": self.log_path.read_bytes(),
            "metrics": metrics,
            "admin": b"\n".join(admin) + ready,
            "errors": b"\n".join(self.errors),
        }

    def check(self, said_where: Mapping[str, bytes]) -> None:
        """Fail with the place and the string that was found there."""
        found = [
            (place, word)
            for place, said in said_where.items()
            for word in (PROMPT, OUTPUT, HEADER, FIELD, PATH, MODEL, WRONG_KEY, self.key, self.scraper)
            if word.encode() in said and not (place == "errors" and word in ECHOED)
        ]
        assert found == []


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    """Logging as in the real process, into a file; afterwards as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    made = Told(tmp_path)
    log.configure("router", made.log_path, handles_prompts=True)
    yield made
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    structlog.reset_defaults()


@asynccontextmanager
async def router(told: Told, **settings: Any) -> AsyncIterator[Rig]:
    async with rig(prefills=2, decodes=2, keys_file=str(told.keys_path), keepalive_s=0.1, first_byte_timeout_s=0.5, **settings) as r:
        for worker in r.workers:
            worker.script = Script(tokens=(OUTPUT,) * 3)
        yield r
        told.check(await told.of(r))
    # What was still to be said when it ended is in the log by now.
    lines = told.log_path.read_bytes()
    assert lines.splitlines()
    told.check({"log": lines})


async def send(r: Rig, told: Told, path: str = CHAT, *, key: str | None = None, body: bytes | None = None, **fields: Any) -> int:
    """Send one request with a string of each kind; keeps what it was told if that was an error."""
    raw = (
        orjson.dumps({"model": wire.MODEL, "user": FIELD, "metadata": {FIELD: FIELD}, **BODIES.get(path, {}), **fields})
        if body is None
        else body
    )
    headers = {**HEADERS, "authorization": f"Bearer {told.key if key is None else key}", "content-type": "application/json"}
    async with r.client.post(r.url + path, data=raw, headers=headers) as answer:
        content = await answer.read()
        if answer.status >= 400:
            told.errors.append(content)
        told.errors += [event for event in content.split(b"\n\n") if b'"error"' in event]
        return answer.status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_request_that_is_served_is_told_of_by_numbers_only(told: Told, path: str, stream: bool) -> None:
    """On both paths, also with a salt and a session of the client's own."""
    async with router(told) as r:
        assert await send(r, told, path, stream=stream) == 200
        assert await send(r, told, path, stream=stream, cache_salt=FIELD) == 200
        if path == CHAT:
            assert await send(r, told, path, stream=stream, n=2) == 200
        await r.receipts(2 + (path == CHAT))
        for leg in r.legs:
            assert not any(HEADER in value or told.key in value for value in leg.headers.values())
            assert told.key.encode() not in orjson.dumps(leg.body)


async def test_a_request_that_is_refused_is_told_of_by_its_reason(told: Told) -> None:
    """Wherever the string stands that made it wrong: in the body, beside the JSON, in the key, in the path."""
    async with router(told, max_body_bytes=100_000) as r:
        for key in (WRONG_KEY, told.scraper, ""):
            assert await send(r, told, key=key) in (401, 403)
        assert await send(r, told, f"/v1/{PATH}") == 404
        assert await send(r, told, f"/metrics/{PATH}") == 404
        assert await send(r, told, model=MODEL) == 404
        for body in (PROMPT.encode(), b'{"prompt": "%s' % PROMPT.encode(), b'"%s"' % PROMPT.encode(), b'{"%s": \xff}' % PROMPT.encode()):
            assert await send(r, told, body=body) == 400
        assert await send(r, told, body=PROMPT.encode() * 10_000) == 413
        for wrong in (
            {"messages": PROMPT},
            {"messages": [PROMPT]},
            {"messages": [{"role": PROMPT, "content": {PROMPT: PROMPT}}]},
            {"max_tokens": PROMPT},
            {"stop": [FIELD, 5]},
            {"stream_options": {"include_usage": PROMPT}, "stream": True},
            {"kv_transfer_params": {"remote_host": PROMPT}},
            {"cache_salt": [PROMPT]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"https://{PROMPT}"}}]}]},
            {"stop": [FIELD] * 1000},
            {"metadata": [[[[PROMPT]]]] * 3, "tools": [[[[[PROMPT]]]]] * 2000},
        ):
            assert await send(r, told, **wrong) == 400
        for endless in (b"GET /%s HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\n%s\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"%s" * 9999 + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
            writer.write(endless.replace(b"%s", HEADER.encode()))
            told.errors.append(await reader.read())
            writer.close()
        for path in ("receipts", "fleet", PATH):
            async with r.client.put(f"{r.admin_url}/admin/v1/{path}", data=PROMPT, headers={"x-pdserve-secret": WRONG_KEY}) as answer:
                told.errors.append(await answer.read())


FAILURES = (
    Script(status=500),
    Script(status=503, body=f"<html>{OUTPUT}</html>".encode()),
    Script(status=401, body=orjson.dumps(wire.error_object(401, OUTPUT))),
    Script(fault=Fault.RESET),
    Script(fault=Fault.RESET, phase=Phase.AFTER_HEAD),
    Script(fault=Fault.RESET, phase=Phase.AFTER_TOKENS),
    Script(fault=Fault.END, phase=Phase.AFTER_TOKENS),
    Script(fault=Fault.HANG),
    Script(body=f"data: {OUTPUT}".encode()),
    Script(body=f'data: {{"{OUTPUT}": [}}\n\n'.encode() * 3),
    Script(body=b'{"choices": "%s"}' % OUTPUT.encode()),
    Script(finish_reason="abort"),
    Script(outcome=CloseReason.DIGEST_MISMATCH),
    Script(head_delay_s=0.3, status=500),
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_request_that_fails_is_told_of_by_where_it_failed(told: Told, path: str) -> None:
    """Whatever an engine does, streamed or not; what it says about itself goes no further than its status."""
    async with router(told, request_timeout_s=3) as r:
        for script in FAILURES:
            for decode in r.decodes:
                decode.script = replace(script, tokens=(OUTPUT,) * 3)
            for stream in (False, True):
                await send(r, told, path, stream=stream)
        outcomes = {receipt["outcome"] for receipt in (await r.admin("receipts?limit=1000"))["receipts"]}
        assert "failed" in outcomes


async def test_a_client_that_leaves_leaves_no_word_behind(told: Told) -> None:
    """Before the first data and after it."""
    async with router(told) as r:
        for script in (Script(fault=Fault.HANG), Script(tokens=(OUTPUT,) * 50, token_delay_s=0.05)):
            for worker in r.decodes:
                worker.script = script
            leaving = asyncio.create_task(send(r, told, stream=True))
            count = len(r.decodes[0].legs) + len(r.decodes[1].legs)
            await until(lambda count=count: len(r.decodes[0].legs) + len(r.decodes[1].legs) > count)
            await asyncio.sleep(0.1)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        await r.receipts(2)


@pytest.mark.parametrize("where", ["serve", "edge", "task"])
async def test_a_bug_is_logged_by_its_place(told: Told, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of unforeseen errors quote what was being handled; types and lines do not."""

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise ValueError(f"invalid literal: {PROMPT} {OUTPUT}")

    async with router(told) as r:
        if where == "serve":
            monkeypatch.setattr("pdserve.server.handoff.Handoff._attempts", broken)
        elif where == "edge":
            monkeypatch.setattr(Router, "body_limits", broken)
        else:
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(broken))
            await asyncio.wait((task,))
            del task
            assert await send(r, told) == 200
        if where != "task":
            assert await send(r, told) == 500
        monkeypatch.undo()
        assert await send(r, told) == 200
    assert b"ValueError" in told.log_path.read_bytes()


async def test_the_check_finds_what_it_looks_for(told: Told) -> None:
    """A string in any of the places is found."""
    with pytest.raises(AssertionError, match=PROMPT):
        async with router(told) as r:
            await send(r, told)
            structlog.get_logger().warning("request", note=PROMPT)
    told.log_path.write_bytes(b"")
    with pytest.raises(AssertionError, match="canary-out"):
        async with router(told) as r:
            await send(r, told)
            told.errors.append(OUTPUT.encode())
