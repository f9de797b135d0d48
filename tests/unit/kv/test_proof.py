"""Digests of a transfer: the producer's of what it read, the consumer's of what lies in its own blocks, under names that both sides share."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import xxhash
from shapes import M3_SMALL, Prompt, RankMemory

from pdserve.kv.actions import PeerRank, PostParcel, ReceiveOrder, Report, ReportReceived, ReportSent, Scatter, SendOrder
from pdserve.kv.pages import Bytes
from pdserve.kv.plan import HeadSlice
from pdserve.kv.proof import Proofs
from pdserve.kv.ticket import TransferKey
from pdserve.kv.wire import Item, Parcel
from pdserve.types import CloseReason, RunDigest, TransferRecord, TransferSide

KEY = TransferKey("t", 1)
NEXT_ATTEMPT = TransferKey("t", 2)
PEER = PeerRank("other", "x", 0)
NUM_BLOCKS = 8
TOKENS = 16
PROMPT = Prompt(M3_SMALL, 3, TOKENS)
OURS = ((5, 0, 2, 3), (7, 1))
"""block tables: four blocks of the first group, two of the second"""
THEIRS = ((1, 6, 4, 0), (2, 3))

TP_PAIRS = list(product((1, 2, 4, 8), repeat=2))


class Side:
    """One rank's memory and its digests."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.memory = RankMemory(M3_SMALL, M3_SMALL.geometry(size, rank, padding=size), NUM_BLOCKS)
        self.proofs = Proofs(self.memory.geometry, self.memory.pages)

    def begin_send(self, key: TransferKey = KEY, *, proof: bool = True) -> None:
        self.proofs.open(SendOrder(key, "r", "other", "x", PROMPT.digest, TOKENS, 10.0, proof))

    def begin_receive(self, key: TransferKey = KEY, *, proof: bool = True) -> None:
        self.proofs.open(ReceiveOrder(key, "r", "other", "x", PROMPT.digest, TOKENS, 0, THEIRS, 10.0, proof))

    def end_send(self, key: TransferKey = KEY) -> tuple[RunDigest, ...]:
        return self.proofs.complete(ReportSent("r", record(TransferSide.SEND, key))).record.digests

    def end_receive(self, key: TransferKey = KEY, *, landed: bool = True) -> tuple[RunDigest, ...]:
        return self.proofs.complete(ReportReceived("r", landed, record(TransferSide.RECEIVE, key))).record.digests


def record(side: TransferSide, key: TransferKey = KEY) -> TransferRecord:
    return TransferRecord(*key, side, "worker", "i", CloseReason.LANDED, bytes_moved=7)


def items_of(slices: tuple[HeadSlice, ...], blocks: tuple[int, int] | None = None) -> tuple[Item, ...]:
    """Return all of the prompt's blocks of each slice's layer, or a range of them."""
    return tuple(Item(piece.layer, *(blocks or (0, len(OURS[M3_SMALL.shapes[piece.layer].group])))) for piece in slices)


def post(slices: tuple[HeadSlice, ...], *, key: TransferKey = KEY, blocks: tuple[int, int] | None = None, number: int = 1) -> PostParcel:
    return PostParcel(PEER, key, number, 0, items_of(slices, blocks), slices, OURS, num_bytes(slices, items_of(slices, blocks)))


def num_bytes(slices: tuple[HeadSlice, ...], items: tuple[Item, ...]) -> int:
    layers = M3_SMALL.geometry(1, 0).layers
    return sum(
        (item.end_block - item.first_block) * piece.num_heads * layers[item.layer].run_bytes
        for item, piece in zip(items, slices, strict=True)
    )


def scatter_of(posted: PostParcel, pages: Bytes) -> Scatter:
    parcel = Parcel(*posted.key, posted.pass_number, 0, len(pages), xxhash.xxh3_64_intdigest(pages.data), posted.items)
    return Scatter(PEER, posted.key, parcel, posted.slices, THEIRS)


