"""The OpenAPI document is true: whatever it allows or forbids, no answer is a server's error, and each is of the documented kind."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import schemathesis
from engine_requests import MODEL
from engines import Pair
from router_rig import Rig, rig
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from serving import Router, running_router

from pdserve.config import load_config

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
EXAMPLES_IN_CI = 25
LONG_EXAMPLES = 60
START_S = 30.0


@contextmanager
def rig_in_thread() -> Iterator[Rig]:
    """Run a router over fake workers in a loop of its own: the generator of requests is synchronous."""
    made: list[Rig] = []
    started, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with rig() as r:
            made.append(r)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(START_S)
        yield made[0]
    finally:
        stop.set()
        thread.join(START_S)
    assert not thread.is_alive()


def fuzz(url: str, examples: int, checks: tuple[Any, ...], modes: list[Any]) -> None:
    """Send requests to every operation, all of one operation before the next."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.generation.update(modes=modes)
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy(generation_mode=modes[0]))
        def holds(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=60)

        holds()


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_generated_requests_get_documented_answers(mode: schemathesis.GenerationMode) -> None:
    """Valid or not: no 5xx, only documented statuses, types and shapes; what the document forbids is refused, and workers live on."""
    checks = CHECKS if mode is schemathesis.GenerationMode.POSITIVE else (*CHECKS, negative_data_rejection)
    with rig_in_thread() as r:
        fuzz(r.url, EXAMPLES_IN_CI, checks, [mode])
        assert r.legs


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
def test_generated_requests_do_real_engines_no_harm(
    pair: Pair, mode: schemathesis.GenerationMode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same against vLLM: no 5xx, and both engines still answer, with every block free."""
    config = load_config(
        overrides={"router.port": 0, "served_model_name": MODEL, "kv.transfer_timeout_s": 5, "limits.max_output_tokens": 8}
    )
    with running_router(pair, config, tmp_path_factory.mktemp("router")) as router:
        fuzz(router.url, LONG_EXAMPLES, CHECKS, [mode])
        assert _serves(router)


def _serves(router: Router) -> bool:
    answer = router.public.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 2})
    return answer.status_code == 200
