"""Receipts and transfer records for tests of what operators see."""

from dataclasses import replace

from pdserve.types import CloseReason, Receipt, RunDigest, ServePath, TransferRecord, TransferSide

TRANSFER_ID = f"{7:032x}"


def send_record(outcome: CloseReason = CloseReason.RELEASED, **changes: object) -> TransferRecord:
    """Return the producer's record of 40 tokens that went out whole."""
    record = TransferRecord(
        TRANSFER_ID, 1, TransferSide.SEND, "p0", "i0", outcome, prompt_tokens=40, tokens_moved=40, bytes_moved=4096, acks=2, acks_expected=2
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def receive_record(outcome: CloseReason = CloseReason.LANDED, **changes: object) -> TransferRecord:
    """Return the consumer's record of 40 tokens that landed whole in 0.02 s."""
    record = TransferRecord(
        *(TRANSFER_ID, 1, TransferSide.RECEIVE, "d0", "i0", outcome),
        prompt_tokens=40,
        tokens_moved=40,
        bytes_moved=4096,
        layers_sealed=30,
        layers_expected=30,
        transfer_s=0.02,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def receipt(**changes: object) -> Receipt:
    """Return a request that was streamed on the disaggregated path, with both records."""
    facts = Receipt(
        request_id="r0",
        client_request_id="the client's word",
        route="/v1/chat/completions",
        model="m",
        stream=True,
        status=200,
        outcome="finished",
        path=ServePath.DISAGGREGATED,
        reason="default",
        prefill_worker="p0",
        decode_worker="d0",
        transfer_id=TRANSFER_ID,
        attempts=1,
        queue_wait_s=0.25,
        ttft_s=0.5,
        duration_s=2.0,
        prompt_tokens=40,
        completion_tokens=3,
        cached_tokens=0,
        inter_token_s=(0.125, 0.375),
        send=send_record(),
        receive=receive_record(),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


def run(xxh3: str, *, layer: str = "layer.0", head: int = 0, block: int = 0, rank: int = 0) -> RunDigest:
    """Return the digest of one run."""
    return RunDigest(rank, layer, head, block, xxh3)
