"""Measure the first restore of a process on a CPU: each case in a new process, in turn.

*State.* A transformer of 13.8M parameters after a step of AdamW: bf16 weights, fp32 master copy and two moments, 193 MB. It is
saved once to a local folder with raystow, ``torch.save`` and ``torch.distributed.checkpoint`` (no process group), and with
raystow to the S3 server of RAYSTOW_TEST_S3 if that is set.

*Method.* Each measurement is a new process with torch loaded that creates the target tensors, imports what the case needs, and
then restores once in place; every tensor is compared bit for bit afterwards. Cases take turns in every round; a cell is the
median. ``open`` is ``raystow.open(uri).latest().restore(into)``, ``restore_latest`` is ``raystow.restore_latest(uri, into)``.
Files are in the page cache, Python's bytecode of all modules among them, as after an installation. ``boto3`` downloads the stored
bytes of raystow's packs in ranges of 16 MiB on eight threads, without a digest and without decoding.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

LOCAL = ("raystow: open", "raystow: restore_latest", "dcp.load", "torch.load")
REMOTE = ("raystow: restore_latest, S3", "boto3 download, S3")
LAYERS, WIDTH, VOCABULARY = 6, 384, 8192
IMPORT = "import of raystow, Ray and torch loaded"
_RANGE = 16 << 20


def state(seed: int | None) -> dict[str, Any]:
    """Return the state, drawn with ``seed`` and trained for a step; with None, of the same shapes and filled with ones."""
    import torch

    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.qkv": (3 * WIDTH, WIDTH),
            f"layers.{layer}.out": (WIDTH, WIDTH),
            f"layers.{layer}.up": (4 * WIDTH, WIDTH),
            f"layers.{layer}.down": (WIDTH, 4 * WIDTH),
            f"layers.{layer}.norm": (WIDTH,),
        }
    if seed is None:
        made = {name: torch.ones(shape) for name, shape in shapes.items()}
        moments = {kind: {name: torch.ones(shape) for name, shape in shapes.items()} for kind in ("exp_avg", "exp_avg_sq")}
        return {"step": 0, "model": {name: one.bfloat16() for name, one in made.items()}, "master": made, **moments}
    draw = torch.Generator().manual_seed(seed)
    made = {name: torch.nn.Parameter(torch.randn(shape, generator=draw) * 0.02) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(made.values(), lr=1e-3)
    for _ in range(3):
        for one in made.values():
            one.grad = torch.randn(one.shape, generator=draw) * 1e-3
        optimizer.step()
    moments = {kind: {name: optimizer.state[one][kind] for name, one in made.items()} for kind in ("exp_avg", "exp_avg_sq")}
    master = {name: one.detach() for name, one in made.items()}
    return {"step": 3, "model": {name: one.bfloat16() for name, one in master.items()}, "master": master, **moments}


def tensors(of: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a state by name."""
    return {f"{part}.{name}": one for part, inner in of.items() if isinstance(inner, dict) for name, one in inner.items()}


