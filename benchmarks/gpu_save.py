"""Measure the cost of a save for a training loop on one GPU: raystow, torch.save, DCP and torch_checkpointing in one run.

The training of ``gpu_workload`` continues while each contestant saves its state of 6.17 GB to /dev/shm, so that no disk limits
the result. The figure is the time that a save adds to the loop: windows of steps that start with a save alternate with windows
without one, and each is compared with the mean of its two neighbors, because clocks drift by more than a good save costs. Short
steps (one micro-batch) show the cost that computation cannot hide, long steps (eight) the slowdown of the computation.

Method. Every step ends with a synchronization of the GPU and is timed between them. ``fence`` is called before the optimizer's
step; its wait is part of the step. After a window, training continues until the save is durable, and for at least two seconds,
because an idle GPU changes its clock. CPU seconds of all processes are counted until then, less those of as many steps without
a save; the save is deleted afterwards. A separate thread records when a save is durable. Each contestant first saves twice, to
pin memory, start processes and compile kernels. "no save" is a contestant; its losses are noise.

With the GPU otherwise idle:
- raystow's rates to read the state, to bring it to host memory and to make it durable, in raw bytes per second, compared with a
  plain copy to pinned memory; for the whole state and a bf16 state;
- the entropy of the state's byte planes in chunks of 16 MiB, after rotating the sign: a bound for coders of single bytes;
- each coder on 512 MiB of each part of the state: split into planes, code the highest; decode, join. Times are the GPU's own,
  and streams stay where the coder wrote them. Every decode is compared bit for bit.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import report
import torch
import typer
from gpu_coders import CHUNK, CODERS, ROUNDS, WORDS, coders
from gpu_contestants import (
    DICTS,
    NONE,
    OBJECTS,
    PEERS,
    TORCH_CHECKPOINTING,
    Contestant,
    Raystow,
    Wait,
    field,
    of_host_memory,
    of_objects,
    ours,
    start_ray,
)
from gpu_workload import Size, State, Training, about, device_named, nbytes, tensors_of
from report import cpu_seconds, table_of
from rich.console import Console
from rich.table import Table

from raystow.workers.protocol.messages import EndSave, Message

CODECS = ("deflate", "ans", "raw")
SHORT, LONG = 1, 8
SETTLE = 2.0  # seconds of training between two windows
now = time.perf_counter


def all_of(root: Path, memory: int | None) -> dict[str, Callable[[], Contestant]]:
    """Return a factory for each contestant by name."""
    return {NONE: Contestant, **field(root, CODECS, memory), **of_objects(root, memory), **of_host_memory(root, memory)}


@dataclass(frozen=True)
class Window:
    """Seconds of each step and, with a save, of its fences, and the outcome of the save."""

    steps: list[float]
    fence: float = 0.0
    outcome: Future[Outcome] | None = None


class Outcome(NamedTuple):
    """Seconds until a save was durable, and bytes stored."""

    durable: float
    stored: int


def window(training: Training, contestant: Contestant, pool: Executor, *, steps: int, micro_batches: int, save: bool) -> Window:
    """Run several steps, with or without a save in the first."""
    times, fenced, outcome = list[float](), 0.0, None
    for k in range(steps):
        training.synchronize()
        start = now()
        if save and k == 0:
            outcome = pool.submit(watch, contestant, contestant.save(contestant.state_of(training), training.step), start)
        for _ in range(micro_batches):
            training.forward_backward()
        before = now()
        contestant.fence()
        fenced += now() - before
        training.update()
        training.synchronize()
        times.append(now() - start)
    return Window(times, fenced, outcome)


def watch(contestant: Contestant, wait: Wait, start: float) -> Outcome:
    """Wait until a save begun at ``start`` is durable."""
    wait()
    return Outcome(now() - start, contestant.stored())


class Others:
    """Other trainings of the host, whose windows begin at the same time: here none."""

    def ready(self) -> bool:
        """Return whether all trainings are ready for the next window, as this one is."""
        return True

    def meet(self) -> None:
        """Wait for the others at the begin of a window."""


def go_on(training: Training, until: Callable[[], bool], *, micro_batches: int) -> int:
    """Train until ``until`` returns true; return the number of steps."""
    steps = 0
    while not until():
        for _ in range(micro_batches):
            training.forward_backward()
        training.update()
        training.synchronize()
        steps += 1
    return steps


def measure(
    training: Training, contestant: Contestant, *, saves: int, every: int, micro_batches: int, others: Others | None = None
) -> dict[str, Any]:
    """Measure all windows of one contestant."""
    others = others or Others()
    with ThreadPoolExecutor(1) as pool:

        def one(save: bool, steps: int = every) -> Window:
            cpu = cpu_seconds()
            others.meet()
            found = window(training, contestant, pool, steps=steps, micro_batches=micro_batches, save=save)
            outcome, steady = found.outcome, now() + SETTLE
            more = go_on(training, lambda: now() >= steady and (outcome is None or outcome.done()), micro_batches=micro_batches)
            seconds.append((cpu_seconds() - cpu, steps + more))
            if outcome is not None:
                outcome.result()
            deleted = pool.submit(contestant.discard) if save else None
            go_on(training, lambda: (deleted is None or deleted.done()) and others.ready(), micro_batches=micro_batches)
            if deleted:
                deleted.result()
            return found

        seconds: list[tuple[float, int]] = []  # of the CPU until a window's save is over, and steps until then

        for _ in range(2):
            one(True, max(1, every // 2))
        seconds.clear()
        calm, saving = [one(False)], list[Window]()
        for _ in range(saves):
            saving.append(one(True))
            calm.append(one(False))
    raw = nbytes(training.state())
    of_a_step = statistics.median(cpu / steps for cpu, steps in seconds[::2])
    of_a_save = statistics.median(cpu - of_a_step * steps for cpu, steps in seconds[1::2])
    pairs = zip(saving, itertools.pairwise(calm), strict=True)
    lost = [1e3 * (sum(w.steps) - (sum(a.steps) + sum(b.steps)) / 2) for w, (a, b) in pairs]
    outcomes = [w.outcome.result() for w in saving if w.outcome is not None]
    stored = statistics.median(one.stored for one in outcomes)
    return {
        "step ms": 1e3 * statistics.median(t for w in calm for t in w.steps),
        "lost ms": {"median": statistics.median(lost), "min": min(lost), "max": max(lost), "all": lost},
        "lost ms/GB": statistics.median(lost) / (raw / 1e9),
        "fence ms": 1e3 * statistics.median(w.fence for w in saving),
        "durable s": statistics.median(one.durable for one in outcomes),
        "cpu s/GB": of_a_save / (raw / 1e9),
        "stored": stored,
        "ratio": stored / raw,
        "of bound": outcomes[-1].stored / entropy_bound(training.state()),
        "saving windows": [
            {"steps": w.steps, "fence": w.fence, **one._asdict()} for w, one in zip(saving, outcomes, strict=True)
        ],
        "calm windows": [w.steps for w in calm],
    }


def note_arrivals(contestant: Raystow) -> list[float]:
    """Return a list to which every later save adds the time at which all its chunks are in host memory.

    Requires an earlier save. No public interface reports this time: it is when the staging thread, which waits for every copy,
    posts the last message of a save.
    """
    times: list[float] = []
    staging = contestant.checkpointer._node._staging
    assert staging is not None
    connection = staging.connection
    post = connection.post

    def noting(message: Message) -> None:
        if isinstance(message, EndSave):
            times.append(now())
        post(message)

    connection.post = noting  # type: ignore[method-assign]
    return times


def idle_rate(contestant: Raystow, state: State) -> dict[str, Any]:
    """Time a save of ``state`` on an idle GPU: until it is read, in host memory, and durable."""
    found: dict[str, list[float]] = {"read": [], "arrived": [], "durable": []}
    arrivals: list[float] = []
    for turn in range(-2, ROUNDS):
        synchronize()
        start = now()
        pending = contestant.checkpointer.save(state, step=turn + 2)
        contestant.checkpointer.fence()
        read = now()
        pending.result()
        durable = now()
        if turn >= 0:
            for what, when in (("read", read), ("arrived", arrivals[-1]), ("durable", durable)):
                found[what].append(when - start)
        if turn == -2:
            arrivals = note_arrivals(contestant)
        ratio = contestant.stored() / nbytes(state)
        contestant.discard()
    rates = {f"{what} GB/s": nbytes(state) / 1e9 / statistics.median(times) for what, times in found.items()}
    return {**rates, "ratio": ratio, "seconds": found}


def plain_copy(state: State) -> dict[str, Any]:
    """Time copies of the same tensors into one pinned buffer."""
    host = torch.empty(nbytes(state), dtype=torch.uint8)
    if code := int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)):
        raise SystemExit(f"CUDA cannot pin {host.numel() >> 20} MiB (error {code})")
    times = []
    for _ in range(ROUNDS + 1):
        synchronize()
        start, end = now(), 0
        for tensor in tensors_of(state):
            source = tensor.reshape(-1).view(torch.uint8)
            host[end : end + source.numel()].copy_(source, non_blocking=True)
            end += source.numel()
        synchronize()
        times.append(now() - start)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return {"GB/s": nbytes(state) / 1e9 / statistics.median(times[1:]), "seconds": times[1:]}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def entropy_bound(state: State) -> float:
    """Return the sum of the entropies of all byte planes of all chunks, in bytes."""
    tensors = tensors_of(state)
    bits = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        width = tensor.element_size()
        for words in tensor.reshape(-1).view(WORDS[width]).split(CHUNK // width):
            rotated = (words << 1) | ((words >> (8 * width - 1)) & 1) if width > 1 else words
            planes = rotated.view(torch.uint8).reshape(-1, width)
            for p in range(width):
                share = torch.bincount(planes[:, p].contiguous(), minlength=256).double() / len(planes)
                bits += torch.special.entr(share).sum() / 0.6931471805599453 * len(planes)
    return float(bits.item()) / 8


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield tables of the results so far."""
    state = results["state"]
    for micro_batches, rows in results["steps"].items():
        table = table_of(
            f"{state['bytes'] / 1e9:.2f} GB, {micro_batches} micro-batches a step",
            *("step ms", "lost ms", "min", "max", "ms/GB", "fence ms", "durable s", "stored GB", "ratio", "/ bound"),
        )
        for name, row in rows.items():
            if "skipped" in row:
                table.add_row(name, "skipped", style="dim")
                continue
            lost = row["lost ms"]
            cells = (row["step ms"], lost["median"], lost["min"], lost["max"], row["lost ms/GB"], row["fence ms"])
            stored = (f"{row['stored'] / 1e9:.3f}", f"{row['ratio']:.4f}", f"{row['of bound']:.4f}")
            table.add_row(name, *(f"{cell:.1f}" for cell in cells), f"{row['durable s']:.3f}", *stored, style=style(name))
        yield table
    if results["idle"]:
        table = table_of("GPU otherwise idle, GB/s of raw bytes", "read", "arrived", "durable", "ratio")
        for name, row in results["idle"].items():
            if "GB/s" in row:
                table.add_row(name, "", f"{row['GB/s']:.1f}", "", "1")
            else:
                speeds = [f"{row[f'{what} GB/s']:.1f}" for what in ("read", "arrived", "durable")]
                table.add_row(name, *speeds, f"{row['ratio']:.4f}", style=style(name))
        yield table
    if results["coders"]:
        table = table_of("Coders, GB/s of raw bytes", *(f"{c}: {w}" for c in CODERS for w in ("ratio", "code", "decode")))
        for part, row in results["coders"].items():
            coded = [(r["ratio"], r["coding GB/s"], r["decoding GB/s"]) for r in row.values()]
            table.add_row(part, *(text for r, c, d in coded for text in (f"{r:.4f}", f"{c:.0f}", f"{d:.0f}")))
        yield table


