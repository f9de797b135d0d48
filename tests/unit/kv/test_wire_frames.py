"""The bytes on a link: their exact form per version, and that nothing forged, changed, repeated, moved or oversized is taken."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import TransferError
from pdserve.kv.geometry import Geometry, LayerGeometry, Sharding
from pdserve.kv.ticket import MAX_ID_CHARS, TransferKey
from pdserve.kv.wire import (
    DIGEST_BYTES,
    HEADER_BYTES,
    LENGTH_BYTES,
    MAX_BODY_BYTES,
    MAX_HELLO_BYTES,
    MAX_ITEMS,
    MAX_REASON_CHARS,
    MAX_SLOTS,
    TAG_BYTES,
    WIRE_VERSION,
    Accept,
    Ack,
    Body,
    Close,
    Grant,
    Hello,
    Identity,
    Item,
    LinkCipher,
    Offer,
    Parcel,
    Renew,
    Return,
    Seal,
    Want,
    link_keys,
    set_digest,
)

KEY = TransferKey("0123456789abcdef0123456789abcdef", 2)
KEY_HEX = "d920303132333435363738396162636465663031323334353637383961626364656602"
LAYER = LayerGeometry("layers.0.attn", 1, 16, Sharding.SPLIT, 4, 2048, "float32", "FullAttentionSpec", 2, 4096, 2048)
DIALER = Hello(2, "worker-0", "incarnation", 3, bytes(range(32)))
LISTENER = Hello(2, "worker-1", "other", 0, bytes(32))
SECRET = b"s" * 32

GOLDEN: dict[int, list[tuple[Body, str]]] = {
    2: [
        (
            DIALER,
            "96a568656c6c6f02a8776f726b65722d30ab696e6361726e6174696f6e03c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        ),
        (
            Identity("0.32.0", "weights", "config", Geometry(2, 1, (LAYER,), 2), {"shm": "here"}, 4096),
            "97a86964656e74697479a6302e33322e30a777656967687473a6636f6e66696784b474656e736f725f706172616c6c656c5f73697a6502a472616e6b01"
            "a66c6179657273918da46e616d65ad6c61796572732e302e6174746ea567726f757001ac626c6f636b5f746f6b656e7310a87368617264696e67a573706c6974"
            "ab746f74616c5f686561647304a972756e5f6279746573cd0800a56474797065a7666c6f61743332a46b696e64b146756c6c417474656e74696f6e53706563"
            "ab6c6f63616c5f686561647302b2626c6f636b5f7374726964655f6279746573cd1000b1686561645f7374726964655f6279746573cd0800"
            "a6706c616e657301b2706c616e655f7374726964655f627974657300"
            "aa6e756d5f67726f7570730281a373686da468657265cd1000",
        ),
        (Accept("no"), "92a6616363657074a26e6f"),
        (Offer(*KEY, bytes(16), 32, 100, (0, 7)), f"97a56f66666572{KEY_HEX}c410{'00' * 16}2064920007"),
        (Grant(*KEY, 7), f"94a56772616e74{KEY_HEX}07"),
        (Want(*KEY), f"93a477616e74{KEY_HEX}"),
        (Return(*KEY, (7, 0)), f"94a672657475726e{KEY_HEX}920700"),
        (
            Parcel(*KEY, 1, 7, 8192, 2**64 - 1, (Item(0, 2, 6), Item(5, 1, 2))),
            f"98a670617263656c{KEY_HEX}0107cd2000cfffffffffffffffff929300020693050102",
        ),
        (Seal(*KEY, 1, 12, bytes(16), 64), f"97a47365616c{KEY_HEX}010cc410{'00' * 16}40"),
        (Ack(*KEY, 1), f"94a361636b{KEY_HEX}01"),
        (Close(*KEY, "receive", "aborted"), f"95a5636c6f7365{KEY_HEX}a772656365697665a761626f72746564"),
        (Renew((KEY,)), f"92a572656e65779192{KEY_HEX}"),
    ]
}
"""wire version → messages and their bodies; a new version gets a list of its own"""


def pair() -> tuple[LinkCipher, LinkCipher]:
    """Return both ends of one direction."""
    key, _ = link_keys(SECRET, DIALER, LISTENER)
    return LinkCipher(key), LinkCipher(key)


def opened(cipher: LinkCipher, frame: bytes) -> Body:
    """Take a frame apart as a link does."""
    assert len(frame) == HEADER_BYTES + cipher.body_length(frame)
    return cipher.open(frame[LENGTH_BYTES:HEADER_BYTES], frame[HEADER_BYTES:])


@pytest.mark.parametrize(("message", "body"), GOLDEN[WIRE_VERSION], ids=lambda value: type(value).__name__)
def test_bytes_of_a_message_belong_to_the_version(message: Body, body: str) -> None:
    """Who changes what a message looks like must bump the version, or old peers would misread it."""
    sender, receiver = pair()
    frame = sender.seal(message)
    assert frame[HEADER_BYTES:].hex() == body
    assert opened(receiver, frame) == message


def test_every_message_has_its_bytes_on_record() -> None:
    """The list above leaves out no kind of message."""
    assert {type(message) for message, _ in GOLDEN[WIRE_VERSION]} == set(Body.__args__)


def test_keys_and_tags_belong_to_the_version() -> None:
    """Derivation of keys, tags and set digests, byte for byte."""
    to_listener, to_dialer = link_keys(SECRET, DIALER, LISTENER)
    assert to_listener.hex() == "7acd70c33db485b54451398c69d0870acb44a46466ad898a77739619da93dfd4"
    assert to_dialer.hex() == "cd8ee7c761c0a3747afab03d4aa73187ce344e8a130502562c693e78f4d77fab"
    cipher = LinkCipher(to_listener)
    assert [cipher.seal(Ack(*KEY, 1))[:HEADER_BYTES].hex() for _ in range(2)] == [
        "29000000d59f21975517e531eecae9257f1c6efd",
        "290000001ece3117fe28a6ba35101c475ccd742a",
    ]
    assert set_digest({(3, 2), (0, 1)}).hex() == "6b009c26827de212c2c206526492e927"


def test_replayed_frame_is_refused() -> None:
    """The same bytes twice on one link."""
    sender, receiver = pair()
    frame = sender.seal(Ack(*KEY, 1))
    opened(receiver, frame)
    with pytest.raises(TransferError, match="bad_tag"):
        opened(receiver, frame)


def test_reordered_frame_is_refused() -> None:
    """The second frame before the first."""
    sender, receiver = pair()
    _, second = sender.seal(Ack(*KEY, 1)), sender.seal(Ack(*KEY, 2))
    with pytest.raises(TransferError, match="bad_tag"):
        opened(receiver, second)


@pytest.mark.parametrize(
    ("secret", "dialer", "listener", "direction"),
    [
        (b"t" * 32, DIALER, LISTENER, 0),
        (SECRET, Hello(2, "worker-0", "incarnation", 3, b"n" * 32), LISTENER, 0),
        (SECRET, DIALER, Hello(2, "worker-1", "other", 1, bytes(32)), 0),
        (SECRET, LISTENER, DIALER, 0),
        (SECRET, DIALER, LISTENER, 1),
    ],
    ids=["other secret", "other nonce", "other rank", "roles swapped", "other direction"],
)
def test_frame_of_another_link_is_refused(secret: bytes, dialer: Hello, listener: Hello, direction: int) -> None:
    """Keys are of one link and direction: a frame of any other does not pass, nor does one of a stranger."""
    _, receiver = pair()
    other = LinkCipher(link_keys(secret, dialer, listener)[direction])
    with pytest.raises(TransferError, match="bad_tag"):
        opened(receiver, other.seal(Ack(*KEY, 1)))


EVERY_KIND = st.sampled_from([message for message, _ in GOLDEN[WIRE_VERSION]])


@given(message=EVERY_KIND, position=st.integers(min_value=LENGTH_BYTES), flip=st.integers(1, 255))
def test_any_flipped_byte_is_refused(message: Body, position: int, flip: int) -> None:
    """Of the tag or of the body."""
    sender, receiver = pair()
    frame = bytearray(sender.seal(message))
    frame[LENGTH_BYTES + position % (len(frame) - LENGTH_BYTES)] ^= flip
    with pytest.raises(TransferError, match="bad_tag"):
        opened(receiver, bytes(frame))


@given(EVERY_KIND, st.integers(1))
def test_truncated_body_is_refused(message: Body, cut: int) -> None:
    """A body that ends early, as the length that came before it says."""
    sender, receiver = pair()
    frame = sender.seal(message)
    body = frame[HEADER_BYTES:]
    with pytest.raises(TransferError, match="bad_tag"):
        receiver.open(frame[LENGTH_BYTES:HEADER_BYTES], body[: len(body) - 1 - cut % len(body)])


@pytest.mark.parametrize("length", [0, MAX_BODY_BYTES + 1, 0xFFFFFFFF])
def test_length_out_of_bounds_is_refused_before_the_body_is_read(length: int) -> None:
    """Nobody makes this side set aside more than one megabyte, or wait for nothing."""
    _, receiver = pair()
    with pytest.raises(TransferError, match="bad_frame"):
        receiver.body_length(length.to_bytes(LENGTH_BYTES, "little") + bytes(16))


def test_stranger_gets_room_for_a_hello_only() -> None:
    """Before keys exist the bound is two kilobytes."""
    cipher = LinkCipher(None)
    assert cipher.body_length(MAX_HELLO_BYTES.to_bytes(LENGTH_BYTES, "little")) == MAX_HELLO_BYTES
    with pytest.raises(TransferError, match="bad_frame"):
        cipher.body_length((MAX_HELLO_BYTES + 1).to_bytes(LENGTH_BYTES, "little"))


def test_oversized_message_is_not_sent() -> None:
    """A frame that no peer would take is an error of the sender."""
    sender, _ = pair()
    with pytest.raises(TransferError, match="overflow"):
        sender.seal(Renew(tuple(TransferKey("x" * 32, n) for n in range(40_000))))


def test_only_hello_passes_in_clear() -> None:
    """Everything else needs a key."""
    clear = LinkCipher(None)
    assert opened(LinkCipher(None), clear.seal(DIALER)) == DIALER
    with pytest.raises(TransferError, match="Ack before the handshake"):
        opened(LinkCipher(None), clear.seal(Ack(*KEY, 1)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        b"\x93\xa3ack",
        b"\x92\xa4nope\x01",
        b"\x94\xa3ack\x01\x02\x03",
        b"\x97\xa5hello\x01\xa1w\xa1i\x00\xc4\x00" + b"\x91" * 1900,
    ],
    ids=["no msgpack", "empty", "short", "unknown kind", "wrong types", "nested without end"],
)
def test_body_that_is_no_message_is_refused(body: bytes) -> None:
    """Also one that only means to exhaust the decoder."""
    with pytest.raises(TransferError, match="bad_frame"):
        LinkCipher(None).open(bytes(16), body)


@given(st.binary(max_size=64))
def test_garbage_never_does_anything_but_be_refused(garbage: bytes) -> None:
    """Any bytes under a right tag still decode to a message or are refused."""
    try:
        message = LinkCipher(None).open(bytes(16), garbage)
    except TransferError as error:
        assert error.reason == "bad_frame"
    else:
        assert isinstance(message, Hello)


@given(message=EVERY_KIND, position=st.integers(0), flip=st.integers(1, 255), cut=st.integers(0, 3))
def test_changed_body_under_a_right_tag_is_a_message_or_refused(message: Body, position: int, flip: int, cut: int) -> None:
    """A peer that knows the key and sends nonsense gets no other error than ``bad_frame``."""
    key, _ = link_keys(SECRET, DIALER, LISTENER)
    body = bytearray(LinkCipher(None).seal(message)[HEADER_BYTES:])
    body[position % len(body)] ^= flip
    body = body[: len(body) - cut]
    tag = hashlib.blake2b(bytes(8) + body, key=key, digest_size=TAG_BYTES).digest()
    try:
        decoded = LinkCipher(key).open(tag, bytes(body))
    except TransferError as error:
        assert error.reason == "bad_frame"
    else:
        assert isinstance(decoded, Body)


@pytest.mark.parametrize(
    "message",
    [
        Offer("x" * (MAX_ID_CHARS + 1), 1, bytes(16), 0, 9, ()),
        Offer(*KEY, bytes(DIGEST_BYTES + 1), 0, 9, ()),
        Offer(*KEY, bytes(16), 0, 9, tuple(range(MAX_SLOTS + 1))),
        Grant("x" * (MAX_ID_CHARS + 1), 1, 0),
        Want("x" * (MAX_ID_CHARS + 1), 1),
        Return(*KEY, tuple(range(MAX_SLOTS + 1))),
        Parcel(*KEY, 1, 0, 8, 0, (Item(0, 0, 1),) * (MAX_ITEMS + 1)),
        Seal(*KEY, 1, 1, bytes(DIGEST_BYTES + 1), 0),
        Ack("x" * (MAX_ID_CHARS + 1), 1, 1),
        Close(*KEY, "send", "x" * (MAX_REASON_CHARS + 1)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_field_that_would_cost_memory_is_refused(message: Body) -> None:
    """What may be kept for a transfer that is not open yet is small, whatever a peer makes up."""
    sender, receiver = pair()
    with pytest.raises(TransferError, match="bad_frame"):
        opened(receiver, sender.seal(message))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 10_000)), max_size=50))
def test_set_digest_is_of_the_set(writes: list[tuple[int, int]]) -> None:
    """The order in which writes happened means nothing, nor does a repeated one; one write more does."""
    assert set_digest(set(writes)) == set_digest(set(writes + writes))
    assert set_digest({*writes, (201, 0)}) != set_digest(set(writes))
