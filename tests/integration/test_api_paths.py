"""Which paths exist: those of the router, questions that any worker answers, and nothing else of what an engine's own server has."""

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from router_rig import CHAT, RESPONSES, Rig, rig
from yarl import URL

from pdserve.server import questions
from pdserve.testing.fake_worker import Fault, Script, fleet
from pdserve.types import Role, WorkerState

CONTROLS = (
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/start_profile",
    "/stop_profile",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/init_weight_transfer_engine",
    "/update_weights",
    "/get_world_size",
    "/server_info",
    "/load",
    "/ping",
    "/tokenizer_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/invocations",
    "/inference/v1/generate",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses-render",
    "/v1/messages/render",
    "/v1/messages/batches",
    "/v1/chat/completions/batch",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/derender",
    "/pdserve/v1/abort",
    "/pdserve/v1/status",
    "/pdserve/v1/peers",
    "/pdserve/v1/records",
    "/admin/v1/fleet",
    "/docs",
    "/redoc",
)
TRICKS = (
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/chat/completions/",
    "/v1/chat%2fcompletions",
    "/v1/chat%2Fcompletions",
    "/v1/./chat/completions",
    "/v1/x/../chat/completions",
    "/v1/chat/completions/..",
    "/V1/chat/completions",
    "/v1/Chat/Completions",
    "/v1/chat/completions;x",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/%76%31/chat/completions",
    "/v1/chat\\completions",
    "/tokenize/",
    "/Tokenize",
    "/tokenize/../sleep",
    "/tokenize%2f..%2fsleep",
    "/v1/messages/",
    "/v1/messages//count_tokens",
    "/v1/messages/count_tokens/",
    "/v1/responses/..%2f..%2fsleep",
    "/v1/models/../../sleep",
    "/v1/models/..%2f..%2fsleep",
    "/v1/models/..%2f..%2fmetrics",
)


async def ask(r: Rig, method: str, path: str, **options: Any) -> tuple[int, Any]:
    """Send to a path as it is written; returns status and parsed body."""
    async with r.client.request(method, URL(r.url + path, encoded=True), **options) as answer:
        return answer.status, await answer.json()


async def test_nothing_else_of_an_engines_server_is_reachable() -> None:
    """Control endpoints, the agent's routes, and every spelling of a path that is not the path: 404, and no worker hears of any."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt": "x", "input": "x"}
    async with rig() as r:
        asked_before = {path for worker in r.workers for path in worker.paths}
        for path in (*CONTROLS, *TRICKS):
            for method in ("GET", "POST", "PUT", "DELETE"):
                status, answer = await ask(r, method, path, json=body if method == "POST" else None)
                assert status in (404, 405), (method, path)
                assert method != "POST" or status == 404 or path.startswith("/v1/models/"), path
                assert answer["error"]["message"]
        assert r.legs == []
        asked = {path for worker in r.workers for path in worker.paths} - asked_before
        assert asked <= {"/pdserve/v1/records"}


async def test_stored_responses_do_not_exist_and_the_reason_is_told() -> None:
    """Read, delete, cancel and list items: 404 that says that nothing is stored."""
    async with rig() as r:
        for method, path in (
            ("GET", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1?stream=true"),
            ("DELETE", "/v1/responses/resp_1"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("GET", "/v1/responses/resp_1/input_items"),
        ):
            status, answer = await ask(r, method, path)
            assert status == 404
            assert answer["error"]["param"] == "response_id"
            assert "keeps no responses" in answer["error"]["message"]
        assert (await ask(r, "GET", RESPONSES))[0] == 405


async def test_wrong_methods_on_messages_speak_anthropic() -> None:
    """405 in the shape that the path's clients read."""
    async with rig() as r:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, answer = await ask(r, "GET", path)
            assert (status, answer["type"]) == (405, "error")
            assert answer["error"]["type"] == "invalid_request_error"


