"""The indexer's choice of blocks against float64, query by query."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_cases import BLOCK, DIM, Batch, blocks_of, make_batch

from pdserve.models.m3_cpu.index import choose_blocks, index_decode, index_score, index_topk, visible_tokens

LENGTHS = [1, 2, 127, 128, 129, 255, 256, 257, 384, 700]


def expected_scores(q: torch.Tensor, keys: torch.Tensor, seen: int) -> list[float]:
    """Return one query's score of each visible block, for one head, in float64."""
    products = (keys[:seen] * q.double()).sum(-1)
    return [float(products[start : start + BLOCK].max()) for start in range(0, seen, BLOCK)]


def expected_choice(scores: list[float], topk: int, init: int, local: int) -> list[int]:
    """Return the chosen blocks: forced ones at the start, then those at the end, then by score."""

    def order(block: int) -> tuple[int, float, int]:
        if block >= len(scores) - local:
            return 1, 0.0, block
        return (0, 0.0, block) if block < init else (2, -scores[block], block)

    return sorted(range(len(scores)), key=order)[:topk]


def chosen_by_score(batch: Batch, q: torch.Tensor, topk: int, init: int, local: int) -> torch.Tensor:
    """Run score and choice as vLLM calls them for prefill."""
    scores = index_score(
        q, batch.index_cache, batch.block_table, batch.cu_seqlens, batch.seq_lens, batch.prefix_lens, 0, max(batch.lengths), q.shape[1]
    )
    return index_topk(scores, batch.cu_seqlens, batch.prefix_lens, 0, topk, init, local)


def queries(batch: Batch, num_heads: int, seed: int) -> torch.Tensor:
    return torch.randn(sum(batch.queries), num_heads, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_right(batch: Batch, q: torch.Tensor, found: torch.Tensor, topk: int, init: int, local: int) -> None:
    """Each choice is the expected one; where float32 may order two scores otherwise, it is as good to within 1e-4."""
    assert found.shape == (q.shape[1], q.shape[0], topk)
    assert found.dtype == torch.int32
    for number, (request, seen) in enumerate(batch.requests()):
        for head in range(q.shape[1]):
            scores = expected_scores(q[number, head], batch.index_keys[request], seen)
            expected = expected_choice(scores, topk, init, local)
            got = [block for block in found[head, number].tolist() if block >= 0]
            assert found[head, number].tolist() == got + [-1] * (topk - len(got))
            assert len(set(got)) == len(got) == len(expected)
            if got != expected:
                assert [scores[block] for block in got] == pytest.approx([scores[block] for block in expected], abs=1e-4)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    """Return (prefix, length) of a request whose chunk is short, around block boundaries."""
    length = draw(st.sampled_from(LENGTHS))
    return max(0, length - draw(st.integers(1, 5))), length


@settings(deadline=None, max_examples=40)
@given(
    st.lists(spans(), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2**16),
)
def test_prefill_chooses_the_best_blocks(
    requests: list[tuple[int, int]], num_heads: int, topk: int, init: int, local: int, seed: int
) -> None:
    """Every query of a mixed batch of chunks gets forced blocks first and then those with the highest scores."""
    batch = make_batch(requests, 1, seed)
    q = queries(batch, num_heads, seed)
    assert_right(batch, q, chosen_by_score(batch, q, topk, init, local), topk, init, local)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([length for length in LENGTHS if length > 3]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2**16),
)
def test_decode_chooses_the_best_blocks(lengths: list[int], queries_each: int, topk: int, seed: int) -> None:
    """Decoding requests with one query or, as when verifying drafts, several."""
    batch = make_batch([(length - queries_each, length) for length in lengths], 1, seed)
    q = queries(batch, 2, seed)
    found = index_decode(q, batch.index_cache, batch.block_table, batch.seq_lens, max(lengths), topk, 0, 1, 2, queries_each, queries_each)
    assert_right(batch, q, found, topk, 0, 1)


def test_chunks_choose_like_the_whole_prompt() -> None:
    """A prompt computed in chunks of any size has the same blocks chosen as in one piece."""
    length = 5 * BLOCK + 3
    whole = make_batch([(0, length)], 1, seed=9)
    q = queries(whole, 4, seed=9)
    expected = chosen_by_score(whole, q, 4, 0, 1)
    for size in (64, 100, BLOCK, 300):
        parts = []
        for start in range(0, length, size):
            stop = min(start + size, length)
            whole.prefixes, whole.lengths = [start], [stop]
            parts.append(chosen_by_score(whole, q[start:stop], 4, 0, 1))
        assert torch.equal(torch.cat(parts, 1), expected)