def carry(producer: Side, consumer: Side, posted: PostParcel) -> None:
    """Move one parcel and tell both sides' digests about it, in the order in which ranks do."""
    pages: Bytes = np.zeros(posted.num_bytes, dtype=np.uint8)
    producer.memory.pages.gather(posted.items, posted.slices, posted.block_ids, pages)
    producer.proofs.gathered(posted)
    scatter = scatter_of(posted, pages)
    consumer.memory.pages.scatter(posted.items, posted.slices, THEIRS, pages)
    consumer.proofs.scattered(scatter)


ALL = M3_SMALL.plan(1, 1).slices[0, 0]
FIRST = ALL[:1]


def by_run(digests: tuple[RunDigest, ...]) -> dict[tuple[str, int, int], str]:
    """Return digests by what they are of, whichever rank found them; every rank must have found the same."""
    found: dict[tuple[str, int, int], str] = {}
    for row in digests:
        assert found.setdefault((row.layer, row.head, row.block), row.xxh3) == row.xxh3
    return found


def truth() -> dict[tuple[str, int, int], str]:
    """Return the digest of every run of the prompt, from its bytes and not from anyone's blocks."""
    whole = M3_SMALL.geometry(1, 0).layers
    return {
        (layer.name, head, block): xxhash.xxh3_64_hexdigest(run.tobytes())
        for index, layer in enumerate(whole)
        for block, runs in enumerate(PROMPT.blocks(index, range(layer.total_heads), 0))
        for head, run in enumerate(runs)
    }


@pytest.mark.parametrize(("producers", "consumers"), TP_PAIRS)
def test_both_sides_name_and_hash_the_same_runs(producers: int, consumers: int) -> None:
    """Whatever the sizes: heads by their number over all ranks, blocks by position, layers by name; every run of the prompt on both sides."""
    plan = M3_SMALL.plan(producers, consumers)
    senders = [Side(producers, rank) for rank in range(producers)]
    receivers = [Side(consumers, rank) for rank in range(consumers)]
    for sender in senders:
        sender.memory.write(PROMPT, OURS, 0, TOKENS)
        sender.begin_send()
    for receiver in receivers:
        receiver.begin_receive()
    for (producer, consumer), slices in plan.slices.items():
        carry(senders[producer], receivers[consumer], post(slices))
    sent = [sender.end_send() for sender in senders]
    received = [receiver.end_receive() for receiver in receivers]
    assert by_run(sum(sent, ())) == by_run(sum(received, ())) == truth()
    for side in (sent, received):
        assert all({row.rank for row in rows} <= {rank} for rank, rows in enumerate(side))
    assert [bool(rows) for rows in sent] == [bool(plan.consumers_of(rank)) for rank in range(producers)]


def test_producer_hashes_at_the_gather() -> None:
    """What happens to its blocks later is not what it sent."""
    side = Side()
    side.memory.write(PROMPT, OURS, 0, TOKENS)
    side.begin_send()
    side.proofs.gathered(post(ALL))
    side.memory.scribble(OURS)
    assert by_run(side.end_send()) == truth()


def test_consumer_hashes_its_own_blocks_when_all_has_landed() -> None:
    """A block that is spoilt between scatter and report shows, alone; the parcel that came was right."""
    producer, consumer = Side(), Side()
    producer.memory.write(PROMPT, OURS, 0, TOKENS)
    consumer.begin_receive()
    carry(producer, consumer, post(ALL))
    consumer.memory.views[1][THEIRS[0][2], 3, 0] ^= 1
    got = by_run(consumer.end_receive())
    assert {run for run, digest in truth().items() if got[run] != digest} == {("layers.1.attn", 3, 2)}