async def test_models_are_those_of_all_workers_each_once() -> None:
    """Two models on four workers are two entries, the shortest length of each; one of them by its name, slashes and all."""
    async with rig(prefills=2, decodes=2) as r:
        r.version += 1
        snapshots = [worker.snapshot(Role.PREFILL if worker in r.prefills else Role.DECODE) for worker in r.workers]
        models = ("a", "org/b", "a", "org/b")
        lengths = (4096, 1000, 2048, 3000)
        named = [replace(s, model=m, max_model_len=n) for s, m, n in zip(snapshots, models, lengths, strict=True)]
        await r.put_workers(fleet(r.version, *named))
        _, listed = await ask(r, "GET", "/v1/models")
        assert {card["id"]: card["max_model_len"] for card in listed["data"]} == {"a": 2048, "org/b": 1000}
        for path in ("/v1/models/org/b", "/v1/models/org%2Fb"):
            assert await ask(r, "GET", path) == (200, next(card for card in listed["data"] if card["id"] == "org/b"))
        for path in ("/v1/models/c", "/v1/models/", "/v1/models/org"):
            assert (await ask(r, "GET", path))[0] == 404


QUESTIONS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "x"}]},
}
QUESTION = pytest.mark.parametrize("path", QUESTIONS)


@QUESTION
async def test_a_question_goes_to_one_worker_without_a_ticket_or_a_lease(path: str) -> None:
    """The body as it came, the answer as the worker gave it, and a receipt that says what it was."""
    async with rig() as r:
        status, answer = await ask(r, "POST", path, json=QUESTIONS[path])
        (leg,) = r.legs
        assert status == 200
        assert answer.keys() & {"count", "prompt", "input_tokens"}
        assert (leg.path, leg.body, leg.side) == (path, QUESTIONS[path], None)
        (receipt,) = await r.receipts(1)
        assert (receipt.route, receipt.path, receipt.reason, receipt.outcome, receipt.attempts) == (path, "none", "question", "finished", 0)


@QUESTION
async def test_a_question_needs_any_healthy_worker(path: str) -> None:
    """A prefill worker alone can answer; a worker that is not ready is not asked; without any it is 503."""
    async with rig() as r:
        await r.put_fleet(decode_0=WorkerState.WARMING)
        assert (await ask(r, "POST", path, json=QUESTIONS[path]))[0] == 200
        assert len(r.prefills[0].legs) == 1
        await r.put_fleet(decode_0=WorkerState.WARMING, prefill_0=WorkerState.DRAINING)
        status, answer = await ask(r, "POST", path, json=QUESTIONS[path])
        assert status == 503
        assert "ready" in answer["error"]["message"]
        assert r.decodes[0].legs == []


@QUESTION
async def test_a_question_is_asked_again_where_a_worker_is_lost(path: str) -> None:
    """One lost worker costs nothing; a worker's own refusal is the answer, in the API's shape."""
    async with rig() as r:
        r.prefills[0].scripts = r.decodes[0].scripts = deque([Script(fault=Fault.RESET)])
        assert (await ask(r, "POST", path, json=QUESTIONS[path]))[0] == 200
        assert [leg.ended for leg in r.legs].count("faulted") == 1
        for worker in r.workers:
            worker.script = Script(status=400)
        status, answer = await ask(r, "POST", path, json=QUESTIONS[path])
        assert (status, answer["error"]["message"]) == (400, "scripted 400")
        assert ("type" in answer) is path.startswith("/v1/messages")


async def test_questions_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never crowd out requests: one too many is told to come back."""
    monkeypatch.setattr(questions, "MAX_ASKED", 2)
    async with rig() as r:
        for worker in r.workers:
            worker.script = Script(head_delay_s=0.5)
        answers = await asyncio.gather(*(ask(r, "POST", "/tokenize", json=QUESTIONS["/tokenize"]) for _ in range(3)))
        assert sorted(status for status, _ in answers) == [200, 200, 503]
        assert (await ask(r, "POST", "/tokenize", json=QUESTIONS["/tokenize"]))[0] == 200


async def test_a_question_prefers_the_worker_with_less_to_do() -> None:
    """Whoever serves requests is asked last."""
    async with rig() as r:
        r.decodes[0].script = Script(token_delay_s=0.3)
        stream = asyncio.create_task(r.stream(CHAT, n=2))
        while not r.decodes[0].legs:
            await asyncio.sleep(0.01)
        await ask(r, "POST", "/tokenize", json=QUESTIONS["/tokenize"])
        assert [leg.path for leg in r.prefills[0].legs] == ["/tokenize"]
        await stream
