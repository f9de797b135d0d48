"""The messages that two ranks exchange, and how one looks on a stream.

A frame is: 4-byte little-endian length of the body, 16-byte tag, the body (msgpack of one tagged message). The tag is keyed BLAKE2b over a
sequence number and the body, with a key that the handshake derived, so a frame cannot be forged, changed, replayed or moved to another link.
A parcel's pages follow its `Parcel` frame on transports that carry them inline; `Parcel.checksum` covers them and lies under the tag.

Version history (bump on any change; a golden-bytes test fails otherwise):
  1  first version
  2  `Want` and `Return`; slots travel on demand, an offer may carry none; bounds on what a field may hold; planes of a layer

Knows nothing of sockets or state. No message carries an address, a block number or a token.
"""

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec

from pdserve.errors import TransferError
from pdserve.kv.geometry import Geometry
from pdserve.kv.ticket import MAX_ID_CHARS, TransferKey

WIRE_VERSION = 2
MAX_BODY_BYTES = 1 << 20
MAX_HELLO_BYTES = 2 << 10
"""before a peer has proven who it is"""
LENGTH_BYTES = 4
TAG_BYTES = 16
HEADER_BYTES = LENGTH_BYTES + TAG_BYTES
NONCE_BYTES = 32
EARLY_PARTS = 4
"""a parcel leaves before its pass is sealed once it fills one part in so many of a slot"""
MAX_SLOTS = 64
"""in one message"""
MAX_ITEMS = 8192
"""of one parcel"""
DIGEST_BYTES = 16
MAX_REASON_CHARS = 64

TransferId = Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)]
Slots = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SLOTS)]
Digest = Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)]
# What a peer has said may be kept for transfers that are not open yet, so every field that is kept is bounded.


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """First frame of both sides, in clear: who speaks, and a nonce. Compared before anything else happens."""

    wire_version: int
    worker: str
    incarnation: str
    rank: int
    nonce: bytes


class Identity(msgspec.Struct, frozen=True, tag="identity", array_like=True):
    """Second frame, under the link's key: all that must agree before KV may cross."""

    vllm_version: str
    weights_digest: str
    config_digest: str
    """whatever else shapes KV: rope and config overrides, quantisation, speculative decoding, chat template"""
    geometry: Geometry
    arenas: dict[str, str]
    """transport → how a peer reaches this rank's slots (``shm``: segment name and machine); transports that need nothing are absent"""
    slot_bytes: int


class Accept(msgspec.Struct, frozen=True, tag="accept", array_like=True):
    """Third frame: the verdict on the peer's identity; an empty reason means yes."""

    reason: str


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A run of one layer's blocks, by position in the prompt, end exclusive."""

    layer: int
    first_block: int
    end_block: int


class Offer(msgspec.Struct, frozen=True, tag="offer", array_like=True):
    """Consumer rank → producer rank: I have room for these blocks of this prompt; fill these slots."""

    transfer_id: TransferId
    attempt: int
    prompt: Digest
    """the consumer's prompt digest, 16 bytes"""
    first_token: int
    end_token: int
    """token range wanted: `end_token` is the prompt's length, `first_token` a multiple of every block size"""
    slots: Slots
    """may be none; the producer says when it wants one"""


class Grant(msgspec.Struct, frozen=True, tag="grant", array_like=True):
    """Consumer rank → producer rank: fill this slot too."""

    transfer_id: TransferId
    attempt: int
    slot: int


class Want(msgspec.Struct, frozen=True, tag="want", array_like=True):
    """Producer rank → consumer rank: I have a parcel and no slot. Answered by one grant, unless one is on its way already."""

    transfer_id: TransferId
    attempt: int


class Return(msgspec.Struct, frozen=True, tag="return", array_like=True):
    """Producer rank → consumer rank: I have nothing to send in these slots and will not fill them."""

    transfer_id: TransferId
    attempt: int
    slots: Slots


