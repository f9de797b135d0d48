"""How long an engine's thread is held up while its rank's I/O thread moves KV: steps of pure Python, and what handing in work takes.

    python -m tests.bench.kv_step_delay [--gib 1] [--transport shm]

The same steps are timed at rest and while prompts leave this process at full speed, in turns. Prints one JSON line per turn.
"""

import argparse
import json
import threading
import time

from tests.bench.kv_transfer import SHAPES, Pair, quiet

STEP_ITERATIONS = 2_000
"""about 0.1 ms of interpreter time"""


def step() -> float:
    """Do a step's worth of Python; return seconds."""
    began_s = time.perf_counter()
    total = 0
    for number in range(STEP_ITERATIONS):
        total += number
    return time.perf_counter() - began_s


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and the longest, in ms."""
    ordered = sorted(seconds)
    return {
        "median_ms": round(ordered[len(ordered) // 2] * 1e3, 3),
        "p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 3),
        "longest_ms": round(ordered[-1] * 1e3, 3),
    }


def observe(pair: Pair, until: threading.Event) -> dict[str, object]:
    """Time steps and submits until told to stop."""
    steps: list[float] = []
    submits: list[float] = []
    while not until.is_set():
        steps.append(step())
        began_s = time.perf_counter()
        pair.rank.io.submit(lambda: None)
        submits.append(time.perf_counter() - began_s)
        time.sleep(0.0005)
    return {"steps": len(steps), "step": quantiles(steps), "submit": quantiles(submits)}


def keep_busy(pair: Pair, gib: float, done: threading.Event) -> None:
    """Move prompts, or rest for a second."""
    moved = 0
    while moved < gib * (1 << 30):
        moved += pair()
    if not moved:
        time.sleep(1)
    done.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--runs", default="32 KiB", choices=SHAPES)
    options = parser.parse_args()
    quiet()
    with Pair(SHAPES[options.runs], options.transport) as pair:
        pair()
        for gib in (0.0, options.gib) * 2:
            done = threading.Event()
            thread = threading.Thread(target=keep_busy, args=(pair, gib, done))
            thread.start()
            print(json.dumps({"moved_gib": gib, **observe(pair, done)}), flush=True)
            thread.join()


if __name__ == "__main__":
    main()
