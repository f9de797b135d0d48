"""The experts against float64, token by token."""

import math

import pytest
import torch

from pdserve.models.m3_cpu.experts import run_experts

ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0


def activation(gate: float, up: float) -> float:
    gate, up = min(gate, LIMIT), max(-LIMIT, min(up, LIMIT))
    return gate / (1 + math.exp(-ALPHA * gate)) * (up + BETA)


def expected(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's experts, one neuron at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    intermediate = w2.shape[-1]
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            both = w13[expert].double() @ x[token].double()
            hidden = [activation(float(both[i]), float(both[i + intermediate])) for i in range(intermediate)]
            out[token] += weight * (w2[expert].double() @ torch.tensor(hidden).double())
    return out


def case(num_tokens: int, num_experts: int, topk: int, hidden: int, intermediate: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator)
    w13 = torch.randn(num_experts, 2 * intermediate, hidden, generator=generator)
    w2 = torch.randn(num_experts, hidden, intermediate, generator=generator)
    experts = torch.stack([torch.randperm(num_experts, generator=generator)[:topk] for _ in range(num_tokens)]).int()
    return x, w13, w2, torch.rand(num_tokens, topk, generator=generator), experts


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize(("num_experts", "topk"), [(8, 2), (8, 8), (1, 1), (4, 3)])
def test_tokens_get_the_weighted_sum_of_their_experts(num_tokens: int, num_experts: int, topk: int) -> None:
    """Also when some experts get no token, and where values are clamped."""
    x, w13, w2, weights, experts = case(num_tokens, num_experts, topk, hidden=24, intermediate=10)
    found = run_experts(x, w13, w2, weights, experts, ALPHA, BETA, LIMIT)
    torch.testing.assert_close(found.double(), expected(x, w13, w2, weights, experts), rtol=1e-4, atol=1e-4)


def test_clamps_hold_on_the_right_side() -> None:
    """The gate has an upper limit only, the up half both: act(100, 100) = act(7, 7), and act(−100, −100) ≈ 0."""
    w13, w2 = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[1.0]]])
    one, first = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    for value in (100.0, 7.0, 3.0, -3.0, -100.0):
        found = run_experts(torch.tensor([[value]]), w13, w2, one, first, ALPHA, BETA, LIMIT)
        assert float(found) == pytest.approx(activation(value, value), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_add_up_to_the_whole(ranks: int) -> None:
    """Each tensor-parallel rank holds a slice of every expert, and the sum over ranks is the unsliced result."""
    x, w13, w2, weights, experts = case(9, 8, 2, hidden=24, intermediate=16)
    whole = run_experts(x, w13, w2, weights, experts, ALPHA, BETA, LIMIT)
    gates, ups = w13.chunk(2, 1)
    total = torch.zeros_like(whole)
    for gate, up, down in zip(gates.chunk(ranks, 1), ups.chunk(ranks, 1), w2.chunk(ranks, 2), strict=True):
        total += run_experts(x, torch.cat([gate, up], 1), down, weights, experts, ALPHA, BETA, LIMIT)
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)


def test_tokens_do_not_see_each_other() -> None:
    """A token's result is the same alone and in a batch."""
    x, w13, w2, weights, experts = case(12, 8, 2, hidden=24, intermediate=10, seed=3)
    batch = run_experts(x, w13, w2, weights, experts, ALPHA, BETA, LIMIT)
    for token in range(12):
        only = slice(token, token + 1)
        alone = run_experts(x[only], w13, w2, weights[only], experts[only], ALPHA, BETA, LIMIT)
        torch.testing.assert_close(alone, batch[only], rtol=1e-5, atol=1e-5)


def test_result_has_the_dtype_of_the_input() -> None:
    """bfloat16 in, bfloat16 out."""
    x, w13, w2, weights, experts = case(3, 4, 2, hidden=8, intermediate=4)
    found = run_experts(x.bfloat16(), w13.bfloat16(), w2.bfloat16(), weights, experts, ALPHA, BETA, LIMIT)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected(x, w13, w2, weights, experts), rtol=0.1, atol=0.5)
