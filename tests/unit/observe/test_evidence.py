"""What digests and records prove of a transfer, and what they do not."""

import pytest
from receipt_facts import receive_record, run, send_record

from pdserve.observe.evidence import LayerEvidence, compare_layers, is_moved_whole, missing_proof
from pdserve.types import CloseReason, RunDigest, TransferRecord

A, B = "a" * 16, "b" * 16
TWO_LAYERS = (run(A), run(B, block=1), run(B, layer="layer.1"))


def compare(sent: tuple[RunDigest, ...], received: tuple[RunDigest, ...]) -> LayerEvidence:
    """Compare two digest lists."""
    return compare_layers(send_record(digests=sent), receive_record(digests=received))


def test_equal_lists_prove_every_layer() -> None:
    """The order in which runs were hashed does not matter."""
    assert compare(TWO_LAYERS, TWO_LAYERS[::-1]) == LayerEvidence(2, 2, ())


def test_no_digests_prove_nothing() -> None:
    """Zero of zero layers is not a proof that a reader could take for one."""
    assert compare((), ()) == LayerEvidence(0, 0, ())


@pytest.mark.parametrize(
    ("received", "different"),
    [
        ((run(A), run(A, block=1), run(B, layer="layer.1")), ("layer.0",)),
        ((run(A), run(B, layer="layer.1")), ("layer.0",)),
        ((run(A), run(B, block=1)), ("layer.1",)),
        ((*TWO_LAYERS, run(A, block=2)), ("layer.0",)),
        ((*TWO_LAYERS, run(A, layer="layer.2")), ("layer.2",)),
        ((run(A, head=1), run(B, block=1), run(B, layer="layer.1")), ("layer.0",)),
        ((), ("layer.0", "layer.1")),
        ((run(B), run(A, block=1), run(A, layer="layer.1")), ("layer.0", "layer.1")),
    ],
    ids=["differs", "run missing", "layer missing", "run from nowhere", "layer from nowhere", "other head", "none received", "swapped"],
)
def test_a_layer_with_one_bad_run_is_different(received: tuple[RunDigest, ...], different: tuple[str, ...]) -> None:
    """Every other layer still counts as equal, and bad ones are named."""
    evidence = compare(TWO_LAYERS, received)
    assert evidence.different == different
    assert evidence.layers_equal == evidence.layers_total - len(different)
    assert evidence.layers_total == len({row.layer for row in (*TWO_LAYERS, *received)})


def test_nothing_sent_proves_no_received_layer() -> None:
    """A producer without digests cannot vouch for the consumer's."""
    assert compare((), (run(A),)) == LayerEvidence(0, 1, ("layer.0",))


def test_each_rank_has_what_some_producer_rank_read() -> None:
    """A replicated head is hashed by every rank that holds it. Producers may differ by rounding; a consumer has the one's or the other's."""
    both_a = (run(A, rank=0), run(A, rank=1))
    rounded = (run(A, rank=0), run(B, rank=1))
    assert compare(both_a, both_a) == LayerEvidence(1, 1, ())
    assert compare(both_a, (run(A, rank=5),)) == LayerEvidence(1, 1, ())
    assert compare(rounded, (run(A),)) == LayerEvidence(1, 1, ())
    assert compare(rounded, rounded) == LayerEvidence(1, 1, ())
    assert compare((run(A),), rounded).different == ("layer.0",)
    assert compare(rounded, (run(A, rank=0), run("c" * 16, rank=1))).different == ("layer.0",)


def test_run_missing_on_one_of_several_ranks_makes_its_layer_different() -> None:
    """A replicated run that one rank never got is not made good by the rank beside it."""
    both = (run(A, rank=0), run(A, rank=1), run(B, rank=0, layer="index"), run(B, rank=1, layer="index"))
    assert compare(both, both) == LayerEvidence(2, 2, ())
    assert compare(both, both[:3]) == LayerEvidence(1, 2, ("index",))
    assert compare(both, (*both, run(A, rank=2))) == LayerEvidence(1, 2, ("index",))


def test_records_of_a_whole_transfer_prove_it() -> None:
    """All tokens moved, all layers sealed, all acks in, both ends good."""
    assert is_moved_whole(send_record(), receive_record())


@pytest.mark.parametrize(
    ("send", "receive", "missing"),
    [
        (send_record(), receive_record(CloseReason.PEER_LOST), "peer_lost"),
        (send_record(CloseReason.ABORTED), receive_record(), "sender: aborted"),
        (send_record(), receive_record(tokens_moved=39), "39 of 40 tokens moved, of 40 prefilled"),
        (send_record(prompt_tokens=41), receive_record(), "40 of 40 tokens moved, of 41 prefilled"),
        (send_record(), receive_record(layers_sealed=29), "29 of 30 layers sealed"),
        (send_record(acks=1), receive_record(), "1 of 2 acknowledgements"),
        (send_record(prompt_tokens=0), receive_record(prompt_tokens=0, tokens_moved=0), "0 of 0 tokens moved, of 0 prefilled"),
    ],
    ids=["not landed", "not released", "a token short", "prompts differ", "a layer short", "an ack short", "nothing moved"],
)
def test_one_missing_piece_is_no_whole_transfer(send: TransferRecord, receive: TransferRecord, missing: str) -> None:
    """Records of nothing prove nothing either, and what is missing is said."""
    assert not is_moved_whole(send, receive)
    assert missing_proof(send, receive) == missing
