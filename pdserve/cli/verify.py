"""`pdserve verify`: is what decode answers from moved KV what it answers by itself, and are the moved bytes the bytes that prefill wrote?

Each case sends one prompt twice to a running deployment's own engines: through a prefill worker and a decode worker with a ticket that asks for
proof, and to the same decode worker alone. The arms have cache salts of their own, so neither can answer from the other's cache. A case proves
nothing, and fails, if its records do not show the whole prompt moved, or if the second arm took tokens from a cache all the same.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdserve.cli.deployment import Name, existing
from pdserve.control.state import DeploymentReport, WorkerReport, read_report
from pdserve.errors import ConfigError, FleetError
from pdserve.observe.evidence import LayerEvidence, compare_layers, missing_proof
from pdserve.ports import AgentStatus
from pdserve.types import Role, Ticket, TransferRecord, TransferSide, WorkerState

SECRET_HEADER = "x-pdserve-secret"
OUTPUT_TOKENS = 8
TRANSFER_TIMEOUT_S = 300.0
RECORD_TIMEOUT_S = 30.0
BLOCKS_PER_CASE = (4, 5, 16, 17)
"""prompts of so many whole blocks, and of one token more: around the 4 and the 16 blocks that the small and the full MiniMax-M3 choose, and beyond,
where the index cache decides"""
TEXT = "The quick brown fox jumps over the lazy dog while seven wizards brew vexing potions. "


class Case(msgspec.Struct, frozen=True):
    """One prompt, both ways."""

    prefill_worker: str
    decode_worker: str
    prompt_tokens: int
    tokens_equal: bool
    layers_equal: int
    layers_total: int
    layers_different: tuple[str, ...]
    path: str
    """``disaggregated`` if the records prove that the prompt moved whole, else ``unproven: `` and what they lack"""
    faults: tuple[str, ...]
    """what is wrong, for a person; empty if nothing is"""

    @property
    def is_good(self) -> bool:
        return not self.faults


class Moved(msgspec.Struct):
    """Sums over all cases."""

    sealed: int = 0
    """layers that arrived whole"""
    acks: int = 0
    bytes: int = 0


class Output(NamedTuple):
    """What one request came to."""

    tokens: list[int]
    cached_tokens: int
    """prompt tokens that the engine had in its cache"""


class Verdict(msgspec.Struct, frozen=True):
    """The whole answer."""

    ok: bool
    cases: tuple[Case, ...]
    transfer: Moved


class Worker:
    """One engine of the deployment, reached on its private port."""

    def __init__(self, report: WorkerReport, secret: str) -> None:
        self.report = report
        self.client = httpx.Client(base_url=report.url, headers={SECRET_HEADER: secret}, timeout=600, trust_env=False)

    def status(self) -> AgentStatus:
        return msgspec.convert(self._ask("GET", "/pdserve/v1/status"), AgentStatus)

    def prompt_tokens(self, model: str, count: int) -> list[int]:
        """Return `count` token ids of ordinary text."""
        answer = self._ask("POST", "/tokenize", {"model": model, "prompt": TEXT * 4, "add_special_tokens": False})
        tokens = [int(token) for token in answer["tokens"]]
        return (tokens * (count // len(tokens) + 1))[:count]

    def complete(self, body: dict[str, Any]) -> Output:
        """Answer one request."""
        answer = self._ask("POST", "/v1/completions", body)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Output([int(token) for token in answer["choices"][0]["token_ids"]], int(details.get("cached_tokens") or 0))

    def record(self, transfer_id: str) -> TransferRecord:
        """Wait for the record of a transfer. Raises `FleetError` if there is none in time."""
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while time.monotonic() < deadline:
            answer = self._ask("GET", "/pdserve/v1/records?after=0")
            for record in msgspec.convert(answer["records"], list[TransferRecord]):
                if record.transfer_id == transfer_id:
                    return record
            time.sleep(0.1)
        raise FleetError(self.report.worker_id, f"has no record of transfer {transfer_id}")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. Raises `FleetError` naming the worker if there is none."""
        try:
            answer = self.client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise FleetError(self.report.worker_id, f"cannot be reached: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise FleetError(self.report.worker_id, f"answered {answer.status_code}: {' '.join(answer.text.split())[:500]}")
        return answer.json()


def verify(
    name: Name = None,
    lengths: Annotated[str | None, typer.Option("--lengths", help="Prompt lengths in tokens, e.g. 1,128,1500.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Prove on a running deployment that moved KV is right, every prefill with every decode worker. Exit code 1 on any difference."""
    folder = existing(name)
    report = read_report(folder.report_path)
    if report is None:
        raise ConfigError("--name", name or "default", "no such deployment here; `pdserve up` starts one")
    workers = [Worker(worker, folder.secret()) for worker in report.workers if worker.state is WorkerState.READY]
    try:
        verdict = run_cases(report, workers, _parse_lengths(lengths))
    finally:
        for worker in workers:
            worker.client.close()
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode())
    else:
        _show(verdict, Console())
    return 0 if verdict.ok else 1


def run_cases(report: DeploymentReport, workers: Sequence[Worker], lengths: tuple[int, ...]) -> Verdict:
    """Try every length on every pair."""
    prefills = [worker for worker in workers if worker.report.role is Role.PREFILL]
    decodes = [worker for worker in workers if worker.report.role is Role.DECODE]
    if not prefills or not decodes:
        raise FleetError("verify", "needs a ready prefill and a ready decode worker; see `pdserve status`")
    cases: list[Case] = []
    moved = Moved()
    for prefill in prefills:
        for decode in decodes:
            status = decode.status()
            cases += [_run_case(report.model, prefill, decode, length, moved) for length in lengths or default_lengths(status)]
    return Verdict(all(case.is_good for case in cases), tuple(cases), moved)


def default_lengths(status: AgentStatus) -> tuple[int, ...]:
    """Return lengths around one block and several, as far as the model's length and the cache's room go."""
    block = status.block_tokens
    room = min(status.max_model_len, status.blocks_total * block // 2) - OUTPUT_TOKENS
    wanted = {1, block - 1, *(blocks * block + more for blocks in (1, *BLOCKS_PER_CASE) for more in (0, 1))}
    return tuple(sorted(length for length in wanted if 1 <= length <= room))


def new_salts() -> tuple[str, str]:
    """Return the cache salts of a case's two arms; they must differ from each other and from those of all other cases."""
    return secrets.token_hex(8), secrets.token_hex(8)


def _run_case(model: str, prefill: Worker, decode: Worker, length: int, moved: Moved) -> Case:
    ticket = Ticket(
        transfer_id=secrets.token_hex(16),
        attempt=1,
        prefill_worker=prefill.report.worker_id,
        prefill_incarnation=prefill.report.incarnation,
        decode_worker=decode.report.worker_id,
        decode_incarnation=decode.report.incarnation,
        timeout_s=TRANSFER_TIMEOUT_S,
        proof=True,
    )
    body = {
        "model": model,
        "prompt": decode.prompt_tokens(model, length),
        "temperature": 0,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    salt, other_salt = new_salts()
    both = body | {"cache_salt": salt}
    with ThreadPoolExecutor(1) as executor:
        computing = executor.submit(prefill.complete, both | {"max_tokens": 1, "kv_transfer_params": ticket.params(TransferSide.SEND)})
        through = decode.complete(both | {"kv_transfer_params": ticket.params(TransferSide.RECEIVE)})
        computing.result()
    alone = decode.complete(body | {"cache_salt": other_salt})
    sent, received = prefill.record(ticket.transfer_id), decode.record(ticket.transfer_id)
    moved.sealed += received.layers_sealed
    moved.acks += sent.acks
    moved.bytes += received.bytes_moved
    layers = compare_layers(sent, received)
    missing = missing_proof(sent, received)
    path = f"unproven: {missing}" if missing else "disaggregated"
    return Case(
        prefill_worker=prefill.report.worker_id,
        decode_worker=decode.report.worker_id,
        prompt_tokens=length,
        tokens_equal=through.tokens == alone.tokens,
        layers_equal=layers.layers_equal,
        layers_total=layers.layers_total,
        layers_different=layers.different,
        path=path,
        faults=tuple(_faults(path, layers, through, alone)),
    )


def _faults(path: str, layers: LayerEvidence, through: Output, alone: Output) -> Iterator[str]:
    """Yield what keeps a case from being a proof, or from being right."""
    if path != "disaggregated":
        yield path
    if alone.cached_tokens:
        yield f"unproven: the aggregated arm took {alone.cached_tokens} tokens from the cache"
    if through.tokens != alone.tokens:
        yield f"output differs: {through.tokens} with moved KV, {alone.tokens} alone"
    if layers.different:
        yield f"layers differ: {', '.join(layers.different)}"
    elif not layers.layers_total:
        yield "no digests: the engines recorded none"


def _parse_lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ConfigError("--lengths", text, "give whole numbers of tokens, each at least 1, separated by commas")
    return lengths


def _show(verdict: Verdict, console: Console) -> None:
    table = Table("prefill", "decode", "prompt tokens", "output", "layers equal", "path")
    for case in verdict.cases:
        output = "equal" if case.tokens_equal else "[red]different[/red]"
        colour = "" if case.layers_equal == case.layers_total and case.layers_total else "[red]"
        layers = f"{colour}{case.layers_equal} of {case.layers_total}"
        table.add_row(case.prefill_worker, case.decode_worker, str(case.prompt_tokens), output, layers, case.path)
    console.print(table)
    for case in verdict.cases:
        for fault in case.faults:
            console.print(f"{case.prefill_worker} to {case.decode_worker}, {case.prompt_tokens} tokens: {fault}", style="red")
    moved = verdict.transfer
    console.print(f"{moved.sealed} layers sealed and arrived, {moved.acks} acknowledgements, {moved.bytes / 1e6:.1f} MB moved")
    console.print("[green]verified[/green]" if verdict.ok else "[red]NOT verified[/red]")
