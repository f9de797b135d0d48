"""Named situations between the two ledgers, each the smallest of its kind."""

import pytest
from deployment import Setup
from network import Delivery
from scene import Scene
from shapes import M3_SMALL, Model, Shape

from pdserve.kv.actions import ReceiveOrder, ReportReceived, SendFrame
from pdserve.kv.geometry import Sharding
from pdserve.kv.send_transfer import SendState
from pdserve.kv.wire import Ack, Close, Grant, Offer, Seal
from pdserve.types import CloseReason, TransferSide

SEND, RECEIVE = TransferSide.SEND, TransferSide.RECEIVE
BLOCK = M3_SMALL.block_tokens[0]


def scene(prefill_ranks: int = 1, decode_ranks: int = 1, **more: object) -> Scene:
    """Return a deployment; leases and deadlines are far away unless given."""
    return Scene(Setup(prefill_ranks, decode_ranks, **({"num_slots": 2 * prefill_ranks} | more)))  # type: ignore[arg-type]


# ---- lengths, prefixes and groups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 6 * BLOCK])
@pytest.mark.parametrize("pair", [(1, 1), (4, 2), (2, 8)], ids=str)
def test_prompt_of_any_length_lands(pair: tuple[int, int], tokens: int) -> None:
    """Also shorter than a block, and a whole number of blocks."""
    stage = scene(*pair)
    key = stage.request(tokens)
    stage.serve(key, 3, 3)
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("size", [16, 128, 256])
@pytest.mark.parametrize("pair", [(1, 1), (2, 4)], ids=str)
def test_prompt_lands_whatever_the_size_of_a_block(pair: tuple[int, int], size: int) -> None:
    """One token, a token less and more than a block, a whole block, two of them: each ends well though the first moves but a part of a block."""
    model = Model((Shape("layers.0.attn", 0, size, 2, Sharding.SPLIT), Shape("layers.0.index", 0, size, 1, Sharding.REPLICATED)), heads=4)
    stage = Scene(Setup(*pair, num_slots=4, slot_bytes=4096), model)
    for tokens in (1, size - 1, size, size + 1, 2 * size):
        key = stage.request(tokens)
        stage.reserve_for(key)
        for chunk in (size // 2, tokens):
            stage.chunk(key, chunk, hooks=(0,))
            stage.settle()
        assert stage.has_landed(key), tokens
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("pair", [(1, 4), (4, 1), (8, 2), (2, 8)], ids=str)
def test_ranks_beyond_the_heads_hold_copies(pair: tuple[int, int], heads: int) -> None:
    """Split and replicated layers in one model, more ranks than heads on either side: each decode rank has exactly its heads' bytes."""
    stage = Scene(Setup(*pair, num_slots=4), M3_SMALL._replace(heads=heads))
    key = stage.request(21)
    stage.serve(key, 7, 7)
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 7])
@pytest.mark.parametrize("cached", [0, 8, 16])
@pytest.mark.parametrize("first_token", [0, 8, 16])
def test_prefix_hits_on_either_side_pair_by_token(first_token: int, cached: int, lookahead: int) -> None:
    """Only what decode misses moves, whatever prefill had cached and however many blocks decode holds beyond the prompt."""
    stage = scene(2, 1)
    key = stage.request(17, first_token=first_token, lookahead=lookahead)
    stage.reserve_for(key)
    stage.chunk(key, cached=cached)
    stage.settle()
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


def test_prompt_that_decode_holds_is_declined() -> None:
    """With nothing to move the producer still hears so, and frees its blocks without an acknowledgement."""
    stage = scene(2, 2)
    key = stage.request(8)
    stage.end_decode(key, CloseReason.NOTHING_TO_MOVE)
    stage.settle()
    assert stage.outcomes_of(SEND) == {CloseReason.NOTHING_TO_MOVE: 2}
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("delay", [1, 2, 100])
def test_completion_long_after_an_abort_is_dropped_and_counted(pair: tuple[int, int], delay: int) -> None:
    """Everything that was under way to decode when its request was aborted arrives so many steps later; other requests are served meanwhile."""
    stage = scene(*pair, num_slots=8)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.chunk(key)
    while stage.call(0) or stage.write(0) or any(link.lanes[1].wire and stage.deliver(0) for link in stage.links.values()):
        if all(link.lanes[0].wire for link in stage.links.values()):
            break
    held = [(link.lanes[0], list(link.lanes[0].wire)) for link in stage.links.values()]
    for lane, _ in held:
        lane.wire.clear()
    stage.end_decode(key)
    steps = 0
    while steps < delay:
        other = stage.request(9)
        for _ in stage.life(other):
            steps += 1
        assert stage.has_landed(other)
    for lane, deliveries in held:
        lane.wire.extend(deliveries)
    stage.drain()
    assert not stage.has_landed(key)
    assert sum(stage.consumer(rank).ledger.dropped.total() for rank in range(pair[1])) > 0
    stage.finish(is_reliable=True)


