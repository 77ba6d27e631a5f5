"""Measure the cost of TLS between node workers: throughput over the loopback device, and CPU seconds per GB of both ends.

Method. One process serves an object in memory with raystow's ``PeerServer``, another one reads it in ranges of 16 MiB with
``Peers``, on one or more connections. Runs with and without TLS alternate; a cell is the median over the rounds. The loopback
device is faster than most networks, so the loss of throughput is an upper bound. CPU seconds include those of the kernel.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import ssl
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import report
import typer
from rich.console import Console

from raystow.storage.clock import SYSTEM
from raystow.workers.cache.fetcher import Fetcher
from raystow.workers.cache.tier import MemoryTier
from raystow.workers.journal.node_journal import NodeJournal
from raystow.workers.node.node import NoPeers
from raystow.workers.protocol.messages import AttemptKey, Contact
from raystow.workers.replication.peer_server import PeerServer
from raystow.workers.replication.peers import Peers
from raystow.workers.replication.replica_store import ReplicaStore
from raystow.workers.states.staged_states import StagedStates
from raystow.workers.usage import Usage

SIZE, RANGE = 256 << 20, 16 << 20


def _known(contact: Contact, node: str) -> Contact:
    return contact


def cpu() -> float:
    """Return the CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(pipe: Connection, tls: bool) -> None:
    """Serve until the pipe closes; send the contact, then the CPU seconds on each request through the pipe."""
    tier = MemoryTier(2 * SIZE)
    peers = Peers(lambda node: server.contact, SYSTEM)
    fetcher = Fetcher(tier, peers, budget=SIZE, node="server")
    journal = NodeJournal("server", 1 << 20, NoPeers(), SYSTEM)
    parts, usage = (fetcher, ReplicaStore(tier), journal, StagedStates(1 << 20)), Usage(SYSTEM)
    server = PeerServer("127.0.0.1", *parts, usage=usage, tls=tls)
    tier.put(AttemptKey("r", 1, "a" * 16), 0, "pack", [os.urandom(1 << 20) * (SIZE >> 20)])
    with fetcher.visit():
        pipe.send(server.contact)
        while pipe.recv():
            pipe.send(cpu())


def measure(pipe: Connection, peers: Peers, connections: int, total: int) -> dict[str, float]:
    """Read ``total`` bytes."""
    targets = [bytearray(RANGE) for _ in range(connections)]

    def read(number: int) -> None:
        for start in range(number * RANGE, total, connections * RANGE):
            if not peers.read("server", "r", "pack", start % SIZE, memoryview(targets[number])):
                raise RuntimeError("the object is not there")

    def used() -> tuple[float, float]:
        pipe.send(True)
        return pipe.recv(), cpu()

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(read, range(connections)))  # connects, and allocates the memory
        before, begun = used(), time.perf_counter()
        list(pool.map(read, range(connections)))
        seconds, after = time.perf_counter() - begun, used()
    sent, received = ((b - a) / total * 1e9 for a, b in zip(before, after, strict=True))
    return {"GB/s": total / seconds / 1e9, "CPU s/GB of the sender": sent, "CPU s/GB of the receiver": received}


def main(
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    total: Annotated[float, typer.Option(help="GB to read in each measurement.")] = 2.0,
    connections: Annotated[list[int], typer.Option(help="Connections at a time.")] = [1, 4],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = Path("benchmarks/results"),
) -> None:
    """Run the benchmark."""
    console, spawn = Console(), multiprocessing.get_context("spawn")
    results: dict[str, Any] = {
        **report.about("raystow", "cryptography"),
        "openssl": ssl.OPENSSL_VERSION,
        "rounds": rounds,
        "GB": total,
    }
    ends = {}
    for name, tls in (("TLS", True), ("plain", False)):
        pipe, child = spawn.Pipe()
        process = spawn.Process(target=serve, args=(child, tls), daemon=True)
        process.start()
        contact = pipe.recv()
        ends[name] = pipe, Peers(functools.partial(_known, contact), SYSTEM)
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for count in connections:
            for name, (pipe, peers) in ends.items():
                runs.setdefault((count, name), []).append(measure(pipe, peers, count, int(total * 1e9) // RANGE * RANGE))
    for pipe, peers in ends.values():
        peers.close()
        pipe.send(False)
    headings = [*next(iter(runs.values()))[0]]
    table = report.table_of("Reads from another node worker", *headings)
    results["results"] = {}
    for (count, name), of in runs.items():
        medians = {heading: statistics.median(run[heading] for run in of) for heading in headings}
        results["results"].setdefault(f"{count} connections", {})[name] = {**medians, "runs": of}
        table.add_row(f"{count} connections, {name}", *(f"{value:.2f}" for value in medians.values()))
    results["machine"]["load after"] = os.getloadavg()[0]
    lost = {c: 1 - by["TLS"]["GB/s"] / by["plain"]["GB/s"] for c, by in results["results"].items()}
    report.show(console, [table], {"TLS costs at most a third of the throughput": max(lost.values()) <= 1 / 3})
    report.write(console, out, "peer_tls", results)


if __name__ == "__main__":
    typer.run(main)
