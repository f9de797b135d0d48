"""Who a rank may exchange KV with: which links exist, who dials, and what a newer table or a peer's word changes."""

import pytest
from shapes import M3_SMALL, Model, Shape

from pdserve.errors import ProtocolMismatch
from pdserve.kv.actions import PeerRank
from pdserve.kv.geometry import Sharding
from pdserve.kv.peers import Handshake, PeerAddress, PeerTable
from pdserve.kv.plan import PairPlan
from pdserve.kv.wire import Hello, Identity
from pdserve.types import CloseReason

US, THEM = "worker-b", "worker-c"


def identity(model: Model, size: int, rank: int, **changes: object) -> Identity:
    values: dict[str, object] = {
        "vllm_version": "0.32.0",
        "weights_digest": "w",
        "config_digest": "c",
        "geometry": model.geometry(size, rank),
        "arenas": {},
        "slot_bytes": 4096,
    }
    return Identity(**(values | changes))  # type: ignore[arg-type]


def table(size: int = 1, rank: int = 0, model: Model = M3_SMALL) -> PeerTable:
    return PeerTable(US, model.geometry(size, rank), identity(model, size, rank))


def ranks(worker: str, incarnation: str, size: int) -> list[PeerAddress]:
    return [PeerAddress(PeerRank(worker, incarnation, rank), "127.0.0.1", 9000 + rank, size) for rank in range(size)]


def connect(peers: PeerTable, *who: PeerRank) -> None:
    for peer in who:
        peers.set_connected(peer, connected=True)


@pytest.mark.parametrize(
    ("ours", "rank", "theirs", "wanted"),
    [(1, 0, 1, [0]), (1, 0, 4, [0, 1, 2, 3]), (4, 2, 1, [0]), (2, 1, 4, [2, 3]), (4, 1, 8, [2, 3]), (8, 3, 4, [1]), (8, 5, 8, [5])],
)
def test_links_join_ranks_that_have_something_to_send(ours: int, rank: int, theirs: int, wanted: list[int]) -> None:
    """In either direction; no rank dials one that it shares no head with."""
    dial, gone = table(ours, rank).replace(1, ranks(THEM, "x", theirs))
    assert ([entry.peer.rank for entry in dial], gone) == (wanted, [])


def test_one_of_two_workers_dials() -> None:
    """The one whose id sorts first, so that there is one link and not two."""
    peers = table()
    dial, _ = peers.replace(1, [*ranks("worker-a", "x", 1), *ranks(US, "me", 1), *ranks(THEM, "y", 1)])
    assert [entry.peer.worker for entry in dial] == [THEM]
    assert peers.is_wanted(PeerRank("worker-a", "x", 0))
    assert not peers.is_wanted(PeerRank(US, "me", 0))


def test_stale_table_changes_nothing() -> None:
    """Versions only grow; the same one again is old news."""
    peers = table()
    peers.replace(2, ranks(THEM, "x", 1))
    for version in (1, 2):
        assert peers.replace(version, []) == ([], [])
    assert peers.is_wanted(PeerRank(THEM, "x", 0))


def test_replaced_incarnation_is_another_peer() -> None:
    """Same worker, same address: the old link closes, a new one is dialled, and old plans are gone."""
    peers = table()
    old, new = PeerRank(THEM, "x", 0), PeerRank(THEM, "y", 0)
    peers.replace(1, ranks(THEM, "x", 1))
    connect(peers, old)
    assert isinstance(peers.sending_plan(THEM, "x"), PairPlan)
    dial, gone = peers.replace(2, ranks(THEM, "y", 1))
    assert ([entry.peer for entry in dial], gone) == ([new], [old])
    assert peers.sending_plan(THEM, "x") is CloseReason.PEER_UNKNOWN
    assert peers.sending_plan(THEM, "y") is CloseReason.PEER_UNKNOWN
    connect(peers, new)
    assert isinstance(peers.sending_plan(THEM, "y"), PairPlan)
    assert peers.handshakes() == (Handshake(new, "connected", ""),)


def test_unchanged_peer_keeps_its_link() -> None:
    """A new table that names it again neither dials nor closes."""
    peers = table()
    peers.replace(1, ranks(THEM, "x", 1))
    connect(peers, PeerRank(THEM, "x", 0))
    dial, gone = peers.replace(2, [*ranks(THEM, "x", 1), *ranks("worker-d", "z", 1)])
    assert ([entry.peer.worker for entry in dial], gone) == (["worker-d"], [])
    assert isinstance(peers.sending_plan(THEM, "x"), PairPlan)


