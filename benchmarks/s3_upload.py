"""Measure the CPU time of uploads to an S3 server: packs of a node worker, over http and https, with and without checksums.

*Method.* ``AWS_ENDPOINT_URL`` names the server, as ``tools/ceph_s3.sh start`` prints it. For https, a process in front of it ends
TLS. Threads put packs of 64 MiB, whose parts are in the memory of a ring, as a GPU leaves them. boto3 uploads the same bytes with
its own threads, from a buffer for each pack. CPU time is that of this process, including the kernel's, and not that of the
servers, which share its cores and limit the throughput. The cases take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import os
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import boto3
import numpy as np
import report
import typer
from rich.console import Console

from raystow.storage.stores import open_store
from raystow.workers.packing.packer import PACK
from raystow.workers.shm.ring import DEVICE_SLOT, Ring

PARTS = 24
BUCKET = "raystow-upload"
CHECKSUMS, ALWAYS, REQUIRED = "AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported", "when_required"

Put = Callable[[int], object]


def end_tls(folder: str, upstream: str, ready: Any) -> None:
    """Serve https with the certificate in a folder, and forward the content to a server."""
    target = urlsplit(upstream)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while data := await reader.read(1 << 20):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(forward(reader, back), forward(there, writer))

    async def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
        server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=context)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def https_in_front_of(endpoint: str) -> Iterator[tuple[str, str]]:
    """Yield the address of a server with https, and the file with its certificate."""
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = ["-keyout", f"{folder}/key.pem"], ["-out", f"{folder}/cert.pem", "-days", "2"]
        algorithm = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=CA:FALSE"]
        subprocess.run(["openssl", "req", "-x509", *algorithm, *key, *certificate, *named], check=True, capture_output=True)
        ready: multiprocessing.Queue[int] = multiprocessing.Queue()
        server = multiprocessing.Process(target=end_tls, args=(folder, endpoint, ready), daemon=True)
        server.start()
        try:
            yield f"https://localhost:{ready.get(timeout=30)}", f"{folder}/cert.pem"
        finally:
            server.kill()


def by_raystow(packs: Sequence[Sequence[memoryview]]) -> Put:
    """Return what puts a pack, by its number, as a node worker does."""
    store = open_store(f"s3://{BUCKET}/raystow")
    return lambda number: store.put(f"versions/{number:05d}.pack", packs[number])


def by_boto3(packs: Sequence[Sequence[memoryview]]) -> Put:
    """Return what uploads the bytes of a pack, by its number."""
    client, whole = boto3.client("s3"), b"".join(packs[0])
    return lambda number: client.upload_fileobj(io.BytesIO(whole), BUCKET, f"boto3/{number:05d}.pack")


def measure(put: Put, packs: int, threads: int) -> tuple[float, float]:
    """Return CPU seconds and seconds for each GB."""
    with ThreadPoolExecutor(threads) as pool:
        put(0)  # connects
        cpu, start = time.process_time(), time.perf_counter()
        list(pool.map(put, range(packs)))
        gigabytes = packs * PACK / 1e9
        return (time.process_time() - cpu) / gigabytes, (time.perf_counter() - start) / gigabytes


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    packs: Annotated[int, typer.Option(min=1, help="packs of 64 MiB in a measurement")] = 12,
    threads: Annotated[int, typer.Option(min=1, help="packs that are put at a time")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="measurements of each case")] = 3,
) -> None:
    """Measure the CPU time of uploads to an S3 server."""
    about = report.about("raystow", "obstore", "boto3")
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or ""
    if not endpoint.startswith("http://"):
        raise typer.BadParameter("set AWS_ENDPOINT_URL to a server with http: eval export $(tools/ceph_s3.sh start)")
    ring = Ring.create(2 * PACK, DEVICE_SLOT)
    ring.memory[:] = np.random.default_rng(0).integers(0, 256, ring.memory.size, np.uint8)
    parts = [part.data for part in np.array_split(ring.memory[:PACK], PARTS)]
    content = [parts] * packs
    with contextlib.suppress(boto3.client("s3").exceptions.ClientError):
        boto3.client("s3").create_bucket(Bucket=BUCKET)
    rows: dict[str, dict[str, Any]] = {}
    with https_in_front_of(endpoint) as (secure, certificate):
        os.environ["AWS_CA_BUNDLE"] = certificate
        cases = {
            "raystow, http": (by_raystow, endpoint, ALWAYS),
            "raystow, http, no checksums": (by_raystow, endpoint, REQUIRED),
            "raystow, https": (by_raystow, secure, ALWAYS),
            "raystow, https, no checksums": (by_raystow, secure, REQUIRED),
            "boto3, http": (by_boto3, endpoint, ALWAYS),
            "boto3, https": (by_boto3, secure, ALWAYS),
        }
        for _ in range(rounds):
            for name, (make, address, rule) in cases.items():
                os.environ |= {"AWS_ENDPOINT_URL": address, CHECKSUMS: rule}
                cpu, seconds = measure(make(content), packs, threads)
                row = rows.setdefault(name, {"CPU s/GB": [], "s/GB": []})
                row["CPU s/GB"].append(cpu)
                row["s/GB"].append(seconds)
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    boto3.resource("s3").Bucket(BUCKET).objects.all().delete()
    table = report.table_of(f"{packs} packs of 64 MiB, {threads} at a time", "CPU s/GB", "s/GB")
    for name, row in rows.items():
        table.add_row(name, f"{statistics.median(row['CPU s/GB']):.3f}", f"{statistics.median(row['s/GB']):.3f}")
    console = Console(width=120)
    report.show(console, [table], {})
    settings = {"packs": packs, "threads": threads, "rounds": rounds}
    report.write(console, out, "s3_upload", {**about, "settings": settings, "cases": rows})


if __name__ == "__main__":
    typer.run(main)
