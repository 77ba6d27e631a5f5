"""Compare raystow's CPU codec with zstd, DCP's Zstandard extension and ZipNN: ratio and speed, on one thread and on two.

The data are weights (fp32 and bf16) and both moments of the demo's GPT, trained on this machine, from eight steps; and normal
random numbers.

Method. Contestants take turns in every round, in rotating order. A cell is the median over the rounds; "raystow / ZipNN" and
gains are medians of quotients within a round. A measurement in which processes waited for a core (/proc/pressure/cpu) for more
than a tenth of the time is repeated up to four times; the least disturbed is used. The allocator keeps freed memory, because
page faults would cost contestants that return new memory, ZipNN above all, up to half of their speed. Every decode is compared
byte for byte, outside the clock. Sizes include descriptions.

- raystow codes 4 MiB chunks into memory of their own and decodes into existing memory. "+ digests" computes both digests when
  coding and checks them when decoding, as saves and restores do.
- zstd (levels 1 and 3) codes the same chunks, one call of python-zstandard each.
- DCP saves and loads tensors of 4 MiB in a folder of /dev/shm. Its writer has several threads, its reader one.
- ZipNN codes the whole as one tensor with its own threads. It overwrites its input, so it gets a copy, outside the clock.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import platform
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import torch
import torch.distributed.checkpoint as dcp
import typer
import zstandard
from report import table_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint._extension import ZStandard
from zipnn import ZipNN

from raystow.orchestrator.demo.model import GPT, batch, corpus, loss_of
from raystow.storage.coding.chunk import ChunkEncoder, Coding, decode
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.dtypes import dtype
from raystow.storage.coding.kernels import Bytes

CHUNK = 4 << 20
STATES = 8
CALM, TRIES = 0.1, 4
THREADS = (1, 2)
RAYSTOW, ZIPNN = "raystow", "ZipNN"
TRAINED = ("weights fp32", "weights bf16", "exp_avg", "exp_avg_sq")


def trained(steps: int, cache: Path) -> dict[str, Tensor]:
    """Return the parts of the demo's state at ``STATES`` of ``steps`` steps, concatenated, fp32 [n]; stored in ``cache``."""
    if not cache.exists():
        torch.manual_seed(0)
        model, data = GPT(), corpus()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        pieces: dict[str, list[Tensor]] = {"weights fp32": [], "exp_avg": [], "exp_avg_sq": []}
        for step in range(1, steps + 1):
            loss = loss_of(model, batch(data, step=step, rank=0, size=8))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (steps // STATES) == 0:
                print(f"step {step}: loss {loss.item():.3f}")
                for parameter in model.parameters():
                    pieces["weights fp32"].append(parameter.detach().flatten().clone())
                    for moment in ("exp_avg", "exp_avg_sq"):
                        pieces[moment].append(optimizer.state[parameter][moment].flatten().clone())
        np.savez(cache, **{name: torch.cat(tensors).numpy() for name, tensors in pieces.items()})
    with np.load(cache) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def parts(steps: int, cache: Path) -> dict[str, Tensor]:
    """Return all data as 1-D tensors by name."""
    state = trained(steps, cache)
    state["weights bf16"] = state["weights fp32"].bfloat16()
    normal = torch.randn(state["weights fp32"].numel() // 4, generator=torch.Generator().manual_seed(0)) * 0.02
    return {**{name: state[name] for name in TRAINED}, "random normal fp32": normal, "random normal bf16": normal.bfloat16()}


def bytes_of(tensor: Tensor) -> Bytes:
    """Return a view of a contiguous tensor's memory."""
    raw: Bytes = tensor.view(torch.uint8).numpy()
    return raw


class Contestant:
    """A codec under test. Only ``encode`` and ``decode`` are timed."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._local = threading.local()

    def prepare(self, tensor: Tensor) -> Any:
        """Make the input of ``encode``, outside the clock."""
        return [bytes_of(piece) for piece in tensor.split(CHUNK // tensor.element_size())]

    def encode(self, source: Any) -> Any: ...

    def decode(self, coded: Any) -> Any: ...

    def size(self, coded: Any) -> int:
        """Return the bytes to be stored."""
        return sum(map(len, coded))

    def result(self, decoded: Any) -> Sequence[Any]:
        """Yield the result of ``decode`` as arrays or bytes, in order."""
        pieces: Sequence[Any] = decoded
        return pieces

    def _each(self, work: Callable[..., Any], *items: Sequence[Any]) -> list[Any]:
        """Apply work to all items on this contestant's threads; a thread takes the next item when it has finished one."""
        if self.threads == 1:
            return list(map(work, *items))
        results: list[Any] = [None] * len(items[0])
        turns = itertools.count()  # one call of next() is atomic

        def run() -> None:
            while (i := next(turns)) < len(results):
                results[i] = work(*(of[i] for of in items))

        for future in [self._pool.submit(run) for _ in range(self.threads)]:
            future.result()
        return results

    def _own(self, make: Callable[[], Any]) -> Any:
        """Make the state of a thread."""
        if not hasattr(self._local, make.__name__):
            setattr(self._local, make.__name__, make())
        return getattr(self._local, make.__name__)


class Raystow(Contestant):
    """raystow's transform and codec, with or without digests."""

    def __init__(self, threads: int, *, digests: bool = False) -> None:
        super().__init__(threads)
        self.digests = digests

    def prepare(self, tensor: Tensor) -> Any:
        self._dtype = dtype(str(tensor.dtype).removeprefix("torch."))
        self._target = [bytes_of(piece) for piece in torch.zeros_like(tensor).split(CHUNK // tensor.element_size())]
        return super().prepare(tensor)

    def _encode_one(self, raw: Any) -> tuple[Bytes, Coding, int, bytes]:
        stored, coding = self._own(encoder).encode(raw, self._dtype)
        return (stored, coding, raw_digest(raw), stored_digest(stored)) if self.digests else (stored, coding, 0, b"")

    def _decode_one(self, chunk: tuple[Bytes, Coding, int, bytes], raw: Any) -> None:
        stored, coding, digest, of_stored = chunk
        assert not self.digests or stored_digest(stored) == of_stored
        decode(coding, self._dtype, stored, raw)
        assert not self.digests or raw_digest(raw) == digest

    def encode(self, source: Any) -> Any:
        return self._each(self._encode_one, source)

    def decode(self, coded: Any) -> Any:
        self._each(self._decode_one, coded, self._target)
        return self._target

    def size(self, coded: Any) -> int:
        return sum(stored.size + len(coding.streams) + 9 * len(coding.stored) + 4 for stored, coding, *_ in coded)


def encoder() -> ChunkEncoder:
    """Return an encoder per thread."""
    return ChunkEncoder(CHUNK)


class Zstd(Contestant):
    """zstd on raw bytes."""

    def __init__(self, threads: int, *, level: int) -> None:
        super().__init__(threads)
        self.level = level

    def _compressor(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(level=self.level)

    def encode(self, source: Any) -> Any:
        return self._each(lambda raw: self._own(self._compressor).compress(raw), source)

    def decode(self, coded: Any) -> Any:
        return self._each(lambda stored: self._own(zstandard.ZstdDecompressor).decompress(stored), coded)


class Dcp(Contestant):
    """torch.distributed.checkpoint with its Zstandard extension, from memory to memory."""

    def __init__(self, threads: int, *, folder: Path) -> None:
        super().__init__(threads)
        self._folder = folder / f"dcp-{threads}"

    def prepare(self, tensor: Tensor) -> Any:
        shutil.rmtree(self._folder, ignore_errors=True)
        source = {f"{i:04d}": piece.clone() for i, piece in enumerate(tensor.split(CHUNK // tensor.element_size()))}
        self._target = {name: torch.zeros_like(piece) for name, piece in source.items()}
        return source

    def encode(self, source: Any) -> Any:
        writer = dcp.FileSystemWriter(self._folder, thread_count=self.threads, sync_files=False, _extensions=[ZStandard()])
        dcp.save(source, storage_writer=writer, no_dist=True)
        return self._folder

    def decode(self, coded: Any) -> Any:
        dcp.load(self._target, storage_reader=dcp.FileSystemReader(coded), no_dist=True)
        return self._target

    def size(self, coded: Any) -> int:
        return sum(file.stat().st_size for file in coded.iterdir())

    def result(self, decoded: Any) -> Sequence[Any]:
        return [bytes_of(decoded[name]) for name in sorted(decoded)]


class Zipnn(Contestant):
    """ZipNN on the whole tensor."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._zipnn = ZipNN(input_format="torch", threads=threads)

    def prepare(self, tensor: Tensor) -> Any:
        return tensor.clone()

    def encode(self, source: Any) -> Any:
        return self._zipnn.compress(source)

    def decode(self, coded: Any) -> Any:
        return self._zipnn.decompress(coded)

    def size(self, coded: Any) -> int:
        return len(coded)

    def result(self, decoded: Any) -> Sequence[Any]:
        return [bytes_of(decoded.contiguous())]


def contestants(folder: Path) -> dict[str, dict[int, Contestant]]:
    """Return all contestants by name and number of threads."""
    makers: dict[str, Callable[[int], Contestant]] = {
        RAYSTOW: Raystow,
        "raystow + digests": lambda threads: Raystow(threads, digests=True),
        "zstd -1": lambda threads: Zstd(threads, level=1),
        "zstd -3": lambda threads: Zstd(threads, level=3),
        "DCP + Zstandard": lambda threads: Dcp(threads, folder=folder),
        ZIPNN: Zipnn,
    }
    return {name: {threads: make(threads) for threads in THREADS} for name, make in makers.items()}


def keep_memory() -> None:
    """Make glibc use one heap and never shrink it; no effect on other libraries."""
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((-8, 1), (-4, 0), (-1, 1 << 30)):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
            mallopt(parameter, value)


def pressure() -> float:
    """Return the seconds since boot in which a process waited for a core; 0 if Linux does not report it."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().splitlines()[0].rpartition("=")[2]) / 1e6
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Timing:
    """A measurement. ``disturbance``: the part of the ``seconds`` in which some process waited for a core."""

    disturbance: float
    seconds: float


def timed(work: Callable[[Any], Any], argument: Any) -> tuple[Timing, Any]:
    """Return duration and result."""
    gc.collect()
    waited, start = pressure(), time.perf_counter()
    result = work(argument)
    seconds = time.perf_counter() - start
    return Timing((pressure() - waited) / seconds, seconds), result


class Times:
    """Stored size of a contestant on one part, and seconds of every round."""

    def __init__(self) -> None:
        self.stored = 0
        self.seconds: dict[tuple[str, int], list[float]] = {(verb, n): [] for verb in ("encode", "decode") for n in THREADS}
        self.disturbed = 0


def measure(tensor: Tensor, field: dict[str, dict[int, Contestant]], rounds: int) -> dict[str, Times]:
    """Measure all contestants on one part, after a warm-up round."""
    names = list(field)
    times = {name: Times() for name in names}
    for turn in range(-1, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for threads, contestant in field[name].items():
                size, best = calmest(contestant, tensor, name)
                if turn >= 0:
                    for verb, timing in best.items():
                        times[name].seconds[verb, threads].append(timing.seconds)
                        times[name].disturbed += timing.disturbance > CALM
                if threads == 1:
                    times[name].stored = size
    return times


def calmest(contestant: Contestant, tensor: Tensor, name: str) -> tuple[int, dict[str, Timing]]:
    """Return the stored size and the least disturbed timings of up to ``TRIES`` tries."""
    tries: dict[str, list[Timing]] = {"encode": [], "decode": []}
    for _ in range(TRIES):
        source = contestant.prepare(tensor)
        timing, coded = timed(contestant.encode, source)
        tries["encode"].append(timing)
        timing, decoded = timed(contestant.decode, coded)
        tries["decode"].append(timing)
        check(contestant.result(decoded), bytes_of(tensor), name)
        best = {verb: min(timings, key=lambda t: t.disturbance) for verb, timings in tries.items()}
        if all(timing.disturbance <= CALM for timing in best.values()):
            break
    return contestant.size(coded), best


def check(decoded: Sequence[Any], raw: Bytes, name: str) -> None:
    """End the run if a byte differs."""
    end = 0
    for piece in decoded:
        array = np.frombuffer(piece, np.uint8)
        if not np.array_equal(array, raw[end : end + array.size]):
            raise SystemExit(f"{name} did not give back what it was given")
        end += array.size
    if end != raw.size:
        raise SystemExit(f"{name} gave back {end} bytes of {raw.size}")


def quotient(above: list[float], below: list[float]) -> float:
    """Return the median of the quotients within each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def summary(size: int, times: dict[str, Times]) -> dict[str, Any]:
    """Summarize the measurements of a part."""
    rows = {}
    for name, of in times.items():
        rows[name] = {
            "ratio": of.stored / size,
            "GB/s": {f"{verb} {n}": size / 1e9 / statistics.median(s) for (verb, n), s in of.seconds.items()},
            "GB/s quartiles": {f"{verb} {n}": quartiles(size, s) for (verb, n), s in of.seconds.items()},
            "disturbed": of.disturbed / sum(map(len, of.seconds.values())),
            "gain of 2 threads": {verb: quotient(of.seconds[verb, 1], of.seconds[verb, 2]) for verb in ("encode", "decode")},
        }
    ours, theirs = times[RAYSTOW], times[ZIPNN]
    against = {f"{verb} {n}": quotient(theirs.seconds[verb, n], s) for (verb, n), s in ours.seconds.items()}
    return {"bytes": size, "contestants": rows, "raystow / ZipNN": {"ratio": ours.stored / theirs.stored, **against}}


def quartiles(size: int, seconds: list[float]) -> list[float]:
    """Return the slower and the faster quartile, GB/s."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return [size / 1e9 / high, size / 1e9 / low]


COLUMNS = [f"{verb} {n}" for n in THREADS for verb in ("encode", "decode")]


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each part, and a summary."""
    for part, result in results.items():
        headings = ("ratio", *(f"{column}T" for column in COLUMNS), "2T gain: encode", "decode")
        table = table_of(f"{part}, {result['bytes'] / 1e6:.0f} MB", *headings)
        for name, row in result["contestants"].items():
            speeds = [f"{row['GB/s'][column]:.2f}" for column in COLUMNS]
            gains = [f"{gain:.2f}" for gain in row["gain of 2 threads"].values()]
            table.add_row(name, f"{row['ratio']:.5f}", *speeds, *gains, style="bold" if name == RAYSTOW else None)
        yield table
    title = "raystow / ZipNN (ratio: below 1 is better; speed: above 1 is better)"
    table = table_of(title, "ratio", *(f"{column}T" for column in COLUMNS))
    for part, result in results.items():
        against = result["raystow / ZipNN"]
        table.add_row(part, f"{against['ratio']:.5f}", *(f"{against[column]:.2f}" for column in COLUMNS))
    yield table


def claims(results: dict[str, Any]) -> dict[str, bool]:
    """Return raystow's goals for the trained state, and whether this run meets them."""
    state = {part: results[part] for part in TRAINED}
    gains = [gain for r in state.values() for gain in r["contestants"][RAYSTOW]["gain of 2 threads"].values()]
    return {
        "the best ratio of all on every part": all(
            min(r["contestants"], key=lambda name: r["contestants"][name]["ratio"]).startswith(RAYSTOW) for r in state.values()
        ),
        "coding and decoding at least as fast as ZipNN on every part": all(
            r["raystow / ZipNN"][column] >= 1 for r in state.values() for column in COLUMNS
        ),
        "at least 1.7 times as fast on two threads": min(gains) >= 1.7,
    }


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    steps: Annotated[int, typer.Option(help="training steps, from which eight states are taken")] = 320,
    rounds: Annotated[int, typer.Option(min=2, help="measured rounds")] = 7,
    cache: Annotated[Path | None, typer.Option(help="file for the trained state (.npz)")] = None,
) -> None:
    """Measure raystow's CPU codec against zstd, DCP and ZipNN."""
    keep_memory()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    about: dict[str, Any] = {
        **report.about("raystow", "numpy", "numba", "torch", "zstandard", "zipnn"),
        "rounds": rounds,
        "steps": [steps // STATES * (i + 1) for i in range(STATES)],
    }
    data = parts(steps, cache or Path(tempfile.gettempdir()) / f"raystow-demo-state-{steps}.npz")
    torch.set_num_threads(1)  # torch's threads spin for a time after their work
    results = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        field = contestants(Path(folder))
        for part, tensor in data.items():
            results[part] = summary(tensor.numel() * tensor.element_size(), measure(tensor, field, rounds))
    held = claims(results)

    console = Console()
    console.print(
        f"{about['machine']['cpu']}, {about['machine']['cores']} cores, {about['date']}; GB/s, medians of {rounds} rounds"
    )
    report.show(console, tables(results), held)
    report.write(console, out, "cpu_codec", {**about, "results": results, "claims": held})


if __name__ == "__main__":
    typer.run(main)
