"""The decision alone: which path, which pair, why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from routing_fleet import MODEL, demand, worker

from pdserve.errors import NoReadyWorker
from pdserve.routing.prefixes import Holdings
from pdserve.routing.reasons import PathReason
from pdserve.routing.select import Demand, Disaggregation, Pick, Policy, View, home_of
from pdserve.routing.select import choose as choose_in
from pdserve.routing.verdict import Verdict
from pdserve.types import Role, ServePath, WorkerSnapshot, WorkerState

LOCAL_REASONS = [
    PathReason.N_ABOVE_ONE,
    PathReason.SEVERAL_PROMPTS,
    PathReason.BEAM_SEARCH,
    PathReason.PROMPT_LOGPROBS,
    PathReason.NO_OUTPUT,
    PathReason.MEDIA,
    PathReason.PROMPT_EMBEDS,
    PathReason.TRUNCATION,
]
MODES: list[Disaggregation] = ["auto", "always", "never"]


@dataclass(frozen=True)
class Loaded:
    """A worker with what it has to do."""

    snapshot: WorkerSnapshot
    in_flight: int = 0
    outstanding_tokens: int = 0
    last_grant: int = 0
    kv_tokens: int = 0
    holdings: Holdings = field(default_factory=Holdings, compare=False)

    @property
    def key(self) -> tuple[str, str]:
        return (self.snapshot.worker_id, self.snapshot.incarnation)


def view(fleet: Sequence[Loaded], **more: object) -> View[Loaded]:
    """Return the ready workers of one model, as the pool would show them."""
    ready = [c for c in fleet if c.snapshot.state is WorkerState.READY and c.snapshot.model == MODEL]
    by_role = {role: [c for c in ready if c.snapshot.role is role] for role in Role}
    return View(by_role[Role.PREFILL], by_role[Role.DECODE], **more)  # type: ignore[arg-type]


def choose(asked: Demand, fleet: Sequence[Loaded], mode: Disaggregation) -> Pick[Loaded] | None:
    """Choose with nothing but the mode set."""
    return choose_in(asked, view(fleet), Policy(mode))


def seen(worker_id: str, in_flight: int = 0, tokens: int = 0, last_grant: int = 0, kv_tokens: int = 0, **changes: object) -> Loaded:
    """Return a candidate with room for four leases."""
    return Loaded(worker(worker_id, **{"max_running": 4, **changes}), in_flight, tokens, last_grant, kv_tokens)


def names(pick: Pick[Loaded] | None) -> tuple[str | None, str] | None:
    """Return the chosen pair's ids."""
    if pick is None:
        return None
    return (None if pick.prefill is None else pick.prefill.snapshot.worker_id, pick.decode.snapshot.worker_id)


P0, P1, D0, D1 = seen("p0"), seen("p1"), seen("d0"), seen("d1")
FULL_P0, FULL_D0 = seen("p0", 4), seen("d0", 4)
AWAY = [state for state in WorkerState if state is not WorkerState.READY]


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_request_is_disaggregated_unless_something_stands_against_it(mode: Disaggregation) -> None:
    """The default needs one worker of each role with room."""
    assert choose(demand(), [P0, D0], mode) == Pick(ServePath.DISAGGREGATED, PathReason.DEFAULT, P0, D0)


@pytest.mark.parametrize("reason", LOCAL_REASONS)
@pytest.mark.parametrize("mode", ["auto", "always"])
def test_each_local_reason_leads_to_decode_alone(mode: Disaggregation, reason: PathReason) -> None:
    """The request is served, by decode, under the reason it came with; prefill's load does not matter."""
    assert choose(demand(local=reason), [FULL_P0, D0], mode) == Pick(ServePath.LOCAL, reason, None, D0)


@pytest.mark.parametrize("reason", [None, *LOCAL_REASONS])
def test_a_switched_off_deployment_says_so(reason: PathReason | None) -> None:
    """`never` is the reason, whatever the request would have been."""
    assert choose(demand(local=reason), [P0, D0], "never") == Pick(ServePath.LOCAL, PathReason.CONFIGURED_NEVER, None, D0)


@pytest.mark.parametrize("state", AWAY)
def test_no_ready_prefill_worker_is_a_reason_under_auto_and_a_refusal_under_always(state: WorkerState) -> None:
    """Only READY counts."""
    fleet = [seen("p0", state=state), D0]
    assert choose(demand(), fleet, "auto") == Pick(ServePath.LOCAL, PathReason.NO_READY_PREFILL, None, D0)
    with pytest.raises(NoReadyWorker) as refused:
        choose(demand(), fleet, "always")
    assert refused.value.role == "prefill"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("away", [*[seen("d0", state=state) for state in AWAY], seen("d0", model="other"), seen("d0", role=Role.PREFILL)])
def test_without_a_ready_decode_worker_there_is_nothing_to_wait_for(mode: Disaggregation, away: Loaded) -> None:
    """Every path needs decode: ready, in that role, of that model."""
    with pytest.raises(NoReadyWorker) as refused:
        choose(demand(), [P0, away], mode)
    assert refused.value.role == "decode"


