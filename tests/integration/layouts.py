"""Ranks that train one small model under any parallelism, save its state, and restore the states of other layouts."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

import raystow
from raystow.storage.versions.reader import PackReader
from raystow.storage.versions.runs import ByteRun

STEPS = 2
PATIENCE = datetime.timedelta(seconds=30)
GAP = 64 << 10  # bytes: the largest gap in a pack that a reader reads instead of skipping
SIDES = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 8: (4, 2)}


class Net(nn.Module):
    """A model with sizes that 3 and 8 do not divide, layers with fewer rows than ranks, an unparallelized layer, and a buffer."""

    def __init__(self, wide: int = 40) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, wide)
        self.down = nn.Linear(wide, 22)
        self.thin = nn.Linear(22, 3)
        self.odd = nn.Linear(3, 7, bias=False)
        self.register_buffer("seen", torch.rand(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.thin(self.down(self.up(self.norm(x)).relu())))


def build(layout: str, n: int, seed: int, tag: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model and its optimizer on a mesh of ``n`` ranks with one, two or three dimensions. ``tag`` makes the mesh
    names unique to a process group, because torch keeps the groups of a mesh after the process group is destroyed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model: nn.Module = Net()
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout != "plain":
        outer, inner = SIDES[n]
        sides = {
            "fsdp": {"dp": n},
            "hsdp": {"copies": outer, "dp": inner},
            "tp": {"tp": n},
            "tp_beside_dp": {"dp": outer, "tp": inner},
            "fsdp_tp": {"dp": outer, "tp": inner},
            "fsdp_tp_wide": {"dp": inner, "tp": outer},
            "hsdp_tp": {"copies": outer // 2, "dp": 2, "tp": inner},
        }[layout]
        mesh = init_device_mesh("cpu", tuple(sides.values()), mesh_dim_names=tuple(name + tag for name in sides))
        if "tp" in sides:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if sides["tp"] <= 3:  # torch's AdamW fails on tensors with fewer rows than ranks
                plan["thin"] = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, mesh["tp" + tag], plan)
        if "fsdp" in layout or "hsdp" in layout:
            within = mesh[tuple(name + tag for name in sides if name != "tp")]
            fully_shard(model.up, mesh=within)
            fully_shard(model, mesh=within)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)  # foreach fails: parameters are on several meshes


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """Train ``steps`` steps on the same data on every rank; return the losses as hexadecimal floats."""
    losses = []
    for step in range(steps):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = True) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": weights, "optim": moments}


def whole(node: Any, name: str = "") -> dict[str, Any]:
    """Return every leaf by name; a tensor is replaced by its dtype, its shape and the digest of its full value."""
    from torch.distributed.tensor import DTensor

    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return {leaf: value for key, child in items for leaf, value in whole(child, f"{name}.{key}").items()}
    if not isinstance(node, torch.Tensor):
        return {name: node}
    full = (node.full_tensor() if isinstance(node, DTensor) else node).detach().contiguous()
    raw = full.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {name: (str(full.dtype), tuple(full.shape), hashlib.blake2b(raw).hexdigest())}


class Reads:
    """Records the ranges of packs that restores in this process request, from any source."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        read = PackReader.read

        def spied(reader: PackReader, run: ByteRun, *args: Any) -> Any:
            self.ranges.append((run.key, run.start, run.length))
            return read(reader, run, *args)

        PackReader.read = spied  # type: ignore[method-assign]


