"""The KV layer under very many transfers that go every way, between processes that are killed, stopped and replaced.

    python -m tests.soak.kv_soak --transfers 100000 --seed 1 [--transport tcp|shm|both]

Two producers and two consumers, each a process with a real `RankIo` and a small cache whose blocks have one owner at a time, follow a script that
both sides draw from the seed (`script`). Every interval ends at rest. It fails, with exit status 1, unless

- every request of a process that lived was reported once, with an outcome that its fate allows; what a producer calls released has landed;
- what landed is right in every byte, and nothing was written to blocks that nobody owned;
- at rest no transfer is live, no slot is held or wanted, nothing is parked, and no tombstones are beyond their bound;
- descriptors, threads and mapped memory are the same at every rest, and no entry of ``/dev/shm`` is left that no other program uses;
- memory stays in the processes that were never killed: after a warm-up until their tombstones are full, the median of the second half is at
  most 3 % + 1 MiB above that of the first.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from pdserve.kv.parking import MAX_TOMBSTONES
from pdserve.types import CloseReason, TransferSide
from tests.soak.fleet import Fleet, SoakFailed
from tests.soak.mutations import MUTATIONS
from tests.soak.script import CONSUMERS, IF_KILLED, IF_STOPPED, PRODUCERS, VETERANS, Transfer, transfer
from tests.soak.worker import Status

RSS_GROWTH, RSS_SLACK_KIB = 0.03, 1024
SHM = "/dev/shm"
ROWS = 10
"""of the table, for each transport"""
STOP_LEASES = 1.4
"""a process is stopped this many leases long"""
HEADER = f"{'transfers':>15} {'s':>6} {'landed':>7} {'other outcomes':>14} {'kills':>5} {'stops':>5} {'RSS MB':>7} {'descr.':>6} {'mapped':>6} shm"


class Hurt(NamedTuple):
    """What happens to processes in an interval."""

    killed: tuple[str, ...] = ()
    stopped: str = ""


ORDER = (
    Hurt(),
    Hurt(killed=("p1",)),
    Hurt(killed=("c1",)),
    Hurt(stopped="c0"),
    Hurt(),
    Hurt(killed=("p1", "c1")),
    Hurt(),
    Hurt(stopped="p0"),
    Hurt(),
)
"""what comes over and over, one interval each"""


def wrong_end(one: Transfer, sent: CloseReason | None, received: CloseReason | None, hurt: Hurt) -> str:
    """Return what is wrong with how both sides of a transfer ended, None standing for no report; empty if nothing is."""
    also: frozenset[CloseReason] = frozenset()
    if {one.producer, one.consumer} & {*hurt.killed}:
        also |= IF_KILLED
    if hurt.stopped in (one.producer, one.consumer):
        also |= IF_STOPPED
    for worker, side, end in ((one.producer, TransferSide.SEND, sent), (one.consumer, TransferSide.RECEIVE, received)):
        allowed = one.ends(side)
        if worker not in hurt.killed and (end not in allowed | also if allowed else end is not None):
            return f"{one}: {worker} ended {end}, the other side {received if end is sent else sent}"
    if sent is CloseReason.RELEASED and received is not CloseReason.LANDED and one.consumer not in hurt.killed:
        return f"{one}: released, but {received} at the consumer"
    return ""


class Soak:
    """One run over one transport."""

    def __init__(self, transport: str, seed: int, interval: int, lease_s: float, mutation: str) -> None:
        self._seed = seed
        self._interval = interval
        self._lease_s = lease_s
        self._fleet = Fleet(seed, transport, lease_s, mutation)
        self._draw = random.Random(seed)
        self.landed = 0
        self.outcomes: Counter[str] = Counter()
        """producer's and consumer's; ``-`` for a side that had nothing to report or was killed"""
        self.kills = self.stops = 0
        self.wrong: list[str] = []
        self.rests: list[dict[str, Status]] = []
        self._interval_s = 1.0
        self._shm_before = set(os.listdir(SHM))

    def run(self, transfers: int) -> None:
        """Run the script; stops at the first interval in which something is wrong. Prints the table."""
        print(HEADER, flush=True)
        began_s, row_at = time.monotonic(), 0
        try:
            with self._fleet:
                for number, first in enumerate(range(0, transfers, self._interval)):
                    end = min(first + self._interval, transfers)
                    self.wrong += self._fleet.meet()
                    self._run_interval(first, end, ORDER[number % len(ORDER)])
                    if self.wrong:
                        return
                    if end * ROWS >= (row_at + 1) * transfers:
                        row_at = end * ROWS // transfers
                        self._print_row(end, time.monotonic() - began_s)
        except SoakFailed as error:
            self.wrong.append(str(error))

    def _run_interval(self, first: int, end: int, hurt: Hurt) -> None:
        begin_s = time.monotonic()
        named = self._fleet.incarnations
        for worker in named:
            self._fleet.send(worker, "run", first, end, named)
        self._do_harm(hurt)
        ended: dict[str, list[tuple[int, CloseReason]]] = self._fleet.receive(worker for worker in named if worker not in hurt.killed)
        if hurt == Hurt():
            self._interval_s = time.monotonic() - begin_s
        self.wrong += self._fleet.meet()
        self._judge_ends(first, end, ended, hurt)
        rest: dict[str, Status] = self._fleet.ask_all("rest")
        self.rests.append(rest)
        for worker, status in rest.items():
            self.wrong += [f"{worker}: {text}" for text in status.wrong]
            self.wrong += [f"{count} tombstones" for count in status.tombstones if count > MAX_TOMBSTONES]

    def _do_harm(self, hurt: Hurt) -> None:
        """Kill or stop somebody somewhere in the first two thirds of an interval."""
        if hurt == Hurt():
            return
        time.sleep(self._draw.uniform(0.02, 0.66) * self._interval_s)
        if hurt.killed:
            self._fleet.kill(hurt.killed)
            self._fleet.start(hurt.killed)
            self.kills += len(hurt.killed)
        if hurt.stopped:
            self._fleet.signal(hurt.stopped, signal.SIGSTOP)
            time.sleep(STOP_LEASES * self._lease_s)
            self._fleet.signal(hurt.stopped, signal.SIGCONT)
            self.stops += 1

    def _judge_ends(self, first: int, end: int, ended: dict[str, list[tuple[int, CloseReason]]], hurt: Hurt) -> None:
        sides: list[dict[int, CloseReason]] = []
        for workers in (PRODUCERS, CONSUMERS):
            found = [pair for worker in workers for pair in ended.get(worker, ())]
            sides.append(dict(found))
            twice = [number for number, count in Counter(number for number, _ in found).items() if count > 1]
            self.wrong += [f"reported twice: {twice[:5]}"] if twice else []
        for number in range(first, end):
            sent, received = (side.get(number) for side in sides)
            one = transfer(self._seed, number)
            if wrong := wrong_end(one, sent, received, hurt):
                self.wrong.append(wrong)
            self.landed += received is CloseReason.LANDED
            self.outcomes[f"{sent or '-'}/{received or '-'}"] += 1

    def _print_row(self, transfers: int, elapsed_s: float) -> None:
        rest = self.rests[-1].values()
        print(
            f"{transfers:>15,} {elapsed_s:>6.1f} {self.landed:>7} {self.outcomes.total() - self.landed:>14} {self.kills:>5} {self.stops:>5}"
            f" {sum(status.rss_kib for status in rest) / 1024:>7.1f} {sum(status.descriptors for status in rest):>6}"
            f" {sum(status.mapped for status in rest):>6} {len(orphans(self._shm_before)):>3}",
            flush=True,
        )

    def judge_growth(self) -> str:
        """Add what grew to `wrong`, and return a line that says what was compared."""
        for worker in (*PRODUCERS, *CONSUMERS):
            for what in ("descriptors", "threads", "mapped"):
                counts = {getattr(rest[worker], what) for rest in self.rests if worker in rest}
                if len(counts) > 1:
                    self.wrong.append(f"{worker}: {what} at rest vary: {sorted(counts)}")
        left = orphans(self._shm_before)
        if left:
            time.sleep(2.0)  # others may be about to map what they have just made, or to unlink what they have unmapped
            left &= orphans(self._shm_before)
        if left:
            self.wrong.append(f"left in {SHM}: {sorted(left)}")
        warm = next((number for number, rest in enumerate(self.rests) if all(_is_full(rest[one]) for one in VETERANS if one in rest)), None)
        judged = self.rests[warm + 1 :] if warm is not None else []
        if len(judged) < 4:
            return "RSS not judged: too few rests after the tombstones are full"
        told = []
        for worker in VETERANS:
            sizes = [rest[worker].rss_kib for rest in judged]
            before, after = (statistics.median(half) for half in (sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]))
            if after > before * (1 + RSS_GROWTH) + RSS_SLACK_KIB:
                self.wrong.append(f"{worker}: RSS grew from {before:.0f} to {after:.0f} KiB")
            told.append(f"{worker} {before / 1024:.2f} → {after / 1024:.2f} MB")
        return f"RSS, medians of the halves after {self._interval * ((warm or 0) + 1):,} transfers: {', '.join(told)}"


def orphans(before: set[str]) -> set[str]:
    """Return what is new in ``/dev/shm`` and mapped by no process; other programs on the machine keep mapped what they have there."""
    new: dict[str, str] = {}
    for name in set(os.listdir(SHM)) - before:
        with contextlib.suppress(OSError):
            new[str((Path(SHM) / name).stat().st_ino)] = name  # semaphores are mapped under the name they had when they were made
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):
            for line in maps.read_text().splitlines():
                if SHM in line:
                    new.pop(line.split()[4], None)
    return {name for name in new.values() if (Path(SHM) / name).exists()}


def _is_full(status: Status) -> bool:
    return max(status.tombstones) == MAX_TOMBSTONES


def soak(transport: str, transfers: int, seed: int, interval: int, lease_s: float, mutation: str) -> bool:
    """Run one transport; True if nothing is wrong."""
    print(f"{transport}: {transfers:,} transfers, seed {seed}, intervals of {interval:,}, lease {lease_s} s")
    begin_s = time.monotonic()
    run = Soak(transport, seed, interval, lease_s, mutation)
    run.run(transfers)
    elapsed_s = time.monotonic() - begin_s
    if not run.wrong:
        growth = run.judge_growth()
        tombstones = [max(run.rests[-1][worker].tombstones) for worker in VETERANS]
        print(f"outcomes (producer/consumer): {', '.join(f'{name} {count}' for name, count in run.outcomes.most_common())}")
        print(f"{growth}; tombstones {tombstones} of at most {MAX_TOMBSTONES}")
    for text in run.wrong[:20]:
        print(f"  {text}")
    done = run.outcomes.total()
    print(
        f"{'FAILED' if run.wrong else 'passed'}: {transport}, {done:,} transfers in {elapsed_s:.0f} s, {done / elapsed_s:.0f}/s\n",
        flush=True,
    )
    return not run.wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Soak the KV layer")
    parser.add_argument("--transfers", type=int, default=100_000, help="over all transports")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=["tcp", "shm", "both"], default="both")
    parser.add_argument("--interval", type=int, default=1000, help="transfers between two rests")
    parser.add_argument("--lease", type=float, default=3.0, help="seconds")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), default="", help="break the code under test; must fail")
    options = parser.parse_args()
    transports = ["tcp", "shm"] if options.transport == "both" else [options.transport]
    each = options.transfers // len(transports)
    results = [soak(transport, each, options.seed, options.interval, options.lease, options.mutation) for transport in transports]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
