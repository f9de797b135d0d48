"""One thing goes wrong in every moment of a transfer's life, one moment after the other; both sides must always come to a clean end.

A moment is one small step: a call that a rank hears, a message that arrives, a parcel that is read or copied.
"""

from collections.abc import Callable

import pytest
from deployment import Setup
from prefill_model import PrefillState
from scene import Scene

from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason, TransferSide

TP_PAIRS = [(1, 1), (2, 1), (1, 2)]
PLACES = [((1, 1), False), ((2, 1), True), ((1, 2), False)]
"""TP sizes, and whether producers write slots themselves"""
TOKENS = 9
CHUNKS = (5,)
LEASE_S, TIMEOUT_S = 10.0, 120.0

Fault = Callable[[Scene, TransferKey], None]


def scene(pair: tuple[int, int], *, is_direct: bool = False) -> Scene:
    """Return a deployment with one slot per producer, where all that can wait must wait."""
    return Scene(Setup(*pair, num_slots=pair[0], slot_bytes=48, is_direct=is_direct, timeout_s=TIMEOUT_S, lease_s=LEASE_S))


def moments(pair: tuple[int, int]) -> int:
    """Return how many steps an undisturbed transfer takes."""
    undisturbed = scene(pair)
    return sum(1 for _ in undisturbed.life(undisturbed.request(TOKENS), *CHUNKS))


def disturbed(pair: tuple[int, int], moment: int, fault: Fault, *, is_direct: bool) -> tuple[Scene, TransferKey]:
    """Play a transfer, let the fault happen at one moment, and play on."""
    stage = scene(pair, is_direct=is_direct)
    key = stage.request(TOKENS)
    for step, _ in enumerate(stage.life(key, *CHUNKS)):
        if step == moment:
            fault(stage, key)
    return stage, key


def abort_prefill(stage: Scene, key: TransferKey) -> None:
    stage.finish_prefill(key, aborted=True)


def abort_decode(stage: Scene, key: TransferKey) -> None:
    stage.end_decode(key)


def abort_decode_twice(stage: Scene, key: TransferKey) -> None:
    stage.end_decode(key)
    stage.end_decode(key)


def abort_both(stage: Scene, key: TransferKey) -> None:
    abort_prefill(stage, key)
    abort_decode(stage, key)


def preempt_and_abort(stage: Scene, key: TransferKey) -> None:
    stage.preempt_leg(key)
    abort_prefill(stage, key)


def preempt_and_abort_decode(stage: Scene, key: TransferKey) -> None:
    stage.preempt_leg(key)
    abort_decode(stage, key)


def time_out(stage: Scene, key: TransferKey) -> None:
    stage.tick(TIMEOUT_S + 1)


def time_out_and_abort(stage: Scene, key: TransferKey) -> None:
    time_out(stage, key)
    abort_both(stage, key)


ENDS = [
    abort_prefill,
    abort_decode,
    abort_decode_twice,
    abort_both,
    preempt_and_abort,
    preempt_and_abort_decode,
    time_out,
    time_out_and_abort,
]


@pytest.mark.parametrize(("pair", "is_direct"), PLACES, ids=str)
@pytest.mark.parametrize("fault", ENDS)
def test_abort_at_any_moment_leaves_nothing_behind(pair: tuple[int, int], is_direct: bool, fault: Fault) -> None:
    """Blocks, slots and ledgers are as before, without help from the clock, and the next request is served."""
    for moment in range(moments(pair)):
        stage, _ = disturbed(pair, moment, fault, is_direct=is_direct)
        stage.settle()
        after = stage.request(TOKENS)
        stage.serve(after, *CHUNKS)
        assert stage.has_landed(after), moment
        stage.finish(is_reliable=True)


@pytest.mark.parametrize("pair", TP_PAIRS, ids=str)
def test_prompt_whose_prefill_was_aborted_in_time_is_never_used(pair: tuple[int, int]) -> None:
    """As long as its last chunk is not scheduled no decode rank says landed; decode hears that its peer closed, not that a clock ran out."""
    aborted_in_time = 0
    for moment in range(moments(pair)):
        stage = scene(pair)
        key = stage.request(TOKENS)
        for step, _ in enumerate(stage.life(key, *CHUNKS)):
            if step == moment:
                leg = stage.prefill_leg(key)
                if leg is None or leg.state not in (PrefillState.WAITING, PrefillState.RUNNING):
                    break
                abort_prefill(stage, key)
                aborted_in_time += 1
        else:
            assert not any(landed == key for landed, _ in stage.landed), moment
            assert set(stage.outcomes_of(TransferSide.RECEIVE)) <= {CloseReason.PEER_CLOSED}, moment
        stage.finish(is_reliable=False)
    assert aborted_in_time > 5


@pytest.mark.parametrize(("pair", "is_direct"), PLACES, ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_preempted_prefill_still_lands(pair: tuple[int, int], is_direct: bool, times: int) -> None:
    """Whenever its blocks are taken, also twice at once, the prompt computed anew lands whole and of one pass."""

    def preempt(stage: Scene, key: TransferKey) -> None:
        for _ in range(times):
            stage.preempt_leg(key)
            stage.chunk(key, 3)

    for moment in range(moments(pair)):
        stage, key = disturbed(pair, moment, preempt, is_direct=is_direct)
        stage.finish(is_reliable=True)
        assert stage.has_landed(key), moment
        assert set(stage.outcomes_of(TransferSide.SEND)) == {CloseReason.RELEASED}, moment


@pytest.mark.parametrize("pair", TP_PAIRS, ids=str)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_killed_worker_costs_its_own_transfer_only(worker: str, pair: tuple[int, int]) -> None:
    """The survivor reports within its deadline, nothing wrong is used, and the next incarnation is served."""

    def kill(stage: Scene, key: TransferKey) -> None:
        stage.restart(sorted((*stage.prefills, *stage.decodes)).index(worker))

    for moment in range(moments(pair)):
        stage, _ = disturbed(pair, moment, kill, is_direct=True)
        stage.settle()
        after = stage.request(TOKENS)
        stage.serve(after)
        assert stage.has_landed(after), moment
        stage.finish(is_reliable=False)


@pytest.mark.parametrize("pair", TP_PAIRS, ids=str)
def test_broken_link_ends_the_transfer_and_spares_the_next(pair: tuple[int, int]) -> None:
    """Both ends notice, one before the other; after the link is back a new attempt lands."""
    for noticed_first in (0, 1):
        for moment in range(moments(pair)):

            def cut(stage: Scene, key: TransferKey, first: int = noticed_first) -> None:
                stage.cut(0)
                stage.notice(first)

            stage, key = disturbed(pair, moment, cut, is_direct=True)
            while stage.notice(0) or stage.connect(0):
                pass
            again = stage.request(TOKENS, attempt_of=key)
            stage.serve(again)
            assert stage.has_landed(again), moment
            stage.finish(is_reliable=False)


@pytest.mark.parametrize("fault", ["drop", "tear", "duplicate", "reorder", "fail_post"])
@pytest.mark.parametrize("pair", TP_PAIRS, ids=str)
def test_message_that_fails_at_any_moment_is_outlived(pair: tuple[int, int], fault: str) -> None:
    """Whatever is lost, torn, repeated, overtaken or cannot be posted: right bytes or none, and an end by the deadline."""

    def strike(stage: Scene, key: TransferKey) -> None:
        getattr(stage, fault)(0)

    for moment in range(moments(pair)):
        stage, _ = disturbed(pair, moment, strike, is_direct=False)
        stage.finish(is_reliable=False)
