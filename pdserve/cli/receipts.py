"""`pdserve receipts`: what happened to the last requests, as the router's records prove it."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdserve import assembly
from pdserve.cli.deployment import Name, existing
from pdserve.control.router_client import ReceiptReader
from pdserve.errors import ConfigError, FleetError
from pdserve.observe.receipts import KEPT
from pdserve.types import Receipt

NUMBERS = {"status", "TTFT ms", "ms", "prompt", "output", "moved"}
UNKNOWN = "unknown"


def receipts(
    known_as: Annotated[str | None, typer.Argument(metavar="ID", help="Show one whole: id of a request, or of a transfer.")] = None,
    name: Name = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="So many, newest first.", min=1, max=KEPT)] = 20,
    outcome: Annotated[str | None, typer.Option("--outcome", metavar="OUTCOME", help="finished, cancelled, shed, failed, …")] = None,
    path: Annotated[str | None, typer.Option("--path", metavar="PATH", help="disaggregated, local or none.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", metavar="REASON", help="Why it went that way.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what happened to the last requests, or to one. Exit code 2 if there is no such deployment or receipt, 1 if its router is away."""
    filters = {key: value for key, value in (("outcome", outcome), ("path", path), ("reason", reason)) if value is not None}
    with _reader(name) as reader:
        if known_as is None:
            found = reader.last(limit, filters)
            if as_json:
                _print_json(found)
            else:
                Console().print(_table(found) if found else "no receipts yet" if not filters else "no such receipts")
            return
        receipt = reader.find(known_as)
    if receipt is None:
        raise ConfigError("ID", known_as, f"no such receipt among the last {KEPT}; `pdserve receipts` lists the newest")
    if as_json:
        _print_json(receipt)
    else:
        _show(receipt, Console())


def _reader(name: str | None) -> ReceiptReader:
    folder = existing(name)
    url = assembly.admin_url(folder, folder.config().router.admin_host) if folder.is_prepared else None
    if url is None:
        raise FleetError("router", "is not up")
    return ReceiptReader(url, folder.secret())


def _print_json(found: Receipt | tuple[Receipt, ...]) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


def _table(found: tuple[Receipt, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("request", "status", "outcome", "path", "workers", "TTFT ms", "ms", "prompt", "output", "moved"):
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", overflow="fold")
    for receipt in found:
        workers = " → ".join(worker for worker in (receipt.prefill_worker, receipt.decode_worker) if worker is not None)
        values = (
            *(receipt.request_id, receipt.status, receipt.outcome, f"{receipt.path.value}: {receipt.reason}", workers),
            *(_ms(receipt.ttft_s), _ms(receipt.duration_s), receipt.prompt_tokens, receipt.completion_tokens),
            None if receipt.receive is None else receipt.receive.tokens_moved,
        )
        table.add_row(*("" if value is None else escape(str(value)) for value in values))
    return table


def _show(receipt: Receipt, console: Console) -> None:
    """Print one receipt: facts, then features, then what each side of the transfer recorded, then aborts."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for field, value in _facts(receipt):
        facts.add_row(field, UNKNOWN if value is None else escape(str(value)))
    features = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("feature", "configured", "eligible", "executed"):
        features.add_column(heading)
    for feature in dict.fromkeys((*receipt.configured, *receipt.eligible, *receipt.executed)):
        values = (view.get(feature, "") for view in (receipt.configured, receipt.eligible, receipt.executed))
        features.add_row(feature, *(UNKNOWN if value is None else escape(value) for value in values))
    console.print(facts)
    console.print(features)
    for record in (receipt.send, receipt.receive):
        if record is not None:
            console.print(
                f"{record.side.value}: {record.outcome.value} at {record.worker}, {record.tokens_moved} of {record.prompt_tokens} tokens"
                f" ({record.bytes_moved} bytes, {record.parcels} parcels), layers {record.layers_sealed}/{record.layers_expected},"
                f" acks {record.acks}/{record.acks_expected}, waited {_ms(record.wait_s)} ms, moved in {_ms(record.transfer_s)} ms",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    for abort in receipt.aborts:
        told = (f"{what} {UNKNOWN if s is None else _ms(s) + ' ms'}" for what, s in _abort_times(abort.acknowledged_s, abort.blocks_free_s))
        console.print(f"abort at {abort.worker}: {', '.join(told)}", markup=False, highlight=False, soft_wrap=True)


def _facts(receipt: Receipt) -> Iterator[tuple[str, object]]:
    yield "request", receipt.request_id
    if receipt.client_request_id is not None:
        yield "client's id", receipt.client_request_id
    yield "route", f"{receipt.route}, {'stream' if receipt.stream else 'one piece'}, model {receipt.model}"
    yield "outcome", f"{receipt.outcome}, status {receipt.status}"
    yield "path", f"{receipt.path.value}: {receipt.reason}"
    if receipt.attempts:
        yield "prefill worker", receipt.prefill_worker or "none"
        yield "decode worker", receipt.decode_worker
        yield "transfer", receipt.transfer_id or "none"
    yield "attempts", receipt.attempts
    yield "queue wait", f"{_ms(receipt.queue_wait_s)} ms"
    yield "TTFT", None if receipt.ttft_s is None else f"{_ms(receipt.ttft_s)} ms"
    yield "duration", f"{_ms(receipt.duration_s)} ms"
    for field in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        yield field.replace("_", " "), getattr(receipt, field)
    if receipt.resumed_at:
        yield "resumed at", f"{', '.join(map(str, receipt.resumed_at))} tokens"


def _abort_times(acknowledged_s: float | None, blocks_free_s: float | None) -> tuple[tuple[str, float | None], ...]:
    return (("acknowledged after", acknowledged_s), ("blocks free after", blocks_free_s))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f}"
