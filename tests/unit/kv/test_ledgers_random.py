"""A quarter of a million steps of the seeded driver; `drive.py` by hand goes on for as long as one likes."""

from drive import ENGINE_FAULTS, NETWORK_FAULTS, PEER_FAULTS, run

from pdserve.types import CloseReason, TransferSide

STEPS = 250_000


def test_random_deployments_keep_every_rule() -> None:
    """All TP pairs, calm and under every fault: the rig's own assertions hold, and the run has seen each fault and each good end often."""
    tally = run(seed=7, steps=STEPS)
    assert tally.steps >= STEPS
    assert set(tally.faults) == {*ENGINE_FAULTS, *NETWORK_FAULTS, *PEER_FAULTS}
    assert tally.loads > 1000
    assert tally.outcomes[TransferSide.SEND, CloseReason.RELEASED] > 1000