class Member:
    """A process that can be any rank of any world size."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.reads = Reads()

    def ready(self) -> None:
        """Import the modules whose import is slow."""
        for module in ("checkpoint.state_dict", "fsdp", "tensor.parallel"):
            importlib.import_module(f"torch.distributed.{module}")

    @contextlib.contextmanager
    def group(self, where: str, rank: int, n: int) -> Iterator[None]:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=n, timeout=PATIENCE)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def save(self, where: str, rank: int, n: int, uri: str, layout: str, flat: bool) -> dict[str, Any]:
        """Train, save, and return the digests of the whole state and the losses of further training."""
        with self.group(where, rank, n), raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
            model, optimizer = build(layout, n, 1, Path(where).name)
            train(model, optimizer, STEPS)
            state = state_of(model, optimizer, flat=flat)
            pending = checkpointer.save(state, step=STEPS)
            saved_state = whole(state)
            checkpointer.fence()
            after = train(model, optimizer, STEPS)
            pending.result(60)
            return {"whole": saved_state, "after": after}

    def restore(self, where: str, rank: int, n: int, uri: str, layout: str, flat: bool, steps: int) -> dict[str, Any]:
        """Restore the newest version into a new model, and check the reads; return digests, decoded bytes and losses."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        with self.group(where, rank, n), raystow.Checkpointer(uri, memory=64 << 20) as checkpointer:
            model, optimizer = build(layout, n, 2, Path(where).name)
            state = state_of(model, optimizer, flat=flat)
            self.reads.ranges.clear()
            decoded: list[int] = []
            version = checkpointer.restore_latest(into=state, progress=decoded.append)
            ranges, expected = list(self.reads.ranges), overlapping(version, state)
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
            restored_state = whole(state_of(model, optimizer, flat=flat))
            check_reads(ranges, expected)
            assert sum(decoded) == sum(chunk.nbytes for chunk in expected)
            return {"whole": restored_state, "read": sum(decoded), "after": train(model, optimizer, steps)}

    def do(self, where: str, rank: int, n: int, what: Any, *args: Any) -> Any:
        """Call ``what(rank, n, *args)`` in a process group."""
        with self.group(where, rank, n):
            return what(rank, n, *args)


def overlapping(version: Any, state: dict[str, Any]) -> list[Any]:
    """Return the chunks of a version that overlap this rank's part of a state, computed by torch's resharding functions."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
    from torch.distributed.checkpoint.resharding import _check_shard_metadata_pair_overlap

    from raystow.state.tree import flatten

    found = []
    for leaf in flatten(state):
        if leaf.is_tensor:
            (mine,) = _create_chunk_list(leaf.value)
            for chunk in version.chunks[leaf.name]:
                saved = ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.extent))
                if 0 not in mine.sizes and _check_shard_metadata_pair_overlap(saved, mine):
                    found.append(chunk)
    return found


def check_reads(ranges: list[tuple[str, int, int]], expected: list[Any]) -> None:
    """Assert that the chunks in ``expected`` were read once from the packs, with only small gaps between them."""
    packs: dict[str, list[tuple[int, int]]] = {}
    for chunk in expected:
        if chunk.coding.size:
            key = f"{chunk.group}-{chunk.node:05d}-{chunk.pack:05d}.pack"
            packs.setdefault(key, []).append((chunk.start, chunk.start + chunk.coding.size))
    read: dict[str, list[tuple[int, int]]] = {}
    for key, start, length in ranges:
        read.setdefault(key.rsplit("/", 1)[1], []).append((start, start + length))
    assert read.keys() == packs.keys(), f"read {ranges}"
    for key, spans in read.items():
        for start, end in spans:
            inside = sorted(span for span in packs[key] if start <= span[0] and span[1] <= end)
            assert (start, end) == (inside[0][0], inside[-1][1])
            assert all(after[0] - before[1] <= GAP for before, after in itertools.pairwise(inside))
        ends = sorted(spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends)), "a byte was read twice"
        assert all(any(start <= a and b <= end for start, end in spans) for a, b in packs[key])


class ProcessGroup:
    """Processes, of which the first ``n`` form a process group for each call. A call starts missing processes."""

    def __init__(self, folder: Any) -> None:
        self._folder, self._calls = folder, 0
        self._members: list[Any] = []

    def call(self, method: str, n: int, *args: Any, timeout: float = 120) -> list[Any]:
        """Call a method on the first ``n`` processes, and return each rank's result."""
        self._calls += 1
        self._start(n)
        where = str(self._folder / f"group-{self._calls}")
        return ray.get(
            [getattr(member, method).remote(where, rank, n, *args) for rank, member in enumerate(self._members[:n])],
            timeout=timeout,
        )

    def _start(self, n: int) -> None:
        lacking = [("node_a", "node_b")[i % 2] for i in range(len(self._members), n)]
        new = [ray.remote(Member).options(num_cpus=0, resources={node: 1}).remote() for node in lacking]
        ray.get([member.ready.remote() for member in new], timeout=180)
        self._members += new

    def close(self) -> None:
        for member in self._members:
            ray.kill(member)
