"""Measure restores from each source. For plans of very large runs, see ``scale``.

*Restoring.* One or four ranks save a state of sharded DTensors; the same number of ranks, or three, restore it in place. In one
case the state is replicated on all ranks. One run compares: raystow from the memory of the saving node, from another node's
memory, from a local folder, the same with one rank per node, from an S3 server; ``torch.distributed.checkpoint.load`` from a
local folder; ``torch.load`` of one file per rank (same number of ranks only). Ranks are actors on a Ray cluster of four nodes
on this machine, in gloo process groups. Data are normal random numbers, fp32 and bf16, of which raystow stores four fifths.

Method. Contestants take turns in every round, in rotating order; a cell is the median. Before each restore the tensors are set
to zero; rank 0's clock runs between two barriers. Every tensor is compared bit for bit afterwards. Rates are of raw bytes of
all ranks. Files are in the page cache. Node workers count the bytes from the store, each once for all ranks; they are compared
with the version's stored bytes. raystow checks two digests per chunk and decodes; the other two do neither.

The S3 server is the one in RAYSTOW_TEST_S3 or AWS_ENDPOINT_URL, with credentials in the
environment; otherwise moto, a single Python process that is slower than a real server.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import ray
import report
import torch
import typer
from control_plane import s3
from ray.cluster_utils import Cluster
from report import table_of
from rich.console import Console
from rich.table import Table

import raystow
from raystow.orchestrator.restore.what_if import plan_world
from raystow.workers.cache.node_cache_store import NodeCacheStore

CASES = ((1, 1, False), (4, 4, False), (4, 3, False), (4, 3, True))
"""Saving ranks, restoring ranks, and whether the state is replicated on each rank."""
OURS = ("memory", "peer", "folder", "apart", "s3")
WAYS = (*OURS, "dcp", "torch.load")
TITLES = {
    "memory": "raystow, this node's memory",
    "peer": "raystow, another node's memory",
    "folder": "raystow, local folder",
    "apart": "the same, a node for each rank",
    "s3": "raystow, S3",
    "dcp": "dcp.load, local folder",
    "torch.load": "torch.load, local folder",
}
SHAPES = ((4096, 1024), (1024, 1024), (3072, 1024), (1, 1024)) * 7
KEPT = 2 << 30
AMPLIFICATION = 1.05


def whole(number: int, shape: tuple[int, int]) -> torch.Tensor:
    """Return tensor ``number`` of the state; every third is bf16."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.02
    return drawn.bfloat16() if number % 3 == 0 else drawn


