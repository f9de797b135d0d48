"""Norm, rotation and cache insertion against float64, token by token."""

import cmath
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.models.m3_cpu.rotary import gemma_rms_norm, insert, norm_forward, qknorm_rope_insert, rotate

DIM = 128
ROTARY_DIM = 64
EPS = 1e-6
BLOCK = 128


class Norm(torch.nn.Module):
    """The part of vLLM's norm layer that its forward needs."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(dim, generator=torch.Generator().manual_seed(1)) * 0.1, requires_grad=False)
        self.variance_epsilon = EPS


def expected_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One vector, in float64."""
    x, weight = x.double(), weight.double()
    return x / math.sqrt(float((x * x).mean()) + EPS) * (1 + weight)


def expected_rotation(x: torch.Tensor, position: int, base: float = 10000.0) -> torch.Tensor:
    """One head, in float64: each pair is a complex number that is turned."""
    out, half = x.double().clone(), ROTARY_DIM // 2
    for i in range(half):
        turned = complex(out[i], out[i + half]) * cmath.exp(1j * position * base ** (-i / half))
        out[i], out[i + half] = turned.real, turned.imag
    return out


def angle_table(positions: int, base: float = 10000.0) -> torch.Tensor:
    """vLLM's table: cosines, then sines."""
    half = ROTARY_DIM // 2
    angle = torch.arange(positions).double()[:, None] * base ** -(torch.arange(half).double() / half)
    return torch.cat([angle.cos(), angle.sin()], -1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, DIM), (5, 3, DIM), (7, 64), (2, 1)])
def test_norm_equals_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each vector of the last dimension is normalised by itself, in float32 whatever came in."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(shape, generator=generator) * 5).to(dtype)
    weight = torch.randn(shape[-1], generator=generator) * 0.2
    found = gemma_rms_norm(x, weight, EPS)
    assert found.dtype == torch.float32
    for got, vector in zip(found.flatten(0, -2), x.flatten(0, -2), strict=True):
        torch.testing.assert_close(got.double(), expected_norm(vector, weight), rtol=2e-6, atol=1e-6)


