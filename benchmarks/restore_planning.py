"""Measure the time and memory in which a rank of a very large run plans its restore.

Nodes of 8 ranks have saved 1,000 tensors split over all ranks and 300 small replicated ones. The version record lists all
fragments. The classes of a save write the fragments of those nodes that a rank may read first; the run ends if the rank
requests another fragment. The measured code runs in a separate process and is the part of ``Checkpointer.restore_latest`` before
the first read of a pack. The state consists of DTensors on a mesh of all ranks; torch's fake process group simulates the others.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane_save import RANKS, TENSORS, fragment, tensor
from helpers.processes import incarnation
from report import peak_memory

from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.digest import stored_digest
from raystow.storage.format import keys
from raystow.storage.format.manifest import TENSOR, Chunk, Fragment, path_text
from raystow.storage.format.root import Entry
from raystow.storage.format.version_record import FragmentInfo, VersionRecord
from raystow.workers.protocol.coordinator_client import CoordinatorClient

SMALL = 300
REPOSITORY, ATTEMPT = "5e" * 16, "65c5e0a080b634de"


def make(folder: Path, sample: set[int], nodes: int) -> Entry:
    """Write the record and the fragments of some of the nodes; return the root's entry."""
    infos = list[FragmentInfo]()
    _, pattern = fragment(0, nodes)
    for node in range(nodes):
        info = replace(
            pattern.info, node=node, size=363_000, digest="5e" * 32, ranks=tuple(range(node * RANKS, (node + 1) * RANKS))
        )
        if node in sample:
            made, _ = fragment(node, nodes)
            rows = (*made.chunks, *(small_row(i) for i in range(SMALL))) if node == 0 else made.chunks
            data = Fragment(node, rows, ()).dump()
            folder.joinpath(str(node)).write_bytes(data)
            extra = len(rows) - len(made.chunks)
            info = replace(info, size=len(data), digest=stored_digest(data).hex(), chunks=len(rows), raw=info.raw + 4 * extra)
        infos.append(info)
    record = VersionRecord(REPOSITORY, 1, ATTEMPT, 1, 100, 1.5, nodes * RANKS, fragments=tuple(infos), packs=None)
    data = record.dump()
    folder.joinpath("record").write_bytes(data)
    return record.entry(stored_digest(data), len(data))


def small(i: int) -> str:
    """Return the name of a replicated tensor."""
    return f"optimizer.state.layers.{i}.step"


def small_row(i: int) -> Chunk:
    """Return the chunk of a replicated tensor, stored by the first rank that holds it."""
    name, coding = small(i), Coding(False, False, ("raw",), (4,), b"", 65536)
    return Chunk(
        name, path_text(tuple(name.split("."))), TENSOR, "float32", (), (), (), 0, "optimizer", 0, 4 * i, coding, 0, bytes(32)
    )


class Sample:
    """A store with the objects of the sample."""

    uri = "memory://sample"

    def __init__(self, folder: Path) -> None:
        self._folder, self.asked = folder, dict[str, int]()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return an object; end the run if it is not in the sample."""
        parts = keys.place_of(key)
        data = self._folder.joinpath("record" if parts is None else str(parts[0])).read_bytes()
        self.asked[key] = len(data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a range of an object; end the run if it is not in the sample."""
        return self.get(key, max_bytes=length)[start : start + length]


class Coordinator(CoordinatorClient):
    """A coordinator that answers with the record and with the nodes that have each object in memory."""

    def __init__(self, entry: Entry, record: bytes, nodes: int) -> None:
        self._entry, self._record, self._nodes = entry, record, nodes

    def call(self, request: Any, timeout: float) -> Any:
        from raystow.workers.protocol.messages import RestoreChoice

        return RestoreChoice(self._entry, {node: (f"node-{node}",) for node in range(0, self._nodes, 2)}, self._record)

    def send(self, request: Any) -> None: ...


def plan(folder: str, entry: Entry, nodes: int, rank: int, world: int, pipe: Any) -> None:
    """Plan once in this process and report the cost."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from raystow.orchestrator.restore.agreement import ClusterAgreement
    from raystow.orchestrator.restore.planner import RestoreOptions, plan_restore
    from raystow.storage.repository import Repository
    from raystow.workers.protocol.messages import RestoreVote

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("shard",))
    into: dict[str, Any] = {small(i): torch.empty(()) for i in range(SMALL)}
    for i in range(TENSORS):
        name, _, dtype, shape, _, _ = tensor(i, nodes)
        local = torch.empty((shape[0] // world, shape[1]), dtype=getattr(torch, dtype))  # untouched memory is not allocated
        into[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
    store = Sample(Path(folder))

    repository = Repository(store, REPOSITORY)  # type: ignore[arg-type]
    coordinator = Coordinator(entry, Path(folder, "record").read_bytes(), nodes)
    before, wall, cpu = peak_memory(), time.perf_counter(), time.process_time()
    vote = RestoreVote(rank, world, incarnation("process"), 1, 600.0)
    agreement = ClusterAgreement(
        repository, coordinator, vote, itertools.count(2), lambda: "nobody", here=f"node-{rank // RANKS}"
    )
    chosen = agreement.settle(None, "")
    assert chosen is not None
    made = plan_restore(agreement.version(chosen), into, RestoreOptions(rank, world), sources=agreement.sources)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert made.raw == sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in into.values())
    report = {
        "seconds": wall,
        "cpu": cpu,
        "peak": peak_memory(),
        "grown": peak_memory() - before,
        "fragments": len(store.asked),
        "metadata": entry.size + sum(store.asked.values()),
    }
    plan = [f"node {part.node}: {part.nbytes:,} bytes from {part.source}" for part in made.reads]
    pipe.send({**report, "chunks": sum(part.chunks for part in made.reads), "plan": plan})


def planning(rounds: int, nodes: int) -> dict[str, Any]:
    """Measure plans of a middle rank, at the same world size and at half of it."""
    context = multiprocessing.get_context("spawn")
    worlds = {"same": nodes * RANKS, "half": nodes * RANKS // 2}
    results: dict[str, Any] = {name: {"ranks": world, "rounds": []} for name, world in worlds.items()}
    with tempfile.TemporaryDirectory() as folder:
        sample = {0, *(node for world in worlds.values() for node in around(world // 3, world, nodes))}
        entry = make(Path(folder), sample, nodes)
        for turn in range(rounds):
            for name in sorted(worlds, reverse=bool(turn % 2)):
                ours, theirs = context.Pipe()
                process = context.Process(target=plan, args=(folder, entry, nodes, worlds[name] // 3, worlds[name], theirs))
                process.start()
                theirs.close()
                results[name]["rounds"].append(ours.recv())
                process.join()
    for result in results.values():
        for what in ("seconds", "cpu"):
            result[what] = statistics.median(one[what] for one in result["rounds"])
        for what in ("peak", "grown", "fragments", "metadata", "chunks"):
            result[what] = max(one[what] for one in result["rounds"])
        result["plan"] = result["rounds"][0]["plan"]
        for one in result["rounds"]:
            del one["plan"]
    return {**results, "record": entry.size, "chunk rows": nodes * RANKS * TENSORS + SMALL}


def around(rank: int, world: int, nodes: int) -> set[int]:
    """Return the nodes whose fragments a rank of ``world`` reads first."""
    saved = nodes * RANKS
    first = rank * saved // world // RANKS
    return {min(rank // RANKS, nodes - 1), *range(first - 1, first + 3)}