class Rank:
    """A process that can join a world as any rank."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        logging.getLogger("raystow").setLevel(logging.ERROR)
        self.read = read = Counter[str]()
        self._checkpointers: dict[str, raystow.Checkpointer] = {}
        close = NodeCacheStore.close

        def counted(self: NodeCacheStore) -> None:
            read.update(self.read)
            close(self)

        NodeCacheStore.close = counted  # type: ignore[method-assign]

    def join(self, where: str, rank: int, world: int, replicated: bool) -> int:
        """Join a world as a rank, and create the state; return its raw bytes."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        self.rank, self.world = rank, world
        self.state: dict[str, Any] = {"step": 7, "model": {}}
        self.kept: dict[str, torch.Tensor] = {}
        for number, shape in enumerate(SHAPES):
            placement = Replicate() if replicated else Shard(0)
            tensor = distribute_tensor(whole(number, shape), mesh, [placement], src_data_rank=None)
            self.state["model"][f"layers.{number}.weight"] = tensor
            self.kept[f"layers.{number}.weight"] = tensor.to_local().clone()
        return sum(tensor.nbytes for tensor in self.kept.values())

    def leave(self) -> None:
        """Leave the world."""
        import torch.distributed as dist

        for checkpointer in self._checkpointers.values():
            checkpointer.close()
        self._checkpointers.clear()
        dist.destroy_process_group()

    def save(self, way: str, place: str) -> None:
        """Save the state with one of the contestants."""
        import torch.distributed.checkpoint as dcp

        if way in OURS:
            with raystow.Checkpointer(
                place, memory=raystow.Memory(cache=KEPT if way == "memory" else 0), replication=raystow.Replication(0)
            ) as checkpointer:
                checkpointer.save(self.state, step=1).result(120)
        elif way == "dcp":
            dcp.save(self.state, checkpoint_id=place)
        else:
            torch.save({"step": 7, "model": self.kept}, f"{place}-{self.rank}.pt")

    def restore(self, way: str, place: str) -> tuple[float, dict[str, int]]:
        """Restore once; return seconds until all ranks are done, and this rank's stored bytes by source."""
        import torch.distributed as dist

        for tensor in self.state["model"].values():
            tensor.to_local().zero_()
        if way in OURS and place not in self._checkpointers:
            self._checkpointers[place] = raystow.Checkpointer(place, replication=raystow.Replication(0))
        self.read.clear()
        dist.barrier()
        start = time.perf_counter()
        self._load(way, place)
        dist.barrier()
        seconds = time.perf_counter() - start
        for name, tensor in self.state["model"].items():
            if not torch.equal(tensor.to_local(), self.kept[name]):
                raise SystemExit(f"{way} did not give back {name}")
        return seconds, dict(self.read)

    def _load(self, way: str, place: str) -> None:
        import torch.distributed.checkpoint as dcp

        if way in OURS:
            assert self._checkpointers[place].restore_latest(into=self.state) is not None
        elif way == "dcp":
            dcp.load(self.state, checkpoint_id=place)
        else:
            loaded = torch.load(f"{place}-{self.rank}.pt")
            for name, tensor in self.state["model"].items():
                tensor.to_local().copy_(loaded["model"][name])


@contextlib.contextmanager
def nodes() -> Iterator[dict[str, list[Any]]]:
    """Start processes on the nodes of a Ray cluster: four on one node (``near``), whose worker keeps the saved versions, four on
    another node (``far``), and one on each of four nodes (``apart``)."""
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent / "tests"), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for node in ("near", "far", "third", "fourth"):
        cluster.add_node(num_cpus=4, resources={node: 100})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        actor = ray.remote(Rank)
        where = {"near": ["near"] * 4, "far": ["far"] * 4, "apart": ["far", "third", "fourth", "near"]}
        yield {group: [actor.options(num_cpus=0, resources={node: 1}).remote() for node in on] for group, on in where.items()}
    finally:
        ray.shutdown()
        cluster.shutdown()