class Parcel(msgspec.Struct, frozen=True, tag="parcel", array_like=True):
    """Producer rank → consumer rank: pages, packed in item order, block by block, head by head."""

    transfer_id: TransferId
    attempt: int
    pass_number: int
    slot: int
    num_bytes: int
    checksum: int
    """xxh3-64 of the pages"""
    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Seal(msgspec.Struct, frozen=True, tag="seal", array_like=True):
    """Producer rank → consumer rank: these are all the writes of this pass."""

    transfer_id: TransferId
    attempt: int
    pass_number: int
    num_writes: int
    """number of (layer, block) writes for this consumer"""
    digest: Digest
    """of the set, see `set_digest`"""
    cached_tokens: int
    """prompt tokens the producer had cached before"""


class Ack(msgspec.Struct, frozen=True, tag="ack", array_like=True):
    """Consumer rank → producer rank: what was sealed is scattered and verified; your blocks are yours again."""

    transfer_id: TransferId
    attempt: int
    pass_number: int


class Close(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """Either way: this transfer is over on my side, unread parcels will be dropped."""

    transfer_id: TransferId
    attempt: int
    side: Literal["send", "receive"]
    """the side that closes"""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """Consumer rank → producer rank: I am alive and still want these."""

    transfers: tuple[TransferKey, ...]


Handshake = Hello | Identity | Accept
Message = Offer | Grant | Want | Return | Parcel | Seal | Ack | Close | Renew
Body = Handshake | Message

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


class LinkCipher:
    """Tags and checks the frames of one direction of one link. Not encryption: integrity, origin and order.

    Args:
        key: 32 bytes; None before the handshake has derived one, when only `Hello` may pass.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._sequence = 0

    def body_length(self, header: bytes | memoryview) -> int:
        """Return a frame's body length from its header.

        Raises:
            TransferError: reason ``bad_frame``, longer than this link may send now.
        """
        length = int.from_bytes(header[:LENGTH_BYTES], "little")
        if not 0 < length <= (MAX_HELLO_BYTES if self._key is None else MAX_BODY_BYTES):
            raise TransferError("bad_frame", f"body of {length} bytes")
        return length

    def _tag(self, body: bytes | memoryview) -> bytes:
        if self._key is None:
            return bytes(TAG_BYTES)
        hasher = hashlib.blake2b(key=self._key, digest_size=TAG_BYTES)
        hasher.update(self._sequence.to_bytes(8, "little"))
        hasher.update(body)
        return hasher.digest()

    def seal(self, body: Body) -> bytes:
        """Return the frame of one message and advance the sequence."""
        encoded = _encoder.encode(body)
        if len(encoded) > MAX_BODY_BYTES:
            raise TransferError("overflow", f"{type(body).__name__} of {len(encoded)} bytes")
        tag = self._tag(encoded)
        self._sequence += 1
        return len(encoded).to_bytes(LENGTH_BYTES, "little") + tag + encoded

    def open(self, tag: bytes, encoded: bytes) -> Body:
        """Check and decode one frame.

        Raises:
            TransferError: reason ``bad_tag`` or ``bad_frame``; the link must be closed then.
        """
        if not hmac.compare_digest(tag, self._tag(encoded)):
            raise TransferError("bad_tag", "frame forged, changed, replayed or out of order")
        self._sequence += 1
        try:
            body = _decoder.decode(encoded)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TransferError("bad_frame", str(error)) from error
        if self._key is None and not isinstance(body, Hello):
            raise TransferError("bad_frame", f"{type(body).__name__} before the handshake")
        return body


def link_keys(secret: bytes, dialer: Hello, listener: Hello) -> tuple[bytes, bytes]:
    """Derive the two 32-byte keys of a link: (dialer → listener, listener → dialer).

    Both nonces and both identities go in, so keys are fresh per link and useless to anyone without the cluster secret.
    """
    transcript = _encoder.encode((dialer, listener))
    return tuple(  # type: ignore[return-value]
        hmac.digest(secret, label + transcript, "sha256") for label in (b"pdserve-kv dialer", b"pdserve-kv listener")
    )


def set_digest(writes: frozenset[tuple[int, int]] | set[tuple[int, int]]) -> bytes:
    """Return 16 bytes that name a set of (layer, block) writes, independent of the order they happened in."""
    hasher = hashlib.blake2b(digest_size=16)
    for layer, block in sorted(writes):
        hasher.update(layer.to_bytes(4, "little") + block.to_bytes(4, "little"))
    return hasher.digest()
