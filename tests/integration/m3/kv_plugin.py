"""A plugin for vLLM through which a test damages KV on its way, or watches when it leaves. Does nothing until the test's files are there.

`fault` holds a `Fault` as JSON. Damage turns the bytes of one (layer, block, head) run around, at one of three places:

    gather     the producer reads its blocks wrong; everything after it, checksums too, vouches for the wrong bytes
    wire       bytes change after the producer's checksum was made
    scatter    the consumer writes its blocks wrong

`trace`, if it exists, gets a line for each parcel that is gathered and for each end of a forward pass that computed a prompt to be sent.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

VARIABLE = "TEST_KV_PLUGIN"
"""names the folder of both files"""
FAULT, TRACE = "fault", "trace"
METADATA = "Metadata-Version: 2.1\nName: test-kv\nVersion: 0\n"
ENTRY_POINTS = "[vllm.general_plugins]\ntest_kv = kv_plugin:register\n"


class Fault(msgspec.Struct, frozen=True):
    """What to damage."""

    place: str
    layer: str = ""
    block: int = 0
    """position in the prompt"""
    head: int = 0
    """local head, of a rank that holds it"""


class Event(NamedTuple):
    """One line of the trace."""

    rank_pid: int
    layers: tuple[str, ...]
    """gathered into one parcel; empty for the end of a forward pass"""


def read_trace(path: Path) -> list[Event]:
    """Return what happened, in order."""
    lines = [line.split(" ") for line in path.read_text().splitlines()]
    return [Event(int(pid), tuple(filter(None, names.split(",")))) for pid, names in lines]


def engine_environment(folder: Path, plugins: tuple[str, ...]) -> dict[str, str]:
    """Make the plugin known to engines; returns what must be in their environment.

    Args:
        folder: an empty one, where the engines will look for the two files.
        plugins: that engines load otherwise.
    """
    distribution = folder / "test_kv-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(METADATA)
    (distribution / "entry_points.txt").write_text(ENTRY_POINTS)
    return {
        "PYTHONPATH": os.pathsep.join((str(folder), str(Path(__file__).parent))),
        "VLLM_PLUGINS": ",".join((*plugins, "test_kv")),
        VARIABLE: str(folder),
    }


def register() -> None:
    """Called by vLLM in each of its processes."""
    from pdserve.kv.link import FrameStream
    from pdserve.kv.pages import CachePages
    from pdserve.kv.worker_side import WorkerSide

    folder = Path(os.environ[VARIABLE])
    gather, scatter, send, end_step = CachePages.gather, CachePages.scatter, FrameStream.send, WorkerSide.end_step

    def present(place: str) -> Fault | None:
        try:
            fault = msgspec.json.decode((folder / FAULT).read_bytes(), type=Fault)
        except FileNotFoundError:
            return None
        return fault if fault.place == place else None

    def note(*layers: str) -> None:
        if (folder / TRACE).exists():
            with (folder / TRACE).open("a") as trace:
                trace.write(f"{os.getpid()} {','.join(layers)}\n")

    def faulty_gather(pages: Any, items: Any, slices: Any, block_ids: Any, out: Any) -> None:
        gather(pages, items, slices, block_ids, out)
        note(*(pages._layers[item.layer].shape.name for item in items))
        if (fault := present("gather")) is not None:
            _damage(pages, items, slices, out, fault, "producer_head")

    def faulty_scatter(pages: Any, items: Any, slices: Any, block_ids: Any, arrived: Any) -> None:
        if (fault := present("scatter")) is not None:
            arrived = arrived.copy()
            _damage(pages, items, slices, arrived, fault, "consumer_head")
        scatter(pages, items, slices, block_ids, arrived)

    async def faulty_send(stream: Any, body: Any, pages: Any = None) -> None:
        if pages is not None and present("wire") is not None:
            pages[0] ^= 1
        await send(stream, body, pages)

    def noted_end_step(side: Any) -> None:
        if side._step.progress:
            note()
        end_step(side)

    CachePages.gather, CachePages.scatter = faulty_gather, faulty_scatter  # type: ignore[method-assign]
    FrameStream.send, WorkerSide.end_step = faulty_send, noted_end_step  # type: ignore[method-assign]


def _damage(pages: Any, items: Any, slices: Any, parcel: Any, fault: Fault, first_head: str) -> None:
    """Turn one run around where it lies in a parcel, if it is there."""
    offset = 0
    for item, part in zip(items, slices, strict=True):
        layer = pages._layers[item.layer].shape
        shape = (item.end_block - item.first_block, part.num_heads, layer.run_bytes)
        size = int(np.prod(shape))
        block, head = fault.block - item.first_block, fault.head - getattr(part, first_head)
        if layer.name == fault.layer and 0 <= block < shape[0] and 0 <= head < shape[1]:
            run = parcel[offset : offset + size].reshape(shape)[block, head]
            run[:] = run[::-1].copy()
        offset += size
