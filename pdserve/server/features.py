"""What a deployment is set to, what a request qualified for, and what the records prove: one value per feature in each.

A value is ``yes``, ``no`` with its reason, or what was chosen (a mode, a transport), each with details after a colon; None is unknown. Nothing is
concluded from what was meant: an engine whose record never came has proven nothing. Pure.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from pdserve.config import Config
from pdserve.routing.reasons import PathReason
from pdserve.types import CloseReason, ServePath, TransferRecord

Facts = Mapping[str, str | None]
YES = "yes"
NEVER_STARTED = "no: never started"
_CACHE_FLAGS = {"--enable-prefix-caching": "on", "--no-enable-prefix-caching": "off"}


def configured(config: Config) -> dict[str, str | None]:
    """Return what the deployment is set to. Engines are known by their command lines alone, so a file of options hides what it may set."""
    flags = [argument.partition("=")[0].replace("_", "-") for argument in config.engine.extra_args]
    speculates = any(flag == "-sc" or flag.startswith("--spec") for flag in flags)
    return {
        "disaggregation": config.router.disaggregation,
        "layer_wise_push": "on",
        "prefix_reuse": next((_CACHE_FLAGS[flag] for flag in reversed(flags) if flag in _CACHE_FLAGS), "on"),
        "transport": config.kv.transport,
        "spec_decode": "on" if speculates else None if "--config" in flags else "off",
        "digest": config.kv.digest,
        **({"resume": "on"} if config.router.resume else {}),
    }


@cache
def eligible(local_reason: PathReason | None) -> Facts:
    """Return what a request qualified for; the same value each time, not to be changed.

    Args:
        local_reason: why two legs cannot serve it, if so: the first reason that was found.
    """
    moved = yes_unless(local_reason)
    # vLLM's `SamplingParams`: a request for the prompt's logprobs does not read the prefix cache. Another reason may have hidden that one.
    is_told = local_reason in (None, PathReason.PROMPT_LOGPROBS)
    return {
        "disaggregation": moved,
        "layer_wise_push": moved,
        "prefix_reuse": moved if is_told else None,
        "transport": moved,
        "spec_decode": None,
    }


def executed_locally(path: ServePath, reason: PathReason, cached_tokens: int | None) -> dict[str, str | None]:
    """Return what was done for a request without a ticket.

    Args:
        cached_tokens: of the prompt, as the engine's usage tells.
    """
    is_served = path is ServePath.LOCAL
    moved = f"no: {reason.value}" if is_served else NEVER_STARTED
    return {
        "disaggregation": moved,
        "layer_wise_push": moved,
        "prefix_reuse": _reuse((("cached", cached_tokens),)) if is_served else NEVER_STARTED,
        "transport": moved,
        "spec_decode": None if is_served else NEVER_STARTED,
    }


def executed(send: TransferRecord | None, receive: TransferRecord | None) -> dict[str, str | None]:
    """Return what the two records of a ticket prove; no engine's record tells of speculative decoding."""
    reused = [(name, None if record is None else record.tokens_reused) for name, record in (("prefill", send), ("decode", receive))]
    return {
        "disaggregation": None if receive is None else YES if has_moved(receive) else f"no: {receive.outcome.value}",
        "layer_wise_push": None if send is None else _push(send),
        "prefix_reuse": _reuse(reused),
        "transport": None if receive is None else receive.transport if receive.bytes_moved else f"no: {receive.outcome.value}",
        "spec_decode": None,
    }


def has_moved(receive: TransferRecord) -> bool:
    """Say whether the receiving side's record proves that KV arrived."""
    return receive.outcome is CloseReason.LANDED and receive.tokens_moved > 0


def yes_unless(hindrance: str | None) -> str:
    """Return ``yes``, or ``no`` with what stands against it."""
    return YES if hindrance is None else f"no: {hindrance}"


def _push(send: TransferRecord) -> str:
    if not send.bytes_moved:
        return f"no: {send.outcome.value}"
    told = f"{send.bytes_before_forward_end} of {send.bytes_moved} bytes before the forward pass ended"
    return f"yes: {told}" if send.bytes_before_forward_end else f"no: {told}"


def _reuse(told: Sequence[tuple[str, int | None]]) -> str | None:
    """Return how many prompt tokens each side had cached; None if no side that is known had any, and another is not known."""
    found = [f"{name} {tokens} tokens" for name, tokens in told if tokens]
    if found:
        return f"yes: {', '.join(found)}"
    return None if any(tokens is None for _, tokens in told) else "no: nothing cached"
