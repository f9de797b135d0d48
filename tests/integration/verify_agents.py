"""Workers for `pdserve verify` without engines: they answer its requests as told, and their agents tell of transfers that a test made up."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import msgspec
from verify_command import Member

from pdserve.ports import AgentStatus
from pdserve.types import CloseReason, RunDigest, TransferRecord, TransferSide

SECRET = "5" * 64


@dataclass
class Agent:
    """What one worker answers.

    Args:
        record: of each transfer; its id and prompt are the request's. None: the worker keeps no record.
    """

    worker_id: str
    record: TransferRecord | None
    tokens: Sequence[int] = (7, 8, 9)
    """output of every request"""
    tokens_alone: Sequence[int] | None = None
    """output of requests without a ticket, if another"""
    cached_alone: int = 0
    status_code: int = 200
    block_tokens: int = 16
    blocks_total: int = 400
    max_model_len: int = 1000
    requests: list[dict[str, Any]] = field(default_factory=list)
    records: list[TransferRecord] = field(default_factory=list)

    def status(self) -> AgentStatus:
        sizes = (self.max_model_len, self.block_tokens, self.blocks_total, self.blocks_total)
        return AgentStatus(self.worker_id, "i", "m", *sizes, 0, 0, 0, 1, (), ())

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        params = body.get("kv_transfer_params")
        if params is not None and self.record is not None:
            length = len(body["prompt"])
            moved = length if self.record.tokens_moved else 0
            self.records.append(replace(self.record, transfer_id=params["transfer_id"], prompt_tokens=length, tokens_moved=moved))
        tokens = self.tokens if params is not None or self.tokens_alone is None else self.tokens_alone
        cached = self.cached_alone if params is None else 0
        return {"choices": [{"token_ids": list(tokens)}], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        match path.partition("?")[0]:
            case "/pdserve/v1/status":
                return msgspec.to_builtins(self.status())
            case "/pdserve/v1/records":
                return {"next": len(self.records), "records": msgspec.to_builtins(self.records)}
            case "/tokenize":
                return {"tokens": list(range(10))}
            case "/v1/completions":
                return self.complete(body)
            case _:
                raise AssertionError(path)


def good_records(digests: Sequence[RunDigest]) -> tuple[TransferRecord, TransferRecord]:
    """Return both sides' records of a transfer that went well."""
    layers = len({digest.layer for digest in digests})
    common = {"tokens_moved": 1, "bytes_moved": 1000, "layers_sealed": layers, "layers_expected": layers, "digests": tuple(digests)}
    sent = TransferRecord("", 1, TransferSide.SEND, "p", "i", CloseReason.RELEASED, acks=2, acks_expected=2, **common)  # type: ignore[arg-type]
    return sent, replace(sent, side=TransferSide.RECEIVE, worker="d", outcome=CloseReason.LANDED, acks=0, acks_expected=0)


@contextmanager
def serving(*agents: Agent) -> Iterator[list[Member]]:
    """Serve each agent on a port of its own."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(agent)) for agent in agents]
    threads = [Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}) for server in servers]
    try:
        for thread in threads:
            thread.start()
        yield [
            Member(agent.worker_id, "i", f"http://127.0.0.1:{server.server_port}") for agent, server in zip(agents, servers, strict=True)
        ]
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(agent: Agent) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            code = agent.status_code if self.headers["x-pdserve-secret"] == SECRET else 401
            content = json.dumps(agent.answer(self.path, body) if code == 200 else {"error": "no"}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    return Handler
