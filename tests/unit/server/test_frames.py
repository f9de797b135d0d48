"""Events come out as they went in, wherever the network cut them, each with the meaning it has."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import Route
from pdserve.server.frames import EventTooLong, Frame, FrameKind, FrameSplitter, data_event, event_data
from pdserve.testing import wire
from pdserve.testing.forms import FORMS

WORDS = ("日本", "🙂", '"usage"', "[DONE]", "\r\n", "event: error\n", "event: message_stop\ndata: {}\n\n", "event: response.completed\n")
OPENAI = DIALECTS[Route.CHAT]


def stream_of(route: Route) -> list[bytes]:
    """Return the events of a stream that says everything which might be mistaken for something else."""
    form = FORMS[route.value]
    events = form.events("r", tokens=WORDS, finish_reason="stop", counts=form.usage(9, len(WORDS), 0))
    return [event for event in (*form.preamble("r"), *events, form.END) if event]


CHAT = stream_of(Route.CHAT)[:-1]
STREAM = [*CHAT, wire.DONE]
ROUTES = pytest.mark.parametrize("route", Route)
NOT_DATA = {
    Route.CHAT: [FrameKind.USAGE, FrameKind.DONE],
    Route.COMPLETIONS: [FrameKind.USAGE, FrameKind.DONE],
    Route.RESPONSES: [FrameKind.PREAMBLE, FrameKind.PREAMBLE, FrameKind.USAGE, FrameKind.DONE],
    Route.MESSAGES: [FrameKind.USAGE, FrameKind.DONE],
}


def split(chunks: list[bytes], route: Route = Route.CHAT) -> list[Frame]:
    """Feed chunks to a new splitter; nothing may be held at the end."""
    splitter = FrameSplitter(DIALECTS[route])
    frames = [frame for chunk in chunks for frame in splitter.feed(chunk)]
    assert splitter.held_bytes == 0
    return frames


def kinds_of(frames: list[Frame]) -> list[FrameKind]:
    return [frame.kind for frame in frames]


@ROUTES
def test_every_cut_in_two_gives_the_same_bytes_and_meanings(route: Route) -> None:
    """One cut, at every byte of the stream: usage and end are always recognised, and nothing is lost or doubled."""
    whole = b"".join(stream_of(route))
    for cut in range(len(whole) + 1):
        splitter = FrameSplitter(DIALECTS[route])
        frames = [*splitter.feed(whole[:cut]), *splitter.feed(whole[cut:])]
        assert b"".join(frame.raw for frame in frames) == whole
        assert [kind for kind in kinds_of(frames) if kind is not FrameKind.DATA] == NOT_DATA[route]
        assert splitter.has_finish


@ROUTES
def test_byte_by_byte_every_event_is_one_frame(route: Route) -> None:
    """The finest cut of all."""
    stream = stream_of(route)
    frames = split([bytes([byte]) for byte in b"".join(stream)], route)
    assert [frame.raw for frame in frames if frame.raw] == stream
    assert [kind for kind in kinds_of(frames) if kind is not FrameKind.DATA] == NOT_DATA[route]


@ROUTES
def test_token_events_that_come_together_are_forwarded_unread(route: Route) -> None:
    """Whatever a model writes, its tokens cost no parsing: events that the network joined are one frame, unless their text looks like more."""
    form = FORMS[route.value]
    events = form.events("r", tokens=("Hello", " ", "日本"), finish_reason="stop", counts=form.usage(9, 3, 0))
    tokens = [event for event in events if b"Hello" in event or "日本".encode() in event][:2]
    (frame,) = split([b"".join(tokens)], route)
    assert frame == Frame(FrameKind.DATA, b"".join(tokens), None, frame.is_finish)


@given(st.sampled_from(Route), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cuts_give_the_same_bytes(route: Route, cuts: list[int]) -> None:
    """However often and wherever the stream is cut."""
    whole = b"".join(stream_of(route))
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    frames = split([whole[start:end] for start, end in pairwise(ends)], route)
    assert b"".join(frame.raw for frame in frames) == whole
    assert kinds_of(frames)[-1] is FrameKind.DONE


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_all_three_line_ends_are_understood_at_every_cut(newline: bytes) -> None:
    """Events end at a blank line, however its ends are written."""
    whole = b"".join(STREAM[:2] + STREAM[-2:]).replace(b"\n", newline)
    for cut in range(len(whole)):
        splitter = FrameSplitter(OPENAI)
        frames = [*splitter.feed(whole[:cut]), *splitter.feed(whole[cut:])]
        assert whole.startswith(b"".join(frame.raw for frame in frames))
        # Cut inside the very last line end, its second half waits for an event that does not come.
        assert splitter.held_bytes == (newline == b"\r\n" and cut == len(whole) - 1)
        assert FrameKind.USAGE in kinds_of(frames)
        assert kinds_of(frames)[-1] is FrameKind.DONE


def test_comments_and_bare_fields_are_neither_data_nor_end() -> None:
    """Keep-alive comments and events without data mean nothing to the router."""
    frames = split([b": keep-alive\n\n", b"event: ping\n\n", b"id: 7\nretry: 10\n\n"])
    assert kinds_of(frames) == [FrameKind.OTHER] * 3


def test_comments_inside_an_event_do_not_hide_its_data() -> None:
    """An event may carry comments and fields beside its data."""
    (frame,) = split([b': hello\nid: 3\ndata: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'])
    assert frame.kind is FrameKind.USAGE
    assert frame.payload == {"choices": [], "usage": {"prompt_tokens": 1}}


def test_data_of_several_lines_is_joined() -> None:
    """An event's data lines belong together, with or without the space after the colon."""
    (frame,) = split([b'data: {"choices":[],\ndata:"usage":{"prompt_tokens":1}}\n\n'])
    assert frame.kind is FrameKind.USAGE
    assert event_data(frame.raw) == b'{"choices":[],\n"usage":{"prompt_tokens":1}}'


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}]}\n\n', FrameKind.DATA),
        (b'data: {"choices":[{"text":"usage"}]}\n\n', FrameKind.DATA),
        (b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":1}}\n\n', FrameKind.DATA),
        (b'data: {"choices":[],"usage":null}\n\n', FrameKind.DATA),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n', FrameKind.USAGE),
        (b'data: {"error":{"message":"m","code":500}}\n\n', FrameKind.ERROR),
        (b'data: {"error": "text"}\n\n', FrameKind.ERROR),
        (b'data: {"error":null,"choices":[{"text":"x"}]}\n\n', FrameKind.DATA),
        (b'data: {"choices":[{"text":"error"}]}\n\n', FrameKind.DATA),
        (b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n', FrameKind.ABORTED),
        (b'data: {"choices":[{"text":"","finish_reason": "abort"}]}\n\n', FrameKind.ABORTED),
        (b'data: {"choices":[{"text":"abort","finish_reason":"stop"}]}\n\n', FrameKind.DATA),
        (b"data: [DONE]\n\n", FrameKind.DONE),
        (b"data:[DONE]\n\n", FrameKind.DONE),
        (b"data:  [DONE] \n\n", FrameKind.DONE),
        (b'data: {"choices":[{"text":"[DONE]"}]}\n\n', FrameKind.DATA),
        (b"data: not json usage\n\n", FrameKind.DATA),
        (b'data: ["usage"]\n\n', FrameKind.DATA),
    ],
)
def test_an_event_means_what_its_json_says(event: bytes, kind: FrameKind) -> None:
    """Words inside generated text never pass for the router's business, whether the event comes alone or in pieces."""
    assert kinds_of(split([event])) == [kind]
    assert kinds_of(split([event[:9], event[9:]])) == [kind]