@pytest.mark.parametrize("fleet", [[FULL_P0, D0], [P0, FULL_D0], [FULL_P0, FULL_D0], [P0, seen("d0", max_running=0)]])
def test_a_full_worker_is_waited_for(fleet: list[Loaded]) -> None:
    """A pair is granted whole or not at all: a full prefill pool never turns a request local."""
    assert choose(demand(), fleet, "auto") is None


def test_a_local_request_waits_for_decode() -> None:
    """A full decode pool is waited for on the local path too."""
    assert choose(demand(local=PathReason.MEDIA), [P0, FULL_D0], "auto") is None


@pytest.mark.parametrize(
    ("fleet", "pair"),
    [
        ([seen("p0", 1, 900), seen("p1", 3, 30), D0], ("p1", "d0")),
        ([seen("p0", 2, 50), seen("p1", 1, 50), D0], ("p1", "d0")),
        ([seen("p0", last_grant=7), seen("p1", last_grant=3), D0], ("p1", "d0")),
        ([P0, seen("d0", 2), seen("d1", 1)], ("p0", "d1")),
        ([P0, seen("d0", 2, max_running=8), seen("d1", 1, max_running=2)], ("p0", "d0")),
        ([P0, seen("d0", last_grant=2), seen("d1", last_grant=1)], ("p0", "d1")),
        ([FULL_P0, seen("p1", 3, 9000), D0], ("p1", "d0")),
    ],
    ids=["fewest tokens", "then share", "then the longest idle", "least share", "share not count", "decode takes turns", "full is out"],
)
def test_the_least_loaded_pair_is_picked(fleet: list[Loaded], pair: tuple[str, str]) -> None:
    """Prefill by the tokens it has to compute, decode by its share of leases; the fleet's order does not matter."""
    assert names(choose(demand(), fleet, "auto")) == pair
    assert names(choose(demand(), fleet[::-1], "auto")) == pair


@pytest.mark.parametrize(
    ("avoid", "pair"),
    [
        (("p0",), ("p1", "d0")),
        (("p0", "p1"), (None, "d0")),
        (("d0",), ("p0", "d1")),
        (("d0", "d1"), ("p0", "d0")),
    ],
    ids=["other prefill", "no prefill left: local", "other decode", "no other decode: the same again"],
)
def test_a_worker_that_failed_is_avoided(avoid: tuple[str, ...], pair: tuple[str | None, str]) -> None:
    """Prefill never again; decode again only when there is no other."""
    assert names(choose(demand(avoid=avoid), [P0, P1, D0, D1], "auto")) == pair


def test_a_busy_decode_worker_is_waited_for_rather_than_one_that_failed() -> None:
    """The other decode worker is full, yet the one that failed is not taken."""
    assert choose(demand(avoid=("d1",)), [P0, FULL_D0, D1], "auto") is None


@pytest.mark.parametrize(
    ("asked", "changes", "verdict", "reason"),
    [
        (demand(19), {}, Verdict.COLD, PathReason.SHORT_PROMPT),
        (demand(20), {}, Verdict.COLD, PathReason.DEFAULT),
        (demand(20), {}, Verdict.GIVES, PathReason.DEFAULT),
        (demand(20), {}, Verdict.COSTS, PathReason.COSTS_MORE),
        (demand(20), {"prefix": (1, 2, 3, 9), "prompt_bytes": 2048}, Verdict.COLD, PathReason.PREFIX_ON_DECODE),
        (demand(20), {"prefix": (1, 2, 8, 9), "prompt_bytes": 2048}, Verdict.COLD, PathReason.DEFAULT),
        (demand(19), {"local_reason": PathReason.MEDIA}, Verdict.COSTS, PathReason.MEDIA),
    ],
)
def test_auto_decides_for_each_request_and_always_does_not(
    asked: Demand, changes: dict[str, object], verdict: Verdict, reason: PathReason
) -> None:
    """Short, held by decode, too dear: each with its reason; under `always` only what cannot be disaggregated runs locally."""
    asked = replace(asked, **changes)  # type: ignore[arg-type]
    holder = seen("d0")
    holder.holdings.add((1, 2, 3, 4))
    workers = view([P0, holder], verdict=verdict)
    pick = choose_in(asked, workers, Policy("auto", local_below_tokens=20, local_prefix_share=0.75))
    assert pick is not None and pick.reason is reason
    always = choose_in(asked, workers, Policy("always", local_below_tokens=20, local_prefix_share=0.75))
    assert always is not None
    assert always.reason is (reason if reason is PathReason.MEDIA else PathReason.DEFAULT)