def test_plan_is_there_while_every_link_that_it_needs_is_up() -> None:
    """A rank that must hear from two waits for both, in each direction, and forgets the plan when one is lost."""
    peers = table(1, 0)
    peers.replace(1, ranks(THEM, "x", 2))
    first, second = PeerRank(THEM, "x", 0), PeerRank(THEM, "x", 1)
    for up, is_there in (((), False), ((first,), False), ((second,), True)):
        connect(peers, *up)
        assert isinstance(peers.sending_plan(THEM, "x"), PairPlan) is is_there
        assert isinstance(peers.receiving_plan(THEM, "x"), PairPlan) is is_there
    peers.set_connected(first, connected=False)
    assert peers.receiving_plan(THEM, "x") is CloseReason.PEER_UNKNOWN
    assert peers.connected_ranks(THEM, "x") == [second]
    assert peers.connected_ranks(THEM, "y") == []
    assert [(shake.peer, shake.state) for shake in peers.handshakes()] == [(first, "connecting"), (second, "connected")]


def test_worker_that_cannot_be_paired_is_refused_with_both_sizes() -> None:
    """At the table, not at the first request; it goes from the list with the worker."""
    peers = table(2, 0, Model((Shape("layers.0.attn", 0, 4, 1, Sharding.SPLIT),), heads=6))
    assert peers.replace(1, ranks(THEM, "x", 4)) == ([], [])
    shakes = peers.handshakes()
    assert {shake.state for shake in shakes} == {"refused"}
    assert [shake.peer.rank for shake in shakes] == [0, 1, 2, 3]
    assert shakes[0].reason == "layers.0.attn: tensor parallel sizes differs: ours 2, peer's 4"
    assert peers.sending_plan(THEM, "x") is peers.receiving_plan(THEM, "x") is CloseReason.REFUSED
    peers.replace(2, [])
    assert peers.handshakes() == ()
    assert peers.sending_plan(THEM, "x") is CloseReason.PEER_UNKNOWN


@pytest.mark.parametrize("turned_away", [0, 1])
def test_peer_that_was_turned_away_is_told_from_one_that_is_not_here(turned_away: int) -> None:
    """Any of its ranks refused means that nothing will move until somebody acts; a link that is not up yet means wait."""
    peers = table(1, 0)
    peers.replace(1, ranks(THEM, "x", 2))
    assert peers.sending_plan(THEM, "x") is CloseReason.PEER_UNKNOWN
    connect(peers, PeerRank(THEM, "x", 1 - turned_away))
    peers.set_state(PeerRank(THEM, "x", turned_away), "refused", "weights_digest differs")
    assert peers.sending_plan(THEM, "x") is peers.receiving_plan(THEM, "x") is CloseReason.REFUSED
    connect(peers, PeerRank(THEM, "x", turned_away))
    assert isinstance(peers.sending_plan(THEM, "x"), PairPlan)


@pytest.mark.parametrize(
    "hello",
    [Hello(1, THEM, "old", 0, b""), Hello(1, "worker-x", "x", 0, b""), Hello(1, THEM, "x", 1, b""), Hello(1, US, "me", 0, b"")],
    ids=["old incarnation", "unknown worker", "unknown rank", "ourselves"],
)
def test_peer_that_the_table_does_not_name_is_refused(hello: Hello) -> None:
    """With the incarnations that it does name."""
    peers = table()
    peers.replace(1, ranks(THEM, "x", 1))
    with pytest.raises(ProtocolMismatch) as refusal:
        peers.admit(hello)
    assert refusal.value.field == f"peer {hello.worker} rank {hello.rank}"


def test_peer_of_the_table_is_admitted() -> None:
    """By worker, incarnation and rank."""
    peers = table()
    peers.replace(1, ranks(THEM, "x", 1))
    assert peers.admit(Hello(1, THEM, "x", 0, b"")) == PeerRank(THEM, "x", 0)


@pytest.mark.parametrize(
    ("field", "value"), [("vllm_version", "0.33.0"), ("weights_digest", "other"), ("config_digest", "other"), ("slot_bytes", 8192)]
)
def test_identity_that_differs_is_refused_with_both_values(field: str, value: object) -> None:
    """Everything that shapes KV or how it crosses."""
    peers = table()
    with pytest.raises(ProtocolMismatch) as refusal:
        peers.judge(identity(M3_SMALL, 1, 0, **{field: value}))
    assert refusal.value.args == (field, getattr(identity(M3_SMALL, 1, 0), field), value)


def test_identity_of_another_size_is_welcome() -> None:
    """Ranks and strides are each side's own business; so is where its slots are."""
    table().judge(identity(M3_SMALL, 4, 3, arenas={"shm": "there"}, geometry=M3_SMALL.geometry(4, 3, padding=7)))


def test_layers_that_differ_are_refused_by_name() -> None:
    """The layer, the field and both values."""
    other = Model((*M3_SMALL.shapes[:-1], M3_SMALL.shapes[-1]._replace(block_tokens=16)), heads=4)
    with pytest.raises(ProtocolMismatch) as refusal:
        table().judge(identity(other, 1, 0))
    assert refusal.value.args == ("layers.2.attn: block_tokens", 8, 16)
