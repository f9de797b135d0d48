"""A prefill that was preempted computes its prompt again: what a parcel of the first pass can still do, over real ranks and sockets.

Serving refuses such a parcel as long as it can be told from one of the present pass. One that cannot be told apart, since it claims to be of this
pass and vouches for its bytes, is what `pdserve verify` is for.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from m3_ranks import BLOCK_TOKENS, PATIENCE_S, Prompt, Rank, join, running
from verify_agents import SECRET, Agent, serving
from verify_command import publish, verify

from pdserve.kv.link import FrameStream
from pdserve.kv.wire import Parcel
from pdserve.types import CloseReason, TransferRecord

PROMPT = Prompt(1, 2 * BLOCK_TOKENS)
PRODUCER_BLOCKS, CONSUMER_BLOCKS = [5, 2], [1, 6]
SHORT_S = 3.0


class StaleParcel:
    """Puts the second parcel of the first pass in the place of its successor, which is not the first of its pass either.

    Args:
        keeps_pass: under its own pass number; else it claims to be of the second.
        keeps_checksum: of the parcel that it replaces; else it vouches for what it carries.
    """

    def __init__(self, *, keeps_pass: bool = False, keeps_checksum: bool = False) -> None:
        self._keeps_pass = keeps_pass
        self._keeps_checksum = keeps_checksum
        self._sent: list[tuple[Parcel, Any]] = []
        self.layers: set[int] = set()
        """of which earlier bytes were sent"""

    def pass_on(self, body: Any, pages: Any) -> Any:
        """Return what is sent instead; pages are changed where they lie."""
        if not isinstance(body, Parcel):
            return body
        if body.pass_number == 1:
            self._sent.append((body, pages.copy()))
            return body
        parcel, stale = self._sent[1]
        if body.items != parcel.items:
            return body
        pages[:] = stale
        self.layers = {item.layer for item in body.items}
        changes: dict[str, Any] = {} if self._keeps_checksum else {"checksum": xxhash.xxh3_64_intdigest(stale)}
        return msgspec.structs.replace(body, **changes | ({"pass_number": 1} if self._keeps_pass else {}))


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    """A producer and a consumer of one rank each."""
    pair = Rank("prefill", 1, 0, num_layers=5), Rank("decode", 1, 0, num_layers=5)
    with running(pair):
        join(pair, [rank.address for rank in pair])
        yield pair


def preempted(
    ranks: tuple[Rank, Rank], stale: StaleParcel | None, monkeypatch: pytest.MonkeyPatch, timeout_s: float = PATIENCE_S
) -> tuple[TransferRecord, TransferRecord]:
    """Compute half of the prompt, take its blocks away, and compute it all again, with other roundings."""
    producer, consumer = ranks
    num_parcels, send = 0, FrameStream.send

    async def counted_send(stream: FrameStream, body: Any, pages: Any = None) -> None:
        nonlocal num_parcels
        body = stale.pass_on(body, pages) if stale else body
        num_parcels += pages is not None
        await send(stream, body, pages)

    monkeypatch.setattr(FrameStream, "send", counted_send)
    consumer.consume(PROMPT, producer.me, CONSUMER_BLOCKS, timeout_s=timeout_s, proof=True)
    producer.open_send(PROMPT, consumer.me, PRODUCER_BLOCKS, proof=True)
    sends, layers = producer.io.sends, range(len(producer.views))

    def wrote(pass_number: int, tokens: int) -> None:
        producer.io.submit(lambda: sends.wrote(PROMPT.key, pass_number, layers, tokens))
        producer.io.submit(lambda: sends.pump(PROMPT.key, time.monotonic(), flush=True))

    def compute(version: int) -> None:
        for layer in layers:
            producer.write(PROMPT, PRODUCER_BLOCKS, layer, version)

    def wait_parcels(count: int) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while num_parcels < count:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)

    compute(version=0)
    wrote(1, BLOCK_TOKENS)
    wait_parcels(2)
    producer.io.submit(lambda: sends.begin_pass(PROMPT.key, 2)).result(PATIENCE_S)
    compute(version=1)
    producer.io.submit(lambda: sends.set_blocks(PROMPT.key, (tuple(PRODUCER_BLOCKS),), 0))
    wrote(2, BLOCK_TOKENS)
    wait_parcels(4)
    wrote(2, PROMPT.tokens)
    producer.seal(PROMPT, pass_number=2)
    (sent,), (received,) = producer.records(1), consumer.records(1)
    return sent, received


def test_second_pass_lands_whole_and_verifies(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fault nothing of the first pass is left, in the blocks or in the digests."""
    sent, received = preempted(ranks, None, monkeypatch)
    assert (sent.outcome, received.outcome, sent.passes) == (CloseReason.RELEASED, CloseReason.LANDED, 2)
    assert ranks[1].wrong_runs([PROMPT], [CONSUMER_BLOCKS], version=1) == []
    assert sorted(sent.digests) == sorted(received.digests)


def test_parcel_under_its_own_pass_is_dropped_and_the_transfer_does_not_land(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes reach no block; what it stands in the way of is missing, so decode computes the prompt."""
    sent, received = preempted(ranks, StaleParcel(keeps_pass=True), monkeypatch, SHORT_S)
    assert received.outcome is CloseReason.EXPIRED
    assert received.dropped == {"stale_pass": 1}
    assert sent.outcome is CloseReason.PEER_CLOSED


def test_parcel_with_bytes_of_another_is_refused_by_its_checksum(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier bytes under the present notice."""
    _, received = preempted(ranks, StaleParcel(keeps_checksum=True), monkeypatch)
    assert received.outcome is CloseReason.DIGEST_MISMATCH


def test_parcel_that_vouches_for_earlier_bytes_lands_and_verify_names_its_layers(
    ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody on the way can know; the two digest lists can."""
    stale = StaleParcel()
    sent, received = preempted(ranks, stale, monkeypatch)
    assert (sent.outcome, received.outcome) == (CloseReason.RELEASED, CloseReason.LANDED)
    names = [layer.name for number, layer in enumerate(ranks[0].geometry.layers) if number in stale.layers]
    assert names
    assert {layer for layer, _, _ in ranks[1].wrong_runs([PROMPT], [CONSUMER_BLOCKS], version=1)} == set(names)

    monkeypatch.setenv("PDSERVE_HOME", str(tmp_path))
    with serving(Agent("p", sent), Agent("d", received)) as (prefill, decode):
        publish(tmp_path, "m", SECRET, [prefill], [decode])
        answer = verify(capsys, "--lengths", str(PROMPT.tokens))
    (case,) = answer.verdict["cases"]
    assert (answer.code, case["path"], sorted(case["layers_different"])) == (1, "disaggregated", sorted(names))
