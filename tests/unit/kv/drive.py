"""Steers the rig by a seeded die for as many steps as asked: `python tests/unit/kv/drive.py --steps 10000000 --seed 1`.

A run is a series of episodes, each with a deployment and faults of its own; an episode's number and the seed repeat it alone (`--episode`).
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from deployment import Setup
from faults import FaultyRig

from pdserve.types import CloseReason, TransferSide

TP_SIZES = (1, 2, 4, 8)
EPISODE_STEPS = 4000
TIMEOUT_S = 120.0
LEASE_S = 10.0

STEADY = {"submit": 3, "prefill": 10, "reserve": 6, "call": 60, "write": 25, "deliver": 45, "scatter": 20, "beat": 1}
ENGINE_FAULTS = {"preempt": 1.0, "abort_prefill": 0.3, "abort_decode": 0.3, "mismatch": 0.2}
NETWORK_FAULTS = {"drop": 0.3, "duplicate": 0.5, "reorder": 0.7, "tear": 0.2, "fail_post": 0.2}
PEER_FAULTS = {"cut": 0.3, "notice": 1.0, "connect": 1.0, "restart": 0.05, "leap": 0.05}


@dataclass
class Tally:
    """What a run has seen."""

    steps: int = 0
    episodes: int = 0
    transfers: int = 0
    loads: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[TransferSide, CloseReason]] = field(default_factory=Counter)

    def add(self, rig: FaultyRig) -> None:
        self.episodes += 1
        self.transfers += rig.num_transfers
        self.loads += rig.num_loads
        self.outcomes += rig.outcomes

    def lines(self, elapsed_s: float) -> list[str]:
        """Return the report, one fact a line."""
        rows = [
            f"steps      {self.steps:>12,}",
            f"episodes   {self.episodes:>12,}",
            f"transfers  {self.transfers:>12,}",
            f"loaded     {self.loads:>12,}  on all ranks of the decode worker",
            f"seconds    {elapsed_s:>12,.0f}  ({self.steps / elapsed_s:,.0f} steps/s)",
            f"faults     {self.faults.total():>12,}",
            f"violations {0:>12,}  (the first ends a run with its seed and episode)",
        ]
        rows += [f"{name:<10} {count:>12,}" for name, count in sorted(self.faults.items())]
        rows += [f"{side.value + ' ' + reason.value:<26} {count:>12,}" for (side, reason), count in sorted(self.outcomes.items())]
        return rows


def episode_setup(die: random.Random) -> tuple[Setup, dict[str, float], bool]:
    """Return a deployment, the weights of what may happen in it, and whether all messages arrive in it."""
    prefill_ranks, decode_ranks = die.choice(TP_SIZES), die.choice(TP_SIZES)
    kind = die.choice(("calm", "engine", "network", "peers", "all"))
    weights: dict[str, float] = dict(STEADY)
    if kind != "calm":
        weights |= ENGINE_FAULTS
    if kind in ("network", "all"):
        weights |= NETWORK_FAULTS
    if kind in ("peers", "all"):
        weights |= PEER_FAULTS
    if kind == "calm" and die.random() < 0.7:
        weights["preempt"] = die.choice((0.5, 4.0))
    is_reliable = kind in ("calm", "engine")
    num_blocks = die.choice((8, 12, 24, 48))
    setup = Setup(
        prefill_ranks,
        decode_ranks,
        prefill_workers=die.choice((1, 1, 2)),
        decode_workers=die.choice((1, 1, 2)),
        num_slots=die.choice((1, 1, 2, 3, prefill_ranks, 2 * prefill_ranks, 4 * prefill_ranks)),
        slot_bytes=die.choice((32, 48, 64, 256)),
        num_blocks=num_blocks,
        decode_first=num_blocks < 48,
        is_direct=die.random() < 0.4,
        max_requests=die.choice((2, 4, 6)),
        timeout_s=1e9 if is_reliable else TIMEOUT_S,
        lease_s=1e9 if is_reliable else LEASE_S,
        skew_s=die.choice((0.0, 3600.0, -3600.0)),
        padding=die.choice((0, 3)),
    )
    return setup, weights, is_reliable


def run_episode(seed: int, number: int, steps: int, tally: Tally) -> None:
    """Run one episode to its end and check what it leaves behind."""
    die = random.Random(f"{seed}:{number}")
    setup, weights, is_reliable = episode_setup(die)
    rig = FaultyRig(setup)
    names = list(weights)
    chosen = die.choices(names, list(weights.values()), k=steps)
    for name in chosen:
        pick = die.getrandbits(32)
        match name:
            case "beat":
                happened = rig.tick(LEASE_S / 20)
            case "leap":
                happened = rig.tick(die.choice((LEASE_S, TIMEOUT_S)))
            case "mismatch":
                happened = rig.submit(pick, mismatch=True)
            case _:
                happened = getattr(rig, name)(pick)
        tally.steps += happened
        if happened and name not in STEADY:
            tally.faults[name] += 1
    rig.finish(is_reliable=is_reliable)
    if "abort_decode" not in weights:
        assert all(reason in (CloseReason.LANDED, CloseReason.RELEASED) for _, reason in rig.outcomes), rig.outcomes
    tally.add(rig)


def run(seed: int, steps: int, *, episode_steps: int = EPISODE_STEPS) -> Tally:
    """Run episodes until so many steps are done; a failure names the episode."""
    tally, number = Tally(), 0
    while tally.steps < steps:
        try:
            run_episode(seed, number, episode_steps, tally)
        except Exception as error:
            error.add_note(f"seed {seed}, episode {number}: {episode_setup(random.Random(f'{seed}:{number}'))}")
            raise
        number += 1
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episode", type=int, help="run this episode only")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    if arguments.episode is None:
        tally = run(arguments.seed, arguments.steps)
    else:
        tally = Tally()
        run_episode(arguments.seed, arguments.episode, EPISODE_STEPS, tally)
    print(f"$ python tests/unit/kv/drive.py --steps {arguments.steps} --seed {arguments.seed}")
    print("\n".join(tally.lines(time.perf_counter() - began_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
