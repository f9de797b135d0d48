"""The table of the public APIs, and the way from a body's bytes to a request that may be served."""

from collections.abc import Mapping

from pdserve.server.api.chat import Chat
from pdserve.server.api.completions import Completions
from pdserve.server.api.dialect import Dialect
from pdserve.server.api.fields import check_types, load
from pdserve.server.api.messages import Messages
from pdserve.server.api.request import ClientRequest, Limits, Route, served_model
from pdserve.server.api.responses import Responses

DIALECTS: Mapping[Route, Dialect] = {dialect.route: dialect for dialect in (Chat(), Completions(), Responses(), Messages())}


def parse(route: Route, raw: bytes, limits: Limits) -> ClientRequest:
    """Parse and check a body.

    Raises:
        RequestError: 400, or 404 for an unknown model; names the field.
    """
    dialect = DIALECTS[route]
    body = load(raw)
    check_types(body, dialect.rules)
    model = served_model(body, limits)
    max_model_len = limits.models[model]
    prompt = dialect.read(body, limits, max_model_len)
    return ClientRequest(
        route=route,
        body=body,
        model=model,
        max_model_len=max_model_len,
        stream=bool(body.get("stream")),
        include_usage=dialect.includes_usage(body),
        prompt_bytes=prompt.text_bytes,
        prompt_tokens=prompt.tokens,
        local_reason=dialect.local_reason(body, prompt, max_model_len),
    )
