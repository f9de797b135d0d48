"""The OpenAPI document is true: whatever it allows or forbids, no answer is a server's error, and each is of the documented kind."""

import asyncio
from typing import Any

import hypothesis
import pytest
import schemathesis
from engine_requests import MODEL
from engines import Pair
from router_rig import rig
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from serving import Router, running_router

from pdserve.config import load_config
from pdserve.server.api.request import Route

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
EXAMPLES_IN_CI = 25
LONG_EXAMPLES = 60
CANNOT_BE_WRONG = frozenset(
    {f"GET {path}" for path in ("/v1/models", "/v1/models/{model}", "/version", "/health", "/livez", "/readyz", "/metrics")}
)
"""operations that take nothing, or any name"""
STREAMING = frozenset(route.value for route in Route)


def fuzz(url: str, examples: int, checks: tuple[Any, ...], mode: schemathesis.GenerationMode) -> None:
    """Send requests to every operation, all of one operation before the next."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.generation.update(modes=[mode])
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
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.label in CANNOT_BE_WRONG:
            continue

        @settings
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def holds(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=60)
            if mode is schemathesis.GenerationMode.POSITIVE and case.path in STREAMING:
                # Few generated ones are streams.
                case.body = {**case.body, "stream": True}
                case.call_and_validate(checks=checks, timeout=60)

        holds()


@pytest.mark.parametrize("mode", schemathesis.GenerationMode)
async def test_generated_requests_get_documented_answers(mode: schemathesis.GenerationMode) -> None:
    """Valid or not: no 5xx, only documented statuses, types and shapes; what the document forbids is refused, and workers live on."""
    checks = CHECKS if mode is schemathesis.GenerationMode.POSITIVE else (*CHECKS, negative_data_rejection)
    async with rig() as r:
        await asyncio.to_thread(fuzz, r.url, EXAMPLES_IN_CI, checks, mode)
        assert (await r.post())[0] == 200


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
        fuzz(router.url, LONG_EXAMPLES, CHECKS, mode)
        assert _serves(router)


def _serves(router: Router) -> bool:
    answer = router.public.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 2})
    return answer.status_code == 200
