"""Small writes of one turn of the loop go out together, in order, and none of them stays behind."""

import asyncio

import pytest

from pdserve.server.coalesced import MOST_HELD_BYTES, CoalescedTransport


class Wire(asyncio.Transport):
    """A transport that keeps what it is told, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes | str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.calls.append(bytes(data))

    def write_eof(self) -> None:
        self.calls.append("eof")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.calls

    def get_write_buffer_size(self) -> int:
        return 7


def coalesced() -> tuple[Wire, CoalescedTransport]:
    wire = Wire()
    return wire, CoalescedTransport(wire, asyncio.get_running_loop())


async def test_the_pieces_of_one_turn_are_one_write() -> None:
    """Head, data and end of a short answer; the next turn's are another."""
    wire, transport = coalesced()
    for piece in (b"head", b"data", b"end"):
        transport.write(piece)
    assert (wire.calls, transport.get_write_buffer_size()) == ([], 11 + 7)
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)
    assert (wire.calls, transport.get_write_buffer_size()) == ([b"headdataend", b"next"], 7)


async def test_what_is_not_small_is_not_held() -> None:
    """So the bound on what a slow client leaves unread holds."""
    wire, transport = coalesced()
    transport.write(b"x")
    transport.write(b"y" * MOST_HELD_BYTES)
    assert wire.calls == [b"x" + b"y" * MOST_HELD_BYTES]
    await asyncio.sleep(0)
    assert len(wire.calls) == 1


@pytest.mark.parametrize("end", ["close", "write_eof"])
async def test_closing_writes_what_is_held_first(end: str) -> None:
    """An answer's last bytes are not lost."""
    wire, transport = coalesced()
    transport.write(b"last")
    getattr(transport, end)()
    assert wire.calls == [b"last", "eof" if end == "write_eof" else "close"]
    await asyncio.sleep(0)
    assert len(wire.calls) == 2


async def test_aborting_drops_it() -> None:
    """And nothing is written afterwards."""
    wire, transport = coalesced()
    transport.write(b"lost")
    transport.abort()
    await asyncio.sleep(0)
    assert wire.calls == ["abort"]
    assert not transport.is_closing()