@pytest.mark.parametrize(
    ("event", "has_finish"),
    [
        (CHAT[1], False),
        (CHAT[-2], True),
        (b'data: {"choices":[{"text":"\\"finish_reason\\":\\"stop\\""}]}\n\n', False),
        (b'data: {"choices":[{"text":"","finish_reason": "length"}]}\n\n', True),
    ],
)
def test_a_finish_is_seen(event: bytes, has_finish: bool) -> None:
    """A choice ends with a reason of its own, not with one that the model wrote."""
    for chunks in ([event], [event[:20], event[20:]]):
        splitter = FrameSplitter(OPENAI)
        for chunk in chunks:
            splitter.feed(chunk)
        assert splitter.has_finish is has_finish


def test_an_event_that_never_ends_is_given_up() -> None:
    """What is held is bounded; an event just below the bound passes."""
    splitter = FrameSplitter(OPENAI, max_event_bytes=1000)
    splitter.feed(b"data: " + b"x" * 990)
    (frame,) = splitter.feed(b"\n\n")
    assert len(frame.raw) == 998
    with pytest.raises(EventTooLong):
        splitter.feed(b"data: " + b"x" * 1000)


def test_a_megabyte_in_small_pieces_is_searched_once() -> None:
    """Each byte is looked at a bounded number of times: a long event in 100-byte pieces is no quadratic work."""
    splitter = FrameSplitter(OPENAI)
    frames: list[Frame] = []
    for chunk in [b"data: ", *[b"y" * 100] * 20_000, b"\n\n"]:
        frames += splitter.feed(chunk)
    assert len(frames) == 1
    assert len(frames[0].raw) == 2_000_008


def test_an_event_is_written_in_one_line() -> None:
    """What the router writes itself has the engines' form."""
    assert data_event({"a": [1, "ü\n"]}) == 'data: {"a":[1,"ü\\n"]}\n\n'.encode()
