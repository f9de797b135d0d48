"""The plan of a pair of workers: every head of every decode rank comes once, from a rank that has it, for all TP sizes."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import M3_SMALL, Model, Shape

from pdserve.errors import ProtocolMismatch
from pdserve.kv.geometry import Geometry, Sharding
from pdserve.kv.plan import PairPlan, held_heads, layer_table_digest, make_plan, require_equal_layers

TP_SIZES = (1, 2, 4, 8)
PAIRS = list(product(TP_SIZES, TP_SIZES))


def check_exact(model: Model, plan: PairPlan) -> None:
    """Compare a plan with what it is for: per decode rank, layer and head, the same head of one producer, inside its region."""
    for consumer in range(plan.consumer_ranks):
        theirs = model.geometry(plan.consumer_ranks, consumer)
        got: dict[tuple[int, int], int] = {}
        for producer in plan.producers_of(consumer):
            ours = model.geometry(plan.producer_ranks, producer)
            slices = plan.slices[producer, consumer]
            assert [s.layer for s in slices] == sorted({s.layer for s in slices})
            for piece in slices:
                layer = ours.layers[piece.layer]
                assert 0 <= piece.producer_head < piece.producer_head + piece.num_heads <= layer.local_heads
                assert 0 <= piece.consumer_head < piece.consumer_head + piece.num_heads <= theirs.layers[piece.layer].local_heads
                for step in range(piece.num_heads):
                    target = (piece.layer, piece.consumer_head + step)
                    assert target not in got
                    got[target] = true_head(ours, piece.layer, piece.producer_head + step)
        wanted = {
            (index, head): true_head(theirs, index, head) for index, layer in enumerate(theirs.layers) for head in range(layer.local_heads)
        }
        assert got == wanted


def true_head(geometry: Geometry, layer: int, local: int) -> int:
    """Return which of the model's heads a rank holds at a local position, by vLLM's rule."""
    shape = geometry.layers[layer]
    if shape.sharding is Sharding.REPLICATED:
        return local
    if geometry.tensor_parallel_size <= shape.total_heads:
        return geometry.rank * shape.local_heads + local
    return geometry.rank * shape.total_heads // geometry.tensor_parallel_size


@pytest.mark.parametrize(("producers", "consumers"), PAIRS)
def test_all_pairs_of_m3_are_exact(producers: int, consumers: int) -> None:
    """4 heads, split and replicated layers mixed, both directions."""
    check_exact(M3_SMALL, M3_SMALL.plan(producers, consumers))


@given(heads=st.integers(1, 12), producers=st.integers(1, 16), consumers=st.integers(1, 16))
def test_any_sizes_are_exact_or_refused(heads: int, producers: int, consumers: int) -> None:
    """A pair is refused exactly if one of its sides cannot hold the heads evenly, and the refusal names both sizes."""
    model = Model((Shape("layers.0.attn", 0, 4, 1, Sharding.SPLIT), Shape("layers.0.index", 0, 4, 1, Sharding.REPLICATED)), heads)
    is_even = all(max(heads, ranks) % min(heads, ranks) == 0 for ranks in (producers, consumers))
    if is_even:
        check_exact(model, model.plan(producers, consumers))
    else:
        with pytest.raises(ProtocolMismatch) as refusal:
            model.plan(producers, consumers)
        assert refusal.value.args == ("layers.0.attn: tensor parallel sizes", producers, consumers)


@pytest.mark.parametrize(
    ("producers", "consumers", "readers"),
    [
        (1, 1, [(0,)]),
        (1, 4, [(0, 1, 2, 3)]),
        (4, 1, [(0,), (0,), (0,), (0,)]),
        (2, 4, [(0, 1), (2, 3)]),
        (4, 2, [(0,), (0,), (1,), (1,)]),
        (4, 8, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, 4, [(0,), (), (1,), (), (2,), (), (3,), ()]),
        (8, 1, [(0,), (), (0,), (), (0,), (), (0,), ()]),
        (8, 8, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
    ],
)
def test_each_producer_knows_whom_it_must_hear_from(producers: int, consumers: int, readers: list[tuple[int, ...]]) -> None:
    """Copies of a head on neighbouring ranks share the work; a rank that nobody reads waits for nobody."""
    plan = M3_SMALL.plan(producers, consumers)
    assert [plan.consumers_of(rank) for rank in range(producers)] == readers


def test_slices_of_one_layer_are_joined() -> None:
    """Neighbouring heads travel as one slice, at most one per layer and pair of ranks."""
    plan = M3_SMALL.plan(2, 1)
    assert [(s.layer, s.producer_head, s.consumer_head, s.num_heads) for s in plan.slices[1, 0]] == [
        (0, 0, 2, 2),
        (1, 0, 2, 2),
        (3, 0, 2, 2),
    ]
    assert [s.layer for s in plan.slices[0, 0]] == [0, 1, 2, 3]


def test_heads_are_held_as_vllm_lays_them() -> None:
    """Neighbouring heads on a rank; with more ranks than heads, neighbouring ranks repeat a head."""
    assert [list(held_heads(4, 2, rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(held_heads(4, 8, rank)) for rank in range(8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]
    with pytest.raises(ValueError, match="6 heads cannot lie evenly over 4 ranks"):
        held_heads(6, 4, 0)


def test_equal_tables_make_equal_digests_on_every_rank() -> None:
    """What is local to a rank or a size does not enter; what is shared does."""
    digests = {layer_table_digest(M3_SMALL.geometry(size, size - 1, padding=size)) for size in TP_SIZES}
    assert len(digests) == 1
    other = Model((*M3_SMALL.shapes[:-1], M3_SMALL.shapes[-1]._replace(token_bytes=2)), heads=4)
    assert layer_table_digest(other.geometry(1, 0)) not in digests


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "layers.9.attn"), ("group", 0), ("block_tokens", 16), ("sharding", Sharding.REPLICATED), ("token_bytes", 7)],
)
def test_tables_that_differ_are_refused_with_both_values(field: str, value: object) -> None:
    """The first layer and field that differ are named."""
    ours = M3_SMALL.geometry(1, 0)
    last = M3_SMALL.shapes[-1]._replace(**{field: value})
    theirs = Model((*M3_SMALL.shapes[:-1], last), heads=4).geometry(1, 0)
    with pytest.raises(ProtocolMismatch) as refusal:
        require_equal_layers(ours, theirs)
    shown = "run_bytes" if field == "token_bytes" else field
    assert refusal.value.field == f"layers.2.attn: {shown}"
    assert refusal.value.ours == getattr(ours.layers[-1], shown)
    assert refusal.value.theirs == getattr(theirs.layers[-1], shown)


def test_missing_layer_is_refused_with_both_counts() -> None:
    """A layer that only one side writes is no detail."""
    fewer = Model(M3_SMALL.shapes[:-1], heads=4).geometry(1, 0)
    with pytest.raises(ProtocolMismatch) as refusal:
        require_equal_layers(M3_SMALL.geometry(1, 0), fewer)
    assert refusal.value.args == ("number of KV layers", 4, 3)


def test_plan_needs_only_the_shared_part() -> None:
    """Both sides compute the same plan from their own geometries, whatever their ranks and strides."""
    plans = [make_plan(M3_SMALL.geometry(size, size - 1, padding=size).layers, 4, 2) for size in TP_SIZES]
    assert all(plan == plans[0] for plan in plans)
