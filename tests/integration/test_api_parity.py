"""What clients get through two engines is what one engine would have given: over every field that tokens, their end or their count depend on."""

from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import pytest
from api_answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ask
from api_matrix import BASE, BRIEF, MATRIX, REFUSED_BY_DECODE, Case
from api_parity import all_equal, differences
from engine_requests import MODEL, tokens
from engines import Pair
from serving import Router, running_router

from pdserve.config import load_config

TRANSFER_S = 3.0
"""time of a transfer that nobody will take"""
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean")]


@pytest.fixture(scope="module")
def router(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "router.disaggregation": "always"})
    with running_router(pair, config, tmp_path_factory.mktemp("router")) as running:
        yield running


def test_answers_equal_the_aggregated_engines(pair: Pair, router: Router) -> None:
    """Text, tool calls, logprobs, finish reason, usage and errors; every other request is a stream."""
    all_equal(pair, router, zip(BRIEF, cycle((False, True))))


@pytest.mark.long
def test_answers_equal_the_aggregated_engines_streamed_and_whole(pair: Pair, router: Router) -> None:
    """The whole matrix, each request in both forms."""
    all_equal(pair, router, product(MATRIX, (False, True)))


@pytest.mark.long
@pytest.mark.parametrize("room", [1, 3])
def test_at_the_models_limit_the_answer_ends_where_the_engines_does(pair: Pair, router: Router, room: int) -> None:
    """A prompt that leaves room for a few tokens and no limit of its own: the same tokens, `length`, the same count."""
    length = pair.decode.status().max_model_len - room
    fields = {"prompt": tokens(length, seed=9100 + room), "max_tokens": None, "ignore_eos": True}
    assert differences(pair, router, Case("limit", COMPLETIONS, fields), stream=room == 1) == []


@pytest.mark.parametrize(
    ("path", "field", "stop"),
    [
        (CHAT, "max_tokens", "stop"),
        pytest.param(CHAT, "max_completion_tokens", "stop", marks=pytest.mark.long),
        pytest.param(COMPLETIONS, "max_tokens", "stop", marks=pytest.mark.long),
        pytest.param(RESPONSES, "max_output_tokens", "stop", marks=pytest.mark.long),
        (MESSAGES, "max_tokens", "stop_sequences"),
    ],
)
def test_an_output_limit_about_the_models_length_is_taken_as_the_engine_takes_it(
    pair: Pair, router: Router, path: str, field: str, stop: str
) -> None:
    """Up to that length it is cut to what the prompt leaves; beyond it, both refuse it, the router by the name that the client gave it."""
    length = pair.decode.status().max_model_len
    base = {**BASE[path], "max_tokens": None, stop: ["T", "A", "P", " "]}
    for count in (length - 1, length):
        case = Case(f"{field} {count}", path, {**base, field: count})
        assert differences(pair, router, case, stream=count == length) == []
    for count in (0, length + 1, 2**31):
        body = Case(f"{field} {count}", path, {**base, field: count}).body("salt", stream=False)
        alone, through = (ask(client, path, body) for client in (pair.decode.client, router.public))
        assert (alone["refused"], through["refused"]) == (400, 400)
        assert field in through["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_only_decode_refuses_is_refused_once_and_leaves_nothing_on_prefill(pair: Pair, tmp_path: Path, stream: bool) -> None:
    """Prefill may have computed the prompt by then; its blocks are free again at the latest when the transfer's time is over."""
    free = pair.prefill.status().blocks_free
    config = load_config(overrides={"router.port": 0, "served_model_name": MODEL, "kv.transfer_timeout_s": TRANSFER_S})
    with running_router(pair, config, tmp_path) as router:
        wrong = {case.name: found for case in REFUSED_BY_DECODE if (found := differences(pair, router, case, stream=stream))}
    assert wrong == {}
    pair.prefill.wait_blocks(free, timeout_s=TRANSFER_S + 5)
