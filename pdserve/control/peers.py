"""Peer table and KV links between workers. Pure.

A worker is *linked* to a peer when every handshake it reports with the peer's present incarnation is connected, and there is at least one.
Of interest are the peers of the other role: only they exchange KV.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.control.workers import SERVING, Worker
from pdserve.ports import PeerEntry, PeerHandshake


@dataclass(frozen=True, slots=True)
class Links:
    """How one worker stands towards its peers of interest."""

    missing: tuple[Worker, ...] = ()
    refusal: str = ""
    """the first refusal, with the peer and the reason it gave"""


def peer_table(workers: Iterable[Worker]) -> tuple[PeerEntry, ...]:
    """Return one row for each worker whose engine has said where its ranks listen, and may still be there: peers free what a worker that leaves the
    table could write to.
    """
    return tuple(
        PeerEntry(worker.worker_id, worker.incarnation, worker.agent.tensor_parallel_size, worker.agent.ranks)
        for worker in workers
        if worker.may_touch_memory and worker.agent is not None
    )


def of_interest(worker: Worker, workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Return the workers that `worker` may exchange KV with now."""
    return tuple(
        other for other in workers if other.spec.role is not worker.spec.role and other.state in SERVING and other.agent is not None
    )


def links(worker: Worker, workers: Iterable[Worker]) -> Links:
    """Return how `worker` stands towards all peers of interest, by its own report."""
    peers = of_interest(worker, workers)
    refusals = (
        f"refused by {peer.worker_id}: {shake.reason}" for peer in peers for shake in _handshakes(worker, peer) if shake.state == "refused"
    )
    return Links(tuple(peer for peer in peers if not is_linked(worker, peer)), next(refusals, ""))


def is_linked(worker: Worker, peer: Worker) -> bool:
    """Return whether every rank pair of the two is connected, as `worker` reports."""
    shakes = _handshakes(worker, peer)
    return bool(shakes) and all(shake.state == "connected" for shake in shakes)


def _handshakes(worker: Worker, peer: Worker) -> list[PeerHandshake]:
    if worker.agent is None:
        return []
    return [shake for shake in worker.agent.handshakes if (shake.peer_worker, shake.peer_incarnation) == (peer.worker_id, peer.incarnation)]
