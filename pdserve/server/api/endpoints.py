"""Every public path that takes a body, and what stands behind it."""

from collections.abc import Mapping

from pdserve.server.api.dialect import Dialect
from pdserve.server.api.dialects import DIALECTS
from pdserve.server.api.questions import QUESTIONS, Question
from pdserve.server.api.request import Route

ENDPOINTS: Mapping[str, Route | Question] = {
    **{route.value: route for route in Route},
    **{question.path: question for question in QUESTIONS},
}
"""path → endpoint"""


def dialect_of(endpoint: Route | Question) -> Dialect:
    """Return how an endpoint's errors look."""
    return endpoint.dialect if isinstance(endpoint, Question) else DIALECTS[endpoint]


def dialect_at(path: str) -> Dialect:
    """Return the dialect in which an error on `path` is told; OpenAI's where there is no other."""
    return dialect_of(ENDPOINTS.get(path, Route.CHAT))
