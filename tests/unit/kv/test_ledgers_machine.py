"""Both ledgers of every rank, all TP pairs, under whatever order of events hypothesis can find."""

from deployment import Setup
from faults import FaultyRig
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

PICKS = st.integers(0, 2**20)
TP_SIZES = st.sampled_from([1, 2, 4])


class LedgerMachine(RuleBasedStateMachine):
    """A deployment and everything that may happen to it; the rig asserts what must hold."""

    @initialize(
        prefill_ranks=TP_SIZES,
        decode_ranks=TP_SIZES,
        workers=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
        slots=st.sampled_from([1, 1, 2, 3, 8]),
        blocks=st.sampled_from([8, 12, 48]),
        slot_bytes=st.sampled_from([32, 64, 256]),
        is_direct=st.booleans(),
    )
    def deploy(
        self, prefill_ranks: int, decode_ranks: int, workers: tuple[int, int], slots: int, blocks: int, slot_bytes: int, *, is_direct: bool
    ) -> None:
        setup = Setup(
            prefill_ranks,
            decode_ranks,
            *workers,
            num_slots=slots,
            num_blocks=blocks,
            decode_first=blocks < 48,
            slot_bytes=slot_bytes,
            is_direct=is_direct,
            max_requests=3,
            timeout_s=120.0,
            lease_s=10.0,
        )
        self.rig = FaultyRig(setup)
        self.is_reliable = True

    @rule(pick=PICKS)
    def submit(self, pick: int) -> None:
        self.rig.submit(pick)

    @rule(pick=PICKS)
    def submit_mismatched(self, pick: int) -> None:
        self.rig.submit(pick, mismatch=True)

    @rule(pick=PICKS)
    def engines_go_on(self, pick: int) -> None:
        self.rig.prefill(pick)
        self.rig.reserve(pick)

    @rule(picks=st.lists(PICKS, min_size=1, max_size=8))
    def ranks_hear(self, picks: list[int]) -> None:
        for pick in picks:
            self.rig.call(pick)

    @rule(picks=st.lists(PICKS, min_size=1, max_size=8))
    def messages_arrive(self, picks: list[int]) -> None:
        for pick in picks:
            self.rig.deliver(pick)

    @rule(picks=st.lists(PICKS, min_size=1, max_size=4))
    def pages_move(self, picks: list[int]) -> None:
        for pick in picks:
            self.rig.write(pick)
            self.rig.scatter(pick // 7)

    @rule()
    def everything_arrives(self) -> None:
        self.rig.drain()

    @rule(pick=PICKS)
    def preempt(self, pick: int) -> None:
        self.rig.preempt(pick)

    @rule(pick=PICKS, on_prefill=st.booleans())
    def abort(self, pick: int, *, on_prefill: bool) -> None:
        (self.rig.abort_prefill if on_prefill else self.rig.abort_decode)(pick)

    @precondition(lambda self: any(lane.wire for link in self.rig.links.values() for lane in link.lanes))
    @rule(pick=PICKS, fault=st.sampled_from(["drop", "duplicate", "reorder", "tear"]))
    def network_fails(self, pick: int, fault: str) -> None:
        self.is_reliable &= not getattr(self.rig, fault)(pick)

    @rule(pick=PICKS, fault=st.sampled_from(["fail_post", "cut", "notice", "connect", "restart"]))
    def peer_fails(self, pick: int, fault: str) -> None:
        self.is_reliable &= not getattr(self.rig, fault)(pick)

    @rule(elapsed_s=st.sampled_from([0.5, 3.0, 11.0, 121.0]))
    def time_passes(self, elapsed_s: float) -> None:
        self.rig.tick(elapsed_s)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.finish(is_reliable=self.is_reliable)


LedgerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
TestLedgers = LedgerMachine.TestCase
