"""The closed vocabularies that say why: why this path, why another attempt. Labels of metrics, fields of receipts."""

from enum import StrEnum

from pdserve.types import CloseReason, Role


class PathReason(StrEnum):
    """Why a request was served the way it was, or why it never got that far."""

    DEFAULT = "default"
    """nothing stood against disaggregation"""
    PINNED = "pinned"
    """a canary asked for this pair"""

    CONFIGURED_NEVER = "configured_never"
    NO_READY_PREFILL = "no_ready_prefill"
    BREAKER_OPEN = "breaker_open"
    """prefill workers are ready, but transport to all of them, or between them and decode, keeps failing"""
    SHORT_PROMPT = "short_prompt"
    PREFIX_ON_DECODE = "prefix_on_decode"
    """a decode worker with room holds most of the prompt"""
    COSTS_MORE = "costs_more"
    """by the measured rates disaggregation costs more than it gives now"""
    N_ABOVE_ONE = "n_above_one"
    SEVERAL_PROMPTS = "several_prompts"
    BEAM_SEARCH = "beam_search"
    """the engine's beam search starts requests of its own, which carry no ticket"""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """only an engine that computes the prompt knows them; `echo` with logprobs asks for the same"""
    NO_OUTPUT = "no_output"
    """`echo` with no token to generate: decode would have nothing to do"""
    MEDIA = "media"
    ENGINE_TOOLS = "engine_tools"
    """tools that an engine runs itself: each call begins another prompt, which carries no ticket"""
    PROMPT_EMBEDS = "prompt_embeds"
    TRUNCATION = "truncation"
    """where the prompt is cut depends on the output limit, which differs between the legs"""

    TRANSFER_NOTHING_TO_MOVE = "transfer_nothing_to_move"
    TRANSFER_PROMPT_MISMATCH = "transfer_prompt_mismatch"
    TRANSFER_DIGEST_MISMATCH = "transfer_digest_mismatch"
    TRANSFER_SEAL_MISMATCH = "transfer_seal_mismatch"
    TRANSFER_ABORTED = "transfer_aborted"
    TRANSFER_PEER_CLOSED = "transfer_peer_closed"
    TRANSFER_PEER_LOST = "transfer_peer_lost"
    TRANSFER_PEER_UNKNOWN = "transfer_peer_unknown"
    TRANSFER_EXPIRED = "transfer_expired"
    TRANSFER_REFUSED = "transfer_refused"
    TRANSFER_OVERFLOW = "transfer_overflow"
    TRANSFER_UNPROVEN = "transfer_unproven"
    """the receiving side's record never came: nothing shows what was executed"""

    QUESTION = "question"
    """any worker answers it, without generating"""
    REJECTED = "rejected"
    """the client's own fault, found at the edge"""
    RATE_LIMITED_REQUESTS = "rate_limited_requests"
    """a limit of the client's key, not of the fleet; so is the next"""
    RATE_LIMITED_TOKENS = "rate_limited_tokens"
    QUEUE_FULL_REQUESTS = "queue_full_requests"
    QUEUE_FULL_TOKENS = "queue_full_tokens"
    DEADLINE_UNMEETABLE = "deadline_unmeetable"
    """at the measured rate its turn, or its first token, would come after its deadline"""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    NO_READY_WORKER = "no_ready_worker"
    DRAINING = "draining"
    """this router is shutting down"""
    LEFT_QUEUE = "left_queue"
    """the client went away before a pair was free"""
    EXPIRED_IN_QUEUE = "expired_in_queue"
    """its time ran out before a pair was free"""


def transfer_reason(outcome: CloseReason) -> PathReason:
    """Return why a request that was to be disaggregated ran locally after all.

    Args:
        outcome: how the receiving side's transfer ended; not ``landed`` and not ``released``.
    """
    return PathReason(f"transfer_{outcome.value}")


class RetryReason(StrEnum):
    """Which leg failed an attempt, and in which phase."""

    PREFILL_CONNECT = "prefill_connect"
    PREFILL_FIRST_BYTE = "prefill_first_byte"
    PREFILL_HEAD = "prefill_head"
    PREFILL_BODY = "prefill_body"
    PREFILL_IDLE = "prefill_idle"
    PREFILL_STATUS = "prefill_status"
    DECODE_CONNECT = "decode_connect"
    DECODE_FIRST_BYTE = "decode_first_byte"
    DECODE_HEAD = "decode_head"
    DECODE_BODY = "decode_body"
    DECODE_IDLE = "decode_idle"
    DECODE_STATUS = "decode_status"


def retry_reason(role: Role, phase: str) -> RetryReason:
    """Return the label for a leg that failed in `phase`: `WorkerLost.phase`, or ``status`` for an engine's own 5xx."""
    return RetryReason(f"{role.value}_{phase}")