def save(folder: Path, bucket: str) -> None:
    """Save the state with each library."""
    import torch
    import torch.distributed.checkpoint as dcp
    from helpers.local_cluster import LocalCluster

    trained = state(0)
    for uri in (f"{folder}/raystow", bucket):
        if uri:
            with LocalCluster(uri) as cluster:
                cluster.save(trained, step=3)
    torch.save(trained, folder / "torch.pt")
    dcp.save(trained, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(trained, folder / "expected.pt")


def case(way: str, folder: Path, bucket: str) -> dict[str, float]:
    """Restore once in this process; return the seconds of the imports, of the call and of the CPU in the call."""
    import torch

    if way == IMPORT:
        import ray  # noqa: F401
    into = state(None) if way != IMPORT else {}
    start = time.perf_counter()
    run = prepared(way, folder, bucket, into)
    imported = time.perf_counter()
    cpu = time.process_time()
    run()
    seconds, used = time.perf_counter() - imported, time.process_time() - cpu
    if way not in (IMPORT, "boto3 download, S3"):
        expected = tensors(torch.load(folder / "expected.pt"))
        for name, one in tensors(into).items():
            if not torch.equal(one, expected[name]):
                raise SystemExit(f"{way} did not restore {name}")
    return {"import": imported - start, "seconds": seconds, "cpu": used}


def prepared(way: str, folder: Path, bucket: str, into: dict[str, Any]) -> Callable[[], object]:
    """Import what a case needs; return the call that is measured."""
    if way == "dcp.load":
        import torch.distributed.checkpoint as dcp

        return lambda: dcp.load(into, checkpoint_id=folder / "dcp", no_dist=True)
    if way == "torch.load":
        import torch

        return lambda: [into[part][name].copy_(one) for part, name, one in parts(torch.load(folder / "torch.pt"))]
    if way == "boto3 download, S3":
        import boto3

        return lambda: download(boto3.client("s3"), bucket)
    import raystow

    if way == IMPORT:
        return lambda: (raystow.Checkpointer, raystow.Repository)
    import raystow.orchestrator.standalone.restore  # otherwise the measured call would import it
    import raystow.storage.repository
    import raystow.storage.stores.local

    if way.endswith("S3"):
        import raystow.storage.stores.s3

    if way == "raystow: open":
        return lambda: raystow.restore(raystow.open(folder / "raystow").latest(), into)  # type: ignore[arg-type]
    return lambda: raystow.restore_latest(bucket if way == "raystow: restore_latest, S3" else folder / "raystow", into)


def parts(of: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Return part, name and tensor of each tensor of a state."""
    return [(part, name, one) for part, inner in of.items() if isinstance(inner, dict) for name, one in inner.items()]


def download(client: Any, bucket: str) -> int:
    """Download all packs in ranges, in parallel; return the bytes."""
    from concurrent.futures import ThreadPoolExecutor

    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    found = client.list_objects_v2(Bucket=name, Prefix=prefix)["Contents"]
    ranges = [
        (one["Key"], start, min(start + _RANGE, one["Size"]))
        for one in found
        if one["Size"] > 1 << 20
        for start in range(0, one["Size"], _RANGE)
    ]

    def fetch(of: tuple[str, int, int]) -> int:
        key, start, end = of
        return len(client.get_object(Bucket=name, Key=key, Range=f"bytes={start}-{end - 1}")["Body"].read())

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(fetch, ranges))


def measure(ways: tuple[str, ...], folder: Path, bucket: str, rounds: int) -> dict[str, Any]:
    """Run every case in a new process in each round, in turn."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for turn in range(-1, rounds):  # warm-up: files of libraries and of the state in the page cache
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            command = [sys.executable, __file__, "--one", way, "--folder", str(folder), "--bucket", bucket]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            if turn >= 0:
                found[way].append(json.loads(output.splitlines()[-1]))
    return {
        way: {
            **{key: statistics.median(one[key] for one in output) for key in ("import", "seconds", "cpu")},
            "with import": statistics.median(one["import"] + one["seconds"] for one in output),
            "all": output,
        }
        for way, output in found.items()
    }


def claims(ways: dict[str, Any]) -> dict[str, bool | None]:
    """Return the goals, and whether this run meets them."""
    local, both = (max(ways[way][key] for way in LOCAL[:2]) for key in ("seconds", "with import"))
    remote = [ways[way]["seconds"] for way in REMOTE if way in ways]
    return {
        "a restore from a local folder takes at most 1.3 times dcp.load": local <= 1.3 * ways["dcp.load"]["seconds"],
        "with imports, at most 1.3 times dcp.load": both <= 1.3 * ways["dcp.load"]["with import"],
        "a restore from S3 takes at most 1.2 times boto3's download": remote[0] <= 1.2 * remote[1] if remote else None,
        "raystow is imported in 0.3 s": ways[IMPORT]["with import"] <= 0.3,
    }


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 5,
    note: Annotated[str, typer.Option(help="recorded: what else ran on the machine")] = "",
    one: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    bucket: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure the first restore of a process."""
    if one and folder is not None:
        print(json.dumps(case(one, folder, bucket)))
        return
    import report
    from helpers.s3_server import make_bucket
    from rich.console import Console

    from raystow.storage.runtime.clock import SYSTEM
    from raystow.storage.stores import open_store

    about: dict[str, Any] = {**report.about("raystow", "ray", "torch", "obstore", "boto3", "numpy"), "note": note}
    if server := os.environ.get("RAYSTOW_TEST_S3", ""):
        bucket = f"s3://{make_bucket('raystow-tests')}/cpu-cold-{SYSTEM.token()}"
    with tempfile.TemporaryDirectory() as place:
        save(Path(place), bucket)
        ways = measure((*LOCAL, *(REMOTE if bucket else ()), IMPORT), Path(place), bucket, rounds)
    if bucket:
        store = open_store(bucket)
        store.delete([info.key for info in store.list("")])
    held, console = claims(ways), Console(width=120)
    grid = report.table_of("first restore of a process", "import s", "call s", "CPU s", "import + call s")
    for way, output in ways.items():
        grid.add_row(way, *(f"{output[key]:.3f}" for key in ("import", "seconds", "cpu", "with import")))
    report.show(console, [grid], held)
    about["load after"] = os.getloadavg()[0]
    report.write(console, out, "cpu_cold", {**about, "server": server, "rounds": rounds, "ways": ways, "claims": held})


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    typer.run(main)