def console_for_tables() -> Console:
    """Return a console as wide as the terminal, or wide enough for every table without one."""
    return Console(width=None if sys.stdout.isatty() else 150)


def style(name: str) -> str | None:
    """Return a style that highlights raystow."""
    return "bold" if name.startswith("raystow") else None


def claims(results: dict[str, Any]) -> dict[str, bool | None]:
    """Return raystow's goals, and whether this run meets them; None: not measured."""
    steps = results["steps"]
    deflate, ans = ours("deflate"), ours("ans")

    def of(micro_batches: int, name: str, what: str) -> Any:
        row = steps.get(str(micro_batches), {}).get(name, {})
        return row["lost ms"]["median"] if what == "lost" and "lost ms" in row else row.get(what)

    def arrived(state: str) -> tuple[Any, Any]:
        idle = results["idle"]
        return idle.get(f"{deflate}, {state}", {}).get("arrived GB/s"), idle.get(f"plain copy, {state}", {}).get("GB/s")

    def durable() -> bool | None:
        found = list[bool]()
        for rows in steps.values():
            peers = [rows[name]["durable s"] for name in PEERS if "durable s" in rows.get(name, {})]
            if peers and "durable s" in rows.get(deflate, {}):
                found.append(rows[deflate]["durable s"] <= 0.25 * min(peers))
        return all(found) if found else None

    theirs = of(SHORT, TORCH_CHECKPOINTING, "lost")
    rows = [row[deflate] for row in steps.values() if "ratio" in row.get(deflate, {})]
    ratio, of_bound = (max((row[what] for row in rows), default=None) for what in ("ratio", "of bound"))
    return {
        "short steps: deflate loses at most half of what torch_checkpointing does": at_most(
            of(SHORT, deflate, "lost"), theirs, 0.5
        ),
        "short steps: ans loses at most a quarter of what torch_checkpointing does": at_most(
            of(SHORT, ans, "lost"), theirs, 0.25
        ),
        "short steps: objects lose at most 1.1 times what their state dicts do": at_most(
            of(SHORT, OBJECTS, "lost"), of(SHORT, DICTS, "lost"), 1.1
        ),
        "long steps: objects lose at most 1.1 times what their state dicts do": at_most(
            of(LONG, OBJECTS, "lost"), of(LONG, DICTS, "lost"), 1.1
        ),
        "long steps: deflate loses at most 5 ms per GB": at_most(of(LONG, deflate, "lost ms/GB"), 5.0),
        "long steps: ans loses at most 2 ms per GB": at_most(of(LONG, ans, "lost ms/GB"), 2.0),
        "deflate is durable in a quarter of the best peer's time": durable(),
        "deflate stores at most .815 of the raw bytes": at_most(ratio, 0.815),
        "deflate stores at most 2 % more than the entropy bound": at_most(of_bound, 1.02),
        "deflate reaches host memory 1.1 times as fast as a plain pinned copy": at_least(*arrived("whole state"), 1.1),
        "deflate reaches host memory 1.3 times as fast as one, if all is bf16": at_least(*arrived("bf16 only"), 1.3),
    }