def test_decline_before_and_after_the_prefill_began() -> None:
    """The decline finds its transfer whether it is early or late."""
    for is_early in (True, False):
        stage = scene(2, 4)
        key = stage.request(9)
        if not is_early:
            stage.chunk(key, 4)
            stage.drain()
        stage.end_decode(key, CloseReason.NOTHING_TO_MOVE)
        stage.drain()
        stage.settle()
        assert stage.outcomes_of(SEND) == {CloseReason.NOTHING_TO_MOVE: 2}
        stage.finish(is_reliable=True)


def test_groups_with_block_sizes_of_their_own_land() -> None:
    """Blocks of 4, 64 and 256 tokens and layers of any width share a model; each layer goes by its own."""
    shapes = [Shape(f"layers.{n}.attn", 0, 4, 3, Sharding.SPLIT) for n in range(24)]
    shapes += [Shape("layers.24.latent", 1, 64, 5, Sharding.REPLICATED), Shape("layers.25.state", 2, 256, 1, Sharding.SPLIT)]
    stage = Scene(Setup(2, 4, num_slots=4, slot_bytes=4096, num_blocks=128), Model(tuple(shapes), heads=4))
    key = stage.request(300)
    stage.serve(key, 100, 100)
    assert stage.has_landed(key)
    assert not {CloseReason.EXPIRED} & set(stage.outcomes_of(SEND))
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", [(1, 1), (2, 4)], ids=str)
def test_seal_covers_every_layer_that_writes_whoever_tells_of_it(pair: tuple[int, int]) -> None:
    """24 layers, three chunks, hooks that fire for all, for some and for none: the sweep covers the rest, and no clock is needed."""
    shapes = [Shape(f"layers.{n}.attn", 0, 4, 2, Sharding.SPLIT) for n in range(24)]
    stage = Scene(Setup(*pair, num_slots=4), Model(tuple(shapes), heads=4))
    key = stage.request(24)
    stage.reserve_for(key)
    for hooks in (range(24), range(0, 24, 5), ()):
        stage.chunk(key, 8, hooks=hooks)
        stage.drain()
    stage.finish_prefill(key)
    stage.drain()
    assert stage.outcomes_of(SEND) == {CloseReason.RELEASED: pair[0]}
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


def test_torn_parcel_costs_its_own_request_only() -> None:
    """Two transfers under way, equal block numbers in two groups: the one that was hit fails at once, the other lands."""
    stage = scene(num_slots=4)
    hit, spared = stage.request(8), stage.request(8)
    for key in (hit, spared):
        stage.reserve_for(key)
        stage.chunk(key)
    while not stage.tear(0):
        assert stage.call(0) or stage.write(0) or stage.deliver(0)
    stage.settle()
    assert (stage.has_landed(hit), stage.has_landed(spared)) == (False, True)
    assert stage.outcomes_of(RECEIVE) == {CloseReason.DIGEST_MISMATCH: 1, CloseReason.LANDED: 1}
    assert stage.outcomes_of(SEND) == {CloseReason.DIGEST_MISMATCH: 1, CloseReason.RELEASED: 1}
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_different_prompts_never_mix(pair: tuple[int, int]) -> None:
    """If the two legs carry different prompts, both sides say so and nothing moves."""
    stage = scene(*pair)
    key = stage.request(9, decode_seed=77)
    stage.serve(key, 4)
    assert set(stage.outcomes_of(SEND)) == set(stage.outcomes_of(RECEIVE)) == {CloseReason.PROMPT_MISMATCH}
    stage.finish(is_reliable=True)


@pytest.mark.parametrize(("first_token", "end_token"), [(-4, 9), (-1, 9), (9, 9), (1 << 40, 9), (0, 8), (0, 10)])
def test_offer_outside_the_prompt_is_refused(first_token: int, end_token: int) -> None:
    """A token range that is not of this prompt closes the transfer instead of naming blocks that do not exist."""
    stage = scene()
    key = stage.request(9)
    leg = stage.decode_leg(key)
    assert leg is not None
    stage.chunk(key)
    stage.drain()
    offer = Offer(*key, leg.prompt.digest, first_token, end_token, (0,))
    actions = stage.producer().ledger.on_message(stage.consumer().me, offer, 0.0)
    assert actions == [SendFrame(stage.consumer().me, Close(*key, "send", "prompt_mismatch"))]


