"""Values that cross rooms. No behaviour beyond what a value needs, no I/O.

The words used everywhere:
  worker       one vLLM engine with its private agent; has an id that is stable and an incarnation that is random per start
  role         what the router uses a worker for now; an attribute in the router's pool, not of the engine
  lease        one slot of a worker, owned by one request
  ticket       names one hand-over of KV: transfer id, attempt, and the worker and incarnation on the other side
  transfer     what the KV layer does for one ticket
  receipt      what happened to one request, frozen
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What the router uses a worker for."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """Life of a worker, in order; FAILED and STOPPED are ends."""

    PENDING = "pending"
    """asked for, not placed yet"""
    PLACED = "placed"
    """placement group and actor exist"""
    LOADING = "loading"
    """engine process runs, its port does not answer yet"""
    WARMING = "warming"
    """engine answers; peers handshake and the canary runs"""
    READY = "ready"
    """a real token went through prefill, transfer and decode with this worker in it"""
    DRAINING = "draining"
    """finishes what it has, gets nothing new"""
    FAILED = "failed"
    STOPPED = "stopped"


class ServePath(StrEnum):
    """Which way a request was served."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"
    NONE = "none"
    """the request ended before a path was chosen"""


class TransferSide(StrEnum):
    """Which end of a transfer a ticket or a record speaks for."""

    SEND = "send"
    RECEIVE = "receive"


class CloseReason(StrEnum):
    """Why a transfer ended. Exactly one per side and attempt; `LANDED` and `RELEASED` are the good ones."""

    LANDED = "landed"
    """consumer: all that was sealed is scattered and verified"""
    RELEASED = "released"
    """producer: every consumer rank acknowledged"""
    NOTHING_TO_MOVE = "nothing_to_move"
    """decode holds the prompt already, or it is shorter than what can move"""
    PROMPT_MISMATCH = "prompt_mismatch"
    """the two sides hold different prompts for one ticket"""
    DIGEST_MISMATCH = "digest_mismatch"
    SEAL_MISMATCH = "seal_mismatch"
    """what was scattered is not what was sealed, or not what the plan expects"""
    ABORTED = "aborted"
    """the request was aborted on this side"""
    PEER_CLOSED = "peer_closed"
    """the other side closed first"""
    PEER_LOST = "peer_lost"
    """the link or the peer's incarnation is gone"""
    PEER_UNKNOWN = "peer_unknown"
    """the ticket names a worker or incarnation that is not in the peer table, or not connected on every rank"""
    EXPIRED = "expired"
    """the owner's deadline passed"""
    REFUSED = "refused"
    """the handshake with this peer failed; the agent's status names the difference"""
    OVERFLOW = "overflow"
    """a bounded table was full"""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Single-use right to move one prompt's KV from one worker to another.

    Minted by the router; carries no address and no block number.
    """

    transfer_id: str
    """32 hex digits, unique for ever"""
    attempt: int
    """1, 2, … of the same request"""
    prefill_worker: str
    prefill_incarnation: str
    decode_worker: str
    decode_incarnation: str
    timeout_s: float
    """time both sides may spend on it, counted on each side's own clock from when it sees the ticket"""
    proof: bool = False
    """ask both sides for the digest of every run they read and wrote"""

    def params(self, side: TransferSide) -> dict[str, object]:
        """Return vLLM's `kv_transfer_params` for one leg; read back by `pdserve.kv.ticket`."""
        peer, incarnation = (
            (self.decode_worker, self.decode_incarnation) if side is TransferSide.SEND else (self.prefill_worker, self.prefill_incarnation)
        )
        return {
            "transfer_id": self.transfer_id,
            "attempt": self.attempt,
            "role": side.value,
            "worker": peer,
            "incarnation": incarnation,
            "timeout_s": self.timeout_s,
            "proof": self.proof,
        }


