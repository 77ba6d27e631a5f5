"""Compare raystow's transport for torchft with torchft's own, on one machine: the time in which a new replica gets a state.

Method. For each figure a sender and a receiver are started anew, as a replica that heals is a new process. The time is that from
the call of ``send_checkpoint`` until ``recv_checkpoint`` has returned. The contestants take turns; a cell is the median over the
rounds. On one node raystow's receiver maps the sender's memory. With *TCP* it is made to believe that it is on another node: its
bytes then go through the loopback device without TLS, as those of torchft always do. *Unchanged*: the receiver has a state of
which 90 % of the tensors are the same. The CPU seconds are those of both processes, without the node worker's. Before each
transfer, memory is taken and returned: otherwise the host of a virtual machine has to provide pages meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import report
import torch
import typer
from rich.console import Console

TENSORS = 60
LIMIT = timedelta(seconds=120)
ALL, TCP, CHANGED = "raystow", "raystow, TCP", "raystow, TCP, 90 % unchanged"
HTTP, CHUNKED, PG = "torchft HTTP", "torchft HTTP, 4 chunks", "torchft process group, gloo"
CONTESTANTS = (ALL, HTTP, TCP, CHUNKED, PG, CHANGED)


def state(total: int, *, changed: int = 0) -> dict[str, Any]:
    """Make a state of float32 tensors, of which every tenth depends on ``changed``."""
    noise = np.random.default_rng(0).integers(0, 1 << 30, total // TENSORS // 4 + 2 * TENSORS, dtype=np.int32)
    count = total // TENSORS // 4
    tensors = {f"layer{i}": torch.from_numpy(noise[i : i + count].copy()).view(torch.float32) for i in range(TENSORS)}
    for i in range(0, TENSORS, 10):
        tensors[f"layer{i}"] += float(changed)
    return {"user": {"default": {"model": tensors}}, "torchft": {"step": 1}}


def transport(name: str, rank: int, store: str, own: dict[str, Any] | None) -> Any:
    """Make the transport of one process."""
    if name in (ALL, TCP, CHANGED):
        from raystow.torchft import CheckpointTransport

        made = CheckpointTransport(None if own is None else lambda: own)
        if rank == 1 and name != ALL:
            made._node = "another"
        return made
    if name == PG:
        from torchft import ProcessGroupGloo
        from torchft.checkpointing.pg_transport import PGTransport

        group = ProcessGroupGloo(timeout=LIMIT)
        group.configure(store, str(rank), rank, 2)
        return PGTransport(group, LIMIT, torch.device("cpu"))
    from torchft.checkpointing import HTTPTransport

    return HTTPTransport(LIMIT, num_chunks=4 if name == CHUNKED else 0)


def begin(address: str) -> None:
    """Join the cluster."""
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def send(pipe: Connection, name: str, address: str, store: str, total: int) -> None:
    """Send one state when the parent process requests it."""
    begin(address)
    sent = state(total)
    sender = transport(name, 0, store, None)
    pipe.send(sender.metadata())
    pipe.recv()
    used, begun = time.process_time(), time.perf_counter()
    sender.send_checkpoint([1], 1, sent, LIMIT)
    seconds = time.perf_counter() - begun
    pipe.recv()
    pipe.send((seconds, time.process_time() - used))
    sender.disallow_checkpoint()
    sender.shutdown()


def receive(pipe: Connection, name: str, address: str, store: str, total: int) -> None:
    """Receive one state when the parent process passes the metadata; report whether its bits are equal."""
    begin(address)
    own = state(total, changed=1) if name == CHANGED else None
    receiver = transport(name, 1, store, own)
    pipe.send(None)
    metadata, used = pipe.recv(), time.process_time()
    got = receiver.recv_checkpoint(0, metadata, 1, LIMIT)
    pipe.send((getattr(receiver, "received", total) / 1e9, time.process_time() - used))
    wanted = state(total)["user"]["default"]["model"]
    model = got["user"]["default"]["model"]
    pipe.send(all(torch.equal(model[key].view(torch.int32), wanted[key].view(torch.int32)) for key in wanted))
    receiver.shutdown()


def measure(name: str, address: str, total: int) -> dict[str, float]:
    """Start both processes and measure one transfer."""
    spawn, store = multiprocessing.get_context("spawn"), torch.distributed.TCPStore("localhost", 0, is_master=True)
    ends, processes = [], []
    targets: tuple[Callable[..., None], ...] = (send, receive)
    for target in targets:
        end, child = spawn.Pipe()
        processes.append(spawn.Process(target=target, args=(child, name, address, f"localhost:{store.port}/x", total)))
        processes[-1].start()
        ends.append(end)
    sender, receiver = ends
    metadata, _ = sender.recv(), receiver.recv()
    np.empty(4 * total, np.uint8)[::4096] = 0  # freed at once
    begun = time.perf_counter()
    sender.send(None)
    receiver.send(metadata)
    received, spent = receiver.recv()
    seconds = time.perf_counter() - begun
    sender.send(None)
    sending, used = sender.recv()
    if not receiver.recv():
        raise RuntimeError(f"{name}: the received state differs")
    figures = {"s": seconds, "s in send_checkpoint": sending, "CPU s": used + spent, "GB over the network": received}
    for process in processes:
        process.join()
    return figures


def main(
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    total: Annotated[float, typer.Option(help="GB of the state.")] = 2.0,
    out: Annotated[Path, typer.Option(help="Folder of the result file.")] = Path("benchmarks/results"),
) -> None:
    """Run the benchmark."""
    console = Console()
    results: dict[str, Any] = {**report.about("raystow", "torchft", "torch", "ray"), "rounds": rounds, "GB": total}
    results["machine"]["GPUs"] = torch.cuda.device_count()
    context = ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in CONTESTANTS[:: -1 if number % 2 else 1]:
            runs[name].append(measure(name, context.address_info["address"], int(total * 1e9)))
            console.print(name, {key: round(value, 2) for key, value in runs[name][-1].items()})
    ray.shutdown()
    table = report.table_of(f"A state of {total:g} GB", *runs[ALL][0], "s, least and most")
    results["results"] = {}
    for name, of in runs.items():
        medians = {key: statistics.median(run[key] for run in of) for key in of[0]}
        results["results"][name] = {**medians, "runs": of}
        spread = [run["s"] for run in of]
        table.add_row(name, *(f"{value:.2f}" for value in medians.values()), f"{min(spread):.2f} to {max(spread):.2f}")
    results["machine"]["load after"] = os.getloadavg()[0]
    seconds = {name: of["s"] for name, of in results["results"].items()}
    goals = {
        "within a node at least as fast as torchft's HTTP transport": seconds[ALL] <= min(seconds[HTTP], seconds[CHUNKED]),
        "over TCP at least as fast as torchft's HTTP transport": seconds[TCP] <= seconds[HTTP],
    }
    report.show(console, [table], goals)
    report.write(console, out, "torchft_transport", results)


if __name__ == "__main__":
    typer.run(main)
