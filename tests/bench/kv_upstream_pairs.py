"""Which pairs of prefill and decode sizes NIXL's and MoRIIO's own mapping code takes for MiniMax-M3's caches, and which ours does.

    python -m tests.bench.kv_upstream_pairs

Asks the code of the installed vLLM, without engines or a network: its checks at the handshake, then its mapping of ranks, from which follows what
each decode rank gets. M3 has 4 KV heads in its main caches and one index head that every rank holds. Writes `tests/results/kv-upstream-pairs.txt`.

    yes        every decode rank gets all of its heads
    refused    the handshake or the first transfer raises; the line below the table says what
    silent     nothing raises, and some decode ranks get nothing, or heads that are not theirs
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm

from pdserve.errors import ProtocolMismatch
from pdserve.kv.geometry import LayerGeometry, Sharding
from pdserve.kv.plan import held_heads, make_plan

SIZES = (1, 2, 4, 8)
HEADS, BLOCK_TOKENS = 4, 128
MAIN_RUN_BYTES, INDEX_BYTES = 64 << 10, 32 << 10
RESULTS = Path(__file__).parents[1] / "results" / "kv-upstream-pairs.txt"
Got = dict[int, list[int]]
"""decode rank → heads that end up in its blocks, in order"""


class Refused(Exception):
    """Upstream's code raised."""


def heads_of(size: int, rank: int) -> list[int]:
    return list(held_heads(HEADS, size, rank))


def guarded(call: Callable[[], Any]) -> Any:
    """Return what upstream's code returns. Raises `Refused` with what it raises."""
    try:
        return call()
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where is not None else "?"
        raise Refused(f"{type(error).__name__} at {place}: {_gist(error)}".rstrip(": ")) from error


def _gist(error: Exception) -> str:
    """Return what a message says without the sizes it was raised for."""
    return " ".join(str(error).split()).partition(" Got ")[0]


# ---- NIXL -------------------------------------------------------------------------------------------------------------------------------


