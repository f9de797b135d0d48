"""The few fields of vLLM's scheduler objects that the engine core's half reads, without vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TABLE = ((1, 2, 3), (7,))
"""a block table, per group"""


@dataclass
class Request:
    """The fields of vLLM's request that are read."""

    request_id: str = "r1"
    kv_transfer_params: Mapping[str, object] | None = None
    num_prompt_tokens: int = 40
    mm_features: Sequence[object] = ()
    cache_salt: str | None = None
    lora_request: object | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(range(self.num_prompt_tokens))


@dataclass
class Blocks:
    """What a request was given."""

    ids: tuple[tuple[int, ...], ...] = TABLE

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(group) for group in self.ids)


@dataclass
class NewRequest:
    """A request in its first step."""

    req_id: str
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """Requests in a later step, one column per field."""

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class BlockState:
    """The block tables of a step."""

    tables: dict[str, tuple[tuple[int, ...], ...]]

    def get_block_ids(self, request_id: str) -> tuple[tuple[int, ...], ...] | None:
        return self.tables.get(request_id)


@dataclass
class Step:
    """The fields of vLLM's scheduler output that are read."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    preempted_req_ids: set[str] | None = None
    kv_connector_block_state: BlockState | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class Output:
    """The fields of vLLM's connector output that are read."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_worker_meta: object | None = None
