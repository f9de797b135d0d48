"""The controller's own request: a prompt that every model has, one token, and nobody at the other end."""

import asyncio
from os import urandom

from starlette.types import Message

from pdserve.server.api.request import ClientRequest, Route
from pdserve.types import WorkerSnapshot

TIMEOUT_S = 50.0
"""a cold engine compiles on its first token; the controller waits a little longer than this"""
PROMPT_BLOCKS = 2
FIRST_TOKEN_ID = 3
TOKEN_IDS = 64
"""ids from `FIRST_TOKEN_ID` on that the prompt is made of; any vocabulary has them"""


def canary_request(worker: WorkerSnapshot) -> ClientRequest:
    """Return a request of a bit over two blocks, salted so that no cache can serve it."""
    block_tokens = worker.block_tokens or 16
    length_tokens = max(1, min(PROMPT_BLOCKS * block_tokens + 1, worker.max_model_len - 1))
    prompt = [FIRST_TOKEN_ID + index % TOKEN_IDS for index in range(length_tokens)]
    body = {"model": worker.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": urandom(16).hex()}
    return ClientRequest(
        route=Route.COMPLETIONS,
        body=body,
        model=worker.model,
        max_model_len=worker.max_model_len,
        stream=False,
        include_usage=False,
        prompt_bytes=0,
        prompt_tokens=length_tokens,
        local_reason=None,
    )


async def stay() -> Message:
    """ASGI `receive` of a client that never leaves."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def discard(_message: Message) -> None:
    """ASGI `send` to nobody."""