def nixl_mapping(size: int, rank: int, remote_size: int) -> Any:
    """Shake hands as one rank would and return its mapping to the other engine."""
    from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    topology = TransferTopology(
        tp_rank=rank,
        tp_size=size,
        block_size=BLOCK_TOKENS,
        engine_id="here",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=HEADS,
        attn_backends=[],
    )
    block_lens = {side: [max(1, HEADS // side) * MAIN_RUN_BYTES, INDEX_BYTES] for side in (size, remote_size)}
    info = EngineTransferInfo(
        remote_tp_size=remote_size,
        remote_block_len=block_lens[remote_size][0],
        remote_block_size=BLOCK_TOKENS,
        remote_physical_blocks_per_logical=1,
    )
    topology.register_remote_engine("there", info)
    worker = object.__new__(type("Asked", (base_worker.NixlBaseConnectorWorker,), {"__del__": lambda self: None}))
    vars(worker).update(
        transfer_topo=topology,
        use_mla=False,
        dcp_size=1,
        kv_cache_layout="LBHNC",
        use_host_buffer=False,
        enable_permute_local_kv=False,
        backend_name="FLASH_ATTN",
        kv_transfer_config=SimpleNamespace(enable_permute_local_kv=False),
        block_len_per_layer=block_lens[size],
        region_group_ids=[],
        dst_num_blocks={"there": 10},
        _has_mamba=False,
        _physical_blocks_per_logical_kv_block=1,
        _transfer_layer_region_indices=(),
        _transfer_layer_names=(),
        _region_is_mla=[False, True],
    )
    remote = NixlAgentMetadata(
        engine_id="there",
        agent_metadata=b"",
        kv_caches_base_addr=[0, 0],
        device_id=0,
        num_blocks=10,
        block_lens=block_lens[remote_size],
        block_strides=block_lens[remote_size],
        kv_cache_layout="LBHNC",
        block_size=BLOCK_TOKENS,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
    )
    guarded(lambda: worker._validate_remote_agent_handshake(remote, remote_size))
    return guarded(lambda: compute_tp_mapping(topology, remote_size, (FullAttentionSpec,)))


def nixl_pull(prefill: int, decode: int) -> Got:
    """Each decode rank reads: a piece of one prefill rank's heads, or all heads of several."""
    got: Got = {}
    for rank in range(decode):
        mapping = nixl_mapping(decode, rank, prefill)
        ranks = mapping.all_source_ranks
        if len(ranks) > 1:
            got[rank] = [head for source in sorted(ranks, key=mapping.rank_to_attention_slot.get) for head in heads_of(prefill, source)]
        else:
            count = len(heads_of(decode, rank))
            start = mapping.rank_offset_factor * count
            got[rank] = heads_of(prefill, ranks[0])[start : start + count]
    return got


def nixl_push(prefill: int, decode: int) -> Got:
    """Each prefill rank writes: a piece of its heads to each of several decode ranks, or all to a place in one."""
    got: dict[int, dict[int, int]] = {}
    for rank in range(prefill):
        mapping = nixl_mapping(prefill, rank, decode)
        mine, targets = heads_of(prefill, rank), mapping.all_source_ranks
        size = len(mine) // len(targets)
        for number, target in enumerate(targets):
            first = mapping.rank_offset_factor * len(mine) if len(targets) == 1 else 0
            for position, head in enumerate(mine[number * size : (number + 1) * size]):
                got.setdefault(target, {})[first + position] = head
    return {target: [heads[position] for position in sorted(heads)] for target, heads in got.items()}


# ---- MoRIIO -----------------------------------------------------------------------------------------------------------------------------


def moriio_peer(size: int, rank: int, remote_size: int) -> int:
    """Return the one rank of the other engine that a rank of this one moves whole blocks with."""
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_connector

    sizes = {"local_tp_size": size, "remote_tp_size": remote_size}
    for is_mla in (False, True):  # main caches, then index caches
        guarded(
            lambda is_mla=is_mla: moriio_connector.validate_moriio_heterogeneous_tp_kv_heads(
                **sizes, total_num_kv_heads=HEADS, is_mla=is_mla
            )
        )
    return int(guarded(lambda: moriio_connector.get_moriio_remote_tp_rank(rank, size, remote_size)))


def moriio_read(prefill: int, decode: int) -> Got:
    return {rank: heads_of(prefill, moriio_peer(decode, rank, prefill)) for rank in range(decode)}


def moriio_write(prefill: int, decode: int) -> Got:
    return {moriio_peer(prefill, rank, decode): heads_of(prefill, rank) for rank in range(prefill)}


# ---- ours -------------------------------------------------------------------------------------------------------------------------------


def ours(prefill: int, decode: int) -> Got:
    """Heads of the main cache as planned; the index must come too."""

    def layer(name: str, sharding: Sharding, total: int) -> LayerGeometry:
        return LayerGeometry(name, 0, BLOCK_TOKENS, sharding, total, 1, "uint8", "", 1, 1, 1)

    try:
        plan = make_plan((layer("main", Sharding.SPLIT, HEADS), layer("index", Sharding.REPLICATED, 1)), prefill, decode)
    except ProtocolMismatch as error:
        raise Refused(str(error)) from error
    got: dict[int, dict[int, int]] = {}
    index: set[int] = set()
    for (producer, consumer), slices in plan.slices.items():
        for piece in slices:
            if piece.layer == 1:
                index.add(consumer)
                continue
            for step in range(piece.num_heads):
                got.setdefault(consumer, {})[piece.consumer_head + step] = heads_of(prefill, producer)[piece.producer_head + step]
    return {consumer: [heads[position] for position in sorted(heads)] for consumer, heads in got.items() if consumer in index}


ASKED: dict[str, Callable[[int, int], Got]] = {
    "NIXL pull": nixl_pull,
    "NIXL push": nixl_push,
    "MoRIIO read": moriio_read,
    "MoRIIO write": moriio_write,
    "pdserve": ours,
}


def judge(ask: Callable[[int, int], Got], prefill: int, decode: int) -> tuple[str, str]:
    """Return ``yes``, ``refused`` or ``silent``, and why it is not yes."""
    try:
        got = ask(prefill, decode)
    except Refused as refusal:
        return "refused", str(refusal)
    wrong = [rank for rank in range(decode) if rank in got and got[rank] != heads_of(decode, rank)]
    missing = [rank for rank in range(decode) if rank not in got]
    said = [f"decode ranks {ranks} {what}" for ranks, what in ((missing, "get nothing"), (wrong, "get other heads")) if ranks]
    return ("silent", "; ".join(said)) if said else ("yes", "")


def table() -> str:
    """Return the whole answer as text."""
    lines = [
        f"MiniMax-M3's caches, main ones with {HEADS} KV heads and index ones with 1 on every rank: what each mapping code makes of every pair.",
        f"vLLM {vllm.__version__}; made by tests/bench/kv_upstream_pairs.py, which says how it asks.",
        "",
        "prefill  decode   " + "  ".join(f"{name:<12}" for name in ASKED).rstrip(),
    ]
    reasons: dict[str, dict[str, list[str]]] = {name: {} for name in ASKED}
    counts = dict.fromkeys(ASKED, 0)
    for prefill in SIZES:
        for decode in SIZES:
            cells = []
            for name, ask in ASKED.items():
                answer, why = judge(ask, prefill, decode)
                counts[name] += answer == "yes"
                if why:
                    reasons[name].setdefault(f"{answer}: {why}", []).append(f"TP{prefill}→TP{decode}")
                cells.append(f"{answer:<12}")
            lines.append(f"TP{prefill:<7}TP{decode:<7}" + "  ".join(cells).rstrip())
    lines += [f"{'of 16':<18}" + "  ".join(f"{counts[name]:<12}" for name in ASKED).rstrip(), ""]
    for name, found in reasons.items():
        for why, pairs in found.items():
            lines += [f"{name}: {why}", f"    {' '.join(pairs)}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    text = table()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