def every(ranks: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """Call a method of all ranks concurrently."""
    return list(ray.get([getattr(rank, method).remote(*args) for rank in ranks], timeout=600))


def measure(on: dict[str, list[Any]], folder: Path, bucket: str, case: tuple[int, int, bool], rounds: int) -> dict[str, Any]:
    """Save with ``case[0]`` ranks and restore with ``case[1]``, in each way and round."""
    saved, restored, replicated = case
    name = f"{saved}-{restored}{'-whole' * replicated}"
    places = {way: f"{folder}/{name}-{way}" for way in WAYS} | {"s3": f"{bucket}/{name}"}
    places["peer"], places["apart"] = places["memory"], places["folder"]
    groups = {way: {"memory": "near", "apart": "apart"}.get(way, "far") for way in WAYS}
    ways = [way for way in WAYS if way != "torch.load" or saved == restored]
    for ranks in on.values():
        join(ranks[:saved], folder, replicated)
    for way in ways:
        if way not in ("peer", "apart"):
            every(on[groups[way]][:saved], "save", way, places[way])
    for ranks in on.values():
        every(ranks[:saved], "leave")
        raw = join(ranks[:restored], folder, replicated)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    read: dict[str, dict[str, int]] = {}
    for turn in range(-1, rounds):  # warm-up: connections, node workers, compilation
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            figures = every(on[groups[way]][:restored], "restore", way, places[way])
            if turn >= 0:
                seconds[way].append(figures[0][0])
                read[way] = dict(sum((Counter(of) for _, of in figures), Counter[str]()))
    for ranks in on.values():
        every(ranks[:restored], "leave")
    newest = raystow.open(places["folder"]).latest()
    assert newest is not None
    return {
        "saved by": saved,
        "restored by": restored,
        "replicated": replicated,
        "raw": raw,
        "stored": newest.bytes,
        "planned, a node for each rank": plan_world(newest, restored, per_node=1, whole=replicated).amplification,
        "ways": {
            way: {
                "seconds": statistics.median(times),
                "GB/s": raw / 1e9 / statistics.median(times),
                "all seconds": times,
                "read": read.get(way, {}),
                **({"store/needed": from_store(read[way]) / newest.bytes} if way in OURS else {}),
            }
            for way, times in seconds.items()
        },
    }


def from_store(read: dict[str, int]) -> int:
    """Return the bytes read from the store, including those that another node should have sent."""
    return read.get("store", 0) + read.get("instead", 0)


def join(ranks: Sequence[Any], folder: Path, replicated: bool) -> int:
    """Make the ranks a world; return the raw bytes of its state."""
    where = tempfile.mktemp(dir=folder, prefix="group-")
    return sum(ray.get([rank.join.remote(where, i, len(ranks), replicated) for i, rank in enumerate(ranks)], timeout=300))


def claims(cases: list[dict[str, Any]]) -> dict[str, bool]:
    """Return raystow's goals, and whether this run meets them."""
    asked = [case["ways"][way]["store/needed"] for case in cases for way in ("folder", "apart", "s3")]
    ways = [case["ways"][way] for case in cases for way in ("memory", "peer")]
    return {
        f"bytes from the store at most {AMPLIFICATION} times what is needed": max(asked) <= AMPLIFICATION,
        "nothing from the store while nodes have it in memory": all(not from_store(way["read"]) for way in ways),
    }


def tables(cases: list[dict[str, Any]]) -> Iterator[Table]:
    """Yield a table for each case."""
    for case in cases:
        held = "each holds all" if case["replicated"] else "split"
        title = f"{case['saved by']} -> {case['restored by']} ranks, {held}, {case['raw'] / 1e6:.0f} MB raw"
        grid = table_of(title, "s", "slowest", "GB/s", "MB: memory", "peer", "store", "by needed")
        for way, figures in case["ways"].items():
            of = figures["read"]
            sums = of.get("memory", 0), of.get("peer", 0), from_store(of)
            read = [f"{nbytes / 1e6:.1f}" if way in OURS else "" for nbytes in sums]
            ratio = f"{figures['store/needed']:.4f}" if way in OURS else ""
            times = f"{figures['seconds']:.2f}", f"{max(figures['all seconds']):.2f}", f"{figures['GB/s']:.2f}"
            grid.add_row(TITLES[way], *times, *read, ratio)
        yield grid


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    folder: Annotated[Path | None, typer.Option(help="parent folder of the local store, which is deleted at the end")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="rounds that count")] = 5,
) -> None:
    """Measure restoring."""
    for name in ("RAYSTOW_TRUSTED_KEYS", "RAYSTOW_SIGNING_KEY"):
        os.environ.pop(name, None)
    console = Console(width=120)
    about: dict[str, Any] = {
        **report.about("raystow", "ray", "torch", "obstore", "boto3", "pyarrow"),
        "rounds": rounds,
        "state": {"tensors": len(SHAPES), "elements": sum(map(math.prod, SHAPES))},
    }
    with tempfile.TemporaryDirectory(dir=folder) as place, s3() as (bucket, server):
        about["S3 server"] = server
        with nodes() as on:
            cases = [measure(on, Path(place), bucket, case, rounds) for case in CASES]
    about["load after restoring"] = os.getloadavg()[0]
    held = claims(cases)
    console.print(f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {about['date']}; S3: {server}")
    report.show(console, tables(cases), held)
    report.write(console, out, "restore", {**about, "restoring": cases, "claims": held})


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    typer.run(main)
