"""The public routes as an OpenAPI document, made of what the dialects check.

It says what this router refuses by itself. Fields that it does not read pass to the engine, which may refuse them too; those are not listed.
"""

from collections.abc import Mapping
from typing import Any

from pdserve import __version__
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.endpoints import ENDPOINTS, dialect_of
from pdserve.server.api.fields import INTERNAL_ARGUMENTS, INTERNAL_FIELDS, Rule
from pdserve.server.api.questions import Question
from pdserve.server.api.request import Limits, Route

Schema = dict[str, Any]
_ANY_OBJECT: Schema = {"type": "object"}
_OPENAI_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type"], "properties": {"message": {"type": "string"}}}},
}
_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"message": {"type": "string"}}},
    },
}
_OPENAI_EVENT: Schema = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": "application/json", "contentSchema": _ANY_OBJECT}]}
    },
}
_NAMED_EVENT: Schema = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
        },
    },
}
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
_OPTIONS_NEED_A_STREAM: Schema = {
    "if": {"not": {"required": ["stream"], "properties": {"stream": {"const": True}}}},
    "then": {"properties": {"stream_options": {"type": ["object", "null"], "maxProperties": 0}}},
}
_TEXT_OR_MESSAGES: list[Schema] = [
    {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
    {"required": ["messages"], "properties": {"messages": {"type": "array", "minItems": 1}}},
]
_SUMMARIES = {
    Route.CHAT.value: "Answer a conversation",
    Route.COMPLETIONS.value: "Continue a text",
    Route.RESPONSES.value: "Answer a conversation; nothing is stored",
    Route.MESSAGES.value: "Answer a conversation, Anthropic's form",
    "/v1/messages/count_tokens": "Count the tokens of a conversation, Anthropic's form",
    "/tokenize": "Turn a text or a conversation into token ids",
    "/detokenize": "Turn token ids into text",
}


def openapi(limits: Limits) -> Schema:
    """Return the document for what is served now."""
    paths: dict[str, Any] = {path: {"post": _post(path, limits)} for path in ENDPOINTS}
    stored = {"404": _answer({_JSON: _OPENAI_ERROR}, "Nothing is stored")}
    identified = [
        {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"}}
    ]
    named = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    paths |= {
        "/v1/responses/{response_id}": {
            "get": {"summary": "Refused", "parameters": identified, "responses": stored},
            "delete": {"summary": "Refused", "parameters": identified, "responses": stored},
        },
        "/v1/responses/{response_id}/cancel": {"post": {"summary": "Refused", "parameters": identified, "responses": stored}},
        "/v1/models": {"get": _get("The served models", {_JSON: _ANY_OBJECT})},
        "/v1/models/{model}": {"get": _get("One served model", {_JSON: _ANY_OBJECT}, "404", parameters=named)},
        "/version": {"get": _get("This router's version", {_JSON: _ANY_OBJECT})},
        "/health": {"get": _get("Whether any request could be served now", {}, "503")},
        "/livez": {"get": _get("Whether the process turns", {})},
        "/readyz": {"get": _get("Whether requests can be disaggregated now", {_JSON: _ANY_OBJECT}, "503")},
        "/metrics": {"get": _get("Prometheus metrics of the router", {_TEXT: {"type": "string"}})},
    }
    # 3.2 is the first version that can say what an event of a stream is.
    return {"openapi": "3.2.0", "info": {"title": "pdserve", "version": __version__}, "paths": paths}


def _post(path: str, limits: Limits) -> Schema:
    endpoint = ENDPOINTS[path]
    dialect = dialect_of(endpoint)
    success = _answer({_JSON: _ANY_OBJECT}, "The answer")
    if not isinstance(endpoint, Question):
        success["content"][_EVENTS] = {"itemSchema": _OPENAI_EVENT if dialect.stream_end else _NAMED_EVENT}
    error = {_JSON: _ANTHROPIC_ERROR if dialect is DIALECTS[Route.MESSAGES] else _OPENAI_ERROR}
    return {
        "summary": _SUMMARIES[path],
        "requestBody": {"required": True, "content": {_JSON: {"schema": _body(endpoint, limits)}}},
        "responses": {"200": success, "4XX": _answer(error, "Refused"), "5XX": _answer(error, "Failed")},
    }


def _body(endpoint: Route | Question, limits: Limits) -> Schema:
    known = endpoint if isinstance(endpoint, Question) else DIALECTS[endpoint]
    properties = {name: rule.schema for name, rule in known.rules.items()} | {name: dict(schema) for name, schema in known.required.items()}
    if "model" in properties:
        names = sorted(limits.models)
        properties["model"] = {"enum": names if "model" in known.required or len(names) > 1 else [*names, None]}
    if "vllm_xargs" in properties:
        properties["vllm_xargs"] |= {"propertyNames": {"not": {"enum": sorted(INTERNAL_ARGUMENTS)}}}
    schema: Schema = {
        "type": "object",
        "properties": properties,
        "required": sorted({*known.required, *(("model",) if len(limits.models) > 1 else ())}),
        "propertyNames": {"not": {"enum": sorted(INTERNAL_FIELDS)}},
    }
    if isinstance(endpoint, Question):
        return schema | ({"anyOf": _TEXT_OR_MESSAGES} if endpoint.path == "/tokenize" else {})
    properties |= {name: dict(schema) for name, schema in DIALECTS[endpoint].refused.items()}
    for name, (least, most) in DIALECTS[endpoint].ranges(limits).items():
        properties[name] |= {"minimum": least, "maximum": most}
    return schema | (_OPTIONS_NEED_A_STREAM if _needs_stream(known.rules) and endpoint is not Route.RESPONSES else {})


def _needs_stream(rules: Mapping[str, Rule]) -> bool:
    return "stream_options" in rules


def _get(summary: str, content: Schema, *others: str, parameters: list[Schema] | None = None) -> Schema:
    responses = {"200": _answer(content, summary), **{status: _answer({}, "Not so") for status in others}}
    return {"summary": summary, "responses": responses, **({"parameters": parameters} if parameters else {})}


def _answer(content: Schema, description: str) -> Schema:
    told: Schema = {"description": description}
    if content:
        told["content"] = {kind: {"schema": schema} for kind, schema in content.items()}
    return told