def test_scores_of_unseen_blocks_are_minus_infinity() -> None:
    """A block that begins behind the query has no score, and strangers' pages are never read."""
    batch = make_batch([(BLOCK - 2, BLOCK + 1), (0, 1)], 1, seed=1)
    q = queries(batch, 1, seed=1)
    scores = index_score(q, batch.index_cache, batch.block_table, batch.cu_seqlens, batch.seq_lens, batch.prefix_lens, 3, 2 * BLOCK, 1)
    assert scores.shape == (1, 4, 2)
    assert (scores[0] == -torch.inf).tolist() == [[False, True], [False, True], [False, False], [False, True]]
    assert float(scores[scores.isfinite()].abs().max()) < 1e3


def test_result_goes_into_the_given_buffer() -> None:
    """vLLM's shared buffer takes the choice for the queries there are, and keeps the rest; the buffer may be a transposed view."""
    batch = make_batch([(2 * BLOCK, 2 * BLOCK + 2)], 1, seed=2)
    q = queries(batch, 2, seed=2)
    buffer = torch.full((5, 2, 3), 99, dtype=torch.int32)
    decoded = index_decode(
        q, batch.index_cache, batch.block_table, batch.seq_lens, max(batch.lengths), 3, 0, 1, 2, 2, 2, out=buffer.transpose(0, 1)
    )
    assert torch.equal(buffer[:2].transpose(0, 1), decoded)
    assert bool((buffer[2:] == 99).all())
    assert torch.equal(decoded, chosen_by_score(batch, q, 3, 0, 1))


def test_padding_rows_choose_nothing() -> None:
    """A decode row with no tokens, as captured graphs have, gets −1 everywhere."""
    batch = make_batch([(200, 201)], 1, seed=3)
    table = torch.cat([batch.block_table, batch.block_table])
    lens = torch.tensor([201, 0], dtype=torch.int32)
    found = index_decode(torch.randn(2, 1, DIM), batch.index_cache, table, lens, 201, 4, 0, 1, 1, 1, 1)
    assert found[0, 1].tolist() == [-1] * 4
    assert sorted(found[0, 0].tolist()) == [-1, -1, 0, 1]


def test_equal_scores_prefer_the_earlier_block() -> None:
    """The choice does not hang on how a sort treats ties."""
    chosen = choose_blocks(torch.zeros(1, 1, 6), torch.tensor([6 * BLOCK]), 4, 0, 1)
    assert chosen.tolist() == [[[5, 0, 1, 2]]]


def test_broken_scores_lose() -> None:
    """A NaN never beats a number, and is still better than nothing."""
    scores = torch.tensor([[[float("nan"), -5.0, 3.0]]])
    assert choose_blocks(scores, torch.tensor([3 * BLOCK]), 3, 0, 0).tolist() == [[[2, 1, 0]]]


@pytest.mark.parametrize(("init", "local", "expected"), [(0, 0, [4, 3]), (1, 0, [0, 4]), (0, 2, [3, 4]), (2, 1, [0, 1]), (1, 1, [0, 4])])
def test_forced_blocks_come_first(init: int, local: int, expected: list[int]) -> None:
    """The start of the sequence is preferred to its end, and both to any score."""
    scores = torch.arange(5.0).view(1, 1, 5)
    assert choose_blocks(scores, torch.tensor([5 * BLOCK]), 2, init, local).tolist() == [[expected]]


def test_shared_score_buffer_is_refused() -> None:
    """What only vLLM's GPU kernels do is named, not ignored."""
    batch = make_batch([(0, 1)], 1, seed=4)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        index_decode(
            torch.zeros(1, 1, DIM), batch.index_cache, batch.block_table, batch.seq_lens, 1, 1, 0, 1, 1, 1, 1, score_out=torch.zeros(1)
        )


def test_visible_tokens_count_from_the_sequence_start() -> None:
    """Requests without queries take no place."""
    assert visible_tokens(torch.tensor([0, 2, 2, 5]), torch.tensor([7, 3, 0])).tolist() == [8, 9, 1, 2, 3]
    assert blocks_of(129) == 2
