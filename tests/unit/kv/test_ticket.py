"""Tickets as an engine reads them: what the router mints is understood, anything else is no ticket and says why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kv.ticket import MAX_ID_CHARS, MAX_TIMEOUT_S, LegTicket, TransferKey, parse
from pdserve.types import Ticket, TransferSide

TICKET = Ticket("0123456789abcdef0123456789abcdef", 2, "prefill-0", "a1", "decode-1", "b2", 12.5, proof=True)
GOOD = TICKET.params(TransferSide.SEND)


@pytest.mark.parametrize(
    ("side", "worker", "incarnation"), [(TransferSide.SEND, "decode-1", "b2"), (TransferSide.RECEIVE, "prefill-0", "a1")]
)
def test_each_leg_names_the_other_worker(side: TransferSide, worker: str, incarnation: str) -> None:
    """What the router writes is what the engine reads."""
    assert parse(TICKET.params(side)) == LegTicket(TransferKey(TICKET.transfer_id, 2), side, worker, incarnation, 12.5, proof=True)


@pytest.mark.parametrize("params", [None, {}])
def test_no_parameters_are_no_ticket(params: dict[str, object] | None) -> None:
    """A request of its own, not a bad one."""
    assert parse(params) is None


BAD_TEXT = ["", "x" * (MAX_ID_CHARS + 1), 7, None, ["a"], b"bytes"]


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field in ("transfer_id", "worker", "incarnation") for value in BAD_TEXT]
    + [("attempt", value) for value in (0, -1, (1 << 20) + 1, True, 1.0, "1", None)]
    + [("timeout_s", value) for value in (0, -1.0, MAX_TIMEOUT_S + 1, math.nan, math.inf, True, "5", None)]
    + [("role", value) for value in ("", "SEND", "both", None, 1, ["send"])],
)
def test_bad_field_is_named(field: str, value: object) -> None:
    """One field wrong, whatever its type."""
    assert parse(GOOD | {field: value}) == field


@pytest.mark.parametrize("field", ["transfer_id", "worker", "incarnation", "attempt", "timeout_s", "role"])
def test_missing_field_is_named(field: str) -> None:
    """Nothing has a default."""
    assert parse({name: value for name, value in GOOD.items() if name != field}) == field


@pytest.mark.parametrize(("value", "wanted"), [(True, True), (False, False), (1, False), ("yes", False), (None, False)])
def test_proof_is_asked_for_by_true_alone(value: object, wanted: bool) -> None:
    """Anything else means the cheap way."""
    ticket = parse(GOOD | {"proof": value})
    assert isinstance(ticket, LegTicket)
    assert ticket.proof is wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(st.dictionaries(st.sampled_from(sorted(GOOD)) | st.text(max_size=5), JSON, max_size=8))
def test_anything_parses_or_names_a_field(params: dict[str, object]) -> None:
    """An engine survives any JSON in a body."""
    assert isinstance(parse(params), LegTicket | str | None)
    assert isinstance(parse(GOOD | params), LegTicket | str)
