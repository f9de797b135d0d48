"""One request sent both ways: to an engine alone and through the router. Says what is not the same."""

import secrets
from collections.abc import Iterable

from api_answers import ask, same
from api_matrix import REFUSED, REFUSED_BY_DECODE, Case
from engines import Pair
from serving import Router

from pdserve.types import ServePath


def differences(pair: Pair, router: Router, case: Case, *, stream: bool) -> list[object]:
    """Send one request both ways; returns what is not as it must be."""
    salt, request_id = secrets.token_hex(8), secrets.token_hex(8)
    alone = ask(pair.decode.client, case.path, case.body(f"{salt}-alone", stream=stream))
    through = ask(router.public, case.path, case.body(salt, stream=stream), {"x-request-id": request_id})
    found: list[object] = [] if same(through, alone) else [(through, alone)]
    if ("refused" in through) != (case in (*REFUSED, *REFUSED_BY_DECODE)):
        found.append(f"refused or not: {through}")
    if "refused" not in through:
        receipt = router.receipt(request_id)
        expected = (ServePath.DISAGGREGATED, "default") if case.reason is None else (ServePath.LOCAL, case.reason)
        if (receipt.path, receipt.reason) != expected or receipt.attempts > 1:
            found.append((receipt.path, receipt.reason, receipt.attempts))
    return found


def all_equal(pair: Pair, router: Router, cases: Iterable[tuple[Case, bool]]) -> None:
    """Send each request both ways, as a stream or whole; fails with all that differs."""
    wrong: dict[str, list[object]] = {}
    for case, stream in cases:
        if found := differences(pair, router, case, stream=stream):
            wrong[f"{case.name} on {case.path}, {'stream' if stream else 'whole'}"] = found
    assert not wrong, "\n".join(f"{what}: {found}" for what, found in wrong.items())
