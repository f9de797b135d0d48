"""Whose prompts begin alike, and who holds the beginning."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.routing.prefixes import CHUNK_BYTES, MAX_CHUNKS, Holdings, prefix_of

TEXT = bytes(range(256)) * 20
CHUNKS = st.lists(st.sampled_from([b"a", b"b"]).map(lambda letter: letter * CHUNK_BYTES), max_size=6).map(b"".join)


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many chunks two prefixes share."""
    return next((index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), min(len(first), len(second)))


def test_only_whole_chunks_count() -> None:
    """What is left over at the end says nothing."""
    assert [len(prefix_of(TEXT[:size])) for size in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES - 1)] == [0, 0, 1, 2]
    assert len(prefix_of(b"x" * CHUNK_BYTES * (MAX_CHUNKS + 7))) == MAX_CHUNKS


@given(CHUNKS, CHUNKS, st.binary(max_size=CHUNK_BYTES - 1))
def test_prompts_share_as_many_hashes_as_whole_chunks(first: bytes, second: bytes, tail: bytes) -> None:
    """Equal chunks after a difference are not shared: a hash stands for all that came before it."""
    chunks = [(first[i : i + CHUNK_BYTES], second[i : i + CHUNK_BYTES]) for i in range(0, min(len(first), len(second)), CHUNK_BYTES)]
    equal = next((index for index, (a, b) in enumerate(chunks) if a != b), len(chunks))
    assert common(prefix_of(first + tail), prefix_of(second)) == equal


def test_another_salt_shares_nothing() -> None:
    """Neither another tenant's, nor another model's, nor one put together from both in another way."""
    prefixes = [prefix_of(TEXT, *salts) for salts in ((), ("m",), ("m", "t"), ("mt",), ("m", "t", "s"), ("m", "ts"))]
    assert len({prefix[0] for prefix in prefixes}) == len(prefixes)


def test_a_worker_holds_every_beginning_of_what_it_holds() -> None:
    """And of a longer or another prompt as much as is the same."""
    holdings, prefix = Holdings(), prefix_of(TEXT)
    assert holdings.depth(prefix) == 0
    holdings.add(prefix[:6])
    assert [holdings.depth(prefix[:n]) for n in range(10)] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert holdings.depth(prefix_of(TEXT[: 3 * CHUNK_BYTES] + b"z" * 4000)) == 3


def test_the_least_recently_used_is_forgotten_first() -> None:
    """From its end: what is left of it is a shorter beginning."""
    holdings = Holdings()
    old, new = prefix_of(TEXT, "old")[:4], prefix_of(TEXT, "new")[:4]
    holdings.add(old, 6)
    holdings.add(new, 6)
    assert (holdings.depth(old), holdings.depth(new), len(holdings)) == (2, 4, 6)
    holdings.add(old, 6)
    assert (holdings.depth(old), holdings.depth(new)) == (4, 2)


@given(st.lists(st.tuples(CHUNKS, st.integers(0, 8)), max_size=30), CHUNKS)
def test_what_is_held_is_bounded_and_always_whole_prefixes(added: list[tuple[bytes, int]], asked: bytes) -> None:
    """A binary search finds what a walk finds."""
    holdings = Holdings()
    for text, capacity in added:
        holdings.add(prefix_of(text), capacity)
        assert len(holdings) <= max(capacity, 0)
    prefix = prefix_of(asked)
    walked = next((n for n in range(len(prefix)) if holdings.depth(prefix[n : n + 1]) == 0), len(prefix))
    assert holdings.depth(prefix) == walked
