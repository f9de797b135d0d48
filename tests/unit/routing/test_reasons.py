"""The closed vocabularies: every cause has its word, and no word is without a cause."""

import pytest

from pdserve.routing.reasons import PathReason, RetryReason, retry_reason, transfer_reason
from pdserve.types import CloseReason, Role

GOOD_ENDS = {CloseReason.LANDED, CloseReason.RELEASED}
PHASES = ("connect", "first_byte", "head", "body", "idle", "status")


@pytest.mark.parametrize("outcome", [outcome for outcome in CloseReason if outcome not in GOOD_ENDS])
def test_each_failed_transfer_has_a_reason(outcome: CloseReason) -> None:
    """It is named after how the transfer ended."""
    assert transfer_reason(outcome).value == f"transfer_{outcome.value}"


@pytest.mark.parametrize("outcome", sorted(GOOD_ENDS))
def test_a_good_end_is_no_reason_to_run_locally(outcome: CloseReason) -> None:
    """Asking for one is a mistake of the caller."""
    with pytest.raises(ValueError, match="transfer_"):
        transfer_reason(outcome)


def test_transfer_reasons_are_those_of_transfers_and_a_lost_record() -> None:
    """No transfer reason is left over."""
    named = {reason for reason in PathReason if reason.name.startswith("TRANSFER_")}
    assert named == {transfer_reason(outcome) for outcome in CloseReason if outcome not in GOOD_ENDS} | {PathReason.TRANSFER_UNPROVEN}


def test_each_leg_and_phase_has_one_retry_reason() -> None:
    """The table is full both ways."""
    reasons = [retry_reason(role, phase) for role in Role for phase in PHASES]
    assert sorted(reasons) == sorted(RetryReason)


def test_an_unknown_phase_is_no_label() -> None:
    """A word that is not in the vocabulary never reaches a metric."""
    with pytest.raises(ValueError, match="prefill_late"):
        retry_reason(Role.PREFILL, "late")