class RunDigest(NamedTuple):
    """What one (layer, block, head) run held: hashed by the producer where it read it, by the consumer where it wrote it."""

    rank: int
    layer: str
    head: int
    """number of the head over all ranks"""
    block: int
    """position in the prompt"""
    xxh3: str
    """16 hex digits"""


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """What one side of one transfer did, all its ranks together. Made by the KV layer, served by the agent.

    Counts are sums over ranks unless said otherwise; `*_s` are durations on the recording process's clock.
    """

    transfer_id: str
    attempt: int
    side: TransferSide
    worker: str
    incarnation: str
    outcome: CloseReason
    request_id: str = ""
    """the engine's id of the request; a label, never a key"""
    prompt_tokens: int = 0
    tokens_moved: int = 0
    """prompt tokens whose KV crossed, of one rank"""
    tokens_reused: int = 0
    """prompt tokens this side had cached before (its own prefix hit)"""
    bytes_moved: int = 0
    parcels: int = 0
    layers_sealed: int = 0
    layers_expected: int = 0
    acks: int = 0
    acks_expected: int = 0
    passes: int = 1
    """how often the producer computed the prompt (preemption makes more)"""
    bytes_before_forward_end: int = 0
    """producer: bytes already sent when the last forward pass ended"""
    wait_s: float = 0.0
    """from ticket seen to the first parcel"""
    transfer_s: float = 0.0
    """from the first parcel to the end"""
    transport: str | None = None
    """what moves this side's parcels; None if no rank had to do with the transfer"""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """stale or duplicate messages, by reason"""
    digests: tuple[RunDigest, ...] = ()
    """of every run that this side read or wrote, where the ticket asked for proof"""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where one rank of a worker listens for KV peers."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker as the controller sees it now; the router's pool is made of these."""

    worker_id: str
    incarnation: str
    role: Role
    state: WorkerState
    url: str
    """``http://host:port`` of the engine's private server"""
    model: str
    """served model name"""
    max_model_len: int
    """longest prompt plus output, tokens"""
    max_running: int
    """lease limit of the worker in its role, requests; ≤ the engine's max_num_seqs"""
    kv_capacity_tokens: int
    block_tokens: int = 0
    tensor_parallel_size: int = 1
    pid: int | None = None
    detail: str = ""
    """one line for a person: why it failed, or what it is doing"""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """All workers at one moment. `version` grows with each change; a lower one is stale."""

    version: int
    workers: tuple[WorkerSnapshot, ...]


@dataclass(frozen=True, slots=True)
class LegAbort:
    """How a worker was rid of one leg. Times are counted from when the client's departure was noticed, else from when the leg was given up."""

    worker: str
    leg_id: str
    """what the engine calls the attempt"""
    acknowledged_s: float | None
    """until the worker's agent said that the abort went through the engine's loop; None if no call reached it"""
    blocks_free_s: float | None
    """until it said that the engine keeps no block for the leg; None if it did not say so in time"""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What happened to one client request. Frozen; metrics, log line and debug header derive from it.

    `configured`, `eligible` and `executed` map a feature (``disaggregation``, ``layer_wise_push``, ``prefix_reuse``, ``transport``,
    ``spec_decode``) to what was set, what the request qualified for, and what the records prove happened; None where nothing tells.
    """

    request_id: str
    client_request_id: str | None
    route: str
    model: str
    stream: bool
    status: int
    """HTTP status the client saw; 499 if it left first"""
    outcome: str
    """``finished``, ``client_error``, ``upstream_error``, ``shed``, ``cancelled``, ``failed``"""
    path: ServePath
    reason: str
    """why this path, from a closed vocabulary"""
    prefill_worker: str | None
    decode_worker: str | None
    transfer_id: str | None
    attempts: int
    queue_wait_s: float
    ttft_s: float | None
    """time to the first data of a stream; None for an answer in one piece, whose first token nobody saw"""
    duration_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    resumed_at: tuple[int, ...] = ()
    """tokens that the client had, each time that its stream was taken up again after its decode worker was lost"""
    aborts: tuple[LegAbort, ...] = ()
    """of legs that did not end by themselves, over all attempts"""
    inter_token_s: tuple[float, ...] = ()
    """gaps between data frames; emptied before a receipt is stored"""
    send: TransferRecord | None = None
    receive: TransferRecord | None = None
    configured: Mapping[str, str | None] = field(default_factory=dict)
    eligible: Mapping[str, str | None] = field(default_factory=dict)
    executed: Mapping[str, str | None] = field(default_factory=dict)
