"""Measure the cost of a save by many nodes for the coordinator.

The coordinator is the product's class on an event loop in a separate process, with the real committer and a real store, but
without Ray. This process simulates the nodes: a few build and write their fragment of real ``Chunk`` rows, the others report the
same numbers. Reports are sent through a pipe, encoded as messages, as they are sent over the network.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import ray
from helpers.begins import begin_of
from helpers.processes import incarnation
from report import peak_memory

from raystow.orchestrator.coordinator.actor import CoordinatorActor
from raystow.state.coverage import coverage, total
from raystow.storage.coding.chunk import Coding, packed
from raystow.storage.coding.digest import stored_digest
from raystow.storage.format import keys
from raystow.storage.format.manifest import TENSOR, Chunk, Fragment, path_text
from raystow.storage.format.root import Entry
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.repository import Repository, create_repository
from raystow.workers.packing.packer import PACK
from raystow.workers.protocol.messages import AwaitRanks, Begin, JoinRun, PartStaged, PartStored, RankFinished, Ticket, encode
from raystow.workers.ray_connection import RayConnection

T = TypeVar("T")

RANKS, TENSORS = 8, 1000
_TICKET = Ticket(10**6, "0" * 16, 10**4, 600.0, 10**6)

DIGESTS = tuple((group, 7) for group in range(6))
"""Of the groups that each rank compares with all others: three of tensors, and three of plain values."""

SAMPLE = 4
"""Nodes that write their fragment as Parquet."""

_KINDS = (  # 1 MiB per rank and kind of tensor: group, dtype, shard, codecs and stored bytes of its planes
    ("weights", "bfloat16", (512, 1024), ("raw", "zstd"), (524288, 172032)),
    ("optimizer", "float32", (256, 1024), ("raw", "raw", "pack7", "zstd"), (262144, 262144, 229376, 86016)),
    ("optimizer", "float32", (256, 1024), ("raw", "raw", "raw", "zstd"), (262144, 262144, 262144, 90112)),
)


@dataclass(frozen=True)
class Report:
    """A node's report: coverage of each rank, and fragment."""

    covered: tuple[int, ...]
    info: FragmentInfo


