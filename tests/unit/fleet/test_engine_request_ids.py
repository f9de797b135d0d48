"""The router's id of a request is found again in what vLLM calls it, whichever API it came by."""

import pytest

from pdserve.fleet.agent import engine_request_ids
from pdserve.server.api.responses import engine_id

LEG = "0af3" * 8 + "-2"
LIVE = {
    f"chatcmpl-{LEG}": 0,
    f"cmpl-{LEG}-0": 0,
    f"cmpl-{LEG}-11": 0,
    f"{engine_id(LEG)}_0": 0,
    f"{engine_id(LEG)}_3": 0,
}
OTHERS = {f"chatcmpl-{LEG}1": 0, f"cmpl-{LEG}1-0": 0, f"{engine_id(LEG)}1_0": 0, "resp_": 0, "resp_x": 0, "": 0, "cmpl-": 0, "x-y": 0}


@pytest.mark.parametrize("engine_request_id", LIVE)
def test_each_form_of_an_id_is_recognised(engine_request_id: str) -> None:
    """Chat and messages, completions with any number of prompts, responses in any turn; nothing that merely looks alike."""
    assert engine_request_ids({engine_request_id: 0, **OTHERS}, [LEG]) == [engine_request_id]


def test_one_id_ends_all_that_was_made_of_it() -> None:
    """Several prompts of one request are several requests to the engine."""
    assert set(engine_request_ids({**LIVE, **OTHERS}, ["other", LEG])) == set(LIVE)
    assert engine_request_ids({**LIVE, **OTHERS}, []) == []
