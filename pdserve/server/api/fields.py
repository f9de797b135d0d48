"""Types of a body's fields: checked here, shown in the OpenAPI document, said in errors. Knows no API."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import orjson

from pdserve.errors import RequestError

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", NoneType: "null"}


@dataclass(frozen=True, slots=True)
class Rule:
    """The JSON types that a field may have; null counts as absent."""

    types: frozenset[type]
    expected: str
    """how to say so"""
    items: "Rule | None" = None
    """of an array"""

    def allows(self, value: object) -> bool:
        """Say whether `value` is of this type, items included."""
        if type(value) not in self.types:
            return False
        return self.items is None or not isinstance(value, list) or all(self.items.allows(item) for item in value)

    @property
    def schema(self) -> dict[str, Any]:
        """The rule as JSON Schema."""
        types = sorted(_JSON_TYPES[kind] for kind in self.types)
        if "number" in types and "integer" in types:
            types.remove("integer")
        schema: dict[str, Any] = {"type": types}
        if self.items is not None:
            schema["items"] = self.items.schema
        return schema


def _rule(expected: str, *types: type, items: Rule | None = None) -> Rule:
    return Rule(frozenset({*types, NoneType}), expected, items)


MAX_INT = 2**63 - 1
"""of what engines hold integers in"""
_ONE_STRING = Rule(frozenset({str}), "a string")
STR = _rule("a string", str)
INT = _rule("an integer", int)
BOOL = _rule("a boolean", bool)
OBJECT = _rule("an object", dict)
ARRAY = _rule("an array", list)
NUMBER = _rule("a number", int, float)
TEXT_OR_ARRAY = _rule("a string or an array", str, list)
STRINGS = _rule("an array of strings", list, items=_ONE_STRING)
STOP = _rule("a string or an array of strings", str, list, items=_ONE_STRING)

INTERNAL_FIELDS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("data_parallel_rank", "disagg_prefill_dp_rank"),
    }
)
"""how routers talk to engines: a client that may send them chooses whom an engine connects to"""
INTERNAL_ARGUMENTS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""the same by way of `vllm_xargs`, which the engine merges with them"""


def load(raw: bytes) -> dict[str, Any]:
    """Parse a body. Raises `RequestError`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object", None, "invalid_json")
    return body


def check_types(body: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Check every field that has a rule, and that none is there which clients may not send. Raises `RequestError`.

    An integer written as 5.0 becomes 5: JSON knows no difference, and engines make none.
    """
    for field in INTERNAL_FIELDS.intersection(body):
        raise _not_for_clients(field)
    for field, value in body.items():
        rule = rules.get(field)
        if rule is None or rule.allows(value):
            continue
        if int not in rule.types or type(value) is not float or not value.is_integer() or abs(value) > MAX_INT:
            raise wrong_type(field, rule.expected)
        body[field] = int(value)
    for field in INTERNAL_ARGUMENTS.intersection(body.get("vllm_xargs") or ()):
        raise _not_for_clients(f"vllm_xargs.{field}")


def check_range(body: Mapping[str, Any], field: str, least: int, most: int, code_above: str = "invalid_value") -> None:
    """Check an integer that may be absent. Raises `RequestError`."""
    value = body.get(field)
    if value is None or least <= value <= most:
        return
    message = f"{field} is {value}, it must be between {least} and {most}"
    raise RequestError(400, message, field, "invalid_value" if value < least else code_above)


def wrong_type(field: str, expected: str) -> RequestError:
    """Return the error for a value of the wrong type."""
    return RequestError(400, f"{field} must be {expected}", field, "invalid_type")


def utf8_bytes(text: str) -> int:
    """Return the length of `text` in UTF-8, bytes."""
    return len(text) if text.isascii() else len(text.encode())


def _not_for_clients(field: str) -> RequestError:
    return RequestError(400, f"{field} is not a field clients may send", field, "unknown_parameter")
