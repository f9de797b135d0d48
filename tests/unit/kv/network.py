"""A network between ranks in which every step is a choice: when an entry leaves, when it arrives, and whether it does at all.

A link has two lanes. A lane's outbox holds what its rank asked to send, in order; a posted parcel's pages are read in two moments, so that
anything may happen between them. What has left lies on the wire until it is delivered. Knows no ledger and keeps no rule: the faults that the
product's links rule out (loss, repetition and disorder within one link) are operations here as well.
"""

from collections import deque
from typing import NamedTuple

import msgspec

from pdserve.kv.actions import PeerRank, PostParcel
from pdserve.kv.pages import Bytes
from pdserve.kv.wire import Message

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Delivery(NamedTuple):
    """A message on the wire, and a parcel's pages where the transport carries them inline."""

    message: Message
    pages: Bytes | None = None


class Lane:
    """One direction of a link."""

    def __init__(self, source: PeerRank, target: PeerRank) -> None:
        self.source = source
        self.target = target
        self.outbox: deque[Message | PostParcel] = deque()
        self.gathering: PostParcel | None = None
        self.wire: deque[Delivery] = deque()

    def put(self, entry: Message | PostParcel) -> None:
        """Queue an entry; a message that nothing waits before is on the wire at once."""
        if isinstance(entry, PostParcel) or self.outbox or self.gathering is not None:
            self.outbox.append(entry)
        else:
            self.send(entry)

    def send(self, message: Message, pages: Bytes | None = None) -> None:
        """Lay a message on the wire as its peer will read it, then what waited behind it up to the next parcel."""
        self.wire.append(Delivery(_decoder.decode(_encoder.encode(message)), pages))

    def flush(self) -> None:
        """Send messages until the next parcel's turn."""
        while self.outbox and self.gathering is None and not isinstance(self.outbox[0], PostParcel):
            entry = self.outbox.popleft()
            assert not isinstance(entry, PostParcel)
            self.send(entry)

    @property
    def can_write(self) -> bool:
        return self.gathering is not None or bool(self.outbox)


class Link:
    """Two ranks that are to exchange KV, and what each of them believes about it."""

    def __init__(self, producer: PeerRank, consumer: PeerRank) -> None:
        self.ends = (producer, consumer)
        self.lanes = (Lane(producer, consumer), Lane(consumer, producer))
        self.is_up = False
        self.unaware: set[PeerRank] = set()
        """ends that have not noticed yet that the link broke"""

    def lane_from(self, source: PeerRank) -> Lane:
        return self.lanes[0] if source == self.ends[0] else self.lanes[1]

    def other(self, end: PeerRank) -> PeerRank:
        return self.ends[1] if end == self.ends[0] else self.ends[0]

    def believes(self, end: PeerRank) -> bool:
        """Whether an end takes the link for usable."""
        return self.is_up or end in self.unaware

    def cut(self) -> None:
        """Lose everything under way, except a gather that has begun."""
        for lane in self.lanes:
            lane.outbox.clear()
            lane.wire.clear()
        if self.is_up:
            self.is_up = False
            self.unaware = set(self.ends)
