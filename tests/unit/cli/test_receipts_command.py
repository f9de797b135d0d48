"""`receipts`: a table, one receipt whole, JSON, and what it says when there is nothing to show."""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from pdserve.cli import main, receipts
from pdserve.config import Config
from pdserve.control.folder import RouterBinding, StateFolder
from pdserve.control.router_client import ReceiptReader
from pdserve.types import CloseReason, LegAbort, Receipt, ServePath, TransferRecord, TransferSide

SEND = TransferRecord("7" * 32, 1, TransferSide.SEND, "prefill-0", "i0", CloseReason.RELEASED, prompt_tokens=40, tokens_moved=40)
SERVED = Receipt(
    request_id="a" * 32,
    client_request_id="mine-1",
    route="/v1/chat/completions",
    model="m[x]",
    stream=True,
    status=200,
    outcome="finished",
    path=ServePath.DISAGGREGATED,
    reason="default",
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    transfer_id=SEND.transfer_id,
    attempts=1,
    queue_wait_s=0.25,
    ttft_s=0.5,
    duration_s=2.0,
    prompt_tokens=40,
    completion_tokens=3,
    cached_tokens=None,
    aborts=(LegAbort("decode-0", "r-1", 0.012, None),),
    send=SEND,
    receive=replace(SEND, side=TransferSide.RECEIVE, outcome=CloseReason.LANDED, tokens_moved=39),
    configured={"transport": "tcp", "spec_decode": "off"},
    eligible={"transport": "yes", "spec_decode": None},
    executed={"transport": "no: [peer] lost", "spec_decode": None},
)
REFUSED = Receipt(
    *("b" * 32, None, "/v1/completions", "", False, 400, "client_error", ServePath.NONE, "rejected"),
    *(None, None, None, 0, 0.0, None, 0.001, None, None, None),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    """A deployment that was started, and whose router is bound."""
    for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    folder = StateFolder.of("default")
    folder.path.mkdir(parents=True)
    folder.prepare(Config())
    folder.write_binding(RouterBinding(os.getpid(), 1, 2))
    monkeypatch.setattr("pdserve.cli.deployment.read_report", lambda path: object() if path.parent.exists() else None)
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """What the command asked the admin port, which has two receipts."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        known = {SERVED.request_id: SERVED, "mine-1": SERVED}
        if request.url.path == "/admin/v1/receipts":
            return httpx.Response(200, content=msgspec.json.encode({"receipts": (SERVED, REFUSED)}))
        found = known.get(request.url.path.rpartition("/")[2])
        return httpx.Response(404) if found is None else httpx.Response(200, content=msgspec.json.encode(found))

    use(monkeypatch, answer)
    return seen


def use(monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response]) -> None:
    """Have the command's reader ask this instead of the network."""
    monkeypatch.setattr(receipts, "ReceiptReader", functools.partial(ReceiptReader, transport=httpx.MockTransport(answer)))


def test_the_newest_are_a_table(folder: StateFolder, asked: list[httpx.Request], capsys: pytest.CaptureFixture[str]) -> None:
    """A line each; what is unknown is left out of it."""
    assert main.run(["receipts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (served,) = (line for line in lines if SERVED.request_id in line)
    assert all(
        word in served for word in ("200", "finished", "disaggregated: default", "prefill-0 → decode-0", "500.0", "2000.0", "40", "39")
    )
    (refused,) = (line for line in lines if REFUSED.request_id in line)
    assert refused.split()[1:] == ["400", "client_error", "none:", "rejected", "1.0"]
    (request,) = asked
    assert (request.url.port, request.url.query, request.headers["x-pdserve-secret"]) == (2, b"limit=20", folder.secret())


def test_filters_are_the_routers(folder: StateFolder, asked: list[httpx.Request]) -> None:
    """They are sent on, not applied here to what a limit has cut."""
    assert main.run(["receipts", "--limit", "5", "--outcome", "shed", "--path", "none", "--reason", "draining", "--json"]) == 0
    assert dict(asked[0].url.params) == {"limit": "5", "outcome": "shed", "path": "none", "reason": "draining"}


@pytest.mark.parametrize("known_as", [SERVED.request_id, "mine-1"])
@pytest.mark.usefixtures("folder", "asked")
def test_one_is_shown_whole(known_as: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts, features with what is unknown said so, both sides of the transfer, aborts; brackets are text."""
    assert main.run(["receipts", known_as]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "route /v1/chat/completions, stream, model m[x]" in lines
    assert "cached tokens unknown" in lines
    assert "transport tcp yes no: [peer] lost" in lines
    assert "spec_decode off unknown unknown" in lines
    assert any(line.startswith("send: released at prefill-0, 40 of 40 tokens") for line in lines)
    assert any(line.startswith("receive: landed") for line in lines)
    assert "abort at decode-0: acknowledged after 12.0 ms, blocks free after unknown" in lines


@pytest.mark.usefixtures("folder", "asked")
def test_json_is_the_receipt_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown is null; of several a list."""
    assert main.run(["receipts", "--json", SERVED.request_id]) == 0
    one = json.loads(capsys.readouterr().out)
    assert msgspec.convert(one, Receipt) == SERVED and one["executed"]["spec_decode"] is None
    assert main.run(["receipts", "--json"]) == 0
    assert [receipt["request_id"] for receipt in json.loads(capsys.readouterr().out)] == [SERVED.request_id, REFUSED.request_id]


@pytest.mark.usefixtures("folder", "asked")
def test_an_unknown_id_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line."""
    assert main.run(["receipts", "nobody"]) == 2
    error = capsys.readouterr().err
    assert "nobody" in error and "no such receipt" in error and error.count("\n") == 1


def test_without_a_deployment_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for every command about one."""
    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    assert main.run(["receipts"]) == 2
    assert "no such deployment" in capsys.readouterr().err


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_router_that_is_away_is_an_error(
    is_bound: bool, folder: StateFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never bound, or bound once and gone: exit code 1."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    use(monkeypatch, refuse)
    if not is_bound:
        (folder.path / "router.json").unlink()
    assert main.run(["receipts"]) == 1
    assert "router" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_what_the_router_refuses_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own message."""
    use(monkeypatch, lambda _request: httpx.Response(401, json={"error": {"message": "the secret is missing or wrong"}}))
    assert main.run(["receipts"]) == 1
    assert "the secret is missing or wrong" in capsys.readouterr().err
