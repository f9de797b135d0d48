"""Whether a transfer moved what it should: compares the two sides' records, run by run. Pure; reads nothing and keeps nothing.

The producer hashed each (layer, block, head) run in its own blocks, the consumer in its own after everything had landed. A layer is equal if
every run that any consumer rank holds of it was read by a producer rank with the same digest, and none is missing on any rank. Producer ranks
that hold the same head may have computed it with other roundings (a sum over ranks need not be added in the same order on all of them), so a
consumer may have the run of either.
"""

from collections import Counter
from dataclasses import dataclass

from pdserve.types import CloseReason, TransferRecord


@dataclass(frozen=True, slots=True)
class LayerEvidence:
    """What the digests of one transfer show."""

    layers_equal: int
    layers_total: int
    different: tuple[str, ...]
    """layers with a run that differs or is missing on a rank; in order of appearance"""


def compare_layers(send: TransferRecord, receive: TransferRecord) -> LayerEvidence:
    """Compare the digest lists of one transfer. Records without digests give zero layers: nothing was shown."""
    sources: dict[tuple[str, int, int], set[str]] = {}
    for run in send.digests:
        sources.setdefault((run.layer, run.head, run.block), set()).add(run.xxh3)
    layers = dict.fromkeys([run.layer for run in (*send.digests, *receive.digests)])
    bad: set[str] = set()
    arrived: set[tuple[str, int, int]] = set()
    held = Counter((run.layer, run.rank) for run in receive.digests)
    ranks = {run.rank for run in receive.digests}
    for run in receive.digests:
        where = (run.layer, run.head, run.block)
        arrived.add(where)
        if run.xxh3 not in sources.get(where, ()):
            bad.add(run.layer)
    for layer, head, block in sources:
        if (layer, head, block) not in arrived:
            bad.add(layer)
    for layer in layers:
        # Heads are split evenly, or every rank holds them all: ranks that received anything hold equally many runs of each layer.
        if len({held[layer, rank] for rank in ranks}) > 1:
            bad.add(layer)
    return LayerEvidence(len(layers) - len(bad), len(layers), tuple(layer for layer in layers if layer in bad))


def is_moved_whole(send: TransferRecord, receive: TransferRecord) -> bool:
    """Whether the records prove that all of the prompt's tokens crossed and all that was sealed arrived."""
    return not missing_proof(send, receive)


def missing_proof(send: TransferRecord, receive: TransferRecord) -> str:
    """Return what the records of a whole transfer would show and these do not, for a person; empty if nothing."""
    if receive.outcome is not CloseReason.LANDED:
        return receive.outcome.value
    if send.outcome is not CloseReason.RELEASED:
        return f"sender: {send.outcome.value}"
    if not 0 < receive.tokens_moved == receive.prompt_tokens == send.prompt_tokens:
        return f"{receive.tokens_moved} of {receive.prompt_tokens} tokens moved, of {send.prompt_tokens} prefilled"
    if receive.layers_sealed != receive.layers_expected:
        return f"{receive.layers_sealed} of {receive.layers_expected} layers sealed"
    if send.acks != send.acks_expected:
        return f"{send.acks} of {send.acks_expected} acknowledgements"
    return ""
