"""What the scheduler's half of the connector and the ranks' half tell each other, once per engine step, through vLLM.

Plain values: vLLM pickles them between its own processes, so they hold no tensors, sockets or locks.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from pdserve.kv.actions import ReceiveOrder, SendOrder
from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason, TransferRecord


class SendProgress(NamedTuple):
    """One prefill request's share of this step."""

    key: TransferKey
    pass_number: int
    block_ids: tuple[tuple[int, ...], ...]
    """per group, the whole table so far"""
    cached_tokens: int
    """tokens that this pass found in the prefix cache"""
    end_token: int
    """prompt tokens whose KV exists after this step's forward"""
    is_last: bool


class Decline(NamedTuple):
    """A ticket that decode will not use."""

    key: TransferKey
    peer_worker: str
    peer_incarnation: str
    reason: CloseReason


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler → ranks."""

    preempted: list[tuple[TransferKey, int]] = field(default_factory=list)
    """transfers whose blocks were taken away, with the number of the pass that comes next"""
    sends: list[SendOrder] = field(default_factory=list)
    progress: list[SendProgress] = field(default_factory=list)
    receives: list[ReceiveOrder] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    cancelled_sends: list[tuple[TransferKey, CloseReason]] = field(default_factory=list)
    cancelled_receives: list[tuple[TransferKey, CloseReason]] = field(default_factory=list)
    num_scheduled_tokens: int = 0


@dataclass
class RankReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Ranks → scheduler: the records of what ended in this step."""

    records: list[TransferRecord]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankReports":
        assert isinstance(other, RankReports)
        return RankReports(self.records + other.records)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Rank → scheduler, once: where peers reach this rank."""

    rank: int
    host: str
    port: int
