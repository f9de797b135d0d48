"""A worker that answers at once, for `router_overhead`: as little work as an HTTP server can do, so that the router is what is measured.

    python -m tests.bench.router_bench_worker PORT…

Speaks to routers that send both legs at once under a ticket (the receiving leg waits for the sending one, both leave a transfer record) and to those
that send prefill first and relay its `kv_transfer_params`.
"""

import asyncio
import sys
from typing import Any

import orjson
import uvloop
from aiohttp import web

PROMPT_TOKENS = 9
RELAYED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_request_id": "r",
}


class Workers:
    """All workers of one run, in one process, so that the legs of a ticket can meet."""

    def __init__(self) -> None:
        self._sent: dict[str, asyncio.Event] = {}
        self._records: dict[int, list[dict[str, Any]]] = {}

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        params = body.get("kv_transfer_params") or {}
        if "role" in params:
            await self._transfer(params, _port(request))
        tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        is_chat = "messages" in body
        if not body.get("stream"):
            return _whole(tokens, is_chat=is_chat, relayed=RELAYED if params.get("do_remote_decode") else None)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(tokens):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if index == tokens - 1 else None}
            choice |= {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            await response.write(b"data: " + orjson.dumps({"id": "r", "created": 0, "model": "m", "choices": [choice]}) + b"\n\n")
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"id": "r", "created": 0, "model": "m", "choices": [], "usage": _usage(tokens)}
            await response.write(b"data: " + orjson.dumps(usage) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def records(self, request: web.Request) -> web.Response:
        records = self._records.setdefault(_port(request), [])
        after = int(request.query["after"])
        return web.Response(body=orjson.dumps({"next": len(records), "records": records[after:]}), content_type="application/json")

    async def _transfer(self, params: dict[str, Any], port: int) -> None:
        sent = self._sent.setdefault(params["transfer_id"], asyncio.Event())
        is_sender = params["role"] == "send"
        if is_sender:
            sent.set()
        else:
            await sent.wait()
            del self._sent[params["transfer_id"]]
        record = {key: params[key] for key in ("transfer_id", "attempt", "worker", "incarnation")} | {"side": params["role"]}
        record |= {"outcome": "released" if is_sender else "landed", "tokens_moved": PROMPT_TOKENS}
        self._records.setdefault(port, []).append(record)


def _port(request: web.Request) -> int:
    assert request.transport is not None
    port: int = request.transport.get_extra_info("sockname")[1]
    return port


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def _whole(tokens: int, *, is_chat: bool, relayed: dict[str, Any] | None) -> web.Response:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": "x" * tokens}} if is_chat else {"text": "x" * tokens}
    answer = {"id": "r", "created": 0, "model": "m", "choices": [choice], "usage": _usage(tokens), "kv_transfer_params": relayed}
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def _empty(_request: web.Request) -> web.Response:
    return web.json_response({})


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "vllm"}]})


async def main(ports: list[int]) -> None:
    """Serve on all ports until the process ends."""
    workers = Workers()
    app = web.Application(client_max_size=1 << 28)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, workers.complete)
    app.router.add_get("/pdserve/v1/records", workers.records)
    app.router.add_get("/v1/models", _models)
    for path in ("/health", "/ping", "/get_server_info", "/get_model_info", "/version", "/load"):
        app.router.add_get(path, _empty)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in ports:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main([int(port) for port in sys.argv[1:]]))