def tensor(i: int, nodes: int) -> tuple[str, str, str, tuple[int, int], tuple[int, int], Coding]:
    """Return name, group, dtype, global shape, shard shape and coding of tensor ``i``."""
    group, dtype, shard, codecs, stored = _KINDS[i % len(_KINDS)]
    coded = stored[-1]
    streams = packed((coded // 4,) * 4)
    shape = (shard[0] * RANKS * nodes, shard[1])
    name = f"{'model' if group == 'weights' else 'optimizer.state'}.layers.{i // 12}.{i % 12}"
    return name, group, dtype, shape, shard, Coding(True, dtype == "float32", codecs, stored, streams, 65536)


def fragment(node: int, nodes: int) -> tuple[Fragment, Report]:
    """Return the rows of one node, and its report without size and digest of the file."""
    chunks: list[Chunk] = []
    covered = [0] * RANKS
    digests = memoryview(np.random.default_rng(node).bytes(32 * RANKS * TENSORS))
    ends: dict[str, tuple[int, int]] = {}  # group -> number and size of the open pack
    for i in range(TENSORS):
        name, group, dtype, shape, shard, coding = tensor(i, nodes)
        path = path_text(tuple(name.split(".")))
        for local in range(RANKS):
            pack, start = ends.get(group, (0, 0))
            if start + coding.size > PACK:
                pack, start = pack + 1, 0
            offset = ((node * RANKS + local) * shard[0], 0)
            digest = bytes(digests[32 * len(chunks) :][:32])
            raw = int.from_bytes(digest[:8], "little")
            chunks.append(Chunk(name, path, TENSOR, dtype, shape, offset, shard, node, group, pack, start, coding, raw, digest))
            ends[group] = pack, start + coding.size
            covered[local] = total((covered[local], coverage(name, dtype, shape, (offset, shard))))
    ranks = tuple(range(node * RANKS, (node + 1) * RANKS))
    raw_bytes, stored = sum(chunk.nbytes for chunk in chunks), sum(chunk.coding.size for chunk in chunks)
    packs = sum(last + 1 for last, _ in ends.values())
    info = FragmentInfo(node, 0, "", ranks, len(chunks), raw_bytes, stored, 0.017, packs=packs)
    return Fragment(node, tuple(chunks), ()), Report(tuple(covered), info)


def report(node: int, nodes: int) -> tuple[Report, bytes]:
    """Return the report of a node of the sample, and its fragment as Parquet."""
    made, node_report = fragment(node, nodes)
    data = made.dump()
    return replace(node_report, info=replace(node_report.info, size=len(data), digest=stored_digest(data).hex())), data


def reports(nodes: int) -> list[tuple[Report, bytes]]:
    """Return the reports of all nodes; those outside the sample say what node 0 does, with random coverage and digests."""
    pattern, data = report(0, nodes)
    made = [(pattern, data)]
    for node in range(1, nodes):
        if node % max(1, nodes // SAMPLE) == 0:
            made.append(report(node, nodes))
            continue
        random = np.random.default_rng(node)
        ranks = tuple(range(node * RANKS, (node + 1) * RANKS))
        info = replace(pattern.info, node=node, ranks=ranks, digest=random.bytes(32).hex())
        made.append((Report(tuple(random.integers(0, 1 << 63, RANKS).tolist()), info), b""))
    return made


def coordinate(pipe: Connection, uri: str, nodes: int) -> None:
    """Run the coordinator in its process."""
    logging.disable(logging.CRITICAL)
    asyncio.run(_coordinate(pipe, uri, nodes))


async def _coordinate(pipe: Connection, uri: str, nodes: int) -> None:
    alive = [{"NodeID": f"node-{node}", "Alive": True} for node in range(nodes)]
    ray.nodes = lambda: alive
    here = SimpleNamespace(get_node_id=lambda: "node-0", get_job_id=lambda: "1")
    ray.get_runtime_context = lambda: here  # Ray's function would start a cluster
    connection = RayConnection("nowhere", "none", "1", "node-0")
    RayConnection.here = lambda: connection  # type: ignore[method-assign]
    actor = CoordinatorActor(uri)
    repository = (await actor.start()).repository
    pipe.send(peak_memory())
    start = time.process_time()
    for rank in range(nodes * RANKS):
        await _call(actor.answer(JoinRun(rank, incarnation(f"process-{rank}", repository), nodes * RANKS)))
    pipe.send(time.process_time() - start)
    while (timed := pipe.recv()) is not None:
        wall, start = time.perf_counter(), time.process_time()
        reports = [(*pipe.recv(), pipe.recv()) for _ in range(nodes)]
        gc.freeze()  # the reports, which a coordinator gets one by one
        held = _timed_tasks() if timed else [0.0]
        await asyncio.sleep(0)
        version = await _save(actor, reports)
        pipe.send((version.id, time.process_time() - start, time.perf_counter() - wall, peak_memory(), max(held)))


def _timed_tasks() -> list[float]:
    """Measure from now on for how many seconds of CPU each step of a task holds the event loop; return the longest ones."""
    run, held = asyncio.Handle._run, [0.0]

    def timed(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        if (took := time.thread_time() - start) > held[-1]:
            held.append(took)

    asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]
    return held


async def _save(actor: CoordinatorActor, reports: Sequence[tuple[list[Begin], Report, Report]]) -> Entry:
    """Send every call of a save, in the order with the most calls waiting concurrently.

    A node reports its part twice: when it is in memory, and when it is durable.
    """
    tickets: list[Ticket] = []
    for begins, _, _ in reports:
        tickets += [await _call(actor.answer(begin)) for begin in begins][:1]
    waiting = [asyncio.create_task(actor.answer(AwaitRanks(ticket))) for ticket in tickets]
    for ticket, (begins, node_report, _) in zip(tickets, reports, strict=True):
        for begin, covered in zip(begins, node_report.covered, strict=True):
            await _call(actor.answer(RankFinished(ticket, begin.request.rank, covered, DIGESTS)))
    await asyncio.gather(*waiting)
    for ticket, (_, node_report, _) in zip(tickets, reports, strict=True):
        await _call(actor.answer(PartStaged(ticket, node_report.info)))
    sealed = [
        asyncio.create_task(actor.answer(PartStored(ticket, node_report.info)))
        for ticket, (_, _, node_report) in zip(tickets, reports, strict=True)
    ]
    return (await asyncio.gather(*sealed))[0].entry


async def _call(coroutine: Coroutine[Any, Any, T]) -> T:
    """Call as Ray calls an actor: in a separate task, so that awakened tasks run before the next call."""
    return await asyncio.create_task(coroutine)


def simulate(uri: str, nodes: int, saves: int) -> dict[str, Any]:
    """Save ``saves`` times with a number of nodes; return the highest cost of a save for the coordinator. The tasks of one more
    save are timed, which takes CPU time itself.

    ``cpu``: seconds of all threads of its process, from the first byte of the nodes' reports to the committed version. ``peak``:
    peak memory of its process after the last save, in bytes; ``empty``: the same before the first rank joined.
    """
    repository = create_repository(uri)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    made = reports(nodes)
    built = time.perf_counter() - start
    whole = total(covered for node_report, _ in made for covered in node_report.covered)
    pipe, theirs = context.Pipe()
    process = context.Process(target=coordinate, args=(theirs, uri, nodes))
    process.start()
    empty, joining = pipe.recv(), pipe.recv()
    costs = []
    for save in range(1, saves + 2):
        pipe.send(save > saves)
        for node, (node_report, _) in enumerate(made):
            pipe.send((_begins(repository.id, node, nodes, save, whole), node_report))
            pipe.send(node_report)
        costs.append(pipe.recv())
    pipe.send(None)
    process.join()
    return {
        "nodes": nodes,
        "ranks": nodes * RANKS,
        "chunk rows": nodes * RANKS * TENSORS,
        "packs": sum(node_report.info.packs or 0 for node_report, _ in made),
        "cpu": max(cpu for _, cpu, *_ in costs[:-1]),
        "cpu of each": [cpu for _, cpu, *_ in costs[:-1]],
        "wall": max(wall for *_, wall, _, _ in costs[:-1]),
        "cpu of joining": joining,
        "longest task": costs[-1][-1],
        "largest message": max(len(encode(PartStored(_TICKET, node_report.info))) for node_report, _ in made),
        "peak": max(peak for *_, peak, _ in costs),
        "empty": empty,
        "building the fragments": built,
        "fragment": max(len(data) for _, data in made),
        **_checked(repository, [(node_report, data) for node_report, data in made if data], saves + 1, nodes),
    }


def _begins(repository: str, node: int, nodes: int, save: int, whole: int) -> list[Begin]:
    return [
        begin_of(
            rank,
            nodes * RANKS,
            incarnation(f"process-{rank}", repository),
            save,
            f"node-{node}",
            save * 100,
            600.0,
            0,
            0 if rank else whole,
            metrics={"loss": "2.1"},
        )
        for rank in range(node * RANKS, (node + 1) * RANKS)
    ]


def _checked(repository: Repository, sample: Sequence[tuple[Report, bytes]], saves: int, nodes: int) -> dict[str, Any]:
    """Check the newest record against the nodes' reports; return its size."""
    version = repository.latest()
    assert version is not None
    record = version.record
    assert (len(repository.versions()), len(record.fragments), record.world_size) == (saves, nodes, nodes * RANKS)
    by_ranks = {info.ranks: info for info in record.fragments}
    for node_report, data in sample:
        info = by_ranks[node_report.info.ranks]
        assert (info.digest, info.size) == (stored_digest(data).hex(), len(data))
        key = keys.fragment(version.id, version.attempt, info.node)
        assert len(Fragment.load(data, info.node, key).chunks) == info.chunks == RANKS * TENSORS
    return {"record": version.entry.size}
