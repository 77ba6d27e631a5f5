"""Measure one training on all GPUs of a host, sharded by FSDP2: the cost of saves, and restores.

A GPT (``gpu_workload``, 4.3 billion parameters by default: 52 GB of fp32 weights and moments) trains on bytes of real text, with
bfloat16 compute and one process for each GPU. All contestants run in the same training, one after the other.

Method. As in ``gpu_save``, windows of steps with a save in the first alternate with windows without, and the time lost is a
window's excess over the mean of its neighbors. The ranks compute in lockstep, so rank 0's clock shows what any rank loses. A save
is durable when it is for the last rank. CPU seconds are those of the whole machine, without what it uses in the same time of
training. Restores read the store and fill the tensors on the GPUs, which are set to zero before; every rank then compares all
bits.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import psutil
import ray
import report
import torch
import torch.distributed as dist
import typer
from gpu_contestants import DCP, TORCH_CHECKPOINTING, Contestant, Dcp, Raystow, TorchCheckpointing, Wait
from gpu_save import Window, console_for_tables, style, window
from gpu_workload import GPT, Size, State, about, device_named, nbytes, tensors_of
from report import table_of
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

OURS = "raystow deflate"
UNCOMPARED = "raystow, replicas not compared"
CONTESTANTS = (OURS, UNCOMPARED, DCP, TORCH_CHECKPOINTING)
LAYOUTS = ("fsdp2", "hsdp", "plain")
BYTES = 256  # the vocabulary
now = time.perf_counter


class Ranked(Raystow):
    """raystow in one of several ranks. ``compared``: see ``Checkpointer``."""

    def __init__(self, root: Path, compared: str = "all") -> None:
        import raystow

        self._root = root
        rank, world = dist.get_rank(), dist.get_world_size()
        codec = raystow.Compression("deflate")
        self.checkpointer = raystow.Checkpointer(
            str(root), rank=rank, world_size=world, compression=codec, compare_replicas=compared
        )


class RankedDcp(Dcp):
    """DCP in one of several ranks, with a process group of its own, since it communicates while the training does."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._group = dist.new_group(backend="gloo")

    def _save(self, state: State) -> Wait:
        path, stager = str(self._path), self._stager
        wait: Wait = self._dcp.async_save(state, checkpoint_id=path, async_stager=stager, process_group=self._group).result
        return wait


class Training:
    """A GPT on all ranks: what ``gpu_save.window`` expects of a training. ``layout``: "fsdp2" shards it over all ranks. With the
    others each rank has all of it: "hsdp" as DTensors, "plain" as plain tensors."""

    def __init__(self, size: Size, device: torch.device, layout: str) -> None:
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=-5))
        torch.manual_seed(0)
        self.device, self.step, self._size = device, 0, size
        self._data = text(device)
        self._span = torch.arange(size.context + 1, device=device)
        self._plain = layout == "plain"
        world = dist.get_world_size()
        if layout == "fsdp2":
            mesh = init_device_mesh(device.type, (world,))
        else:
            mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        with torch.device("meta"):
            self._model = GPT(size)
        for part in (*self._model.blocks, self._model):
            fully_shard(part, mesh=mesh, mp_policy=mixed)
        self._model.to_empty(device=device)
        for parameter in self._model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        torch.manual_seed(dist.get_rank() + 1)

    def forward_backward(self) -> None:
        """Accumulate the gradients of one micro-batch of this rank."""
        starts = torch.randint(len(self._data) - self._size.context - 1, (self._size.batch, 1), device=self.device)
        batch = self._data[starts + self._span].long()
        logits = self._model(batch[:, :-1]).float().flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()).backward()

    def update(self) -> None:
        """Apply the optimizer, which changes the tensors of ``state``."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def state(self) -> State:
        """Return weights and moments without copies."""
        named, of = dict(self._model.named_parameters()), self._optimizer.state
        moments = {what: {name: of[one][what] for name, one in named.items()} for what in ("exp_avg", "exp_avg_sq")}
        state = {"weights": {name: one.detach() for name, one in named.items()}, **moments}
        if self._plain:
            state = {what: {name: one._local_tensor.detach() for name, one in of.items()} for what, of in state.items()}
        return state


def text(device: torch.device) -> Tensor:
    """Return the bytes of Python's library, uint8 [n]."""
    sources = sorted(Path(os.__file__).parent.rglob("*.py"))[:1500]
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8).to(device)