def test_norm_of_nothing_is_nothing() -> None:
    """A zero vector stays zero: eps keeps it finite."""
    assert torch.equal(gemma_rms_norm(torch.zeros(2, DIM), torch.ones(DIM), EPS), torch.zeros(2, DIM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_layer_adds_the_residual_first(dtype: torch.dtype) -> None:
    """With a residual the sum is normalised and returned as the next residual; the inputs stay as they were."""
    generator = torch.Generator().manual_seed(4)
    layer, x = Norm(DIM), torch.randn(3, DIM, generator=generator).to(dtype)
    residual = torch.randn(3, DIM, generator=generator).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = norm_forward(layer, x, residual)
    assert normed.dtype == total.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for row in range(3):
        sums = x[row].double() + residual[row].double()
        torch.testing.assert_close(total[row].double(), sums, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(normed[row].double(), expected_norm(sums, layer.weight), rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    alone = norm_forward(layer, x)
    torch.testing.assert_close(alone[0].double(), expected_norm(x[0], layer.weight), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("position", [0, 1, 127, 128, 4095])
def test_rotation_turns_pairs_and_leaves_the_rest(position: int) -> None:
    """The first 64 dimensions are turned in pairs (i, i + 32), the others stay bit for bit."""
    x = torch.randn(1, 2, DIM, generator=torch.Generator().manual_seed(position))
    found = rotate(x, angle_table(4096)[position : position + 1])
    for head in range(2):
        torch.testing.assert_close(found[0, head].double(), expected_rotation(x[0, head], position), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., ROTARY_DIM:], x[..., ROTARY_DIM:])


class Step:
    """One call of the fused step: inputs, caches, and what it should do."""

    def __init__(self, num_heads: int, num_kv_heads: int, num_tokens: int, *, sparse: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_heads, self.num_kv_heads, self.index_heads = num_heads, num_kv_heads, num_kv_heads if sparse else 0
        width = num_heads + 2 * num_kv_heads + (self.index_heads + 1 if sparse else 0)
        self.qkv = torch.randn(num_tokens, width * DIM, generator=generator)
        self.weights = [torch.randn(DIM, generator=generator) * 0.2 for _ in range(4)]
        self.positions = torch.randint(0, 4096, (num_tokens,), generator=generator)
        self.table = angle_table(4096)
        self.slots = torch.randperm(4 * BLOCK, generator=generator)[:num_tokens]
        self.kv_cache = torch.full((4, num_kv_heads, BLOCK, 2 * DIM), 7.0)
        self.index_cache = torch.full((4, BLOCK, DIM), 7.0, dtype=torch.bfloat16)

    def run(self, **named: object) -> torch.Tensor:
        """Call it with the caches unless told otherwise; return the qkv it worked on, as heads."""
        qkv = self.qkv.clone()
        sparse = {"index_q_norm_weight": self.weights[2], "index_k_norm_weight": self.weights[3], "num_index_heads": self.index_heads}
        caches = {"slot_mapping": self.slots, "kv_cache": self.kv_cache, "index_cache": self.index_cache, "block_size": BLOCK}
        options = ({**sparse, **caches} if self.index_heads else {}) | named
        qkv_args = (qkv, *self.weights[:2], self.table, self.positions, self.num_heads, self.num_kv_heads, ROTARY_DIM, EPS)
        qknorm_rope_insert(*qkv_args, **options)
        return qkv.unflatten(-1, (-1, DIM))

    def expected(self, head: int, token: int) -> torch.Tensor:
        """Return what a head of a token becomes, by its place among q, k, v, index queries and index key."""
        x = self.qkv[token].unflatten(-1, (-1, DIM))[head]
        ends = [self.num_heads, self.num_heads + self.num_kv_heads, self.num_heads + 2 * self.num_kv_heads]
        if ends[1] <= head < ends[2]:
            return x.double()
        kind = 0 if head < ends[0] else 1 if head < ends[1] else 2 if head < ends[2] + self.index_heads else 3
        return expected_rotation(expected_norm(x, self.weights[kind]), int(self.positions[token]))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 4), (4, 2), (1, 1), (16, 1)])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_every_head_is_treated_as_what_it_is(num_heads: int, num_kv_heads: int, sparse: bool) -> None:
    """Queries, keys and index heads are normalised and turned, values are left alone."""
    step = Step(num_heads, num_kv_heads, 3, sparse=sparse)
    found = step.run()
    for token in range(3):
        for head in range(found.shape[1]):
            torch.testing.assert_close(found[token, head].double(), step.expected(head, token), rtol=1e-5, atol=1e-5)


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    """Keys, values and the index key of each token are in its slot; padding slots and every other slot keep what they had."""
    step = Step(8, 4, 9, sparse=True)
    step.slots[[2, 8]] = -1
    found = step.run()
    written = torch.zeros(4 * BLOCK, dtype=torch.bool)
    for token, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            written[slot] = True
            page, offset = divmod(slot, BLOCK)
            assert torch.equal(step.kv_cache[page, :, offset, :DIM], found[token, 8:12])
            assert torch.equal(step.kv_cache[page, :, offset, DIM:], found[token, 12:16])
            assert torch.equal(step.index_cache[page, offset], found[token, 20].bfloat16())
    assert int(written.sum()) == 7
    assert bool((step.kv_cache.transpose(1, 2).flatten(0, 1)[~written] == 7).all())
    assert bool((step.index_cache.flatten(0, 1)[~written] == 7).all())


def test_queries_go_to_their_own_buffers() -> None:
    """With output buffers, queries and index queries are written there in the buffer's dtype, and qkv keeps the raw ones."""
    step = Step(4, 2, 5, sparse=True)
    q_out, index_q_out = torch.empty(5, 4 * DIM), torch.empty(5, 2 * DIM, dtype=torch.bfloat16)
    found = step.run(q_out=q_out, index_q_out=index_q_out)
    in_place = step.run()
    assert torch.equal(q_out, in_place[:, :4].flatten(1))
    assert torch.equal(index_q_out, in_place[:, 8:10].flatten(1).bfloat16())
    raw = step.qkv.unflatten(-1, (-1, DIM))
    assert torch.equal(found[:, :4], raw[:, :4])
    assert torch.equal(found[:, 8:10], raw[:, 8:10])


def test_two_slot_mappings_serve_two_caches() -> None:
    """The index cache may use other slots than the main one."""
    step = Step(2, 1, 4, sparse=True)
    others = (step.slots + 17) % (4 * BLOCK)
    found = step.run(index_slot_mapping=others)
    pages = step.index_cache.flatten(0, 1)
    assert torch.equal(pages[others], found[:, 5].bfloat16())
    assert torch.equal(step.kv_cache[step.slots // BLOCK, 0, step.slots % BLOCK, :DIM], found[:, 2])


def test_index_part_can_be_left_alone() -> None:
    """A layer that reuses another's choice writes its keys and values only."""
    step = Step(2, 1, 4, sparse=True)
    found = step.run(skip_index_branch=True)
    assert torch.equal(found[:, 4:], step.qkv.unflatten(-1, (-1, DIM))[:, 4:])
    assert bool((step.index_cache == 7).all())
    assert not bool((step.kv_cache == 7).all())


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_caches_hold_rounded_and_clamped_values(name: str, dtype: torch.dtype) -> None:
    """A byte cache takes the fp8 form of each value, and what is out of range becomes the largest one."""
    step = Step(2, 1, 4, sparse=True)
    step.qkv[0, 3 * DIM] = 1e6
    cache = torch.zeros(4, 1, BLOCK, 2 * DIM, dtype=torch.uint8)
    found = step.run(kv_cache=cache, kv_cache_dtype=name)
    stored = cache[step.slots // BLOCK, 0, step.slots % BLOCK].view(dtype).float()
    limit = torch.finfo(dtype).max
    assert stored[0, DIM] == limit
    torch.testing.assert_close(stored[:, DIM:], found[:, 3].clamp(-limit, limit), rtol=2**-3, atol=2**-6)


@pytest.mark.parametrize("option", ["q_fp8_out", "kv_k_scale", "kv_v_scale"])
def test_what_only_gpus_have_is_refused(option: str) -> None:
    """fp8 queries and scaled 4-bit caches are named, not ignored."""
    with pytest.raises(NotImplementedError, match="need a GPU"):
        Step(2, 1, 1, sparse=True).run(**{option: torch.ones(1)})


@settings(deadline=None, max_examples=25)
@given(st.lists(st.one_of(st.just(-1), st.integers(0, 3 * BLOCK - 1)), max_size=9, unique_by=lambda slot: slot if slot >= 0 else object()))
def test_insert_writes_exactly_the_kept_slots(slots: list[int]) -> None:
    """Whatever mixture of padding and slots comes, each kept slot holds its token and all others are untouched."""
    values = torch.arange(1, 10 * 2 * 4 + 1).float().view(10, 2, 4)
    cache = torch.zeros(3, 2, BLOCK, 4)
    insert(cache, torch.tensor(slots, dtype=torch.int64), values)
    expected = torch.zeros_like(cache)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // BLOCK, :, slot % BLOCK] = values[token]
    assert torch.equal(cache, expected)
