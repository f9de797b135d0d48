"""A rig with a script: requests that a test names, and their life played in one fixed order, one small step at a time, so that a test can step in."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from decode_model import ConsumerRank, DecodeRequest
from faults import FaultyRig
from prefill_model import PrefillRequest, PrefillState, ProducerRank
from shapes import Prompt

from pdserve.kv.actions import PeerRank
from pdserve.kv.ticket import TransferKey
from pdserve.types import CloseReason, TransferSide

PREFILL, DECODE = "prefill-0", "decode-0"


class Scene(FaultyRig):
    """One or more requests of a test's own."""

    def request(
        self,
        tokens: int,
        *,
        attempt_of: TransferKey | None = None,
        first_token: int = 0,
        lookahead: int = 0,
        decode_seed: int | None = None,
        prefill: str = PREFILL,
        timeout_s: float | None = None,
    ) -> TransferKey:
        """Send both legs of a request; with `decode_seed` the decode leg carries another prompt."""
        self.num_transfers += 1
        seed = int(attempt_of.transfer_id, 16) if attempt_of else self.num_transfers
        key = TransferKey(f"{seed:032x}", attempt_of.attempt + 1 if attempt_of else 1)
        prompt = Prompt(self.model, seed, tokens)
        other = prompt if decode_seed is None else Prompt(self.model, decode_seed, tokens)
        limit_s = self.setup.timeout_s if timeout_s is None else timeout_s
        self.prefills[prefill].admit(PrefillRequest(key, prompt, (DECODE, self.incarnation(DECODE)), limit_s))
        peer = (prefill, self.incarnation(prefill))
        self.decodes[DECODE].admit(DecodeRequest(key, other, peer, limit_s, first_token=first_token, lookahead=lookahead))
        return key

    def prefill_leg(self, key: TransferKey, prefill: str = PREFILL) -> PrefillRequest | None:
        return self.prefills[prefill].requests.get(key)

    def decode_leg(self, key: TransferKey) -> DecodeRequest | None:
        return self.decodes[DECODE].requests.get(key)

    def reserve_for(self, key: TransferKey) -> None:
        leg = self.decode_leg(key)
        if leg is not None and leg.block_ids is None:
            assert self.decodes[DECODE].reserve(leg)

    def chunk(self, key: TransferKey, tokens: int = 1 << 20, *, cached: int = 0, hooks: Sequence[int] = (), prefill: str = PREFILL) -> bool:
        """Schedule a chunk where the leg still waits for one."""
        leg = self.prefill_leg(key, prefill)
        if leg is None or leg.state not in (PrefillState.WAITING, PrefillState.RUNNING):
            return False
        return self.prefills[prefill].run_chunk(leg, tokens, cached, hooks)

    def finish_prefill(self, key: TransferKey, *, aborted: bool = False, prefill: str = PREFILL) -> None:
        leg = self.prefill_leg(key, prefill)
        if leg is not None and leg.state is not PrefillState.DONE and (aborted or leg.state is PrefillState.SEALED):
            self.prefills[prefill].finish(leg, aborted=aborted)

    def preempt_leg(self, key: TransferKey, prefill: str = PREFILL) -> None:
        leg = self.prefill_leg(key, prefill)
        if leg is not None and leg.state in (PrefillState.RUNNING, PrefillState.SEALED):
            self.prefills[prefill].preempt(leg)

    def end_decode(self, key: TransferKey, reason: CloseReason = CloseReason.ABORTED) -> None:
        leg = self.decode_leg(key)
        if leg is not None:
            self.decodes[DECODE].end(leg, reason)

    def producer(self, rank: int = 0, worker: str = PREFILL) -> ProducerRank:
        return self.producers[PeerRank(worker, self.incarnation(worker), rank)]

    def consumer(self, rank: int = 0) -> ConsumerRank:
        return self.consumers[PeerRank(DECODE, self.incarnation(DECODE), rank)]

    def serve(self, key: TransferKey, *chunks: int) -> None:
        """Play a request's whole life."""
        for _ in self.life(key, *chunks):
            pass

    def life(self, key: TransferKey, *chunks: int) -> Iterator[None]:
        """Play a request's life, decode first; stops after every small step."""
        script: list[Callable[[], object]] = [lambda: self.reserve_for(key)]
        script += [lambda tokens=tokens: self.chunk(key, tokens, hooks=(0, 2)) for tokens in chunks]  # type: ignore[misc]
        script += [lambda: self.chunk(key), lambda: self.finish_prefill(key)]
        yield from self.play(script)

    def play(self, script: Sequence[Callable[[], object]]) -> Iterator[None]:
        """Carry out what the engines decide, each decision once all that came of the last has arrived."""
        due = deque(script)
        while True:
            moved = next((step for step in (self.call, self.deliver, self.write, self.scatter) if step(0)), None)
            if moved is None:
                if not due:
                    return
                due.popleft()()
            yield

    def has_landed(self, key: TransferKey) -> bool:
        """Whether every decode rank has the request's KV."""
        return all((key, rank) in self.landed for rank in self.consumers)

    def outcomes_of(self, side: TransferSide) -> dict[CloseReason, int]:
        """How often ranks of one side ended with each reason."""
        return {reason: count for (where, reason), count in self.outcomes.items() if where is side}
