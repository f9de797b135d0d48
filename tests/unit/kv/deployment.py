"""What a test deploys: sizes, limits and habits of the workers of one rig."""

from typing import NamedTuple


class Setup(NamedTuple):
    """One deployment."""

    prefill_ranks: int = 1
    decode_ranks: int = 1
    prefill_workers: int = 1
    decode_workers: int = 1
    num_slots: int = 4
    """of one decode rank"""
    slot_bytes: int = 64
    num_blocks: int = 48
    """of one engine and group"""
    decode_first: bool = False
    """no prefill begins before decode has blocks for the prompt; else each engine must hold all requests at once, or they wait for each other"""
    is_direct: bool = False
    """producers write the slot's memory themselves, as over shared memory; else pages travel with the notice"""
    max_requests: int = 6
    timeout_s: float = 1e9
    lease_s: float = 1e9
    skew_s: float = 0.0
    """by how much prefill's clocks are ahead"""
    padding: int = 0
    """bytes between the runs of the decode side"""