def test_a_worker_without_kv_room_is_passed_over() -> None:
    """It has leases left; prompt and answer do not fit on decode, or the prompt not on prefill."""
    asked = demand(40, output_tokens=30)
    tight = seen("d0", kv_tokens=40, kv_capacity_tokens=100)
    assert names(choose(asked, [P0, tight, seen("d1", 3)], "auto")) == ("p0", "d1")
    assert choose(asked, [P0, tight], "auto") is None
    assert choose(asked, [seen("p0", kv_tokens=70, kv_capacity_tokens=100), D0], "auto") is None
    assert names(choose(asked, [P0, seen("d0", kv_tokens=30, kv_capacity_tokens=100)], "auto")) == ("p0", "d0")
    assert names(choose(asked, [P0, seen("d0", kv_tokens=30, kv_capacity_tokens=0)], "auto")) == ("p0", "d0")


def test_decode_is_chosen_by_what_is_scarcer_there() -> None:
    """Leases or KV tokens."""
    fleet = [P0, seen("d0", 1, kv_tokens=900, kv_capacity_tokens=1000), seen("d1", 2, kv_tokens=10, kv_capacity_tokens=1000)]
    assert names(choose(demand(), fleet, "auto")) == ("p0", "d1")


def test_affinity_gives_way_to_load() -> None:
    """What a prefill worker holds is worth its tokens; what a decode worker holds, or being a session's home, a quarter of its leases."""
    asked = demand(40, prefix=(1, 2, 3, 4), prompt_bytes=2048)
    holder, idle = seen("p0", 1, 35), seen("p1")
    holder.holdings.add(asked.prefix)
    assert names(choose(asked, [holder, idle, D0], "always")) == ("p0", "d0")
    busier = seen("p0", 1, 45)
    busier.holdings.add(asked.prefix)
    assert names(choose(asked, [busier, idle, D0], "always")) == ("p1", "d0")
    for load, chosen in ((0, "d0"), (3, "d1")):
        decode = seen("d0", load)
        decode.holdings.add(asked.prefix)
        assert names(choose(asked, [P0, decode, seen("d1", last_grant=0)], "always")) == ("p0", chosen)


def test_a_session_comes_home_wherever_that_is() -> None:
    """The same worker each time, about as many sessions each, and few move when a worker comes."""
    three = [seen(f"d{index}") for index in range(3)]
    homes = {session: home_of(session, three).snapshot.worker_id for session in range(300)}
    assert homes == {session: home_of(session, three[::-1]).snapshot.worker_id for session in homes}
    assert all(70 < list(homes.values()).count(worker_id) < 130 for worker_id in ("d0", "d1", "d2"))
    moved = {session for session, home in homes.items() if home_of(session, [*three, seen("d3")]).snapshot.worker_id != home}
    assert len(moved) < 120
    for session in range(20):
        busy = [P0, *(seen(f"d{index}", 1) for index in range(3))]
        assert names(choose(demand(session=session), busy, "auto")) == ("p0", homes[session])


def refusing(*pairings: tuple[str | None, str | None]) -> Callable[[object, object], bool]:
    """Return breakers that refuse these, by worker id."""

    def refuses(prefill: object, decode: object) -> bool:
        ids = tuple(None if key is None else key[0] for key in (prefill, decode))  # type: ignore[index]
        return ids in pairings or (ids[0], None) in pairings or (None, ids[1]) in pairings

    return refuses


@pytest.mark.parametrize(
    ("refused", "auto", "always"),
    [
        ([("p0", None)], ("p1", "d0"), ("p1", "d0")),
        ([(None, "d0")], ("p0", "d1"), ("p0", "d1")),
        ([("p0", "d0")], ("p1", "d0"), ("p1", "d0")),
        ([("p0", "d0"), ("p1", "d0")], ("p0", "d1"), ("p0", "d1")),
        ([("p0", None), ("p1", None)], (None, "d0"), ("p0", "d0")),
        ([(None, "d0"), (None, "d1")], (None, "d0"), ("p0", "d0")),
    ],
)
def test_a_pairing_that_fails_is_not_used_while_there_is_a_better_one(
    refused: list[tuple[str | None, str | None]], auto: tuple[str | None, str], always: tuple[str | None, str]
) -> None:
    """Another worker, another pair, decode alone with its reason; `always` and a lone decode pool take what there is."""
    fleet = [seen("p0"), seen("p1", last_grant=1), seen("d0"), seen("d1", last_grant=1)]
    workers = view(fleet, refuses=refusing(*refused))
    for mode, pair in (("auto", auto), ("always", always)):
        pick = choose_in(demand(), workers, Policy(mode))  # type: ignore[arg-type]
        assert pick is not None and names(pick) == pair
        assert (pick.reason is PathReason.BREAKER_OPEN) == (pair[0] is None)


def test_a_full_worker_is_waited_for_rather_than_one_whose_breaker_is_open() -> None:
    """The pair that may be used has no room now."""
    assert choose_in(demand(), view([P0, FULL_D0, D1], refuses=refusing((None, "d1"))), Policy()) is None
    assert choose_in(demand(), view([FULL_P0, seen("p1"), D0], refuses=refusing(("p1", None))), Policy()) is None
    assert choose_in(demand(), view([FULL_P0, seen("p1"), D0], refuses=refusing(("p1", "d0"))), Policy()) is None