def at_most(value: float | None, limit: float | None, factor: float = 1.0) -> bool | None:
    """Return whether ``value <= limit * factor``; None if either is unknown."""
    return None if value is None or limit is None else value <= limit * factor


def at_least(value: float | None, limit: float | None, factor: float = 1.0) -> bool | None:
    """Return whether ``value >= limit * factor``; None if either is unknown."""
    return None if value is None or limit is None else value >= limit * factor


def clear(folder: Path) -> None:
    """Delete all contents of a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def contest(training: Training, made: Contestant, lengths: dict[int, int], saves: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Measure a contestant for each number of micro-batches; ``lengths``: number of micro-batches -> steps of a window."""
    try:
        for micro_batches, every in lengths.items():
            yield micro_batches, measure(training, made, saves=saves, every=every, micro_batches=micro_batches)
    finally:
        made.close()


def idle(training: Training, root: Path, memory: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure rates to host memory on an idle GPU, by method and state."""
    for title, state in (("whole state", training.state()), ("bf16 only", training.bf16_state())):
        yield f"plain copy, {title}", plain_copy(state)
        for codec in CODECS:
            folder = root / f"idle-{codec}-{title.replace(' ', '-')}"
            saver = Raystow(folder, codec, memory, delta=0)  # the same state is saved repeatedly
            try:
                yield f"{ours(codec)}, {title}", idle_rate(saver, state)
            finally:
                saver.close()
                clear(root)


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    contestant: Annotated[list[str] | None, typer.Option(help="contestant to measure (repeatable); default: all")] = None,
    micro_batches: Annotated[list[int] | None, typer.Option(help="micro-batches per step (repeatable); default: 1 and 8")] = None,
    saves: Annotated[int, typer.Option(min=1, help="measured windows with a save; at least five for a result")] = 5,
    every: Annotated[int, typer.Option(help="steps of a window; 0: 10, or 4 from four micro-batches on")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="training steps before the first measurement")] = 400,
    memory: Annotated[float | None, typer.Option(help="GiB of raystow's staging memory; default: raystow's own")] = None,
    extras: Annotated[bool, typer.Option(help="also measure idle rates and coders")] = True,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial")] = "cuda",
    layers: Annotated[int, typer.Option(help="of the model")] = Size.layers,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = Size.width,
    batch: Annotated[int, typer.Option(help="sequences in a micro-batch")] = Size.batch,
) -> None:
    """Measure the cost of a save for a training loop."""
    names = report.chosen(
        contestant, (NONE, *field(Path(), CODECS, None), *of_objects(Path(), None), *of_host_memory(Path(), None))
    )
    where = device_named(device)
    console = console_for_tables()
    budget = int(memory * (1 << 30)) if memory else None
    lengths = {count: every or (10 if count < 4 else 4) for count in micro_batches or (SHORT, LONG)}
    results: dict[str, Any] = {
        **about(where),
        "settings": {
            "saves": saves,
            "steps of a window": lengths,
            "steps": steps,
            "memory": budget,
            "layers": layers,
            "width": width,
        },
        "steps": {str(count): {} for count in lengths},
        "idle": {},
        "coders": {},
    }
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"gpu_save-{results['date'][:10]}.json"

    def keep() -> None:
        results["claims"] = claims(results)
        file.write_text(json.dumps(results, indent=1) + "\n")

    start_ray()
    training = Training(Size(layers=layers, width=width, batch=batch), where)
    loss = training.run(steps)
    state = training.state()
    results["state"] = {"bytes": nbytes(state), "entropy bound": entropy_bound(state), "loss": loss}
    console.print(f"{results['machine']['gpu']['name']}, {results['date']}: {nbytes(state) / 1e9:.2f} GB, loss {loss:.3f}")

    with tempfile.TemporaryDirectory(prefix="raystow-gpu-save-", dir=store) as folder:
        root = Path(folder)
        makers = all_of(root, budget)
        for name in names:
            try:
                for count, row in contest(training, makers[name](), lengths, saves):
                    results["steps"][str(count)][name] = row
                    console.print(
                        f"{name}, {count} micro-batches: lost {row['lost ms']['median']:.1f} ms a save", highlight=False
                    )
                    keep()
            except Exception as error:  # a peer that is missing or fails must not end the run
                reason = f"{type(error).__name__}: {error}"
                console.print(f"{name} is skipped: {reason[:500]}", highlight=False, markup=False)
                for rows in results["steps"].values():
                    rows.setdefault(name, {"skipped": reason})
            clear(root)
            keep()
        if extras and where.type == "cuda":
            for name, row in idle(training, root, budget):
                results["idle"][name] = row
                keep()
            results["coders"] = coders(training.state())
            keep()
    report.show(console, tables(results), results["claims"])
    console.print(f"written to {file}")
    report.leave()


if __name__ == "__main__":
    typer.run(main)
