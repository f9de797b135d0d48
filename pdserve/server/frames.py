"""Server-sent events as bytes: split a stream into events wherever the network cut it, and have a dialect say what each one is.

Sans I/O. An event keeps the exact bytes it came in. JSON is parsed only where an event's bytes hint that it is not plain data, so the common token
event costs a few substring searches. Knows the wire form of event streams, nothing of what any of them says.
"""

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import orjson

MAX_EVENT_BYTES = 32 << 20
"""longest event held while its end is awaited; echoed prompt token ids of a million-token prompt fit"""
DONE_EVENT = b"data: [DONE]\n\n"

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LONGEST_BLANK_LINE = 4
_LINE = re.compile(rb"\r\n|\n|\r")
_NAME = re.compile(rb"(?:^|[\r\n])event:[ ]?([^\r\n]*)")


class FrameKind(Enum):
    """What one event of a stream means to the router."""

    DATA = auto()
    PREAMBLE = auto()
    """says that the engine has taken the request; it may still fail"""
    USAGE = auto()
    """`usage` and nothing that was generated: the stream's last data"""
    ERROR = auto()
    """the engine's own error object"""
    ABORTED = auto()
    """the engine dropped the request"""
    DONE = auto()
    """the stream's last event; without bytes where the event before said so too"""
    OTHER = auto()
    """comments and events without data"""


class Frame(NamedTuple):
    """One event, or several of DATA that came together."""

    kind: FrameKind
    raw: bytes
    payload: dict[str, Any] | None = None
    """parsed for USAGE and ERROR only"""
    is_finish: bool = False
    """the answer ends here, with a reason of its own"""


class Grammar(Protocol):
    """How a stream's events are told apart; see `pdserve.server.api.dialect.Dialect`."""

    def is_plain(self, chunk: bytes) -> bool: ...

    def ends(self, chunk: bytes) -> bool: ...

    def classify(self, raw: bytes) -> Sequence[Frame]: ...


class EventTooLong(ValueError):
    """An event did not end within the limit."""


class FrameSplitter:
    """Splits one stream.

    Args:
        max_event_bytes: longest event that may be held.
    """

    def __init__(self, grammar: Grammar, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._grammar = grammar
        self._max_event_bytes = max_event_bytes
        self._held = bytearray()
        self.has_finish = False
        """the answer has ended with a reason of its own"""

    @property
    def held_bytes(self) -> int:
        """Bytes of an event whose end has not come yet."""
        return len(self._held)

    def feed(self, chunk: bytes) -> list[Frame]:
        """Return the events that `chunk` completes, in order.

        Raises:
            EventTooLong: the held part exceeds the limit; the splitter is of no further use.
        """
        if not self._held and self._grammar.is_plain(chunk):
            self.has_finish = self.has_finish or self._grammar.ends(chunk)
            return [Frame(FrameKind.DATA, chunk)]
        data: bytes | bytearray = chunk
        search_from = 0
        frames: list[Frame] = []
        start = 0
        if not self._held:
            start = search_from = self._plain_start(chunk, frames)
        else:
            search_from = max(0, len(self._held) - _LONGEST_BLANK_LINE + 1)
            self._held += chunk
            data = self._held
        for match in _BLANK_LINE.finditer(data, search_from):
            frames += self._grammar.classify(bytes(data[start : match.end()]))
            start = match.end()
        if data is self._held:
            del self._held[:start]
        elif start < len(data):
            self._held += data[start:]
        if len(self._held) > self._max_event_bytes:
            raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")
        self.has_finish = self.has_finish or any(frame.is_finish for frame in frames)
        return frames

    def _plain_start(self, chunk: bytes, frames: list[Frame]) -> int:
        """Take what comes before a chunk's last two events in one piece if it is plain; returns where the rest begins."""
        start = _before_tail(chunk)
        if not start or not self._grammar.is_plain(plain := chunk[:start]):
            return 0
        frames.append(Frame(FrameKind.DATA, plain, None, self._grammar.ends(plain)))
        return start


def _before_tail(chunk: bytes) -> int:
    """Return where the last two events of a chunk begin: a stream's usage and its end, mostly; 0 if there are no more than two."""
    end = chunk.rfind(b"\n\n", 0, -2)
    start = chunk.rfind(b"\n\n", 0, max(0, end))
    return 0 if start < 0 else start + 2


def event_name(raw: bytes) -> str | None:
    """Return the name an event came under, None if it has none."""
    named = _NAME.search(raw)
    return None if named is None else named[1].decode("latin-1")


def event_data(raw: bytes) -> bytes | None:
    """Return an event's data, its lines joined, or None when it has none."""
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        # One line and the blank one after it, as engines write.
        return raw[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in _LINE.split(raw) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_payload(raw: bytes) -> dict[str, Any] | None:
    """Return an event's data parsed, or None when it is no JSON object."""
    return json_object(event_data(raw) or b"")


def json_object(data: bytes) -> dict[str, Any] | None:
    """Return data parsed, or None when it is no JSON object."""
    try:
        payload = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return payload if isinstance(payload, dict) else None


def data_event(payload: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return `payload` as one event, under a name if it has one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(payload) + b"\n\n"