# ---- order ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [(1, 1), (4, 2), (2, 4)], ids=str)
def test_offer_waits_for_its_prefill(pair: tuple[int, int]) -> None:
    """Offers that are there long before the prefill are parked and used when it opens."""
    stage = scene(*pair)
    key = stage.request(9)
    stage.reserve_for(key)
    stage.drain()
    stage.tick(50.0)
    stage.drain()
    stage.chunk(key, 4)
    stage.settle()
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", [(1, 1), (4, 2), (2, 4)], ids=str)
def test_prefill_that_is_done_waits_for_decode(pair: tuple[int, int]) -> None:
    """A sealed transfer keeps its blocks until decode has room and takes them."""
    stage = scene(*pair)
    key = stage.request(9)
    stage.chunk(key)
    stage.drain()
    stage.finish_prefill(key)
    stage.tick(50.0)
    stage.drain()
    stage.settle()
    assert stage.has_landed(key)
    stage.finish(is_reliable=True)


def test_cleanup_of_an_attempt_leaves_the_next_alone() -> None:
    """Every message of attempt 1 may come after attempt 2 has begun; attempt 2 lands."""
    stage = scene()
    first = stage.request(9)
    stage.reserve_for(first)
    stage.chunk(first, 4)
    for _ in range(4):
        stage.call(0)
    to_prefill = [Close(*first, "receive", "aborted"), Ack(*first, 1), Grant(*first, 0)]
    to_decode = [Seal(*first, 1, 0, b"", 0), Close(*first, "send", "aborted")]
    stage.end_decode(first)
    stage.settle()
    second = stage.request(9, attempt_of=first)
    (link,) = stage.links.values()
    for _ in stage.life(second, 4):
        for lane, late in zip(link.lanes, (to_decode, to_prefill), strict=True):
            if late:
                lane.wire.append(Delivery(late.pop()))
    stage.settle()
    assert stage.has_landed(second)
    stage.finish(is_reliable=True)


def test_ticket_used_again_is_answered_at_once() -> None:
    """A key that is over opens nothing: the request hears that it failed, and computes its own KV."""
    stage = scene()
    key = stage.request(9)
    stage.serve(key)
    assert stage.has_landed(key)
    order = ReceiveOrder(key, "again", "prefill-0", stage.incarnation("prefill-0"), b"", 9, 0, ((0,), (0,)), 1.0)
    (report,) = stage.consumer().ledger.open(order, 0.0)
    assert isinstance(report, ReportReceived)
    assert (report.request_id, report.landed) == ("again", False)
    assert stage.consumer().ledger.dropped["reopened"] == 1
    assert stage.consumer().ledger.on_seal(stage.producer().me, Seal(*key, 2, 1, b"", 0), 0.0) == (
        SendFrame(stage.producer().me, Ack(*key, 2)),
    )
    stage.finish(is_reliable=True)


def test_bytes_that_were_posted_but_not_read_did_not_leave_before_the_forward_ended() -> None:
    """A parcel that waits for its link when the prompt is sealed is sent after the forward, whenever it was posted."""
    stage = scene(slot_bytes=64)
    key = stage.request(16)
    stage.reserve_for(key)
    stage.drain()
    stage.chunk(key, 8, hooks=range(4))
    stage.chunk(key)
    while stage.call(0):
        pass
    sent = stage.producer().ledger._live[key]
    assert sent.num_bytes > 0
    assert (sent.state, sent.gathered_bytes, sent.bytes_before_forward_end) == (SendState.SEALED, 0, 0)
    stage.drain()
    stage.finish(is_reliable=True)


def test_record_tells_what_left_before_the_forward_ended() -> None:
    """Blocks that a chunk completed are on their way when its layers are written; only the rest waits for the seal."""
    stage = scene(slot_bytes=64)
    key = stage.request(16)
    stage.reserve_for(key)
    stage.chunk(key, 8, hooks=range(4))
    stage.drain()
    sent = stage.producer().ledger._live[key]
    token_bytes = sum(shape.token_bytes * (M3_SMALL.heads if shape.sharding is Sharding.SPLIT else 1) for shape in M3_SMALL.shapes)
    assert sent.num_bytes == 8 * token_bytes
    stage.chunk(key)
    stage.drain()
    assert (sent.bytes_before_forward_end, sent.num_bytes) == (8 * token_bytes, 16 * token_bytes)
    stage.finish(is_reliable=True)
