"""What clients get through two engines is what one engine would have given: over every field that tokens, their end or their count depend on."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_answers import COMPLETIONS, ask, same
from api_matrix import MATRIX, REFUSED, REFUSED_BY_DECODE, Case
from engine_requests import MODEL, tokens
from engines import Pair
from serving import Router, running_router

from pdserve.config import load_config
from pdserve.types import ServePath

TRANSFER_S = 3.0
"""time of a transfer that nobody will take"""
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean")]


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "router.disaggregation": "always"})
    with running_router(pair, config, tmp_path_factory.mktemp("router")) as running:
        yield running


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


def run(pair: Pair, router: Router, streams: tuple[bool, ...]) -> None:
    wrong: dict[str, list[object]] = {}
    for number, case in enumerate(MATRIX):
        for stream in streams if len(streams) > 1 else (streams[0] ^ bool(number % 2),):
            found = differences(pair, router, case, stream=stream)
            if found:
                wrong[f"{case.name} on {case.path}, {'stream' if stream else 'whole'}"] = found
    assert not wrong, "\n".join(f"{what}: {found}" for what, found in wrong.items())


def test_answers_equal_the_aggregated_engines(pair: Pair, router: Router) -> None:
    """Text, tool calls, logprobs, finish reason, usage and errors; every other request is a stream."""
    run(pair, router, (False,))


@pytest.mark.long
def test_answers_equal_the_aggregated_engines_streamed_and_whole(pair: Pair, router: Router) -> None:
    """The whole matrix, each request in both forms."""
    run(pair, router, (False, True))


@pytest.mark.parametrize("room", [1, pytest.param(3, marks=pytest.mark.long)])
def test_at_the_models_limit_the_answer_ends_where_the_engines_does(pair: Pair, router: Router, room: int) -> None:
    """A prompt that leaves room for a few tokens and no limit of its own: the same tokens, `length`, the same count."""
    length = pair.decode.status().max_model_len - room
    fields = {"prompt": tokens(length, seed=9100 + room), "max_tokens": None, "ignore_eos": True}
    assert differences(pair, router, Case("limit", COMPLETIONS, fields), stream=room == 1) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_only_decode_refuses_is_refused_once_and_leaves_nothing_on_prefill(pair: Pair, tmp_path: Path, stream: bool) -> None:
    """Prefill may have computed the prompt by then; its blocks are free again at the latest when the transfer's time is over."""
    free = pair.prefill.status().blocks_free
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "kv.transfer_timeout_s": TRANSFER_S})
    with running_router(pair, config, tmp_path) as router:
        wrong = {case.name: found for case in REFUSED_BY_DECODE if (found := differences(pair, router, case, stream=stream))}
    assert wrong == {}
    pair.prefill.wait_blocks(free, timeout_s=TRANSFER_S + 5)