def test_parcels_of_one_transfer_add_up() -> None:
    """Pieces by block range, in any order; the digests list each run once."""
    producer, consumer = Side(), Side()
    producer.memory.write(PROMPT, OURS, 0, TOKENS)
    producer.begin_send()
    consumer.begin_receive()
    for blocks in ((2, 4), (0, 2)):
        carry(producer, consumer, post(FIRST, blocks=blocks))
    wanted = {(layer, head, block) for layer, head, block in truth() if layer == "layers.0.attn"}
    for digests in (producer.end_send(), consumer.end_receive()):
        assert {(row.layer, row.head, row.block) for row in digests} == wanted
        assert len(digests) == len(wanted)


def test_later_pass_replaces_what_the_first_one_sent() -> None:
    """A preempted prefill computes again, perhaps to other bytes: its digests are of what decode keeps."""
    producer, consumer = Side(), Side()
    producer.begin_send()
    consumer.begin_receive()
    producer.memory.write(PROMPT, OURS, 0, TOKENS, version=1)
    carry(producer, consumer, post(ALL, blocks=(0, 2)))
    producer.memory.write(PROMPT, OURS, 0, TOKENS)
    carry(producer, consumer, post(ALL, number=2))
    sent, received = producer.end_send(), consumer.end_receive()
    assert by_run(sent) == by_run(received) == truth()
    assert len(sent) == len(received) == len(truth())


@pytest.mark.parametrize("landed", [True, False])
def test_transfer_that_did_not_ask_for_proof_has_none(landed: bool) -> None:
    """Nothing is hashed, and the report goes on as it came."""
    producer, consumer = Side(), Side()
    producer.begin_send(proof=False)
    consumer.begin_receive(proof=False)
    carry(producer, consumer, post(ALL))
    reports: list[Report] = [ReportSent("r", record(TransferSide.SEND)), ReportReceived("r", landed, record(TransferSide.RECEIVE))]
    for side, report in zip((producer, consumer), reports, strict=True):
        assert side.proofs.complete(report) is report


def test_transfer_that_did_not_land_proves_nothing() -> None:
    """Its blocks may be anybody's by now, so they are not read."""
    producer, consumer = Side(), Side()
    consumer.begin_receive()
    carry(producer, consumer, post(ALL))
    assert consumer.end_receive(landed=False) == ()


def test_proof_adds_to_the_report_and_changes_nothing_else() -> None:
    """Same request, same outcome, same counts."""
    side = Side()
    side.begin_send()
    side.proofs.gathered(post(FIRST))
    report = ReportSent("r", record(TransferSide.SEND))
    proven = side.proofs.complete(report)
    assert isinstance(proven, ReportSent)
    assert proven._replace(record=replace(proven.record, digests=())) == report
    assert len(proven.record.digests) == 16


def test_attempts_are_kept_apart() -> None:
    """A parcel of the old attempt adds nothing to the new one's proof, on either side."""
    producer, consumer = Side(), Side()
    producer.begin_send(NEXT_ATTEMPT)
    consumer.begin_receive(NEXT_ATTEMPT)
    carry(producer, consumer, post(ALL))
    assert (producer.end_send(NEXT_ATTEMPT), consumer.end_receive(NEXT_ATTEMPT)) == ((), ())


def test_nothing_is_kept_of_a_transfer_that_was_reported() -> None:
    """What comes later is not collected, and a second report finds nothing."""
    producer, consumer = Side(), Side()
    producer.begin_send()
    consumer.begin_receive()
    carry(producer, consumer, post(ALL))
    assert producer.end_send()
    assert consumer.end_receive()
    carry(producer, consumer, post(ALL))
    assert (producer.end_send(), consumer.end_receive()) == ((), ())


def test_both_sides_of_one_ticket_in_one_rank_do_not_mix() -> None:
    """A worker may hand over to itself under test: the receiving half has its own blocks' digests."""
    side = Side()
    side.memory.write(PROMPT, OURS, 0, TOKENS)
    side.begin_send()
    side.begin_receive()
    assert side.end_receive() == ()
    side.proofs.gathered(post(ALL))
    assert by_run(side.end_send()) == truth()