def parts(state: State) -> list[Tensor]:
    """Return this rank's part of each tensor."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors_of(state)]


class Rank:
    """One process of the training."""

    def __init__(self, rank: int, world: int, address: str, device: str, size: Size, layout: str) -> None:
        host, port = address.split(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
        self._training = Training(size, device_named(device), layout)
        self._contestant = Contestant()
        self._group = dist.new_group(backend="gloo")

    def about(self) -> dict[str, Any]:
        """Train a little; describe the machine, its software and the state."""
        for _ in range(20):
            self._training.forward_backward()
            self._training.update()
        return {**about(self._training.device), "bytes": nbytes(self._training.state()), "ranks": dist.get_world_size()}

    def use(self, name: str, root: str) -> None:
        """End with the contestant before, and begin with one in a new folder."""
        self._contestant.close()
        made: dict[str, Callable[[Path], Contestant]] = {OURS: Ranked, DCP: RankedDcp, TORCH_CHECKPOINTING: TorchCheckpointing}
        made[UNCOMPARED] = functools.partial(Ranked, compared="off")
        self._contestant = made[name](Path(root))

    def save(self, saves: int, every: int) -> dict[str, Any]:
        """Measure windows with and without a save."""
        with ThreadPoolExecutor(1) as pool:
            for _ in range(2):
                self._window(pool, 2, save=True)
            calm, saving = [self._window(pool, every, save=False)], list[tuple[Window, float]]()
            for _ in range(saves):
                saving.append(self._window(pool, every, save=True))
                calm.append(self._window(pool, every, save=False))
        around = list(itertools.pairwise(calm))
        lost = [
            1e3 * (sum(w.steps) - (sum(a.steps) + sum(b.steps)) / 2)
            for (w, _), ((a, _), (b, _)) in zip(saving, around, strict=True)
        ]
        cpu = [more - (a + b) / 2 for (_, more), ((_, a), (_, b)) in zip(saving, around, strict=True)]
        outcomes = [w.outcome.result() for w, _ in saving if w.outcome is not None]
        return {
            "step ms": 1e3 * statistics.median(t for w, _ in calm for t in w.steps),
            "lost ms": lost,
            "fence ms": [1e3 * w.fence for w, _ in saving],
            "durable s": [one.durable for one in outcomes],
            "cpu s": cpu,
            "stored": outcomes[-1].stored,
        }

    def restore(self, rounds: int) -> list[float]:
        """Save once and load several times; return seconds. ``SystemExit`` if a bit differs."""
        training, contestant = self._training, self._contestant
        into = training.state()
        kept = [part.clone() for part in parts(into)]
        wait = contestant.save(into, training.step)
        contestant.fence()
        wait()
        times = list[float]()
        for _ in range(rounds + 1):
            for part in parts(into):
                part.zero_()
            training.synchronize()
            dist.barrier(group=self._group)
            start = now()
            contestant.load(into)
            training.synchronize()
            times.append(now() - start)
            if not all(
                torch.equal(part.view(torch.int32), one.view(torch.int32)) for part, one in zip(parts(into), kept, strict=True)
            ):
                raise SystemExit("a tensor did not come back as it was saved")
        return times

    def _window(self, pool: ThreadPoolExecutor, steps: int, *, save: bool) -> tuple[Window, float]:
        """Run a window, and go on until its save is durable for all ranks. Return it, and the CPU seconds of the machine in that
        time, without those of the training, which are measured after it. The save is deleted between them, so that no rank
        saves again before it is."""
        training, contestant, before, begun = self._training, OnRankZero(self._contestant), machine_seconds(), now()
        found = window(training, contestant, pool, steps=steps, micro_batches=1, save=save)  # type: ignore[arg-type]
        while True:
            over = torch.tensor(found.outcome is None or found.outcome.done())
            dist.all_reduce(over, dist.ReduceOp.MIN, group=self._group)
            if over:
                break
            self._step()
        cpu, seconds = machine_seconds() - before, now() - begun
        if found.outcome is not None:
            found.outcome.result()
            contestant.discard()
        before, begun = machine_seconds(), now()
        for _ in range(steps):
            self._step()
        return found, cpu - (machine_seconds() - before) * seconds / (now() - begun)

    def _step(self) -> None:
        self._training.forward_backward()
        self._training.update()
        self._training.synchronize()


class OnRankZero(Contestant):
    """A contestant of which only rank 0 counts and deletes what is stored."""

    def __init__(self, of: Contestant) -> None:
        self._of, self._first = of, dist.get_rank() == 0

    def save(self, state: State, step: int) -> Wait:
        return self._of.save(state, step)

    def fence(self) -> None:
        self._of.fence()

    def stored(self) -> int:
        return self._of.stored() if self._first else 0

    def discard(self) -> None:
        if self._first:
            self._of.discard()


def machine_seconds() -> float:
    """Return the CPU seconds of all processes so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def merged(rows: list[dict[str, Any]], raw: int) -> dict[str, Any]:
    """Return the figures of all ranks: the time that rank 0 lost, and the last rank's time until a save was durable."""
    first = rows[0]
    lost = first["lost ms"]
    return {
        **first,
        "lost ms": {"median": statistics.median(lost), "min": min(lost), "max": max(lost), "all": lost},
        "fence ms": statistics.median(first["fence ms"]),
        "durable s": statistics.median(map(max, zip(*(row["durable s"] for row in rows), strict=True))),
        "cpu s/GB": statistics.median(first["cpu s"]) / (raw / 1e9),
        "ratio": first["stored"] / raw,
    }


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of saves and one of restores."""
    title = f"{results['bytes'] / 1e9:.1f} GB on {results['ranks']} GPUs"
    table = table_of(title, "step ms", "lost ms", "min", "max", "fence ms", "durable s", "CPU s/GB", "stored")
    for name, row in results["saves"].items():
        lost = row["lost ms"]
        cells = (row["step ms"], lost["median"], lost["min"], lost["max"], row["fence ms"])
        last = (f"{row['durable s']:.2f}", f"{row['cpu s/GB']:.2f}", f"{row['ratio']:.3f}")
        table.add_row(name, *(f"{cell:.0f}" for cell in cells), *last, style=style(name))
    yield table
    table = table_of(title, "restore s", "first", "GB/s")
    for name, row in results["restores"].items():
        table.add_row(name, f"{row['seconds']:.2f}", f"{row['first']:.2f}", f"{row['GB/s']:.1f}", style=style(name))
    yield table


def main(
    out: Annotated[Path, typer.Option(help="folder for the JSON file")] = Path(__file__).parent / "results",
    store: Annotated[Path, typer.Option(help="parent folder of the checkpoints, deleted at the end")] = Path("/dev/shm"),
    contestant: Annotated[list[str] | None, typer.Option(help="contestant to measure (repeatable); default: all")] = None,
    ranks: Annotated[int | None, typer.Option(help="processes; default: one for each GPU")] = None,
    saves: Annotated[int, typer.Option(min=1, help="measured windows with a save")] = 3,
    every: Annotated[int, typer.Option(min=1, help="steps of a window")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="measured restores")] = 2,
    layers: Annotated[int, typer.Option(help="of the model")] = 16,
    width: Annotated[int, typer.Option(help="of the model, a multiple of 64")] = 4096,
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    batch: Annotated[int, typer.Option(help="sequences of a micro-batch of a rank")] = 4,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial")] = "cuda",
    layout: Annotated[str, typer.Option(help=f"of the state: {', '.join(LAYOUTS)}")] = "fsdp2",
) -> None:
    """Measure saves and restores of one training on several GPUs."""
    console, names = console_for_tables(), report.chosen(contestant, CONTESTANTS)
    world = ranks or torch.cuda.device_count()
    size = Size(layers=layers, width=width, context=context, batch=batch, vocabulary=BYTES)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    gpus = torch.cuda.device_count()
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_gpus=gpus, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20, runtime_env=environment)
    actor = ray.remote(num_gpus=1 if device == "cuda" else 0, num_cpus=0)(Rank)
    group = [actor.remote(rank, world, "127.0.0.1:29541", device, size, layout) for rank in range(world)]
    results: dict[str, Any] = {**ray.get([one.about.remote() for one in group])[0], "saves": {}, "restores": {}}
    results["settings"] = {"saves": saves, "every": every, "rounds": rounds, "layout": layout, **vars(size)}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="raystow-gpu-ranks-", dir=store) as root:
            try:
                ray.get([one.use.remote(name, f"{root}/saves") for one in group])
                rows = ray.get([one.save.remote(saves, every) for one in group])
                results["saves"][name] = merged(rows, results["bytes"])
                ray.get([one.use.remote(name, f"{root}/restores") for one in group])  # which refers to no deleted version
                times = [max(of) for of in zip(*ray.get([one.restore.remote(rounds) for one in group]), strict=True)]
                seconds = statistics.median(times[1:])
                rate = results["bytes"] / 1e9 / seconds
                results["restores"][name] = {"seconds": seconds, "first": times[0], "GB/s": rate, "all": times}
            except ray.exceptions.RayError as error:
                console.print(f"{name} is skipped: {str(error)[-1500:]}", highlight=False, markup=False)
                break  # the ranks may wait for each other
            finally:
                report.keep(out, "gpu_ranks", results)
            shutil.rmtree(root, ignore_errors=True)
    report.show(console, tables(results), {})
    report.leave()


if __name__ == "__main__":
    typer.run(main)
