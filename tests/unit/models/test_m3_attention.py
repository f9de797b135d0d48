"""Block-sparse attention against float64, query by query and head by head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3_cases import BLOCK, DIM, Batch, blocks_of, make_batch

from pdserve.models.m3_cpu.attention import sparse_attention, sparse_attention_decode

SCALE = DIM**-0.5
LENGTHS = [1, 2, 127, 128, 129, 257, 640]


def expected(batch: Batch, q: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the attention of each query and head over the visible tokens of its chosen blocks."""
    group = q.shape[1] // chosen.shape[0]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for number, (request, seen) in enumerate(batch.requests()):
        block = torch.arange(seen) // BLOCK
        for head in range(q.shape[1]):
            tokens = torch.isin(block, chosen[head // group, number])
            keys, values = batch.keys[request][:seen][tokens, head // group], batch.values[request][:seen][tokens, head // group]
            if len(keys):
                weights = (keys @ q[number, head].double() * SCALE).exp()
                out[number, head] = weights @ values / weights.sum()
    return out


def choice(batch: Batch, num_kv_heads: int, topk: int, seed: int) -> torch.Tensor:
    """Return [kv heads, queries, topk]: the query's own block and random others it sees, −1 where there are no more."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.full((num_kv_heads, len(batch.requests()), topk), -1, dtype=torch.int32)
    for number, (_, seen) in enumerate(batch.requests()):
        for head in range(num_kv_heads):
            others = torch.randperm(blocks_of(seen) - 1, generator=generator)[: topk - 1]
            picked = torch.cat([torch.tensor([blocks_of(seen) - 1]), others])
            chosen[head, number, : len(picked)] = picked
    return chosen


def queries(batch: Batch, num_heads: int, seed: int) -> torch.Tensor:
    return torch.randn(len(batch.requests()), num_heads, DIM, generator=torch.Generator().manual_seed(seed))


def prefill(batch: Batch, q: torch.Tensor, chosen: torch.Tensor, **scales: torch.Tensor) -> torch.Tensor:
    """Run it as vLLM does, into a buffer that held something else."""
    out = torch.full_like(q, 99.0)
    lens = (batch.cu_seqlens, batch.seq_lens, batch.prefix_lens)
    sparse_attention(q, batch.kv_cache, chosen, batch.block_table, *lens, 0, chosen.shape[0], SCALE, out, **scales)
    return out


def decode(batch: Batch, q: torch.Tensor, chosen: torch.Tensor, queries_each: int) -> torch.Tensor:
    """Run it as vLLM does, into a buffer that held something else."""
    out = torch.full_like(q, 99.0)
    sparse_attention_decode(q, batch.kv_cache, chosen, batch.block_table, batch.seq_lens, chosen.shape[0], SCALE, out, queries_each)
    return out


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(LENGTHS), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([(8, 4), (2, 2), (1, 1), (16, 1), (6, 2)]),
    st.integers(1, 5),
    st.integers(0, 2**16),
)
def test_prefill_attends_to_chosen_blocks_only(requests: list[tuple[int, int]], heads: tuple[int, int], topk: int, seed: int) -> None:
    """A mixed batch of chunks, with any number of query heads for each KV head."""
    batch = make_batch([(max(0, length - chunk), length) for length, chunk in requests], heads[1], seed)
    q, chosen = queries(batch, heads[0], seed), choice(batch, heads[1], topk, seed)
    torch.testing.assert_close(prefill(batch, q, chosen).double(), expected(batch, q, chosen), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([length for length in LENGTHS if length > 3]), min_size=1, max_size=4),
    st.sampled_from([(8, 4), (2, 2), (1, 1), (16, 1)]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 2**16),
)
def test_decode_attends_to_chosen_blocks_only(lengths: list[int], heads: tuple[int, int], queries_each: int, topk: int, seed: int) -> None:
    """Decoding requests with one query or several, which see each one token more than the one before."""
    batch = make_batch([(length - queries_each, length) for length in lengths], heads[1], seed)
    q, chosen = queries(batch, heads[0], seed), choice(batch, heads[1], topk, seed)
    torch.testing.assert_close(decode(batch, q, chosen, queries_each).double(), expected(batch, q, chosen), rtol=1e-5, atol=1e-5)


def test_chunks_attend_like_the_whole_prompt() -> None:
    """A prompt in chunks of any size, and its last token decoded alone, give what it gives in one piece."""
    length = 3 * BLOCK + 5
    batch = make_batch([(0, length)], 2, seed=7)
    q, chosen = queries(batch, 4, 7), choice(batch, 2, 2, 7)
    whole = prefill(batch, q, chosen)
    for size in (50, BLOCK, 200):
        parts = []
        for start in range(0, length, size):
            batch.prefixes, batch.lengths = [start], [min(start + size, length)]
            parts.append(prefill(batch, q[start : start + size], chosen[:, start : start + size]))
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)
    batch.prefixes, batch.lengths = [length - 1], [length]
    torch.testing.assert_close(decode(batch, q[-1:], chosen[:, -1:], 1), whole[-1:], rtol=1e-5, atol=1e-6)


def test_each_kv_head_follows_its_own_choice() -> None:
    """Taking a block from one head's choice changes that head's group and no other."""
    batch = make_batch([(2 * BLOCK, 2 * BLOCK + 1)], 2, seed=5)
    q = queries(batch, 6, 5)
    both = torch.tensor([[[2, 0]], [[2, 0]]], dtype=torch.int32)
    one = torch.tensor([[[2, 0]], [[2, -1]]], dtype=torch.int32)
    for run in (prefill, lambda *args: decode(*args, 1)):
        before, after = run(batch, q, both), run(batch, q, one)
        torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=0)
        assert float((before[:, 3:] - after[:, 3:]).abs().max()) > 0.01


def test_nothing_chosen_gives_zero() -> None:
    """A query without blocks, and a padding row without tokens, give zeros and no NaN."""
    batch = make_batch([(300, 301)], 1, seed=6)
    nothing = torch.full((1, 1, 3), -1, dtype=torch.int32)
    q = queries(batch, 2, 6)
    assert torch.equal(prefill(batch, q, nothing), torch.zeros_like(q))
    assert torch.equal(decode(batch, q, nothing, 1), torch.zeros_like(q))
    batch.lengths = [0]
    assert torch.equal(decode(batch, q, torch.zeros_like(nothing), 1), torch.zeros_like(q))


def test_requests_without_queries_take_no_place() -> None:
    """An empty chunk between two others is skipped."""
    batch = make_batch([(4, 6), (130, 130), (128, 129)], 1, seed=8)
    q, chosen = queries(batch, 1, 8), choice(batch, 1, 2, 8)
    torch.testing.assert_close(prefill(batch, q, chosen).double(), expected(batch, q, chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages_are_scaled_on_reading(dtype: torch.dtype) -> None:
    """Stored keys and values are multiplied by the layer's scales; what fp8 rounded away is the only difference."""
    batch = make_batch([(0, 3), (200, 202)], 1, seed=11)
    q, chosen = queries(batch, 2, 11), choice(batch, 1, 2, 11)
    batch.kv_cache = batch.kv_cache.clamp(-400, 400).to(dtype)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor(2.0)
    found = prefill(batch, q, chosen, k_scale=k_scale, v_scale=v_scale)
    for request in range(2):
        pages = batch.block_table[request, : blocks_of(batch.lengths[request])].long()
        stored = batch.kv_cache.float()[pages].transpose(1, 2).flatten(0, 1)[: batch.lengths[request]].double()
        batch.keys[request], batch.values[request] = stored[..., :DIM] * 0.5, stored[..., DIM:] * 2.0
    torch.testing.assert_close(found.double(), expected(batch, q, chosen), rtol=1e-5, atol=1e-5)


def test_result_has_the_dtype_of_the_buffer() -> None:
    """bfloat16 queries are attended in float32 and rounded once."""
    batch = make_batch([(126, 130)], 1, seed=12)
    q, chosen = queries(batch, 2, 12).bfloat16(), choice(batch, 1, 2, 12)
    found = prefill(batch, q, chosen)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected(batch, q, chosen).bfloat16(), rtol=1e-2, atol=1e-3)
