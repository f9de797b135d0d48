"""The bodies of the two legs: prefill's is built, decode's is the client's own.

Patching a copy of the client's body for prefill breaks with every field that makes sense for the whole request only (`min_tokens`,
`stream_options`, `n`, …). So prefill gets an allow-list, one per API: the fields that decide which tokens the prompt becomes and which cache entries
it may share. One field too few and the two engines hold different prompts for one ticket, which the KV layer refuses as `prompt_mismatch`.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from pdserve.errors import RequestError
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.request import ClientRequest
from pdserve.types import Ticket, TransferSide


def prefill_body(request: ClientRequest, ticket: Ticket, leg_id: str) -> bytes:
    """Return the prefill leg's body: this prompt, one token. Raises `RequestError`.

    Args:
        leg_id: what both engines call this attempt.
    """
    fields = DIALECTS[request.route].prefill(request.body, leg_id)
    return _encode({**fields, "kv_transfer_params": {**ticket.params(TransferSide.SEND), **_rendered(request)}})


def decode_body(request: ClientRequest, ticket: Ticket | None, leg_id: str) -> bytes:
    """Return the decode leg's body: the client's own, with the ticket if there is one.

    Raises:
        RequestError: 400, the body is nested deeper than it can be encoded (254 levels).
    """
    fields = DIALECTS[request.route].decode(request, leg_id)
    params = {**({} if ticket is None else ticket.params(TransferSide.RECEIVE)), **_rendered(request)}
    if params:
        fields["kv_transfer_params"] = params
    return _encode(fields)


def _rendered(request: ClientRequest) -> Mapping[str, Any]:
    """Return what has an engine take token ids for the prompt (vLLM 0.32 does for chat, without rendering the messages)."""
    return {} if request.prompt_ids is None else {"prompt_token_ids": request.prompt_ids}


def _encode(fields: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:
        raise RequestError(400, "the body is nested too deeply", None, "invalid_json") from error
